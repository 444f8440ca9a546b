"""Checks of whole curves behind a claim: copies, smoothing, and events before the window.

R runs, S steps that all of them have, B blocks of steps (eighths of training).
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from abrun.metric_names import REWARD, Better, Transform, find_metric
from abrun.reasons import Code, Reason
from abrun.recorded.experiment import Sides, stack_runs
from abrun.stats.equivalence import ALPHA, estimate_difference, estimate_mean, p_above
from abrun.stats.series import Array, Steps
from abrun.verdict.summaries import (
    find_outside_domain,
    learning_direction,
    reduce_arms,
    reduce_window,
    spread_values,
    transform_values,
)

COPY_CORRELATION = 0.99  # of two runs' step changes; distinct seeds in docs/evidence reach 0.76
REPEAT_CORRELATION = 0.9999  # the same if all runs move alike: noise below 1 % of the shared change
SMOOTH_CORRELATION = 0.9  # of a run's step changes with its previous ones
MIN_STEPS = 10  # and distinct values; with fewer, changes can be equal by chance
NUM_BLOCKS = 8
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


def _cosines(changes: Array) -> Array:
    """Return the cosines [R, R] of the angles between rows [R, S]; 0 for a row of zeros."""
    norms = np.sqrt((changes**2).sum(axis=-1))
    scaled = changes / np.where(norms > 0, norms, np.inf)[:, None]
    return scaled @ scaled.T


def has_detail(values: Array) -> NDArray[Any]:
    """Return which curves [R] of [R, S] can tell runs apart: long, finite, neither discrete nor constant."""
    if values.shape[-1] < MIN_STEPS:
        return np.zeros(len(values), bool)
    finite = np.asarray(np.isfinite(values).all(axis=-1))
    sorted_values = np.sort(np.where(finite[:, None], values, 0.0), axis=-1)
    distinct = 1 + (np.diff(sorted_values, axis=-1) > 0).sum(axis=-1)
    changes = np.diff(np.where(finite[:, None], values, 0.0), axis=-1)
    return finite & (distinct >= MIN_STEPS) & (_robust_sd(changes)[..., 0] > 0)


def _clipped_changes(values: Array, order: int) -> Array:
    """Return differences [R, S - order], clipped at `_CLIP_SDS` robust sds from their median."""
    changes = np.diff(np.where(np.isfinite(values), values, 0.0), order, axis=-1)
    middle, spread = np.median(changes, axis=-1, keepdims=True), _CLIP_SDS * _robust_sd(changes)
    return np.clip(changes, middle - spread, middle + spread)


def _robust_sd(changes: Array) -> Array:
    """Return the median absolute deviation [R, 1], scaled to the standard deviation of normal values."""
    middle = np.median(changes, axis=-1, keepdims=True)
    return 1.4826 * np.median(np.abs(changes - middle), axis=-1, keepdims=True)


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
    for arm, other in zip(arms, reversed(arms), strict=True):
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


def curve_warnings(
    sides: Sides,
    metric: str,
    transform: Transform,
    bounds: tuple[int, int],
    margin: float,
    *,
    holds: bool,
    only: Better | None = None,
) -> Iterator[Reason]:
    """Yield what a window hides: a running mean, and for a claim that holds collapse and earlier
    differences; of a one-sided claim `only` those in one direction.
    """
    steps, values = stack_runs(sides.runs, metric)
    num_baselines = len(sides.baselines)
    if not len(steps) or not np.isfinite(values).all() or find_outside_domain(values, transform):
        return
    smooth = measure_smoothness(values)
    if smooth is not None and smooth > SMOOTH_CORRELATION:
        yield Code.RUNNING_MEAN(metric=metric, correlation=smooth)
    scaled = transform_values(values, transform, metric)
    arms = {"baseline": slice(None, num_baselines), "treatment": slice(num_baselines, None)}
    if best_arm := find_running_best({arm: values[rows] for arm, rows in arms.items()}):
        yield Code.RUNNING_BEST(metric=metric, arm=best_arm)
    if not holds or len(steps) < 2 * NUM_BLOCKS:
        return
    varying = spread_values(values[:num_baselines], values[num_baselines:], paired=sides.paired)
    shared = measure_shared_changes(varying)
    if shared is not None and not sides.share_rollouts:
        yield Code.CHANGES_SHARED(metric=metric, paired=sides.paired, correlation=shared)
    is_sampled = REWARD in sides.runs[0].metrics and not any(run.thinned for run in sides.runs)
    if sides.paired and is_sampled and not sides.share_rollouts and is_tiny(varying, values[:num_baselines]):
        yield Code.TINY_DIFFERENCES(metric=metric, largest=np.abs(varying).max(), num_steps=len(steps))
    direction = learning_direction(sides.baselines[0], metric)
    if margin > 0 and (direction or find_metric(metric) is None):
        for arm, rows in arms.items():
            yield from _find_collapse(
                arm, steps, values[rows], scaled[rows], metric, bounds, margin, direction
            )
    baseline, treatment = (scaled[rows] for rows in arms.values())
    levels = [
        reduce_arms(baseline[:, block], treatment[:, block], metric, stepwise=sides.share_rollouts)
        for block in _blocks(scaled.shape[1])
    ]
    baseline_levels, treatment_levels = (np.stack(arm, axis=1) for arm in zip(*levels, strict=True))
    yield from _find_differing_blocks(
        steps, baseline_levels, treatment_levels, margin, is_paired=sides.paired, only=only
    )


def _blocks(num_steps: int) -> list[NDArray[np.intp]]:
    """Return the indices of each eighth of the steps."""
    return np.array_split(np.arange(num_steps), NUM_BLOCKS)


def _block_levels(values: Array, metric: str) -> Array:
    """Return summaries [R, B] of curves [R, S]."""
    return np.stack([reduce_window(values[:, block], metric) for block in _blocks(values.shape[1])], axis=1)


def _find_collapse(
    arm: str,
    steps: Steps,
    values: Array,
    scaled: Array,
    metric: str,
    bounds: tuple[int, int],
    margin: float,
    direction: int | None,
) -> Iterator[Reason]:
    """Yield an arm's level in the window and its best eighth, if that is shown to be better by the margin.

    One-sided t-tests over seeds at 5 %, shared by the eighths up to the window's end. The level is that of
    the last quarter of those steps, as far as the window reaches. For a metric of unknown direction the best
    level is the one furthest from the first eighth's.
    """
    num_steps = int((steps <= bounds[1]).sum())
    late = np.flatnonzero(steps[:num_steps] >= max(bounds[0], steps[3 * num_steps // 4]))
    if num_steps < 2 * NUM_BLOCKS or not len(late):
        return
    levels = _block_levels(scaled[:, :num_steps], metric)
    sign, tests = direction or 1, NUM_BLOCKS
    if direction is None:
        moved = levels.mean(axis=0) - levels[:, 0].mean()
        sign, tests = 1 if moved[np.abs(moved).argmax()] > 0 else -1, 2 * NUM_BLOCKS
    losses = sign * (levels - reduce_window(scaled[:, late], metric)[:, None])
    better_blocks = [
        block
        for block in range(NUM_BLOCKS)
        if p_above(*estimate_mean(losses[:, block]), margin) < ALPHA / tests
    ]
    if better_blocks:
        best = max(better_blocks, key=lambda block: float(losses[:, block].mean()))
        best_steps = _blocks(num_steps)[best]
        level, highest = (float(values[:, columns].mean()) for columns in (late, best_steps))
        yield Code.COLLAPSED(
            arm=arm, level=level, best=highest, steps=[steps[best_steps[0]], steps[best_steps[-1]]]
        )


def _find_differing_blocks(
    steps: Steps,
    baseline_levels: Array,
    treatment_levels: Array,
    margin: float,
    *,
    is_paired: bool,
    only: Better | None,
) -> Iterator[Reason]:
    """Yield the eighths of training shown to differ by more than the margin, at a familywise 5 %.

    `only`: the direction that counts.
    """
    differences = treatment_levels.mean(axis=0) - baseline_levels.mean(axis=0)
    differing = []
    for block in range(NUM_BLOCKS):
        baseline, treatment = baseline_levels[:, block], treatment_levels[:, block]
        mean, error, dof = estimate_difference(baseline, treatment, paired=is_paired)
        counts = only is None or (mean > 0) == (only == "higher")
        if counts and p_above(abs(mean), error, dof, margin) < ALPHA / NUM_BLOCKS:
            differing.append(block)
    if differing:
        blocks = _blocks(len(steps))
        largest_block = max(differing, key=lambda block: abs(float(differences[block])))
        block_ranges = [f"{steps[blocks[block][0]]}-{steps[blocks[block][-1]]}" for block in differing]
        yield Code.DIFFERS_EARLIER(
            blocks=block_ranges,
            largest=block_ranges[differing.index(largest_block)],
            difference=differences[largest_block],
        )
