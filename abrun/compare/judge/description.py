"""Two runs, one of each arm, described: no test can tell what a treatment does from what a seed does."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from abrun.compare.judge.summaries import reduced
from abrun.compare.read.experiment import Experiment, stack
from abrun.errors import ComparisonError
from abrun.metric_names import STEP_ONE, is_clock
from abrun.recipe import Primary
from abrun.series import window_bounds

WINDOW = "last 20%"  # of metrics without a claim
MOST_OTHERS = 12  # of these, step one's first


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """One metric of two runs: levels over a window, and the distance of the curves over all shared steps."""

    arm: str
    metric: str
    steps: tuple[int, int]  # of the window
    baseline: float  # mean over the window, or median of a spiky metric
    treatment: float
    difference: float
    mean_distance: float  # of |treatment - baseline|, over every shared step
    largest_distance: float
    largest_at: int  # step


def descriptions(experiment: Experiment, arm: str, primaries: Sequence[Primary]) -> list[Description]:
    """Of the claimed metrics, then of others; none where an arm has several finished runs, or none."""
    sides = experiment.sides(arm).finished
    if sides.sizes != (1, 1):
        return []
    windows = {primary.metric: primary.window for primary in primaries}
    left, right = sides.runs
    recorded = [one for one in left.metrics if one in right.metrics and not is_clock(one)]
    others = sorted((one for one in recorded if one not in windows), key=lambda one: one not in STEP_ONE)
    wanted = windows | dict.fromkeys(others[:MOST_OTHERS], WINDOW)
    found = (_description(experiment, arm, metric, window) for metric, window in wanted.items())
    return [one for one in found if one]


def _description(experiment: Experiment, arm: str, metric: str, window: str) -> Description | None:
    steps, values = stack(experiment.sides(arm).finished.runs, metric)
    known = np.isfinite(values).all(axis=0)
    steps, values = steps[known], values[:, known]
    try:
        first, last = window_bounds(window, experiment.all_steps(), metric)
    except ComparisonError:
        return None
    inside = (first <= steps) & (steps <= last)
    if not inside.any():
        return None
    baseline, treatment = (float(one) for one in reduced(values[:, inside], metric))
    distance = np.abs(values[1] - values[0])
    return Description(
        arm=arm,
        metric=metric,
        steps=(first, last),
        baseline=baseline,
        treatment=treatment,
        difference=treatment - baseline,
        mean_distance=float(distance.mean()),
        largest_distance=float(distance.max()),
        largest_at=int(steps[distance.argmax()]),
    )
