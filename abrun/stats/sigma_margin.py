"""Margins in sigmas: equivalence within k standard deviations of the baseline over seeds.

The margin is the baseline's sigma, estimated from the same seeds as the difference. For normal seeds the
mean difference is independent of every sample variance. A confidence interval of |difference| - k sigma
therefore follows from one interval of each by the method of variance estimates recovery (MOVER: Zou and
Donner 2008, doi:10.1002/sim.3095; for reference-scaled bioequivalence Hyslop, Hsuan and Holder 2000). It
holds whatever the treatment's own sigma and the correlation of the arms. Its level is simulated in
`tests/stats/test_sigma_margin.py`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from abrun.stats.equivalence import (
    ALPHA,
    check_samples,
    estimate_difference,
    find_largest_share,
    mean_and_sd,
)
from abrun.stats.one_sided import OneSidedResult
from abrun.stats.power import NUM_EXPERIMENTS, Array, Decisions, decide_at, find_min_pairs

_MIN_P = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class SigmaTest:
    """Result of testing |mean difference| against k sigma, sigma being the baseline's sd over seeds."""

    sigma: float  # the baseline's, n - 1 in the denominator
    p_equivalence: float
    p_beyond: float  # minimum-effect test; the null is a difference no larger than k sigma
    certified_sigmas: float  # the smallest k that would have passed; inf if none would
    equivalent: bool


def sigma_test(
    baseline: ArrayLike,
    treatment: ArrayLike,
    sigmas: float,
    alpha: float = ALPHA,
    resolution: float = 0.0,
    *,
    paired: bool = True,
) -> SigmaTest:
    """Test equivalence: passes iff the upper 1 - alpha bound of |mean difference| - k sigma is below 0.

    For independent arms the difference has Welch's error and degrees of freedom, and sigma its own degrees of
    freedom. `resolution` and the ValueError are those of `abrun.stats.equivalence.equivalence_test`.
    """
    baseline_values, treatment_values = check_samples(baseline, treatment, sigmas, paired=paired)
    mean, error, dof = estimate_difference(baseline_values, treatment_values, resolution, paired=paired)
    sigma, num_seeds, mean = mean_and_sd(baseline_values)[1], len(baseline_values), abs(mean)
    if sigma == 0:
        p_equivalence, p_beyond = float(mean != 0 or error != 0), float(mean == 0 or error != 0)
        certified_sigmas = 0.0 if mean == 0 and error == 0 else math.inf
    else:
        p_equivalence = _p_value(
            lambda level: _max_mean_difference(sigma, error, num_seeds, sigmas, level, dof) > mean
        )
        p_beyond = _p_value(
            lambda level: mean > sigmas * sigma + _min_excess(sigma, error, num_seeds, sigmas, level, dof)
        )
        certified_sigmas = _certified_sigmas(mean, sigma, error, num_seeds, alpha, dof)
    return SigmaTest(
        sigma=sigma,
        p_equivalence=p_equivalence,
        p_beyond=p_beyond,
        certified_sigmas=certified_sigmas,
        equivalent=p_equivalence < alpha,
    )


def sigma_improvement_test(
    baseline: ArrayLike,
    treatment: ArrayLike,
    sigmas: float,
    alpha: float = ALPHA,
    resolution: float = 0.0,
    *,
    sign: int,
    paired: bool = True,
) -> OneSidedResult:
    """Test whether sign * (treatment - baseline) is above k sigma in the mean, by the lower MOVER bound.

    k may be negative. See `abrun.stats.one_sided.improvement_test` for the other arguments.
    """
    baseline_values, treatment_values = check_samples(baseline, treatment, 1.0, paired=paired)
    mean, error, dof = estimate_difference(baseline_values, treatment_values, resolution, paired=paired)
    sigma, num_seeds, improvement = mean_and_sd(baseline_values)[1], len(baseline_values), sign * mean

    def is_above(value: float, share: float, level: float) -> bool:
        """Return if the lower 1 - level bound of value - share * sigma is above 0."""
        if share >= 0:
            excess = _min_excess(sigma, error, num_seeds, share, level, dof, tails=1)
            return value > share * sigma + excess
        return -value < _max_mean_difference(sigma, error, num_seeds, -share, level, dof)

    return OneSidedResult(
        p_above=_p_value(lambda level: is_above(improvement, sigmas, level)),
        p_below=_p_value(lambda level: is_above(-improvement, -sigmas, level)),
        bound=find_largest_share(lambda share: is_above(improvement, share, alpha)),
    )


def sigma_lower_bound(sigma: float, num_seeds: int, alpha: float = ALPHA) -> float:
    """Return the lower 1 - alpha bound of an sd that was estimated from `num_seeds` normal summaries."""
    return sigma * math.sqrt((num_seeds - 1) / float(special.chdtri(num_seeds - 1, alpha)))


@dataclass(frozen=True, slots=True, kw_only=True)
class VarianceModel:
    """Variance components of paired arms with equal means, as the power of a margin in sigmas needs them."""

    correlation: float = 0.0
    sd_ratio: float = 1.0  # the treatment's sigma over the baseline's
    sd_factor: float = 1.0  # scales the sd of the difference, such as to an end of its interval

    @property
    def sd_difference(self) -> float:
        """Sd of the difference, in the baseline's sigmas."""
        return self.sd_factor * math.sqrt(
            max(0.0, 1 + self.sd_ratio**2 - 2 * self.sd_ratio * self.correlation)
        )


def sigma_power(sigmas: float, num_pairs: int, model: VarianceModel, alpha: float = ALPHA) -> float:
    """Return P(`sigma_test` passes) for equal normal arms.

    The mean difference is integrated out. The sample variances are drawn (Bartlett), the same in every call.
    """
    if num_pairs < 2:
        return 0.0
    dof = num_pairs - 1
    rng = np.random.default_rng(0)
    u = np.sqrt(rng.chisquare(dof, NUM_EXPERIMENTS))
    v = rng.standard_normal(NUM_EXPERIMENTS)
    remaining_chi_square = rng.chisquare(dof - 1, NUM_EXPERIMENTS) if dof > 1 else 0.0
    independent_sd = model.sd_ratio * math.sqrt(1 - model.correlation**2)
    shared_sd = model.sd_ratio * model.correlation - 1
    sum_of_squares = (
        shared_sd**2 * u**2
        + 2 * shared_sd * independent_sd * u * v
        + independent_sd**2 * (v**2 + remaining_chi_square)
    )
    error = model.sd_factor * np.sqrt(np.maximum(sum_of_squares, 0) / dof / num_pairs)
    max_difference = _max_mean_difference(u / math.sqrt(dof), error, num_pairs, sigmas, alpha)
    # The sd is 0 if the arms are perfectly correlated
    standard_error = max(model.sd_difference / math.sqrt(num_pairs), 1e-300)
    return float(np.mean(2 * special.ndtr(np.maximum(max_difference, 0) / standard_error) - 1))


def simulate_sigma_decisions(
    sigmas: float,
    counts: Sequence[int],
    model: VarianceModel,
    levels: Sequence[float],
    beyond_levels: Sequence[float],
    *,
    difference: float = 0.0,
    stream: int = 0,
) -> Decisions:
    """Return what `sigma_test` decides at each of `counts` pairs; see `simulate_tost_decisions`.

    `difference` is in the baseline's sigmas.
    """
    rng = np.random.default_rng([0, stream])
    baseline, differences = _draw_pairs(rng, counts[-1], model)

    def matches(mean: Array, error: Array, count: int, alpha: float) -> Array:
        sigma = baseline[:, :count].std(axis=1, ddof=1)
        return np.abs(mean) < _max_mean_difference(sigma, error, count, sigmas, alpha)

    def differs(mean: Array, error: Array, count: int, alpha: float) -> Array:
        sigma = baseline[:, :count].std(axis=1, ddof=1)
        return np.abs(mean) > sigmas * sigma + _min_excess(sigma, error, count, sigmas, alpha)

    return decide_at(differences + difference, counts, levels, beyond_levels, matches, differs)


def simulate_sigma_improvements(
    sigmas: float,
    counts: Sequence[int],
    model: VarianceModel,
    levels: Sequence[float],
    broken_levels: Sequence[float],
    *,
    improvement: float,
    stream: int = 0,
) -> Decisions:
    """Return what `sigma_improvement_test` decides at each of `counts` pairs, in the baseline's sigmas."""
    rng = np.random.default_rng([0, stream])
    baseline, differences = _draw_pairs(rng, counts[-1], model)
    sign, size = 1 if sigmas >= 0 else -1, abs(sigmas)

    def is_beyond(mean: Array, error: Array, count: int, alpha: float) -> Array:
        sigma = baseline[:, :count].std(axis=1, ddof=1)
        return sign * mean > size * sigma + _min_excess(sigma, error, count, size, alpha, tails=1)

    def is_within(mean: Array, error: Array, count: int, alpha: float) -> Array:
        sigma = baseline[:, :count].std(axis=1, ddof=1)
        return sign * mean < _max_mean_difference(sigma, error, count, size, alpha)

    tests = (is_beyond, is_within) if sign > 0 else (is_within, is_beyond)
    return decide_at(improvement + differences, counts, levels, broken_levels, *tests)


def _draw_pairs(
    rng: np.random.Generator, num_pairs: int, model: VarianceModel
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the baseline's values and the paired differences [E, P], both with mean 0."""
    baseline = rng.standard_normal((NUM_EXPERIMENTS, num_pairs))
    independent = math.sqrt(1 - model.correlation**2) * rng.standard_normal(baseline.shape)
    treatment = model.sd_ratio * (model.correlation * baseline + independent)
    return baseline, model.sd_factor * (treatment - baseline)


def sigma_pairs_needed(sigmas: float, model: VarianceModel, alpha: float = ALPHA) -> int | None:
    """Return the fewest pairs whose `sigma_power` is at least 80 %; see `find_min_pairs`."""
    return find_min_pairs(lambda pairs: sigma_power(sigmas, pairs, model, alpha))


def _max_mean_difference(sigma, error, num_seeds: int, sigmas: float, alpha: float, dof=None):
    """Return the largest |mean difference| whose upper bound stays below 0, for numbers or arrays.

    `num_seeds` is the sample size of sigma. `dof` are the degrees of freedom of the difference; None means
    those of as many pairs.
    """
    sigma_dof = num_seeds - 1
    sigma_shortfall = 1 - math.sqrt(sigma_dof / float(special.chdtri(sigma_dof, alpha)))
    quantile = special.stdtrit(sigma_dof if dof is None else dof, 1 - alpha)
    return sigmas * sigma - np.hypot(quantile * error, sigmas * sigma * sigma_shortfall)


def _min_excess(sigma, error, num_seeds: int, sigmas: float, alpha: float, dof=None, tails: int = 2):
    """Return by how much |mean difference| must exceed k sigma for its lower bound to be above 0.

    For numbers or arrays; both tails count. With one tail, the same for a mean difference of known sign.
    """
    sigma_dof = num_seeds - 1
    sigma_excess = math.sqrt(sigma_dof / float(special.chdtri(sigma_dof, 1 - alpha))) - 1
    quantile = float(special.stdtrit(sigma_dof if dof is None else dof, 1 - alpha / tails))
    return np.hypot(quantile * error, sigmas * sigma * sigma_excess)


def _certified_sigmas(
    mean: float, sigma: float, error: float, num_seeds: int, alpha: float, dof: float
) -> float:
    """Return the k at which `_max_mean_difference` equals the mean difference (Fieller's quadratic)."""
    sigma_dof = num_seeds - 1
    sigma_shortfall = 1 - math.sqrt(sigma_dof / float(special.chdtri(sigma_dof, alpha)))
    half_width = float(special.stdtrit(dof, 1 - alpha)) * error
    coefficient = sigma**2 * (1 - sigma_shortfall**2)
    discriminant = (sigma * mean) ** 2 - coefficient * (mean**2 - half_width**2)
    return (sigma * mean + math.sqrt(max(discriminant, 0.0))) / coefficient


def _p_value(rejects: Callable[[float], bool]) -> float:
    """Return the smallest level at which a test rejects, by bisection; 1 if it does not reject at 0.5."""
    low, high = _MIN_P, 0.5
    if not rejects(high):
        return 1.0
    if rejects(low):
        return low
    for _ in range(50):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if rejects(middle) else (middle, high)
    return high
