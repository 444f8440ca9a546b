"""T3: each declared claim, by equivalence over the pairs (verdict.md, rules 1, 2 and 6)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from scipy import special

from abrun.errors import ComparisonError
from abrun.metric_names import default_reduction, default_transform
from abrun.reasons import Code, Reason
from abrun.recipe.claims import Claim
from abrun.recorded.experiment import RecordedRun, Sides, stack_runs, union_steps
from abrun.stats.equivalence import (
    MIN_FOR_MISMATCH,
    Tost,
    difference,
    equivalence_test,
    holm,
    mean_and_sd,
    sd_in_steps,
    t_interval,
)
from abrun.stats.power import freedom_per_run, pairs_needed, pairs_needed_range, sd_interval, tost_power
from abrun.stats.series import Array, Steps, on_shared_steps, window_bounds
from abrun.stats.sigma_margin import Law, sigma_pairs_needed, sigma_power, sigma_test
from abrun.verdict.margins import Margin, yardstick
from abrun.verdict.results import (
    ONE_TEST,
    ClaimResult,
    ClaimTerms,
    ErrorRates,
    Estimate,
    Power,
    Result,
    Test,
    detect,
)
from abrun.verdict.sensitivity import dead_seeds, no_signal, not_learned, one_run_as_two_seeds
from abrun.verdict.skewness import ARMS, DIFFERENCES, HARMLESS, skew_warning
from abrun.verdict.summaries import climbs, moving, outside_domain, resolution, summaries
from abrun.verdict.whole_curve import curve_warnings

SHARED = 0.8  # what arms of one seed often correlate by: pairing saves most of the runs


def judge_equivalence(
    arm: str,
    sides: Sides,
    claim: Claim,
    margin: Margin,
    grid: Steps,
    rates: ErrorRates = ONE_TEST,
    *,
    may_repeat: bool = False,
) -> ClaimResult:
    """T3 for one claim, over the pairs of which both runs finished with finite values, before `with_holm`.

    Equivalence is an intersection-union test: every claim at full alpha, no correction. It needs every pair
    (of independent arms every run), and runs that could have shown a difference. Raises ComparisonError for
    an empty window.
    """
    metric, finished = claim.metric, sides.finished
    transform = claim.transform or default_transform(metric)
    bounds = window_bounds(claim.window, grid, metric) if len(grid) else None
    steps, baseline, treatment = _in_window(finished, claim, bounds)
    bounds = on_shared_steps(claim.window, bounds, steps)
    used = finished.select(_usable(baseline), _usable(treatment))
    in_window = (
        baseline[[run in used.baselines for run in finished.baselines]],
        treatment[[run in used.treatments for run in finished.treatments]],
    )
    repeated = one_run_as_two_seeds(finished, metric)
    terms = ClaimTerms(
        metric=metric,
        window=claim.window,
        steps=bounds,
        num_steps=len(steps),
        transform=transform,
        reduction=default_reduction(metric),
        test=_test(margin, paired=sides.paired),
        margin=margin.number if margin.unit == "" else None,
        margin_unit=margin.unit,
        margin_number=margin.number,
        margin_text=margin.text,
        alpha=rates.alpha,
        alpha_difference=rates.alpha_difference,
    ).over(used)
    result = ClaimResult(
        arm=arm, claim=terms, problem=no_signal(finished, metric, may_repeat=may_repeat) or repeated
    )
    outside = outside_domain(np.concatenate(in_window), transform)
    if outside:
        return replace(result, problem=result.problem or Code.CLAIM_OUTSIDE_DOMAIN(problem=outside))
    if min(used.sizes) and bounds and not repeated:
        result = _tested(result, used, claim, margin, in_window)
    if used.sizes != sides.sizes and not result.problem:
        result = replace(result, problem=pairs_lacking(used, sides, equivalence=True))
    return replace(result, result="not tested") if result.problem else result


def pairs_lacking(used: Sides, sides: Sides, *, equivalence: bool) -> Reason:
    """Return how many of the planned pairs, or runs, are used."""
    usable, planned = (sizes[0] if sides.paired else sum(sizes) for sizes in (used.sizes, sides.sizes))
    return Code.PAIRS_LACKING(usable=usable, planned=planned, paired=sides.paired, equivalence=equivalence)


def _usable(values: Array) -> list[bool]:
    """Which runs [R] hold numbers all over the window [R, W], of one step or more."""
    return [bool(len(one) and np.isfinite(one).all()) for one in values]


def _test(margin: Margin, *, paired: bool) -> Test:
    if margin.unit == "sigma":
        return "sigma test" if paired else "Welch sigma test"
    return "paired TOST" if paired else "Welch TOST"


def _tested(
    result: ClaimResult,
    sides: Sides,
    claim: Claim,
    margin: Margin,
    in_window: tuple[Array, Array],
) -> ClaimResult:
    """A result with its statistics, and what makes them mean nothing."""
    bounds = result.claim.steps
    assert bounds is not None
    arms = [summaries(values, claim) for values in in_window]
    last, baselines, several = bounds[1], sides.baselines, min(sides.sizes) > 1
    measured = yardstick(margin, arms[0], baselines, claim, last)
    lacking = _no_yardstick(margin, measured, arms[0]) if several else None
    if lacking:
        return replace(result, problem=result.problem or lacking)
    step = resolution(sides.runs, claim, moving(*in_window, paired=sides.paired))
    plain = with_statistics(result, *arms, yardstick=measured)
    result = with_statistics(result, *arms, yardstick=measured, resolution=step) if step else plain
    climb = float(np.mean(climbs(baselines, claim, last)))
    estimate = replace(result.estimate, climb=climb if np.isfinite(climb) else None)
    result = replace(result, estimate=estimate)
    absolute_margin = result.claim.margin
    if not several or absolute_margin is None:
        return result
    problem = result.problem or not_learned(baselines, claim, last, absolute_margin)
    result = replace(result, problem=problem)
    steps_decide = estimate.certified_bound != 0 and _decisions(plain) != _decisions(result)
    warnings = [
        *result.warnings,
        *_margin_warnings(result, baselines, claim),
        *([Code.WIDE_STEPS()] if steps_decide else []),
        *curve_warnings(
            sides,
            claim.metric,
            result.claim.transform,
            bounds,
            absolute_margin,
            holds=result.result == "equivalent" and not problem,
        ),
    ]
    return replace(result, warnings=tuple(warnings))


def _no_yardstick(margin: Margin, measured: Array | None, baseline: Array) -> Reason | None:
    """Return why there is nothing that a relative margin could be a share of."""
    if measured is not None and not t_interval(measured, 0.9)[0] > 0:
        return Code.YARDSTICK_NOT_POSITIVE(unit=margin.unit, margin=margin.text)
    if margin.unit == "sigma" and mean_and_sd(baseline)[1] <= 1e-9 * np.abs(baseline).max():
        return Code.BASELINE_WITHOUT_SPREAD()
    return None


def _margin_warnings(result: ClaimResult, baselines: Sequence[RecordedRun], claim: Claim) -> Iterator[Reason]:
    """Yield warnings on a claim's margin and its baseline."""
    terms, estimate = result.claim, result.estimate
    assert terms.steps is not None and terms.margin is not None and estimate.standard_error is not None
    still = dead_seeds(baselines, claim, terms.steps[1], terms.margin)
    if still and not result.problem:
        yield Code.SEEDS_NOT_CLIMBED(num=still, of=len(baselines))
    if estimate.certified_bound == 0:
        yield Code.BOUND_OF_ZERO(paired=terms.paired)
    level = abs(estimate.baseline_mean or 0.0)
    if terms.transform == "identity" and 0 < level < terms.margin:
        yield Code.MARGIN_WIDER_THAN_LEVEL(level=level)


def _in_window(sides: Sides, claim: Claim, bounds: tuple[int, int] | None) -> tuple[Steps, Array, Array]:
    """Steps [W] of the window, and both arms' values [R, W] there."""
    steps, values = stack_runs(sides.runs, claim.metric)
    first, last = bounds or (0, 0)
    inside = (steps >= first) & (steps <= last)
    recorded = union_steps(run.series(claim.metric).steps for run in sides.runs)
    if len(recorded) and not ((first <= recorded) & (recorded <= last)).any():
        raise ComparisonError(
            Code.EMPTY_WINDOW(
                metric=claim.metric,
                window=claim.window,
                num=len(recorded),
                steps=[recorded[0], recorded[-1]],
            )
        )
    num_baselines = len(sides.baselines)
    return steps[inside], values[:num_baselines, inside], values[num_baselines:, inside]


def with_statistics(
    result: ClaimResult,
    baseline: Array,
    treatment: Array,
    *,
    yardstick: Array | None = None,
    resolution: float = 0.0,
) -> ClaimResult:
    """A result filled in from one summary a pair, or of each run; with fewer than two there is no test."""
    if min(len(baseline), len(treatment)) < 2:
        return result
    claim, in_sigmas = result.claim, result.claim.margin_unit == "sigma"
    # For a margin in sigmas only what does not depend on it is read: mean, intervals, correlation.
    number = 1.0 if in_sigmas else claim.margin_number
    test = equivalence_test(
        baseline, treatment, number, claim.alpha, yardstick, resolution, paired=claim.paired
    )
    estimate = _estimate(test, baseline, treatment, paired=claim.paired)
    margin = number if yardstick is None else number * float(yardstick.mean())
    if in_sigmas:
        margin = claim.margin_number * mean_and_sd(baseline)[1]
    skewed = _skewed(claim, baseline, treatment, step=resolution, least=HARMLESS * abs(margin))
    result = replace(result, estimate=estimate, warnings=(skewed,) if skewed else ())
    if in_sigmas:
        return _in_sigmas(result, baseline, treatment, resolution)
    share = None if yardstick is None else number * yardstick
    error = max(
        [test.standard_error, *_errors_at_the_margin(baseline, treatment, share, paired=claim.paired)]
    )
    wider = error / test.standard_error if test.standard_error else 1.0
    claim = replace(claim, margin=margin)
    sd, freedom = error * math.sqrt(len(baseline)), 1.0
    if not claim.paired:
        sds = [wider * sd_in_steps(of, resolution) for of in (baseline, treatment)]
        sd, freedom = math.hypot(*sds), freedom_per_run(sds)
    return replace(
        result,
        claim=claim,
        estimate=replace(
            estimate,
            certified_number=test.certified_margin,
            p_equivalence=test.p_tost,
            p_tost=test.p_tost,
            p_beyond=test.p_beyond,
            sd_at_margin=None if share is None else test.sd_difference * wider,
        ),
        power=_power(claim, test, error, sd, freedom),
        result=_decided(test.equivalent),
    )


def _estimate(test: Tost, baseline: Array, treatment: Array, *, paired: bool) -> Estimate:
    """Return what both arms' summaries show, whatever the margin is."""
    reach = float(special.stdtrit(test.freedom, 0.95)) * test.standard_error
    return Estimate(
        differences=tuple((treatment - baseline).tolist()) if paired else (),
        baseline_mean=float(baseline.mean()),
        baseline_sd=mean_and_sd(baseline)[1],
        treatment_mean=float(treatment.mean()),
        treatment_sd=mean_and_sd(treatment)[1],
        mean_difference=test.mean_difference,
        sd_difference=test.sd_difference,
        standard_error=test.standard_error,
        freedom=test.freedom,
        ci90=(test.mean_difference - reach, test.mean_difference + reach),
        interval=test.interval,
        certified_bound=test.certified_bound,
        detected=detect(baseline, treatment, test.mean_difference, test.interval, paired=paired),
        p_difference=test.p_difference,
        pair_correlation=test.pair_correlation,
    )


def _decided(equivalent: bool) -> Result:
    return "equivalent" if equivalent else "undecided"


def _skewed(
    claim: ClaimTerms, baseline: Array, treatment: Array, *, step: float, least: float
) -> Reason | None:
    """Test the differences, or both arms; and of a margin in sigmas the baseline, which gives the margin."""
    if not claim.paired:
        arms = dict(zip(ARMS, (baseline, treatment), strict=True))
        return skew_warning(arms, step=step, least=least, level=0.05 / len(arms))
    samples = {DIFFERENCES: treatment - baseline}
    if claim.margin_unit == "sigma":
        samples[ARMS[0]] = baseline
    return skew_warning(samples, step=step, least=least)


def _decisions(result: ClaimResult) -> tuple[bool, bool]:
    """Return whether a claim by itself is shown, and whether the opposite is."""
    p_beyond = result.estimate.p_beyond
    beyond = p_beyond is not None and p_beyond < result.claim.alpha_difference
    return result.result == "equivalent", beyond


def _errors_at_the_margin(
    baseline: Array, treatment: Array, margin: Array | None, *, paired: bool
) -> list[float]:
    """Of treatment - (baseline ± margin), of which a margin that is itself measured has two tests."""
    ends = [] if margin is None else [baseline + sign * margin for sign in (1, -1)]
    return [difference(end, treatment, paired=paired)[1] for end in ends]


def _power(claim: ClaimTerms, test: Tost, error: float, sd: float, freedom: float) -> Power:
    """Return the power by the standard error and the sd of a difference at the margin (see `power_at`)."""
    assert claim.margin is not None
    margin, alpha = claim.margin, claim.alpha
    needed = partial(pairs_needed, margin, alpha=alpha, freedom=freedom)
    return Power(
        power_now=tost_power(margin, error, test.freedom, alpha),
        pairs_needed=needed(sd),
        pairs_needed_range=pairs_needed_range(margin, sd, test.freedom + 1, alpha, freedom),
        pairs_needed_observed=needed(sd, true_difference=test.mean_difference),
        pairs_if_shared=None
        if claim.paired
        else pairs_needed(margin, sd * math.sqrt(1 - SHARED), alpha=alpha),
    )


def _in_sigmas(result: ClaimResult, baseline: Array, treatment: Array, resolution: float) -> ClaimResult:
    claim, estimate = result.claim, result.estimate
    number, alpha = claim.margin_number, claim.alpha
    test = sigma_test(baseline, treatment, number, alpha, resolution, paired=claim.paired)
    # Of independent arms: by as many pairs as the smaller has runs, of no correlation.
    num_pairs, correlation = min(len(baseline), len(treatment)), estimate.pair_correlation or 0.0
    law = Law(correlation=correlation, ratio=mean_and_sd(treatment)[1] / test.sigma if test.sigma else 1.0)
    assert estimate.freedom is not None
    low, point, high = (
        sigma_pairs_needed(number, replace(law, widened=end), alpha=alpha)
        for end in (sd_interval(1.0, estimate.freedom + 1)[0], 1.0, sd_interval(1.0, estimate.freedom + 1)[1])
    )
    shared = replace(law, correlation=SHARED)
    return replace(
        result,
        claim=replace(claim, margin=number * test.sigma),
        estimate=replace(
            estimate,
            certified_number=test.certified_sigmas,
            p_equivalence=test.p_equivalence,
            p_beyond=test.p_beyond,
        ),
        power=Power(
            power_now=sigma_power(number, num_pairs, law, alpha),
            pairs_needed=point,
            pairs_needed_range=(low, high),
            pairs_if_shared=None if claim.paired else sigma_pairs_needed(number, shared, alpha=alpha),
        ),
        result=_decided(test.equivalent),
    )


def with_holm(results: Sequence[ClaimResult]) -> list[ClaimResult]:
    """Holm-corrected p-values, "different" where a difference beyond the margin is shown, and joint bounds.

    Differences are many tests of one experiment: the family is every claim of every treatment.
    """
    estimates = [result.estimate for result in results]
    from_zero = [estimate.p_difference for estimate in estimates if estimate.p_difference is not None]
    corrected = iter(holm(from_zero))
    beyond = iter(holm([estimate.p_beyond for estimate in estimates if estimate.p_beyond is not None]))
    final = []
    for result, estimate in zip(results, estimates, strict=True):
        if estimate.p_difference is not None:
            bound = _joint_bound(estimate, result.claim.alpha / len(from_zero))
            estimate = replace(estimate, p_difference_holm=next(corrected), certified_jointly=bound)
        if estimate.p_beyond is not None:
            estimate = replace(estimate, p_beyond_holm=next(beyond))
        final.append(_with_mismatch(replace(result, estimate=estimate)))
    return final


def _with_mismatch(result: ClaimResult) -> ClaimResult:
    """A result as a mismatch where one is shown; undecided by two pairs, or two runs of an arm.

    Two differences of one sign and size are no evidence: where half of all runs fail, equal arms show them in
    one experiment of eight.
    """
    claim, p_beyond = result.claim, result.estimate.p_beyond_holm
    if p_beyond is None or not p_beyond < claim.alpha_difference:
        return result
    if (claim.num_pairs if claim.num_runs is None else min(claim.num_runs)) >= MIN_FOR_MISMATCH:
        return replace(result, result="different")
    too_few = Code.TOO_FEW_FOR_MISMATCH(paired=claim.paired, needed=MIN_FOR_MISMATCH)
    return replace(result, warnings=(*result.warnings, too_few))


def _joint_bound(estimate: Estimate, alpha: float) -> float:
    """The certified bound at a claim's share of alpha (Bonferroni)."""
    assert estimate.mean_difference is not None and estimate.standard_error is not None
    quantile = float(special.stdtrit(estimate.freedom, 1 - alpha))
    return abs(estimate.mean_difference) + quantile * estimate.standard_error
