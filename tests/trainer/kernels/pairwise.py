"""Few combinations of settings instead of all."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations in which every value of a factor meets every value of each other factor."""
    rows = list(product(*(range(len(factor)) for factor in factors)))
    places = list(combinations(range(len(factors)), 2))
    unmet = {(place, row[place[0]], row[place[1]]) for row in rows for place in places}
    chosen = []
    while unmet:
        new = max(rows, key=lambda row: sum((p, row[p[0]], row[p[1]]) in unmet for p in places))
        unmet -= {(place, new[place[0]], new[place[1]]) for place in places}
        chosen.append(new)
    return [
        tuple(factor[index] for factor, index in zip(factors, row, strict=True)) for row in sorted(chosen)
    ]
