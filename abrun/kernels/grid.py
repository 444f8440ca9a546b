"""How a call is cut to stay within its memory budget: tokens into tiles, the shard's rows into chunks."""

import math
from dataclasses import dataclass, replace
from itertools import pairwise

# Rows of a chunk that a product needs to run at full rate: tokens are tiled before chunks get narrower,
# unless so many rows would leave a tile few tokens.
PREFERRED_CHUNK = 4096
# Pieces that are larger are cut at multiples of this, for the products' sake.
ALIGNMENT = 256
# That of tiles that hold whole rows, whose d_hidden is one product over the vocabulary: on the 132 processors
# of an H200 it takes a sixth longer a token with 1,408 or 1,664 tokens than with 1,024 or 1,536.
WHOLE_ROW_ALIGNMENT = 512
# The sums, the gradient's coefficients and what these are made of.
BYTES_PER_TOKEN = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    tiles: list[slice]  # of the tokens
    chunks: list[slice]  # of this shard's rows

    def without_padding(self, num_rows: int) -> "Grid":
        """The same tiles, and chunks of the first `num_rows` rows alone."""
        chunks = [slice(chunk.start, min(chunk.stop, num_rows)) for chunk in self.chunks]
        return replace(self, chunks=[chunk for chunk in chunks if chunk.start < num_rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Bytes held at once, above the inputs and the gradients: for each token of a tile, for each row of a
    chunk, and for each logit of the two."""

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
    """The largest tiles, and then the largest chunks, that the budget allows; `chunk_size` fixes the chunks.

    Tokens are tiled where they alone would take more than half of it, or leave too little for chunks of the
    preferred size. Where the budget is too small for that size, the chunks are narrowed first, to half of the
    budget, and to no more rows than a tile has tokens: thin strips would read each factor again and again. A
    piece is never less than one token or one row.
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
    """Tiles whose logits over all rows are held at once; chunks only where rows cost something."""
    budget = _remaining_budget(budget_bytes, num_tokens)
    chunks = _split_evenly(num_rows, budget / 2 / cost.row if cost.row else math.inf, ALIGNMENT)
    max_length = (budget - longest_slice(chunks) * cost.row) / (cost.token + max(num_rows, 1) * cost.logit)
    alignment = WHOLE_ROW_ALIGNMENT if max_length >= 2 * WHOLE_ROW_ALIGNMENT else ALIGNMENT
    return Grid(tiles=_split_evenly(num_tokens, max_length, alignment), chunks=chunks)


def _remaining_budget(budget_bytes: int, num_tokens: int) -> float:
    """What the pieces may take beside what all tokens need however they are cut; half of the budget at least,
    since no cut would bring it back within its bounds."""
    return max(budget_bytes - num_tokens * BYTES_PER_TOKEN, budget_bytes / 2)


def _preferred_width(cost: Cost, budget: float) -> float:
    """Rows of a chunk that leave a tile half of the budget, and as many tokens."""
    by_rows = budget / 2 / cost.row if cost.row else math.inf
    return min(PREFERRED_CHUNK, max(by_rows, 1), max(math.sqrt(budget / cost.logit), 1))


def longest_slice(slices: list[slice]) -> int:
    return max((part.stop - part.start for part in slices), default=0)


def _split_evenly(total: int, max_length: float, alignment: int) -> list[slice]:
    """The fewest pieces of at most `most`: about equal, at multiples of the alignment if they can be."""
    if total <= max_length:
        return [slice(0, total)] if total else []
    unit = alignment if max_length >= alignment else 1
    num_units = -(-total // unit)
    num_slices = -(-num_units // max(int(max_length) // unit, 1))
    bounds = [num_units * index // num_slices * unit for index in range(num_slices)] + [total]
    return [slice(*cut) for cut in pairwise(bounds)]
