"""Paired equivalence testing: when arms may be called the same, and how many pairs that takes.

Two one-sided t-tests (TOST: Schuirmann 1987, doi:10.1007/BF01068419) on differences paired by seed. Pure
functions on arrays: planning uses them before the runs, the verdict after.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

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
        p_tost = float(stats.t.sf((margin - abs(mean)) / standard_error, freedom))
        p_difference = float(2 * stats.t.sf(abs(mean) / standard_error, freedom))
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
    reach = float(stats.t.ppf(0.5 + confidence / 2, len(sample) - 1)) * sd / math.sqrt(len(sample))
    return mean - reach, mean + reach


def sd_interval(sd: float, num_pairs: int, confidence: float = 0.9) -> tuple[float, float]:
    """Chi-square interval of a standard deviation estimated from `num_pairs` normal differences."""
    freedom = num_pairs - 1
    tails = stats.chi2.ppf([0.5 + confidence / 2, 0.5 - confidence / 2], freedom)
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
    margin: float, sd_difference: float, target: float = 0.8, alpha: float = ALPHA, most: int = MOST_PAIRS
) -> int | None:
    """The fewest pairs with power `target` if the arms are truly equal; None beyond `most`."""
    low, high = 1, 2
    while power_at(margin, sd_difference, high, alpha) < target:
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        enough = power_at(margin, sd_difference, middle, alpha) >= target
        low, high = (low, middle) if enough else (middle, high)
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
