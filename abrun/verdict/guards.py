"""Guards (one-sided limits that a treatment must keep) and savings (ratios of time and memory)."""

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal

import numpy as np
from scipy import special

from abrun.logs.recorded.experiment import Pair, RecordedRun, Sides
from abrun.messages.codes import Code, Reason
from abrun.recipe.claims import Compare, Guards
from abrun.runs.metric_names import PEAK_MEMORY, STEP_TIME, TOKEN_MULT_PROB_ERROR, peak_memory_phase
from abrun.stats.equivalence import ALPHA, MIN_FOR_MISMATCH, estimate_difference, p_above
from abrun.stats.series import Array, Series
from abrun.stats.shares import p_value_of_increase, p_value_of_more_hits, run_shares
from abrun.verdict.evidence import Evidence
from abrun.verdict.summaries import EXCESS_OFFSET

# "open": the treatment breaks the limit, but is not shown to be worse than its baseline. "baseline too": the
# same, and the baseline breaks the limit as well. Neither is a mismatch, and both prevent a match.
GuardResult = Literal["pass", "fail", "baseline too", "open", "not recorded"]
MetricWindow = tuple[str, tuple[int, int]]  # metric, (first step, last step)
MAX_EXCESS = 1e9  # stands for a non-finite error in a test over seeds


def _make_guard(
    arm: str, guard: str, limit: float | None, value: float | None, result: GuardResult, reason: Reason
) -> Evidence:
    """Return one limit, and if the treatment keeps it."""
    values = {"guard": guard, "limit": limit, "value": value}
    return Evidence(kind="guard", arm=arm, result=result, reason=reason, values=values)


def check_guards(
    arm: str,
    pairs: Sequence[Pair],
    sides: Sides,
    limits: Guards,
    savings: Sequence[Evidence],
    windows: Sequence[MetricWindow] = (),
    alpha: float = ALPHA,
) -> list[Evidence]:
    """Check every guard over all steps: a limit broken early counts as broken.

    Each of `pairs` is a treated run with the baselines that can excuse it (for independent arms see
    `pair_with_all_baselines`). `windows` are those of the claims, where nothing excuses a non-finite value.
    Finished runs and finite values are facts, unless both arms have NaN. The other guards are tests of
    `sides`, each at one-sided level `alpha`.
    """
    watched = [*limits.finite, *(metric for metric, _ in windows)]
    baseline_arm = sides.baselines[0].name.arm if sides.baselines else "baseline"
    arms = {"arm": arm, "baseline_arm": baseline_arm}
    find_more_often = partial(_find_more_non_finite, sides, alpha, arms)
    return [
        _check_finished(arm, pairs, paired=sides.paired),
        _check_finite(arm, pairs, windows, watched, find_more_often, paired=sides.paired),
        *_check_token_error(arms, sides, limits, alpha),
        *_check_ratio(arms, "step_time_ratio", "step time", limits.step_time_ratio, savings, alpha),
        *_check_ratio(arms, "peak_memory_ratio", "peak memory", limits.peak_memory_ratio, savings, alpha),
    ]


def count_tests(compare: Compare) -> int:
    """Return the number of tests that share `guards.alpha`.

    They are NaN in both arms, the error's median and share, each limited ratio, and step one.
    """
    limits = compare.guards
    ratios = sum(limit is not None for limit in (limits.step_time_ratio, limits.peak_memory_ratio))
    return 3 + ratios + compare.step_one


def pair_with_all_baselines(sides: Sides) -> list[Pair]:
    """Pair each treated run of independent arms with all baseline runs: any of them can excuse it."""
    baseline, *further_baselines = sides.baselines or (None,)
    if baseline is None:
        return []
    return [
        Pair(seed=run.name.seed, baseline=baseline, treatment=run, reruns=tuple(further_baselines))
        for run in sides.treatments
    ]


def measure_savings(arm: str, sides: Sides) -> list[Evidence]:
    """Measure peak memory and median step time, unless runs shared GPUs or only some of them sampled."""
    sides = sides.finished
    runs, counter = sides.runs, shared_peak_counter(sides.runs)
    quantities: dict[str, Callable[[RecordedRun], float]] = {}
    samples_alike = len({run.trains_on_recording for run in runs}) == 1
    if samples_alike and all(STEP_TIME in run.metrics and run.runs_per_gpu == 1 for run in runs):
        quantities["step time"] = lambda run: float(np.median(run.series(STEP_TIME).values))
    if counter:
        quantities["peak memory"] = lambda run: peak_memory(run, counter)
        for metric in shared_memory_metrics(runs, counter):
            quantities[f"peak memory, {metric.split('/')[1]}"] = partial(largest_value, metric=metric)
    measured = quantities.items() if min(sides.sizes) else ()
    savings = (_measure_saving(arm, quantity, sides, measure) for quantity, measure in measured)
    return [saving for saving in savings if saving]


def shared_peak_counter(runs: Sequence[RecordedRun]) -> str | None:
    """Return the peak counter that every run recorded: allocator peaks do not compare with live tensors."""
    return next(
        (counter for counter in PEAK_MEMORY if runs and all(_memory_metrics(run, counter) for run in runs)),
        None,
    )


def peak_memory(run: RecordedRun, counter: str) -> float:
    return float(np.max([largest_value(run, metric) for metric in _memory_metrics(run, counter)]))


def _memory_metrics(run: RecordedRun, counter: str) -> list[str]:
    return [metric for metric in run.metrics if peak_memory_phase(metric, counter) is not None]


def shared_memory_metrics(runs: Sequence[RecordedRun], counter: str) -> list[str]:
    return [
        metric for metric in _memory_metrics(runs[0], counter) if all(metric in run.metrics for run in runs)
    ]


def largest_value(run: RecordedRun, metric: str) -> float:
    return float(run.series(metric).values.max())  # NaN stays NaN


def _measure_saving(
    arm: str, quantity: str, sides: Sides, measure: Callable[[RecordedRun], float]
) -> Evidence | None:
    """Return the ratio treatment / baseline: geometric mean over pairs, or ratio of geometric means."""
    values = [np.array([measure(run) for run in runs]) for runs in sides.arms]
    all_values = np.concatenate(values)
    if not (np.isfinite(all_values).all() and (all_values > 0).all()):
        return None
    log_baseline, log_treatment = map(np.log, values)
    ratios = log_treatment - log_baseline if sides.paired else np.empty(0)
    mean, error, dof = float(log_treatment.mean() - log_baseline.mean()), None, None
    if min(sides.sizes) > 1:
        mean, error, dof = estimate_difference(log_baseline, log_treatment, paired=sides.paired)
    half_width = None if error is None else float(special.stdtrit(dof, 0.975)) * error
    ends = None if half_width is None else np.exp([mean - half_width, mean + half_width]).tolist()
    measured = {
        "quantity": quantity,
        "num_pairs": len(ratios),
        "num_runs": None if sides.paired else sides.sizes,
        "baseline": float(np.exp(log_baseline.mean())),  # geometric mean, in the metric's own unit
        "treatment": float(np.exp(log_treatment.mean())),
        "ratio": float(np.exp(mean)),
        "ratios": tuple(np.exp(ratios).tolist()),  # one per pair
        "ci95": ends,  # from log ratios; None for one pair
        "log_error": error,  # standard error of log(ratio)
        "freedom": dof,  # degrees of freedom of its t distribution
    }
    return Evidence(kind="cost", arm=arm, values=measured)


def _check_finished(arm: str, pairs: Sequence[Pair], *, paired: bool) -> Evidence:
    """Check that no treated run failed whose baseline finished: a failure is a result, not missing data."""
    comparable_pairs = [pair for pair in pairs if pair.baseline.finished]
    failed = [pair.treatment for pair in comparable_pairs if pair.treatment.status == "failed"]
    reason = Code.RUNS_FINISHED(arm=arm, paired=paired)
    result: GuardResult = "fail" if failed else "pass"
    if not comparable_pairs:
        result, reason = "not recorded", Code.NO_BASELINE_FINISHED()
    elif not any(pair.treatment.finished or pair.treatment.status == "failed" for pair in comparable_pairs):
        result, reason = "not recorded", Code.NO_RUN_ENDED(arm=arm)
    elif not failed and any(pair.treatment.status == "unknown" for pair in comparable_pairs):
        result, reason = "not recorded", Code.ENDINGS_NOT_KNOWN()
    if failed:
        reason = Code.RUN_FAILED(
            run=str(failed[0]),
            step=int(failed[0].steps[-1]) if len(failed[0].steps) else 0,
            failure=failed[0].failure,
            num_more=len(failed) - 1,
            paired=paired,
        )
    value = None if result == "not recorded" else len(failed)
    return _make_guard(arm, "finished", 0, value, result, reason)


def _check_finite(
    arm: str,
    pairs: Sequence[Pair],
    windows: Sequence[MetricWindow],
    watched: Collection[str],
    find_more_often: Callable[[Collection[str]], Iterator[Reason]],
    *,
    paired: bool,
) -> Evidence:
    """Check watched metrics for NaN or Inf that the same seed's baseline does not have, and all claim
    windows.

    If both arms have some, `find_more_often` tests if the treatment has them at more steps. A stricter
    rule would alarm too often: with forty metrics that show a NaN now and then in any arm, it would fail
    every third A/A experiment.
    """
    comparable_pairs = [pair for pair in pairs if pair.baseline.finished]
    findings = [
        finding
        for pair in comparable_pairs
        for finding in _find_new_non_finite(pair, windows, watched, paired=paired)
    ]
    findings = findings or list(find_more_often(dict.fromkeys(watched)))
    is_recorded = any(pair.treatment.metrics for pair in comparable_pairs)
    result: GuardResult = "fail" if findings else "pass" if is_recorded else "not recorded"
    reason = (
        _finite_reason(comparable_pairs, watched, paired=paired)
        if is_recorded
        else Code.NOTHING_RECORDED(arm=arm)
    )
    if not comparable_pairs:
        reason = Code.NO_BASELINE_FINISHED()
    if findings:
        num_more = len(findings) - 1
        reason = Code.FIRST_OF_SEVERAL(first=findings[0], num_more=num_more) if num_more else findings[0]
    value = len(findings) if is_recorded else None
    return _make_guard(arm, "finite", 0, value, result, reason)


def _finite_reason(pairs: Sequence[Pair], watched: Collection[str], *, paired: bool) -> Reason:
    """Return the watched metrics without NaN or Inf in any treated run, and those with some."""
    runs = [pair.treatment for pair in pairs]
    recorded = [metric for metric in dict.fromkeys(watched) if any(metric in run.metrics for run in runs)]
    broken = [metric for metric in recorded if any(run.first_non_finite(metric) is not None for run in runs)]
    clean = [metric for metric in recorded if metric not in broken]
    return Code.FINITE(clean=clean, broken=broken, paired=paired)


def _find_new_non_finite(
    pair: Pair, windows: Sequence[MetricWindow], watched: Collection[str], *, paired: bool
) -> Iterator[Reason]:
    run = pair.treatment
    for metric in filter(watched.__contains__, run.metrics):
        step = run.first_non_finite(metric)
        if step is None:
            continue
        baseline_curves = [
            baseline_run.series(metric).values for baseline_run in (pair.baseline, *pair.reruns)
        ]
        if all(np.isfinite(values).all() for values in baseline_curves):
            value = run.series(metric).value_at(step)
            yield Code.NOT_FINITE(metric=metric, value=value, run=str(run), step=step, paired=paired)
            continue
        from_step = _non_finite_since(run.series(metric), baseline_curves)
        if from_step is not None:
            value = run.series(metric).value_at(from_step)
            yield Code.STAYS_NOT_FINITE(
                metric=metric, value=value, run=str(run), step=from_step, paired=paired
            )
            continue
        window_steps = (
            run.first_non_finite(metric, *bounds)
            for window_metric, bounds in windows
            if window_metric == metric
        )
        step_in_window = next((step for step in window_steps if step is not None), None)
        if step_in_window is not None:
            value = run.series(metric).value_at(step_in_window)
            yield Code.NOT_FINITE_IN_WINDOW(metric=metric, value=value, run=str(run), step=step_in_window)


def _find_more_non_finite(
    sides: Sides, alpha: float, arms: Mapping[str, str], watched: Collection[str]
) -> Iterator[Reason]:
    """Yield the watched metrics that are non-finite at more of the treatment's steps, at `alpha` over all."""
    for metric in watched:
        recorded = sides.select(
            [run.finished and metric in run.metrics for run in sides.baselines],
            [metric in run.metrics for run in sides.treatments],
        )
        broken = [[~np.isfinite(run.series(metric).values) for run in runs] for runs in recorded.arms]
        if not all(any(is_broken.any() for is_broken in arm_runs) for arm_runs in broken):
            continue
        p_value = p_value_of_more_hits(broken, paired=sides.paired)
        if p_value < alpha / len(watched):
            baseline_share, share = (run_shares(arm_runs).mean() for arm_runs in broken)
            yield Code.NOT_FINITE_MORE_OFTEN(
                metric=metric,
                share=share,
                baseline_share=baseline_share,
                p=p_value,
                level=alpha / len(watched),
                **arms,
            )


def _non_finite_since(series: Series, baseline_curves: Sequence[Array]) -> int | None:
    """Return the step from which a metric stays NaN or infinite, unless that may be chance; else None.

    It is no chance if the baseline and its reruns end finite, and none has half as many non-finite values in
    total. A metric that is NaN now and then in any arm also ends non-finite in some run.
    """
    finite = np.flatnonzero(np.isfinite(series.values))
    start = int(finite[-1]) + 1 if len(finite) else 0
    num_final = len(series) - start
    broken = [~np.isfinite(values) for values in baseline_curves]
    if num_final > 2 * max(int(is_broken.sum()) for is_broken in broken) and not any(
        is_broken[-1:].any() for is_broken in broken
    ):
        return int(series.steps[start])
    return None


def _check_token_error(
    arms: Mapping[str, str], sides: Sides, limits: Guards, alpha: float
) -> Iterator[Evidence]:
    """Check the train-inference mismatch: the worst run's median, and the share of steps above the limit."""
    limit, share = limits.token_mult_prob_error_median, limits.token_mult_prob_error_share
    recorded_sides = sides.select(
        [run.finished and len(run.series(TOKEN_MULT_PROB_ERROR)) > 0 for run in sides.baselines],
        [len(run.series(TOKEN_MULT_PROB_ERROR)) > 0 for run in sides.treatments],
    )
    start = _first_counted_index(recorded_sides.runs)
    curves = [
        [run.series(TOKEN_MULT_PROB_ERROR).values[start:] for run in runs] for runs in recorded_sides.arms
    ]
    # NaN and -Inf count as Inf, above every limit.
    errors = [[np.where(np.isfinite(curve), curve, np.inf) for curve in runs] for runs in curves]
    medians = [np.array([np.median(run_values) for run_values in runs]) for runs in errors]
    baseline_excess, treatment_excess = (
        np.log(np.clip(run_values - 1, 0, MAX_EXCESS) + EXCESS_OFFSET) for run_values in medians
    )
    recorded = min(recorded_sides.sizes) > 0
    yield _judge_token_error(
        arms,
        None,
        limit,
        np.array([run_values.max() for run_values in medians]) if recorded else None,
        lambda: p_value_of_increase(baseline_excess, treatment_excess, paired=sides.paired),
        alpha,
    )
    hits = [[run_values > limit for run_values in runs] for runs in errors]
    yield _judge_token_error(
        arms,
        limit,
        share,
        np.array([np.concatenate(runs).mean() for runs in hits]) if recorded else None,
        lambda: p_value_of_more_hits(hits, paired=sides.paired),
        alpha,
    )


def _first_counted_index(runs: Sequence[RecordedRun]) -> int:
    """Return the first step to count: 1 if no run of either arm has a number at its first step, else 0."""
    values = [run.series(TOKEN_MULT_PROB_ERROR).values for run in runs]
    unmeasured = all(
        len(curve) > 1 and not np.isfinite(curve[0]) and np.isfinite(curve[1]) for curve in values
    )
    return int(bool(values) and unmeasured)


def _judge_token_error(
    arms: Mapping[str, str],
    threshold: float | None,  # limit the share of steps above it; None: limit the median
    limit: float,
    values: Array | None,  # baseline, treatment
    compute_p: Callable[[], float],
    alpha: float,
) -> Evidence:
    value: float | None = None
    statistic, breaks = ("median", operator.ge) if threshold is None else ("share", operator.gt)
    result: GuardResult = "not recorded"
    reason = Code.TOKEN_ERROR_NOT_RECORDED(metric=TOKEN_MULT_PROB_ERROR)
    if values is not None:
        baseline_value, value = map(float, values)
        result = "fail" if breaks(value, limit) else "pass"
        error = {"metric": TOKEN_MULT_PROB_ERROR, "above": threshold, "value": value, "limit": limit}
        reason = Code.TOKEN_ERROR_KEPT(**error)
        if result == "fail":
            p_value = compute_p()
            reason = Code.TOKEN_ERROR_EXCEEDED(
                **error, baseline=baseline_value, p=p_value, level=alpha, **arms
            )
            undecided: GuardResult = "baseline too" if breaks(baseline_value, limit) else "open"
            result = "fail" if p_value < alpha else undecided
        value = value if math.isfinite(value) else None
    name = f"token_mult_prob_error_{statistic}"
    return _make_guard(arms["arm"], name, limit, value, result, reason)


def _check_ratio(
    arms: Mapping[str, str],
    guard: str,
    quantity: str,
    limit: float | None,
    savings: Sequence[Evidence],
    alpha: float,
) -> Iterator[Evidence]:
    """Fail if the lower bound of the ratio is above its limit. (Proving that it is kept takes a claim.)"""
    if limit is None:
        return
    saving = next((saving for saving in savings if saving["quantity"] == quantity), None)
    value: float | None = None
    result: GuardResult = "not recorded"
    reason = Code.RATIO_NOT_RECORDED(quantity=quantity)
    if saving is not None:
        value = float(saving["ratio"])
        p_value, has_enough_runs = 1.0, min(saving["num_runs"] or (saving["num_pairs"],)) >= MIN_FOR_MISMATCH
        if has_enough_runs and saving["log_error"] is not None:
            p_value = p_above(math.log(value) - math.log(limit), saving["log_error"], saving["freedom"])
        result = "fail" if p_value < alpha else "open" if value > limit and not has_enough_runs else "pass"
        reason = Code.RATIO_KEPT(quantity=quantity, ratio=value, limit=limit, **arms)
        if value > limit:
            reason = Code.RATIO_EXCEEDED(
                quantity=quantity, ratio=value, limit=limit, p=p_value, level=alpha, **arms
            )
    yield _make_guard(arms["arm"], guard, limit, value, result, reason)
