"""Loading of a decoder, its Liger kernels, and compilation and activation checkpointing of its layers."""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch.fx.experimental import _config as shapes_config
from torch.utils.checkpoint import checkpoint
from transformers.models.llama import modeling_llama as llama

from abrun.errors import RecipeError
from abrun.recipe.policy import Policy
from abrun.trainer.backends.attention import enable_streams

STOCK_ROTATION = llama.apply_rotary_pos_emb
STOCK_VALUES: dict[tuple[ModuleType, str], Any] = {}  # of the names that Liger has replaced


def prepare_layers(layers: Iterable[nn.Module], policy: Policy) -> None:
    """Compile each layer's forward pass and checkpoint its activations, as the policy asks.

    Both replace the layer's `forward`, so FSDP's hooks stay outside and run once. Lengths are dynamic and the
    layers share their code, so one compilation serves all layers and microbatches. Microbatches of a single
    row need another one, because torch specialises on a size of 1: packed ones always, padded ones seldom.
    """
    for layer in layers:
        if policy.compile:
            _replace_rotation(sys.modules[type(layer).__module__])
        forward: Callable[..., Any] = layer.forward
        if policy.compile:
            forward = functools.partial(_run_compiled, torch.compile(forward, dynamic=True))
        if policy.activation_checkpointing == "selective":
            forward = functools.partial(_run_with_graphs_recomputed, forward)
        elif policy.activation_checkpointing == "full":
            forward = functools.partial(_run_checkpointed, forward)
        layer.forward = forward  # pyright: ignore[reportAttributeAccessIssue]


def load_checked(load_network: Callable[[], Any], policy: Policy) -> Any:
    """Load a network, prepare it for packed sequences, and give it Liger's kernels, as the policy asks.

    The checks of loading and packing run on the CPU, which Liger has no kernels for, and so on stock modules.
    """
    with _stock_modules():
        network = load_network()
        enable_streams(network, policy)
    if policy.liger:
        _apply_liger_kernels(network)
    return network


def _apply_liger_kernels(network: Any) -> None:
    """Replace a network's norms, rotary embeddings and SwiGLU by Liger's kernels.

    Liger also replaces names in transformers' module of the family, and so all its networks in this process.
    Raises RecipeError if Liger has no kernels for the model family. The head remains abrun's.
    """
    from liger_kernel.transformers import monkey_patch  # pyright: ignore[reportMissingImports]

    family = network.config.model_type
    apply_kernels = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN.get(family)
    if apply_kernels is None:
        raise RecipeError(
            f"policy.liger: got true with a model of type {family!r}, which Liger has no kernels for; "
            "use false"
        )
    module = sys.modules[type(network).__module__]
    stock = dict(vars(module))
    apply_kernels(model=network, cross_entropy=False, fused_linear_cross_entropy=False)
    for name, value in stock.items():
        if getattr(module, name) is not value:
            STOCK_VALUES.setdefault((module, name), value)


@contextlib.contextmanager
def _stock_modules() -> Iterator[None]:
    """Undo Liger's changes to transformers' modules while the context is open."""
    changed = {place: getattr(*place) for place in STOCK_VALUES}
    for (module, name), value in STOCK_VALUES.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name), value in changed.items():
            setattr(module, name, value)


def _run_compiled(forward: Callable[..., Any], *inputs: Any, **settings: Any) -> Any:
    """Run a compiled forward with settings that torch.compile has no arguments for.

    They apply to these layers alone, because vLLM may compile in the same process.
    """
    with (
        # Otherwise a float such as a norm's epsilon is first compiled as dynamic and then again as a
        # constant. The first attempt is never cached.
        dynamo_config.patch(specialize_float=True),
        # Otherwise equal sizes, such as a microbatch's rows and the constant head size, share a symbol.
        shapes_config.patch(use_duck_shape=False),  # pyright: ignore[reportAttributeAccessIssue]
        # The cache key includes the traced forward and backward code of custom functions.
        functorch_config.patch(autograd_cache_allow_custom_autograd_functions=True),
    ):
        return forward(*inputs, **settings)


def _run_checkpointed(forward: Callable[..., Any], *inputs: Any, **settings: Any) -> Any:
    """Keep only a layer's inputs, and recompute it in the backward pass.

    The random state is not restored, because models that draw random numbers are refused.
    """
    if not torch.is_grad_enabled():
        return forward(*inputs, **settings)
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **settings)


def _run_with_graphs_recomputed(forward: Callable[..., Any], *inputs: Any, **settings: Any) -> Any:
    """Run a layer, saving only the inputs of its compiled graphs and what attention between them saves.

    Selective checkpointing by operator was no faster than recomputing whole layers, and took 20 GiB more.
    """
    with functorch_config.patch(activation_memory_budget=0.0):  # read when a graph is compiled
        return forward(*inputs, **settings)


def _replace_rotation(family: Any) -> None:
    """Let a family's layers apply rotary embeddings in memory order, with bit-identical results.

    transformers rotates [B, heads, S, D], views of [B, S, heads, D]. Compiled kernels for those views divide
    by a dynamic length, and attention then needs a copy. Families with their own rotation keep it.
    """
    stock = {"apply_rotary_pos_emb": STOCK_ROTATION, "rotate_half": llama.rotate_half}
    if all(_has_same_code(getattr(family, name, None), function) for name, function in stock.items()):
        family.apply_rotary_pos_emb = _apply_rotary


def _has_same_code(function: Any, stock: Callable[..., Any]) -> bool:
    """Return whether two functions have the same code, docstrings aside."""
    codes = [
        getattr(inspect.unwrap(candidate), "__code__", None)
        for candidate in (function, stock)
        if candidate is not None
    ]
    contents = [(code.co_code, code.co_names, code.co_consts[1:]) for code in codes if code is not None]
    return len(contents) == 2 and contents[0] == contents[1]


def _apply_rotary(
    query: Tensor,  # [B, heads, S, D]
    key: Tensor,  # [B, key heads, S, D]
    cos: Tensor,  # [B, S, D]
    sin: Tensor,
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """Apply rotary position embeddings (arXiv:2104.09864, section 3.4.2) to pairs from the two halves."""
    if unsqueeze_dim != 1:  # states are [B, S, heads, D]
        return STOCK_ROTATION(query, key, cos, sin, unsqueeze_dim)
    half = query.shape[-1] // 2  # static for torch.compile, unlike the last size of cos and sin
    halves = [tensor[:, :, None].unflatten(-1, (2, half)).unbind(-2) for tensor in (cos, sin)]
    query, key = (_rotate_halves(tensor.transpose(1, 2), *halves).transpose(1, 2) for tensor in (query, key))
    return query, key


def _rotate_halves(
    states: Tensor,  # [B, S, heads, D]
    cos: tuple[Tensor, ...],  # for the first and the second half, [B, S, 1, D/2] each
    sin: tuple[Tensor, ...],
) -> Tensor:
    """Rotate the halves of each head. Unlike slices, unbind needs no padding in the backward pass."""
    first_half, second_half = states.unflatten(-1, (2, -1)).unbind(-2)
    rotated = first_half * cos[0] - second_half * sin[0], second_half * cos[1] + first_half * sin[1]
    return torch.stack(rotated, dim=-2).flatten(-2)
