"""Assay sensitivity (ICH E10, 1.5): could these runs have shown a difference, had there been one?

A match of runs that learn nothing, repeat each other or stop early says nothing about the treatment. Each
check returns the problem as a reason, or None.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from abrun.logs.recorded.experiment import RecordedRun, Sides, stack_runs
from abrun.messages.codes import Code, Reason
from abrun.recipe.claims import Claim
from abrun.runs.metric_names import (
    ADVANTAGES_MAX,
    ADVANTAGES_MIN,
    FIXED_BY_ROLLOUTS,
    GRAD_NORM,
    LEARNING_RATE,
    SIGNAL_SHARE,
    default_transform,
    find_metric,
    is_clock,
    is_learned,
    is_memory,
)
from abrun.stats.curves import COPY_CORRELATION, find_copies, has_detail, has_same_curve
from abrun.stats.equivalence import t_interval
from abrun.stats.resolution import last_decimal_unit
from abrun.stats.series import EMPTY_SERIES, Array
from abrun.verdict.summaries import learning_direction, measure_climbs

# Metrics that are 0 at every step if nothing can be learned.
MAX_SCORED_RUNS = 100  # more are the prompts of two runs
MIN_REPEATED_SCORES = 4  # equal scores that two seeds do not share by chance
LEARNING_SIGNALS = (GRAD_NORM, LEARNING_RATE, SIGNAL_SHARE)


def check_signal(sides: Sides, metric: str, *, may_repeat: bool = False) -> Reason | None:
    """Return why these runs would agree on a metric whatever the treatment does; None if they could differ.

    `may_repeat`: bit-identical arms were declared, and are not a treatment that was never applied.
    """
    definition = find_metric(metric)
    if definition and "configured" in definition.roles:
        return Code.FOLLOWS_FROM_CONFIG()
    baselines, treatments = sides.baselines, sides.treatments
    for runs, arm in ((baselines, "baseline"), (treatments, "treatment")):
        for signal in LEARNING_SIGNALS:
            values = _recorded_values(runs, signal)
            if len(values) and not np.nan_to_num(values, posinf=0.0, neginf=0.0).any():
                finite = bool(np.isfinite(values).all())
                return Code.NOTHING_LEARNED(metric=signal, arm=arm, finite=finite)
        ends = [_recorded_values(runs, end) for end in (ADVANTAGES_MIN, ADVANTAGES_MAX)]
        if all(len(advantages) and not advantages.any() for advantages in ends):
            return Code.ADVANTAGES_ZERO(arm=arm)
    values = _recorded_values(sides.runs, metric)
    values = values[np.isfinite(values)]
    if len(values) and np.ptp(values) == 0 and not is_memory(metric):  # memory may be constant
        return Code.NEVER_MOVED(value=values[0])
    if problem := check_run_lengths(sides.runs):
        return problem
    # The treatment may not have been applied
    return None if may_repeat or not are_identical(sides) else Code.ARMS_IDENTICAL(declared=True)


def check_learning(
    baselines: Sequence[RecordedRun], claim: Claim, last_step: int, margin: float
) -> Reason | None:
    """Return why the baseline learned too little for a claim to be meaningful; None if it learned enough.

    A metric with a learning direction must have climbed by more than the margin by the window's end, by the
    lower 95 % bound over seeds. For any other metric (a norm, an entropy, trainer against engine), some
    recorded metric with a direction must have climbed at all. Time and memory do not depend on learning.
    """
    if not (claim.climbs and is_learned(claim.metric)):
        return None
    if learning_direction(baselines[0], claim.metric):
        lower_bound, num_dead_seeds = (
            climb_lower_bound(measure_climbs(baselines, claim, last_step)),
            count_dead_seeds(baselines, claim, last_step, margin),
        )
        if lower_bound > margin and 2 * num_dead_seeds < len(baselines):
            return None
        if lower_bound > margin:
            return Code.DEAD_SEEDS(num=num_dead_seeds, of=len(baselines), margin=margin, step=last_step)
        mean = float(np.mean(measure_climbs(baselines, claim, last_step)))
        return Code.CLIMB_NOT_SHOWN(margin=margin, step=last_step, climb=mean, bound=lower_bound)
    learners = learning_metrics(baselines)
    # Any one suffices, so each is tested at its share of 5 %: many flat ones must not pass (Bonferroni).
    claims = [Claim(metric=metric, margin=1.0, transform=default_transform(metric)) for metric in learners]
    bounds = {
        claim.metric: climb_lower_bound(measure_climbs(baselines, claim, last_step), len(learners))
        for claim in claims
    }
    if not bounds or max(bounds.values()) > 0:
        return None
    return Code.NOTHING_CLIMBED(step=last_step, metrics=[*bounds], bound=max(bounds.values()))


def count_dead_seeds(baselines: Sequence[RecordedRun], claim: Claim, last_step: int, margin: float) -> int:
    """Count the seeds that climbed by at most the margin; 0 without a direction, or if none need climb."""
    return int((measure_climbs(baselines, claim, last_step) <= margin).sum()) if claim.climbs else 0


def learning_metrics(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the metrics with a learning direction that every run recorded more than once."""
    return [
        metric
        for metric in (runs[0].metrics if runs else ())
        if learning_direction(runs[0], metric) and all(len(run.series(metric)) > 1 for run in runs)
    ]


def climb_lower_bound(values: Array, num_metrics: int = 1) -> float:
    """Return the lower 95 % bound of the mean climb over seeds, jointly over metrics; -inf if unknown."""
    is_testable = len(values) > 1 and np.isfinite(values).all()
    return t_interval(values, 1 - 0.1 / num_metrics)[0] if is_testable else -np.inf


def check_metric_of_runs(runs: Sequence[RecordedRun], metric: str) -> Reason | None:
    """Return why a metric says nothing about the treatment; None if it may.

    Recorded rollouts hold it, or it is a time that depends on other runs or on who sampled.
    """
    replaying = next((run for run in runs if run.trains_on_recording), None)
    if replaying and metric in FIXED_BY_ROLLOUTS:
        return Code.FIXED_BY_RECORDING(run=str(replaying))
    if replaying and is_clock(metric) and not all(run.trains_on_recording for run in runs):
        return Code.ONLY_SOME_SAMPLE(run=str(replaying))
    shared = next((run for run in runs if run.runs_per_gpu > 1), None)
    if shared is None or not is_clock(metric):
        return None
    return Code.TIMES_OF_SHARED_GPUS(run=str(shared), runs_per_gpu=shared.runs_per_gpu)


def check_run_lengths(runs: Sequence[RecordedRun]) -> Reason | None:
    """Return the first run that ends more than one step interval before its last configured step."""
    for run in runs:
        configured, steps = (run.config or {}).get("steps"), run.steps
        if isinstance(configured, int) and len(steps) > 1:
            max_interval = int(np.diff(steps).max())
            if steps[-1] + max_interval <= configured and steps[-1] + 1 < configured:
                return Code.CUT_SHORT(run=str(run), step=steps[-1], configured=configured)
    return None


def are_identical(sides: Sides) -> bool:
    """Return whether both runs of every pair have the same numbers; not asked of a thinned reference."""
    pairs = list(zip(sides.baselines, sides.treatments, strict=True)) if sides.paired else []
    has_reference = any(run.thinned for run in sides.baselines)
    return bool(pairs) and not has_reference and all(_has_same_numbers(*pair) for pair in pairs)


def _recorded_values(runs: Sequence[RecordedRun], metric: str) -> Array:
    return np.concatenate([run.series(metric).values for run in runs] or [EMPTY_SERIES.values])


def _independent_runs(sides: Sides) -> Iterator[tuple[RecordedRun, RecordedRun]]:
    """Yield every two runs that must be independent observations: all but those of one pair."""
    for run, other_run in combinations(sides.runs, 2):
        if not sides.paired or run.name.seed != other_run.name.seed:
            yield run, other_run


def check_distinct_seeds(sides: Sides, metric: str | None = None) -> Reason | None:
    """Return a reason if two seeds are one run, so that nothing can be tested over them.

    Two seeds with the same numbers (apart from time and memory) are not two observations. Neither are two
    that share the claimed metric's curve, whatever else was logged. Noise or rounding does not make a copy a
    second run: see `find_copies`.
    """
    if sides.axis != "steps":
        return _find_repeated_scores(sides)
    # Distinct values of a curve, and the unit of its last digit: computed once per curve, not per pair
    precision = cache(lambda series: (len(np.unique(series.values)), last_decimal_unit(series.values)))
    for run, other_run in _independent_runs(sides):
        if _has_same_numbers(run, other_run):
            return _repeated_run_reason(other_run, run)
        if metric and has_same_curve(run.series(metric), other_run.series(metric), precision):
            return _repeated_run_reason(other_run, run, [metric])
    return _find_noisy_copy(sides, metric) if metric else None


def _find_repeated_scores(sides: Sides) -> Reason | None:
    """Return two seeds with the same scores. A few of them may be equal by chance, as two prompts' may be."""
    for run, other_run in _independent_runs(sides) if len(sides.runs) <= MAX_SCORED_RUNS else ():
        num_scores = sum(len(series) for series in run.metrics.values())
        if num_scores >= MIN_REPEATED_SCORES and _has_same_numbers(run, other_run):
            return _repeated_run_reason(other_run, run)
    return None


def _repeated_run_reason(
    run: RecordedRun, original: RecordedRun, metrics: Sequence[str] = (), correlation: float | None = None
) -> Reason:
    return Code.ONE_RUN_AS_TWO_SEEDS(
        run=str(run), other=str(original), metrics=metrics, correlation=correlation
    )


def _find_noisy_copy(sides: Sides, metric: str) -> Reason | None:
    """Return two seeds whose claimed metric changes alike at all steps; for a discrete one, all others do."""
    runs = sides.runs
    values = stack_runs(runs, metric)[1]
    detailed = bool(len(runs)) and bool(has_detail(values).all())
    metrics, is_copy = (
        ([metric], find_copies(values)) if detailed else _find_copies_in_other_metrics(runs, metric)
    )
    for row, column in zip(*np.nonzero(np.triu(is_copy, 1)), strict=True):
        run, other_run = runs[row], runs[column]
        if run.name.seed != other_run.name.seed:
            return _repeated_run_reason(other_run, run, metrics[:3], COPY_CORRELATION)
    return None


def _find_copies_in_other_metrics(
    runs: Sequence[RecordedRun], metric: str
) -> tuple[list[str], NDArray[np.bool_]]:
    """Return the other metrics with enough detail, and which two runs [R, R] change alike in all of them.

    Values that are equal to the last bit in all runs (a learning rate) follow from the configuration.
    """
    compared_metrics, is_copy = [], np.ones((len(runs), len(runs)), bool)
    for other_metric in runs[0].metrics if runs else ():
        definition = find_metric(other_metric)
        is_configured = definition is not None and "configured" in definition.roles
        if other_metric == metric or is_configured or not is_learned(other_metric):
            continue
        values = stack_runs(runs, other_metric)[1]
        is_equal = np.array_equal(values, np.broadcast_to(values[:1], values.shape))
        if has_detail(values).all() and not is_equal:
            compared_metrics.append(other_metric)
            is_copy &= find_copies(values)
    return compared_metrics, is_copy if compared_metrics else np.zeros_like(is_copy)


def _has_same_numbers(run: RecordedRun, other_run: RecordedRun) -> bool:
    learned_metrics = list(filter(is_learned, {*run.metrics, *other_run.metrics}))
    return bool(learned_metrics) and all(
        np.array_equal(run.series(metric).steps, other_run.series(metric).steps)
        and np.array_equal(run.series(metric).values, other_run.series(metric).values, equal_nan=True)
        for metric in learned_metrics
    )
