"""What the page draws, as arrays: statistics at every step, then at most `NUM_BUCKETS` buckets of steps.

A bucket is shown by its smallest and its largest value, in the order in which they occurred: no spike is
lost, and nothing is averaged away. All rows of a chart share one grid of steps: hovering lines them up.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from abrun.compare.buckets import bucket_indices, bucket_steps, smallest_and_largest
from abrun.compare.experiment import Experiment, Pair, Run, stack, stack_pairs, union
from abrun.compare.guards import largest, peak_memory, shared_memory_metrics, shared_peak_counter
from abrun.compare.metrics import (
    EXCESS_OFFSET,
    Transform,
    difference_unit,
    display_unit,
    reduced,
    transformed,
)
from abrun.equivalence import t_interval
from abrun.series import Array, Series, Steps

NUM_WINDOWS = 8  # of the Bonferroni-t bars
MOST_NOTES = 8
Content = Mapping[str, Any]


@dataclass(slots=True)
class Rows:
    """The lines of one chart on its grid; a NaN is a gap where it was recorded, and nothing elsewhere."""

    steps: Steps  # [S]
    values: list[Array] = field(default_factory=list)  # [S] each
    recorded: list[NDArray[np.bool_]] = field(default_factory=list)  # [S] each

    def add(self, steps: Steps, values: Array) -> int:
        """Places values on the grid; returns the index of the row."""
        where = slice(None) if len(steps) == len(self.steps) else np.searchsorted(self.steps, steps)
        row, recorded = np.full(len(self.steps), np.nan), np.zeros(len(self.steps), bool)
        row[where], recorded[where] = np.where(np.isfinite(values), values, np.nan), True
        self.values.append(row)
        self.recorded.append(recorded)
        return len(self.values) - 1


def chart(experiment: Experiment, metric: str, claims: Sequence[Content]) -> dict[str, Any]:
    """One metric: seeds, mean and ±1 sd of every arm, and the paired differences that claims are about."""
    runs = [run for run in experiment.runs.values() if len(run.series(metric))]
    rows = Rows(union(run.series(metric).steps for run in runs))
    largest_value = max((_largest_finite(run.series(metric)) for run in runs), default=0.0)
    unit, divisor = display_unit(metric, largest_value)
    notes = [*_gaps(runs, metric)]
    arms = []
    for index, arm in enumerate(experiment.arms):
        of_arm = [run for run in experiment.arm(arm).values() if len(run.series(metric))]
        if of_arm:
            arms.append({"arm": index, **_curve(rows, of_arm, metric, divisor)})
            notes += _coverage(rows, arms[-1], arm)
        notes += _left_out(experiment, arm, metric)
    differences = list(_differences(rows, experiment, metric, claims))
    return {
        "metric": metric,
        "unit": unit,
        "arms": arms,
        "windows": sorted({tuple(claim["steps"]) for claim in claims if claim.get("steps")}),
        "differences": differences,
        "notes": notes if len(notes) <= MOST_NOTES else [*notes[:MOST_NOTES], _and_more(notes)],
        **drawn(rows),
    }


def _curve(rows: Rows, runs: Sequence[Run], metric: str, divisor: float) -> dict[str, Any]:
    """One arm. The mean is that of the finished runs, at the steps that all of them recorded."""
    seeds = []
    for run in runs:
        series = run.series(metric)
        row = rows.add(series.steps, series.values / divisor)
        seeds.append({"row": row, "seed": run.name.seed, "finished": run.finished})
    steps, values = stack([run for run in runs if run.finished], metric)
    curve: dict[str, Any] = {"seeds": seeds, "count": len(values), "mean": None, "band": None}
    if not len(steps):
        return curve
    with np.errstate(over="ignore", invalid="ignore"):
        values = values / divisor
        mean = values.mean(axis=0)
        curve["mean"] = rows.add(steps, mean)
        if len(values) > 1:
            sd = values.std(axis=0, ddof=1)
            curve["band"] = [rows.add(steps, mean - sd), rows.add(steps, mean + sd)]
    return curve


def _differences(
    rows: Rows, experiment: Experiment, metric: str, claims: Sequence[Content]
) -> Iterator[dict[str, Any]]:
    """A panel for each treatment and transform that a claim on this metric is about."""
    wanted: dict[tuple[str, Transform], None] = dict.fromkeys(
        (claim["arm"], claim["transform"]) for claim in claims
    )
    for arm, transform in wanted:
        if arm not in experiment.arms:
            continue
        pairs = [pair for pair in experiment.pairs(arm) if pair.finished]
        if pairs:
            yield {
                "arm": experiment.arms.index(arm),
                "transform": transform,
                "unit": difference_unit(transform).strip().removeprefix("(").removesuffix(")"),
                **_panel(rows, pairs, metric, transform),
            }


def _panel(rows: Rows, pairs: Sequence[Pair], metric: str, transform: Transform) -> dict[str, Any]:
    steps, baseline, treatment = stack_pairs(pairs, metric)
    left, right = (_comparable(values, transform, metric) for values in (baseline, treatment))
    if not len(steps):
        return {"pairs": [], "mean": None, "reruns": [], "windows": []}
    finite = np.isfinite(left).all(axis=0) & np.isfinite(right).all(axis=0)
    lines = [
        {"row": rows.add(steps, difference), "seed": pair.seed}
        for pair, difference in zip(pairs, right - left, strict=True)
    ]
    reruns = []
    for pair in pairs:
        for rerun in pair.reruns:
            shared, (once, again) = stack([pair.baseline, rerun], metric)
            if rerun.finished and len(shared):
                difference = _comparable(again, transform, metric) - _comparable(once, transform, metric)
                reruns.append({"row": rows.add(shared, difference), "name": str(rerun)})
    return {
        "pairs": lines,
        "mean": rows.add(steps, (right - left).mean(axis=0)),
        "reruns": reruns,
        "windows": _windows(steps[finite], left[:, finite], right[:, finite], metric),
    }


def _comparable(values: Array, transform: Transform, metric: str) -> Array:
    """On the scale of a claim; outside the transform's domain, which a claim's own window never is, a gap."""
    if transform != "identity":
        inside = (values - 1 + EXCESS_OFFSET if transform == "log_excess" else values) > 0
        values = np.where(inside & np.isfinite(values), values, np.nan)
    return transformed(np.where(np.isfinite(values), values, np.nan), transform, metric)


def _windows(steps: Steps, baseline: Array, treatment: Array, metric: str) -> list[dict[str, Any]]:
    """Each window's summaries by pair, and intervals that cover all windows at once with 95 %."""
    windows = []
    parts = np.array_split(np.arange(len(steps)), min(NUM_WINDOWS, len(steps))) if len(steps) else []
    for part in parts:
        differences = reduced(treatment[:, part], metric) - reduced(baseline[:, part], metric)
        with np.errstate(over="ignore", invalid="ignore"):
            interval = t_interval(differences, 1 - 0.05 / len(parts)) if len(differences) > 1 else None
        ends = [int(steps[part[0]]), int(steps[part[-1]])]
        known = interval if interval is not None and np.isfinite(interval).all() else None
        windows.append({"steps": ends, "pairs": differences, "interval": known})
    return windows


def drawn(rows: Rows) -> dict[str, Any]:
    """The rows as the page holds them: `gaps` has, by row, where a missing value is one recorded as NaN."""
    values = np.array(rows.values).reshape(len(rows.values), len(rows.steps))
    recorded = np.array(rows.recorded).reshape(values.shape)
    buckets = bucket_indices(len(rows.steps))
    steps = rows.steps
    if buckets is not None:
        steps = bucket_steps(steps, buckets)
        values = smallest_and_largest(values, buckets)
        recorded = recorded[:, buckets].any(axis=-1).repeat(2, axis=-1)
    gaps = np.isnan(values) & recorded
    return {
        "num_steps": len(rows.steps),
        "num_buckets": 0 if buckets is None else len(buckets),
        "ends": [] if buckets is None else rows.steps[buckets[:, [0, -1]]],
        "steps": steps,
        "rows": _short(values),
        "gaps": {str(index): np.flatnonzero(gaps[index]) for index in np.flatnonzero(gaps.any(axis=-1))},
    }


def _short(values: Array) -> NDArray[Any]:
    """float32, whose shortest decimals are half as long, unless that would show in a line."""
    with np.errstate(all="ignore"):
        narrow = values.astype(np.float32)
        known = np.isfinite(values)
        error = np.abs(np.where(known, narrow - values, 0)).max(axis=-1, initial=0)
        low = np.where(known, values, np.inf).min(axis=-1, initial=np.inf)
        spread = np.where(known, values, -np.inf).max(axis=-1, initial=-np.inf) - low
        faithful = (error <= 1e-3 * spread) | (spread <= 0)
    return narrow if faithful.all() and np.isfinite(narrow[known]).all() else values


def memory_peaks(experiment: Experiment) -> dict[str, Any] | None:
    """Peak memory by arm, overall and by phase, mean over an arm's seeds; None where not recorded."""
    runs = [run for arm in experiment.arms for run in experiment.arm(arm).values() if run.finished]
    counter = shared_peak_counter(runs)
    if counter is None:
        return None
    phases = shared_memory_metrics(runs, counter)
    peaks = np.array(
        [[peak_memory(run, counter), *(largest(run, phase) for phase in phases)] for run in runs]
    )
    unit, divisor = display_unit(counter, float(np.max(peaks, initial=0, where=np.isfinite(peaks))))
    arms = np.array([run.name.arm for run in runs])
    means = [
        (peaks[arms == arm].mean(axis=0) / divisor).tolist() if (arms == arm).any() else None
        for arm in experiment.arms
    ]
    return {
        "counter": counter.removesuffix("_bytes").replace("_", " "),
        "unit": unit,
        "phases": ["overall", *(phase.split("/")[1].replace("_", " ") for phase in phases)],
        "means": means,
    }


# --- what a chart has to say about its runs ---


def _gaps(runs: Sequence[Run], metric: str) -> Iterator[str]:
    for run in runs:
        series = run.series(metric)
        bad = ~np.isfinite(series.values)
        if bad.any():
            nans = int(np.isnan(series.values).sum())
            kinds = [(nans, "NaN"), (int(bad.sum()) - nans, "infinite")]
            counts = " and ".join(f"{count} {kind}" for count, kind in kinds if count)
            first, of_all = series.steps[bad][0], "all" if bad.all() else f"of {len(bad)}"
            yield f"{run}: {counts} ({of_all} values), the first at step {first}"


def _left_out(experiment: Experiment, arm: str, metric: str) -> Iterator[str]:
    runs = list(experiment.arm(arm).values())
    without = [run for run in runs if run.finished and not len(run.series(metric))]
    if without and len(without) == sum(run.finished for run in runs):
        yield f"{arm}: no finished run recorded this metric"
    else:
        yield from (f"{run}: did not record this metric" for run in without)
    for run in runs:
        if not run.finished and len(run.series(metric)):
            last = run.series(metric).steps[-1]
            yield f"{run}: {run.status} after step {last}; drawn dotted, not part of the mean"


def _coverage(rows: Rows, curve: Content, arm: str) -> Iterator[str]:
    recorded = [rows.recorded[seed["row"]] for seed in curve["seeds"] if seed["finished"]]
    num_steps = int(np.any(recorded, axis=0).sum())
    shared = 0 if curve["mean"] is None else int(rows.recorded[curve["mean"]].sum())
    if shared < num_steps:
        yield f"{arm}: mean and band cover the {shared} of {num_steps} steps that all its runs recorded"


def _and_more(notes: Sequence[str]) -> str:
    return f"and {len(notes) - MOST_NOTES} more such notes"


def _largest_finite(series: Series) -> float:
    return float(np.max(series.values, initial=0.0, where=np.isfinite(series.values)))
