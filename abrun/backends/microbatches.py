"""A batch as microbatches: which sequences each has, on which rank, and the way back.

Letters: B sequences of this rank, S positions, b and s those of a microbatch, R ranks with other samples.
Without a budget of tokens a microbatch is so many consecutive rows. With one, the samples of all ranks are
dealt out by length, the longest first, each to the microbatch that has the fewest tokens (Graham 1969): all
have about as many, and since every forward pass is one of all ranks, no rank waits long for another. Which
sample goes where depends on lengths alone, so arms with the same completions train on the same microbatches.

Where sequences share prompts, those of one prompt stay together, as many of them as make the fewest tokens in
all: a whole group where groups are small beside the budget, less where they would leave it half empty.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Generic, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from abrun.backends import B
from abrun.backends.packing import Packing, has_prompt, packing_of, shared_prefixes
from abrun.backends.ranks import Ranks
from abrun.processes import progress
from abrun.recipe.policy import Policy
from abrun.rl.batch import Sequences, sequence_lengths


class Microbatch(NamedTuple, Generic[B]):
    """What goes through the model at once."""

    batch: B
    packing: Packing | None  # None: as it is, in rows


class Microbatches(Generic[B]):
    """Those of this rank, as many as on every other. Made whole before the first of them runs: what has to
    be known on the CPU is known then, and the GPU never waits for it. Collective."""

    def __init__(self, batch: B, policy: Policy, ranks: Ranks) -> None:
        self.shape = batch.token_ids.shape
        rows = _rows_of(batch, policy.share_prompts)
        if policy.micro_batch_tokens is None:
            self._route, parts = None, list(batch.split(policy.micro_batch_size))
            starts = pairwise([0, *accumulate(len(part) for part in parts)])
            of_parts = [rows.picked(range(start, stop)) for start, stop in starts]
        else:
            self._route = _route(rows, batch.rows_per_sample, policy.micro_batch_tokens, ranks)
            of_parts = self._route.rows
            parts = list(_dealt_out(batch, self._route))
        # Ranks that share a context share a stream, whatever the recipe says of packing.
        streams = policy.packing or ranks.context is not None
        self._each = [
            Microbatch(
                part,
                packing_of(
                    of_part.lengths, part.token_ids.shape[1], ranks.device, ranks.context, of_part.shared
                )
                if streams
                else None,
            )
            for part, of_part in zip(parts, of_parts, strict=True)
        ]

    def __len__(self) -> int:
        return len(self._each)

    def __iter__(self) -> Iterator[Microbatch[B]]:
        for microbatch in self._each:
            progress.report()
            yield microbatch

    def in_rows(self, found: Sequence[Tensor]) -> Tensor:  # [b, s, ...] each -> [B, S, ...]
        """What the microbatches gave, as rows of the batch, 0 where a microbatch was narrower. Collective."""
        width = self.shape[1] if self._route is None else self._route.width
        rows = torch.cat([_as_wide(each, width) for each in found])
        if self._route is None:
            return rows
        return _as_wide(self._route.back(rows), self.shape[1])


@dataclass(frozen=True)
class _Rows:
    """Sequences, by their tokens alone."""

    lengths: list[int]
    shared: list[int]  # see packing_of

    @cached_property
    def _prompts(self) -> list[int]:  # a number for each, the same where a prompt is shared; 0: none could be
        have = [has_prompt(length) for length in self.lengths]
        numbers = accumulate(has and not prefix for has, prefix in zip(have, self.shared, strict=True))
        return [has * number for has, number in zip(have, numbers, strict=True)]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths) - sum(self.shared)

    def picked(self, rows: Sequence[int]) -> "_Rows":
        """Those of a microbatch, in ascending order."""
        prompts = [self._prompts[row] for row in rows]
        last = accumulate([0, *prompts[:-1]], max)
        shared = [
            self.shared[row] * (before == prompt)
            for row, before, prompt in zip(rows, last, prompts, strict=True)
        ]
        return _Rows([self.lengths[row] for row in rows], shared)


def _rows_of(batch: Sequences, share_prompts: bool) -> _Rows:
    lengths = sequence_lengths(batch.token_mask)
    if not share_prompts:
        return _Rows(lengths.tolist(), [0] * len(batch))
    lengths, shared = torch.stack([lengths, shared_prefixes(batch.token_ids, batch.token_mask)]).tolist()
    return _Rows(lengths, shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Route:
    """Which rows of which rank make this rank's microbatches."""

    group: dist.ProcessGroup
    sent: Tensor  # int64: own rows, in the order in which the ranks get them
    sent_counts: list[int]  # for each rank
    kept_counts: list[int]  # from each rank
    order: Tensor  # int64: of what came, in the order of the microbatches
    rows: list[_Rows]  # of each microbatch
    width: int  # of the longest row of all ranks

    def there(self, rows: Tensor) -> Tensor:
        """Own rows [B, ...] -> the microbatches' rows, one after the other. Collective."""
        return self._moved(rows[self.sent], self.kept_counts, self.sent_counts)[self.order]

    def back(self, rows: Tensor) -> Tensor:
        """And the other way round. Collective."""
        came = torch.empty_like(rows).index_copy_(0, self.order, rows)
        returned = self._moved(came, self.sent_counts, self.kept_counts)
        return torch.empty_like(returned).index_copy_(0, self.sent, returned)

    def _moved(self, rows: Tensor, come: list[int], go: list[int]) -> Tensor:
        if self.group.size() == 1:
            return rows
        found = rows.new_empty(sum(come), *rows.shape[1:])
        # As bytes: gloo and NCCL have neither bool nor int16, which routes among many experts are.
        to, of = (each.contiguous().flatten().view(torch.uint8).view(len(each), -1) for each in (found, rows))
        dist.all_to_all_single(to, of, come, go, group=self.group)
        return found


def _route(own: _Rows, rows_per_sample: int, max_tokens: int, ranks: Ranks) -> _Route:
    """Collective, as every rank deals out the samples of all."""
    size, rank, device = ranks.data.size(), ranks.data.rank(), ranks.device
    of_all = _Rows(ranks.all_gather_data(own.lengths), ranks.all_gather_data(own.shared)) if size > 1 else own
    by_rank = _dealt_rows(of_all, rows_per_sample, max_tokens, size)
    own_rows = len(own.lengths)

    def from_rank(microbatches: list[list[int]]) -> list[tuple[int, int]]:
        """(the rank that has it, its row there), of all rows of microbatches in their order."""
        return [divmod(row, own_rows) for part in microbatches for row in part]

    sent = [[row for owner, row in from_rank(parts) if owner == rank] for parts in by_rank]
    wanted = [owner for owner, _ in from_rank(by_rank[rank])]
    # What comes is sorted by the rank it comes from, and in the order of the microbatches beyond that.
    order = torch.tensor(sorted(range(len(wanted)), key=wanted.__getitem__)).argsort()
    return _Route(
        group=ranks.data,
        sent=torch.tensor([row for rows in sent for row in rows], dtype=torch.int64, device=device),
        sent_counts=[len(rows) for rows in sent],
        kept_counts=[wanted.count(owner) for owner in range(size)],
        order=order.to(device),
        rows=[of_all.picked(part) for part in by_rank[rank]],
        width=max(of_all.lengths),
    )


def _dealt_rows(rows: _Rows, rows_per_sample: int, max_tokens: int, num_ranks: int) -> list[list[list[int]]]:
    """Microbatches of each rank, each by its rows, such that the longest way through all of them is short."""
    best, least = [], math.inf
    # Whole groups, parts of them that are small beside the budget, and rows each for itself.
    sizes = [max_tokens // parts for parts in (1, 2, 4, 8)] if any(rows.shared) else []
    for most in [*sizes, 0]:
        samples = _samples(rows, rows_per_sample, most)
        if len(samples) < num_ranks:
            continue
        tokens = [rows.picked(sample).num_tokens for sample in samples]
        by_rank = dealt(tokens, max_tokens, num_ranks)
        each = [[sorted(row for i in part for row in samples[i]) for part in parts] for parts in by_rank]
        fits = all(_is_within(max_tokens, part, tokens) for parts in by_rank for part in parts)
        turns = zip(*([rows.picked(part).num_tokens for part in parts] for parts in each), strict=True)
        longest = sum(max(turn) for turn in turns)
        if (fits or most == 0) and longest < least:
            best, least = each, longest
    return best


def _samples(rows: _Rows, rows_per_sample: int, most: int) -> list[list[int]]:
    """What is never cut apart: so many rows, and those that follow with their prompt, up to `most` tokens.
    Rows without a completion between these are samples of their own."""
    samples: list[list[int]] = []
    last, num_tokens = 0, 0  # of the samples the last with a prompt
    for start in range(0, len(rows.lengths), rows_per_sample):
        sample = range(start, start + rows_per_sample)
        more = sum(rows.lengths[row] - rows.shared[row] for row in sample)
        if rows.shared[start] and num_tokens + more <= most:
            samples[last] += sample
            num_tokens += more
            continue
        samples.append([*sample])
        if any(has_prompt(rows.lengths[row]) for row in sample):
            last, num_tokens = len(samples) - 1, rows.picked(sample).num_tokens
    return samples


def dealt(lengths: Sequence[int], max_tokens: int, num_ranks: int = 1) -> list[list[list[int]]]:
    """Samples of these lengths as microbatches: by rank, those of each rank, each by its samples' numbers.

    Every rank has as many microbatches, the fewest with which each is within `max_tokens` or one sample; as
    many as there can be, where the samples are no multiple of the ranks and none is enough.
    """
    assert len(lengths) >= num_ranks
    least = math.ceil(sum(lengths) / max_tokens / num_ranks)
    parts: list[list[int]] = []
    for count in range(min(least, len(lengths) // num_ranks) * num_ranks, len(lengths) + 1, num_ranks):
        parts = _spread(lengths, count)
        if all(_is_within(max_tokens, part, lengths) for part in parts):
            break
    parts.sort(key=lambda part: (-sum(lengths[i] for i in part), part))
    turns = [parts[start : start + num_ranks] for start in range(0, len(parts), num_ranks)]
    # To and fro, so that the first rank does not get the fullest of every turn.
    turns = [turn[::-1] if odd % 2 else turn for odd, turn in enumerate(turns)]
    return [[turn[rank] for turn in turns] for rank in range(num_ranks)]


def _is_within(max_tokens: int, part: Sequence[int], lengths: Sequence[int]) -> bool:
    return len(part) == 1 or sum(lengths[i] for i in part) <= max_tokens


def _spread(lengths: Sequence[int], count: int) -> list[list[int]]:
    """The samples over `count` parts: the longest first, each to the part with the fewest tokens."""
    parts: list[list[int]] = [[] for _ in range(count)]
    fewest = [(0, part) for part in range(count)]
    for sample in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        num_tokens, part = fewest[0]
        parts[part].append(sample)
        heapq.heapreplace(fewest, (num_tokens + lengths[sample], part))
    return [sorted(part) for part in parts]


def _dealt_out(batch: B, route: _Route) -> Iterator[B]:
    """The microbatches' rows, from the ranks that have them. Collective."""
    rows = batch.mapped(lambda tensor: route.there(_as_wide(tensor, route.width)))
    start = 0
    for of_part in route.rows:
        part, longest = rows[start : start + len(of_part.lengths)], max(of_part.lengths)
        yield part.mapped(lambda tensor, longest=longest: _as_wide(tensor, longest))
        start += len(of_part.lengths)


def _as_wide(rows: Tensor, width: int) -> Tensor:  # [B, S, ...] -> [B, width, ...]; [B] as it is
    """Cut to so many positions, or with zeros behind."""
    if rows.ndim == 1 or rows.shape[1] == width:
        return rows
    return pad(rows, (0, 0) * (rows.ndim - 2) + (0, width - rows.shape[1]))
