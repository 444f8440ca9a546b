"""Whole curves behind a claim: copies among them, smoothing, and what happened before the window.

R runs, S steps that all of them have, B blocks of steps (eighths of training).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from abrun.metric_names import Transform, find_metric
from abrun.reasons import Code, Reason
from abrun.recorded.experiment import Sides, stack
from abrun.stats.equivalence import ALPHA, difference, mean_of, p_above
from abrun.stats.series import Array, Steps
from abrun.verdict.summaries import direction_in, outside_domain, reduced, transformed

COPIED = 0.99  # correlation of two runs' step changes; distinct seeds of the evidence reach 0.76
REPEATED = 0.9999  # the same where every run moves alike: noise below 1 % of what they share
SMOOTHED = 0.9  # correlation of a run's step changes with its previous ones
MIN_STEPS = 10  # and as many distinct values: of fewer, chance gives equal changes
NUM_BLOCKS = 8
_CLIP = 3.0  # standard deviations: one jump that all seeds make is no copy
_ORDERS = (1, 2, 3)  # of differences: a trend that all seeds follow is gone from the third


def copied(values: Array) -> NDArray[np.bool_]:
    """Return which two curves of [R, S] are one run but for noise [R, R]: changes of every order agree.

    Seeds that see the same batches agree as well, in all runs. So changes must agree after removing the mean
    change of all runs, too, unless almost nothing but that mean is left.
    """
    num_runs, known = len(values), has_detail(values)
    if not known.any():
        return np.zeros((num_runs, num_runs), bool)
    whole, residual = np.ones((num_runs, num_runs)), np.ones((num_runs, num_runs))
    for order in _ORDERS:
        changes = _clipped_changes(values[known], order)
        changes -= changes.mean(axis=-1, keepdims=True)
        shared = changes.mean(axis=0)
        squares = float(shared @ shared)
        loadings = changes @ shared / squares if squares else np.zeros(len(changes))
        inside = np.ix_(known, known)
        whole[inside] = np.minimum(whole[inside], _cosines(changes))
        residual[inside] = np.minimum(residual[inside], _cosines(changes - np.outer(loadings, shared)))
    alike = ((whole > COPIED) & (residual > COPIED)) | (whole > REPEATED)
    return alike & known[:, None] & known[None, :]


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
    return finite & (distinct >= MIN_STEPS) & (_spread(changes)[..., 0] > 0)


def _clipped_changes(values: Array, order: int) -> Array:
    """Differences [R, S - order], none further than `_CLIP` robust standard deviations from their median."""
    changes = np.diff(np.where(np.isfinite(values), values, 0.0), order, axis=-1)
    middle, spread = np.median(changes, axis=-1, keepdims=True), _CLIP * _spread(changes)
    return np.clip(changes, middle - spread, middle + spread)


def _spread(changes: Array) -> Array:
    """Median absolute deviation [R, 1], scaled to the standard deviation of a normal law."""
    middle = np.median(changes, axis=-1, keepdims=True)
    return 1.4826 * np.median(np.abs(changes - middle), axis=-1, keepdims=True)


def smoothness(values: Array) -> float | None:
    """Return how step changes of [R, S] correlate with the previous ones, median over runs; None: unknown."""
    known = values[has_detail(values)] if len(values) else values
    if not len(known) or len(known) < len(values):
        return None
    changes = _clipped_changes(known, 1)
    later, earlier = (part - part.mean(axis=-1, keepdims=True) for part in (changes[:, 1:], changes[:, :-1]))
    norms = np.sqrt((later**2).sum(axis=-1) * (earlier**2).sum(axis=-1))
    return float(np.median((later * earlier).sum(axis=-1) / np.where(norms > 0, norms, np.inf)))


def curve_warnings(
    sides: Sides, metric: str, transform: Transform, bounds: tuple[int, int], margin: float, *, holds: bool
) -> Iterator[Reason]:
    """Yield what a window hides: a running mean; of a claim that holds, collapse and earlier differences."""
    steps, values = stack(sides.runs, metric)
    num_baselines = len(sides.baselines)
    if not len(steps) or not np.isfinite(values).all() or outside_domain(values, transform):
        return
    smooth = smoothness(values)
    if smooth is not None and smooth > SMOOTHED:
        yield Code.RUNNING_MEAN(metric=metric, correlation=smooth)
    if not holds or len(steps) < 2 * NUM_BLOCKS:
        return
    scaled = transformed(values, transform, metric)
    arms = {"baseline": slice(None, num_baselines), "treatment": slice(num_baselines, None)}
    direction = direction_in(sides.baselines[0], metric)
    if direction or find_metric(metric) is None:
        for arm, rows in arms.items():
            yield from _collapse(arm, steps, values[rows], scaled[rows], metric, bounds, margin, direction)
    left, right = (_block_levels(scaled[rows], metric) for rows in arms.values())
    yield from _differing_blocks(steps, left, right, margin, is_paired=sides.paired)


def _blocks(num_steps: int) -> list[NDArray[np.intp]]:
    """Return the indices of each eighth of the steps."""
    return np.array_split(np.arange(num_steps), NUM_BLOCKS)


def _block_levels(values: Array, metric: str) -> Array:
    """Summaries [R, B] of curves [R, S]."""
    return np.stack([reduced(values[:, block], metric) for block in _blocks(values.shape[1])], axis=1)


def _collapse(
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
    the last quarter of those steps, as far as the window reaches. For a metric of unknown direction "best" is
    the level furthest from the first eighth's.
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
    lost = sign * (levels - reduced(scaled[:, late], metric)[:, None])
    shown = [
        block for block in range(NUM_BLOCKS) if p_above(*mean_of(lost[:, block]), margin) < ALPHA / tests
    ]
    if shown:
        best = max(shown, key=lambda block: float(lost[:, block].mean()))
        inside = _blocks(num_steps)[best]
        level, highest = (float(values[:, of].mean()) for of in (late, inside))
        yield Code.COLLAPSED(arm=arm, level=level, best=highest, steps=[steps[inside[0]], steps[inside[-1]]])


def _differing_blocks(
    steps: Steps, left: Array, right: Array, margin: float, *, is_paired: bool
) -> Iterator[Reason]:
    """Yield the eighths of training whose levels are shown to differ by more than the margin, 5 % in all."""
    differences = right.mean(axis=0) - left.mean(axis=0)
    shown = []
    for block in range(NUM_BLOCKS):
        one, other = left[:, block], right[:, block]
        mean, error, freedom = difference(one, other, paired=is_paired)
        if p_above(abs(mean), error, freedom, margin) < ALPHA / NUM_BLOCKS:
            shown.append(block)
    if shown:
        blocks = _blocks(len(steps))
        most = max(shown, key=lambda block: abs(float(differences[block])))
        where = [f"{steps[blocks[block][0]]}-{steps[blocks[block][-1]]}" for block in shown]
        yield Code.DIFFERS_EARLIER(
            blocks=where, largest=where[shown.index(most)], difference=differences[most]
        )
