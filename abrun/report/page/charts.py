"""The chart data of the page: a panel as JSON, reduced to at most `NUM_BUCKETS` buckets of steps.

Statistics are computed at every step before the reduction. A run or a pair shows the smallest and largest
value of each bucket, in order of occurrence, so that no spike is lost. Means over runs and their bands show
the mean of each bucket. All rows of a chart share one grid of steps, so that hovering lines them up.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from abrun.logs.recorded.experiment import RecordedExperiment, RecordedRun
from abrun.report.panels import (
    NUM_BUCKETS,
    Curve,
    Difference,
    Panel,
    bucket_extremes,
    bucket_indices,
    bucket_means,
    bucket_steps,
    make_panel,
)
from abrun.stats.series import Array, Steps
from abrun.verdict.claims import ClaimResult

MAX_NOTES = 8
MAX_VALUES = 40_000  # per chart
MIN_BUCKETS = 50


@dataclass(slots=True)
class ChartRows:
    """The lines of one chart on a common grid of steps.

    A NaN is a gap at a step that the run recorded, and no value elsewhere.
    """

    steps: Steps  # [S]
    values: list[Array] = field(default_factory=list)  # per row, [S]
    recorded: list[NDArray[np.bool_]] = field(default_factory=list)  # per row, [S]
    over_runs: list[bool] = field(default_factory=list)  # per row: a mean over runs, or its band

    def add(self, steps: Steps, values: Array, *, over_runs: bool = False) -> int:
        """Add a row of values at their steps; return its index."""
        where = slice(None) if len(steps) == len(self.steps) else np.searchsorted(self.steps, steps)
        row, recorded = np.full(len(self.steps), np.nan), np.zeros(len(self.steps), bool)
        row[where], recorded[where] = np.where(np.isfinite(values), values, np.nan), True
        self.values.append(row)
        self.recorded.append(recorded)
        self.over_runs.append(over_runs)
        return len(self.values) - 1


def chart_json(
    experiment: RecordedExperiment, metric: str, claims: Sequence[ClaimResult], max_values: int = MAX_VALUES
) -> dict[str, Any]:
    """Return one metric's chart: seeds, mean and ±1 sd of each arm, and the claimed differences.

    The chart has about `max_values` numbers at most: many lines get fewer buckets each.
    """
    panel = make_panel(experiment, metric, claims)
    rows = ChartRows(panel.steps)
    runs = [run for run in experiment.runs.values() if len(run.series(metric))]
    notes = [*_thinned_lines_notes(panel), *_gap_notes(runs, metric)]
    curves = {curve.arm: curve for curve in panel.curves}
    for arm in experiment.arms:
        if (curve := curves.get(arm)) and len(curve.steps) < curve.num_steps:
            covered = f"the {len(curve.steps)} of {curve.num_steps} steps that all its runs recorded"
            notes.append(f"{arm}: mean and band cover {covered}")
        notes += _missing_run_notes(experiment, arm, metric)
    omitted = [f"and {len(notes) - MAX_NOTES} more such notes"] * (len(notes) > MAX_NOTES)
    return {
        "metric": metric,
        "unit": panel.unit,
        "arms": [_curve_json(rows, curve) for curve in panel.curves],
        "windows": panel.windows,
        "differences": [_difference_json(rows, difference) for difference in panel.differences],
        "notes": [*notes[:MAX_NOTES], *omitted],
        **rows_json(rows, max_values),
    }


def _curve_json(rows: ChartRows, curve: Curve) -> dict[str, Any]:
    band = None
    if curve.sd is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            ends = (curve.mean - curve.sd, curve.mean + curve.sd)
            band = [rows.add(curve.steps, end, over_runs=True) for end in ends]
    return {
        "arm": curve.index,
        "seeds": [
            {"row": rows.add(seed.steps, seed.values), "seed": seed.seed, "finished": seed.finished}
            for seed in curve.seeds
        ],
        "count": curve.count,
        "mean": rows.add(curve.steps, curve.mean, over_runs=True) if len(curve.steps) else None,
        "band": band,
    }


def _difference_json(rows: ChartRows, difference: Difference) -> dict[str, Any]:
    has_steps = len(difference.steps) > 0
    return {
        "arm": difference.index,
        "transform": difference.transform,
        "unit": difference.scale,
        "num_pairs": difference.num_pairs,
        "num_runs": difference.num_runs,
        "pairs": [{"row": rows.add(line.steps, line.values), "seed": line.seed} for line in difference.pairs],
        "mean": rows.add(difference.steps, difference.mean, over_runs=True) if has_steps else None,
        "reruns": [
            {"row": rows.add(line.steps, line.values), "name": line.name} for line in difference.reruns
        ],
        "windows": [{"steps": window.steps, "interval": window.interval} for window in difference.windows],
    }


def rows_json(rows: ChartRows, max_values: int = MAX_VALUES) -> dict[str, Any]:
    """Return the rows reduced to buckets; `gaps` maps a row to the positions of values recorded as NaN.

    Of a bucket's two places a mean takes the first and leaves the other out.
    """
    values = np.array(rows.values).reshape(len(rows.values), len(rows.steps))
    recorded = np.array(rows.recorded).reshape(values.shape)
    max_buckets = max_values // (2 * max(1, len(rows.values)))
    buckets = bucket_indices(len(rows.steps), min(NUM_BUCKETS, max(MIN_BUCKETS, max_buckets)))
    steps = rows.steps
    if buckets is not None:
        steps = bucket_steps(steps, buckets)
        means, over_runs = bucket_means(values, buckets), np.array(rows.over_runs, bool)
        values = bucket_extremes(values, buckets)
        recorded = recorded[:, buckets].any(axis=-1).repeat(2, axis=-1)
        values[over_runs, ::2], values[over_runs, 1::2] = means[over_runs], np.nan
        recorded[over_runs, 1::2] = False
    gaps = np.isnan(values) & recorded
    return {
        "num_steps": len(rows.steps),
        "num_buckets": 0 if buckets is None else len(buckets),
        "ends": [] if buckets is None else rows.steps[buckets[:, [0, -1]]],
        "steps": steps,
        "rows": _narrow(values),
        "gaps": {str(index): np.flatnonzero(gaps[index]) for index in np.flatnonzero(gaps.any(axis=-1))},
    }


def _narrow(values: Array) -> NDArray[Any]:
    """Return float32 values, whose decimals are half as long, unless the rounding would be visible."""
    with np.errstate(all="ignore"):
        narrow = values.astype(np.float32)
        is_finite = np.isfinite(values)
        error = np.abs(np.where(is_finite, narrow - values, 0)).max(axis=-1, initial=0)
        low = np.where(is_finite, values, np.inf).min(axis=-1, initial=np.inf)
        spread = np.where(is_finite, values, -np.inf).max(axis=-1, initial=-np.inf) - low
        faithful = (error <= 1e-3 * spread) | (spread <= 0)
    return narrow if faithful.all() and np.isfinite(narrow[is_finite]).all() else values


# --- notes below a chart ---


def _thinned_lines_notes(panel: Panel) -> Iterator[str]:
    drawings = [(line.arm, line.seeds, line.num_seeds, "seeds", "band") for line in panel.curves]
    drawings += [(line.arm, line.pairs, line.num_pairs, "pairs", "windows") for line in panel.differences]
    for arm, drawn, number, unit, around in drawings:
        if len(drawn) < number:
            yield f"{arm}: {len(drawn)} of {number} {unit} drawn; mean and {around} include all {unit}"


def _gap_notes(runs: Sequence[RecordedRun], metric: str) -> Iterator[str]:
    for run in runs:
        series = run.series(metric)
        is_gap = ~np.isfinite(series.values)
        if is_gap.any():
            nans = int(np.isnan(series.values).sum())
            kinds = [(nans, "NaN"), (int(is_gap.sum()) - nans, "infinite")]
            counts = " and ".join(f"{count} {kind}" for count, kind in kinds if count)
            first_step, total_text = series.steps[is_gap][0], "all" if is_gap.all() else f"of {len(is_gap)}"
            yield f"{run}: {counts} ({total_text} values), the first at step {first_step}"


def _missing_run_notes(experiment: RecordedExperiment, arm: str, metric: str) -> Iterator[str]:
    runs = list(experiment.arm(arm).values())
    missing_runs = [run for run in runs if run.finished and not len(run.series(metric))]
    if missing_runs and len(missing_runs) == sum(run.finished for run in runs):
        yield f"{arm}: no finished run recorded this metric"
    else:
        yield from (f"{run}: did not record this metric" for run in missing_runs)
    for run in runs:
        if not run.finished and len(run.series(metric)):
            last_step = run.series(metric).steps[-1]
            yield f"{run}: {run.status} after step {last_step}; drawn dotted, excluded from the mean"
