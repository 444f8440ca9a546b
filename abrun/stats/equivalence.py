"""Equivalence tests: TOST, the minimum-effect test, limits, and Holm's correction.

Two one-sided t-tests (TOST: Schuirmann 1987, doi:10.1007/BF01068419) on differences paired by seed, or on
unpaired arms (Welch), and the minimum-effect test of a difference beyond the margin. Pure functions on
arrays: planning calls them before the runs, the verdict after. Outcomes of 0 and 1 have exact tests instead
(`abrun.stats.rates`). Margins in sigmas are in `abrun.stats.sigma_margin`, sample sizes in
`abrun.stats.power`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike
from scipy import special  # scipy.stats would take a second to import

from abrun.stats.many_tests import TINY_P, VariancePrior
from abrun.stats.rates import Outcomes, are_outcomes, rate_interval, rate_p
from abrun.stats.series import Array

ALPHA = 0.05
# Pairs, or runs of each arm: two can agree by chance, which is no evidence.
MIN_FOR_MISMATCH = 3
# Correlation that is assumed of paired arms: the median of rewards over seeds in docs/evidence
ASSUMED_PAIR_CORRELATION = 0.5
_NUM_BISECTIONS = 60
_MAX_SHARE = 1e6  # of a yardstick
_MAX_DOF_RATIO = 1.25  # of a test with further baselines to that of its pairs; keeps the level at 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class TostResult:
    """Result of an equivalence test on paired differences or on two independent samples."""

    mean_difference: float
    sd_difference: float  # sample sd of one pair; unpaired: of the difference of one run of each arm
    standard_error: float  # of the mean difference
    dof: float  # degrees of freedom of its t distribution
    interval: tuple[float, float]  # t confidence interval, level 1 - 2 alpha; in the margin iff TOST passes
    ci90: tuple[float, float]  # at level 0.9
    p_tost: float  # the larger one-sided p
    p_difference: float  # two-sided paired t-test of no difference
    # Minimum-effect test (Murphy and Myors 1999); the null is a difference no larger than the margin. Both
    # tails count: with one tail, a margin far below the standard error would be exceeded at twice alpha.
    p_beyond: float
    certified_bound: float  # the smallest absolute margin that would have passed
    certified_margin: float  # the same in the margin's unit: a share of the yardstick if there is one
    pair_correlation: float | None  # None if unpaired, or if an arm does not vary over seeds
    equivalent: bool
    exact: bool  # outcomes of 0 and 1, whose tests and intervals are exact (abrun.stats.rates)


def equivalence_test(
    baseline: ArrayLike,  # [M] one summary per run
    treatment: ArrayLike,  # [N] if paired, the same seeds in the same order
    margin: float,
    alpha: float = ALPHA,
    yardstick: ArrayLike | None = None,  # [M] for the baseline's runs
    resolution: float = 0.0,
    *,
    paired: bool = True,
    prior: VariancePrior | None = None,
    further: Array | None = None,  # [U] baselines without a partner
) -> TostResult:
    """Run TOST for |mean(treatment - baseline)| < margin, or < margin * mean(yardstick) with a yardstick.

    Arms are paired by seed, or independent with unequal variances (Welch 1947, Satterthwaite 1946). With a
    yardstick the margin is itself estimated. The test stays exact because it compares the treatment with
    baseline ± margin * yardstick, run by run, in two t-tests (Sasabuchi 1988). `resolution` is the step in
    which summaries move, see `min_standard_error`. At 0, arms without any spread (bit-identical, or an exact
    shift) are decided by value: the interval is a point and every p is 0 or 1. `prior` and `further` are
    those of `estimate_difference`, unless the margin is estimated. Raises ValueError for fewer than two
    pairs, or fewer than two runs of an arm, for non-finite values, and for margin <= 0.
    """
    baseline_values, treatment_values = check_samples(baseline, treatment, margin, paired=paired)
    outcomes = find_outcomes(baseline_values, treatment_values, yardstick, paired=paired)
    samples, borrowed = (baseline_values, treatment_values), {"prior": prior, "further": further}
    borrowed = {} if yardstick is not None else borrowed
    mean, error, dof = estimate_difference(*samples, resolution, paired=paired, **borrowed)

    def tail(sign: int, share: float) -> float:
        """Return P(a mean of sign * difference - share * yardstick this small), if the true mean is 0."""
        if outcomes:
            return (outcomes if sign > 0 else outcomes.reversed).p_below(share)
        if yardstick is None:
            return p_above(share - sign * mean, error, dof)
        scaled = sign * baseline_values + share * np.asarray(yardstick, float)
        end, end_error, end_dof = estimate_difference(
            scaled, sign * treatment_values, resolution, paired=paired
        )
        return p_above(-end, end_error, end_dof)

    def passes_within(negated_share: float) -> bool:
        return max(tail(1, -negated_share), tail(-1, -negated_share)) < alpha

    differing = [treatment_values - baseline_values] if paired else samples
    sd = math.hypot(*(mean_and_sd(values)[1] for values in differing))
    intervals = {}
    for level in {alpha, ALPHA}:
        half_width = float(special.stdtrit(dof, 1 - level)) * error
        ends = mean - half_width, mean + half_width
        intervals[level] = outcomes.interval(level) if outcomes else ends
    p_tost = max(tail(1, margin), tail(-1, margin))
    sign_towards_zero = -1 if mean >= 0 else 1
    certified_bound = max(map(abs, intervals[alpha]))
    is_relative = yardstick is not None and certified_bound > 0
    return TostResult(
        mean_difference=mean,
        sd_difference=sd,
        standard_error=error,
        dof=dof,
        interval=intervals[alpha],
        ci90=intervals[ALPHA],
        p_tost=p_tost,
        p_difference=min(1.0, 2 * tail(sign_towards_zero, 0.0)),
        p_beyond=min(1.0, tail(sign_towards_zero, -margin) + tail(sign_towards_zero, margin)),
        certified_bound=certified_bound,
        certified_margin=-find_largest_share(passes_within) if is_relative else certified_bound,
        pair_correlation=_correlate(baseline_values, treatment_values) if paired else None,
        equivalent=p_tost < alpha,
        exact=outcomes is not None,
    )


def find_outcomes(
    baseline: Array,
    treatment: Array,
    yardstick: ArrayLike | None,
    *,
    paired: bool,
) -> Outcomes | None:
    """Return the counts of outcomes of 0 and 1; None for other values, and for a margin that is estimated."""
    if yardstick is not None or not are_outcomes(baseline, treatment):
        return None
    return Outcomes.count(baseline, treatment, paired=paired)


def check_samples(
    baseline: ArrayLike, treatment: ArrayLike, margin: float, *, paired: bool
) -> tuple[Array, Array]:
    """Return both samples as arrays. Raises ValueError if they cannot be tested."""
    baseline_values, treatment_values = np.asarray(baseline, float), np.asarray(treatment, float)
    sizes_match = baseline_values.shape == treatment_values.shape or not paired
    if (
        baseline_values.ndim != 1
        or treatment_values.ndim != 1
        or not sizes_match
        or min(len(baseline_values), len(treatment_values)) < 2
    ):
        raise ValueError(
            "expected two vectors of at least 2 values, of equal length if paired; "
            f"got shapes {baseline_values.shape} and {treatment_values.shape}"
        )
    if not (np.isfinite(baseline_values).all() and np.isfinite(treatment_values).all() and margin > 0):
        raise ValueError(f"expected finite values and a positive margin; got margin {margin}")
    return baseline_values, treatment_values


def estimate_difference(
    baseline: Array,
    treatment: Array,
    resolution: float = 0.0,
    *,
    paired: bool,
    prior: VariancePrior | None = None,
    further: Array | None = None,  # [U]
) -> tuple[float, float, float]:
    """Return the mean of treatment - baseline, its standard error and degrees of freedom.

    A `prior` moderates the variance of paired differences that are like it (Smyth 2004). `further` baselines
    without a partner are a control variate (double sampling, Cochran 1977, chapter 12): with n pairs, U
    further baselines v, rho the correlation that is assumed, and w = rho + (1 - rho) n / (n + U),

        d = mean(t - w b) - (1 - w) mean(v),

    which has the mean of t - b for any w, and Welch's error: both means are of independent runs. Differences
    that are far less noisy than the baselines (of another kind than rho) do without.
    """
    if not paired:
        return estimate_welch_difference(baseline, treatment, resolution)
    num_pairs = len(baseline)
    least_error = partial(min_standard_error, resolution, num_pairs)
    mean, error, dof = estimate_mean(treatment - baseline)
    if further is not None and uses_further(baseline, treatment, further):
        weight = ASSUMED_PAIR_CORRELATION + (1 - ASSUMED_PAIR_CORRELATION) * num_pairs / (
            num_pairs + len(further)
        )
        mean, error, dof = estimate_mean(treatment - weight * baseline)
        all_baselines = np.concatenate([baseline, further])
        squares = (
            max(error, least_error(dof)) ** 2,
            (1 - weight) ** 2 * all_baselines.var(ddof=1) / len(further),
        )
        welch_dof = sum(squares) ** 2 / (squares[0] ** 2 / dof + squares[1] ** 2 / (len(all_baselines) - 1))
        mean -= (1 - weight) * float(further.mean())
        return mean, math.sqrt(sum(squares)), float(min(welch_dof, _MAX_DOF_RATIO * dof))
    if prior:
        variance, dof = map(float, prior.moderate_alike(num_pairs * error**2, dof))
        error = error if dof == num_pairs - 1 else math.sqrt(variance / num_pairs)
    return mean, max(error, least_error(dof)), dof


def uses_further(baseline: Array, treatment: Array, further: Array) -> bool:
    """Return whether differences [P] are as noisy as those of arms with further baselines [U] may be."""
    variance = np.concatenate([baseline, further]).var(ddof=1)
    dofs = len(baseline) - 1, len(baseline) + len(further) - 1
    least = special.fdtri(*dofs, TINY_P) * 2 * (1 - ASSUMED_PAIR_CORRELATION) * variance
    return bool(len(further) and (treatment - baseline).var(ddof=1) > least)


def estimate_mean(values: Array) -> tuple[float, float, float]:
    """Return the mean of at least two values, its standard error and degrees of freedom."""
    mean, sd = mean_and_sd(values)
    return mean, sd / math.sqrt(len(values)), len(values) - 1.0


def p_above(mean: float, error: float, dof: float, limit: float = 0.0) -> float:
    """Return the one-sided p-value of a mean above `limit`; 0 or 1 if the standard error is 0."""
    return float(special.stdtr(dof, (limit - mean) / error)) if error else float(mean <= limit)


def min_standard_error(resolution: float, num_values: int, dof: float | None = None) -> float:
    """Return the smallest standard error of the mean of `num_values` values that move in steps of
    `resolution`.

    An accuracy over 16 prompts is often identical in all of three pairs, and an sd of 0 would claim too
    much. If none of n pairs differs, up to 1 in 1 / (1 - 0.05**(1/n)) may still differ by one step (exact
    binomial, 95 %). The returned error makes the t-interval of `dof` (default: n - 1) reach that far.
    """
    quantile = float(special.stdtrit(dof or num_values - 1, 1 - ALPHA))
    return resolution * (1 - ALPHA ** (1 / num_values)) / quantile


def estimate_welch_difference(
    baseline: Array, treatment: Array, resolution: float = 0.0
) -> tuple[float, float, float]:
    """Return the mean of treatment - baseline, its standard error and degrees of freedom for independent
    arms.

    Satterthwaite's degrees of freedom are estimated as well, and too high if the larger arm happens to
    vary more than the smaller one. They are capped at twice those of the smaller arm. A test at 0.05 then
    errs in at most 0.057 with three or more runs of an arm, and 0.068 with two (simulated).
    """
    mean = mean_and_sd(treatment)[0] - mean_and_sd(baseline)[0]
    variances = np.array(
        [sd_with_resolution(sample, resolution) ** 2 / len(sample) for sample in (baseline, treatment)]
    )
    error = math.sqrt(variances.sum())
    max_dof = 2.0 * (min(len(baseline), len(treatment)) - 1)
    if error == 0:
        return mean, 0.0, max_dof
    # Normalised first: squares of tiny variances would underflow.
    weights = variances / variances.sum()
    dof = 1 / (weights[0] ** 2 / (len(baseline) - 1) + weights[1] ** 2 / (len(treatment) - 1))
    return mean, error, min(float(dof), max_dof)


def sd_with_resolution(values: Array, resolution: float) -> float:
    """Return the sample sd, but at least the sd that `min_standard_error` implies."""
    return max(mean_and_sd(values)[1], min_standard_error(resolution, len(values)) * math.sqrt(len(values)))


def find_largest_share(passes: Callable[[float], bool]) -> float:
    """Return the largest share of a yardstick that passes, by bisection; -inf if none does."""
    low, high = -1.0, 1.0
    while not passes(low):
        low *= 2
        if low < -_MAX_SHARE:
            return -math.inf
    while passes(high):
        low, high = high, 2 * high
        if high > _MAX_SHARE:
            return math.inf
    for _ in range(_NUM_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitTestResult:
    """Result of comparing the mean of independent values with a limit."""

    mean: float
    interval: tuple[float, float]  # level 1 - 2 * alpha
    p_below: float  # small if the mean is below the limit
    p_above: float  # small if the mean is above the limit
    error: float = 0.0  # standard error of the mean
    exact: bool = False  # outcomes of 0 and 1: binomial test


def limit_test(
    values: ArrayLike,  # [N]
    limit: float,
    alpha: float = ALPHA,
    resolution: float = 0.0,
    baseline: ArrayLike | None = None,  # [M]
    *,
    are_scores: bool = False,
) -> LimitTestResult:
    """Run one-sided t-tests of a mean against a limit; `resolution` is that of `equivalence_test`.

    With a `baseline`, tests the difference of two independent samples of at least two values each. Outcomes
    of 0 and 1 have the exact binomial test. `are_scores`: equal zeros or ones are outcomes, too.
    """
    sample = np.asarray(values, float)
    is_rate = are_outcomes(sample) or (are_scores and are_outcomes(sample, (0.0, 1.0)))
    if baseline is None and is_rate:
        num_successes, num_values = int(sample.sum()), len(sample)
        p_below, p_above_limit = rate_p(num_successes, num_values, limit)
        return LimitTestResult(
            mean=float(sample.mean()),
            interval=rate_interval(num_successes, num_values, alpha),
            p_below=p_below,
            p_above=p_above_limit,
            error=estimate_mean(sample)[1],
            exact=True,
        )
    if baseline is None:
        mean, error, dof = estimate_difference(np.zeros(len(sample)), sample, resolution, paired=True)
    else:
        mean, error, dof = estimate_difference(np.asarray(baseline, float), sample, resolution, paired=False)
    half_width = float(special.stdtrit(dof, 1 - alpha)) * error
    return LimitTestResult(
        mean=mean,
        interval=(mean - half_width, mean + half_width),
        p_below=p_above(-mean, error, dof, -limit),
        p_above=p_above(mean, error, dof, limit),
        error=error,
    )


def holm(p_values: ArrayLike) -> list[float]:
    """Return Holm's step-down p-values (1979): the i-th smallest of m times m - i + 1, monotone, <= 1."""
    raw = np.asarray(p_values, float)
    order = np.argsort(raw, kind="stable")
    adjusted = np.maximum.accumulate(raw[order] * np.arange(len(raw), 0, -1))
    corrected = np.empty_like(raw)
    corrected[order] = np.minimum(adjusted, 1.0)
    return corrected.tolist()


def mean_and_sd(values: Array) -> tuple[float, float]:
    """Return the mean and sample sd. Equal values give exactly that value and 0, without rounding errors."""
    if np.ptp(values) == 0:
        return float(values[0]), 0.0
    return float(values.mean()), float(values.std(ddof=1))


def t_interval(values: ArrayLike, confidence: float) -> tuple[float, float]:
    """Return Student's t confidence interval of a mean. (Bootstrap percentiles cover 84 % at n = 5.)"""
    sample = np.asarray(values, float)
    mean, sd = mean_and_sd(sample)
    half_width = float(special.stdtrit(len(sample) - 1, 0.5 + confidence / 2)) * sd / math.sqrt(len(sample))
    return mean - half_width, mean + half_width


def welch_interval(baseline: ArrayLike, treatment: ArrayLike, confidence: float) -> tuple[float, float]:
    """Return Welch's (1947) confidence interval of the difference of means; each arm needs two values."""
    mean, error, dof = estimate_welch_difference(np.asarray(baseline, float), np.asarray(treatment, float))
    half_width = float(special.stdtrit(dof, 0.5 + confidence / 2)) * error
    return mean - half_width, mean + half_width


def _correlate(baseline: Array, treatment: Array) -> float | None:
    if np.ptp(baseline) == 0 or np.ptp(treatment) == 0:
        return None
    if np.array_equal(baseline, treatment):
        return 1.0
    return float(np.clip(np.corrcoef(baseline, treatment)[0, 1], -1, 1))
