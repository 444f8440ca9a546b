"""A metric's values on the scale they are compared on, and the summary of a window."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from abrun.compare.read.experiment import RecordedRun
from abrun.errors import ComparisonError
from abrun.metric_names import (
    REWARD,
    Transform,
    default_reduction,
    default_transform,
    direction,
    unit_of,
)
from abrun.recipe import Primary
from abrun.series import Array

EXCESS_OFFSET = 1e-6  # keeps log(x - 1) finite where trainer and engine agree exactly


def transformed(values: Array, transform: Transform, metric: str) -> Array:
    """`values` on the scale they are compared on. Raises ComparisonError outside the transform's domain."""
    if transform == "identity":
        return values
    problem = outside_domain(values, transform)
    if problem:
        raise ComparisonError(f"{metric}: {problem}: declare `transform: identity` for this metric")
    return np.log(_positive(values, transform))


def outside_domain(values: Array, transform: Transform) -> str | None:
    """Which value a transform cannot take; None: it takes them all. (NaN is a matter of its own.)"""
    outside = values[_positive(values, transform) <= 0] if transform != "identity" else values[:0]
    if not outside.size:
        return None
    allowed = "at least 1" if transform == "log_excess" else "above 0"
    return f"transform {transform!r} got the value {outside.flat[0]:.6g}; it takes values {allowed}"


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


def difference_unit(transform: Transform) -> str:
    """How a difference of transformed values is read."""
    return {"identity": "", "log": " (log ratio)", "log_excess": " (log ratio of the excess over 1)"}[
        transform
    ]


def summaries(values: Array, primary: Primary) -> Array:
    """One number a run [R] of a claim's values in its window [R, W]."""
    return reduced(transformed(values, _transform(primary), primary.metric), primary.metric)


def resolution(runs: Sequence[RecordedRun], primary: Primary, num_steps: int) -> float:
    """The step in which summaries of `num_steps` steps move, on the claim's scale; 0 of what is no count.

    An accuracy over 16 prompts moves in sixteenths, its mean over 4 steps in 64ths. Bytes repeat themselves
    for good reason: 0.
    """
    values = np.concatenate([run.series(primary.metric).values for run in runs])
    distinct = np.unique(values[np.isfinite(values)])
    gaps = np.diff(distinct)
    gaps = gaps[gaps > 1e-6 * gaps.sum()]  # less is rounding
    if unit_of(primary.metric) == "bytes" or not len(gaps):
        return 0.0
    step = float(gaps.min())
    if np.abs(gaps / step - np.round(gaps / step)).max() > 0.01:
        return 0.0
    if _transform(primary) != "identity":
        step /= float(np.abs(distinct).max())
    return step if default_reduction(primary.metric) == "median" else step / max(num_steps, 1)


def climbs(runs: Sequence[RecordedRun], primary: Primary, last: int) -> Array:
    """What each run [R] has learned by step `last`: its last tenth less its first, as learning moves it.

    The mean of the last tenth of the steps from the first recorded one to `last` less that of the first
    tenth, on the claim's scale; positive for a reward that rose and for a loss that fell. NaN where the
    metric has no direction, or fewer than two steps.
    """
    return np.array([_climb(run, primary, last) for run in runs])


def direction_in(run: RecordedRun, metric: str) -> Literal[1, -1] | None:
    """Which way learning moves a metric of this run."""
    return direction(metric, policy_gradient=REWARD in run.metrics)


def _climb(run: RecordedRun, primary: Primary, last: int) -> float:
    series, sign = run.series(primary.metric), direction_in(run, primary.metric)
    steps, values = series.steps[series.steps <= last], series.values[series.steps <= last]
    steps, values = steps[np.isfinite(values)], values[np.isfinite(values)]
    if sign is None or len(steps) < 2 or outside_domain(values, _transform(primary)):
        return np.nan
    tenth = (steps[-1] - steps[0]) / 10
    values = transformed(values, _transform(primary), primary.metric)
    start, end = values[steps <= steps[0] + tenth], values[steps >= steps[-1] - tenth]
    return sign * float(end.mean() - start.mean())


def _transform(primary: Primary) -> Transform:
    return primary.transform or default_transform(primary.metric)
