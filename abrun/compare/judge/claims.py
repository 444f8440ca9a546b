"""T3: each declared claim, by equivalence over the pairs (verdict.md, rules 1, 2 and 6)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy import special

from abrun.compare.judge.assay import dead_seeds, no_signal, not_learned, one_run_as_two_seeds
from abrun.compare.judge.direction import Detected, detect
from abrun.compare.judge.margins import Margin, yardstick
from abrun.compare.judge.skewness import ARMS, DIFFERENCES, HARMLESS, skew_warning
from abrun.compare.judge.step_noise import step_noise
from abrun.compare.judge.summaries import climbs, moving, outside_domain, resolution, summaries
from abrun.compare.judge.unused_seeds import has_use, unused_summaries
from abrun.compare.judge.whole_curve import curve_warnings
from abrun.compare.read.experiment import RecordedRun, Sides, stack, union
from abrun.control_variate import CORRELATION, control_variate_tost
from abrun.equivalence import (
    ALPHA,
    MIN_FOR_MISMATCH,
    Tost,
    holm,
    mean_and_sd,
    paired_tost,
    pairs_needed,
    pairs_needed_range,
    runs_needed,
    sd_in_steps,
    sd_interval,
    t_interval,
    tost_power,
    welch,
    welch_tost,
)
from abrun.equivalence import (
    paired as paired_mean,
)
from abrun.errors import ComparisonError
from abrun.metric_names import Transform, default_reduction, default_transform
from abrun.power import StepNoise
from abrun.recipe import Primary
from abrun.recipe.claims import Unit
from abrun.series import Array, Steps, on_shared_steps, window_bounds
from abrun.sigmas import Law, sigma_pairs_needed, sigma_power, sigma_test, welch_sigma_test

Test = Literal[
    "paired TOST",
    "control variate TOST",
    "sigma test",
    "Welch TOST",
    "Welch sigma test",
    "limit",
    "ratio limit",
    "exact",
]
Result = Literal["equivalent", "holds", "different", "undecided", "not tested"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrimaryResult:
    """T3 for one declared claim. Summaries and differences are in units of the transformed metric."""

    arm: str
    metric: str
    window: str
    steps: tuple[int, int] | None  # first and last step of the window
    num_steps: int  # steps in it at which the metric was recorded by every pair
    transform: Transform
    reduction: Literal["mean", "median", "maximum", "minimum"]
    test: Test
    margin: float | None  # in units of the transformed metric; None: relative, and not yet measured
    margin_unit: Unit  # of the declaration: the metric's own (""), or the baseline's sigma, level, climb
    margin_number: float  # in that unit; a share of the level or climb
    margin_text: str
    alpha: float  # of each one-sided test: 0.05, or this look's level
    alpha_difference: float  # of a difference beyond the margin, over all claims: what the guards leave of it
    num_pairs: int
    seeds: tuple[int, ...]  # of the pairs
    unused_seeds: tuple[int, ...] = ()  # of a reference, without a later run: a control variate of the pairs
    num_runs: tuple[int, int] | None = None  # of both arms, where they are not paired
    differences: tuple[float, ...] = ()  # treatment - baseline, by seed
    baseline_mean: float | None = None
    baseline_sd: float | None = None
    treatment_sd: float | None = None
    treatment_mean: float | None = None
    mean_difference: float | None = None
    sd_difference: float | None = None  # of a pair; unpaired: of one run of each arm
    step_noise: StepNoise | None = None  # its share of the variance over pairs; None: not known
    sd_at_margin: float | None = None  # of treatment - (baseline ± margin), where the margin is measured, too
    standard_error: float | None = None  # of the mean difference
    freedom: float | None = None  # of its t distribution
    ci90: tuple[float, float] | None = None
    interval: tuple[float, float] | None = None  # level 1 - 2 alpha: what the margin is compared with
    certified_bound: float | None = None  # the smallest absolute margin that would have passed
    certified_number: float | None = None  # the same in `margin_unit`
    certified_jointly: float | None = (
        None  # an absolute bound that holds together with those of all other claims
    )
    detected: Detected | None = None  # where the interval of the difference excludes zero
    limited: float | None = None  # of a limit: the treatment's mean over seeds, or its ratio to the baseline
    limited_interval: tuple[float, float] | None = None  # level 1 - 2 alpha
    detail: str | None = None  # of an exact claim: where it first fails
    climb: float | None = None  # of the baseline up to the window's end, mean over seeds; None: no direction
    p_equivalence: float | None = None
    p_tost: float | None = None
    p_difference: float | None = None  # from zero
    p_difference_holm: float | None = None
    p_beyond: float | None = None  # from no more than the margin
    p_beyond_holm: float | None = None
    pair_correlation: float | None = None
    power_now: float | None = None  # if the arms are truly equal and sd_difference is the true one
    pairs_needed: int | None = None  # for 80 % power; None: more than 1000; unpaired: runs of each arm
    pairs_needed_range: tuple[int | None, int | None] | None = None  # over the 90 % interval of the sd
    pairs_needed_observed: int | None = None  # the same if the true difference is the observed one
    pairs_if_shared: int | None = None  # unpaired: the same in pairs of arms correlated by SHARED over seeds
    problem: str | None = None  # why these runs cannot show equivalence, whatever the numbers are
    warning: str | None = None  # what the test assumes and these differences do not look like
    result: Result = "not tested"


def sample_text(result: PrimaryResult) -> str:
    """What a claim was tested over: `5 pairs`, or `5 and 4 unpaired runs (Welch)`."""
    if result.num_runs is None:
        others = len(result.unused_seeds)
        more = f" and {others} more seed{'s' * (others > 1)} of the reference (control variate)"
        return f"{result.num_pairs} pair{'s' * (result.num_pairs != 1)}{more * (others > 0)}"
    how = "" if result.test in ("limit", "exact") else " (Welch)"
    return f"{result.num_runs[0]} and {result.num_runs[1]} unpaired runs{how}"


def setting_text(result: PrimaryResult, *, has_recipe: bool) -> str:
    """What an outcome is said of and no more: `5 pairs, this recipe, steps 33-40`."""
    steps = f"{result.steps[0]}-{result.steps[1]}" if result.steps else result.window
    return f"{sample_text(result)}, {'this recipe, ' * has_recipe}steps {steps}"


WIDE_STEPS = "the metric moves in steps that are wide for so few pairs, and the interval allows for one"
SHARED = 0.8  # what arms of one seed often correlate by: pairing saves most of the runs


def judge_primary(
    arm: str,
    sides: Sides,
    primary: Primary,
    margin: Margin,
    grid: Steps,
    alpha: float = ALPHA,
    alpha_difference: float = ALPHA,
    may_repeat: bool = False,
) -> PrimaryResult:
    """T3 for one claim, over the pairs of which both runs finished with finite values, before `with_holm`.

    Equivalence is an intersection-union test: every claim at full alpha, no correction. It needs every pair
    (of independent arms every run), and runs that could have shown a difference. Raises ComparisonError for
    an empty window.
    """
    metric, finished = primary.metric, sides.finished
    transform = primary.transform or default_transform(metric)
    bounds = window_bounds(primary.window, grid, metric) if len(grid) else None
    steps, baseline, treatment = _in_window(finished, primary, bounds)
    bounds = on_shared_steps(primary.window, bounds, steps)
    used = finished.of(_usable(baseline), _usable(treatment))
    in_window = (
        baseline[[run in used.baselines for run in finished.baselines]],
        treatment[[run in used.treatments for run in finished.treatments]],
    )
    repeated = one_run_as_two_seeds(finished, metric)
    result = PrimaryResult(
        arm=arm,
        metric=metric,
        window=primary.window,
        steps=bounds,
        num_steps=len(steps),
        transform=transform,
        reduction=default_reduction(metric),
        test=_test(margin, paired=sides.paired),
        margin=margin.number if margin.unit == "" else None,
        margin_unit=margin.unit,
        margin_number=margin.number,
        margin_text=margin.text,
        alpha=alpha,
        alpha_difference=alpha_difference,
        num_pairs=len(used.baselines) if sides.paired else 0,
        seeds=tuple(run.name.seed for run in used.baselines) if sides.paired else (),
        num_runs=None if sides.paired else used.sizes,
        problem=no_signal(finished, metric, may_repeat=may_repeat) or repeated,
    )
    outside = outside_domain(np.concatenate(in_window), transform)
    if outside:
        return replace(result, problem=result.problem or f"{outside} (or declare another transform)")
    if min(used.sizes) and bounds and not repeated:
        unused = unused_summaries(used, primary, steps) if margin.unit == "" else {}
        result = _tested(result, used, primary, margin, in_window, unused)
    if used.sizes != sides.sizes and not result.problem:
        lacking = f"{used.sizes[0]} of {sides.sizes[0]} planned pairs are usable"
        if not sides.paired:
            lacking = f"{sum(used.sizes)} of {sum(sides.sizes)} runs are usable"
        result = replace(result, problem=f"{lacking}, and equivalence needs every one")
    return replace(result, result="not tested") if result.problem else result


def _usable(values: Array) -> list[bool]:
    """Which runs [R] hold numbers all over the window [R, W], of one step or more."""
    return [bool(len(one) and np.isfinite(one).all()) for one in values]


def _test(margin: Margin, *, paired: bool) -> Test:
    if margin.unit == "sigma":
        return "sigma test" if paired else "Welch sigma test"
    return "paired TOST" if paired else "Welch TOST"


def _tested(
    result: PrimaryResult,
    sides: Sides,
    primary: Primary,
    margin: Margin,
    in_window: tuple[Array, Array],
    unused: dict[int, float],
) -> PrimaryResult:
    """A result with its statistics, and what makes them mean nothing."""
    assert result.steps is not None
    bounds = result.steps
    arms = [summaries(values, primary) for values in in_window]
    last, baselines, several = bounds[1], sides.baselines, min(sides.sizes) > 1
    measured = yardstick(margin, arms[0], baselines, primary, last)
    if several and measured is not None and not t_interval(measured, 0.9)[0] > 0:
        lacking = f"the baseline's {margin.unit} is not shown to be above 0, to take {margin.text} of"
        return replace(result, problem=result.problem or lacking)
    if several and margin.unit == "sigma" and mean_and_sd(arms[0])[1] <= 1e-9 * np.abs(arms[0]).max():
        lacking = "the baseline has no spread over seeds to measure its sigma in: give an absolute margin"
        return replace(result, problem=result.problem or lacking)
    step = resolution(sides.runs, primary, moving(*in_window, paired=sides.paired))
    plain = with_statistics(result, *arms, yardstick=measured)
    result = with_statistics(result, *arms, yardstick=measured, resolution=step) if step else plain
    pairs, others = (arms[0], arms[1]), np.array([*unused.values()])
    if not step and has_use(*pairs, others):
        rho = max(CORRELATION, primary.correlation)
        tost = control_variate_tost(*pairs, others, margin.number, result.alpha, rho)
        result = replace(result, test="control variate TOST", unused_seeds=tuple(unused))
        detected = detect(*pairs, tost.mean_difference, tost.interval, paired=True)
        plain = result = replace(_by(tost, result), detected=detected)
    if sides.paired:
        result = replace(result, step_noise=step_noise(*in_window, primary))
    climb = float(np.mean(climbs(baselines, primary, last)))
    result = replace(result, climb=climb if np.isfinite(climb) else None)
    if several and not result.problem and result.margin is not None:
        result = replace(result, problem=not_learned(baselines, primary, last, result.margin))
    if several and result.margin is not None:
        holds = result.result == "equivalent" and not result.problem
        said = [result.warning, *_margin_warnings(result, baselines, primary)]
        if result.certified_bound != 0 and _decisions(plain) != _decisions(result):
            said.append(WIDE_STEPS)
        said += curve_warnings(sides, primary.metric, result.transform, bounds, result.margin, holds=holds)
        result = replace(result, warning="; ".join(filter(None, said)) or None)
    return result


def _margin_warnings(
    result: PrimaryResult, baselines: Sequence[RecordedRun], primary: Primary
) -> Iterator[str]:
    """Yield warnings on a claim's margin and its baseline."""
    assert result.steps is not None and result.margin is not None and result.standard_error is not None
    still = dead_seeds(baselines, primary, result.steps[1], result.margin)
    if still and not result.problem:
        yield f"{still} of {len(baselines)} baseline seeds did not climb by more than the margin"
    if result.certified_bound == 0:
        of = "pair" if result.num_runs is None else "run"
        yield f"the bound is 0 because the summaries of both arms are the same number in every {of}"
    level = abs(result.baseline_mean or 0.0)
    if result.transform == "identity" and 0 < level < result.margin:
        yield f"the margin is wider than the baseline's level of {level:.3g}: an arm at 0 would pass"


def _in_window(sides: Sides, primary: Primary, bounds: tuple[int, int] | None) -> tuple[Steps, Array, Array]:
    """Steps [W] of the window, and both arms' values [R, W] there."""
    steps, values = stack(sides.runs, primary.metric)
    first, last = bounds or (0, 0)
    inside = (steps >= first) & (steps <= last)
    recorded = union(run.series(primary.metric).steps for run in sides.runs)
    if len(recorded) and not ((first <= recorded) & (recorded <= last)).any():
        raise ComparisonError(
            f"{primary.metric}: window: got {primary.window!r}, which selects none of the {len(recorded)} "
            f"steps {recorded[0]}-{recorded[-1]} at which it was recorded; use a wider window, such as 'all'"
        )
    num_baselines = len(sides.baselines)
    return steps[inside], values[:num_baselines, inside], values[num_baselines:, inside]


def with_statistics(
    result: PrimaryResult,
    baseline: Array,
    treatment: Array,
    *,
    yardstick: Array | None = None,
    resolution: float = 0.0,
) -> PrimaryResult:
    """A result filled in from one summary a pair, or of each run; with fewer than two there is no test."""
    if min(len(baseline), len(treatment)) < 2:
        return result
    paired = result.num_runs is None
    # For a margin in sigmas only what does not depend on it is read: mean, intervals, correlation.
    number = 1.0 if result.margin_unit == "sigma" else result.margin_number
    tost = (paired_tost if paired else welch_tost)(
        baseline, treatment, number, result.alpha, yardstick, resolution
    )
    result = replace(
        result,
        differences=tuple((treatment - baseline).tolist()) if paired else (),
        baseline_mean=float(baseline.mean()),
        baseline_sd=mean_and_sd(baseline)[1],
        treatment_mean=float(treatment.mean()),
        treatment_sd=mean_and_sd(treatment)[1],
        sd_difference=tost.sd_difference,
        detected=detect(baseline, treatment, tost.mean_difference, tost.interval, paired=paired),
        pair_correlation=tost.pair_correlation,
    )
    margin = number if yardstick is None else number * float(yardstick.mean())
    if result.margin_unit == "sigma":
        margin = result.margin_number * mean_and_sd(baseline)[1]
    least = HARMLESS * abs(margin)
    result = replace(result, warning=_skewed(result, baseline, treatment, step=resolution, least=least))
    if result.margin_unit == "sigma":
        return _in_sigmas(_estimated(tost, result), baseline, treatment, resolution)
    share = None if yardstick is None else number * yardstick
    error = max([tost.standard_error, *_errors_at_the_margin(baseline, treatment, share, paired=paired)])
    result = replace(
        _by(tost, replace(result, margin=margin), error),
        sd_at_margin=None if share is None else tost.sd_difference * _factor(error, tost.standard_error),
    )
    if not paired:
        wider = _factor(error, tost.standard_error)
        sds = wider * sd_in_steps(baseline, resolution), wider * sd_in_steps(treatment, resolution)
        return _runs_needed(result, margin, sds)
    return _pairs_needed(result, margin, error * math.sqrt(len(baseline)))


def _estimated(tost: Tost, result: PrimaryResult) -> PrimaryResult:
    """A result with the estimate of a test and its intervals."""
    reach = float(special.stdtrit(tost.freedom, 0.95)) * tost.standard_error
    return replace(
        result,
        mean_difference=tost.mean_difference,
        standard_error=tost.standard_error,
        freedom=tost.freedom,
        ci90=(tost.mean_difference - reach, tost.mean_difference + reach),
        interval=tost.interval,
        certified_bound=tost.certified_bound,
        p_difference=tost.p_difference,
    )


def _by(tost: Tost, result: PrimaryResult, error: float | None = None) -> PrimaryResult:
    """A result decided by a test of its margin; `error`: the standard error at the margin, if larger."""
    assert result.margin is not None
    error = tost.standard_error if error is None else error
    return replace(
        _estimated(tost, result),
        certified_number=tost.certified_margin,
        p_equivalence=tost.p_tost,
        p_tost=tost.p_tost,
        p_beyond=tost.p_beyond,
        power_now=tost_power(result.margin, error, tost.freedom, result.alpha),
        result="equivalent" if tost.equivalent else "undecided",
    )


def _skewed(
    result: PrimaryResult, baseline: Array, treatment: Array, *, step: float, least: float
) -> str | None:
    """Test the differences, or both arms; and of a margin in sigmas the baseline, which gives the margin."""
    if result.num_runs is not None:
        arms = dict(zip(ARMS, (baseline, treatment), strict=True))
        return skew_warning(arms, step=step, least=least, level=0.05 / len(arms))
    samples = {DIFFERENCES: treatment - baseline}
    if result.margin_unit == "sigma":
        samples[ARMS[0]] = baseline
    return skew_warning(samples, step=step, least=least)


def _decisions(result: PrimaryResult) -> tuple[bool, bool]:
    """Return whether a claim by itself is shown, and whether the opposite is."""
    beyond = result.p_beyond is not None and result.p_beyond < result.alpha_difference
    return result.result == "equivalent", beyond


def _factor(error: float, other: float) -> float:
    return error / other if other else 1.0


def _errors_at_the_margin(
    baseline: Array, treatment: Array, margin: Array | None, *, paired: bool
) -> list[float]:
    """Of treatment - (baseline ± margin), of which a margin that is itself measured has two tests."""
    ends = [] if margin is None else [baseline + sign * margin for sign in (1, -1)]
    return [(paired_mean(treatment - end) if paired else welch(end, treatment))[1] for end in ends]


def _pairs_needed(result: PrimaryResult, margin: float, sd: float) -> PrimaryResult:
    """By the sd of a paired difference."""
    assert result.mean_difference is not None
    alpha = result.alpha
    return replace(
        result,
        pairs_needed=pairs_needed(margin, sd, alpha=alpha),
        pairs_needed_range=pairs_needed_range(margin, sd, result.num_pairs, alpha=alpha),
        pairs_needed_observed=pairs_needed(margin, sd, alpha=alpha, true_difference=result.mean_difference),
    )


def _runs_needed(result: PrimaryResult, margin: float, sds: tuple[float, float]) -> PrimaryResult:
    """Of each arm; the range scales both sds by the 90 % interval of their root mean square."""
    assert result.freedom is not None and result.mean_difference is not None
    sd, alpha = math.hypot(*sds), result.alpha
    ends = [end / sd if sd else 0.0 for end in sd_interval(sd, result.freedom + 1)]
    low, high = (runs_needed(margin, (sds[0] * end, sds[1] * end), alpha=alpha) for end in ends)
    return replace(
        result,
        pairs_needed=runs_needed(margin, sds, alpha=alpha),
        pairs_needed_range=(low, high),
        pairs_needed_observed=runs_needed(margin, sds, alpha=alpha, true_difference=result.mean_difference),
        pairs_if_shared=pairs_needed(margin, sd * math.sqrt(1 - SHARED), alpha=alpha),
    )


def _in_sigmas(result: PrimaryResult, baseline: Array, treatment: Array, resolution: float) -> PrimaryResult:
    number, paired = result.margin_number, result.num_runs is None
    test_of = sigma_test if paired else welch_sigma_test
    test = test_of(baseline, treatment, number, result.alpha, resolution)
    result = replace(
        result,
        margin=number * test.sigma,
        certified_number=test.certified_sigmas,
        p_equivalence=test.p_equivalence,
        p_beyond=test.p_beyond,
        result="equivalent" if test.equivalent else "undecided",
    )
    # Of independent arms: by as many pairs as the smaller has runs, of no correlation.
    num_pairs, correlation = min(len(baseline), len(treatment)), result.pair_correlation or 0.0
    law = Law(correlation=correlation, ratio=mean_and_sd(treatment)[1] / test.sigma if test.sigma else 1.0)
    assert result.freedom is not None
    low, point, high = (
        sigma_pairs_needed(number, replace(law, widened=end), alpha=result.alpha)
        for end in (sd_interval(1.0, result.freedom + 1)[0], 1.0, sd_interval(1.0, result.freedom + 1)[1])
    )
    shared = replace(law, correlation=SHARED)
    return replace(
        result,
        power_now=sigma_power(number, num_pairs, law, result.alpha),
        pairs_needed=point,
        pairs_needed_range=(low, high),
        pairs_if_shared=None if paired else sigma_pairs_needed(number, shared, alpha=result.alpha),
    )


def with_holm(results: Sequence[PrimaryResult]) -> list[PrimaryResult]:
    """Holm-corrected p-values, "different" where a difference beyond the margin is shown, and joint bounds.

    Differences are many looks at one experiment: the family is every claim of every treatment.
    """
    tested = [result for result in results if result.p_difference is not None]
    from_zero = iter(holm([one.p_difference for one in tested if one.p_difference is not None]))
    beyond = iter(holm([one.p_beyond for one in results if one.p_beyond is not None]))
    final = []
    for result in results:
        if result.p_difference is not None:
            bound = _joint_bound(result, len(tested))
            result = replace(result, p_difference_holm=next(from_zero), certified_jointly=bound)
        if result.p_beyond is not None:
            p_beyond = next(beyond)
            result = replace(result, p_beyond_holm=p_beyond)
            if p_beyond < result.alpha_difference:
                result = _different(result)
        final.append(result)
    return final


def _different(result: PrimaryResult) -> PrimaryResult:
    """A result as a mismatch; undecided by two pairs, or two runs of an arm.

    Two differences of one sign and size are no evidence: where half of all runs fail, equal arms show them in
    one experiment of eight.
    """
    paired = result.num_runs is None
    if (result.num_pairs if result.num_runs is None else min(result.num_runs)) >= MIN_FOR_MISMATCH:
        return replace(result, result="different")
    sample = "two pairs" if paired else "two runs of an arm"
    too_few = f"{sample} cannot show a mismatch: that takes {MIN_FOR_MISMATCH}{'' if paired else ' of each'}"
    return replace(result, warning="; ".join(filter(None, [result.warning, too_few])))


def _joint_bound(result: PrimaryResult, num_claims: int) -> float:
    """The certified bound at this claim's share of alpha (Bonferroni)."""
    assert result.mean_difference is not None and result.standard_error is not None
    quantile = float(special.stdtrit(result.freedom, 1 - result.alpha / num_claims))
    return abs(result.mean_difference) + quantile * result.standard_error
