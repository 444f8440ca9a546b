"""How tokens and rows are cut."""

from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import given, settings

from abrun.kernels.grid import BYTES_A_TOKEN, Cost, make_grid, make_lent_grid, make_whole_row_grid

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
    held = num_tokens * BYTES_A_TOKEN + tile * cost.token + chunk * cost.row + logits
    assert held <= budget_bytes * 1.001 or tile == 1 or chunk == 1


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


def test_a_lent_tile_needs_chunks_of_some_width() -> None:
    cost = Cost(token=4 * 4096 + 151936 * 12 / 256, logit=2)
    grid = make_lent_grid(8192, 4096, 151936, cost, 2**29)
    assert grid is not None and grid.lent and grid.tiles == [slice(0, 4096)] and len(grid.chunks) == 3
    assert make_lent_grid(8192, 4096, 151936, cost, 2**26) is None
    rest = make_whole_row_grid(8192, 151936, Cost(logit=2 + 12 / 256), 2**29, start=4096)
    assert [(tile.start, tile.stop) for tile in rest.tiles] == [(4096, 5120), (5120, 6656), (6656, 8192)]
