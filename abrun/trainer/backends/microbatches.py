"""Splitting a batch into microbatches over the ranks, and merging their outputs into the batch's rows.

Letters: B sequences of this rank and S positions, b and s those of a microbatch. Without a token budget, a
microbatch is a fixed number of consecutive rows. With one, the samples of all data-parallel ranks are
assigned by length, the longest first, each to the microbatch with the fewest tokens (Graham 1969).
Microbatches are then about equally long. Every forward pass involves all ranks, so no rank waits long for
another. The assignment depends on lengths alone: arms with the same completions train on the same
microbatches.

If sequences share prompts, those of one prompt stay together as long as that lowers the number of tokens: a
whole group if groups are small compared with the budget, parts of it if whole groups would waste the budget.
"""

import heapq
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from abrun.processes import progress
from abrun.recipe.policy import Policy
from abrun.trainer.backends.context import (
    ContextSplit,
    Span,
    Spans,
    concatenate_ranges,
    make_context_split,
    make_spans,
)
from abrun.trainer.backends.ranks import Ranks
from abrun.trainer.rl.batch import Sequences, sequence_lengths

B = TypeVar("B", bound=Sequences)

# Sequence packing: the sequences of a microbatch as one stream of tokens without padding.
#
# Letters: B sequences of at most S positions, T tokens in the stream, P ranks that share it. Only the
# model's forward pass sees the stream. Position ids restart with every sequence, and attention stays within
# it. The outputs are unpacked into rows [B, S], so losses, metrics and values never see neighbouring
# sequences. With context parallelism each rank computes on some of the stream's tokens, inside the model
# only: see abrun.trainer.backends.context.
#
# Sequences of one prompt can share it (arXiv:2506.05433). The first of them in the stream contains the
# prompt. The others start at its last token, which predicts their first completion token, and attend to
# the shared prompt. A sequence without a completion is two tokens long and shares nothing.


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The mapping between B right-padded sequences and their packed stream."""

    shape: torch.Size  # [B, S]
    index: Tensor  # [T] int64: the stream's tokens in the flattened rows; a shared prompt's in its first row
    position_ids: Tensor  # [1, T] int64: each token's position in its sequence
    shared_index: Tensor  # [2, shared tokens] int64: a shared token in the flattened rows, and its first copy
    starts: tuple[int, ...]  # stream positions where the sequences start, then T
    spans: Spans  # the keys that this rank's tokens attend to
    split: ContextSplit | None = None  # the assignment of tokens to ranks; None: this rank has all

    @property
    def num_local_tokens(self) -> int:
        """Return the number of tokens that this rank computes on."""
        return self.starts[-1] if self.split is None else len(self.split.local_positions)

    def pack(self, rows: Tensor) -> Tensor:  # [B, S, ...] -> [1, T, ...]
        return rows.flatten(0, 1)[self.index][None]

    def to_local(self, stream: Tensor) -> Tensor:  # [1, T, ...] -> [1, T/P, ...]
        """Return this rank's tokens if ranks share the stream, else all of them."""
        return stream if self.split is None else self.split.to_local(stream.movedim(1, -1)).movedim(-1, 1)

    def to_full(self, local: Tensor) -> Tensor:  # [1, T/P, ...] -> [1, T, ...]
        """Gather the tokens of all ranks that share the stream."""
        if self.split is None:
            return local
        return self.split.to_full(local.movedim(1, -1)).movedim(-1, 1)[:, : self.starts[-1]]

    def unpack(self, stream: Tensor) -> Tensor:  # [1, T, ...] -> [B, S, ...], 0 on padding
        rows = stream.new_zeros(self.shape.numel(), *stream.shape[2:])
        return rows.index_copy(0, self.index, stream[0]).view(*self.shape, *stream.shape[2:])

    def unpack_with_prompts(self, stream: Tensor) -> Tensor:  # [1, T, ...] -> [B, S, ...], 0 on padding
        """Unpack, and copy a shared prompt's values to each of its rows.

        Another microbatch split may keep these rows apart.
        """
        rows, (repeat_index, first_index) = self.unpack(stream).flatten(0, 1), self.shared_index
        return rows.index_copy(0, repeat_index, rows[first_index]).view(*self.shape, *stream.shape[2:])

    def merge_counts(self, rows: Tensor) -> Tensor:  # [B, S] -> [B, S]
        """Add the counts of a shared prompt's copies to the copy that the stream contains."""
        flat, (repeat_index, first_index) = rows.flatten(), self.shared_index
        return flat.index_add(0, first_index, flat[repeat_index]).view(self.shape)


def make_packing(
    lengths: Sequence[int],  # [B], each up to the last completion token
    width: int,  # S
    device: torch.device,
    context: dist.ProcessGroup | None = None,
    shared: Sequence[int] | None = None,  # [B], leading tokens taken from an earlier sequence
) -> Packing:
    """Pack sequences of these lengths into a stream; the rest of their rows is padding.

    `context` is the group of ranks that share the stream. Its sequences cannot share prompts.
    """
    shared = shared or [0] * len(lengths)
    starts = (0, *accumulate(length - prefix for length, prefix in zip(lengths, shared, strict=True)))
    split = context and make_context_split(starts, context, device)

    # A sequence's keys are its own tokens, and before them those of a prompt that an earlier one holds.
    sequence_spans, prompt_start, prompt_row = [], 0, 0
    prompt_offsets = []  # [B], offset of the row that contains the sequence's prompt
    for row, ((start, stop), prefix) in enumerate(zip(pairwise(starts), shared, strict=True)):
        if not prefix and has_shareable_prompt(stop - start):
            prompt_start, prompt_row = start, row
        sequence_spans.append(Span(start, stop, start, stop, prompt_start, prompt_start + prefix))
        prompt_offsets.append(prompt_row * width)

    # The stream takes from each row what it does not share.
    row_offsets = range(0, len(lengths) * width, width)
    index = concatenate_ranges(
        *(list(map(operator.add, row_offsets, counts)) for counts in (shared, lengths))
    )
    shared_index = [
        concatenate_ranges(offsets, list(map(operator.add, offsets, shared)))
        for offsets in (row_offsets, prompt_offsets)
    ]
    return Packing(
        shape=torch.Size((len(lengths), width)),
        index=index.to(device),
        position_ids=concatenate_ranges(shared, lengths)[None].to(device),
        shared_index=torch.stack(shared_index).to(device),
        starts=starts,
        spans=make_spans(split.spans if split else sequence_spans, device),
        split=split,
    )


def has_shareable_prompt(length: int) -> bool:
    """Return whether other sequences could share this one's prompt: not if it is two tokens long.

    A sequence without a completion has that length.
    """
    return length > 2


def shared_prefix_lengths(
    token_ids: Tensor, token_mask: Tensor
) -> Tensor:  # [B, S], [B, S] bool -> [B] int64
    """Return how many leading tokens each sequence can share with the last earlier one with a completion.

    If both have the same prompt, that is the prompt without its last token, else 0. A sequence without a
    completion shares nothing.
    """
    prompts = token_mask.int().argmax(dim=1)  # 0 where there is no completion
    rows = torch.arange(len(prompts), device=token_ids.device)
    previous = (rows * (prompts > 0)).cummax(dim=0).values[:-1]

    # Only positions before the prompt's end have to be equal: completions differ.
    is_after_prompt = torch.arange(token_ids.shape[1], device=token_ids.device) >= prompts[1:, None]
    is_same_prompt = ((token_ids[1:] == token_ids[previous]) | is_after_prompt).all(dim=1) & (
        prompts[1:] == prompts[previous]
    )
    return torch.nn.functional.pad((prompts[1:] - 1).clamp(min=0) * is_same_prompt, (1, 0))


class Microbatch(NamedTuple, Generic[B]):
    """The rows of one forward pass."""

    batch: B
    packing: Packing | None  # None: padded rows


class Microbatches(Generic[B]):
    """This rank's microbatches of a batch; every rank has the same number. Collective.

    All are built before the first one runs, so that the GPU never waits for values that the CPU needs.
    """

    def __init__(self, batch: B, policy: Policy, ranks: Ranks) -> None:
        self.shape = batch.token_ids.shape
        rows = _measure_rows(batch, policy.share_prompts)
        if policy.micro_batch_tokens is None:
            self._row_exchange, batches = None, list(batch.split(policy.micro_batch_size))
            starts = pairwise([0, *accumulate(len(microbatch) for microbatch in batches)])
            row_lengths = [rows.select(range(start, stop)) for start, stop in starts]
        else:
            self._row_exchange = _plan_exchange(rows, batch.rows_per_sample, policy.micro_batch_tokens, ranks)
            row_lengths = self._row_exchange.rows
            batches = list(_receive_microbatches(batch, self._row_exchange))
        # Context parallelism shards streams, so it packs even if the recipe does not.
        packs_rows = policy.packing or ranks.context is not None
        self._microbatches = [
            Microbatch(
                microbatch,
                make_packing(
                    lengths.lengths,
                    microbatch.token_ids.shape[1],
                    ranks.device,
                    ranks.context,
                    lengths.shared_lengths,
                )
                if packs_rows
                else None,
            )
            for microbatch, lengths in zip(batches, row_lengths, strict=True)
        ]

    def __len__(self) -> int:
        return len(self._microbatches)

    def __iter__(self) -> Iterator[Microbatch[B]]:
        for microbatch in self._microbatches:
            progress.report()
            yield microbatch

    def gather_rows(self, outputs: Sequence[Tensor]) -> Tensor:  # [b, s, ...] each -> [B, S, ...]
        """Merge the microbatches' outputs into the batch's rows, 0 beyond its width. Collective."""
        max_length = self.shape[1] if self._row_exchange is None else self._row_exchange.max_length
        rows = torch.cat([_set_width(output, max_length) for output in outputs])
        if self._row_exchange is None:
            return rows
        return _set_width(self._row_exchange.to_batch(rows), self.shape[1])


@dataclass(frozen=True)
class _RowLengths:
    """The lengths of sequences, and of the prompts that they share."""

    lengths: list[int]
    shared_lengths: list[int]  # see `shared` of make_packing

    @cached_property
    def _prompts(self) -> list[int]:  # each sequence's prompt number, equal if shared; 0: nothing to share
        have_prompt = [has_shareable_prompt(length) for length in self.lengths]
        numbers = accumulate(
            has_prompt and not prefix
            for has_prompt, prefix in zip(have_prompt, self.shared_lengths, strict=True)
        )
        return [has_prompt * number for has_prompt, number in zip(have_prompt, numbers, strict=True)]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths) - sum(self.shared_lengths)

    def select(self, rows: Sequence[int]) -> "_RowLengths":
        """Return the lengths of some rows, given in ascending order.

        A row shares its prompt only if a row selected before it has the same one.
        """
        prompts = [self._prompts[row] for row in rows]
        previous_prompts = accumulate([0, *prompts[:-1]], max)
        shared_lengths = [
            self.shared_lengths[row] * (previous == prompt)
            for row, previous, prompt in zip(rows, previous_prompts, prompts, strict=True)
        ]
        return _RowLengths([self.lengths[row] for row in rows], shared_lengths)


def _measure_rows(batch: Sequences, share_prompts: bool) -> _RowLengths:
    lengths = sequence_lengths(batch.token_mask)
    if not share_prompts:
        return _RowLengths(lengths.tolist(), [0] * len(batch))
    lengths, shared_lengths = torch.stack(
        [lengths, shared_prefix_lengths(batch.token_ids, batch.token_mask)]
    ).tolist()
    return _RowLengths(lengths, shared_lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exchange:
    """The exchange of rows between data-parallel ranks that forms this rank's microbatches."""

    group: dist.ProcessGroup
    sent_rows: Tensor  # int64: this rank's rows, sorted by destination rank
    sent_counts: list[int]  # rows sent to each rank
    received_counts: list[int]  # rows received from each rank
    arrival_order: Tensor  # int64: indices of the received rows, in the order of the microbatches
    rows: list[_RowLengths]  # of each microbatch
    max_length: int  # over the rows of all ranks

    def to_microbatches(self, rows: Tensor) -> Tensor:
        """Send this rank's rows [B, ...] and return the microbatches' rows, concatenated. Collective."""
        return self._all_to_all(rows[self.sent_rows], self.received_counts, self.sent_counts)[
            self.arrival_order
        ]

    def to_batch(self, rows: Tensor) -> Tensor:
        """Return the microbatches' rows to the ranks that they came from. Collective."""
        arrived = torch.empty_like(rows).index_copy_(0, self.arrival_order, rows)
        returned = self._all_to_all(arrived, self.sent_counts, self.received_counts)
        return torch.empty_like(returned).index_copy_(0, self.sent_rows, returned)

    def _all_to_all(self, rows: Tensor, num_received: list[int], num_sent: list[int]) -> Tensor:
        if self.group.size() == 1:
            return rows
        received = rows.new_empty(sum(num_received), *rows.shape[1:])
        # As bytes, because gloo and NCCL support neither bool nor int16, the dtype of routes to many experts.
        received_bytes, sent_bytes = (
            tensor.contiguous().flatten().view(torch.uint8).view(len(tensor), -1)
            for tensor in (received, rows)
        )
        dist.all_to_all_single(received_bytes, sent_bytes, num_received, num_sent, group=self.group)
        return received


def _plan_exchange(local_rows: _RowLengths, rows_per_sample: int, max_tokens: int, ranks: Ranks) -> _Exchange:
    """Assign the rows of all ranks to microbatches; every rank computes the same assignment. Collective."""
    size, rank, device = ranks.data.size(), ranks.data.rank(), ranks.device
    all_rows = (
        _RowLengths(
            ranks.all_gather_data(local_rows.lengths), ranks.all_gather_data(local_rows.shared_lengths)
        )
        if size > 1
        else local_rows
    )
    by_rank = _assign_rows(all_rows, rows_per_sample, max_tokens, size)
    rows_per_rank = len(local_rows.lengths)

    def locate_rows(microbatches: list[list[int]]) -> list[tuple[int, int]]:
        """Return (owning rank, row on that rank) for each row of the microbatches, in order."""
        return [divmod(row, rows_per_rank) for microbatch in microbatches for row in microbatch]

    sent_rows = [
        [row for owner, row in locate_rows(microbatches_of_rank) if owner == rank]
        for microbatches_of_rank in by_rank
    ]
    owners = [owner for owner, _ in locate_rows(by_rank[rank])]
    # Rows arrive sorted by owning rank, and for each rank in the order of the microbatches.
    arrival_order = torch.tensor(sorted(range(len(owners)), key=owners.__getitem__)).argsort()
    return _Exchange(
        group=ranks.data,
        sent_rows=torch.tensor([row for rows in sent_rows for row in rows], dtype=torch.int64, device=device),
        sent_counts=[len(rows) for rows in sent_rows],
        received_counts=[owners.count(owner) for owner in range(size)],
        arrival_order=arrival_order.to(device),
        rows=[all_rows.select(microbatch) for microbatch in by_rank[rank]],
        max_length=max(all_rows.lengths),
    )


def _assign_rows(
    rows: _RowLengths, rows_per_sample: int, max_tokens: int, num_ranks: int
) -> list[list[list[int]]]:
    """Return each rank's microbatches as lists of rows, chosen to minimise the slowest rank's total tokens.

    All ranks run their i-th microbatch at the same time, so a step takes as long as its longest microbatch.
    """
    best_assignment, fewest_tokens = [], math.inf
    # Try whole groups, then smaller and smaller parts of groups, and last single samples.
    group_limits = [max_tokens // divisor for divisor in (1, 2, 4, 8)] if any(rows.shared_lengths) else []
    for max_group_tokens in [*group_limits, 0]:
        samples = _group_rows(rows, rows_per_sample, max_group_tokens)
        if len(samples) < num_ranks:
            continue
        tokens = [rows.select(sample).num_tokens for sample in samples]
        by_rank = assign_samples(tokens, max_tokens, num_ranks)
        assignment = [
            [sorted(row for i in microbatch for row in samples[i]) for microbatch in microbatches]
            for microbatches in by_rank
        ]
        fits = all(
            _fits_budget(max_tokens, microbatch, tokens)
            for microbatches in by_rank
            for microbatch in microbatches
        )
        steps = zip(
            *(
                [rows.select(microbatch).num_tokens for microbatch in microbatches]
                for microbatches in assignment
            ),
            strict=True,
        )
        total_tokens = sum(max(step) for step in steps)
        if (fits or max_group_tokens == 0) and total_tokens < fewest_tokens:
            best_assignment, fewest_tokens = assignment, total_tokens
    return best_assignment


def _group_rows(rows: _RowLengths, rows_per_sample: int, max_tokens: int) -> list[list[int]]:
    """Merge samples, each of `rows_per_sample` consecutive rows, into groups that no microbatch splits.

    A sample that shares its prompt with an earlier one joins that one's group if the group then has at most
    `max_tokens` tokens; otherwise it starts a group. Samples without a completion are groups of their own.
    """
    groups: list[list[int]] = []
    prompt_group, num_tokens = 0, 0  # the last group whose prompt can be shared
    for start in range(0, len(rows.lengths), rows_per_sample):
        sample = range(start, start + rows_per_sample)
        new_tokens = sum(rows.lengths[row] - rows.shared_lengths[row] for row in sample)
        if rows.shared_lengths[start] and num_tokens + new_tokens <= max_tokens:
            groups[prompt_group] += sample
            num_tokens += new_tokens
            continue
        groups.append([*sample])
        if any(has_shareable_prompt(rows.lengths[row]) for row in sample):
            prompt_group, num_tokens = len(groups) - 1, rows.select(sample).num_tokens
    return groups


def assign_samples(lengths: Sequence[int], max_tokens: int, num_ranks: int = 1) -> list[list[list[int]]]:
    """Assign samples of these lengths to microbatches; return them by rank, each as a list of sample indices.

    Every rank gets the same number of microbatches: the smallest for which each microbatch has at most
    `max_tokens` tokens or a single sample. If no number suffices, because the samples are not a multiple of
    the ranks, it is the largest possible one.
    """
    assert len(lengths) >= num_ranks
    min_per_rank = math.ceil(sum(lengths) / max_tokens / num_ranks)
    microbatches: list[list[int]] = []
    for count in range(min(min_per_rank, len(lengths) // num_ranks) * num_ranks, len(lengths) + 1, num_ranks):
        microbatches = _distribute(lengths, count)
        if all(_fits_budget(max_tokens, microbatch, lengths) for microbatch in microbatches):
            break
    microbatches.sort(key=lambda microbatch: (-sum(lengths[i] for i in microbatch), microbatch))
    steps = [microbatches[start : start + num_ranks] for start in range(0, len(microbatches), num_ranks)]
    # Alternate the direction, so that rank 0 does not get the longest microbatch every time.
    steps = [step[::-1] if index % 2 else step for index, step in enumerate(steps)]
    return [[step[rank] for step in steps] for rank in range(num_ranks)]


def _fits_budget(max_tokens: int, samples: Sequence[int], lengths: Sequence[int]) -> bool:
    return len(samples) == 1 or sum(lengths[i] for i in samples) <= max_tokens


def _distribute(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Distribute samples over `count` microbatches: longest first, each to the one with the fewest tokens."""
    microbatches: list[list[int]] = [[] for _ in range(count)]
    token_heap = [(0, microbatch) for microbatch in range(count)]
    for sample in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        num_tokens, microbatch = token_heap[0]
        microbatches[microbatch].append(sample)
        heapq.heapreplace(token_heap, (num_tokens + lengths[sample], microbatch))
    return [sorted(microbatch) for microbatch in microbatches]


def _receive_microbatches(batch: B, exchange: _Exchange) -> Iterator[B]:
    """Yield this rank's microbatches, received from the ranks that hold their rows. Collective."""
    rows = batch.mapped(lambda tensor: exchange.to_microbatches(_set_width(tensor, exchange.max_length)))
    start = 0
    for lengths in exchange.rows:
        microbatch, longest = rows[start : start + len(lengths.lengths)], max(lengths.lengths)
        yield microbatch.mapped(lambda tensor, longest=longest: _set_width(tensor, longest))
        start += len(lengths.lengths)


def _set_width(rows: Tensor, width: int) -> Tensor:  # [B, S, ...] -> [B, width, ...]; [B] as it is
    """Truncate rows to `width` positions, or pad them with zeros."""
    if rows.ndim == 1 or rows.shape[1] == width:
        return rows
    return pad(rows, (0, 0) * (rows.ndim - 2) + (0, width - rows.shape[1]))
