"""The runs of an arm that have a whole window, for measurements over runs that may differ in length."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from abrun.errors import ComparisonError
from abrun.reasons import Code, Reason
from abrun.recorded.experiment import RecordedRun, union_steps
from abrun.stats.series import Array, Steps, in_window, intersect_steps, window_bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsInWindow:
    """The runs that recorded a window with finite values, and why the others did not count."""

    bounds: tuple[int, int] | None
    runs: list[RecordedRun]
    steps: Steps  # [W] that all of these runs recorded
    values: Array  # [R, W]
    left_out: list[Reason]


def majority_grid(runs: Sequence[RecordedRun], metric: str) -> Steps:
    """Return the steps of a metric up to the last one that more than half of its runs reach.

    A run that died early does not move the window of all others, and neither does one that trained longer.
    """
    grids = [run.series(metric).steps for run in runs if len(run.series(metric))]
    if not grids:
        return np.empty(0, np.int64)
    ends = sorted((int(grid[-1]) for grid in grids), reverse=True)
    steps = union_steps(grids)
    return steps[steps <= ends[len(ends) // 2]]


def select_window(runs: Sequence[RecordedRun], metric: str, window: str, grid: Steps) -> RunsInWindow:
    """Return the runs that reach both ends of a window on `grid`, with their values at shared steps.

    A run that ends early, or has a NaN in the window, would move the window of all others.
    """
    empty = RunsInWindow(
        bounds=None, runs=[], steps=np.empty(0, np.int64), values=np.empty((0, 0)), left_out=[]
    )
    try:
        bounds = window_bounds(window, grid, metric) if len(grid) else None
    except ComparisonError:
        bounds = None
    if bounds is None:
        return empty
    problems = [(run, _find_gap(run, metric, bounds)) for run in runs]
    usable = [run for run, problem in problems if problem is None]
    left_out = [problem for _, problem in problems if problem]
    if not usable:
        return replace(empty, bounds=bounds, left_out=left_out)
    shared = intersect_steps(*(run.series(metric).steps for run in usable))
    shared = shared[in_window(shared, bounds)]
    values = np.array([run.series(metric).values_at(shared) for run in usable])
    recorded = union_steps(run.series(metric).steps for run in usable)
    num_recorded = int(in_window(recorded, bounds).sum())
    if 2 * len(shared) < num_recorded:
        left_out.append(
            Code.FEW_STEPS_IN_COMMON(metric=metric, num_shared=len(shared), num_recorded=num_recorded)
        )
    return RunsInWindow(bounds=bounds, runs=usable, steps=shared, values=values, left_out=left_out)


def _find_gap(run: RecordedRun, metric: str, bounds: tuple[int, int]) -> Reason | None:
    """Return why a run does not have the whole window; None if it has."""
    series, (first_step, last_step) = run.series(metric), bounds
    values: dict[str, Any] = {"run": str(run), "metric": metric}
    if not len(series):
        return Code.LEFT_OUT_UNRECORDED(**values)
    interval = int(np.diff(series.steps).max()) if len(series) > 1 else 1
    if series.steps[-1] + interval <= last_step or series.steps[0] - interval >= first_step:
        return Code.LEFT_OUT_SHORT(
            **values, covered=[series.steps[0], series.steps[-1]], window=[first_step, last_step]
        )
    step = run.first_non_finite(metric, first_step, last_step)
    return None if step is None else Code.LEFT_OUT_NOT_FINITE(**values, step=step)
