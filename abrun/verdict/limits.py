"""Claims other than equivalence: limits on a level or a ratio, bit-exactness, and rates of divergence."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from abrun.logs.recorded.experiment import RecordedRun, Sides, stack_runs
from abrun.messages.codes import Code, Reason
from abrun.recipe.claims import Claim, Guards, describe_claim
from abrun.runs.metric_names import (
    DIVERGENCE_RATE,
    FINAL_WEIGHTS,
    MEMORY_PEAK,
    Transform,
    default_reduction,
    default_transform,
    find_metric,
    is_learned,
    is_memory,
)
from abrun.stats.equivalence import equivalence_test, limit_test
from abrun.stats.one_sided import one_sided_pairs_needed
from abrun.stats.rates import (
    Outcomes,
    fisher_p,
    min_runs_of_rate,
    rate_interval,
    rate_p,
    runs_to_show_rate,
)
from abrun.stats.series import Array, Series, Steps, clip_to_shared_steps, in_window, window_bounds
from abrun.stats.spread import MIN_PAIRS, spread_test
from abrun.verdict.claims import pairs_missing_reason
from abrun.verdict.final_weights import measure_weight_distance
from abrun.verdict.grids import find_grid_problems
from abrun.verdict.guards import shared_memory_metrics, shared_peak_counter
from abrun.verdict.results import (
    ONE_TEST,
    ClaimEstimate,
    ClaimResult,
    ClaimTerms,
    DetectedDifference,
    ErrorRates,
    Power,
    TestMethod,
    WindowReduction,
    detect,
)
from abrun.verdict.sensitivity import (
    check_distinct_seeds,
    check_metric_of_runs,
    check_run_lengths,
    check_signal,
)
from abrun.verdict.skewness import ARMS, HARMLESS_SHARE, VALUES, find_skew
from abrun.verdict.summaries import find_resolution as resolution_of
from abrun.verdict.summaries import spread_values, transform_with_gaps

WATCHED = Guards().finite  # of a run that diverges
_REDUCTIONS = {"mean": np.mean, "median": np.median, "maximum": np.max, "minimum": np.min}


def judge_limit(
    arm: str, sides: Sides, claim: Claim, grid: Steps, rates: ErrorRates = ONE_TEST
) -> ClaimResult:
    """Test a limit or an exact claim over the pairs, before `apply_holm`; it needs every planned pair (run).

    A limit on the treatment's own level needs no baseline: `sides` may then hold the runs of one arm alone.
    It holds if the one-sided 1 - alpha bound of the mean over seeds keeps it, and is broken if the opposite
    bound is beyond it. For a ratio, the mean is the geometric mean over pairs; for a metric on the
    scale `log_excess`, the ratio is that of the excesses over 1. Raises ComparisonError if the runs do not
    hold the window.
    """
    finished = sides.finished
    bounds = window_bounds(claim.window, grid, claim.metric) if len(grid) else None
    own_scale = claim.transform or default_transform(claim.metric)  # which a spread is measured on
    terms = ClaimTerms(
        metric=claim.metric,
        window=claim.window,
        steps=bounds,
        num_steps=0,
        transform=own_scale if claim.sd else "log_excess" if claim.is_limit_on_excess else "identity",
        reduction=_limit_reduction(claim.metric),
        test=_test_method(claim),
        margin=None,
        margin_unit="",
        margin_number=claim.limit[0] if claim.limit else 0.0,
        margin_text=describe_claim(claim),
        alpha=rates.alpha,
        alpha_difference=rates.alpha_difference,
        kind=claim.kind,
        better=claim.better_direction,
    ).over(finished)
    if claim.metric == DIVERGENCE_RATE:
        counting = ClaimResult(arm=arm, claim=replace(terms, steps=None).over(sides))
        return _judge_divergence_rate(counting, sides, claim)
    problem = _find_problem(claim, sides, bounds)
    if bounds and not claim.exact and len(shared := stack_runs(finished.runs, claim.metric)[0]):
        bounds = clip_to_shared_steps(claim.window, bounds, shared[in_window(shared, bounds)])
        terms = replace(terms, steps=bounds)
        finished = _restrict_to_steps(finished, claim.metric, shared)
    result = ClaimResult(arm=arm, claim=terms, problem=problem)
    if bounds is None or not finished.treatments or problem:
        return replace(result, problem=problem or Code.NONE_FINISHED(paired=sides.paired))
    return (
        _judge_exact(result, finished, bounds)
        if claim.exact
        else _judge_level_or_ratio(result, finished, claim, bounds)
    )


def _test_method(claim: Claim) -> TestMethod:
    if claim.metric == DIVERGENCE_RATE:
        return "exact rate"
    if claim.exact or claim.sd:
        return "exact" if claim.exact else "spread"
    return "ratio limit" if claim.limit and claim.limit[1] else "limit"


def _find_problem(claim: Claim, sides: Sides, bounds: tuple[int, int] | None) -> Reason | None:
    """Return why these runs cannot show that a limit holds or that arms are bit-identical; else None."""
    finished, metric = sides.finished, claim.metric
    if sides.treatments and not (sides.baselines or claim.limits_level):
        return Code.SECOND_ARM_NEEDED()
    if (claim.exact or metric == FINAL_WEIGHTS) and not sides.paired:
        return Code.PAIRS_ALONE(exact=claim.exact)
    may_repeat = claim.exact or not is_learned(metric)  # time and memory do not depend on the seed
    repeated_run = None if may_repeat else check_distinct_seeds(finished, metric)
    missing_pairs = (
        None if finished.sizes == sides.sizes else pairs_missing_reason(finished, sides, equivalence=False)
    )
    return (
        check_metric_of_runs(finished.runs, metric)
        or check_run_lengths(finished.runs)
        or repeated_run
        or missing_pairs
        # Two arms that lack steps are INVALID.
        or (None if sides.baselines else next(find_grid_problems(finished.treatments, metric, bounds), None))
    )


def _restrict_to_steps(sides: Sides, metric: str, shared: Steps) -> Sides:
    """Return the runs with a metric restricted to the steps that all of them have."""

    def cut(run: RecordedRun) -> RecordedRun:
        series = run.series(metric)
        inside = np.isin(series.steps, shared)
        cut_series = Series(series.steps[inside], series.values[inside])
        return replace(run, metrics={**run.metrics, metric: cut_series})

    baselines, treatments = (tuple(map(cut, runs)) for runs in sides.arms)
    return replace(sides, baselines=baselines, treatments=treatments)


def _judge_exact(result: ClaimResult, sides: Sides, bounds: tuple[int, int]) -> ClaimResult:
    metric = result.claim.metric
    no_evidence = check_signal(sides, metric, may_repeat=True) or check_distinct_seeds(sides)
    for pair in zip(sides.baselines, sides.treatments, strict=True):
        problem, difference = _find_first_difference(pair, metric, bounds)
        if problem:
            return replace(result, problem=problem)
        if difference:
            return replace(result, result="different", estimate=ClaimEstimate(detail=difference))
    return replace(result, problem=no_evidence) if no_evidence else replace(result, result="holds")


def _find_first_difference(
    pair: tuple[RecordedRun, RecordedRun], metric: str, bounds: tuple[int, int]
) -> tuple[Reason | None, Reason | None]:
    """Return (why a pair cannot be compared, where its runs first differ); None for what does not apply."""
    seed = pair[0].name.seed
    if metric == FINAL_WEIGHTS:
        hashes = [run.final_weights_hash for run in pair]
        if None in hashes:
            return Code.WEIGHTS_UNKNOWN(seed=seed), None
        return None, None if hashes[0] == hashes[1] else Code.WEIGHTS_DIFFER(seed=seed)
    steps, values = stack_runs(pair, metric)
    steps, (baseline, treatment) = steps[inside := in_window(steps, bounds)], values[:, inside]
    if not len(steps):
        return Code.STEPS_DIFFER(seed=seed), None
    differs = (baseline != treatment) & ~(np.isnan(baseline) & np.isnan(treatment))
    if not differs.any():
        return None, None
    index = int(differs.argmax())
    return None, Code.VALUES_DIFFER(
        step=steps[index], seed=seed, baseline=baseline[index], treatment=treatment[index]
    )


def _judge_level_or_ratio(
    result: ClaimResult, sides: Sides, claim: Claim, bounds: tuple[int, int]
) -> ClaimResult:
    assert claim.limit is not None
    if claim.metric == FINAL_WEIGHTS:
        return _judge_weight_distances(result, sides, claim.limit[0])
    if claim.sd:
        return _judge_spread(result, sides, bounds)
    limit, is_ratio = claim.limit
    transform: Transform = "log_excess" if claim.is_limit_on_excess else "log" if is_ratio else "identity"
    baseline, treatment = _levels_of_arms(sides, result.claim, bounds, "identity")
    baseline_sample, treatment_sample = baseline, treatment
    if claim.is_limit_on_excess:
        baseline_sample, treatment_sample = _levels_of_arms(sides, result.claim, bounds, transform)
    elif is_ratio:
        baseline_sample, treatment_sample = (
            transform_with_gaps(levels, transform) for levels in (baseline, treatment)
        )
    needed = np.concatenate([baseline_sample, treatment_sample]) if is_ratio else treatment_sample
    has_repeated_score = sides.axis != "steps" and len(set(treatment)) == 1 < len(treatment)
    if has_repeated_score and treatment[0] not in (0, 1) and is_learned(claim.metric):
        return replace(result, problem=Code.RUNS_ALIKE(num_runs=len(treatment)))
    if not np.isfinite(needed).all():
        needed_values = "excess" if claim.is_limit_on_excess else "positive" if is_ratio else "number"
        return replace(result, problem=Code.VALUES_UNFIT(needed=needed_values))
    scale = claim.model_copy(update={"transform": transform})
    window = _averaged_values(result.claim, sides, bounds, is_ratio=is_ratio)
    resolution, is_below = resolution_of(sides.runs, scale, window), claim.below is not None
    estimate = ClaimEstimate(
        baseline_mean=float(baseline.mean()) if len(baseline) and np.isfinite(baseline).all() else None,
        treatment_mean=float(treatment.mean()),
        detected=_detect_difference(
            baseline_sample, treatment_sample, result.claim.alpha, resolution, paired=sides.paired
        ),
    )
    result = replace(result, estimate=estimate)
    if not is_ratio:
        baseline_sample = None
    elif sides.paired:
        baseline_sample, treatment_sample = None, treatment_sample - baseline_sample
    return _test_limit(
        result,
        baseline_sample,
        treatment_sample,
        limit,
        is_log=is_ratio,
        below=is_below,
        resolution=resolution,
        are_scores=not is_ratio
        and all(np.isin(run.series(claim.metric).values, (0, 1)).all() for run in sides.treatments),
    )


def _judge_spread(result: ClaimResult, sides: Sides, bounds: tuple[int, int]) -> ClaimResult:
    """Test the ratio of the spreads over seeds; independent arms are paired in order (abrun.stats.spread)."""
    terms, num_pairs = result.claim, min(sides.sizes)
    levels = _levels_of_arms(sides, terms, bounds, terms.transform)
    baseline, treatment = (arm_levels[:num_pairs] for arm_levels in levels)
    if not np.isfinite(np.concatenate(levels)).all():
        return replace(result, problem=Code.VALUES_UNFIT(needed="number"))
    if num_pairs < MIN_PAIRS or not np.ptp(baseline) > 1e-9 * np.abs(baseline).max():
        return replace(result, problem=Code.SPREAD_NOT_SHOWN(needed=MIN_PAIRS, paired=terms.paired))
    test = spread_test(baseline, treatment, terms.margin_number, terms.alpha)
    limited = {"limited": test.mean, "limited_interval": test.interval}
    estimate = ClaimEstimate(**limited, p_equivalence=test.p_below, p_beyond=test.p_above)
    return replace(result, estimate=estimate, result="holds" if test.p_below < terms.alpha else "undecided")


def _levels_of_arms(
    sides: Sides, terms: ClaimTerms, bounds: tuple[int, int], transform: Transform
) -> list[Array]:
    """Return a number per run of each arm."""
    counter = shared_peak_counter(sides.runs)
    return [
        np.array([_run_level(run, terms, bounds, counter, transform) for run in runs]) for runs in sides.arms
    ]


def _detect_difference(
    baseline: Array, treatment: Array, alpha: float, resolution: float, *, paired: bool
) -> DetectedDifference | None:
    """Compare both arms of a limit: a treatment may keep it and still be worse than its baseline."""
    if min(len(baseline), len(treatment)) < 2 or not np.isfinite(np.concatenate([baseline, treatment])).all():
        return None
    test = equivalence_test(baseline, treatment, 1.0, alpha, resolution=resolution, paired=paired)
    return detect(baseline, treatment, test.mean_difference, test.interval, paired=paired)


def _averaged_values(terms: ClaimTerms, sides: Sides, bounds: tuple[int, int], *, is_ratio: bool) -> Array:
    """Return the recorded values whose mean is limited [N, W]; for ratios of pairs, their differences."""
    runs = sides.runs if is_ratio else sides.treatments
    steps, values = stack_runs(runs, terms.metric)
    values = values[:, in_window(steps, bounds)]
    if terms.reduction != "mean":
        return values[:, :0]
    num_baselines = len(runs) - len(sides.treatments)
    return spread_values(values[:num_baselines], values[num_baselines:], paired=is_ratio and sides.paired)


def _judge_weight_distances(result: ClaimResult, sides: Sides, limit: float) -> ClaimResult:
    """Test the mean distance of final weights over pairs.

    The mean is arithmetic. Two runs diverge suddenly, some seeds sooner than others, so distances under one
    treatment can be 3e-5 and 0.7; a geometric mean would hide the large ones.
    """
    distances = [
        measure_weight_distance(*pair) for pair in zip(sides.baselines, sides.treatments, strict=True)
    ]
    problem = next((distance for distance in distances if isinstance(distance, Reason)), None)
    if problem is not None:
        return replace(result, problem=problem)
    return _test_limit(result, None, np.array(distances, np.float64), limit, is_log=False, below=True)


def _test_limit(
    result: ClaimResult,
    baseline: Array | None,
    values: Array,
    limit: float,
    *,
    is_log: bool,
    below: bool,
    resolution: float = 0.0,
    are_scores: bool = False,
) -> ClaimResult:
    """Test one sample against a limit, or the difference values - baseline of two independent samples."""
    scale = np.exp if is_log else float
    bound = float(np.log(limit)) if is_log else limit
    if min(len(values), len(values if baseline is None else baseline)) < 2:
        mean = values.mean() - (0.0 if baseline is None else baseline.mean())
        estimate = replace(result.estimate, limited=float(scale(mean)))
        return replace(result, estimate=estimate, result="undecided")
    alpha = result.claim.alpha
    test = limit_test(values, bound, alpha, resolution, baseline, are_scores=are_scores)
    arms = {VALUES: values} if baseline is None else dict(zip(ARMS, (baseline, values), strict=True))
    distance_to_limit = abs(
        bound - float(np.median(values) - (0.0 if baseline is None else np.median(baseline)))
    )
    p_holds, p_broken = (test.p_below, test.p_above) if below else (test.p_above, test.p_below)
    min_sd, power, warnings = HARMLESS_SHARE * distance_to_limit, Power(), []
    if test.exact:
        min_runs = min_runs_of_rate(bound, alpha, below=below)
        warnings.append(Code.EXACT_OUTCOMES(needed=min_runs, num=len(values), paired=result.claim.paired))
    elif skew := find_skew(arms, step=resolution, min_sd=min_sd, level=0.05 / len(arms)):
        warnings.append(skew)
    if baseline is None:
        excess, sd = (1 if below else -1) * (bound - test.mean), test.error * len(values) ** 0.5
        num_needed = one_sided_pairs_needed(excess, sd, alpha)
        if test.exact and num_needed:
            num_needed = max(num_needed, min_runs or 0)
        power = Power(pairs_needed_observed=num_needed)
    return replace(
        result,
        estimate=replace(
            result.estimate,
            limited=float(scale(test.mean)),
            limited_interval=(float(scale(test.interval[0])), float(scale(test.interval[1]))),
            p_equivalence=p_holds,
            p_beyond=p_broken,
        ),
        power=power,
        warnings=tuple(warnings),
        result="holds" if p_holds < alpha else "undecided",
    )


def _run_level(
    run: RecordedRun, terms: ClaimTerms, bounds: tuple[int, int], counter: str | None, transform: Transform
) -> float:
    """Return a run's window, transformed and reduced to one number; for `memory` the largest of all phases.

    NaN if it is not recorded, or outside the transform's domain.
    """
    metrics = [terms.metric]
    if terms.metric == MEMORY_PEAK:
        metrics = shared_memory_metrics([run], counter) if counter else []
    series = [run.series(metric) for metric in metrics]
    window_values = np.concatenate([curve.values[in_window(curve.steps, bounds)] for curve in series] or [[]])
    if not len(window_values):
        return float("nan")
    return float(_REDUCTIONS[terms.reduction](transform_with_gaps(window_values, transform)))


def _limit_reduction(metric: str) -> WindowReduction:
    """Return "maximum" for a batch maximum, peak or bytes, else the metric's usual reduction."""
    definition = find_metric(metric)
    if is_memory(metric) or (definition and definition.combined == "maximum"):
        return "maximum"
    return "minimum" if definition and definition.combined == "minimum" else default_reduction(metric)


# --- the rate of divergence: the share of runs that failed or ended with NaN ---


def counts_failures(claims: Sequence[Claim]) -> bool:
    """Return whether a claim counts failed runs, so that one alone is neither invalid nor a mismatch."""
    return any(claim.metric == DIVERGENCE_RATE for claim in claims)


def has_diverged(run: RecordedRun) -> bool:
    """Return whether a run failed, or loss, gradient norm or reward is not finite at its last two steps."""
    ends = [run.series(metric).values[-2:] for metric in WATCHED]
    return run.status == "failed" or any(len(end) and not np.isfinite(end).any() for end in ends)


def _judge_divergence_rate(result: ClaimResult, sides: Sides, claim: Claim) -> ClaimResult:
    """Add the exact test of a rate below a limit, or of its difference from the baseline's.

    One arm: the binomial test. Two arms: the unconditional test of `abrun.stats.rates`, paired by seed unless
    the arms are independent; of equal rates of independent arms Fisher's. Every run must have ended.
    """
    num_ended = sum(run.finished or run.status == "failed" for run in sides.runs)
    if not sides.treatments:
        return replace(result, problem=Code.NONE_FINISHED(paired=sides.paired))
    if num_ended < len(sides.runs):
        planned = {"usable": num_ended, "planned": len(sides.runs), "paired": False}
        return replace(result, problem=Code.PAIRS_LACKING(**planned, equivalence=False))
    if claim.limit is None and not sides.baselines:
        return replace(result, problem=Code.SECOND_ARM_NEEDED())
    baseline, treatment = (np.array([has_diverged(run) for run in runs], float) for runs in sides.arms)
    counts = (int(baseline.sum()), len(baseline)), (int(treatment.sum()), len(treatment))
    estimate, power, alpha = ClaimEstimate(diverged=counts), Power(), result.claim.alpha
    if claim.limit:
        limit, (num_diverged, num_runs) = claim.limit[0], counts[1]
        p_holds, p_broken = rate_p(num_diverged, num_runs, limit)
        interval = rate_interval(num_diverged, num_runs, alpha)
        estimate = replace(estimate, limited=num_diverged / num_runs, limited_interval=interval)
        power = Power(pairs_needed=runs_to_show_rate(num_diverged, limit, alpha))
    else:
        threshold = claim.declared_margin_in[0] * (1 if claim.kind == "not_worse" else -1)
        outcomes = Outcomes.count(baseline, treatment, paired=sides.paired)
        p_holds, p_broken = outcomes.p_below(threshold), outcomes.reversed.p_below(-threshold)
        if threshold == 0 and not sides.paired:
            p_holds, p_broken = fisher_p(*counts), fisher_p(*counts[::-1])
        interval = outcomes.interval(alpha)
        estimate = replace(estimate, mean_difference=outcomes.difference, interval=interval)
    estimate = replace(estimate, p_equivalence=p_holds, p_beyond=p_broken)
    return replace(result, estimate=estimate, power=power, result="holds" if p_holds < alpha else "undecided")
