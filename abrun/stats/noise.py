"""Seed noise of one arm: the gap between two runs, the place of a new run, and what pairs of runs show.

All formulas are for normal levels, one per run. With 3, 5 and 8 skewed levels (exponential, as of accuracies
near 1), a gap and a prediction of 95 % hold in 90 to 93 %, and the chi-square interval of the sd of 90 % in
80, 74 and 69 %. Bonett's interval (2006) holds in 94, 91 and 83 %, but in 98 and 97 % of 3 and 5 normal
levels, which makes it too wide to be of use.
"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from abrun.stats.equivalence import ALPHA
from abrun.stats.one_sided import one_sided_power
from abrun.stats.power import TARGET_POWER, power_at
from abrun.stats.series import Array

_NUM_SAMPLES = 40_000  # simulated normal samples
_ITERATIONS = 60  # of a bisection


def gap_of_two_runs(sd: float, num_runs: int, confidence: float) -> float:
    """Return the largest gap between two further runs, with this probability.

    The difference of two runs has the sd sigma * sqrt(2), and `sd` estimates sigma from `num_runs` other
    runs: their ratio is a t with num_runs - 1 degrees of freedom.
    """
    return _t_quantile(num_runs, confidence) * sd * math.sqrt(2)


def prediction_half_width(sd: float, num_runs: int, confidence: float) -> float:
    """Return how far one further run is from the mean of `num_runs` runs at most, with this probability.

    The prediction interval of Student's t: sd * sqrt(1 + 1/n), n - 1 degrees of freedom.
    """
    return _t_quantile(num_runs, confidence) * sd * math.sqrt(1 + 1 / num_runs)


def _t_quantile(num_runs: int, confidence: float) -> float:
    return float(special.stdtrit(num_runs - 1, 0.5 + confidence / 2))


def further_run_p(distance: float, sd: float, num_runs: int) -> float:
    """Return the two-sided p of a further run at this distance from the mean of `num_runs` runs."""
    if sd == 0:
        return float(distance == 0)
    t = abs(distance) / (sd * math.sqrt(1 + 1 / num_runs))
    return float(2 * special.stdtr(num_runs - 1, -t))


def detectable_difference(sd_difference: float, num_pairs: int, alpha: float = ALPHA) -> float:
    """Return the smallest true difference that `num_pairs` pairs detect with TARGET_POWER.

    Detected: the 1 - 2 alpha interval of the paired t-test excludes zero on the side of the difference.
    """
    return sd_difference * _detectable_in_sds(num_pairs, alpha)


@cache
def _detectable_in_sds(num_pairs: int, alpha: float) -> float:
    error = 1 / math.sqrt(num_pairs)
    return _smallest_with_power(lambda difference: one_sided_power(difference, error, num_pairs - 1, alpha))


def passing_margin(sd_difference: float, num_pairs: int, alpha: float = ALPHA) -> float:
    """Return the smallest margin within which equal arms match in `num_pairs` pairs with TARGET_POWER."""
    return sd_difference * _margin_in_sds(num_pairs, alpha)


@cache
def _margin_in_sds(num_pairs: int, alpha: float) -> float:
    return _smallest_with_power(lambda margin: power_at(margin, 1.0, num_pairs, alpha))


def _smallest_with_power(power: Callable[[float], float]) -> float:
    """Return the smallest number at which an increasing power reaches TARGET_POWER, by bisection."""
    low, high = 0.0, 1.0
    while power(high) < TARGET_POWER:
        low, high = high, 2 * high
    for _ in range(_ITERATIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if power(middle) >= TARGET_POWER else (middle, high)
    return high


def two_groups(levels: ArrayLike) -> tuple[float, float] | None:
    """Return the value that best splits the levels in two groups, and the p-value of so clear a split.

    The share of the sum of squares between the groups, of two or more levels each, over all splits of the
    sorted levels, among normal samples of that size (simulated). None for fewer than five levels, or equal
    ones.
    """
    sample = np.sort(np.asarray(levels, float))
    if len(sample) < 5 or np.ptp(sample) == 0:
        return None
    shares = _between_shares(sample[None])[0]
    position = int(shares.argmax()) + 2
    exceeding = np.count_nonzero(_largest_normal_shares(len(sample)) >= shares.max())
    return float(sample[position - 1 : position + 1].mean()), (1 + exceeding) / (1 + _NUM_SAMPLES)


@cache
def _largest_normal_shares(size: int) -> np.ndarray:
    samples = np.random.default_rng(0).standard_normal((_NUM_SAMPLES, size))
    return _between_shares(np.sort(samples, axis=1)).max(axis=1)


def _between_shares(samples: np.ndarray) -> np.ndarray:
    """Return the share of the sum of squares between groups, for each split of sorted samples [N, R]."""
    centred = samples - samples.mean(axis=1, keepdims=True)
    size = samples.shape[1]
    counts = np.arange(2, size - 1)
    sums = centred.cumsum(axis=1)[:, 1:-2]
    between = sums**2 * (1 / counts + 1 / (size - counts))
    return between / (centred**2).sum(axis=1, keepdims=True)


MAX_MODIFIED_Z = 3.5  # Iglewicz and Hoaglin (1993), How to Detect and Handle Outliers


def find_outliers(values: Array, errors: Array) -> NDArray[np.bool_]:
    """Return which values [N] are far from the median, beside their median distance and beyond their error.

    The modified z score is 0.6745 |x - median| / MAD, which half of the values cannot move.
    """
    distances = np.abs(values - np.median(values))
    return (0.6745 * distances > MAX_MODIFIED_Z * np.median(distances)) & (distances > errors)
