"""The step in which values move: an accuracy over 16 prompts moves in sixteenths, a log in its last digit."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
MAX_DECIMALS = 6  # a log with more decimals is not rounded


def smallest_step(
    arms: Sequence[str],  # [R] arm of each run
    curves: Sequence[Array],  # [R][S] finite values of each run
) -> float:
    """Return the smallest gap between values of an arm that are counts, and 0 for all others.

    Values are counts if they are multiples of the gap, to the last logged digit, or occur three times each on
    average. (Values of bit-identical arms occur twice.) The distance of two arms is no gap: an effect is no
    step of the metric. Between shares or rewards, from -1 to 1, it may be one: if the values of some arm are
    that far apart as well, or if all scores of one value a run are its multiples, as k/n of few prompts. A
    value that a run repeats from step to step counts once: a constant, such as a peak, is logged at every
    step.
    """
    by_arm: dict[str, list[Array]] = {}
    for arm, curve in zip(arms, curves, strict=True):
        by_arm.setdefault(arm, []).append(curve[np.diff(curve, prepend=np.nan) != 0])
    groups = [values for values in map(np.concatenate, by_arm.values()) if len(values)]
    if groups and all(np.abs(values).max() <= 1 for values in groups):
        are_scores = all(len(curve) == 1 for curve in curves)
        step = _smallest_gap([np.concatenate(groups)], from_zero=are_scores)
        if step and (are_scores or step <= 1.01 * max(map(np.ptp, groups))):
            return step
    return _smallest_gap(groups, from_zero=False)


def _smallest_gap(groups: Sequence[Array], *, from_zero: bool) -> float:
    """Return the smallest gap within a group; 0 for no counts, or with `from_zero` for no multiples of it."""
    gaps = np.concatenate([np.empty(0), *(np.diff(np.unique(values)) for values in groups)])
    gaps = gaps[gaps > 1e-6 * gaps.sum()]  # smaller gaps are rounding
    if not len(gaps):
        return 0.0
    values = np.concatenate(groups)
    unit = 1.01 * last_decimal_unit(values)
    wider = gaps[gaps > unit]
    if len(wider) and wider.min() > 2.5 * unit:  # 0.375 may be logged as 0.37 and as 0.38
        gaps = wider
    step = float(gaps.min())
    distances = np.concatenate([gaps, values]) if from_zero else gaps
    is_grid = np.abs(distances - step * np.round(distances / step)).max() <= max(0.01 * step, unit)
    are_repeated = not from_zero and 3 * (len(gaps) + len(groups)) <= len(values)
    return step if is_grid or are_repeated else 0.0


def last_decimal_unit(values: Array) -> float:
    """Return the unit of the last decimal that any value has; 0 for more decimals than logs round to."""
    parts, tolerance = (values[:100], values), 1e-7 * float(np.abs(values).max())  # float32 precision
    for decimals in range(MAX_DECIMALS + 1):
        # Most often the first few values have more decimals already
        if all(np.abs(part - np.round(part, decimals)).max() <= tolerance for part in parts):
            return 10.0**-decimals
    return 0.0


def agree_beyond_chance(pairs: Array) -> bool:
    """Return True if both values of at least two pairs [P, 2] agree, as unrelated values hardly would.

    They differ, and are logged, more finely than 1 % of their sd over pairs: of common prompts, values differ
    far less within pairs than between them, and a log of few digits makes them equal.
    """
    distance = float(np.abs(pairs[:, 1] - pairs[:, 0]).max())
    return distance + last_decimal_unit(pairs) <= 0.01 * float(pairs[:, 0].std(ddof=1))
