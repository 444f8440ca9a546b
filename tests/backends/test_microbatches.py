"""Samples that are dealt out over ranks and brought back: every kind of tensor, to the last bit."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from abrun.backends.microbatches import Microbatches
from abrun.backends.ranks import make_ranks
from abrun.recipe import Policy
from abrun.rl.batch import Sequences
from tests.backends.policies import CPU
from tests.spawn import run_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked(Sequences):
    """Every kind of tensor that a batch can have; `row` tells which of all ranks' rows it is."""

    row: Tensor  # [B] int64
    wide: Tensor  # [B, S] float64
    narrow: Tensor  # [B, S] bfloat16


def batch_of(lengths: list[int], first_row: int, together: int, spare: int) -> Marked:
    """Rows of these lengths (0: no completion), padded to `spare` more; any entry tells its row and place."""
    width, num_rows = max(max(lengths), 2) + spare, len(lengths)
    rows = torch.arange(first_row, first_row + num_rows)
    place = torch.arange(width).expand(num_rows, width)
    entry = rows[:, None] * 100 + place
    mask = torch.zeros(num_rows, width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        if length:
            mask[row, length - 1] = True
            mask[row, 1 : length - 1] = entry[row, 1 : length - 1] % 3 > 0
    return Marked(
        token_ids=entry,
        token_mask=mask,
        rows_together=together,
        routes=(entry[..., None] * torch.tensor([1, -1, 2])).to(torch.int16),
        support=(entry[..., None] + torch.arange(5)).to(torch.uint8),
        row=rows,
        wide=entry / 3,
        narrow=entry.bfloat16(),
    )


def dealt_out(rank: int, world_size: int, cases: list[tuple[list[list[int]], int, int]]) -> list[Any]:
    ranks, found = make_ranks(CPU, {}), []
    for lengths, together, max_tokens in cases:
        batch = batch_of(lengths[rank], rank * len(lengths[rank]), together, spare=3 * rank)
        each = Microbatches(batch, Policy(packing=True, micro_batch_tokens=max_tokens), ranks)
        seen, came = [], {}
        for part, packing in each:
            assert packing is not None
            seen.append((part.row.tolist(), packing.starts[-1]))
            for index, row in enumerate(part.row.tolist()):
                owner, place = divmod(row, len(lengths[0]))
                whole = batch_of(lengths[owner], owner * len(lengths[owner]), together, spare=3 * owner)
                length = max(lengths[owner][place], 2)
                for name in ("token_ids", "token_mask", "routes", "support", "wide", "narrow"):
                    own, expected = getattr(part, name)[index], getattr(whole, name)[place]
                    assert own.dtype == expected.dtype
                    assert torch.equal(own[:length], expected[:length]), (name, row)
                assert not part.token_mask[index, length:].any()
        for name in ("token_mask", "routes", "wide", "row"):
            came[name] = each.in_rows([getattr(part, name) for part, _ in each])
            expected = getattr(batch, name)
            assert came[name].shape == expected.shape and came[name].dtype == expected.dtype
            for row, length in enumerate(lengths[rank]):
                stop = max(length, 2)
                assert (
                    torch.equal(came[name][row][:stop], expected[row][:stop]) if expected.ndim > 1 else True
                )
        assert torch.equal(came["row"], batch.row) and torch.equal(came["token_mask"], batch.token_mask)
        found.append(seen)
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_whatever_is_dealt_out_comes_back(world_size: int) -> None:
    draw = random.Random(world_size)
    cases = [([[7]] * world_size, 1, 1), ([[0, 0]] * world_size, 2, 9), ([[0, 30]] * world_size, 1, 4)]
    for _ in range(40):
        together = draw.choice([1, 2])
        num_rows = together * draw.randint(1, 6)
        longest = [draw.choice([2, 5, 30]) for _ in range(world_size)]
        lengths = [[draw.choice([0, draw.randint(2, most)]) for _ in range(num_rows)] for most in longest]
        cases.append((lengths, together, draw.choice([1, 8, 25, 60, 1000])))
    by_rank = run_ranks(dealt_out, world_size, cases)
    for number, (lengths, together, max_tokens) in enumerate(cases):
        of_ranks = [found[number] for found in by_rank]
        assert len({len(parts) for parts in of_ranks}) == 1
        rows = [row for parts in of_ranks for part, _ in parts for row in part]
        assert sorted(rows) == list(range(world_size * len(lengths[0])))
        of_row = [max(length, 2) for of_rank in lengths for length in of_rank]
        for part, num_tokens in (part for parts in of_ranks for part in parts):
            assert num_tokens == sum(of_row[row] for row in part)
            assert num_tokens <= max_tokens or len(part) == together
            assert all(row % together == place % together for place, row in enumerate(part))
            if together == 2:
                assert all(one + 1 == two for one, two in zip(part[::2], part[1::2], strict=True))
