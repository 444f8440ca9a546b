"""Group-sequential levels: one for each interim analysis, so that all of them keep one error rate.

A group-sequential design with equal nominal levels (Pocock 1977, doi:10.1093/biomet/64.2.191), or levels in
proportion to the share of the pairs. Both are calibrated on the joint law of Student's t at the declared
numbers of pairs: at the edge of the margin that law depends on nothing else, and spending functions for
normal statistics err at so few pairs. Pulls in scipy.
"""

from collections.abc import Collection, Sequence
from functools import cache
from itertools import islice
from typing import Literal

import numpy as np
from scipy import special

from abrun.stats.equivalence import ALPHA

Spending = Literal["equal", "rising"]  # how interim analyses share the level
_DRAWS = 200_000  # of an experiment: the level of .05 is met to .0005
_MAX_PAIRS = 60  # of repeated readings, and readings, that are simulated


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
    if level * _DRAWS > 20:
        last = float(np.quantile(_smallest_p(tuple(counts), shares), level))
    else:  # too few draws so far out in the tail to calibrate by: Bonferroni
        last = level / sum(shares)
    return [last * share for share in shares]


def level_of_readings(readings: Sequence[Collection[str]], level: float = ALPHA) -> float:
    """The one-sided level of tests at full level on several sets of pairs, of which the best is taken."""
    # In the order of the readings: the same draws whatever the pairs are called
    names = dict.fromkeys(name for reading in readings for name in sorted(reading))
    pairs = {name: row for row, name in enumerate(islice(names, _MAX_PAIRS))}
    z = np.random.default_rng(0).standard_normal((len(pairs), _DRAWS // 5))
    significant = np.zeros(z.shape[1], bool)
    for reading in islice(readings, _MAX_PAIRS):
        rows = sorted(pairs[name] for name in reading if name in pairs)
        if len(rows) > 1:
            sample = z[rows]
            error = sample.std(axis=0, ddof=1) / np.sqrt(len(rows))
            significant |= sample.mean(axis=0) > special.stdtrit(len(rows) - 1, 1 - level) * error
    return float(significant.mean())


@cache
def _smallest_p(counts: tuple[int, ...], shares: tuple[float, ...]) -> np.ndarray:
    """Sorted over simulated experiments without an effect: the smallest p / share of their analyses."""
    rng = np.random.default_rng(0)
    total, squares = np.zeros(_DRAWS), np.zeros(_DRAWS)
    smallest, before = np.ones(_DRAWS), 0
    for count, share in zip(counts, shares, strict=True):
        added, before = count - before, count
        z = rng.standard_normal(_DRAWS)
        total += np.sqrt(added) * z
        squares += z**2 + (rng.chisquare(added - 1, _DRAWS) if added > 1 else 0.0)
        if count == 1:
            continue  # no t statistic yet: only facts decide there, such as `exact: true`
        variance = (squares - total**2 / count) / (count - 1)
        t = total / np.sqrt(count * np.maximum(variance, 1e-300))
        smallest = np.minimum(smallest, special.stdtr(count - 1, -t) / share)
    return np.sort(smallest)
