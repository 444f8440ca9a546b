"""Where the runs of a comparison recorded a metric: which steps they share, and which one of them lacks."""

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from abrun.metric_names import STEP_ONE, TOKEN_MULT_PROB_ERROR
from abrun.reasons import Code, Reason
from abrun.recipe.claims import Claim
from abrun.recorded.experiment import RecordedExperiment, RecordedRun, union_steps
from abrun.stats.series import Steps, shared_steps, window_bounds

SHARED_SHARE = 0.75  # of the steps in a window that the sparsest run holds, how many all runs must share


def lacking(run: RecordedRun, metric: str, expected: Steps, *, strict: bool = False) -> Steps:
    """The expected steps of a metric that a run lacks, other than by logging less often.

    A run that logs every tenth step lacks none of those between: no two of its own are further apart than
    they usually are, and it ends no further from the last. `strict`: it is to log as often as all others.
    """
    grid = run.series(metric).steps
    absent = np.setdiff1d(expected, grid, assume_unique=True)
    if strict or not len(grid) or not len(absent):
        return absent
    usual = _distance(grid) if len(grid) > 1 else 0
    after = np.searchsorted(grid, absent)
    before = np.where(after > 0, grid[after - 1], absent)
    following = np.where(after < len(grid), grid[np.minimum(after, len(grid) - 1)], absent)
    return absent[following - before > usual]


def incomplete(
    runs: Sequence[RecordedRun], metric: str, bounds: tuple[int, int] | None, *, strict: bool = False
) -> list[tuple[RecordedRun, Steps]]:
    """The runs that lack steps of a metric inside a window, or (None) wherever any recorded it, and which."""
    recorded, expected = _recorded(runs, metric, bounds)
    absent = [(run, lacking(run, metric, expected, strict=strict)) for run in recorded]
    return [(run, steps) for run, steps in absent if len(steps)]


def _recorded(
    runs: Sequence[RecordedRun], metric: str, bounds: tuple[int, int] | None
) -> tuple[list[RecordedRun], Steps]:
    """Return the runs that recorded a metric, and the steps at which any of them did, inside a window."""
    recorded = [run for run in runs if len(run.series(metric))]
    steps = union_steps(run.series(metric).steps for run in recorded)
    return recorded, _inside(steps, *bounds) if bounds else steps


def text_in_windows(
    experiment: RecordedExperiment, finished: Sequence[RecordedRun], claims: Sequence[Claim]
) -> Iterator[Reason]:
    """Values of a metric that a log holds as text, in its window: left out, they could hide a difference.

    The window is also read as it would stand with the steps of those values. A guard reads all of a run.
    """
    windows = [*((one.metric, one.window) for one in claims), (TOKEN_MULT_PROB_ERROR, "all")]
    for metric, window in windows:
        dropped = {run.name: np.array(run.dropped.get(metric, ()), np.int64) for run in finished}
        if not any(len(steps) for steps in dropped.values()):
            continue
        recorded = experiment.metric_steps(metric)
        grids = [grid for grid in (recorded, union_steps([recorded, *dropped.values()])) if len(grid)]
        bounds = [window_bounds(window, grid, metric) for grid in grids]
        first, last = min(start for start, _ in bounds), max(end for _, end in bounds)
        for run in finished:
            inside = _inside(dropped[run.name], first, last)
            if len(inside):
                yield Code.TEXT_VALUES(
                    run=str(run),
                    metric=metric,
                    num_values=len(inside),
                    first=first,
                    last=last,
                    step=inside[0],
                    remedy=run.unread.get(metric, "write numbers"),
                )


def unlike_grids(
    runs: Sequence[RecordedRun], metric: str, bounds: tuple[int, int] | None, *, strict: bool = False
) -> Iterator[Reason]:
    """Yield what makes runs incomparable inside a window of a metric, or (None) wherever any recorded it."""
    recorded, expected = _recorded(runs, metric, bounds)
    faults = incomplete(recorded, metric, bounds, strict=strict)
    if faults:
        yield _steps_missing(metric, faults, expected)
        return
    if not len(expected):
        return
    first, last = int(expected[0]), int(expected[-1])
    inside = [_inside(run.series(metric).steps, first, last) for run in recorded]
    shared = shared_steps(*inside)
    if len(shared) < SHARED_SHARE * min(map(len, inside)):
        num_held = min(map(len, inside))
        yield Code.FEW_SHARED_STEPS(
            metric=metric, num_shared=len(shared), first=first, last=last, num_held=num_held
        )


def _inside(steps: Steps, first: int, last: int) -> Steps:
    return steps[(first <= steps) & (steps <= last)]


def _steps_missing(metric: str, faults: Sequence[tuple[RecordedRun, Steps]], expected: Steps) -> Reason:
    """Return that runs lack steps, with the figures of the first of them."""
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
    """A note for each claimed metric, or else one of step one, that some arm recorded at other steps."""
    claimed = [claim.metric for claim in experiment.compare.claims]
    notes = []
    for arm in arms:
        sides = experiment.sides(arm).finished
        recorded = [one for one in claimed or STEP_ONE if any(len(run.series(one)) for run in sides.runs)]
        metrics = dict.fromkeys(recorded if claimed else recorded[:1])
        notes += [grid_note((sides.baselines, sides.treatments), metric) for metric in metrics]
    return [note for note in dict.fromkeys(notes) if note]


def grid_note(arms: Sequence[Sequence[RecordedRun]], metric: str) -> Reason | None:
    """How the arms' steps of a metric differ, and on which of them they are compared; None: they do not."""
    runs = [run for of in arms for run in of if len(run.series(metric)) and not run.thinned]
    grids = [run.series(metric).steps for run in runs]
    if len({grid.tobytes() for grid in grids}) < 2:
        return None
    shared = shared_steps(*grids)
    if not len(shared):
        return None
    of_arm = {
        of[0].name.arm: union_steps(run.series(metric).steps for run in of if len(run.series(metric)))
        for of in arms
        if of
    }
    on_shared = {"num_shared": len(shared), "first": shared[0], "last": shared[-1]}
    grids_of_arms = {arm: _grid(grid) for arm, grid in of_arm.items()}
    if late := _late_counter(of_arm):
        return Code.COUNTERS_DIFFER(metric=metric, grids=grids_of_arms, late=late, **on_shared)
    if len({grid.tobytes() for grid in of_arm.values()}) < 2:
        odd = next(run for run in runs if not np.array_equal(run.series(metric).steps, of_arm[run.name.arm]))
        others = grids_of_arms[odd.name.arm]
        grids_of_arms = {str(odd): _grid(odd.series(metric).steps), "others": others}
    averaged = len({*map(_distance, of_arm.values())}) > 1
    return Code.GRIDS_DIFFER(metric=metric, grids=grids_of_arms, averaged=averaged, **on_shared)


def _late_counter(of_arm: dict[str, Steps]) -> str | None:
    """Return which of two arms counts its steps from one more than the other; None: neither does."""
    if len(of_arm) != 2:
        return None
    (left, one), (right, other) = of_arm.items()
    if len(one) != len(other) or len(one) < 2 or abs(int(other[0] - one[0])) != 1:
        return None
    if not np.array_equal(other - one, np.full(len(one), other[0] - one[0])):
        return None
    return right if other[0] > one[0] else left


def _distance(steps: Steps) -> int:
    """Return the usual distance of two steps."""
    return int(np.median(np.diff(steps))) if len(steps) > 1 else 1


def _grid(steps: Steps) -> dict[str, int]:
    return {"first": int(steps[0]), "last": int(steps[-1]), "every": _distance(steps)}
