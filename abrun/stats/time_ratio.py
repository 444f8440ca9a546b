"""Rank tests of the ratio of two arms' times to a target, some of which are only known to lie in a range.

A time is known up to the evaluation grid: a target reached at an evaluation was reached after the one before.
A run that never reached it needs longer than its last evaluation. Each time is therefore a range (low, high],
and every test takes the ranges at the end that is unfavourable for its conclusion. Since both rank
statistics grow with every treated time and fall with every baseline's, a test that is exact for the unknown
times keeps its level at these ends, whatever the grid and whatever stopped the runs (ties count against the
conclusion).

Paired by seed: Wilcoxon's signed-rank test of the log ratios (Hollander, Wolfe and Chicken, Nonparametric
Statistical Methods, 3rd ed., 3.1 and 3.3), exact if a pair's times, the treated one divided by the true
ratio, are exchangeable, for any distribution over seeds. Independent arms: the Mann-Whitney test of the log
times (ibid., 4.1 and 4.3), exact if the arms differ by a factor. Intervals are those of Hodges and Lehmann:
the limits that the tests do not reject.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy import special

from abrun.stats.equivalence import ALPHA

Times = NDArray[np.float64]
MAX_EXACT = 60  # pairs, or runs of an arm, up to which null distributions are exact; then normal
ROUNDING = 1e-9  # of logarithms: 110 / 100 is a limit of 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRatioResult:
    """Result of a test of treated time / baseline's time against a limit."""

    estimate: float | None  # Hodges-Lehmann, of times as recorded; None if censoring leaves it open
    interval: tuple[float, float]  # level 1 - 2 alpha or above; 0 and inf if nothing is known
    p_below: float  # small if the ratio is below the limit
    p_above: float  # small if the ratio is above the limit
    share_below: float  # of the ratios behind p_below, those that speak for a ratio below the limit
    is_below: bool  # shown at alpha
    is_above: bool


def time_ratio_test(
    baseline: tuple[Times, Times],  # [M] after this time, and at this time at the latest (inf: not reached)
    treatment: tuple[Times, Times],  # [N] likewise; if paired, the same seeds in the same order
    limit: float,
    alpha: float = ALPHA,
    *,
    paired: bool = True,
) -> TimeRatioResult:
    """Test the ratio of the arms' times to a target against a limit above 0.

    Raises ValueError for ranges that are empty or negative, and for pairs of unequal number.
    """
    for low, high in (baseline, treatment):
        if len(low) == 0 or low.shape != high.shape or not ((low >= 0) & (low < high)).all():
            raise ValueError(f"expected ranges 0 <= low < high; got {low} and {high}")
    if paired and len(baseline[0]) != len(treatment[0]):
        raise ValueError(f"expected pairs; got {len(baseline[0])} and {len(treatment[0])} times")
    longest = _log_ratios(baseline[0], treatment[1], paired=paired)
    shortest = _log_ratios(baseline[1], treatment[0], paired=paired)
    sizes = len(baseline[0]), len(treatment[0])
    null = _signed_rank_null(sizes[0]) if paired else _rank_sum_null(*sizes)
    bound = math.log(limit)
    num_against = int((longest >= bound - ROUNDING).sum())
    p_above = null.probability_up_to(int((shortest <= bound + ROUNDING).sum()))
    count = null.largest_count(alpha)
    lower, upper = (-math.inf, math.inf) if count is None else (shortest[count], longest[-1 - count])
    return TimeRatioResult(
        estimate=_estimate(baseline, treatment, paired=paired),
        interval=(math.exp(lower), math.exp(upper)),
        p_below=null.probability_up_to(num_against),
        p_above=p_above,
        share_below=1 - num_against / len(longest),
        is_below=count is not None and bool(upper < bound - ROUNDING),
        is_above=count is not None and bool(lower > bound + ROUNDING),
    )


def min_sample_size(alpha: float = ALPHA, *, paired: bool = True) -> int:
    """Return the smallest number of pairs, or of runs of each arm, at which these tests can show anything.

    With n pairs the smallest p is 2**-n, with n runs of each arm 1 / C(2n, n).
    """
    size = 1
    while (0.5**size if paired else 1 / math.comb(2 * size, size)) > alpha:
        size += 1
    return size


def sample_size(share_below: float, alpha: float = ALPHA, *, paired: bool = True) -> int | None:
    """Return about how many pairs, or runs of each arm, show a ratio below the limit with 80 % power.

    `share_below` is the true share of that name. Noether 1987, J. Am. Stat. Assoc. 82:645: n = (z(1 - alpha)
    + z(0.8))^2 / (3 (share - 1/2)^2) pairs, or half of it in each arm. None if no number does.
    """
    if share_below <= 0.5:
        return None
    quantiles = float(special.ndtri(1 - alpha) + special.ndtri(0.8))
    size = quantiles**2 / (3 * (share_below - 0.5) ** 2) / (1 if paired else 2)
    return max(min_sample_size(alpha, paired=paired), math.ceil(size))


def _log_ratios(baseline: Times, treatment: Times, *, paired: bool) -> NDArray[np.float64]:
    """Return the sorted log ratios whose order statistics bound the ratio.

    Paired: the Walsh averages, the means of the log ratios of every two pairs and of each with itself.
    """
    with np.errstate(divide="ignore"):
        before, after = np.log(baseline), np.log(treatment)
    if not paired:
        return np.sort((after[:, None] - before).ravel())
    ratios = after - before
    first, second = np.triu_indices(len(ratios))
    return np.sort((ratios[first] + ratios[second]) / 2)


def _estimate(baseline: tuple[Times, Times], treatment: tuple[Times, Times], *, paired: bool) -> float | None:
    """Return the median of the log ratios of the recorded times, if it does not depend on unreached ones."""
    ends = []
    for unreached_baseline, unreached_treatment in ((0, 1), (1, 0)):
        before = np.where(np.isinf(baseline[1]), baseline[unreached_baseline], baseline[1])
        after = np.where(np.isinf(treatment[1]), treatment[unreached_treatment], treatment[1])
        ratios = _log_ratios(before, after, paired=paired)
        ends.append(float(np.median(ratios)) if np.isfinite(ratios).any() else math.nan)
    return math.exp(ends[0]) if math.isfinite(ends[0]) and ends[0] == ends[1] else None


@dataclass(frozen=True, slots=True)
class NullDistribution:
    """Distribution of the number of log ratios on one side of the true ratio."""

    cumulative: tuple[float, ...]  # [K + 1] P(number <= k)

    def probability_up_to(self, count: int) -> float:
        return self.cumulative[count]

    def largest_count(self, alpha: float) -> int | None:
        """Return the largest count with a probability of at most alpha; None if even 0 has a larger one."""
        size = int(np.searchsorted(self.cumulative, alpha * (1 + 1e-12), side="right"))
        return size - 1 if size else None


@cache
def _signed_rank_null(num_pairs: int) -> NullDistribution:
    """Return the null distribution of Wilcoxon's signed-rank statistic: each rank counts with chance 1/2."""
    total = num_pairs * (num_pairs + 1) // 2
    if num_pairs > MAX_EXACT:
        sd = math.sqrt(total * (2 * num_pairs + 1) / 12)
        return _normal_null(total, sd)
    weights = np.ones(1)
    for rank in range(1, num_pairs + 1):
        weights = np.convolve(weights, [0.5, *[0.0] * (rank - 1), 0.5])
    return NullDistribution(tuple(np.minimum(np.cumsum(weights), 1.0).tolist()))


@cache
def _rank_sum_null(num_baselines: int, num_treatments: int) -> NullDistribution:
    """Return the null distribution of the Mann-Whitney statistic, by recursion over the largest time."""
    total = num_baselines * num_treatments
    if max(num_baselines, num_treatments) > MAX_EXACT:
        sd = math.sqrt(total * (num_baselines + num_treatments + 1) / 12)
        return _normal_null(total, sd)
    # The largest of m + n times is a baseline's with chance m / (m + n); it then exceeds all n treated ones.
    row = [np.ones(1) for _ in range(num_treatments + 1)]
    for m in range(1, num_baselines + 1):
        for n in range(1, num_treatments + 1):
            row[n] = (m * np.pad(row[n], (n, 0)) + n * np.pad(row[n - 1], (0, m))) / (m + n)
    return NullDistribution(tuple(np.minimum(np.cumsum(row[num_treatments]), 1.0).tolist()))


def _normal_null(total: int, sd: float) -> NullDistribution:
    counts = np.arange(total + 1)
    return NullDistribution(tuple(special.ndtr((counts + 0.5 - total / 2) / sd).tolist()))


def misses_alone(baseline: NDArray[np.float64], treatment: NDArray[np.float64], *, paired: bool) -> bool:
    """Return True if a treated run never reaches (inf) what its baseline, or more baselines, reach."""
    unreached, missed = np.isinf(baseline), np.isinf(treatment)
    return bool((missed & ~unreached).any() if paired else missed.sum() > unreached.sum())
