"""Sequence packing: the sequences of a microbatch as one stream of tokens without padding.

Letters: B sequences of at most S positions, T tokens in the stream. Only the model's forward pass sees the
stream: position ids start again with every sequence and attention stays inside it. What comes out is put back
into rows [B, S], so that losses, metrics and values know sequences alone, and no token ever has a neighbour
of another sequence. With context parallelism each rank computes on some of the stream's tokens, inside the
model only: see abrun.backends.context.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from abrun import progress
from abrun.backends import B
from abrun.backends.context import ContextSplit, Span, Spans, context_split, spans_of
from abrun.backends.ranks import Ranks
from abrun.recipe import Policy
from abrun.rl.batch import Sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Where the tokens of B right-padded sequences stand in their stream."""

    shape: torch.Size  # [B, S]
    index: Tensor  # [T] int64, of the stream's tokens in the flattened rows
    position_ids: Tensor  # [1, T] int64, each token's place in its sequence
    starts: tuple[int, ...]  # of the sequences in the stream, and T
    spans: Spans  # what this rank's tokens attend to
    split: ContextSplit | None = None  # which of the stream's tokens are this rank's; None: all

    @property
    def num_own(self) -> int:
        """Tokens that this rank computes on."""
        return self.starts[-1] if self.split is None else len(self.split.own)

    def pack(self, rows: Tensor) -> Tensor:  # [B, S, ...] -> [1, T, ...]
        return rows.flatten(0, 1)[self.index][None]

    def own(self, stream: Tensor) -> Tensor:  # [1, T, ...] -> [1, own tokens, ...]
        """What this rank computes on, where ranks share the stream."""
        return stream if self.split is None else self.split.cut(stream.movedim(1, -1)).movedim(-1, 1)

    def whole(self, own: Tensor) -> Tensor:  # [1, own tokens, ...] -> [1, T, ...]
        """The same on all ranks that share the stream."""
        if self.split is None:
            return own
        return self.split.whole(own.movedim(1, -1)).movedim(-1, 1)[:, : self.starts[-1]]

    def unpack(self, stream: Tensor) -> Tensor:  # [1, T, ...] -> [B, S, ...], 0 on padding
        rows = stream.new_zeros(self.shape.numel(), *stream.shape[2:])
        return rows.index_copy(0, self.index, stream[0]).view(*self.shape, *stream.shape[2:])


def packing_for(batch: Sequences, policy: Policy, ranks: Ranks) -> Packing | None:
    """The stream as which a microbatch goes through the model; None: as it is, in rows.

    Ranks that share a context share a stream, whatever the recipe says of packing: only the padding differs.
    """
    if not policy.packing and ranks.context is None:
        return None
    return packing_of(batch.token_mask, ranks.context)


def packing_of(token_mask: Tensor, context: dist.ProcessGroup | None = None) -> Packing:  # [B, S] bool
    """The stream of sequences that each end with their last completion token (and have two tokens or more).

    What follows that token is padding, which nothing is asked of. `context`: the ranks that share the stream.
    """
    lengths = sequence_lengths(token_mask)
    positions = torch.arange(token_mask.shape[1], device=token_mask.device).expand(token_mask.shape)
    index = (positions < lengths[:, None]).flatten().nonzero()[:, 0]
    starts = (0, *accumulate(lengths.tolist()))
    split = context and context_split(starts, context, token_mask.device)
    whole = [Span(start, stop, start, stop) for start, stop in pairwise(starts)]
    return Packing(
        shape=token_mask.shape,
        index=index,
        position_ids=positions.flatten()[index][None],
        starts=starts,
        spans=spans_of(split.spans if split else whole, token_mask.device),
        split=split,
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
