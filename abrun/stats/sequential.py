"""Group-sequential levels: one for each interim analysis, so that all of them keep one error rate.

A group-sequential design with equal nominal levels (Pocock 1977, doi:10.1093/biomet/64.2.191), levels in
proportion to the share of the pairs, or levels of a normal statistic whose limit falls with the root of that
share (O'Brien and Fleming 1979, doi:10.2307/2530245). All are calibrated on the joint distribution of
Student's t at the declared numbers of pairs. At the edge of the margin that distribution depends on nothing
else, whereas alpha-spending functions for normal statistics are inaccurate at so few pairs. A variance that
is moderated by earlier experiments only keeps the analyses closer together. Imports scipy.
"""

from collections.abc import Sequence
from functools import cache
from typing import Literal, TypeVar

import numpy as np
from scipy import special

from abrun.stats.equivalence import ALPHA

Spending = Literal["equal", "rising", "obrien_fleming"]  # how interim analyses share the level
Levels = TypeVar("Levels", float, np.ndarray)
_NUM_EXPERIMENTS = 200_000  # simulated; a level of 0.05 is accurate to 0.0005


def interim_level(counts: Sequence[int], level: float = ALPHA) -> float:
    """Return the one-sided level of every interim analysis at `counts` pairs, for `level` in all."""
    return interim_levels(counts, level)[0] if counts else level


def interim_levels(counts: Sequence[int], level: float = ALPHA, spending: Spending = "equal") -> list[float]:
    """Return the one-sided level of each interim analysis at `counts` pairs, for `level` in all.

    "rising" and "obrien_fleming" leave more of the level to late analyses: early ones cost less power.
    """
    if len(counts) < 2:
        return [level] * len(counts)
    if level * _NUM_EXPERIMENTS > 20:
        final_level = float(np.quantile(_simulate_min_final(tuple(counts), spending), level))
    else:  # Bonferroni: there are too few draws this far out in the tail
        final_level = level / sum(_at_share(1.0, count / counts[-1], spending) for count in counts)
    return [float(_at_share(final_level, count / counts[-1], spending)) for count in counts]


def _at_share(final_level: Levels, share: float, spending: Spending, *, inverse: bool = False) -> Levels:
    """Return the level at a share of the pairs for this level at all of them; `inverse`: the other way."""
    if spending == "obrien_fleming":
        root = np.sqrt(share)
        return special.ndtr(special.ndtri(final_level) * (root if inverse else 1 / root))
    factor = share if spending == "rising" else 1.0
    return final_level / factor if inverse else final_level * factor


@cache
def _simulate_min_final(counts: tuple[int, ...], spending: Spending) -> np.ndarray:
    """Return the smallest final level, sorted, at which each of many experiments without effect rejects."""
    rng = np.random.default_rng(0)
    total, squares = np.zeros(_NUM_EXPERIMENTS), np.zeros(_NUM_EXPERIMENTS)
    min_p, previous_count = np.ones(_NUM_EXPERIMENTS), 0
    for count in counts:
        added, previous_count = count - previous_count, count
        z = rng.standard_normal(_NUM_EXPERIMENTS)
        total += np.sqrt(added) * z
        squares += z**2 + (rng.chisquare(added - 1, _NUM_EXPERIMENTS) if added > 1 else 0.0)
        if count == 1:
            continue  # one pair has no t statistic: only facts such as `exact: true` can decide
        variance = (squares - total**2 / count) / (count - 1)
        t = total / np.sqrt(count * np.maximum(variance, 1e-300))
        p_values = special.stdtr(count - 1, -t)
        min_p = np.minimum(min_p, _at_share(p_values, count / counts[-1], spending, inverse=True))
    return np.sort(min_p)
