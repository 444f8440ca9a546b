"""The table of metrics on the page: levels, differences from the baseline, and small curves."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from abrun.recorded.experiment import RecordedExperiment, RecordedRun, stack_runs
from abrun.report.panels import display_unit
from abrun.runs.layout import RunName
from abrun.stats.series import Array, Steps, window_bounds
from abrun.verdict.summaries import reduce_arms, reduce_window

WINDOW = "last 20%"
NUM_POINTS = 40  # of a small curve
CURVE_HEIGHT = 100  # small curves are whole numbers from 0 (lowest) to this
ROUNDING = 1e-6  # relative; a smaller difference counts as none


@np.errstate(all="ignore")  # values that overflow give no level
def metric_rows(experiment: RecordedExperiment, metrics: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row per metric, the largest difference relative to the spread over seeds first.

    Levels are means over the last 20 % of the steps that all finished runs recorded, in the display unit.
    A metric without such steps has no levels and comes last.
    """
    rows = [_make_row(experiment, index, metric) for index, metric in enumerate(metrics)]
    return sorted(rows, key=lambda row: -max((cell["score"] for cell in row["arms"]), default=-1.0))


def _make_row(experiment: RecordedExperiment, index: int, metric: str) -> dict[str, Any]:
    runs = [run for run in experiment.runs.values() if run.finished and not run.name.rerun]
    runs = [run for run in runs if len(run.series(metric))]
    steps, values = stack_runs(runs, metric)
    largest = float(np.abs(values).max(initial=0.0, where=np.isfinite(values)))
    unit, divisor = display_unit(metric, largest)
    row: dict[str, Any] = {"metric": index, "unit": unit, "baseline": None, "arms": [], "curves": []}
    if not len(steps):
        return row
    first_step, _ = window_bounds(WINDOW, steps, metric)
    levels = _levels(experiment, runs, values[:, steps >= first_step] / divisor, metric)
    by_arm = {
        arm: {name.seed: level for name, level in levels.items() if name.arm == arm}
        for arm in experiment.arms
    }
    baseline = by_arm[experiment.baseline]
    row["baseline"] = float(np.mean([*baseline.values()])) if baseline else None
    row["arms"] = [
        _compare_levels(experiment.arms.index(arm), baseline, by_arm[arm], paired=experiment.compare.paired)
        for arm in experiment.treatments
        if baseline and by_arm[arm]
    ]
    row["curves"] = list(_small_curves(experiment.arms, runs, steps, values))
    return row


def _levels(
    experiment: RecordedExperiment, runs: Sequence[RecordedRun], values: Array, metric: str
) -> dict[RunName, float]:
    """Return one number per run of values [R, W]: its level, by one rule for all runs of an arm.

    As in reduce_arms, it is relative to the baselines only if the whole arm trained on their rollouts.
    """
    rows = {run.name: row for run, row in zip(runs, values, strict=True)}
    recorded_arms = {arm for arm in experiment.treatments if experiment.sides(arm).finished.share_rollouts}
    levels = {}
    for name, row in rows.items():
        baseline = rows.get(RunName(arm=experiment.baseline, seed=name.seed))
        if name.arm in recorded_arms and baseline is not None:
            _, level = reduce_arms(baseline, row, metric, stepwise=True)
        else:
            level = reduce_window(row, metric)
        levels[name] = float(level)
    return levels


def _compare_levels(
    arm: int, baseline: dict[int, float], treatment: dict[int, float], *, paired: bool
) -> dict[str, Any]:
    """Compare the levels of two arms, by seed.

    `score` is the difference in units of the larger sd over seeds; infinite if neither arm varies or only
    one level is finite, and -1 if neither is.
    """
    shared = [seed for seed in baseline if seed in treatment] if paired else []
    changes = [treatment[seed] - baseline[seed] for seed in shared]
    treated_mean, baseline_mean = float(np.mean([*treatment.values()])), float(np.mean([*baseline.values()]))
    difference = float(np.mean(changes)) if changes else treated_mean - baseline_mean
    larger = max(abs(treated_mean), abs(baseline_mean))
    if math.isfinite(difference) and abs(difference) <= ROUNDING * larger:
        difference = 0.0
    several = [[*levels.values()] for levels in (baseline, treatment) if len(levels) > 1]
    spread = max((float(np.std(levels, ddof=1)) for levels in several), default=0.0)
    score = abs(difference) / spread if spread > 0 else math.inf if difference else 0.0
    if not math.isfinite(difference):
        score = math.inf if math.isfinite(treated_mean) != math.isfinite(baseline_mean) else -1.0
    agreeing = sum(change * difference > 0 for change in changes)
    return {
        "arm": arm,
        "level": treated_mean,
        "difference": difference,
        "score": score,
        "varies": spread > 0,
        "seeds": [agreeing, len(changes)] if difference and len(changes) > 1 else None,
    }


def _small_curves(
    arms: Sequence[str], runs: Sequence[RecordedRun], steps: Steps, values: Array
) -> Iterator[dict[str, Any]]:
    """Yield the mean of each arm as at most NUM_POINTS whole numbers, on a scale shared by the arms."""
    chunks = np.array_split(np.arange(len(steps)), min(NUM_POINTS, len(steps)))
    means: dict[int, Array] = {}
    for index, arm in enumerate(arms):
        rows = values[[run.name.arm == arm for run in runs]]
        if len(rows):
            means[index] = np.array([rows[:, chunk].mean() for chunk in chunks])
    points = np.array([*means.values()])
    is_finite = np.isfinite(points)
    if not is_finite.any():
        return
    low, high = points[is_finite].min(), points[is_finite].max()
    span = high - low
    if not np.isfinite(span):
        return
    for index, mean in means.items():
        share = (mean - low) / span if span > 0 else np.where(np.isfinite(mean), 0.5, np.nan)
        scaled = CURVE_HEIGHT * np.where(np.isfinite(share), share, np.nan)
        yield {
            "arm": index,
            "points": [None if math.isnan(point) else round(point) for point in scaled.tolist()],
        }
