"""Context parallelism: each of P ranks computes on some tokens of a stream, inside the model only.

Letters: T tokens in the stream, padded to a multiple of 2P; of its 2P equal chunks rank r has chunks r and
2P-1-r, so that causal attention takes every rank as long (arXiv:2407.21783, section 3.3.2). Outside the model
all P ranks hold the same rows, whole: losses, ratios of sequences, advantages and metrics meet no border.

Each rank's queries see the keys and values of all: these are gathered, and their gradients summed. Log-probs
and values are gathered, too; every rank then takes the same loss of all of them, so that their gradients are
only cut. FSDP sums the parameters' gradients over the ranks, and nothing is averaged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from abrun.backends.collectives import gathered, scattered


class Span(NamedTuple):
    """Queries that see keys of one sequence, causally: the last query sees the last key."""

    query: int
    query_stop: int
    key: int
    key_stop: int
    prefix: int = 0  # and before those keys these, which stand elsewhere in the stream: a prompt's
    prefix_stop: int = 0

    @property
    def num_keys(self) -> int:
        return self.prefix_stop - self.prefix + self.key_stop - self.key

    def keys_of(self, states: Tensor) -> Tensor:  # [..., T, D] -> [..., keys, D]
        own = states[..., self.key : self.key_stop, :]
        if self.prefix == self.prefix_stop:
            return own
        return torch.cat([states[..., self.prefix : self.prefix_stop, :], own], dim=-2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """One after the other in the queries; `on_device` is what a kernel for sequences of any length takes."""

    each: tuple[Span, ...]
    query_starts: Tensor  # [spans + 1] int32
    key_starts: Tensor  # [spans + 1] int32
    longest_query: int
    longest_key: int
    key_index: Tensor | None  # [keys of all spans] int64; None: all keys, in their order
    prefixes: "Prefixes | None" = None  # where spans have one


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefixes:
    """Which of the stream's T keys stand more than once in the keys of all spans, for the way back."""

    first: Tensor  # [T] int64: where each key stands first
    keys: Tensor  # [shared keys] int64: those that stand there again
    again: Tensor  # [shared keys, most] int64: where, -1 where it stands there fewer times


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSplit:
    """Which tokens of a stream are this rank's, and the way back."""

    group: dist.ProcessGroup
    own: Tensor  # [T/P] int64: places in the stream
    spans: tuple[Span, ...]  # of own tokens, and keys in the order of the stream
    order: Tensor  # [T] int64: the stream's places in the order of ranks
    inverse: Tensor  # [T] int64

    def cut(self, values: Tensor, fill: float = 0) -> Tensor:  # [..., T or less] -> [..., T/P]
        """This rank's part of what all ranks have; `fill` stands for tokens that are not there."""
        missing = len(self.order) - values.shape[-1]
        return torch.nn.functional.pad(values, (0, missing), value=fill)[..., self.own]

    def whole(self, own: Tensor) -> Tensor:  # [..., T/P] -> [..., T]
        """What all ranks have, of which each then takes the same loss."""
        return _Whole.apply(own, self)

    def keys_of_all(self, states: Tensor) -> Tensor:  # [..., T/P, D] -> [..., T, D]
        """What all ranks' queries see, each rank in its own loss."""
        return _Gathered.apply(states, self)


def context_split(starts: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> ContextSplit:
    """The split of a stream whose sequences begin at `starts`, which ends with the stream's length."""
    size, rank = group.size(), group.rank()
    chunk = -(-starts[-1] // (2 * size))
    chunks = [(each, 2 * size - 1 - each) for each in range(size)]
    places = [torch.arange(i * chunk, (i + 1) * chunk, device=device) for pair in chunks for i in pair]
    order = torch.cat(places)
    return ContextSplit(
        group=group,
        own=order.view(size, -1)[rank],
        spans=tuple(_own_spans([*starts, 2 * size * chunk], chunk, chunks[rank])),
        order=order,
        inverse=order.argsort(),
    )


def _own_spans(starts: Sequence[int], chunk: int, own: Sequence[int]) -> list[Span]:
    """Where own chunks, which stand one after the other, meet sequences (the padding is one more)."""
    spans = []
    for place, number in enumerate(own):
        back = (number - place) * chunk  # from the stream to own tokens
        for start, stop in pairwise(starts):
            first, last = max(start, number * chunk), min(stop, (number + 1) * chunk)
            if first < last:
                spans.append(Span(first - back, last - back, start, last))
    return spans


def spans_of(each: Sequence[Span], device: torch.device) -> Spans:
    """Spans that follow one another in the queries."""
    queries = [span.query_stop - span.query for span in each]
    keys = [span.num_keys for span in each]
    starts = [
        torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device) for counts in (queries, keys)
    ]
    with_prefix = any(span.prefix < span.prefix_stop for span in each)
    in_order = not with_prefix and all(
        span.key == before for span, before in zip(each, accumulate(keys, initial=0), strict=False)
    )
    index = None
    if not in_order:
        parts = [
            part for span in each for part in ((span.prefix, span.prefix_stop), (span.key, span.key_stop))
        ]
        index = ranges(*zip(*parts, strict=True))
    return Spans(
        each=tuple(each),
        query_starts=starts[0],
        key_starts=starts[1],
        longest_query=max(queries),
        longest_key=max(keys),
        key_index=None if index is None else index.to(device),
        prefixes=_prefixes(index, device) if with_prefix and index is not None else None,
    )


def ranges(starts: Sequence[int], stops: Sequence[int]) -> Tensor:  # int64
    """The numbers from each start to its stop, one range after the other."""
    # Not by torch, whose threads take longer to meet than such a sum.
    firsts = np.asarray(starts, np.int64)
    counts = np.asarray(stops, np.int64) - firsts
    before = counts.cumsum() - counts
    return torch.from_numpy(np.arange(counts.sum()) + np.repeat(firsts - before, counts))


def _prefixes(index: Tensor, device: torch.device) -> Prefixes:
    """Of an index in which each key stands at least once."""
    places, counts = index.argsort(stable=True), index.bincount()
    begins = counts.cumsum(0) - counts
    keys = (counts > 1).nonzero()[:, 0]
    turn = torch.arange(1, max(int(counts.max()), 3))  # a compiler takes a size of 1 for a constant
    again = places[(begins[keys, None] + turn).clamp(max=len(places) - 1)]
    again = again.masked_fill(turn >= counts[keys, None], -1)
    return Prefixes(first=places[begins].to(device), keys=keys.to(device), again=again.to(device))


class _Gathered(torch.autograd.Function):
    """[..., T/P, D] -> [..., T, D] in the stream's order; a token's gradient is the sum of all ranks'."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, split: ContextSplit) -> Tensor:
        ctx.split = split
        return _gathered(own, split)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        split: ContextSplit = ctx.split
        return scattered(gradients[0].index_select(-2, split.order), -2, split.group), None


class _Whole(torch.autograd.Function):
    """[..., T/P] -> [..., T] in the stream's order; each rank takes its own tokens' gradient."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, split: ContextSplit) -> Tensor:
        ctx.split = split
        return _gathered(own[..., None], split)[..., 0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0][..., ctx.split.own], None


def _gathered(own: Tensor, split: ContextSplit) -> Tensor:  # [..., T/P, D] -> [..., T, D]
    return gathered(own, -2, split.group).index_select(-2, split.inverse)
