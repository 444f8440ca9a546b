"""Claims on the time to a target: `reaches 0.6` in less than 1.1 times the baseline's steps or seconds.

The time is that of the first evaluation at or beyond the target, on the values as logged: one good evaluation
suffices, so that arms that evaluate more often have more chances. Smoothed values would make
the time depend on the length of the smoothing. `abrun.stats.time_ratio` has the tests.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from abrun.logs.recorded.experiment import RecordedRun, Sides, union_steps
from abrun.messages.codes import Code, Reason
from abrun.recipe.claims import Claim, Target, TimeUnit, describe_claim
from abrun.runs.metric_names import ELAPSED_TIME, NUM_SAMPLES, SAMPLES_SEEN, STEP_TIME
from abrun.stats.series import Array, Steps
from abrun.stats.time_ratio import min_sample_size, misses_alone, sample_size, time_ratio_test
from abrun.verdict.claims import pairs_missing_reason
from abrun.verdict.results import ONE_TEST, ClaimEstimate, ClaimResult, ClaimTerms, ErrorRates, Power, detect
from abrun.verdict.sensitivity import check_distinct_seeds, check_metric_of_runs

# Metrics from which a time follows: a running total, and an amount per step
COUNTERS: dict[TimeUnit, tuple[str, str]] = {
    "samples": (SAMPLES_SEEN, NUM_SAMPLES),
    "seconds": (ELAPSED_TIME, STEP_TIME),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachTime:
    """Time at which a run first reached the target, known up to its evaluations."""

    after: float  # time of the evaluation before; 0 without one
    by: float  # time of the evaluation that reached it; inf if none did


def judge_time_to_target(arm: str, sides: Sides, claim: Claim, rates: ErrorRates = ONE_TEST) -> ClaimResult:
    """Test a claim on the time to a target over the pairs (runs), before `apply_holm`; it needs every one.

    A run that ends without having reached the target counts as slower than its last evaluation.
    """
    target, limit = claim.target, claim.limit
    assert target is not None and limit is not None
    finished = sides.finished
    steps = union_steps(run.series(claim.metric).steps for run in finished.runs)
    terms = ClaimTerms(
        metric=claim.metric,
        window=claim.window,
        steps=(int(steps[0]), int(steps[-1])) if len(steps) else None,
        num_steps=len(steps),
        transform="identity",
        reduction="first",
        test="time to target",
        margin=None,
        margin_unit="",
        margin_number=limit[0],
        margin_text=describe_claim(claim),
        alpha=rates.alpha,
        alpha_difference=rates.alpha_difference,
        kind=claim.kind,
        better=claim.better_direction,
    ).over(finished)
    result = ClaimResult(arm=arm, claim=terms, problem=_find_problem(claim, sides, finished))
    if result.problem:
        return result
    arms = finished.baselines, finished.treatments
    times = [[find_reach_time(run, claim, target) for run in arm_runs] for arm_runs in arms]
    for outcome in (*times[0], *times[1]):
        if isinstance(outcome, Reason):
            return replace(result, problem=outcome)
    baseline, treatment = ([time for time in arm_times if isinstance(time, ReachTime)] for arm_times in times)
    result = _test(result, baseline, treatment, limit[0], paired=sides.paired)
    intervals = [_evaluation_interval(arm_runs, claim.metric) for arm_runs in arms]
    if intervals[0] == intervals[1]:
        return result
    unequal = Code.TARGET_GRIDS_DIFFER(baseline=intervals[0], treatment=intervals[1])
    return replace(result, warnings=(*result.warnings, unequal))


def _find_problem(claim: Claim, sides: Sides, finished: Sides) -> Reason | None:
    """Return why these runs cannot show a time to the target; None if they can."""
    if not min(finished.sizes):
        return Code.NONE_FINISHED(paired=sides.paired)
    missing_pairs = (
        None if finished.sizes == sides.sizes else pairs_missing_reason(finished, sides, equivalence=False)
    )
    return (
        check_metric_of_runs(finished.runs, claim.metric)
        or check_distinct_seeds(finished, claim.metric)
        or missing_pairs
    )


def _evaluation_interval(runs: Sequence[RecordedRun], metric: str) -> float:
    """Return the median number of steps between the evaluations of some runs; 0 for one each."""
    intervals = np.concatenate([np.diff(run.series(metric).steps) for run in runs])
    return float(np.median(intervals)) if len(intervals) else 0.0


def find_reach_time(run: RecordedRun, claim: Claim, target: Target) -> ReachTime | Reason:
    """Return when a run first reaches the target, or why that is unknown."""
    series = run.series(claim.metric)
    with np.errstate(invalid="ignore"):  # a NaN does not reach it
        reached = (
            series.values >= target.value
            if claim.better_direction == "higher"
            else series.values <= target.value
        )
    first = int(np.argmax(reached)) if reached.any() else len(series)
    times = _measure_times(run, series.steps[: first + 1], target.unit)
    if isinstance(times, Reason):
        return times
    if first == 0 and times[0] <= 0:
        return Code.TARGET_MET_BEFORE_TRAINING(
            run=str(run), value=float(series.values[0]), target=target.value
        )
    times = np.concatenate([[0.0], times])
    if (np.diff(times) < 0).any() or times[-1] <= 0 or not np.isfinite(times).all():
        return Code.TIME_NOT_RECORDED(run=str(run), unit=target.unit, metrics=COUNTERS.get(target.unit, ()))
    if first == len(series):
        return ReachTime(after=float(times[-1]), by=np.inf)
    earlier = times[:-1][times[:-1] < times[-1]]
    return ReachTime(after=float(earlier[-1]), by=float(times[-1]))


def _measure_times(run: RecordedRun, steps: Steps, unit: TimeUnit) -> Array | Reason:
    """Return the time at some steps [S], in a unit; or the reason why the run does not record it.

    An amount per step is summed up; it also stands for the steps before it that were not logged.
    """
    if unit == "steps":
        return steps.astype(np.float64)
    total, per_step = (run.series(metric) for metric in COUNTERS[unit])
    if len(total):
        return np.interp(steps, total.steps, total.values)
    if not len(per_step):
        return Code.TIME_NOT_RECORDED(run=str(run), unit=unit, metrics=COUNTERS[unit])
    logged = np.concatenate([[min(0, int(per_step.steps[0]) - 1)], per_step.steps])
    totals = np.concatenate([[0.0], np.cumsum(per_step.values * np.diff(logged))])
    return np.interp(steps, logged, totals)


def _test(
    result: ClaimResult,
    baseline: Sequence[ReachTime],
    treatment: Sequence[ReachTime],
    limit: float,
    *,
    paired: bool,
) -> ClaimResult:
    """Add the statistics of the ratio of times to a result."""
    terms = result.claim
    before, after = _as_ranges(baseline), _as_ranges(treatment)
    test = time_ratio_test(before, after, limit, terms.alpha, paired=paired)
    detected = None
    if test.estimate and all(0 < end < np.inf for end in test.interval):
        low, high = map(float, np.log(test.interval))
        difference = float(np.log(test.estimate))
        detected = detect(_log_times(before), _log_times(after), difference, (low, high), paired=paired)
    is_open = not (test.is_below or test.is_above)
    loses_target = misses_alone(before[1], after[1], paired=paired)
    num_seeds = min(len(baseline), len(treatment))
    can_decide = is_open and not loses_target
    needed = sample_size(test.share_below, terms.alpha, paired=paired) if can_decide else None
    power = Power(pairs_needed_observed=needed and max(needed, num_seeds + 1))
    return replace(
        result,
        estimate=ClaimEstimate(
            limited=test.estimate,
            limited_interval=test.interval,
            p_equivalence=test.p_below,
            p_beyond=test.p_above,
            detected=detected,
        ),
        power=power,
        warnings=tuple(_list_warnings(baseline, treatment, terms, power, loses_target, is_open=is_open)),
        result="holds" if test.is_below and not loses_target else "undecided",
    )


def _as_ranges(times: Sequence[ReachTime]) -> tuple[Array, Array]:
    return np.array([time.after for time in times]), np.array([time.by for time in times])


def _log_times(ranges: tuple[Array, Array]) -> Array:
    """Return the logarithms of the recorded times; of a run that did not reach the target, its last one."""
    return np.log(np.where(np.isinf(ranges[1]), *ranges))


def _list_warnings(
    baseline: Sequence[ReachTime],
    treatment: Sequence[ReachTime],
    terms: ClaimTerms,
    power: Power,
    loses_target: bool,
    *,
    is_open: bool,
) -> Iterator[Reason]:
    """Yield runs that did not reach the target, and for an open claim what stands in its way."""
    unreached = [sum(np.isinf(time.by) for time in times) for times in (baseline, treatment)]
    if any(unreached):
        yield Code.TARGET_NOT_REACHED(
            baseline=unreached[0],
            of_baselines=len(baseline),
            treatment=unreached[1],
            of_treatments=len(treatment),
            alone=loses_target,
        )
    if not is_open:
        return
    needed = min_sample_size(terms.alpha, paired=terms.paired)
    if min(len(baseline), len(treatment)) < needed:
        yield Code.TARGET_NEEDS_SAMPLE(needed=needed, paired=terms.paired, alpha=terms.alpha)
    elif power.pairs_needed_observed:
        yield Code.TARGET_SAMPLE_SIZE(needed=power.pairs_needed_observed, paired=terms.paired)
    smallest = _smallest_limit_of_equals(baseline)
    if smallest >= terms.margin_number:
        yield Code.TARGET_GRID_COARSE(smallest=smallest)


def _smallest_limit_of_equals(times: Sequence[ReachTime]) -> float:
    """Return the ratio that the evaluations leave open even if the arms reach the target together."""
    ratios = [time.by / time.after if time.after else np.inf for time in times if np.isfinite(time.by)]
    return float(np.median(ratios)) if ratios else 0.0
