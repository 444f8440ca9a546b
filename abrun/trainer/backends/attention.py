"""Causal attention within each sequence of a packed stream, registered with transformers.

Letters: T tokens of this rank, K keys (T without context parallelism), D head size.
"""

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from abrun.errors import RecipeError
from abrun.recipe.families import stream_setting
from abrun.recipe.policy import Policy
from abrun.trainer.backends.context import Order, Spans
from abrun.trainer.backends.microbatches import Packing, make_packing
from abrun.trainer.models.checks import (
    agree,
    draw_plain_tokens,
    logits_of,
    nested_configs,
    restored_afterwards,
)
from abrun.trainer.models.families import Facts, facts_of
from abrun.trainer.models.weights import small_twin

# torch.compile traces through the first and breaks its graph at the second.
TRACED_ATTENTION, EAGER_ATTENTION = "abrun_packed", "abrun_packed_apart"
# transformers uses a four-dimensional mask unchanged, so it does not build a T x T one.
NO_MASK_SHAPE = (1, 1, 0, 0)
# torch 2.11 has no such argument: it shares key and value heads by itself.
SHARED_HEADS = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
# [N, heads, queries, D], keys and values [N, key heads, keys, D], mask -> [N, queries, heads, D]
AttendSpans = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


class PackingHandle:
    """A plain holder of a packing, which FSDP would copy at every layer if it received the dataclass."""

    def __init__(self, packing: Packing) -> None:
        self.packing = packing


def enable_streams(network: Any, policy: Policy) -> None:
    """Replace the network's attention by one that accepts a packed stream, if the recipe packs.

    Raises RecipeError if the network computes different results in a stream (see measure_stream_deviation).
    """
    setting = stream_setting(policy)
    if setting is None:
        return
    key, alternative = setting
    name = EAGER_ATTENTION if policy.activation_checkpointing == "selective" else TRACED_ATTENTION
    sample = small_twin(network) if hasattr(network, "checkpoint") else network
    try:
        deviation = measure_stream_deviation(
            sample,
            facts_of(sample),
            lambda: _replace_attention(sample, name),
            share_prompts=policy.share_prompts,
        )
        if sample is not network:
            _replace_attention(network, name)
    except Exception as error:  # about 200 third-party forward passes, which can raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        raise RecipeError(
            f"{key} with {type(network).__name__}, which fails on packed sequences: {reason}; "
            f"use {alternative}"
        ) from error
    if deviation is not None:
        module = deviation.module or "head"
        raise RecipeError(
            f"{key} with {type(network).__name__}, whose {module} gives different results for packed "
            f"sequences than for padded rows: log-probs differ by up to {deviation.nats:.2g} nats in a "
            f"self-check on a few tokens; use {alternative}"
        )


def _replace_attention(network: Any, name: str) -> None:
    network.set_attn_implementation(name)
    if network.config._attn_implementation != name:  # transformers only warns if it cannot
        raise ValueError("transformers cannot replace its attention")


def hidden_states(base_model: Any, token_ids: Tensor, packing: Packing | None) -> Tensor:
    """Return the last hidden states: [B, S, H] of right-padded rows, or of this rank's stream [1, T, H].

    Padding follows every real token, so causal attention never sees it and no mask is passed.
    """
    if packing is None:
        with _without_packing_detection():
            return base_model(input_ids=token_ids, use_cache=False).last_hidden_state
    position_ids = packing.position_ids
    if packing.split is not None:
        token_ids, position_ids = packing.split.to_local(token_ids), packing.split.to_local(position_ids)
    return base_model(
        input_ids=token_ids,
        position_ids=position_ids,
        attention_mask=torch.empty(NO_MASK_SHAPE, dtype=torch.bool, device=token_ids.device),
        packing=PackingHandle(packing),
        use_cache=False,
    ).last_hidden_state


@contextlib.contextmanager
def _without_packing_detection() -> Iterator[None]:
    """Disable transformers' search for several sequences in a row, which makes the CPU wait for the GPU."""
    find_packed_sequences = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find_packed_sequences


def _packed_attention(
    module: nn.Module,
    query: Tensor,  # [B, heads, S, D], or [1, heads, T, D] with a packing
    key: Tensor,  # [..., key heads, ..., D]
    value: Tensor,
    attention_mask: Tensor | None,
    packing: PackingHandle | None = None,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:  # [B, S, heads, D]
    """Compute causal attention within each sequence of a stream; without a packing, call transformers'."""
    stream_packing = None if packing is None else packing.packing
    if stream_packing is not None and stream_packing.split is None and _can_use_varlen_kernel(query):
        return _varlen_attention(query, key, value, stream_packing.spans, scaling)[None], None
    return _eager_attention(module, query, key, value, attention_mask, stream_packing, scaling, **settings)


@torch.compiler.disable()
def _eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Packing | None,
    scaling: float | None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Compute attention uncompiled: span bounds differ by microbatch, and each would be compiled for."""
    if packing is None:
        if attention_mask is not None and attention_mask.numel() == 0:
            raise ValueError(f"{type(module).__name__} does not pass on the argument `packing`")
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **settings)

    def attend_spans(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return sdpa_attention_forward(module, q, k, v, mask, scaling=scaling, **settings)[0]

    return attend_in_stream(query, key, value, packing, scaling, attend_spans), None


def attend_in_stream(
    query: Tensor,  # [1, heads, T, D]
    key: Tensor,  # [1, key heads, T, D]
    value: Tensor,
    packing: Packing,
    scaling: float | None,
    attend_spans: AttendSpans,
) -> Tensor:  # [1, T, heads, D]
    """Compute causal attention of this rank's tokens within each sequence.

    Collective if ranks share the stream. Half precision on a GPU uses FlashAttention's variable-length
    kernel. Everything else calls `attend_spans` once for all N spans with equal numbers of queries and keys.
    Results agree to rounding.
    """
    if packing.split is not None:
        widths = [key.shape[-1], value.shape[-1]]  # they differ in multi-head latent attention
        key, value = packing.split.gather_keys(torch.cat([key, value], dim=-1)).split(widths, dim=-1)
    if _can_use_varlen_kernel(query):
        return _varlen_attention(query, key, value, packing.spans, scaling)[None]
    return _attend_by_shape(query, key, value, packing.spans, attend_spans)[None]


def _attend_by_shape(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, attend_spans: AttendSpans
) -> Tensor:  # [T, heads, D]
    # Spans of one shape are rows of one batch: stacked, they need no padding and one call.
    sorted_spans = spans.by_shape
    keys_and_values = (
        _reorder(states[: sorted_spans.num_keys], sorted_spans.key_order)
        for states in _select_keys(key, value, spans)
    )
    q, k, v = _reorder(_flatten(query), sorted_spans.query_order), *keys_and_values
    query_sizes = [count * num_queries for count, num_queries, _ in sorted_spans.shapes]
    key_sizes = [count * num_keys for count, _, num_keys in sorted_spans.shapes]

    outputs = []
    for (count, num_queries, num_keys), *states in zip(
        sorted_spans.shapes, q.split(query_sizes), k.split(key_sizes), v.split(key_sizes), strict=True
    ):
        queries, keys, values = (each.unflatten(0, (count, -1)).transpose(1, 2) for each in states)
        mask = _causal_mask(num_queries, num_keys, query.device)
        outputs.append(attend_spans(queries, keys, values, mask).flatten(0, 1))

    order = sorted_spans.query_order
    stream_order = None if order is None else Order(order.inverse, order.positions)
    return _reorder(torch.cat(outputs), stream_order)


def _can_use_varlen_kernel(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


def _varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, scaling: float | None
) -> Tensor:  # [T, heads, D]
    q, (k, v) = _flatten(query), _select_keys(key, value, spans)
    causal: Any = {"window_size": (-1, 0), "scale": scaling} | SHARED_HEADS
    lengths = spans.query_starts, spans.key_starts, spans.longest_query, spans.longest_key
    return varlen_attn(q, k, v, *lengths, **causal)  # pyright: ignore[reportReturnType]


def _flatten(states: Tensor) -> Tensor:  # [1, heads, T or K, D] -> [T or K, heads, D]
    # `states[0]` would add a scatter into zeros to the backward pass.
    return states.squeeze(0).transpose(0, 1)


def _select_keys(key: Tensor, value: Tensor, spans: Spans) -> Sequence[Tensor]:
    """Return the keys and the values of all spans, [keys of all spans or more, heads, D] each."""
    keys_and_values = _flatten(key), _flatten(value)
    if spans.repeated is not None:
        key_layout = (
            spans.key_index,
            spans.repeated.first_positions,
            spans.repeated.repeated_keys,
            spans.repeated.repeat_positions,
        )
        return [_SelectKeys.apply(states, *key_layout) for states in keys_and_values]
    if spans.key_index is not None:
        return [states[spans.key_index] for states in keys_and_values]
    return keys_and_values


def _reorder(states: Tensor, order: Order | None) -> Tensor:
    return states if order is None else _Reorder.apply(states, order)


def _causal_mask(num_queries: int, num_keys: int, device: torch.device) -> Tensor | None:
    """Return the mask [1, 1, queries, keys] bool, or None if plain causal attention is right.

    It is if queries and keys are the same tokens.
    """
    if num_queries == num_keys:
        return None
    return torch.ones(1, 1, num_queries, num_keys, dtype=torch.bool, device=device).tril(
        num_keys - num_queries
    )


class _Reorder(torch.autograd.Function):
    """Permutes the first dimension. Its gradient is permuted back, where plain indexing would add."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, order: Order) -> Tensor:
        ctx.inverse = order.inverse
        return states[order.positions]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0][ctx.inverse], None


class _SelectKeys(torch.autograd.Function):
    """Selects the keys of all spans. A repeated key's gradient is summed in one order, in float32 or better.

    Plain indexing would sort in each backward pass, or add atomically and so not reproducibly.
    """

    @staticmethod
    def forward(  # [T, heads, D], [keys of all spans] -> [keys of all spans, heads, D]
        ctx: Any,
        states: Tensor,
        index: Tensor,
        first_positions: Tensor,
        repeated_keys: Tensor,
        repeat_positions: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(first_positions, repeated_keys, repeat_positions)
        return states[index]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (first_positions, repeated_keys, repeat_positions) = gradients, ctx.saved_tensors
        first_gradients = gradient[first_positions]
        repeat_gradients = gradient[repeat_positions.clamp(min=0)].masked_fill(
            (repeat_positions < 0)[..., None, None], 0
        )
        sum_dtype = torch.promote_types(gradient.dtype, torch.float32)
        total_gradients = first_gradients[repeated_keys].to(sum_dtype) + repeat_gradients.sum(
            dim=1, dtype=sum_dtype
        )
        total_gradients = total_gradients.to(first_gradients.dtype)
        return first_gradients.index_copy(0, repeated_keys, total_gradients), *(None,) * 4


AttentionInterface.register(TRACED_ATTENTION, _packed_attention)
AttentionInterface.register(EAGER_ATTENTION, torch.compiler.disable(_packed_attention))
for name in (TRACED_ATTENTION, EAGER_ATTENTION):
    AttentionMaskInterface.register(name, masking_utils.sdpa_mask)


# A self-check on load: every module must compute the same for a sequence in a stream as for a padded row.
# Windowed and linear attention, state-space layers, convolutions and modules that count positions
# themselves can mix up the sequences of a stream. A few tokens reveal all of them, because the check
# shortens attention windows and chunks below the length of its sequences. It compares modules one by one:
# the effect on log-probs depends on the weights and can be small.
# Letters: B sequences of S tokens, T = B * S tokens in their stream.

# Fields of modules and configurations that limit how far a token attends; `sliding_window_pattern` does not.
WINDOWS = re.compile(r"window(_size)?$|attention_chunk_size$")
WINDOW = 3
# Two seeds: rounding can route a token to another expert, but it is unlikely to do so for both sets of
# tokens.
SEEDS = (0, 1)


class Deviation(NamedTuple):
    """The first module whose outputs differ between stream and rows, and the effect on log-probs."""

    module: str
    nats: float  # largest difference of log-probs


def measure_stream_deviation(
    network: Any,
    facts: Facts,
    enable: Callable[[], None],
    *,
    share_prompts: bool,
) -> Deviation | None:
    """Return how a network's stream differs from its rows; None if they agree to rounding.

    Runs the network on rows, then calls `enable`, which replaces its attention, and runs it on the stream.
    Leaves weights, buffers, modes and the random-number generator as they were.
    """
    batches = [draw_plain_tokens(network, facts, seed=seed) for seed in SEEDS]  # [B, S] each
    rows, length = batches[0].shape
    shared = [0, length // 2] if share_prompts else None  # plain_tokens gives both rows the same prompt
    packing = make_packing([length] * rows, length, batches[0].device, shared=shared)
    deviation = None
    with restored_afterwards(network), torch.no_grad():
        network.eval()
        with short_windows(network):
            expected = [_record_outputs(network, facts, tokens, None) for tokens in batches]
        enable()
        with short_windows(network):
            for tokens, row_outputs in zip(batches, expected, strict=True):
                stream_outputs = _record_outputs(network, facts, packing.pack(tokens), packing)
                deviation = _compare_outputs(row_outputs, stream_outputs)
                if deviation is None:
                    return None
    return deviation


def _record_outputs(network: Any, facts: Facts, tokens: Tensor, packing: Packing | None) -> dict[str, Tensor]:
    """Return the outputs [B, S, ...] of modules with submodules, in execution order, then the logits."""
    outputs: dict[str, Tensor] = {}

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            states = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", output)
            if isinstance(states, Tensor) and states.shape[:2] == tokens.shape:
                outputs[name] = states if packing is None else packing.unpack_with_prompts(states)

        return hook

    containers = [(name, module) for name, module in network.named_modules() if next(module.children(), None)]
    hooks = [module.register_forward_hook(record(name)) for name, module in containers]
    try:
        hidden = hidden_states(facts.base, tokens, packing)
    finally:
        for hook in hooks:
            hook.remove()
    logits = logits_of(facts, hidden)
    return outputs | {"": logits if packing is None else packing.unpack_with_prompts(logits)}


def _compare_outputs(rows: dict[str, Tensor], stream: dict[str, Tensor]) -> Deviation | None:
    differing = (
        name for name in stream if name in rows and not agree(stream[name].float(), rows[name].float())
    )
    module = next(differing, None)
    if module is None:
        return None
    difference = stream[""].log_softmax(dim=-1) - rows[""].log_softmax(dim=-1)
    return Deviation(module, float(difference.abs().max()))


@contextlib.contextmanager
def short_windows(network: Any) -> Iterator[None]:
    """Shorten all windows and chunks of attention to `WINDOW` tokens while the context is open."""
    owners = {id(module): module for module in network.modules()}
    for module in list(owners.values()):
        owners |= {id(config): config for config in nested_configs(getattr(module, "config", None))}
    windows = [
        (owner, name, value)
        for owner in owners.values()
        for name, value in vars(owner).items()
        if WINDOWS.search(name) and type(value) is int and value > WINDOW
    ]
    try:
        for owner, name, _ in windows:
            setattr(owner, name, WINDOW)
        yield
    finally:
        for owner, name, value in windows:
            setattr(owner, name, value)
