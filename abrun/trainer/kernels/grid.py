"""Tiling within a memory budget: tokens are split into tiles, the vocabulary shard's rows into chunks."""

import math
from dataclasses import dataclass, replace
from itertools import pairwise

# Rows per chunk that a matmul needs for full throughput. Tokens are tiled before chunks get narrower than
# this, unless that would leave few tokens per tile.
PREFERRED_CHUNK = 4096
# Tiles and chunks larger than this are aligned to multiples of it, for matmul throughput.
ALIGNMENT = 256
# Alignment of tiles over all rows, whose d_hidden is one matmul over the vocabulary. On the 132
# multiprocessors of an H200 it takes a sixth more time per token with 1,408 or 1,664 tokens than with 1,024
# or 1,536.
WHOLE_ROW_ALIGNMENT = 512
# For the softmax sums, the gradient's coefficients and their intermediate results.
BYTES_PER_TOKEN = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    tiles: list[slice]  # of the tokens
    chunks: list[slice]  # of this shard's rows

    def without_padding(self, num_rows: int) -> "Grid":
        """Return a copy whose chunks end at row `num_rows`."""
        chunks = [slice(chunk.start, min(chunk.stop, num_rows)) for chunk in self.chunks]
        return replace(self, chunks=[chunk for chunk in chunks if chunk.start < num_rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Bytes held at once besides inputs and gradients: per token of a tile, row of a chunk, and logit."""

    token: float = 0.0
    row: float = 0.0
    logit: float = 0.0

    def __add__(self, addend: "Cost") -> "Cost":
        return Cost(
            token=self.token + addend.token, row=self.row + addend.row, logit=self.logit + addend.logit
        )


def make_grid(
    num_tokens: int,
    num_rows: int,
    cost: Cost,
    budget_bytes: int,
    chunk_size: int | None = None,
    max_chunk: float = math.inf,
) -> Grid:
    """Return the largest tiles, and then the largest chunks, that the budget allows.

    `chunk_size` fixes the chunks. Tokens are tiled if they alone would take more than half of the budget, or
    leave too little for chunks of the preferred size. If the budget is too small for that size, chunks are
    narrowed first: to half of the budget, and to no more rows than a tile has tokens, because thin strips
    would read the operands repeatedly. A tile or chunk has at least one token or row.
    """
    budget = _remaining_budget(budget_bytes, num_tokens)
    width = min(chunk_size or _preferred_width(cost, budget), max(num_rows, 1))
    max_length = (budget - width * cost.row) / (cost.token + width * cost.logit)
    tiles = _split_evenly(
        num_tokens, min(max_length, budget / 2 / cost.token) if cost.token else max_length, ALIGNMENT
    )
    if chunk_size is not None:
        return Grid(tiles=tiles, chunks=_split_evenly(num_rows, chunk_size, 1))
    tile_size = max(longest_slice(tiles), 1)
    max_length = (budget - tile_size * cost.token) / (cost.row + tile_size * cost.logit)
    return Grid(tiles=tiles, chunks=_split_evenly(num_rows, min(max_length, max_chunk), ALIGNMENT))


def make_whole_row_grid(num_tokens: int, num_rows: int, cost: Cost, budget_bytes: int) -> Grid:
    """Return tiles whose logits over all rows fit the budget; rows are chunked only if they cost memory."""
    budget = _remaining_budget(budget_bytes, num_tokens)
    chunks = _split_evenly(num_rows, budget / 2 / cost.row if cost.row else math.inf, ALIGNMENT)
    max_length = (budget - longest_slice(chunks) * cost.row) / (cost.token + max(num_rows, 1) * cost.logit)
    alignment = WHOLE_ROW_ALIGNMENT if max_length >= 2 * WHOLE_ROW_ALIGNMENT else ALIGNMENT
    return Grid(tiles=_split_evenly(num_tokens, max_length, alignment), chunks=chunks)


def _remaining_budget(budget_bytes: int, num_tokens: int) -> float:
    """Return the budget left for tiles and chunks after the fixed cost of all tokens.

    At least half of the budget, because no tiling reduces the fixed cost.
    """
    return max(budget_bytes - num_tokens * BYTES_PER_TOKEN, budget_bytes / 2)


def _preferred_width(cost: Cost, budget: float) -> float:
    """Return the rows per chunk that leave half of the budget to the tile, with no fewer tokens than rows."""
    by_rows = budget / 2 / cost.row if cost.row else math.inf
    return min(PREFERRED_CHUNK, max(by_rows, 1), max(math.sqrt(budget / cost.logit), 1))


def longest_slice(slices: list[slice]) -> int:
    return max((part.stop - part.start for part in slices), default=0)


def _split_evenly(total: int, max_length: float, alignment: int) -> list[slice]:
    """Split `total` into the fewest, about equal slices of at most `max_length`, aligned if possible."""
    if total <= max_length:
        return [slice(0, total)] if total else []
    unit = alignment if max_length >= alignment else 1
    num_units = -(-total // unit)
    num_slices = -(-num_units // max(int(max_length) // unit, 1))
    bounds = [num_units * index // num_slices * unit for index in range(num_slices)] + [total]
    return [slice(*cut) for cut in pairwise(bounds)]
