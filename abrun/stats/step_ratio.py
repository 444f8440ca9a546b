"""Ratio of two arms that holds at every step, and whether another scale explains it."""

import math

import numpy as np

from abrun.stats.series import Array

MIN_STEPS = 10  # with fewer, one arm is above the other at every step by chance
MIN_RATIO = 1.01  # of the arms' levels; a smaller one is not worth a sentence
CONSTANT_RATIO = 1.5  # largest over smallest ratio of a nearly constant factor
MAX_SHARE_OF_SHIFT = 0.5  # of the squares that a shift leaves: what a factor may leave to explain the ratio
ROUNDING = 1e-6  # of a value: what a shift leaves on flat curves, which a factor explains as well


def ratio_at_each_step(
    baseline: Array,  # [R, S] runs and steps; in both arms the same
    treatment: Array,
) -> tuple[float, float, float] | None:
    """Return geometric mean, minimum and maximum of treatment / baseline over pairs and steps.

    None if the arms cross or hardly differ, have unlike numbers of runs, values that are not positive, or too
    few steps.
    """
    if baseline.shape != treatment.shape or baseline.shape[-1] < MIN_STEPS:
        return None
    if min(baseline.min(), treatment.min()) <= 0:
        return None
    log_ratios = np.log(treatment) - np.log(baseline)
    mean, low, high = map(float, (log_ratios.mean(), log_ratios.min(), log_ratios.max()))
    if low * high <= 0 or abs(mean) < math.log(MIN_RATIO):
        return None
    return math.exp(mean), math.exp(low), math.exp(high)


def is_factor(ratio: tuple[float, float, float], baseline: Array, treatment: Array) -> bool:
    """Return whether such a ratio is nearly constant, and explains the larger arm better than a shift does.

    It may vary by no more than it differs from 1, and by CONSTANT_RATIO. The larger arm y is fitted by least
    squares, as f x (f = sum x y / sum x^2) and as x + c (c = mean y - mean x), of the smaller arm x: one
    parameter each, so that their sums of squares compare. On a flat curve neither is better: no factor.
    """
    mean, low, high = map(math.log, ratio)
    smaller, larger = (baseline, treatment) if mean > 0 else (treatment, baseline)
    factor, shifts = (smaller * larger).sum() / (smaller**2).sum(), larger - smaller
    left_by_factor = ((larger - factor * smaller) ** 2).sum()
    left_by_shift = ((shifts - shifts.mean()) ** 2).sum() - ((ROUNDING * larger) ** 2).sum()
    is_constant = high - low <= min(math.log(CONSTANT_RATIO), abs(mean))
    return bool(is_constant and left_by_factor < MAX_SHARE_OF_SHIFT * left_by_shift)
