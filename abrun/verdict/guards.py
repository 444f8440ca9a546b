"""Guards, the one-sided limits a treatment must keep, and savings: ratios, never equivalence claims."""

import math
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import special

from abrun.metric_names import PEAK_MEMORY, STEP_TIME, TOKEN_MULT_PROB_ERROR, phase_of
from abrun.reasons import Code, Reason
from abrun.recipe.claims import Compare, Guards
from abrun.recorded.experiment import Pair, RecordedRun, Sides
from abrun.stats.equivalence import ALPHA, MIN_FOR_MISMATCH, difference, p_above
from abrun.stats.series import Array, Series
from abrun.verdict.summaries import EXCESS_OFFSET

# "open": the treatment breaks the limit and is not shown to be worse than its baseline. "baseline too": the
# same where the baseline breaks the limit as well. Neither is a mismatch, nor a ground for a match.
GuardResult = Literal["pass", "fail", "baseline too", "open", "not recorded"]
Window = tuple[str, tuple[int, int]]  # a metric, first and last step
LARGEST_EXCESS = 1e9  # of an error over 1: what a test over seeds takes for one that is not a number


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """One limit and how the treatment stands to it."""

    arm: str
    guard: str
    limit: float | None
    value: float | None
    result: GuardResult
    reason: Reason = field(metadata={"alias": "text"})  # its name in verdict.json


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """What the treatment costs relative to the baseline: geometric mean of paired ratios, or ratio of
    geometric means.
    """

    arm: str
    quantity: str
    num_pairs: int
    num_runs: tuple[int, int] | None  # of both arms, where they are not paired
    baseline: float  # geometric mean, in the metric's own unit
    treatment: float
    ratio: float
    ratios: tuple[float, ...]  # by pair
    ci95: tuple[float, float] | None  # Student's t on log ratios; None for one pair
    log_error: float | None  # standard error of log(ratio)
    freedom: float | None  # of its t distribution


def check_guards(
    arm: str,
    pairs: Sequence[Pair],
    sides: Sides,
    limits: Guards,
    savings: Sequence[Saving],
    windows: Sequence[Window] = (),
    alpha: float = ALPHA,
) -> list[Guard]:
    """Every guard of verdict.md's rule 5, over all steps: a limit broken early is broken.

    `pairs`: each treated run with what excuses it (see `opposed` for independent arms). `windows` are those
    of the claims, where nothing excuses a value that is not a number. Whether the runs finished and are
    finite are facts, unless both arms have NaN; the other guards are tests of `sides`, each at one-sided
    level `alpha`.
    """
    watched = [*limits.finite, *(metric for metric, _ in windows)]
    return [
        _finished(arm, pairs, paired=sides.paired),
        _finite(
            arm, pairs, windows, watched, partial(_more_often_non_finite, sides, alpha), paired=sides.paired
        ),
        *_token_mult_prob_error(arm, sides, limits, alpha),
        *_ratio(arm, "step_time_ratio", "step time", limits.step_time_ratio, savings, alpha),
        *_ratio(arm, "peak_memory_ratio", "peak memory", limits.peak_memory_ratio, savings, alpha),
    ]


def num_tests(compare: Compare) -> int:
    """How many tests share `guards.alpha`: NaN in both arms, the error's median and share, limited ratios and
    step one.
    """
    limits = compare.guards
    ratios = sum(one is not None for one in (limits.step_time_ratio, limits.peak_memory_ratio))
    return 3 + ratios + compare.step_one


def opposed(sides: Sides) -> list[Pair]:
    """Each treated run of independent arms beside all runs of the baseline: any of them may excuse it."""
    first, *others = sides.baselines or (None,)
    if first is None:
        return []
    return [
        Pair(seed=run.name.seed, baseline=first, treatment=run, reruns=tuple(others))
        for run in sides.treatments
    ]


def measure_savings(arm: str, sides: Sides) -> list[Saving]:
    """Step time (each run's median step) and peak memory (each run's largest), overall and by phase."""
    sides = sides.finished
    runs, counter = sides.runs, shared_peak_counter(sides.runs)
    quantities: dict[str, Callable[[RecordedRun], float]] = {}
    if all(STEP_TIME in run.metrics for run in runs):
        quantities["step time"] = _median_step
    if counter:
        quantities["peak memory"] = lambda run: peak_memory(run, counter)
        for metric in shared_memory_metrics(runs, counter):
            quantities[f"peak memory, {metric.split('/')[1]}"] = partial(largest, metric=metric)
    measured = quantities.items() if min(sides.sizes) else ()
    savings = (_saving(arm, quantity, sides, measure) for quantity, measure in measured)
    return [saving for saving in savings if saving]


def shared_peak_counter(runs: Sequence[RecordedRun]) -> str | None:
    """Which peak counter every run recorded: allocator peaks are never set against live tensors."""
    return next((c for c in PEAK_MEMORY if runs and all(_memory_metrics(run, c) for run in runs)), None)


def peak_memory(run: RecordedRun, counter: str) -> float:
    return float(np.max([largest(run, metric) for metric in _memory_metrics(run, counter)]))


def _memory_metrics(run: RecordedRun, counter: str) -> list[str]:
    return [metric for metric in run.metrics if phase_of(metric, counter) is not None]


def shared_memory_metrics(runs: Sequence[RecordedRun], counter: str) -> list[str]:
    return [m for m in _memory_metrics(runs[0], counter) if all(m in run.metrics for run in runs)]


def largest(run: RecordedRun, metric: str) -> float:
    return float(run.series(metric).values.max())  # NaN stays NaN


def _median_step(run: RecordedRun) -> float:
    return float(np.median(run.series(STEP_TIME).values))


def _saving(arm: str, quantity: str, sides: Sides, measure: Callable[[RecordedRun], float]) -> Saving | None:
    values = [np.array([measure(run) for run in runs]) for runs in (sides.baselines, sides.treatments)]
    both = np.concatenate(values)
    if not (np.isfinite(both).all() and (both > 0).all()):
        return None
    left, right = map(np.log, values)
    ratios = right - left if sides.paired else np.empty(0)
    mean, error, freedom = float(right.mean() - left.mean()), None, None
    if min(sides.sizes) > 1:
        mean, error, freedom = difference(left, right, paired=sides.paired)
    reach = None if error is None else float(special.stdtrit(freedom, 0.975)) * error
    return Saving(
        arm=arm,
        quantity=quantity,
        num_pairs=len(ratios),
        num_runs=None if sides.paired else sides.sizes,
        baseline=float(np.exp(left.mean())),
        treatment=float(np.exp(right.mean())),
        ratio=float(np.exp(mean)),
        ratios=tuple(np.exp(ratios).tolist()),
        ci95=None if reach is None else (float(np.exp(mean - reach)), float(np.exp(mean + reach))),
        log_error=error,
        freedom=freedom,
    )


def _finished(arm: str, pairs: Sequence[Pair], *, paired: bool) -> Guard:
    """A treatment that failed where its baseline finished is data, not a gap in the data."""
    tried = [pair for pair in pairs if pair.baseline.finished]
    failed = [pair.treatment for pair in tried if pair.treatment.status == "failed"]
    reason = Code.RUNS_FINISHED(arm=arm, paired=paired)
    result: GuardResult = "fail" if failed else "pass"
    if not tried:
        result, reason = "not recorded", Code.NO_BASELINE_FINISHED()
    elif not any(pair.treatment.finished or pair.treatment.status == "failed" for pair in tried):
        result, reason = "not recorded", Code.NO_RUN_ENDED(arm=arm)
    elif not failed and any(pair.treatment.status == "unknown" for pair in tried):
        result, reason = "not recorded", Code.ENDINGS_NOT_KNOWN()
    if failed:
        reason = Code.RUN_FAILED(
            run=str(failed[0]),
            step=_last_step(failed[0]),
            failure=failed[0].failure,
            num_more=len(failed) - 1,
            paired=paired,
        )
    return Guard(
        arm=arm,
        guard="finished",
        limit=0,
        value=None if result == "not recorded" else len(failed),
        result=result,
        reason=reason,
    )


def _last_step(run: RecordedRun) -> int:
    return int(run.steps[-1]) if len(run.steps) else 0


def _finite(
    arm: str,
    pairs: Sequence[Pair],
    windows: Sequence[Window],
    watched: Collection[str],
    more_often: Callable[[Collection[str]], Iterator[Reason]],
    *,
    paired: bool,
) -> Guard:
    """No NaN or Inf in a watched metric of which the same seed's baseline has none, and none in a window.

    Where both arms have some, `more_often` tests whether the treatment has them at more steps.

    Of forty metrics, some with a NaN now and then in any arm, one would alarm in every third A/A experiment.
    """
    tried = [pair for pair in pairs if pair.baseline.finished]
    findings = [
        finding for pair in tried for finding in _new_non_finite(pair, windows, watched, paired=paired)
    ]
    findings = findings or list(more_often(dict.fromkeys(watched)))
    seen = any(pair.treatment.metrics for pair in tried)
    result: GuardResult = "fail" if findings else "pass" if seen else "not recorded"
    reason = _finite_reason(tried, watched, paired=paired) if seen else Code.NOTHING_RECORDED(arm=arm)
    if not tried:
        reason = Code.NO_BASELINE_FINISHED()
    if findings:
        num_more = len(findings) - 1
        reason = Code.FIRST_OF_SEVERAL(first=findings[0], num_more=num_more) if num_more else findings[0]
    value = len(findings) if seen else None
    return Guard(arm=arm, guard="finite", limit=0, value=value, result=result, reason=reason)


def _finite_reason(pairs: Sequence[Pair], watched: Collection[str], *, paired: bool) -> Reason:
    """Name the watched metrics without NaN or Inf in any treated run, and those with some."""
    runs = [pair.treatment for pair in pairs]
    recorded = [metric for metric in dict.fromkeys(watched) if any(metric in run.metrics for run in runs)]
    broken = [metric for metric in recorded if any(run.first_non_finite(metric) is not None for run in runs)]
    clean = [metric for metric in recorded if metric not in broken]
    return Code.FINITE(clean=clean, broken=broken, paired=paired)


def _new_non_finite(
    pair: Pair, windows: Sequence[Window], watched: Collection[str], *, paired: bool
) -> Iterator[Reason]:
    run = pair.treatment
    for metric in filter(watched.__contains__, run.metrics):
        step = run.first_non_finite(metric)
        if step is None:
            continue
        repeats = [one.series(metric).values for one in (pair.baseline, *pair.reruns)]
        if all(np.isfinite(values).all() for values in repeats):
            value = run.series(metric).at(step)
            yield Code.NOT_FINITE(metric=metric, value=value, run=str(run), step=step, paired=paired)
            continue
        since = _stays_non_finite(run.series(metric), repeats)
        if since is not None:
            value = run.series(metric).at(since)
            yield Code.STAYS_NOT_FINITE(metric=metric, value=value, run=str(run), step=since, paired=paired)
            continue
        claimed = (run.first_non_finite(metric, *bounds) for of, bounds in windows if of == metric)
        inside = next((step for step in claimed if step is not None), None)
        if inside is not None:
            value = run.series(metric).at(inside)
            yield Code.NOT_FINITE_IN_WINDOW(metric=metric, value=value, run=str(run), step=inside)


def _more_often_non_finite(sides: Sides, alpha: float, watched: Collection[str]) -> Iterator[Reason]:
    """Yield the watched metrics that are NaN or Inf at more of the treatment's steps, at `alpha` over all."""
    for metric in watched:
        recorded = sides.select(
            [run.finished and metric in run.metrics for run in sides.baselines],
            [metric in run.metrics for run in sides.treatments],
        )
        broken = [
            [~np.isfinite(run.series(metric).values) for run in runs]
            for runs in (recorded.baselines, recorded.treatments)
        ]
        if not all(any(one.any() for one in of) for of in broken):
            continue
        shares = [np.array([one.mean() for one in of]) for of in broken]
        steps = [np.array([len(one) for one in of]) for of in broken]
        p = _p_worse(shares[0], shares[1], _counting_error(shares, steps), paired_by_seed=sides.paired)
        if p < alpha / len(watched):
            yield Code.NOT_FINITE_MORE_OFTEN(
                metric=metric,
                share=shares[1].mean(),
                baseline_share=shares[0].mean(),
                p=p,
                level=alpha / len(watched),
            )


def _stays_non_finite(series: Series, repeats: Sequence[Array]) -> int | None:
    """The step from which a metric stays NaN or infinite, where that is no chance.

    Its baseline and their reruns end finite, and none has half as many such values altogether: of a metric
    that is NaN now and then in any arm, some run's last steps are as well.
    """
    finite = np.flatnonzero(np.isfinite(series.values))
    start = int(finite[-1]) + 1 if len(finite) else 0
    at_end = len(series) - start
    broken = [~np.isfinite(values) for values in repeats]
    if at_end > 2 * max(int(of.sum()) for of in broken) and not any(of[-1:].any() for of in broken):
        return int(series.steps[start])
    return None


def _token_mult_prob_error(arm: str, sides: Sides, limits: Guards, alpha: float) -> Iterator[Guard]:
    """Trainer and engine agree on log-probs: the worst run's median, and the share of steps above it."""
    limit, share = limits.token_mult_prob_error_median, limits.token_mult_prob_error_share
    known = sides.select(
        [run.finished and len(run.series(TOKEN_MULT_PROB_ERROR)) > 0 for run in sides.baselines],
        [len(run.series(TOKEN_MULT_PROB_ERROR)) > 0 for run in sides.treatments],
    )
    start = _first_measured(known.runs)
    errors = [[_errors(run, start) for run in runs] for runs in (known.baselines, known.treatments)]
    medians = [np.array([np.median(one) for one in runs]) for runs in errors]
    excess, other_excess = (np.log(np.clip(one - 1, 0, LARGEST_EXCESS) + EXCESS_OFFSET) for one in medians)
    recorded = min(known.sizes) > 0
    yield _error_guard(
        arm,
        None,
        limit,
        np.array([one.max() for one in medians]) if recorded else None,
        lambda: _p_worse(excess, other_excess, paired_by_seed=sides.paired),
        alpha,
    )
    above = [np.array([float(np.mean(one > limit)) for one in runs]) for runs in errors]
    steps = [np.array([len(one) for one in runs]) for runs in errors]
    shares = (
        [(of * num).sum() / num.sum() for of, num in zip(above, steps, strict=True)] if recorded else None
    )
    yield _error_guard(
        arm,
        limit,
        share,
        None if shares is None else np.array(shares),
        lambda: _p_worse(above[0], above[1], _counting_error(above, steps), paired_by_seed=sides.paired),
        alpha,
    )


def _first_measured(runs: Sequence[RecordedRun]) -> int:
    """The index of the first step to count: 1 where no run of either arm has a number at its first step."""
    values = [run.series(TOKEN_MULT_PROB_ERROR).values for run in runs]
    unmeasured = all(len(of) > 1 and not np.isfinite(of[0]) and np.isfinite(of[1]) for of in values)
    return int(bool(values) and unmeasured)


def _errors(run: RecordedRun, start: int = 0) -> Array:
    """The recorded errors; NaN and -Inf count as Inf, above every limit."""
    values = run.series(TOKEN_MULT_PROB_ERROR).values[start:]
    return np.where(np.isfinite(values), values, np.inf)


def _p_worse(left: Array, right: Array, least_error: float = 0.0, *, paired_by_seed: bool) -> float:
    """One-sided t-test of treatment above baseline; 1 for fewer pairs, or runs of an arm, than a mismatch
    takes.
    """
    if min(len(left), len(right)) < MIN_FOR_MISMATCH:
        return 1.0
    mean, error, freedom = difference(left, right, paired=paired_by_seed)
    return p_above(mean, max(error, least_error), freedom)


def _counting_error(shares: Sequence[NDArray[Any]], steps: Sequence[NDArray[Any]]) -> float:
    """Of the difference of both arms' shares, by counting alone: three equal small counts are no sd of 0."""
    hits = sum(float((of * num).sum()) for of, num in zip(shares, steps, strict=True))
    pooled = hits / sum(num.sum() for num in steps)
    return math.sqrt(pooled * (1 - pooled) * sum(1 / num.sum() for num in steps))


def _error_guard(
    arm: str,
    above: float | None,  # the share of steps above it is limited; None: the median is
    limit: float,
    values: Array | None,  # the baseline's and the treatment's
    p_worse: Callable[[], float],
    alpha: float,
) -> Guard:
    value: float | None = None
    kind, breaks = ("median", operator.ge) if above is None else ("share", operator.gt)
    result: GuardResult = "not recorded"
    reason = Code.TOKEN_ERROR_NOT_RECORDED(metric=TOKEN_MULT_PROB_ERROR)
    if values is not None:
        of_baseline, value = map(float, values)
        result = "fail" if breaks(value, limit) else "pass"
        error = {"metric": TOKEN_MULT_PROB_ERROR, "above": above, "value": value, "limit": limit}
        reason = Code.TOKEN_ERROR_KEPT(**error)
        if result == "fail":
            p = p_worse()
            reason = Code.TOKEN_ERROR_EXCEEDED(**error, baseline=of_baseline, p=p, level=alpha)
            unproven: GuardResult = "baseline too" if breaks(of_baseline, limit) else "open"
            result = "fail" if p < alpha else unproven
        value = value if math.isfinite(value) else None
    name = f"token_mult_prob_error_{kind}"
    return Guard(arm=arm, guard=name, limit=limit, value=value, result=result, reason=reason)


def _ratio(
    arm: str, guard: str, quantity: str, limit: float | None, savings: Sequence[Saving], alpha: float
) -> Iterator[Guard]:
    """Fails where the lower bound of the ratio is above its limit. (A claim would prove it kept.)"""
    if limit is None:
        return
    saving = next((saving for saving in savings if saving.quantity == quantity), None)
    value: float | None = None
    result: GuardResult = "not recorded"
    reason = Code.RATIO_NOT_RECORDED(quantity=quantity)
    if saving is not None:
        value = saving.ratio
        p, enough = 1.0, min(saving.num_runs or (saving.num_pairs,)) >= MIN_FOR_MISMATCH
        if enough and saving.log_error is not None and saving.freedom is not None:
            p = p_above(math.log(value) - math.log(limit), saving.log_error, saving.freedom)
        result = "fail" if p < alpha else "open" if value > limit and not enough else "pass"
        reason = Code.RATIO_KEPT(quantity=quantity, ratio=value, limit=limit)
        if value > limit:
            reason = Code.RATIO_EXCEEDED(quantity=quantity, ratio=value, limit=limit, p=p, level=alpha)
    yield Guard(arm=arm, guard=guard, limit=limit, value=value, result=result, reason=reason)
