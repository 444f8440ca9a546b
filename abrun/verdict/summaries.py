"""A metric's values on the scale they are compared on, and the summary of a window."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from abrun.errors import ComparisonError
from abrun.metric_names import REWARD, Transform, default_reduction, default_transform, direction, unit_of
from abrun.reasons import Code, Reason
from abrun.recipe.claims import Claim
from abrun.recorded.experiment import RecordedRun
from abrun.stats.series import Array

MAX_DECIMALS = 6  # of a log that is rounded
EXCESS_OFFSET = 1e-6  # keeps log(x - 1) finite where trainer and engine agree exactly


def transformed(values: Array, transform: Transform, metric: str) -> Array:
    """`values` on the scale they are compared on. Raises ComparisonError outside the transform's domain."""
    if transform == "identity":
        return values
    problem = outside_domain(values, transform)
    if problem:
        raise ComparisonError(Code.METRIC_OUTSIDE_DOMAIN(metric=metric, problem=problem))
    return np.log(_positive(values, transform))


def outside_domain(values: Array, transform: Transform) -> Reason | None:
    """Which value a transform cannot take; None: it takes them all. (NaN is a matter of its own.)"""
    outside = values[_positive(values, transform) <= 0] if transform != "identity" else values[:0]
    if not outside.size:
        return None
    return Code.OUTSIDE_DOMAIN(transform=transform, value=outside.flat[0])


def comparable(values: Array, transform: Transform) -> Array:
    """`values` for drawing: a gap (NaN) outside the transform's domain, and where nothing finite is."""
    values = np.where(np.isfinite(values), values, np.nan)
    if transform == "identity":
        return values
    positive = _positive(values, transform)
    return np.log(np.where(positive > 0, positive, np.nan))


def _positive(values: Array, transform: Transform) -> Array:
    """What the logarithm is taken of."""
    return values - 1 + EXCESS_OFFSET if transform == "log_excess" else values


def reduced(values: Array, metric: str) -> Array:
    """One number a row: the summary of a window's steps (last axis)."""
    return np.median(values, axis=-1) if default_reduction(metric) == "median" else np.mean(values, axis=-1)


def summaries(values: Array, claim: Claim) -> Array:
    """One number a run [R] of a claim's values in its window [R, W]."""
    return reduced(transformed(values, _transform(claim), claim.metric), claim.metric)


def moving(baseline: Array, treatment: Array, *, paired: bool) -> Array:
    """What a claim's spread comes from: the differences of pairs [P, W], or the values of all runs [R, W]."""
    return treatment - baseline if paired else np.concatenate([baseline, treatment])


def resolution(runs: Sequence[RecordedRun], claim: Claim, window: Array) -> float:
    """The step in which summaries of a window move, on the claim's scale; 0 for values that are no counts.

    An accuracy over 16 prompts moves in sixteenths. Its mean over k validations moves in 16 k-ths if every
    validation has answers of its own, and in sixteenths if the last answers are repeated. `window` [N, W]
    holds the differences of N pairs, or the values of N runs that are not paired, as recorded: the step is
    divided by the mean number of stretches without a change. Bytes repeat themselves for good reason: 0.
    """
    values = np.concatenate([run.series(claim.metric).values for run in runs])
    values = values[np.isfinite(values)]
    step = 0.0 if unit_of(claim.metric) == "bytes" or not len(values) else _smallest_step(values)
    stretches = 1.0
    if window.size and default_reduction(claim.metric) != "median":
        changes = np.abs(np.diff(window, axis=-1)) > step / 2  # less is the log's rounding
        stretches += float(changes.sum(axis=-1).mean())
    if step and _transform(claim) != "identity":
        step /= float(np.abs(values).max())
    return step / stretches


def _smallest_step(values: Array) -> float:
    """The smallest gap between values that are counts, 0 for all others.

    Counts are multiples of the gap, to the last digit that was logged, or come three times each on average.
    (Values of arms that agree bit for bit come twice.)
    """
    distinct = np.unique(values)
    gaps = np.diff(distinct)
    gaps = gaps[gaps > 1e-6 * gaps.sum()]  # smaller gaps are rounding
    if not len(gaps):
        return 0.0
    unit = 1.01 * last_digit(distinct)
    wider = gaps[gaps > unit]
    if len(wider) and wider.min() > 2.5 * unit:  # 0.375 may be logged as 0.37 and as 0.38
        gaps = wider
    step = float(gaps.min())
    tolerance = max(0.01 * step, unit)
    is_grid = bool(np.abs(gaps - step * np.round(gaps / step)).max() <= tolerance)
    return step if is_grid or 3 * (len(gaps) + 1) <= len(values) else 0.0


def last_digit(values: Array) -> float:
    """The unit of the last decimal that any value has; 0 for more decimals than a log is rounded to."""
    largest = float(np.abs(values).max())
    for decimals in range(MAX_DECIMALS + 1):
        if np.abs(values - np.round(values, decimals)).max() <= 1e-7 * largest:  # as float32 keeps them
            return 10.0**-decimals
    return 0.0


def climbs(runs: Sequence[RecordedRun], claim: Claim, last: int) -> Array:
    """What each run [R] has learned by step `last`: its last tenth less its first, as learning moves it.

    The mean of the last tenth of the steps from the first recorded one to `last` less that of the first
    tenth, on the claim's scale; positive for a reward that rose and for a loss that fell. NaN where the
    metric has no direction, or fewer than two steps.
    """
    return np.array([_climb(run, claim, last) for run in runs])


def direction_in(run: RecordedRun, metric: str) -> Literal[1, -1] | None:
    """Which way learning moves a metric of this run."""
    return direction(metric, policy_gradient=REWARD in run.metrics)


def _climb(run: RecordedRun, claim: Claim, last: int) -> float:
    series, sign = run.series(claim.metric), direction_in(run, claim.metric)
    steps, values = series.steps[series.steps <= last], series.values[series.steps <= last]
    steps, values = steps[np.isfinite(values)], values[np.isfinite(values)]
    if sign is None or len(steps) < 2 or outside_domain(values, _transform(claim)):
        return np.nan
    tenth = (steps[-1] - steps[0]) / 10
    values = transformed(values, _transform(claim), claim.metric)
    start, end = values[steps <= steps[0] + tenth], values[steps >= steps[-1] - tenth]
    return sign * float(end.mean() - start.mean())


def _transform(claim: Claim) -> Transform:
    return claim.transform or default_transform(claim.metric)
