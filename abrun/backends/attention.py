"""Causal attention inside each sequence of a stream, registered with transformers under a name of its own.

Letters: T tokens of this rank, K keys (the stream's: T without context parallelism), D a head's size.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from abrun.backends.context import Span, Spans
from abrun.backends.packing import Packing
from abrun.backends.stream_check import stream_deviation
from abrun.errors import RecipeError
from abrun.models import facts_of, small_twin
from abrun.recipe.families import stream_setting
from abrun.recipe.policy import Policy

# A compiler sees through the first, and ends its graph at the second.
ATTENTION, APART = "abrun_packed", "abrun_packed_apart"
# transformers takes a mask of four dimensions as it is, and so builds none of T x T.
NO_MASK_SHAPE = (1, 1, 0, 0)
# torch 2.11 shares heads of keys and values without being told.
SHARED_HEADS = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


class Handed:
    """A packing on its way through the layers: at each, FSDP would go through a dataclass, and copy it."""

    def __init__(self, packing: Packing) -> None:
        self.packing = packing


def enable_streams(network: Any, policy: Policy) -> None:
    """Make the network's attention one that takes a stream, where the recipe needs that.

    Raises RecipeError where the network computes something else in a stream (see stream_check).
    """
    setting = stream_setting(policy)
    if setting is None:
        return
    asked, instead = setting
    name = APART if policy.activation_checkpointing == "selective" else ATTENTION
    sample = small_twin(network) if hasattr(network, "checkpoint") else network
    try:
        deviation = stream_deviation(
            sample,
            facts_of(sample),
            hidden_states,
            lambda: _replace_attention(sample, name),
            share_prompts=policy.share_prompts,
        )
        if sample is not network:
            _replace_attention(network, name)
    except Exception as error:  # some 200 foreign forward passes: what they raise in a stream is theirs
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        raise RecipeError(
            f"{asked} with {type(network).__name__}, which cannot compute a stream of sequences: {reason}; "
            f"use {instead}"
        ) from error
    if deviation is not None:
        module = deviation.module or "head"
        raise RecipeError(
            f"{asked} with {type(network).__name__}, whose {module} computes something else in a stream of "
            f"sequences than in padded rows: log-probs differ by up to {deviation.nats:.2g} nats on a few "
            f"tokens; use {instead}"
        )


def _replace_attention(network: Any, name: str) -> None:
    network.set_attn_implementation(name)
    if network.config._attn_implementation != name:  # transformers has warned, and left it
        raise ValueError("transformers cannot replace its attention")


def hidden_states(base_model: Any, token_ids: Tensor, packing: Packing | None) -> Tensor:
    """The last hidden states [B, S, H] of right-padded rows, or of a stream: [1, T, H], of own tokens.

    Padding stands after every real token, so causal attention never sees it and no mask is passed.
    """
    if packing is None:
        with _rows_of_one_sequence():
            return base_model(input_ids=token_ids, use_cache=False).last_hidden_state
    position_ids = packing.position_ids
    if packing.split is not None:
        token_ids, position_ids = packing.split.cut(token_ids), packing.split.cut(position_ids)
    return base_model(
        input_ids=token_ids,
        position_ids=position_ids,
        attention_mask=torch.empty(NO_MASK_SHAPE, dtype=torch.bool, device=token_ids.device),
        packing=Handed(packing),
        use_cache=False,
    ).last_hidden_state


@contextlib.contextmanager
def _rows_of_one_sequence() -> Iterator[None]:
    """transformers looks for several in a row, in positions that it has just made, and the CPU waits for what
    the GPU says."""
    looks = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = looks


def _attention(
    module: nn.Module,
    query: Tensor,  # [B, heads, S, D], or [1, heads, T, D] with a packing
    key: Tensor,  # [..., key heads, ..., D]
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Handed | None = None,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:  # [B, S, heads, D]
    """Causal attention inside each sequence of a stream; without a packing, transformers' own."""
    stream = None if packing is None else packing.packing
    if stream is not None and stream.split is None and _has_kernel(query):
        return _by_kernel(query, key, value, stream.spans, scaling)[None], None
    return _apart(module, query, key, value, attention_mask, stream, scaling, **settings)


@torch.compiler.disable()
def _apart(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Packing | None,
    scaling: float | None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """What loops over a stream's sequences: in each microbatch other numbers, that would be compiled for."""
    if packing is None:
        if attention_mask is not None and attention_mask.numel() == 0:
            raise ValueError(f"{type(module).__name__} does not pass on where sequences begin")
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **settings)

    def of_span(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return sdpa_attention_forward(module, q, k, v, mask, scaling=scaling, **settings)[0]

    return attend_in_stream(query, key, value, packing, scaling, of_span), None


def attend_in_stream(
    query: Tensor,  # [1, heads, T, D]
    key: Tensor,  # [1, key heads, T, D]
    value: Tensor,
    packing: Packing,
    scaling: float | None,
    of_span: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
) -> Tensor:  # [1, T, heads, D]
    """Causal attention of this rank's tokens inside each sequence; where ranks share the stream, collective.

    FlashAttention's kernel for sequences of different lengths takes half precision on a GPU; anything else
    goes span by span, [1, queries, heads, D] each. The result is the same to rounding.
    """
    if packing.split is not None:
        widths = [key.shape[-1], value.shape[-1]]  # which differ in latent attention
        key, value = packing.split.keys_of_all(torch.cat([key, value], dim=-1)).split(widths, dim=-1)
    if _has_kernel(query):
        return _by_kernel(query, key, value, packing.spans, scaling)[None]
    outputs = []
    for span in packing.spans.each:
        q = query[:, :, span.query : span.query_stop]
        k, v = span.keys_of(key), span.keys_of(value)
        outputs.append(of_span(q, k, v, _mask(span, query.device)))
    return torch.cat(outputs, dim=1)


def _has_kernel(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


def _by_kernel(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, scaling: float | None
) -> Tensor:  # [T, heads, D]
    # Not `states[0]`, whose way back would be a selection from zeros.
    q, k, v = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))  # [T or K, heads, D]
    if spans.prefixes is not None:
        again = spans.key_index, spans.prefixes.first, spans.prefixes.keys, spans.prefixes.again
        k, v = _Keys.apply(k, *again), _Keys.apply(v, *again)
    elif spans.key_index is not None:
        k, v = k[spans.key_index], v[spans.key_index]
    causal: Any = {"window_size": (-1, 0), "scale": scaling} | SHARED_HEADS
    lengths = spans.query_starts, spans.key_starts, spans.longest_query, spans.longest_key
    return varlen_attn(q, k, v, *lengths, **causal)  # pyright: ignore[reportReturnType]


def _mask(span: Span, device: torch.device) -> Tensor | None:  # [1, 1, queries, keys] bool
    """None where queries and keys are the same tokens: causal by itself."""
    queries, keys = span.query_stop - span.query, span.num_keys
    if queries == keys:
        return None
    return torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


class _Keys(torch.autograd.Function):
    """Keys of all spans. The gradient of one that stands there several times is summed in one order always,
    in float32; that of plain indexing is either sorted for at each call, or atomic."""

    @staticmethod
    def forward(  # [T, heads, D], [keys of all spans] -> [keys of all spans, heads, D]
        ctx: Any, states: Tensor, index: Tensor, first: Tensor, keys: Tensor, again: Tensor
    ) -> Tensor:
        ctx.save_for_backward(first, keys, again)
        return states[index]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (first, keys, again) = gradients, ctx.saved_tensors
        found = gradient[first]
        more = gradient[again.clamp(min=0)].masked_fill((again < 0)[..., None, None], 0)
        whole = found[keys].float() + more.sum(dim=1, dtype=torch.float32)
        return found.index_copy(0, keys, whole.to(found.dtype)), None, None, None, None


AttentionInterface.register(ATTENTION, _attention)
AttentionInterface.register(APART, torch.compiler.disable(_attention))
for name in (ATTENTION, APART):
    AttentionMaskInterface.register(name, masking_utils.sdpa_mask)
