"""The drawing of a metric as data, shared by the figures and the page.

A panel has curves and bands of each arm, paired differences on the scale of the claims, windows with
intervals, and margins. A band is a picture and not a test: it is labelled ±1 sd over seeds, and the paired
difference with its intervals is drawn below it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import special

from abrun.logs.recorded.experiment import (
    Pair,
    RecordedExperiment,
    RecordedRun,
    Sides,
    stack_runs,
    union_steps,
)
from abrun.messages.numbers import difference_scale
from abrun.runs.metric_names import Transform, metric_unit, peak_memory_phase
from abrun.stats.equivalence import estimate_difference
from abrun.stats.series import Array, Steps
from abrun.verdict.claims import ClaimResult
from abrun.verdict.guards import largest_value, peak_memory, shared_memory_metrics, shared_peak_counter
from abrun.verdict.summaries import reduce_arms, transform_with_gaps

NUM_WINDOWS = 8  # number of Bonferroni-t intervals
MAX_LINES = 32  # drawn per kind, so that they do not hide each other; statistics include all
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesLine:
    """The values of one run, or the differences of one pair."""

    name: str
    seed: int
    finished: bool = True
    steps: Steps  # [S]
    values: Array  # [S]; NaN is a gap


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One arm, with the mean and sd of its finished runs at the steps that all of them recorded."""

    arm: str
    index: int  # of the arm, which selects its colour
    seeds: tuple[SeriesLine, ...]  # at most MAX_LINES runs that recorded the metric
    num_seeds: int  # runs that recorded the metric
    num_steps: int  # steps at which any finished run recorded it
    count: int  # finished runs in the mean
    steps: Steps  # [S]; empty without a mean
    mean: Array  # [S]
    sd: Array | None  # [S]; None for a single run


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One of NUM_WINDOWS windows over the whole run, with the difference of each pair and their interval."""

    steps: tuple[int, int]
    pairs: Array  # [P]; empty if runs are not paired
    interval: tuple[float, float] | None  # Bonferroni-t, simultaneous 95 % over all windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Treatment minus baseline on the scale of a claim, paired by seed or between means."""

    arm: str
    index: int
    transform: Transform
    scale: str  # such as "log ratio"; empty for untransformed values
    steps: Steps  # [S] recorded by every pair
    pairs: tuple[SeriesLine, ...]  # at most MAX_LINES
    num_pairs: int
    num_runs: tuple[int, int] | None  # of both arms, if they are not paired
    mean: Array  # [S]
    reruns: tuple[SeriesLine, ...]  # A/A rerun minus its baseline run
    windows: tuple[Window, ...]
    claims: tuple[ClaimResult, ...]  # those with a margin to draw over a window


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A metric in all arms, with the claims on it."""

    metric: str
    unit: str  # display unit of the curves
    steps: Steps  # recorded by any run
    curves: tuple[Curve, ...]  # one per arm that recorded it
    windows: tuple[tuple[int, int], ...]  # of the claims
    differences: tuple[Difference, ...]  # one per claimed treatment and scale


def make_panel(experiment: RecordedExperiment, metric: str, claims: Sequence[ClaimResult]) -> Panel:
    """Return the panel of one metric; `claims` are those on this metric."""
    runs = [run for run in experiment.runs.values() if len(run.series(metric))]
    highest = max((_largest_finite(run.series(metric).values) for run in runs), default=0.0)
    unit, divisor = display_unit(metric, highest)
    curves = (_make_curve(experiment, index, metric, divisor) for index in range(len(experiment.arms)))
    return Panel(
        metric=metric,
        unit=unit,
        steps=union_steps(run.series(metric).steps for run in runs),
        curves=tuple(curve for curve in curves if curve.seeds),
        windows=tuple(sorted({claim.claim.steps for claim in claims if claim.claim.steps})),
        differences=tuple(_make_differences(experiment, metric, claims)),
    )


def _make_curve(experiment: RecordedExperiment, index: int, metric: str, divisor: float) -> Curve:
    arm = experiment.arms[index]
    runs = [run for run in experiment.arm(arm).values() if len(run.series(metric))]
    finished = [run for run in runs if run.finished]
    drawn = [*_thin_out([run for run in runs if not run.finished]), *_thin_out(finished)]
    drawn = [run for run in runs if run in drawn[:MAX_LINES]]
    seeds = [_make_line(run, run.series(metric).steps, run.series(metric).values / divisor) for run in drawn]
    steps, values = stack_runs(finished, metric)
    with np.errstate(over="ignore", invalid="ignore"):
        values = values / divisor
        mean = values.mean(axis=0) if len(steps) else np.empty(0)
        sd = values.std(axis=0, ddof=1) if len(steps) and len(values) > 1 else None
    return Curve(
        arm=arm,
        index=index,
        seeds=tuple(seeds),
        num_seeds=len(runs),
        num_steps=len(union_steps(run.series(metric).steps for run in finished)),
        count=len(values),
        steps=steps,
        mean=mean,
        sd=sd,
    )


def _thin_out(sequence: Sequence[T]) -> list[T]:
    """Select at most MAX_LINES items, evenly spaced."""
    count = min(len(sequence), MAX_LINES)
    return [sequence[index * len(sequence) // count] for index in range(count)]


def _make_line(run: RecordedRun, steps: Steps, values: Array) -> SeriesLine:
    return SeriesLine(name=str(run), seed=run.name.seed, finished=run.finished, steps=steps, values=values)


def _make_differences(
    experiment: RecordedExperiment, metric: str, claims: Sequence[ClaimResult]
) -> Iterator[Difference]:
    arm_transforms: dict[tuple[str, Transform], None] = dict.fromkeys(
        (claim.arm, claim.claim.transform) for claim in claims if claim.arm in experiment.arms
    )
    for arm, transform in arm_transforms:
        scale_claims = [c for c in claims if (c.arm, c.claim.transform) == (arm, transform)]
        if min(experiment.sides(arm).finished.sizes):
            yield _make_difference(experiment, metric, arm, transform, scale_claims)


def _make_difference(
    experiment: RecordedExperiment,
    metric: str,
    arm: str,
    transform: Transform,
    claims: Sequence[ClaimResult],
) -> Difference:
    pairs = [pair for pair in experiment.pairs(arm) if pair.finished]
    sides = experiment.sides(arm).finished
    claims = [claim for claim in claims if claim.claim.steps and claim.claim.accepted]
    steps, values = stack_runs(sides.runs, metric)
    num_baselines = len(sides.baselines)
    baselines = transform_with_gaps(values[:num_baselines], transform)
    treatments = transform_with_gaps(values[num_baselines:], transform)
    finite = np.isfinite(baselines).all(axis=0) & np.isfinite(treatments).all(axis=0)
    drawn = _thin_out(list(zip(pairs, treatments - baselines, strict=True))) if sides.paired else []
    lines = (_make_line(pair.treatment, steps, pair_difference) for pair, pair_difference in drawn)
    has_steps = len(steps) > 0
    finite_values = steps[finite], baselines[:, finite], treatments[:, finite]
    windows = _make_windows(*finite_values, metric, sides) if has_steps else ()
    return Difference(
        arm=arm,
        index=experiment.arms.index(arm),
        transform=transform,
        scale=difference_scale(transform),
        steps=steps,
        pairs=tuple(lines) if has_steps else (),
        num_pairs=len(pairs) if has_steps else 0,
        num_runs=None if sides.paired else sides.sizes,
        mean=treatments.mean(axis=0) - baselines.mean(axis=0) if has_steps else np.empty(0),
        reruns=tuple(_thin_out(list(_rerun_lines(pairs, metric, transform)))) if has_steps else (),
        windows=tuple(windows),
        claims=tuple(claim for claim in claims if claim.claim.margin is not None),
    )


def _rerun_lines(pairs: Sequence[Pair], metric: str, transform: Transform) -> Iterator[SeriesLine]:
    for pair in pairs:
        for rerun in pair.reruns:
            shared_steps, values = stack_runs([pair.baseline, rerun], metric)
            if rerun.finished and len(shared_steps):
                first_run, second_run = transform_with_gaps(values, transform)
                yield _make_line(rerun, shared_steps, second_run - first_run)


def _make_windows(
    steps: Steps, baselines: Array, treatments: Array, metric: str, sides: Sides
) -> Iterator[Window]:
    windows = np.array_split(np.arange(len(steps)), min(NUM_WINDOWS, len(steps))) if len(steps) else []
    for window in windows:
        baseline_values, treatment_values = reduce_arms(
            baselines[:, window], treatments[:, window], metric, stepwise=sides.share_rollouts
        )
        differences = treatment_values - baseline_values if sides.paired else np.empty(0)
        with np.errstate(over="ignore", invalid="ignore"):
            interval = None
            if min(len(baseline_values), len(treatment_values)) > 1:
                mean, error, degrees_of_freedom = estimate_difference(
                    baseline_values, treatment_values, paired=sides.paired
                )
                reach = float(special.stdtrit(degrees_of_freedom, 1 - 0.025 / len(windows))) * error
                interval = mean - reach, mean + reach
        finite_interval = interval if interval is not None and np.isfinite(interval).all() else None
        ends = int(steps[window[0]]), int(steps[window[-1]])
        yield Window(steps=ends, pairs=differences, interval=finite_interval)


# --- peak memory ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Peak memory of each arm, overall and by phase, averaged over its finished runs."""

    counter: str  # display name of the metric: the allocator's or the tracker's
    unit: str
    phases: list[str]  # "overall" first
    means: list[list[float] | None]  # by arm; None if no run of it finished
    held_by: list[str | None]  # by arm, the phase with the highest peak


def memory_peaks(experiment: RecordedExperiment) -> Peaks | None:
    """Return peak memory by arm; None unless every finished run recorded the same counter."""
    runs = [run for arm in experiment.arms for run in experiment.arm(arm).values() if run.finished]
    counter = shared_peak_counter(runs)
    if counter is None:
        return None
    metrics = shared_memory_metrics(runs, counter)
    rows = [[peak_memory(run, counter), *(largest_value(run, metric) for metric in metrics)] for run in runs]
    peaks, arms = np.array(rows), np.array([run.name.arm for run in runs])
    unit, divisor = display_unit(counter, _largest_finite(peaks))
    phases = [(peak_memory_phase(metric, counter) or "").replace("_", " ") for metric in metrics]
    means = [peaks[arms == arm].mean(axis=0) if (arms == arm).any() else None for arm in experiment.arms]
    return Peaks(
        counter=counter.removesuffix("_bytes").replace("_", " "),
        unit=unit,
        phases=["overall", *phases],
        means=[None if mean is None else (mean / divisor).tolist() for mean in means],
        held_by=[None if mean is None else phases[int(np.argmax(mean[1:]))] for mean in means],
    )


# --- display units ---


def display_unit(metric: str, largest: float) -> tuple[str, float]:
    """Return the label and divisor to display a metric with; files keep seconds and bytes."""
    unit = metric_unit(metric)
    if unit == "bytes":
        return ("GiB", 2.0**30) if largest >= 2**28 else ("MiB", 2.0**20)
    return (unit, 1.0) if unit in ("s", "nats") else ("", 1.0)


def _largest_finite(values: Array) -> float:
    return float(np.max(values, initial=0.0, where=np.isfinite(values)))


# Bucketing of long runs for drawing.
# A run shows the smallest and largest value of each bucket, so that no spike is lost. A mean over runs
# shows the mean of each bucket, so that it stays readable.

NUM_BUCKETS = 250


def bucket_indices(num_steps: int, num_buckets: int = NUM_BUCKETS) -> NDArray[np.int64] | None:
    """Return the step indices of each bucket, [B, W]; None if there are too few steps to need buckets.

    A bucket shorter than W repeats its last index.
    """
    if num_steps <= 2 * num_buckets:
        return None
    edges = np.linspace(0, num_steps, num_buckets + 1).astype(np.int64)
    width = int(np.diff(edges).max())
    return np.minimum(edges[:-1, None] + np.arange(width), edges[1:, None] - 1)


def bucket_extremes(values: Array, buckets: NDArray[np.int64]) -> Array:
    """Return the two extremes of each bucket as they occurred, [R, S] -> [R, 2 B]; NaN if it is empty."""
    bucketed = values[:, buckets]
    missing = np.isnan(bucketed)
    smallest = np.where(missing, np.inf, bucketed).argmin(axis=-1)
    largest = np.where(missing, -np.inf, bucketed).argmax(axis=-1)
    order = np.stack([np.minimum(smallest, largest), np.maximum(smallest, largest)], axis=-1)
    return np.take_along_axis(bucketed, order, axis=-1).reshape(len(values), -1)


def bucket_steps(steps: Steps, buckets: NDArray[np.int64]) -> Steps:
    """Return the steps at which the two values of each bucket are drawn, [S] -> [2 B].

    The first and last step stay, because marks are drawn at them.
    """
    width = buckets.shape[1]
    positions = buckets[:, [width // 4, 3 * width // 4]].reshape(-1)
    positions[[0, -1]] = 0, len(steps) - 1
    return steps[positions]


def bucket_means(values: Array, buckets: NDArray[np.int64]) -> Array:
    """Return the mean of the finite values of each bucket, [R, S] -> [R, B]; NaN if it has none."""
    is_finite, starts = np.isfinite(values), buckets[:, 0]
    counts = np.add.reduceat(is_finite, starts, axis=-1, dtype=np.int64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        return np.add.reduceat(np.where(is_finite, values, 0.0), starts, axis=-1) / counts


def average_in_buckets(steps: Steps, values: Array) -> tuple[Steps, Array]:
    """Return steps [D] and rows [R, D] to draw: [S] and [R, S] unchanged, or bucket means of many steps."""
    buckets = bucket_indices(len(steps))
    if buckets is None:
        return steps, values
    return steps[buckets].mean(axis=-1).astype(steps.dtype), bucket_means(values, buckets)
