"""Curves of runs, step by step: copies, smoothing, a running best, shared noise, and ratios of arms.

R runs, S steps that all of them have.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from abrun.stats.series import Array, Series

COPY_CORRELATION = 0.99  # of two runs' step changes; distinct seeds in docs/evidence reach 0.76
REPEAT_CORRELATION = 0.9999  # the same if all runs move alike: noise below 1 % of the shared change
MIN_STEPS = 10  # and distinct values; with fewer, changes can be equal by chance
MAX_SHARED_CORRELATION = 0.25  # of the changes of two pairs' differences, mean over all pairs
_SHARED_SDS = 3.0  # and so many standard errors above 0
MIN_REVERSALS = 0.1  # share of the steps at which a curve that is not a running best turns back
_TINY_SHARE = 1e-3  # of the noise of a step
_CLIP_SDS = 3.0  # robust sds; a single jump shared by all seeds must not look like a copy
_DIFFERENCE_ORDERS = (1, 2, 3)  # third differences contain no trend shared by all seeds


def find_copies(values: Array) -> NDArray[np.bool_]:
    """Return which two curves of [R, S] are one run plus noise [R, R]: changes of every order agree.

    Seeds that see the same batches agree as well, in all runs. So the changes must also agree after the mean
    change of all runs is removed, unless almost nothing but that mean is left.
    """
    num_runs, detailed = len(values), has_detail(values)
    if not detailed.any():
        return np.zeros((num_runs, num_runs), bool)
    correlations, residual_correlations = np.ones((num_runs, num_runs)), np.ones((num_runs, num_runs))
    for order in _DIFFERENCE_ORDERS:
        changes = _clipped_changes(values[detailed], order)
        changes -= changes.mean(axis=-1, keepdims=True)
        shared = changes.mean(axis=0)
        squares = float(shared @ shared)
        loadings = changes @ shared / squares if squares else np.zeros(len(changes))
        inside = np.ix_(detailed, detailed)
        correlations[inside] = np.minimum(correlations[inside], _cosines(changes))
        residual_correlations[inside] = np.minimum(
            residual_correlations[inside], _cosines(changes - np.outer(loadings, shared))
        )
    is_copy = ((correlations > COPY_CORRELATION) & (residual_correlations > COPY_CORRELATION)) | (
        correlations > REPEAT_CORRELATION
    )
    return is_copy & detailed[:, None] & detailed[None, :]


def has_same_curve(
    series: Series, other_series: Series, precision: Callable[[Series], tuple[int, float]]
) -> bool:
    """Return True for ten or more steps of a moving curve that agree to the last digit of the coarser log."""
    if len(series) < MIN_STEPS or not np.array_equal(series.steps, other_series.steps):
        return False
    if not np.isfinite(series.values).all():
        return False
    error = series.values - other_series.values
    distance, size = np.abs(error).max(), np.ptp(series.values)
    if not distance <= size / 18:
        return False
    num_distinct, digits = zip(*map(precision, (series, other_series)), strict=True)
    if min(num_distinct) < MIN_STEPS:  # with ten distinct values, one digit is at most a ninth of their range
        return False
    # Rounding errors jump from step to step; the difference of two smooth curves does not.
    is_rounding = distance <= 0.501 * max(digits) and np.var(np.diff(error)) > np.var(error)
    return bool(distance <= 1e-6 * size or is_rounding)


def has_detail(values: Array) -> NDArray[Any]:
    """Return which curves [R] of [R, S] can tell runs apart: long, finite, neither discrete nor constant."""
    if values.shape[-1] < MIN_STEPS:
        return np.zeros(len(values), bool)
    finite = np.asarray(np.isfinite(values).all(axis=-1))
    sorted_values = np.sort(np.where(finite[:, None], values, 0.0), axis=-1)
    distinct = 1 + (np.diff(sorted_values, axis=-1) > 0).sum(axis=-1)
    changes = np.diff(np.where(finite[:, None], values, 0.0), axis=-1)
    return finite & (distinct >= MIN_STEPS) & (_robust_sd(changes)[..., 0] > 0)


def measure_smoothness(values: Array) -> float | None:
    """Return the lag-1 autocorrelation of the step-to-step changes of curves [R, S], median over runs.

    None without runs, or if a curve lacks detail (see `has_detail`).
    """
    detailed = values[has_detail(values)] if len(values) else values
    if not len(detailed) or len(detailed) < len(values):
        return None
    changes = _clipped_changes(detailed, 1)
    later, earlier = (
        changes_part - changes_part.mean(axis=-1, keepdims=True)
        for changes_part in (changes[:, 1:], changes[:, :-1])
    )
    norms = np.sqrt((later**2).sum(axis=-1) * (earlier**2).sum(axis=-1))
    return float(np.median((later * earlier).sum(axis=-1) / np.where(norms > 0, norms, np.inf)))


def find_running_best(arms: Mapping[str, Array]) -> str | None:
    """Return the arm whose curves [R, S] go one way only, as the best value so far, if the other's do not.

    Short curves may go one way by chance. Each run of the other arm must turn back in a tenth of its steps.
    """
    if min(values.shape[-1] for values in arms.values()) < 2 * MIN_STEPS:
        return None
    names = list(arms)
    for arm, other in zip(names, reversed(names), strict=True):
        changes, other_changes = np.diff(arms[arm]), np.diff(arms[other])
        moves = (changes != 0).sum(axis=-1).min() > 2
        one_way = moves and ((changes >= 0).all() or (changes <= 0).all())
        turns = np.minimum((other_changes > 0).mean(axis=-1), (other_changes < 0).mean(axis=-1))
        if one_way and (turns >= MIN_REVERSALS).all():
            return arm
    return None


def is_tiny(differences: Array, baseline: Array) -> bool:
    """Return whether all differences [P, S] are a thousandth of the noise of a baseline's step, but not 0."""
    noise = _robust_sd(np.diff(baseline, axis=-1))
    return bool(differences.any() and (np.abs(differences) < _TINY_SHARE * noise).all())


def measure_shared_changes(values: Array) -> float | None:
    """Return the correlation of the step noise of independent curves [N, S] if they share it; else None.

    Third differences over separate blocks of four steps contain no smooth trend of all curves. If the curves
    are independent, the mean of the n (n - 1) / 2 correlations over S / 4 blocks has the mean 0 and the
    variance 2 / (n (n - 1) S / 4), whatever the curves' distributions. Means of runs that overlap, and runs
    that share what happens at a step, correlate. Seeds that do not vary independently are fewer than they
    seem.
    """
    num_curves, num_blocks = len(values), values.shape[-1] // 4
    if num_curves < 2 or num_blocks < MIN_STEPS or not has_detail(values).all():
        return None
    blocks = values[:, : 4 * num_blocks].reshape(num_curves, num_blocks, 4) @ np.array([1.0, -3.0, 3.0, -1.0])
    middle, spread = np.median(blocks, axis=-1, keepdims=True), _CLIP_SDS * _robust_sd(blocks)
    cosines = _cosines(np.clip(blocks, middle - spread, middle + spread) - middle)
    num_cosines = num_curves * (num_curves - 1)
    correlation = float((cosines.sum() - np.trace(cosines)) / num_cosines)
    threshold = max(MAX_SHARED_CORRELATION, _SHARED_SDS * np.sqrt(2 / (num_cosines * num_blocks)))
    return correlation if correlation > threshold else None


def _cosines(changes: Array) -> Array:
    """Return the cosines [R, R] of the angles between rows [R, S]; 0 for a row of zeros."""
    norms = np.sqrt((changes**2).sum(axis=-1))
    scaled = changes / np.where(norms > 0, norms, np.inf)[:, None]
    return scaled @ scaled.T


def _clipped_changes(values: Array, order: int) -> Array:
    """Return differences [R, S - order], clipped at `_CLIP_SDS` robust sds from their median."""
    changes = np.diff(np.where(np.isfinite(values), values, 0.0), order, axis=-1)
    middle, spread = np.median(changes, axis=-1, keepdims=True), _CLIP_SDS * _robust_sd(changes)
    return np.clip(changes, middle - spread, middle + spread)


def _robust_sd(changes: Array) -> Array:
    """Return the median absolute deviation [R, 1], scaled to the standard deviation of normal values."""
    middle = np.median(changes, axis=-1, keepdims=True)
    return 1.4826 * np.median(np.abs(changes - middle), axis=-1, keepdims=True)


_NUM_BATCHES = 5  # with more, noise that lasts over steps counts as several independent batches
_MAX_PERSISTENCE = 0.99


def level_shift_p(differences: Array) -> Array:
    """Return a two-sided p that curves of differences [..., S] have the mean 0; 1 for fewer than 10 steps.

    The noise is that from step to step, not that of seeds. Neighbouring steps resemble each other, so the
    larger p of two t-tests counts: of the means of five batches of steps (Law and Carson 1979,
    doi:10.1287/opre.27.5.1011), and of S (1 - r) / (1 + r) effective steps, where r is the lag-1
    autocorrelation: its upper 95 % bound, corrected for its bias (Kendall 1954,
    doi:10.1093/biomet/41.3-4.403), because few steps underrate it.
    """
    num_steps = differences.shape[-1]
    if num_steps < MIN_STEPS:
        return np.ones(differences.shape[:-1])
    length = num_steps // _NUM_BATCHES
    recent = differences[..., num_steps - _NUM_BATCHES * length :]
    batches = recent.reshape(*differences.shape[:-1], _NUM_BATCHES, length).mean(axis=-1)
    batch_error = batches.std(axis=-1, ddof=1) / np.sqrt(_NUM_BATCHES)

    mean = differences.mean(axis=-1)
    centred = differences - mean[..., None]
    squares = (centred**2).sum(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        lag_1 = (centred[..., 1:] * centred[..., :-1]).sum(axis=-1) / squares
        upper = lag_1 + (1 + 3 * lag_1) / num_steps + 1.645 * np.sqrt((1 - lag_1**2) / num_steps)
        lag_1 = np.clip(np.nan_to_num(upper), 0.0, _MAX_PERSISTENCE)
        num_effective = np.maximum(num_steps * (1 - lag_1) / (1 + lag_1), 2.0)
        error = np.sqrt(squares / (num_steps - 1) / (num_effective - 1))
        p_values = [
            2 * special.stdtr(_NUM_BATCHES - 1, -np.abs(batches.mean(axis=-1)) / batch_error),
            2 * special.stdtr(num_effective - 1, -np.abs(mean) / error),
        ]
    return np.where(squares > 0, np.fmax(*p_values), np.where(mean == 0, 1.0, 0.0))


# Ratio of two arms that holds at every step, and whether another scale explains it
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
