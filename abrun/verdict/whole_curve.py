"""Checks of whole curves behind a claim: smoothing, shared noise, and events before the window.

R runs, S steps that all of them have, B blocks of steps (eighths of training).
"""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from abrun.logs.recorded.experiment import Sides, stack_runs
from abrun.messages.codes import Code, Reason
from abrun.runs.metric_names import Better, Transform, find_metric
from abrun.stats.curves import find_running_best, is_tiny, measure_shared_changes, measure_smoothness
from abrun.stats.equivalence import ALPHA, estimate_difference, estimate_mean, p_above
from abrun.stats.series import Array, Steps
from abrun.stats.shares import find_steps_apart, p_value_of_more_hits
from abrun.verdict.results import ClaimTerms
from abrun.verdict.summaries import (
    find_outside_domain,
    learning_direction,
    reduce_arms,
    reduce_window,
    spread_values,
    transform_values,
)

SMOOTH_CORRELATION = 0.9  # of a run's step changes with its previous ones
# Share of steps, beyond the baseline's, that may differ by more than the margin while the medians agree
MIN_HIDDEN_SHARE = 0.05
NUM_BLOCKS = 8


def find_hidden_steps(
    terms: ClaimTerms, baseline: Array, treatment: Array, margin: float, worse: Better | None
) -> Reason | None:
    """Return that the treatment has more steps apart, or worse, than the baseline: a median hides them."""
    if terms.reduction != "median" or terms.transform != "log":
        return None
    distance, *apart = find_steps_apart(baseline, treatment, margin, worse, paired=terms.paired)
    shares = [float(np.mean(hits)) for hits in apart]
    is_shown = p_value_of_more_hits(apart, paired=terms.paired) < terms.alpha
    if not is_shown or shares[1] - shares[0] < MIN_HIDDEN_SHARE:
        return None
    return Code.STEPS_APART(ratio=math.exp(distance), share=shares[1], baseline_share=shares[0])


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
    direction = learning_direction(sides.baselines[0], metric)
    if best_arm := find_running_best({arm: values[rows] for arm, rows in arms.items()}):
        yield Code.RUNNING_BEST(metric=metric, arm=best_arm)
    if not holds or len(steps) < 2 * NUM_BLOCKS:
        return
    varying = spread_values(values[:num_baselines], values[num_baselines:], paired=sides.paired)
    shared = measure_shared_changes(varying)
    if shared is not None and not sides.share_rollouts:
        yield Code.CHANGES_SHARED(metric=metric, paired=sides.paired, correlation=shared)
    # Losses of one batch may differ by rounding alone; scores of samples do not.
    is_sampled = direction == 1 and not any(run.thinned for run in sides.runs)
    if sides.paired and is_sampled and not sides.share_rollouts and is_tiny(varying, values[:num_baselines]):
        yield Code.TINY_DIFFERENCES(metric=metric, largest=np.abs(varying).max(), num_steps=len(steps))
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
    blocks = _blocks(num_steps)
    levels = np.stack([reduce_window(scaled[:, block], metric) for block in blocks], axis=1)  # [R, B]
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
        best_steps = blocks[best]
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
