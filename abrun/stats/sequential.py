"""Group-sequential levels: one for each interim analysis, so that all of them keep one error rate.

A group-sequential design with equal nominal levels (Pocock 1977, doi:10.1093/biomet/64.2.191), or levels in
proportion to the share of the pairs. Both are calibrated on the joint distribution of Student's t at the
declared numbers of pairs. At the edge of the margin that distribution depends on nothing else, whereas
alpha-spending functions for normal statistics are inaccurate at so few pairs. Imports scipy.
"""

from collections.abc import Sequence
from functools import cache
from typing import Literal

import numpy as np
from scipy import special

from abrun.stats.equivalence import ALPHA

Spending = Literal["equal", "rising"]  # how interim analyses share the level
_NUM_EXPERIMENTS = 200_000  # simulated; a level of 0.05 is accurate to 0.0005


def interim_level(counts: Sequence[int], level: float = ALPHA) -> float:
    """Return the one-sided level of every interim analysis at `counts` pairs, for `level` in all."""
    return interim_levels(counts, level)[0] if counts else level


def interim_levels(counts: Sequence[int], level: float = ALPHA, spending: Spending = "equal") -> list[float]:
    """Return the one-sided level of each interim analysis at `counts` pairs, for `level` in all.

    "rising": a level is proportional to its share of the pairs. Early analyses cost less power.
    """
    if len(counts) < 2:
        return [level] * len(counts)
    shares = tuple(count / counts[-1] if spending == "rising" else 1.0 for count in counts)
    if level * _NUM_EXPERIMENTS > 20:
        final_level = float(np.quantile(_simulate_min_p(tuple(counts), shares), level))
    else:  # Bonferroni: there are too few draws this far out in the tail
        final_level = level / sum(shares)
    return [final_level * share for share in shares]


@cache
def _simulate_min_p(counts: tuple[int, ...], shares: tuple[float, ...]) -> np.ndarray:
    """Return the sorted minima of p / share over interim analyses, one per experiment without effect."""
    rng = np.random.default_rng(0)
    total, squares = np.zeros(_NUM_EXPERIMENTS), np.zeros(_NUM_EXPERIMENTS)
    min_p, previous_count = np.ones(_NUM_EXPERIMENTS), 0
    for count, share in zip(counts, shares, strict=True):
        added, previous_count = count - previous_count, count
        z = rng.standard_normal(_NUM_EXPERIMENTS)
        total += np.sqrt(added) * z
        squares += z**2 + (rng.chisquare(added - 1, _NUM_EXPERIMENTS) if added > 1 else 0.0)
        if count == 1:
            continue  # one pair has no t statistic: only facts such as `exact: true` can decide
        variance = (squares - total**2 / count) / (count - 1)
        t = total / np.sqrt(count * np.maximum(variance, 1e-300))
        min_p = np.minimum(min_p, special.stdtr(count - 1, -t) / share)
    return np.sort(min_p)
