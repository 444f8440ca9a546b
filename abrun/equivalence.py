"""Equivalence testing: when arms may be called the same, and how many pairs that takes.

Two one-sided t-tests (TOST: Schuirmann 1987, doi:10.1007/BF01068419) on differences paired by seed, for a
margin in units of the metric; Wellek's exact test (Testing Statistical Hypotheses of Equivalence and
Noninferiority, 2nd ed. 2010, section 6.1) for a margin in units of the unknown spread over seeds. Pure
functions on arrays: planning uses them before the runs, the verdict after.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special  # scipy.stats would take a second to import

ALPHA = 0.05
MOST_PAIRS = 1000  # beyond this nobody runs them: "more than" is answer enough
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(256)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedTost:
    """What paired differences say about equivalence within a margin."""

    num_pairs: int
    mean_difference: float
    sd_difference: float  # n - 1 in the denominator
    interval: tuple[float, float]  # Student's t, level 1 - 2 * alpha: inside the margin iff TOST passes
    p_tost: float  # the larger one-sided p
    p_difference: float  # two-sided paired t-test of no difference
    certified_bound: float  # the smallest margin that would have passed
    pair_correlation: float | None  # None where an arm does not vary over seeds
    equivalent: bool


def paired_tost(
    baseline: ArrayLike,  # [P] one summary a pair
    treatment: ArrayLike,  # [P] same order of seeds
    margin: float,
    alpha: float = ALPHA,
) -> PairedTost:
    """Paired TOST of |mean(treatment - baseline)| < margin.

    Differences without any spread (bit-identical arms, or an exact shift) are decided by their value: the
    interval is a point and every p is 0 or 1. Raises ValueError for fewer than two pairs, non-finite values
    or margin <= 0.
    """
    left, right = np.asarray(baseline, float), np.asarray(treatment, float)
    if left.ndim != 1 or left.shape != right.shape or len(left) < 2:
        raise ValueError(f"got shapes {left.shape} and {right.shape}; two equally long vectors of at least 2")
    if not (np.isfinite(left).all() and np.isfinite(right).all() and margin > 0):
        raise ValueError(f"got margin {margin} and non-finite values, or a margin that is not positive")
    difference = right - left
    mean, sd = mean_and_sd(difference)
    low, high = t_interval(difference, 1 - 2 * alpha)
    if sd == 0:
        p_tost, p_difference = float(abs(mean) >= margin), float(mean == 0)
    else:
        standard_error, freedom = sd / math.sqrt(len(difference)), len(difference) - 1
        p_tost = float(special.stdtr(freedom, (abs(mean) - margin) / standard_error))
        p_difference = float(2 * special.stdtr(freedom, -abs(mean) / standard_error))
    return PairedTost(
        num_pairs=len(difference),
        mean_difference=mean,
        sd_difference=sd,
        interval=(low, high),
        p_tost=p_tost,
        p_difference=p_difference,
        certified_bound=max(abs(low), abs(high)),
        pair_correlation=_correlation(left, right),
        equivalent=p_tost < alpha,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SigmaTest:
    """What two arms say about |mean difference| < k sigma; sigma is their own, unknown, spread over seeds."""

    num_pairs: int
    sigma: float  # pooled over both arms, n - 1 in each denominator
    p_equivalence: float
    certified_sigmas: float  # the smallest k that would have passed; inf where no k would
    equivalent: bool


def sigma_test(baseline: ArrayLike, treatment: ArrayLike, sigmas: float, alpha: float = ALPHA) -> SigmaTest:
    """Wellek's exact two-sample test: equivalent iff |t| < sqrt(F^-1(alpha; 1, 2n - 2, n sigmas^2 / 2)).

    F is the noncentral F distribution, t the pooled two-sample statistic. Exact where the arms are
    independent; where seeds correlate them, t varies less and the test keeps its level. Multiplying the same
    data's sigma into a margin for TOST would not: that margin is random. Raises ValueError as `paired_tost`.
    """
    left, right = np.asarray(baseline, float), np.asarray(treatment, float)
    if left.ndim != 1 or left.shape != right.shape or len(left) < 2:
        raise ValueError(f"got shapes {left.shape} and {right.shape}; two equally long vectors of at least 2")
    if not (np.isfinite(left).all() and np.isfinite(right).all() and sigmas > 0):
        raise ValueError(f"got {sigmas} sigmas and non-finite values, or a margin that is not positive")
    num_pairs = len(left)
    sigma = math.sqrt((mean_and_sd(left)[1] ** 2 + mean_and_sd(right)[1] ** 2) / 2)
    difference = mean_and_sd(right)[0] - mean_and_sd(left)[0]
    if sigma == 0:
        p_value, certified = float(difference != 0), 0.0 if difference == 0 else math.inf
    else:
        f = difference**2 / sigma**2 * num_pairs / 2
        p_value = _p_of_sigmas(f, num_pairs, sigmas)
        certified = _certified_sigmas(f, num_pairs, alpha)
    return SigmaTest(
        num_pairs=num_pairs,
        sigma=sigma,
        p_equivalence=p_value,
        certified_sigmas=certified,
        equivalent=p_value < alpha,
    )


def sigma_power(sigmas: float, num_pairs: int, alpha: float = ALPHA) -> float:
    """P(`sigma_test` passes) for equal, independent, normal arms; correlated arms pass more often."""
    if num_pairs < 2:
        return 0.0
    freedom = 2 * num_pairs - 2
    critical = float(special.ncfdtri(1, freedom, num_pairs * sigmas**2 / 2, alpha))
    return float(special.fdtr(1, freedom, critical))


def sigma_pairs_needed(
    sigmas: float, target: float = 0.8, alpha: float = ALPHA, most: int = MOST_PAIRS
) -> int | None:
    """The fewest pairs for which `sigma_power` is at least `target`; None beyond `most`."""
    return _fewest(lambda pairs: sigma_power(sigmas, pairs, alpha), target, most)


def _p_of_sigmas(f: float, num_pairs: int, sigmas: float) -> float:
    return float(special.ncfdtr(1, 2 * num_pairs - 2, num_pairs * sigmas**2 / 2, f))


def _certified_sigmas(f: float, num_pairs: int, alpha: float) -> float:
    """Where `_p_of_sigmas` falls to alpha, by bisection: it is continuous and decreases with sigmas."""
    low, high = 0.0, 1.0
    if _p_of_sigmas(f, num_pairs, low) <= alpha:
        return 0.0
    while _p_of_sigmas(f, num_pairs, high) > alpha:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _p_of_sigmas(f, num_pairs, middle) > alpha else (low, middle)
    return high


def holm(p_values: ArrayLike) -> list[float]:
    """Holm's step-down p-values (1979): the i-th smallest of m times m - i + 1, made monotone, at most 1."""
    p = np.asarray(p_values, float)
    order = np.argsort(p, kind="stable")
    raised = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    corrected = np.empty_like(p)
    corrected[order] = np.minimum(raised, 1.0)
    return corrected.tolist()


def mean_and_sd(values: NDArray[np.float64]) -> tuple[float, float]:
    """Mean and sample sd; equal values give exactly themselves and 0, which summing would round away."""
    if np.ptp(values) == 0:
        return float(values[0]), 0.0
    return float(values.mean()), float(values.std(ddof=1))


def t_interval(values: ArrayLike, confidence: float) -> tuple[float, float]:
    """Student's t interval of a mean. (Bootstrap percentiles cover 84 %, not 95 %, at n = 5.)"""
    sample = np.asarray(values, float)
    mean, sd = mean_and_sd(sample)
    reach = float(special.stdtrit(len(sample) - 1, 0.5 + confidence / 2)) * sd / math.sqrt(len(sample))
    return mean - reach, mean + reach


def sd_interval(sd: float, num_pairs: int, confidence: float = 0.9) -> tuple[float, float]:
    """Chi-square interval of a standard deviation estimated from `num_pairs` normal differences."""
    freedom = num_pairs - 1
    tails = special.chdtri(freedom, np.array([0.5 - confidence / 2, 0.5 + confidence / 2]))
    low, high = sd * np.sqrt(freedom / tails)
    return float(low), float(high)


def sd_of_difference(sigma: float, correlation: float) -> float:
    """Sd of a paired difference between arms that each vary by `sigma` over seeds."""
    return sigma * math.sqrt(2 * (1 - correlation))


def power(
    margin: float,
    sigma: float,
    correlation: float,
    num_pairs: int,
    alpha: float = ALPHA,
    true_difference: float = 0.0,
) -> float:
    """P(paired TOST passes) from the spread over seeds and the correlation of paired arms; see `power_at`."""
    return power_at(margin, sd_of_difference(sigma, correlation), num_pairs, alpha, true_difference)


def power_at(
    margin: float,
    sd_difference: float,
    num_pairs: int,
    alpha: float = ALPHA,
    true_difference: float = 0.0,
) -> float:
    """P(paired TOST passes) for normal differences, exact.

    TOST passes iff |mean| < margin - t * s / sqrt(n). Mean and s are independent, so the power is the normal
    probability of that event integrated over the chi distribution of s. The usual normal approximation
    promises too much at the 3 to 10 pairs an experiment has.
    """
    if num_pairs < 2:
        return 0.0
    if sd_difference == 0:
        return float(abs(true_difference) < margin)
    freedom = num_pairs - 1
    standard_error = sd_difference / math.sqrt(num_pairs)
    reach, shift = margin / standard_error, true_difference / standard_error
    critical = special.stdtrit(freedom, 1 - alpha)
    # u = s / sd; beyond reach / critical the interval is wider than the margin zone and cannot fit.
    low = math.sqrt(2 * special.gammaincinv(freedom / 2, 1e-15) / freedom)
    high = min(reach / critical, math.sqrt(2 * special.gammainccinv(freedom / 2, 1e-15) / freedom))
    if high <= low:
        return 0.0
    u = low + (high - low) * (_NODES + 1) / 2
    room = reach - critical * u
    passes = special.ndtr(room - shift) - special.ndtr(-room - shift)
    half = freedom / 2
    log_density = (
        math.log(2) + half * math.log(half) - math.lgamma(half) + special.xlogy(freedom - 1, u) - half * u**2
    )
    integral = (high - low) / 2 * np.sum(_WEIGHTS * passes * np.exp(log_density))
    return float(np.clip(integral, 0.0, 1.0))


def pairs_needed(
    margin: float,
    sd_difference: float,
    target: float = 0.8,
    alpha: float = ALPHA,
    most: int = MOST_PAIRS,
    true_difference: float = 0.0,
) -> int | None:
    """The fewest pairs with power `target`; None beyond `most`, and where the difference is no smaller than
    the margin.
    """
    if abs(true_difference) >= margin:
        return None
    return _fewest(lambda pairs: power_at(margin, sd_difference, pairs, alpha, true_difference), target, most)


def _fewest(power_with: Callable[[int], float], target: float, most: int) -> int | None:
    low, high = 1, 2
    while power_with(high) < target:
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power_with(middle) >= target else (middle, high)
    return high


def pairs_needed_range(
    margin: float, sd_difference: float, num_pairs: int, target: float = 0.8, alpha: float = ALPHA
) -> tuple[int | None, int | None]:
    """`pairs_needed` over the 90 % interval of an sd that was estimated from `num_pairs` differences."""
    low, high = sd_interval(sd_difference, num_pairs)
    return pairs_needed(margin, low, target, alpha), pairs_needed(margin, high, target, alpha)


def _correlation(left: NDArray[np.float64], right: NDArray[np.float64]) -> float | None:
    if np.ptp(left) == 0 or np.ptp(right) == 0:
        return None
    if np.array_equal(left, right):
        return 1.0
    return float(np.clip(np.corrcoef(left, right)[0, 1], -1, 1))
