"""Context parallelism: inside the model, each of P ranks computes on some tokens of a stream.

Letters: T tokens in the stream, padded to a multiple of 2P. Of its 2P equal chunks, rank r has chunks r and
2P-1-r, so that causal attention takes the same time on all ranks (arXiv:2407.21783, section 3.3.2). Outside
the model all P ranks hold the same full rows, so losses, sequence ratios, advantages and metrics are not
sharded.

Keys and values of all ranks are gathered for each rank's queries, and their gradients summed. Log-probs and
values are gathered as well. Every rank then computes the same loss from all of them, so their gradients are
sliced, not summed. FSDP sums the parameters' gradients over the ranks; nothing is averaged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from abrun.trainer.backends.ranks import all_gather, reduce_scatter


class Span(NamedTuple):
    """Consecutive queries and the keys, of one sequence, that they attend to: the last query to all keys."""

    query_start: int
    query_stop: int
    key_start: int
    key_stop: int
    prefix_start: int = 0  # a shared prompt's keys, elsewhere in the stream, which precede those keys
    prefix_stop: int = 0

    @property
    def num_queries(self) -> int:
        return self.query_stop - self.query_start

    @property
    def num_keys(self) -> int:
        return self.prefix_stop - self.prefix_start + self.key_stop - self.key_start


@dataclass(frozen=True, kw_only=True)
class Spans:
    """Spans that follow one another in the queries, and the arguments of a variable-length kernel."""

    spans: tuple[Span, ...]
    query_starts: Tensor  # [spans + 1] int32
    key_starts: Tensor  # [spans + 1] int32
    longest_query: int
    longest_key: int
    key_index: Tensor | None  # [keys of all spans] int64; None: all keys, in order
    repeated: "RepeatedKeys | None" = None  # None if no span has a prefix

    @cached_property
    def by_shape(self) -> "SpansByShape":
        """Return the spans in batches of one shape, in the order of their first spans."""
        members: dict[tuple[int, int], list[int]] = {}
        for index, span in enumerate(self.spans):
            members.setdefault((span.num_queries, span.num_keys), []).append(index)
        order = [index for indices in members.values() for index in indices]
        device, is_sorted = self.query_starts.device, order == sorted(order)

        def make_order(counts: Sequence[int]) -> Order | None:
            if is_sorted:
                return None
            stops = list(accumulate(counts))
            starts = [stop - count for stop, count in zip(stops, counts, strict=True)]
            positions = concatenate_ranges([starts[i] for i in order], [stops[i] for i in order])
            return Order(positions.to(device), positions.argsort().to(device))

        return SpansByShape(
            shapes=tuple((len(indices), *shape) for shape, indices in members.items()),
            num_keys=sum(span.num_keys for span in self.spans),
            query_order=make_order([span.num_queries for span in self.spans]),
            key_order=make_order([span.num_keys for span in self.spans]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpansByShape:
    """Spans sorted by their numbers of queries and keys, so that those of one shape form a batch."""

    shapes: tuple[tuple[int, int, int], ...]  # number of spans, and each one's queries and keys
    num_keys: int  # of all spans
    query_order: "Order | None"  # None: all are in order
    key_order: "Order | None"


class Order(NamedTuple):
    """A permutation and its inverse."""

    positions: Tensor  # [queries or keys] int64: where each was before
    inverse: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedKeys:
    """The positions of the stream's T keys in the keys of all spans, needed in the backward pass."""

    first_positions: Tensor  # [T] int64: each key's first position
    repeated_keys: Tensor  # [shared keys] int64: keys with several positions
    repeat_positions: Tensor  # [shared keys, max repeats] int64: their further positions, padded with -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSplit:
    """The assignment of a stream's tokens to the ranks of a context."""

    group: dist.ProcessGroup
    local_positions: Tensor  # [T/P] int64: stream positions of this rank's tokens
    spans: tuple[Span, ...]  # queries are local tokens; keys are in stream order
    rank_order: Tensor  # [T] int64: stream positions, sorted by rank
    stream_order: Tensor  # [T] int64: the inverse permutation

    def to_local(self, values: Tensor, fill: float = 0) -> Tensor:  # [..., T or less] -> [..., T/P]
        """Return this rank's shard of a tensor that all ranks hold; `fill` pads it to a multiple of 2P."""
        num_padding = len(self.rank_order) - values.shape[-1]
        return torch.nn.functional.pad(values, (0, num_padding), value=fill)[..., self.local_positions]

    def to_full(self, local: Tensor) -> Tensor:  # [..., T/P] -> [..., T]
        """Gather all ranks' tokens, of which every rank then computes the same loss."""
        return _GatherTokens.apply(local, self)

    def gather_keys(self, states: Tensor) -> Tensor:  # [..., T/P, D] -> [..., T, D]
        """Gather all ranks' keys or values; each rank's queries contribute their own gradient."""
        return _GatherKeys.apply(states, self)


def make_context_split(starts: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> ContextSplit:
    """Split a stream whose sequences begin at `starts`; the last entry is the stream's length."""
    size, rank = group.size(), group.rank()

    # In causal attention a token costs as much as its position: chunks r and 2P-1-r together cost the same.
    chunk_size = -(-starts[-1] // (2 * size))
    chunks = [(rank_index, 2 * size - 1 - rank_index) for rank_index in range(size)]
    places = [
        torch.arange(i * chunk_size, (i + 1) * chunk_size, device=device) for pair in chunks for i in pair
    ]
    rank_order = torch.cat(places)
    return ContextSplit(
        group=group,
        local_positions=rank_order.view(size, -1)[rank],
        spans=tuple(_local_spans([*starts, 2 * size * chunk_size], chunk_size, chunks[rank])),
        rank_order=rank_order,
        stream_order=rank_order.argsort(),
    )


def _local_spans(starts: Sequence[int], chunk_size: int, chunks: Sequence[int]) -> list[Span]:
    """Return the intersections of this rank's chunks with the sequences; padding counts as a sequence."""
    spans = []
    for index, chunk in enumerate(chunks):
        offset = (chunk - index) * chunk_size  # from stream positions to local ones
        for start, stop in pairwise(starts):
            query_start, query_stop = max(start, chunk * chunk_size), min(stop, (chunk + 1) * chunk_size)
            if query_start < query_stop:
                spans.append(Span(query_start - offset, query_stop - offset, start, query_stop))
    return spans


def make_spans(spans: Sequence[Span], device: torch.device) -> Spans:
    """Make the kernel arguments of spans that follow one another in the queries."""
    queries = [span.num_queries for span in spans]
    keys = [span.num_keys for span in spans]
    starts = [
        torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device) for counts in (queries, keys)
    ]
    has_prefix = any(span.prefix_start < span.prefix_stop for span in spans)
    is_in_order = not has_prefix and all(
        span.key_start == position for span, position in zip(spans, accumulate(keys, initial=0), strict=False)
    )
    index = None
    if not is_in_order:
        key_ranges = [
            key_range
            for span in spans
            for key_range in ((span.prefix_start, span.prefix_stop), (span.key_start, span.key_stop))
        ]
        index = concatenate_ranges(*zip(*key_ranges, strict=True))
    return Spans(
        spans=tuple(spans),
        query_starts=starts[0],
        key_starts=starts[1],
        longest_query=max(queries),
        longest_key=max(keys),
        key_index=None if index is None else index.to(device),
        repeated=_find_repeated_keys(index, device) if has_prefix and index is not None else None,
    )


def concatenate_ranges(starts: Sequence[int], stops: Sequence[int]) -> Tensor:  # int64
    """Concatenate the ranges from each start to its stop."""
    # NumPy, because synchronising torch's threads takes longer than this small sum.
    first_numbers = np.asarray(starts, np.int64)
    counts = np.asarray(stops, np.int64) - first_numbers
    offsets = counts.cumsum() - counts
    return torch.from_numpy(np.arange(counts.sum()) + np.repeat(first_numbers - offsets, counts))


def _find_repeated_keys(index: Tensor, device: torch.device) -> RepeatedKeys:
    """Find the repeated keys of an index that contains every key at least once."""
    positions, counts = index.argsort(stable=True), index.bincount()
    first_places = counts.cumsum(0) - counts
    repeated_keys = (counts > 1).nonzero()[:, 0]
    # At least two elements, because torch.compile specialises on a size of 1.
    repetition = torch.arange(1, max(int(counts.max()), 3))
    repeat_positions = positions[
        (first_places[repeated_keys, None] + repetition).clamp(max=len(positions) - 1)
    ]
    repeat_positions = repeat_positions.masked_fill(repetition >= counts[repeated_keys, None], -1)
    return RepeatedKeys(
        first_positions=positions[first_places].to(device),
        repeated_keys=repeated_keys.to(device),
        repeat_positions=repeat_positions.to(device),
    )


class _GatherKeys(torch.autograd.Function):
    """[..., T/P, D] -> [..., T, D] in stream order; a token's gradient is summed over all ranks.

    Every rank's queries attend to the key, and each rank has the gradient of its own queries only.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, split: ContextSplit) -> Tensor:
        ctx.split = split
        return _gather_in_order(local, split)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        split: ContextSplit = ctx.split
        return reduce_scatter(gradients[0].index_select(-2, split.rank_order), -2, split.group), None


class _GatherTokens(torch.autograd.Function):
    """[..., T/P] -> [..., T] in stream order; each rank keeps the gradient of its own tokens.

    All ranks compute the same loss of them, so each has their full gradient: a sum would count it P times.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, split: ContextSplit) -> Tensor:
        ctx.split = split
        return _gather_in_order(local[..., None], split)[..., 0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0][..., ctx.split.local_positions], None


def _gather_in_order(local: Tensor, split: ContextSplit) -> Tensor:  # [..., T/P, D] -> [..., T, D]
    return all_gather(local, -2, split.group).index_select(-2, split.stream_order)
