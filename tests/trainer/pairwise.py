"""Few combinations of settings by default, and all of them in the slow suite."""

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def few(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
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


def pairwise(*factors: Sequence[Any], slow: Callable[..., bool] = lambda *_: False) -> list[Any]:
    """Return all combinations as parameters of a test, of which the few run by default.

    The others are slow, and those of which `slow` is true. A value may be a `pytest.param` with marks.
    """
    quick = few(*(range(len(factor)) for factor in factors))
    parameters = []
    for places in product(*(range(len(factor)) for factor in factors)):
        given = [factor[place] for factor, place in zip(factors, places, strict=True)]
        values = [value.values[0] if hasattr(value, "marks") else value for value in given]
        marks = [mark for value in given for mark in getattr(value, "marks", ())]
        if places not in quick or slow(*values):
            marks.append(pytest.mark.slow)
        parameters.append(pytest.param(*values, marks=marks))
    return parameters
