"""Sequence packing: the sequences of a microbatch as one stream of tokens without padding.

Letters: B sequences of at most S positions, T tokens in the stream. Only the model's forward pass sees the
stream: position ids start again with every sequence and attention stays inside it. What comes out is put back
into rows [B, S], so that losses, metrics and values know sequences alone, and no token ever has a neighbour
of another sequence.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from abrun import progress
from abrun.backends import B
from abrun.errors import RecipeError
from abrun.recipe import Policy

ATTENTION = "abrun_packed"
# transformers takes a mask of four dimensions as it is, and so builds none of T x T.
NO_MASK_SHAPE = (1, 1, 0, 0)
# torch 2.11 shares heads of keys and values without being told.
SHARED_HEADS = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Where the tokens of B right-padded sequences stand in their stream."""

    shape: torch.Size  # [B, S]
    index: Tensor  # [T] int64, of the stream's tokens in the flattened rows
    position_ids: Tensor  # [1, T] int64, each token's place in its sequence
    starts: tuple[int, ...]  # of the sequences in the stream, and T
    starts_on_device: Tensor  # [B + 1] int32
    longest: int

    def pack(self, rows: Tensor) -> Tensor:  # [B, S, ...] -> [1, T, ...]
        return rows.flatten(0, 1)[self.index][None]

    def unpack(self, stream: Tensor) -> Tensor:  # [1, T, ...] -> [B, S, ...], 0 on padding
        rows = stream.new_zeros(self.shape.numel(), *stream.shape[2:])
        return rows.index_copy(0, self.index, stream[0]).view(*self.shape, *stream.shape[2:])


def packing_of(token_mask: Tensor) -> Packing:  # [B, S] bool
    """The stream of sequences that each end with their last completion token (and have two tokens or more).

    What follows that token is padding, which nothing is asked of.
    """
    lengths = sequence_lengths(token_mask)
    positions = torch.arange(token_mask.shape[1], device=token_mask.device).expand(token_mask.shape)
    index = (positions < lengths[:, None]).flatten().nonzero()[:, 0]
    each = lengths.tolist()
    starts = (0, *accumulate(each))
    return Packing(
        shape=token_mask.shape,
        index=index,
        position_ids=positions.flatten()[index][None],
        starts=starts,
        starts_on_device=torch.tensor(starts, dtype=torch.int32, device=token_mask.device),
        longest=max(each),
    )


def sequence_lengths(token_mask: Tensor) -> Tensor:  # [B, S] bool -> [B] int64
    """Tokens up to the last completion token; at least 2, so that there is a token to predict."""
    ends = torch.arange(1, token_mask.shape[1] + 1, device=token_mask.device)
    return (token_mask * ends).amax(dim=1).clamp(min=2)


def microbatches(batch: B, policy: Policy, group: dist.ProcessGroup) -> Iterator[B]:
    """The batch cut as the recipe says, into as many microbatches on every rank. Collective with a budget.

    With `micro_batch_tokens`: consecutive samples as long as they fit; where another rank needs more
    microbatches, the fullest are halved, because every forward pass is one of all ranks.
    """
    for microbatch in _cut(batch, policy, group):
        progress.beat()
        yield microbatch


def _cut(batch: B, policy: Policy, group: dist.ProcessGroup) -> Iterator[B]:
    if policy.micro_batch_tokens is None:
        yield from batch.split(policy.micro_batch_size)
        return
    lengths = sequence_lengths(batch.token_mask).view(-1, batch.rows_together).sum(dim=1).tolist()
    sizes = filled(lengths, policy.micro_batch_tokens)
    count = torch.tensor(len(sizes), device=batch.token_ids.device)
    dist.all_reduce(count, op=dist.ReduceOp.MAX, group=group)
    yield from batch.split([size * batch.rows_together for size in at_least(int(count), sizes)])


def filled(lengths: Sequence[int], max_tokens: int) -> list[int]:
    """How many consecutive samples each microbatch takes; one that is too long by itself stands alone."""
    sizes, num_tokens = [0], 0
    for length in lengths:
        if sizes[-1] and num_tokens + length > max_tokens:
            sizes.append(0)
            num_tokens = 0
        sizes[-1] += 1
        num_tokens += length
    return sizes


def at_least(count: int, sizes: Sequence[int]) -> list[int]:
    """The same samples in `count` microbatches or more: the fullest are halved."""
    sizes = list(sizes)
    while len(sizes) < count:
        fullest = sizes.index(max(sizes))
        half = sizes[fullest] // 2
        sizes[fullest : fullest + 1] = [sizes[fullest] - half, half]
    return sizes


def enable_packing(network: Any) -> None:
    """Make the network's attention one that can take a stream. Raises RecipeError where it cannot."""
    config = network.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "sliding_window", None) is not None:
        raise RecipeError(
            f"policy.packing: got true with {type(network).__name__}, whose attention is not full and causal "
            "in every layer; use packing: false"
        )
    try:
        network.set_attn_implementation(ATTENTION)
    except ValueError as error:
        reason = " ".join(str(error).split())[:200]
        raise RecipeError(
            f"policy.packing: got true with {type(network).__name__}: {reason}; use packing: false"
        ) from error


def hidden_states(base_model: Any, token_ids: Tensor, packing: Packing | None) -> Tensor:
    """The last hidden states [B, S, H] of right-padded rows, or [1, T, H] of a packed stream.

    Padding stands after every real token, so causal attention never sees it and no mask is passed.
    """
    if packing is None:
        return base_model(input_ids=token_ids, use_cache=False).last_hidden_state
    return base_model(
        input_ids=token_ids,
        position_ids=packing.position_ids,
        attention_mask=torch.empty(NO_MASK_SHAPE, dtype=torch.bool, device=token_ids.device),
        packing=packing,
        use_cache=False,
    ).last_hidden_state


def _attention(
    module: nn.Module,
    query: Tensor,  # [B, heads, S, D], or [1, heads, T, D] with a packing
    key: Tensor,  # [..., key heads, ..., D]
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Packing | None = None,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:  # [B, S, heads, D]
    """Causal attention inside each sequence of a stream; without a packing, transformers' own.

    FlashAttention's kernel for sequences of different lengths takes half precision on a GPU; anything else
    goes sequence by sequence. The result is the same to rounding.
    """
    if packing is None:
        if attention_mask is not None and attention_mask.numel() == 0:
            raise RecipeError(
                f"policy.packing: got true, and {type(module).__name__} does not hand the lengths of its "
                "sequences on; use packing: false"
            )
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **settings)
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        starts, longest = packing.starts_on_device, packing.longest
        q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))  # [T, heads, D]
        causal: Any = {"window_size": (-1, 0), "scale": scaling} | SHARED_HEADS
        output: Any = varlen_attn(q, k, v, starts, starts, longest, longest, **causal)
        return output[None], None
    outputs = []
    for start, stop in pairwise(packing.starts):
        q, k, v = (states[:, :, start:stop] for states in (query, key, value))
        outputs.append(sdpa_attention_forward(module, q, k, v, None, scaling=scaling, **settings)[0])
    return torch.cat(outputs, dim=1), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
