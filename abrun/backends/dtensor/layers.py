"""What a decoder's layers do besides what transformers gives them: compiled, and computed again backwards."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
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

STOCK_ROTATION = llama.apply_rotary_pos_emb


def prepare_layers(layers: Iterable[nn.Module], policy: Policy) -> None:
    """Compile each layer's forward pass, and compute it again in the backward pass, where the policy says so.

    Both replace the layer's method `forward`, so that FSDP's hooks stay outside and run once. Lengths are
    dynamic, and the layers share their code: one compilation serves all of them and any microbatch, but for
    one of a single row, for which torch takes a constant: packed ones always are, padded ones seldom.
    """
    for layer in layers:
        if policy.compile:
            _rotate_position_by_position(sys.modules[type(layer).__module__])
        forward: Callable[..., Any] = layer.forward
        if policy.compile:
            forward = functools.partial(_compiled, torch.compile(forward, dynamic=True))
        if policy.activation_checkpointing == "selective":
            forward = functools.partial(_graphs_again, forward)
        elif policy.activation_checkpointing == "full":
            forward = functools.partial(_computed_again, forward)
        layer.forward = forward  # pyright: ignore[reportAttributeAccessIssue]


def take_liger_kernels(network: Any, policy: Policy) -> None:
    """Let Liger compute a network's norms, rotary embeddings and SwiGLU, where the policy says so.

    Raises RecipeError where it has no kernels for the family. The head stays abrun's.
    """
    if not policy.liger:
        return
    from liger_kernel.transformers import monkey_patch  # pyright: ignore[reportMissingImports]

    family = network.config.model_type
    take = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN.get(family)
    if take is None:
        raise RecipeError(
            f"policy.liger: got true with a model of type {family!r}, which Liger has no kernels for; "
            "use false"
        )
    take(model=network, cross_entropy=False, fused_linear_cross_entropy=False)


def _compiled(forward: Callable[..., Any], *inputs: Any, **more: Any) -> Any:
    """With what no argument of torch.compile says, for these layers alone: vLLM may compile here, too."""
    with (
        # A number such as a norm's epsilon would be taken for one that changes, and in a second try for a
        # constant. The first try is in no cache.
        dynamo_config.patch(specialize_float=True),
        # Sizes that are equal would be taken for one, such as a microbatch's rows and a head's, a constant.
        shapes_config.patch(use_duck_shape=False),  # pyright: ignore[reportAttributeAccessIssue]
        # Their traced code, forwards and backwards, is a part of the key that a graph is cached under.
        functorch_config.patch(autograd_cache_allow_custom_autograd_functions=True),
    ):
        return forward(*inputs, **more)


def _computed_again(forward: Callable[..., Any], *inputs: Any, **more: Any) -> Any:
    """Only a layer's inputs are kept until then. It draws no random numbers: models that do are refused."""
    if not torch.is_grad_enabled():
        return forward(*inputs, **more)
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **more)


def _graphs_again(forward: Callable[..., Any], *inputs: Any, **more: Any) -> Any:
    """The compiled parts of a layer keep their inputs alone, and attention between them keeps what it needs.

    (Selective checkpointing of operators one by one was no faster than a whole layer again, for 20 GiB more.)
    """
    with functorch_config.patch(activation_memory_budget=0.0):  # read when a part is compiled
        return forward(*inputs, **more)


def _rotate_position_by_position(family: Any) -> None:
    """Let a family's layers rotate queries and keys as they lie in memory, to the same bits.

    transformers rotates [B, heads, S, D], views of [B, S, heads, D]. Of those a compiler makes kernels that
    divide by a length known only when they run, and a copy for the attention that follows. Families with a
    rotation of their own keep it.
    """
    stock = {"apply_rotary_pos_emb": STOCK_ROTATION, "rotate_half": llama.rotate_half}
    if all(_does(getattr(family, name, None), function) for name, function in stock.items()):
        family.apply_rotary_pos_emb = _rotated


def _does(function: Any, stock: Callable[..., Any]) -> bool:
    """Whether a function has another's code, whatever its docstring."""
    codes = [getattr(inspect.unwrap(one), "__code__", None) for one in (function, stock) if one is not None]
    contents = [(code.co_code, code.co_names, code.co_consts[1:]) for code in codes if code is not None]
    return len(contents) == 2 and contents[0] == contents[1]


def _rotated(
    query: Tensor,  # [B, heads, S, D]
    key: Tensor,  # [B, key heads, S, D]
    cos: Tensor,  # [B, S, D]
    sin: Tensor,
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """Rotary position embeddings (arXiv:2104.09864, section 3.4.2), halves rotated with each other."""
    if unsqueeze_dim != 1:  # of states [B, S, heads, D]
        return STOCK_ROTATION(query, key, cos, sin, unsqueeze_dim)
    half = query.shape[-1] // 2  # which a compiler knows, as it does not know the tables' last size
    halves = [each[:, :, None].unflatten(-1, (2, half)).unbind(-2) for each in (cos, sin)]
    query, key = (_turned(each.transpose(1, 2), *halves).transpose(1, 2) for each in (query, key))
    return query, key


def _turned(
    states: Tensor,  # [B, S, heads, D]
    cos: tuple[Tensor, ...],  # of the first half and of the second [B, S, 1, D/2]
    sin: tuple[Tensor, ...],
) -> Tensor:
    """Without a slice, whose way back would be a sum of padded halves."""
    first, second = states.unflatten(-1, (2, -1)).unbind(-2)
    turned = first * cos[0] - second * sin[0], second * cos[1] + first * sin[1]
    return torch.stack(turned, dim=-2).flatten(-2)
