"""How tokens and rows are cut."""

import math
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from abrun.trainer.kernels.head import Cost
from abrun.trainer.kernels.linear import BYTES_PER_TOKEN, make_grid, make_whole_row_grid

costs = st.builds(
    Cost,
    token=st.sampled_from([0.0, 4.0, 16384.0]),
    row=st.sampled_from([0.0, 8192.0]),
    logit=st.floats(0.04, 20),
)


def size(pieces: list[slice]) -> int:
    return max(piece.stop - piece.start for piece in pieces)


@settings(deadline=None)
@given(st.integers(1, 200_000), st.integers(1, 300_000), costs, st.integers(2**24, 2**32), st.booleans())
def test_covers_everything_once_within_the_budget(
    num_tokens: int, num_rows: int, cost: Cost, budget_bytes: int, whole_rows: bool
) -> None:
    make = make_whole_row_grid if whole_rows else make_grid
    grid = make(num_tokens, num_rows, cost, budget_bytes)
    for pieces, total in ((grid.tiles, num_tokens), (grid.chunks, num_rows)):
        assert pieces[0].start == 0 and pieces[-1].stop == total
        assert all(one.stop == two.start for one, two in pairwise(pieces))
        assert all(piece.stop > piece.start for piece in pieces)
    tile, chunk = size(grid.tiles), size(grid.chunks)
    logits = tile * (num_rows if whole_rows else chunk) * cost.logit
    held = num_tokens * BYTES_PER_TOKEN + tile * cost.token + chunk * cost.row + logits
    always = min(num_tokens * BYTES_PER_TOKEN, budget_bytes / 2)  # what no cut avoids, or as much of it
    held += always - num_tokens * BYTES_PER_TOKEN
    assert held <= budget_bytes * 1.001 or tile == 1 or chunk == 1


FLOAT32_HEAD = Cost(token=8 * 4096, row=8 * 4096, logit=12)  # copies and sums of bfloat16 factors, H 4096


@pytest.mark.parametrize("budget_mib", [512, 160, 129, 128, 127, 64, 16, 4])
@pytest.mark.parametrize("cost", [FLOAT32_HEAD, Cost(logit=12), Cost(token=8 * 4096, logit=8)])
def test_a_small_budget_narrows_chunks_before_tiles_get_thin(budget_mib: int, cost: Cost) -> None:
    """Below 4,096 rows' worth of memory the tiles were one token each: 327,680 pieces at 128 MiB."""
    num_tokens, num_rows, budget_bytes = 8192, 151936, budget_mib * 2**20
    grid = make_grid(num_tokens, num_rows, cost, budget_bytes)
    tile, chunk = size(grid.tiles), size(grid.chunks)
    budget = max(budget_bytes - num_tokens * BYTES_PER_TOKEN, budget_bytes / 2)
    # Half of the budget for either side, and the square that the logits leave: up to two cuts of each.
    most_tokens = min(num_tokens, budget / 2 / (cost.token + 1e-9), math.sqrt(budget / 2 / cost.logit))
    assert tile >= most_tokens / 2 and chunk >= min(most_tokens, budget / 2 / (cost.row + 1e-9)) / 2
    if budget_mib == 128 and cost == FLOAT32_HEAD:
        assert len(grid.tiles) * len(grid.chunks) < 1000


def test_many_tokens_with_a_budget_below_their_own_numbers() -> None:
    """What a million tokens need however they are cut is as much as the budget: pieces stay of some size."""
    grid = make_grid(2**20, 151936, Cost(logit=12), 128 * 2**20)
    assert size(grid.tiles) > 1000 and size(grid.chunks) > 1000


def test_pieces_are_even_and_aligned() -> None:
    cost = Cost(logit=2 + 12 / 256)
    grid = make_whole_row_grid(8192, 151936, cost, 2**29)
    assert [tile.stop - tile.start for tile in grid.tiles] == [1024, 1536, 1536, 1024, 1536, 1536]
    assert grid.chunks == [slice(0, 151936)]
    grid = make_grid(8192, 151936, Cost(token=4 * 4096, logit=2), 2**29)
    assert grid.tiles == [slice(0, 8192)]
    assert all(chunk.start % 256 == 0 for chunk in grid.chunks) and len(grid.chunks) == 7


def test_a_given_chunk_size_is_kept() -> None:
    grid = make_grid(100, 151, Cost(logit=8), 2**29, chunk_size=40)
    assert size(grid.chunks) <= 40 and len(grid.chunks) == 4


def test_nothing_to_cut() -> None:
    assert make_grid(0, 151, Cost(logit=8), 2**29).tiles == []
    assert make_whole_row_grid(7, 0, Cost(logit=8), 2**29).chunks == []
