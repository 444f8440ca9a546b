"""Values of a metric on the scale of comparison, and the summary of a window."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from abrun.errors import ComparisonError
from abrun.logs.recorded.experiment import RecordedRun
from abrun.messages.codes import Code, Reason
from abrun.recipe.claims import Claim
from abrun.runs.metric_names import (
    REWARD,
    Transform,
    default_reduction,
    default_transform,
    is_clock,
    is_memory,
    learning_sign,
)
from abrun.stats.resolution import smallest_step
from abrun.stats.series import Array

EXCESS_OFFSET = 1e-6  # keeps log(x - 1) finite if trainer and engine agree exactly


def transform_values(values: Array, transform: Transform, metric: str) -> Array:
    """Return the values on the scale of comparison. Raises ComparisonError outside the transform's domain."""
    if transform == "identity":
        return values
    problem = find_outside_domain(values, transform)
    if problem:
        raise ComparisonError(f"{metric}: {problem}; declare `transform: identity` for this metric")
    return np.log(_log_argument(values, transform))


def find_outside_domain(values: Array, transform: Transform) -> Reason | None:
    """Return a value that the transform cannot take; None if it takes all. (NaN is checked elsewhere.)"""
    outside = values[_log_argument(values, transform) <= 0] if transform != "identity" else values[:0]
    if not outside.size:
        return None
    return Code.OUTSIDE_DOMAIN(transform=transform, value=outside.flat[0])


def transform_with_gaps(values: Array, transform: Transform) -> Array:
    """Return the transformed values, with NaN for those that are not finite or outside its domain."""
    values = np.where(np.isfinite(values), values, np.nan)
    if transform == "identity":
        return values
    positive = _log_argument(values, transform)
    return np.log(np.where(positive > 0, positive, np.nan))


def _log_argument(values: Array, transform: Transform) -> Array:
    return values - 1 + EXCESS_OFFSET if transform == "log_excess" else values


def reduce_window(values: Array, metric: str) -> Array:
    """Return one number per row: the mean or median over the window's steps (last axis)."""
    return np.median(values, axis=-1) if default_reduction(metric) == "median" else np.mean(values, axis=-1)


def summarize_runs(values: Array, claim: Claim) -> Array:
    """Return one number per run [R] for a claim's values in its window [R, W]."""
    return reduce_window(transform_values(values, _claim_transform(claim), claim.metric), claim.metric)


def reduce_arms(baseline: Array, treatment: Array, metric: str, *, stepwise: bool) -> tuple[Array, Array]:
    """Return one number per run of each arm, of transformed values [R, W].

    `stepwise`: pairs see the same rollouts at each step. Medians of two curves may lie at different steps, so
    the treatment's number is then its baseline's plus the median of their differences; of norms, which a
    median would allow to differ in three steps of eight, plus the mean.
    """
    level = reduce_window(baseline, metric)
    if not stepwise:
        return level, reduce_window(treatment, metric)
    differences = treatment - baseline
    if is_norm(metric):
        return level, level + differences.mean(axis=-1)
    return level, level + reduce_window(differences, metric)


def is_norm(metric: str) -> bool:
    """Return whether a metric is a norm, such as a gradient's, that recorded rollouts fix at every step."""
    return default_transform(metric) == "log" and not (is_clock(metric) or is_memory(metric))


def spread_values(baseline: Array, treatment: Array, *, paired: bool) -> Array:
    """Return the values whose spread a claim tests: pairs' differences [P, W], or all runs' values [R, W]."""
    return treatment - baseline if paired else np.concatenate([baseline, treatment])


def find_resolution(runs: Sequence[RecordedRun], claim: Claim, window: Array) -> float:
    """Return the step in which summaries of a window move, on the claim's scale; 0 unless values are counts.

    An accuracy over 16 prompts moves in sixteenths. Its mean over k validations moves in 16 k-ths if every
    validation has its own answers, and in sixteenths if the last answers are repeated. `window` [N, W] holds
    the differences of N pairs, or the values of N independent runs, as recorded. The step is divided by the
    mean number of stretches without a change. Memory returns 0: it repeats itself for good reason.
    """
    step = 0.0 if is_memory(claim.metric) else find_smallest_step(runs, claim.metric)
    num_stretches = 1.0
    if window.size and default_reduction(claim.metric) != "median":
        changes = np.abs(np.diff(window, axis=-1)) > step / 2  # smaller changes are rounding in the log
        num_stretches += float(changes.sum(axis=-1).mean())
    if step and _claim_transform(claim) != "identity":
        values = np.abs(np.concatenate([run.series(claim.metric).values for run in runs]))
        step /= float(values[np.isfinite(values)].max())
    return step / num_stretches


def find_smallest_step(runs: Sequence[RecordedRun], metric: str) -> float:
    """Return the step in which a metric of these runs moves, and 0 unless its values are counts."""
    curves = [run.series(metric).values for run in runs]
    return smallest_step([run.name.arm for run in runs], [curve[np.isfinite(curve)] for curve in curves])


def measure_climbs(runs: Sequence[RecordedRun], claim: Claim, last_step: int) -> Array:
    """Return how far each run [R] has learned by `last_step`.

    The mean of the last tenth of the steps from the first recorded one to `last_step`, minus that of the
    first tenth, on the claim's scale. Positive for a reward that rose and a loss that fell. NaN if the
    metric has no direction, or fewer than two steps.
    """
    return np.array([_measure_climb(run, claim, last_step) for run in runs])


def learning_direction(run: RecordedRun, metric: str) -> Literal[1, -1] | None:
    """Return 1 if learning raises this metric, -1 if it lowers it, None if neither is known."""
    return learning_sign(metric, policy_gradient=REWARD in run.metrics)


def _measure_climb(run: RecordedRun, claim: Claim, last_step: int) -> float:
    series, sign = run.series(claim.metric), learning_direction(run, claim.metric)
    steps, values = series.steps[series.steps <= last_step], series.values[series.steps <= last_step]
    steps, values = steps[np.isfinite(values)], values[np.isfinite(values)]
    if sign is None or len(steps) < 2 or find_outside_domain(values, _claim_transform(claim)):
        return np.nan
    tenth = (steps[-1] - steps[0]) / 10
    values = transform_values(values, _claim_transform(claim), claim.metric)
    start, end = values[steps <= steps[0] + tenth], values[steps >= steps[-1] - tenth]
    return sign * float(end.mean() - start.mean())


def _claim_transform(claim: Claim) -> Transform:
    return claim.transform or default_transform(claim.metric)
