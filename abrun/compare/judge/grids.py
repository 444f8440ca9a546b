"""Where the runs of a comparison recorded a metric: which steps they share, and which one of them lacks."""

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from abrun.compare.read.experiment import Experiment, RecordedRun, stack, union
from abrun.metric_names import STEP_ONE, TOKEN_MULT_PROB_ERROR
from abrun.recipe import DEFAULT_WINDOW, Primary
from abrun.series import Steps, shared_steps, window_bounds

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
    steps = union(run.series(metric).steps for run in recorded)
    return recorded, _inside(steps, *bounds) if bounds else steps


def text_in_windows(
    experiment: Experiment, finished: Sequence[RecordedRun], primaries: Sequence[Primary]
) -> Iterator[str]:
    """Values of a metric that a log holds as text, in its window: left out, they could hide a difference.

    The window is also read as it would stand with the steps of those values. A guard reads all of a run.
    """
    windows = [*((one.metric, one.window) for one in primaries), (TOKEN_MULT_PROB_ERROR, "all")]
    for metric, window in windows:
        dropped = {run.name: np.array(run.dropped.get(metric, ()), np.int64) for run in finished}
        if not any(len(steps) for steps in dropped.values()):
            continue
        recorded = experiment.steps_of(metric)
        grids = [grid for grid in (recorded, union([recorded, *dropped.values()])) if len(grid)]
        bounds = [window_bounds(window, grid, metric) for grid in grids]
        first, last = min(start for start, _ in bounds), max(end for _, end in bounds)
        for run in finished:
            inside = _inside(dropped[run.name], first, last)
            if len(inside):
                values = f"{len(inside)} value{'s' * (len(inside) > 1)}"
                yield (
                    f"{run}: {values} of {metric} in steps {first}-{last}, from step {inside[0]} on, "
                    f"left out as text: {run.unread.get(metric, 'write numbers')}"
                )


def unlike_grids(
    runs: Sequence[RecordedRun], metric: str, bounds: tuple[int, int] | None, *, strict: bool = False
) -> Iterator[str]:
    """Yield what makes runs incomparable inside a window of a metric, or (None) wherever any recorded it."""
    recorded, expected = _recorded(runs, metric, bounds)
    faults = incomplete(recorded, metric, bounds, strict=strict)
    if faults:
        yield _lacking_sentence(metric, faults, expected)
        return
    if not len(expected):
        return
    first, last = int(expected[0]), int(expected[-1])
    inside = [_inside(run.series(metric).steps, first, last) for run in recorded]
    shared = shared_steps(*inside)
    if len(shared) < SHARED_SHARE * min(map(len, inside)):
        yield (
            f"step grids differ: of {metric} the runs share {len(shared)} of the steps {first}-{last}, of "
            f"which each holds {min(map(len, inside))} or more: log it at the same steps"
        )


def _inside(steps: Steps, first: int, last: int) -> Steps:
    return steps[(first <= steps) & (steps <= last)]


def _lacking_sentence(metric: str, faults: Sequence[tuple[RecordedRun, Steps]], expected: Steps) -> str:
    run, steps = faults[0]
    grid = run.series(metric).steps
    window = f"{expected[0]}-{expected[-1]}"
    if steps[0] > grid[-1]:
        how = f"{run} ends at step {grid[-1]}, and {metric} is compared over steps {window}"
    else:
        how = (
            f"{run} lacks {len(steps)} of the {len(expected)} steps {window} of {metric} (step {steps[0]} is "
            "the first)"
        )
    more = f"; {len(faults) - 1} more run{'s' * (len(faults) > 2)} likewise" if len(faults) > 1 else ""
    return f"step grids differ: {how}{more}{run.unread_text(metric)}"


def grid_notes(experiment: Experiment, arms: Collection[str]) -> list[str]:
    """A line for each claimed metric, or else one of step one, that some arm recorded at other steps."""
    claimed = [primary.metric for primary in experiment.compare.primary]
    notes = []
    for arm in arms:
        sides = experiment.sides(arm).finished
        recorded = [one for one in claimed or STEP_ONE if any(len(run.series(one)) for run in sides.runs)]
        metrics = dict.fromkeys(recorded if claimed else recorded[:1])
        notes += [grid_note((sides.baselines, sides.treatments), metric) for metric in metrics]
    return [note for note in dict.fromkeys(notes) if note]


def grid_note(arms: Sequence[Sequence[RecordedRun]], metric: str) -> str | None:
    """How the arms' steps of a metric differ, and on which of them they are compared; None: they do not."""
    runs = [run for of in arms for run in of if len(run.series(metric)) and not run.thinned]
    grids = [run.series(metric).steps for run in runs]
    if len({grid.tobytes() for grid in grids}) < 2:
        return None
    shared = shared_steps(*grids)
    if not len(shared):
        return None
    of_arm = {
        of[0].name.arm: union(run.series(metric).steps for run in of if len(run.series(metric)))
        for of in arms
        if of
    }
    on = f"compared on the {len(shared)} steps that all runs have ({shared[0]}-{shared[-1]})"
    if offset := _counted_from(of_arm):
        return f"{metric}: {offset}; {on}"
    described = ", ".join(f"{arm} {_grid_text(grid)}" for arm, grid in of_arm.items())
    if len({grid.tobytes() for grid in of_arm.values()}) < 2:
        odd = next(run for run in runs if not np.array_equal(run.series(metric).steps, of_arm[run.name.arm]))
        described = f"{odd} {_grid_text(odd.series(metric).steps)}, others {_grid_text(of_arm[odd.name.arm])}"
    averaged = "; who logs less often may log averages" if len({*map(_distance, of_arm.values())}) > 1 else ""
    return f"{metric}: recorded at different steps ({described}); {on}{averaged}"


def _counted_from(of_arm: dict[str, Steps]) -> str | None:
    """Say which of two arms counts its steps from one more than the other; None: neither does."""
    if len(of_arm) != 2:
        return None
    (left, one), (right, other) = of_arm.items()
    if len(one) != len(other) or len(one) < 2 or abs(int(other[0] - one[0])) != 1:
        return None
    if not np.array_equal(other - one, np.full(len(one), other[0] - one[0])):
        return None
    late = right if other[0] > one[0] else left
    return (
        f"the counters differ by one: {left} counts {one[0]}-{one[-1]}, {right} {other[0]}-{other[-1]}, so "
        f"that at the same number {late} has made one update fewer"
    )


def _distance(steps: Steps) -> int:
    """Return the usual distance of two steps."""
    return int(np.median(np.diff(steps))) if len(steps) > 1 else 1


def _grid_text(steps: Steps) -> str:
    often = _distance(steps)
    return f"{steps[0]}-{steps[-1]}" + (f" every {often}" if often > 1 else "")


def held_by_all(experiment: Experiment) -> tuple[list[Primary], list[int]]:
    """The claims with windows that every run holds whole, and the seeds whose runs hold those as they are.

    Each is empty where there is none, or where no run lacks a step.
    """
    runs = [run for run in experiment.runs.values() if run.finished]
    claims, short = [], set[int]()
    for claim in experiment.compare.primary:
        grid, shared = experiment.steps_of(claim.metric), stack(runs, claim.metric)[0]
        if experiment.regression or not len(grid):
            return [], []
        faults = incomplete(runs, claim.metric, window_bounds(claim.window, grid, claim.metric))
        short |= {run.name.seed for run, _ in faults}
        if faults and len(shared):
            bounds = window_bounds(DEFAULT_WINDOW, shared, claim.metric)
            faults = incomplete(runs, claim.metric, bounds)
            claim = claim.model_copy(update={"window": f"steps {max(bounds[0], 1)}-{bounds[1]}"})
        if not faults:
            claims.append(claim)
    if not short:
        return [], []
    whole = sorted({run.name.seed for run in runs} - short)
    return claims if len(claims) == len(experiment.compare.primary) else [], whole
