"""Metrics as arrays: the type that every log is read into. Imports nothing of abrun but its errors."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from abrun.errors import ComparisonError

Steps = NDArray[np.int64]
Array = NDArray[np.float64]
# Statistics take fourth powers, which stay finite up to this value.
MAX_FLOAT32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """One metric of one run, at the steps where it was recorded.

    A NaN among the values was recorded as NaN. A step without a recorded value is not among the steps. A
    value beyond the range of float32 counts as infinite: the run has diverged, even if its log can hold it.
    """

    steps: Steps  # [S] strictly ascending
    values: Array  # [S]
    recounted: int = 0  # steps repeated by a counter that restarted

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", beyond_float32_as_infinite(self.values))

    def __len__(self) -> int:
        return len(self.steps)

    def value_at(self, step: int) -> float | None:
        index = int(np.searchsorted(self.steps, step))
        is_recorded = index < len(self.steps) and self.steps[index] == step
        return float(self.values[index]) if is_recorded else None

    def values_at(self, steps: Steps) -> Array:
        """Return the values at `steps`, all of which must be recorded."""
        return self.values if len(steps) == len(self) else self.values[np.searchsorted(self.steps, steps)]


def beyond_float32_as_infinite(values: Array) -> Array:
    """Return the values with those beyond float32's range as infinities; the same array if there are none."""
    if len(values) and max(np.fmax.reduce(values), -np.fmin.reduce(values)) > MAX_FLOAT32:
        return np.where(np.abs(values) > MAX_FLOAT32, np.copysign(np.inf, values), values)
    return values


def in_window(steps: Steps, bounds: tuple[int, int]) -> NDArray[np.bool_]:
    """Return which steps lie between the first and the last step of a window, both included."""
    return (bounds[0] <= steps) & (steps <= bounds[1])


EMPTY_SERIES = Series(np.empty(0, np.int64), np.empty(0))


def build_series(steps: Sequence[int] | Steps, values: Sequence[float] | Array) -> tuple[Series, int]:
    """Build a series from points in the order they were written, and count those that a later one replaced.

    If a step occurs twice, such as after a resume, the last value counts. The same value again, such as the
    epoch in a row of evaluation beside a row of training, replaces nothing.
    """
    all_steps, all_values = np.asarray(steps, np.int64), np.asarray(values, np.float64)
    if len(all_steps) < 2 or (np.diff(all_steps) > 0).all():
        return Series(all_steps, all_values), 0
    order = np.argsort(all_steps, kind="stable")
    is_last = np.append(np.diff(all_steps[order]) > 0, True)
    kept_rows = order[is_last]
    series = Series(all_steps[kept_rows], all_values[kept_rows], count_recounted_steps(all_steps))
    last_values = all_values[kept_rows[np.searchsorted(series.steps, all_steps)]]
    is_same = (last_values == all_values) | (np.isnan(last_values) & np.isnan(all_values))
    return series, int((~is_same).sum())


def count_recounted_steps(steps: Steps) -> int:
    """Count the steps that a counter repeated after it restarted at its first step or earlier.

    A job that resumes from a checkpoint repeats some of its last steps; that is not a restart.
    """
    lowest = np.minimum.accumulate(steps)
    restarts = np.flatnonzero((np.diff(steps) < 0) & (steps[1:] <= lowest[:-1])) + 1
    if not len(restarts):
        return 0
    passes = [np.unique(pass_steps) for pass_steps in np.split(steps, restarts)]
    _, num_passes = np.unique(np.concatenate(passes), return_counts=True)
    return int((num_passes > 1).sum())


def intersect_steps(grid: Steps, *grids: Steps) -> Steps:
    """Return the steps that all of some ascending grids hold."""
    for other_grid in grids:
        if not np.array_equal(other_grid, grid):
            grid = np.intersect1d(grid, other_grid, assume_unique=True)
    return grid


def clip_to_shared_steps(
    window: str, bounds: tuple[int, int] | None, shared: Steps
) -> tuple[int, int] | None:
    """Return the bounds of a window in percent, or of 'all', narrowed to the steps that all runs share."""
    if bounds is None or not len(shared) or window.startswith("steps"):
        return bounds
    return int(shared[0]), int(shared[-1])


def window_bounds(window: str, steps: Steps, metric: str) -> tuple[int, int]:
    """Return the first and last step of a window on a grid. Raises ComparisonError if the grid lacks them."""
    first_step, last_step = int(steps[0]), int(steps[-1])
    if window == "all":
        return first_step, last_step
    if window.startswith("last"):
        percent = int(window.removeprefix("last ").removesuffix("%"))
        num_steps = -(-percent * len(steps) // 100)  # integer division, rounded up: at least one step
        return int(steps[-num_steps]), last_step
    start, end = (int(bound) for bound in window.removeprefix("steps ").split("-"))
    if start < first_step or end > last_step:
        raise ComparisonError(
            f"{metric}: window {window!r} exceeds the recorded steps {first_step}-{last_step}; "
            f"use a window inside them, such as 'last 20%'"
        )
    return start, end
