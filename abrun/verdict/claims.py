"""Tests of each declared claim on a difference over the pairs (docs/explanation/verdict.md, "Claims")."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from scipy import special

from abrun.errors import ComparisonError
from abrun.logs.recorded.experiment import RecordedRun, Sides, stack_runs, union_steps
from abrun.messages.codes import Code, Reason
from abrun.recipe.claims import Claim, find_prior
from abrun.runs.metric_names import default_reduction, default_transform
from abrun.stats.anytime import anytime_interval
from abrun.stats.equivalence import (
    ASSUMED_PAIR_CORRELATION,
    MIN_FOR_MISMATCH,
    TostResult,
    equivalence_test,
    estimate_difference,
    holm,
    mean_and_sd,
    t_interval,
    uses_further,
)
from abrun.stats.one_sided import improvement_test, one_sided_pairs_needed, one_sided_power, planned_excess
from abrun.stats.power import (
    count_like,
    pairs_needed,
    pairs_needed_range,
    planning_sd,
    sd_interval,
    tost_power,
    welch_dof_per_run,
)
from abrun.stats.rates import are_outcomes, min_runs_of_difference
from abrun.stats.series import Array, Steps, clip_to_shared_steps, in_window, window_bounds
from abrun.stats.shares import largest_differences
from abrun.stats.sigma_margin import (
    VarianceModel,
    sigma_improvement_test,
    sigma_pairs_needed,
    sigma_power,
    sigma_test,
)
from abrun.verdict.margins import Margin, measure_yardstick
from abrun.verdict.results import (
    ONE_TEST,
    BorrowedNoise,
    ClaimEstimate,
    ClaimResult,
    ClaimTerms,
    ErrorRates,
    Power,
    TestMethod,
    detect,
)
from abrun.verdict.sensitivity import (
    check_distinct_seeds,
    check_learning,
    check_metric_of_runs,
    check_signal,
    count_dead_seeds,
)
from abrun.verdict.skewness import ARMS, DIFFERENCES, HARMLESS_SHARE, find_skew
from abrun.verdict.spare_runs import NO_SPARE_RUNS, Borrowed, SpareRuns, borrow
from abrun.verdict.summaries import (
    find_outside_domain,
    find_resolution,
    is_norm,
    measure_climbs,
    reduce_arms,
    spread_values,
    transform_values,
)
from abrun.verdict.whole_curve import curve_warnings, find_hidden_steps

# A margin beyond this share of what the baseline learned lets a visible loss pass
WIDE_SHARE = 0.25


def judge_equivalence(
    arm: str,
    sides: Sides,
    claim: Claim,
    margin: Margin,
    grid: Steps,
    rates: ErrorRates = ONE_TEST,
    *,
    may_repeat: bool = False,
    spare: SpareRuns = NO_SPARE_RUNS,
) -> ClaimResult:
    """Test a claim on the difference over the pairs whose runs both finished with finite values, before
    `apply_holm`: equivalence, non-inferiority or superiority.

    All claims together are an intersection-union test: every claim at full alpha, without correction. A claim
    needs every pair (for independent arms every run), and runs that could have shown a difference. `spare`
    runs, and earlier experiments' noise of the claim's metric, window and scale, inform the test. Raises
    ComparisonError for an empty window.
    """
    metric, finished = claim.metric, sides.finished
    transform = claim.transform or default_transform(metric)
    bounds = window_bounds(claim.window, grid, metric) if len(grid) else None
    steps, baseline, treatment = _select_window(finished, claim, bounds)
    bounds = clip_to_shared_steps(claim.window, bounds, steps)
    # Runs with finite values at every step of a window that is not empty
    masks = [
        [bool(len(curve) and np.isfinite(curve).all()) for curve in arm] for arm in (baseline, treatment)
    ]
    usable = finished.select(*masks)
    kept = {id(run) for run in usable.runs}
    in_window = (
        baseline[[id(run) in kept for run in finished.baselines]],
        treatment[[id(run) in kept for run in finished.treatments]],
    )
    repeated_run = check_distinct_seeds(finished, metric)
    terms = ClaimTerms(
        metric=metric,
        window=claim.window,
        steps=bounds,
        num_steps=len(steps),
        transform=transform,
        reduction="mean" if finished.share_rollouts and is_norm(metric) else default_reduction(metric),
        test=_test_method(claim, margin, paired=sides.paired),
        margin=margin.number if margin.unit == "" else None,
        margin_unit=margin.unit,
        margin_number=margin.number,
        margin_text=margin.text,
        alpha=rates.alpha,
        alpha_difference=rates.alpha_difference,
        kind=claim.kind,
        better=claim.better_direction,
        improvement=claim.improvement,
    ).over(usable)
    problem = check_signal(finished, metric, may_repeat=may_repeat) or repeated_run
    result = ClaimResult(arm=arm, claim=terms, problem=problem)
    # Not even a difference would be the treatment's
    if says_nothing := check_metric_of_runs(finished.runs, metric):
        return replace(result, problem=says_nothing, result="not tested")
    outside = find_outside_domain(np.concatenate(in_window), transform)
    if outside:
        return replace(result, problem=result.problem or Code.CLAIM_OUTSIDE_DOMAIN(problem=outside))
    if min(usable.sizes) and bounds and not repeated_run:
        prior = find_prior(spare.priors, claim, recorded=finished.share_rollouts)
        borrowed = borrow(spare, prior, metric, transform, steps)
        result = _test_claim(result, usable, claim, margin, in_window, borrowed)
    if usable.sizes != sides.sizes and not result.problem:
        result = replace(result, problem=pairs_missing_reason(usable, sides, equivalence=True))
    return replace(result, result="not tested") if result.problem else result


def pairs_missing_reason(used: Sides, sides: Sides, *, equivalence: bool) -> Reason:
    """Return the number of planned pairs, or runs, and how many of them are usable."""
    usable, planned = (sizes[0] if sides.paired else sum(sizes) for sizes in (used.sizes, sides.sizes))
    return Code.PAIRS_LACKING(usable=usable, planned=planned, paired=sides.paired, equivalence=equivalence)


def _test_method(claim: Claim, margin: Margin, *, paired: bool) -> TestMethod:
    if claim.is_one_sided and margin.unit == "sigma":
        return "sigma bound" if paired else "Welch sigma bound"
    if claim.is_one_sided:
        return "paired t-test" if paired else "Welch t-test"
    if margin.unit == "sigma":
        return "sigma test" if paired else "Welch sigma test"
    return "paired TOST" if paired else "Welch TOST"


def _test_claim(
    result: ClaimResult,
    sides: Sides,
    claim: Claim,
    margin: Margin,
    in_window: tuple[Array, Array],
    borrowed: Borrowed,
) -> ClaimResult:
    """Add a claim's statistics to its result, with the problems and warnings that qualify them."""
    bounds = result.claim.steps
    assert bounds is not None
    baseline, treatment = (
        transform_values(values, result.claim.transform, claim.metric) for values in in_window
    )
    arms = reduce_arms(baseline, treatment, claim.metric, stepwise=sides.share_rollouts)
    last_step, baselines, is_testable = bounds[1], sides.baselines, min(sides.sizes) > 1
    yardstick = measure_yardstick(margin, arms[0], baselines, claim, last_step)
    yardstick_problem = _yardstick_problem(margin, yardstick, *arms) if is_testable else None
    if yardstick_problem:
        return replace(result, problem=result.problem or yardstick_problem)
    varying = spread_values(*in_window, paired=sides.paired)
    step = 0.0 if are_outcomes(*arms) else find_resolution(sides.runs, claim, varying)
    options: dict[str, Any] = {"yardstick": yardstick, "borrowed": borrowed}
    without_resolution = add_statistics(result, *arms, **options)
    result = add_statistics(result, *arms, **options, resolution=step) if step else without_resolution
    worse = result.claim.worse if claim.is_one_sided else None
    if is_testable and sides.share_rollouts and is_norm(claim.metric) and claim.kind != "better":
        largest = arms[0] + largest_differences(treatment - baseline, worse)
        at_largest = add_statistics(result, arms[0], largest, yardstick=yardstick, resolution=step)
        result = result.also_at(at_largest)
    climb = float(np.mean(measure_climbs(baselines, claim, last_step)))
    has_climb = sides.axis == "steps" and np.isfinite(climb)  # scores do not climb
    estimate = replace(result.estimate, climb=climb if has_climb else None)
    result = replace(result, estimate=estimate)
    absolute_margin = result.claim.margin
    if not is_testable or absolute_margin is None:
        return result
    # Runs that cannot show a loss pass non-inferiority; nothing but an improvement shows superiority.
    is_superiority = claim.kind == "better"
    problem = result.problem
    if not (is_superiority or problem):
        problem = check_learning(baselines, claim, last_step, absolute_margin)
        problem = problem or find_hidden_steps(result.claim, baseline, treatment, absolute_margin, worse)
    result = replace(result, problem=problem)
    resolution_decides = estimate.certified_bound != 0 and _is_shown_and_is_beyond(
        without_resolution
    ) != _is_shown_and_is_beyond(result)
    warnings = [
        *result.warnings,
        *_margin_warnings(result, baselines, claim),
        *([Code.WIDE_STEPS()] if resolution_decides else []),
    ]
    if sides.axis == "steps":
        holds = result.result in ("equivalent", "holds") and not problem
        curve = sides, claim.metric, result.claim.transform, bounds, absolute_margin
        warnings += curve_warnings(*curve, holds=holds, only=worse)
    return replace(result, warnings=tuple(warnings))


def _yardstick_problem(
    margin: Margin, yardstick: Array | None, baseline: Array, treatment: Array
) -> Reason | None:
    """Return why a relative margin has no usable yardstick; None if it has one."""
    if margin.unit and are_outcomes(baseline, treatment):
        return Code.OUTCOMES_NEED_NUMBER(bound=margin.text)
    if yardstick is not None and not t_interval(yardstick, 0.9)[0] > 0:
        return Code.YARDSTICK_NOT_POSITIVE(unit=margin.unit, margin=margin.text)
    if margin.unit == "sigma" and mean_and_sd(baseline)[1] <= 1e-9 * np.abs(baseline).max():
        return Code.BASELINE_WITHOUT_SPREAD()
    return None


def _margin_warnings(result: ClaimResult, baselines: Sequence[RecordedRun], claim: Claim) -> Iterator[Reason]:
    """Yield warnings on a claim's margin and its baseline."""
    terms, estimate = result.claim, result.estimate
    assert terms.steps is not None and terms.margin is not None and estimate.standard_error is not None
    if terms.kind == "better":
        return
    num_dead_seeds = count_dead_seeds(baselines, claim, terms.steps[1], terms.margin)
    if num_dead_seeds and not result.problem:
        yield Code.SEEDS_NOT_CLIMBED(num=num_dead_seeds, of=len(baselines))
    if estimate.certified_bound == 0:
        yield Code.BOUND_OF_ZERO(paired=terms.paired)
    level = abs(estimate.baseline_mean or 0.0)
    if terms.transform == "identity" and 0 < level < terms.margin:
        yield Code.MARGIN_WIDER_THAN_LEVEL(level=level)
    if terms.transform == "identity" and estimate.climb and terms.margin > WIDE_SHARE * estimate.climb > 0:
        yield Code.MARGIN_WIDE_OF_CLIMB(percent=100 * terms.margin / estimate.climb)


def _select_window(sides: Sides, claim: Claim, bounds: tuple[int, int] | None) -> tuple[Steps, Array, Array]:
    """Return the steps [W] of the window and both arms' values [R, W] there."""
    steps, values = stack_runs(sides.runs, claim.metric)
    bounds = bounds or (0, 0)
    inside = in_window(steps, bounds)
    recorded = union_steps(run.series(claim.metric).steps for run in sides.runs)
    if len(recorded) and not in_window(recorded, bounds).any():
        raise ComparisonError(
            f"{claim.metric}: window: got {claim.window!r}, which selects none of its {len(recorded)} "
            f"recorded steps ({recorded[0]}-{recorded[-1]}); use a wider window, such as 'all'"
        )
    num_baselines = len(sides.baselines)
    return steps[inside], values[:num_baselines, inside], values[num_baselines:, inside]


def add_statistics(
    result: ClaimResult,
    baseline: Array,
    treatment: Array,
    *,
    yardstick: Array | None = None,
    resolution: float = 0.0,
    borrowed: Borrowed | None = None,
) -> ClaimResult:
    """Add statistics to a result, from one summary per run. Fewer than two runs an arm are not tested.

    What is `borrowed` informs the test of paired differences by a margin that is not estimated from the runs.
    """
    if min(len(baseline), len(treatment)) < 2:
        return result
    terms, in_sigmas = result.claim, result.claim.margin_unit == "sigma"
    # Of other claims than an equivalence by a number or share, only results without the margin are used.
    number = 1.0 if in_sigmas or terms.kind != "within" else terms.margin_number
    arms = baseline, treatment
    plain = equivalence_test(*arms, number, terms.alpha, yardstick, resolution, paired=terms.paired)
    extras: dict[str, Any] = {}
    if borrowed and terms.paired and not in_sigmas and yardstick is None and not plain.exact:
        extras = {"prior": borrowed.law, "further": borrowed.levels}
    test = equivalence_test(*arms, number, terms.alpha, None, resolution, **extras) if extras else plain
    estimate = _summarize_test(test, plain, baseline, treatment, paired=terms.paired)
    unit = mean_and_sd(baseline)[1] if in_sigmas else 1.0 if yardstick is None else float(yardstick.mean())
    margin = terms.margin_number * unit
    skew = _find_skew(terms, baseline, treatment, margin, resolution)
    result = replace(result, estimate=estimate, warnings=(skew,) if skew and not test.exact else ())
    if borrowed and extras:
        shifts = uses_further(*arms, borrowed.levels)
        result = _describe_borrowed(result, borrowed, plain, shifts=shifts)
    estimate = result.estimate
    if terms.kind != "within":
        result = _add_one_sided_statistics(result, *arms, margin, yardstick, resolution, extras)
        return _qualify_outcomes(result) if test.exact else result
    if in_sigmas:
        return _add_sigma_statistics(result, baseline, treatment, resolution)
    margins = None if yardstick is None else number * yardstick
    ends = [] if margins is None else [baseline + margins, baseline - margins]
    errors = [estimate_difference(end, treatment, paired=terms.paired)[1] for end in ends]
    error = max([test.standard_error, *errors])
    error_ratio = error / test.standard_error if test.standard_error else 1.0
    terms = replace(terms, margin=margin)
    sd, dof_per_pair = planning_sd(*arms, error, resolution, paired=terms.paired)
    sd = sd if terms.paired else error_ratio * sd
    prior_dof = estimate.noise.dof if estimate.noise else 0.0
    result = replace(
        result,
        claim=terms,
        estimate=replace(
            estimate,
            certified_number=test.certified_margin,
            p_equivalence=test.p_tost,
            p_tost=test.p_tost,
            p_beyond=test.p_beyond,
            sd_at_margin=None if margins is None else test.sd_difference * error_ratio,
        ),
        power=_estimate_power(terms, test, error, sd, dof_per_pair, prior_dof),
        result="equivalent" if test.equivalent else "undecided",
    )
    return _qualify_outcomes(result) if test.exact else result


def _find_skew(
    terms: ClaimTerms, baseline: Array, treatment: Array, margin: float, resolution: float
) -> Reason | None:
    """Return skew of the paired differences and, for sigmas, the baseline; else of both arms."""
    samples = dict(zip(ARMS, (baseline, treatment), strict=True))
    if terms.paired:
        in_sigmas = terms.margin_unit == "sigma"
        samples = {DIFFERENCES: treatment - baseline} | ({ARMS[0]: baseline} if in_sigmas else {})
    level = 0.05 if terms.paired else 0.05 / len(samples)
    return find_skew(samples, step=resolution, min_sd=HARMLESS_SHARE * abs(margin), level=level)


def _describe_borrowed(
    result: ClaimResult, borrowed: Borrowed, plain: TostResult, *, shifts: bool
) -> ClaimResult:
    """Add what the test used beside its pairs, further seeds if it `shifts`, and what it would be without."""
    num_pairs, estimate, law = result.claim.num_pairs, result.estimate, borrowed.law
    assert estimate.freedom is not None
    if shifts:
        used = Code.SEEDS_WITHOUT_PAIR(seeds=borrowed.seeds, interval=plain.interval)
        return replace(result, warnings=(*result.warnings, used))
    if law is None:
        return result
    counted = {"num": borrowed.num_experiments, "reruns": borrowed.num_reruns, "pairs": num_pairs}
    counted |= {"both": bool(borrowed.num_experiments and borrowed.num_reruns)}
    counted |= {"sd": math.sqrt(law.variance), "own": plain.sd_difference}
    if estimate.freedom == plain.dof:
        return replace(result, warnings=(*result.warnings, Code.NOISE_UNLIKE(**counted)))
    noise = BorrowedNoise(
        sd=math.sqrt(law.variance),
        dof=law.dof,
        experiments=borrowed.num_experiments,
        reruns=borrowed.num_reruns,
        pairs_like=count_like(num_pairs, estimate.freedom, result.claim.alpha),
        interval_alone=plain.interval,
    )
    used = Code.NOISE_BORROWED(**counted, dof=law.dof, like=noise.pairs_like, interval=plain.interval)
    return replace(result, estimate=replace(estimate, noise=noise), warnings=(*result.warnings, used))


def _qualify_outcomes(result: ClaimResult) -> ClaimResult:
    """Say that outcomes of 0 and 1 are tested exactly, and that no result of too few runs can pass."""
    terms, power = result.claim, result.power
    limit = (terms.margin or 0.0) * (1 if terms.kind == "better" else -1)
    needed = min_runs_of_difference(limit, terms.alpha, paired=terms.paired)
    num = min(terms.num_runs or (terms.num_pairs,))

    def raised(count: int | None) -> int | None:
        return None if count is None or needed is None else max(count, needed)

    return replace(
        result,
        warnings=(*result.warnings, Code.EXACT_OUTCOMES(needed=needed, num=num, paired=terms.paired)),
        power=replace(
            power,
            power_now=0.0 if needed is None or num < needed else power.power_now,
            pairs_needed=raised(power.pairs_needed),
            pairs_needed_range=power.pairs_needed_range and tuple(map(raised, power.pairs_needed_range)),
            pairs_needed_observed=raised(power.pairs_needed_observed),
        ),
    )


def _summarize_test(
    test: TostResult, plain: TostResult, baseline: Array, treatment: Array, *, paired: bool
) -> ClaimEstimate:
    """Return what both arms' summaries show, independent of the margin."""
    return ClaimEstimate(
        differences=tuple((treatment - baseline).tolist()) if paired else (),
        baseline_mean=float(baseline.mean()),
        baseline_sd=mean_and_sd(baseline)[1],
        treatment_mean=float(treatment.mean()),
        treatment_sd=mean_and_sd(treatment)[1],
        mean_difference=test.mean_difference,
        sd_difference=test.sd_difference,
        standard_error=test.standard_error,
        freedom=None if test.exact else test.dof,
        ci90=test.ci90,
        interval=test.interval,
        anytime_interval=anytime_interval(plain.mean_difference, plain.standard_error, len(baseline))
        if paired and not test.exact
        else None,
        certified_bound=test.certified_bound,
        detected=detect(baseline, treatment, test.mean_difference, test.interval, paired=paired),
        p_difference=test.p_difference,
        pair_correlation=test.pair_correlation,
    )


def _is_shown_and_is_beyond(result: ClaimResult) -> tuple[bool, bool]:
    """Return if this claim alone is shown, and if a difference beyond its margin is."""
    p_beyond = result.estimate.p_beyond
    beyond = p_beyond is not None and p_beyond < result.claim.alpha_difference
    return result.result in ("equivalent", "holds"), beyond


def _estimate_power(
    terms: ClaimTerms,
    test: TostResult,
    standard_error: float,
    sd: float,
    dof_per_pair: float,
    prior_dof: float,
) -> Power:
    """Return power and sample size, given the standard error and sd of the difference; see `power_at`."""
    assert terms.margin is not None
    margin, alpha = terms.margin, terms.alpha
    needed = partial(pairs_needed, margin, alpha=alpha, dof_per_pair=dof_per_pair, prior_dof=prior_dof)
    return Power(
        power_now=tost_power(margin, standard_error, test.dof, alpha),
        pairs_needed=needed(sd),
        pairs_needed_range=pairs_needed_range(margin, sd, test.dof + 1, alpha, dof_per_pair, prior_dof),
        pairs_needed_observed=needed(sd, true_difference=test.mean_difference),
        pairs_if_shared=None
        if terms.paired
        else pairs_needed(margin, sd * math.sqrt(1 - ASSUMED_PAIR_CORRELATION), alpha=alpha),
    )


def _add_sigma_statistics(
    result: ClaimResult, baseline: Array, treatment: Array, resolution: float
) -> ClaimResult:
    terms, estimate = result.claim, result.estimate
    number, alpha = terms.margin_number, terms.alpha
    test = sigma_test(baseline, treatment, number, alpha, resolution, paired=terms.paired)
    # Independent arms count as uncorrelated pairs, as many as the smaller arm has runs.
    num_pairs, correlation = min(len(baseline), len(treatment)), estimate.pair_correlation or 0.0
    model = VarianceModel(
        correlation=correlation, sd_ratio=mean_and_sd(treatment)[1] / test.sigma if test.sigma else 1.0
    )
    assert estimate.freedom is not None
    low, high = sd_interval(1.0, estimate.freedom + 1)
    low, point, high = (
        sigma_pairs_needed(number, replace(model, sd_factor=sd_factor), alpha=alpha)
        for sd_factor in (low, 1.0, high)
    )
    correlated_model = replace(model, correlation=ASSUMED_PAIR_CORRELATION)
    return replace(
        result,
        claim=replace(terms, margin=number * test.sigma),
        estimate=replace(
            estimate,
            certified_number=test.certified_sigmas,
            p_equivalence=test.p_equivalence,
            p_beyond=test.p_beyond,
        ),
        power=Power(
            power_now=sigma_power(number, num_pairs, model, alpha),
            pairs_needed=point,
            pairs_needed_range=(low, high),
            pairs_if_shared=None
            if terms.paired
            else sigma_pairs_needed(number, correlated_model, alpha=alpha),
        ),
        result="equivalent" if test.equivalent else "undecided",
    )


# --- one-sided claims: not worse, or better, by a margin ---


def _add_one_sided_statistics(
    result: ClaimResult,
    baseline: Array,  # [M] one summary per run
    treatment: Array,  # [N]
    margin: float,  # in units of the metric
    yardstick: Array | None,  # [M] the number of which a relative margin is a share
    resolution: float,
    extras: dict[str, Any],
) -> ClaimResult:
    """Add test, bound and power to a result that has its estimate. Two pairs cannot show superiority.

    Like a mismatch, superiority is a difference that is shown; if half of all runs fail, two pairs of equal
    arms show one in one experiment of eight.
    """
    terms, estimate = result.claim, result.estimate
    sign = -1 if terms.better == "lower" else 1
    threshold = terms.margin_number * (-1 if terms.kind == "not_worse" else 1)
    arms, paired = (baseline, treatment), terms.paired
    if terms.margin_unit == "sigma":
        test = sigma_improvement_test(*arms, threshold, terms.alpha, resolution, sign=sign, paired=paired)
        unit = mean_and_sd(baseline)[1]
    else:
        test = improvement_test(
            *arms, threshold, terms.alpha, yardstick, resolution, sign=sign, paired=paired, **extras
        )
        unit = 1.0 if yardstick is None else float(yardstick.mean())
    certified = -test.bound if terms.kind == "not_worse" else test.bound
    too_few = min(len(baseline), len(treatment)) < MIN_FOR_MISMATCH and terms.kind == "better"
    holds = test.p_above < terms.alpha
    warnings = result.warnings
    if holds and too_few:
        warnings += (Code.TOO_FEW_FOR_BETTER(paired=paired, needed=MIN_FOR_MISMATCH),)
    return replace(
        result,
        claim=replace(terms, margin=margin),
        estimate=replace(
            estimate,
            certified_bound=certified * unit,
            certified_number=certified,
            p_equivalence=test.p_above,
            p_beyond=test.p_below,
        ),
        power=_estimate_one_sided_power(terms, margin, baseline, treatment, estimate, sign),
        warnings=warnings,
        result="holds" if holds and not too_few else "undecided",
    )


def assumed_improvement(terms: ClaimTerms, margin: float, observed: float) -> float:
    """Return the true improvement for the power of superiority: declared, twice the margin, or observed."""
    return terms.improvement or 2 * margin or max(observed, 0.0)


def _estimate_one_sided_power(
    terms: ClaimTerms, margin: float, baseline: Array, treatment: Array, estimate: ClaimEstimate, sign: int
) -> Power:
    """Return power and sample size with the observed spread; a margin in sigmas counts as a number."""
    num_runs, standard_error = min(len(baseline), len(treatment)), estimate.standard_error or 0.0
    prior_dof = estimate.noise.dof if estimate.noise else 0.0
    dof_per_pair, dof = 1.0, prior_dof + len(baseline) - 1.0
    if not terms.paired:
        dof_per_pair = welch_dof_per_run([mean_and_sd(summaries)[1] for summaries in (baseline, treatment)])
        dof = dof_per_pair * (num_runs - 1)
    sd = standard_error * math.sqrt(num_runs)
    improvement = sign * (mean_and_sd(treatment)[0] - mean_and_sd(baseline)[0])
    excess = planned_excess(terms.kind, margin, assumed_improvement(terms, margin, improvement))
    threshold = -margin if terms.kind == "not_worse" else margin
    min_runs = MIN_FOR_MISMATCH if terms.kind == "better" else 2

    def needed(excess: float, sd: float) -> int | None:
        count = one_sided_pairs_needed(excess, sd, terms.alpha, dof_per_pair, prior_dof)
        return None if count is None else max(count, min_runs)

    low, high = sd_interval(sd, dof + 1) if sd else (0.0, 0.0)
    return Power(
        power_now=one_sided_power(excess, standard_error, dof, terms.alpha) if num_runs >= min_runs else 0.0,
        pairs_needed=needed(excess, sd),
        pairs_needed_range=(needed(excess, low), needed(excess, high)),
        pairs_needed_observed=needed(improvement - threshold, sd),
    )


def apply_holm(results: Sequence[ClaimResult]) -> list[ClaimResult]:
    """Add Holm-corrected p-values, joint bounds, and "different" for a difference shown to exceed the margin.

    Differences are tested many times in one experiment: the family is every claim of every treatment.
    """
    estimates = [result.estimate for result in results]
    p_differences = [estimate.p_difference for estimate in estimates if estimate.p_difference is not None]
    p_differences_holm = iter(holm(p_differences))
    p_beyond_holm = iter(holm([estimate.p_beyond for estimate in estimates if estimate.p_beyond is not None]))
    corrected_results = []
    for result, estimate in zip(results, estimates, strict=True):
        if estimate.p_difference is not None:
            estimate = replace(estimate, p_difference_holm=next(p_differences_holm))
            if result.claim.kind == "within":
                level = result.claim.alpha / len(p_differences)  # Bonferroni
                estimate = replace(estimate, certified_jointly=_bound_at(estimate, level))
        if estimate.p_beyond is not None:
            estimate = replace(estimate, p_beyond_holm=next(p_beyond_holm))
        corrected_results.append(_apply_mismatch(replace(result, estimate=estimate)))
    return corrected_results


def apply_holm_to_passes(results: Sequence[ClaimResult]) -> list[ClaimResult]:
    """Return one treatment's results if one claim that holds suffices: Holm's correction over the claims.

    Without it, the chance that some claim at its margin holds would grow with their number (Holm 1979).
    """
    p_values = [result.estimate.p_equivalence for result in results]
    corrected = iter(holm([p_value for p_value in p_values if p_value is not None]))
    corrected_results = []
    for result, p_value in zip(results, p_values, strict=True):
        if p_value is not None:
            p_holm = next(corrected)
            result = replace(result, estimate=replace(result.estimate, p_equivalence_holm=p_holm))
            if result.result in ("equivalent", "holds") and not p_holm < result.claim.alpha:
                result = replace(result, result="undecided")
        corrected_results.append(result)
    return corrected_results


def _apply_mismatch(result: ClaimResult) -> ClaimResult:
    """Set the result to "different" if a mismatch is shown; with two pairs, or runs of an arm, warn instead.

    Two differences of one sign and size are no evidence: if half of all runs fail, equal arms show them in
    one experiment of eight.
    """
    terms, p_beyond = result.claim, result.estimate.p_beyond_holm
    if p_beyond is None or not p_beyond < terms.alpha_difference:
        return result
    if (terms.num_pairs if terms.num_runs is None else min(filter(None, terms.num_runs))) >= MIN_FOR_MISMATCH:
        return replace(result, result="different")
    too_few = Code.TOO_FEW_FOR_MISMATCH(paired=terms.paired, needed=MIN_FOR_MISMATCH)
    return replace(result, warnings=(*result.warnings, too_few))


def _bound_at(estimate: ClaimEstimate, alpha: float) -> float | None:
    """Return the certified bound at a level; None for outcomes of 0 and 1."""
    assert estimate.mean_difference is not None and estimate.standard_error is not None
    if estimate.freedom is None:
        return None
    quantile = float(special.stdtrit(estimate.freedom, 1 - alpha))
    return abs(estimate.mean_difference) + quantile * estimate.standard_error
