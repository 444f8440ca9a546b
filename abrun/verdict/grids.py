"""Steps at which the runs of a comparison recorded a metric: those they share, and those a run is missing."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from abrun.errors import ComparisonError
from abrun.logs.recorded.experiment import RecordedExperiment, RecordedRun, union_steps
from abrun.messages.codes import Code, Reason
from abrun.recipe.claims import Claim
from abrun.runs.metric_names import STEP_ONE, TOKEN_MULT_PROB_ERROR
from abrun.stats.series import Array, Steps, in_window, intersect_steps, window_bounds

# Share of the sparsest run's steps in a window that all runs must have.
MIN_SHARED_FRACTION = 0.75


def find_missing_steps(run: RecordedRun, metric: str, expected: Steps, *, strict: bool = False) -> Steps:
    """Return the expected steps of a metric that a run is missing, other than by logging less often.

    A run that logs every tenth step is not missing the steps between. A gap counts only if it is wider than
    the run's usual interval. With `strict`, the run must log as often as all others.
    """
    grid = run.series(metric).steps
    absent = np.setdiff1d(expected, grid, assume_unique=True)
    if strict or not len(grid) or not len(absent):
        return absent
    usual_interval = _step_interval(grid) if len(grid) > 1 else 0
    position = np.searchsorted(grid, absent)
    previous = np.where(position > 0, grid[position - 1], absent)
    following = np.where(position < len(grid), grid[np.minimum(position, len(grid) - 1)], absent)
    return absent[following - previous > usual_interval]


def find_incomplete_runs(
    runs: Sequence[RecordedRun], metric: str, bounds: tuple[int, int] | None, *, strict: bool = False
) -> list[tuple[RecordedRun, Steps]]:
    """Return the runs that miss steps of a metric inside a window (None: anywhere), with these steps."""
    recorded, expected = _find_recorded(runs, metric, bounds)
    absent = [(run, find_missing_steps(run, metric, expected, strict=strict)) for run in recorded]
    return [(run, steps) for run, steps in absent if len(steps)]


def _find_recorded(
    runs: Sequence[RecordedRun], metric: str, bounds: tuple[int, int] | None
) -> tuple[list[RecordedRun], Steps]:
    """Return the runs that recorded a metric, and the steps at which any of them did, inside a window."""
    recorded = [run for run in runs if len(run.series(metric))]
    steps = union_steps(run.series(metric).steps for run in recorded)
    return recorded, steps[in_window(steps, bounds)] if bounds else steps


def find_text_values(
    experiment: RecordedExperiment, finished: Sequence[RecordedRun], claims: Sequence[Claim]
) -> Iterator[Reason]:
    """Yield metrics whose log holds text values in a window: dropping them could hide a difference.

    The window is also computed as if the steps of those values existed. A guard's window is the whole run.
    """
    windows = [*((claim.metric, claim.window) for claim in claims), (TOKEN_MULT_PROB_ERROR, "all")]
    for metric, window in windows:
        dropped = {run.name: np.array(run.dropped.get(metric, ()), np.int64) for run in finished}
        if not any(len(steps) for steps in dropped.values()):
            continue
        recorded = experiment.metric_steps(metric)
        grids = [grid for grid in (recorded, union_steps([recorded, *dropped.values()])) if len(grid)]
        bounds = [window_bounds(window, grid, metric) for grid in grids]
        first_step, last_step = min(start for start, _ in bounds), max(end for _, end in bounds)
        for run in finished:
            steps = dropped[run.name]
            inside = steps[in_window(steps, (first_step, last_step))]
            if len(inside):
                yield Code.TEXT_VALUES(
                    run=str(run),
                    metric=metric,
                    num_values=len(inside),
                    first=first_step,
                    last=last_step,
                    step=inside[0],
                    remedy=run.unread.get(metric, "write numbers"),
                )


def find_grid_problems(
    runs: Sequence[RecordedRun], metric: str, bounds: tuple[int, int] | None, *, strict: bool = False
) -> Iterator[Reason]:
    """Yield what makes runs incomparable inside a window of a metric (None: wherever any recorded it)."""
    recorded, expected = _find_recorded(runs, metric, bounds)
    faults = find_incomplete_runs(recorded, metric, bounds, strict=strict)
    if faults:
        yield _steps_missing_reason(metric, faults, expected)
        return
    if not len(expected):
        return
    first_step, last_step = int(expected[0]), int(expected[-1])
    grids = [run.series(metric).steps for run in recorded]
    inside = [grid[in_window(grid, (first_step, last_step))] for grid in grids]
    shared, num_held = intersect_steps(*inside), min(map(len, inside))
    if len(shared) < MIN_SHARED_FRACTION * num_held:
        yield Code.FEW_SHARED_STEPS(
            metric=metric, num_shared=len(shared), first=first_step, last=last_step, num_held=num_held
        )


def _steps_missing_reason(
    metric: str, faults: Sequence[tuple[RecordedRun, Steps]], expected: Steps
) -> Reason:
    """Return that runs miss steps, with the details of the first such run."""
    run, steps = faults[0]
    return Code.STEPS_MISSING(
        runs=[str(run) for run, _ in faults],
        metric=metric,
        num_missing=len(steps),
        num_expected=len(expected),
        first=expected[0],
        last=expected[-1],
        step=steps[0],
        run_ends=run.series(metric).steps[-1],
        unread=run.unread.get(metric),
    )


def grid_notes(experiment: RecordedExperiment, arms: Collection[str]) -> list[Reason]:
    """Return a note for each claimed metric that an arm recorded at other steps (no claims: for step one)."""
    claimed = [claim.metric for claim in experiment.compare.claims]
    notes = []
    for arm in arms:
        sides = experiment.sides(arm).finished
        recorded = [name for name in claimed or STEP_ONE if any(len(run.series(name)) for run in sides.runs)]
        metrics = dict.fromkeys(recorded if claimed else recorded[:1])
        notes += [describe_grid_difference(sides.arms, metric) for metric in metrics]
    return [note for note in dict.fromkeys(notes) if note]


def describe_grid_difference(arms: Sequence[Sequence[RecordedRun]], metric: str) -> Reason | None:
    """Return how the arms' steps of a metric differ and on which they are compared; None if they agree."""
    runs = [run for arm_runs in arms for run in arm_runs if len(run.series(metric)) and not run.thinned]
    grids = [run.series(metric).steps for run in runs]
    if len({grid.tobytes() for grid in grids}) < 2:
        return None
    shared = intersect_steps(*grids)
    if not len(shared):
        return None
    arm_steps = {
        arm_runs[0].name.arm: union_steps(
            run.series(metric).steps for run in arm_runs if len(run.series(metric))
        )
        for arm_runs in arms
        if arm_runs
    }
    shared_values = {"num_shared": len(shared), "first": shared[0], "last": shared[-1]}
    grids_of_arms = {arm: _describe_grid(grid) for arm, grid in arm_steps.items()}
    if late := _find_late_counter(arm_steps):
        return Code.COUNTERS_DIFFER(metric=metric, grids=grids_of_arms, late=late, **shared_values)
    if len({grid.tobytes() for grid in arm_steps.values()}) < 2:
        deviating_run = next(
            run for run in runs if not np.array_equal(run.series(metric).steps, arm_steps[run.name.arm])
        )
        usual_grid = grids_of_arms[deviating_run.name.arm]
        grids_of_arms = {
            str(deviating_run): _describe_grid(deviating_run.series(metric).steps),
            "others": usual_grid,
        }
    averaged = len({*map(_step_interval, arm_steps.values())}) > 1
    return Code.GRIDS_DIFFER(metric=metric, grids=grids_of_arms, averaged=averaged, **shared_values)


def _find_late_counter(arm_steps: dict[str, Steps]) -> str | None:
    """Return the arm of two that counts its steps from one more than the other; None if neither does."""
    if len(arm_steps) != 2:
        return None
    (baseline, baseline_steps), (treatment, treatment_steps) = arm_steps.items()
    if len(baseline_steps) != len(treatment_steps) or len(baseline_steps) < 2:
        return None
    offsets = {*(treatment_steps - baseline_steps).tolist()}
    return treatment if offsets == {1} else baseline if offsets == {-1} else None


def _step_interval(steps: Steps) -> int:
    return int(np.median(np.diff(steps))) if len(steps) > 1 else 1


def _describe_grid(steps: Steps) -> dict[str, int]:
    return {"first": int(steps[0]), "last": int(steps[-1]), "every": _step_interval(steps)}


# The runs of an arm that have a whole window, for measurements over runs that may differ in length.


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
    problems = [(run, find_gap(run, metric, bounds)) for run in runs]
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


def find_gap(run: RecordedRun, metric: str, bounds: tuple[int, int] | None) -> Reason | None:
    """Return why a run does not have the whole window (None: any value); None if it has."""
    series = run.series(metric)
    values: dict[str, Any] = {"run": str(run), "metric": metric}
    if not len(series):
        return Code.LEFT_OUT_UNRECORDED(**values)
    first_step, last_step = bounds or (series.steps[0], series.steps[-1])
    interval = int(np.diff(series.steps).max()) if len(series) > 1 else 1
    if series.steps[-1] + interval <= last_step or series.steps[0] - interval >= first_step:
        return Code.LEFT_OUT_SHORT(
            **values, covered=[series.steps[0], series.steps[-1]], window=[first_step, last_step]
        )
    step = run.first_non_finite(metric, first_step, last_step)
    return None if step is None else Code.LEFT_OUT_NOT_FINITE(**values, step=step)
