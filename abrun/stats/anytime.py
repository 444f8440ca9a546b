"""Margins that are chosen after looking: intervals of a mean that hold at all sample sizes at once.

A margin may be chosen after the data if it bounds the true difference with 95 % confidence (Koobs and Koning
2026, arXiv:2603.16213). The farther end M of the 90 % t-interval does: the true d lies on one side of 0, so
that |d| <= M is false with at most 5 %. A reader who adds pairs and stops at the most favourable number of
them needs an interval that holds at every number, a confidence sequence.

The likelihood ratio of the t statistics of growing samples, "the mean is delta sds, delta > 0 half-normal of
scale tau" against "it is 0", is a martingale (Lai 1976; Wang and Ramdas 2023, arXiv:2310.03722, for delta of
both signs). With r = t / sqrt(n - 1 + t^2), k = n tau^2 / (1 + n tau^2), and F of Student's t with n degrees
of freedom, it is

    E(n, t) = 2 (1 + n tau^2)^(-1/2) (1 - k r^2)^(-n/2) F(sqrt(n k) r / sqrt(1 - k r^2)).

By Ville's inequality it ever reaches 20 with at most 5 %. At whole numbers of pairs it overshoots, so that
the threshold is calibrated: `tests/bench/bench_after_looking.py` simulates up to 1,000 pairs, and bounds the
rest by Ville. tau makes the intervals short at 5 to 10 pairs; below MIN_PAIRS, E stays below the threshold.
"""

import math
from functools import cache

from scipy import special

TAU = 1.2
THRESHOLD = 15.5
MIN_PAIRS = 4


def anytime_evidence(num_pairs: int, t: float) -> float:
    """Return E(n, t), the likelihood ratio of a mean above 0 against 0; t may be infinite."""
    growth = 1 + num_pairs * TAU**2
    k = 1 - 1 / growth
    r = math.copysign(1.0, t) if math.isinf(t) else t / math.sqrt(num_pairs - 1 + t * t)
    rest = 1 - k * r * r
    probability = float(special.stdtr(num_pairs, math.sqrt(num_pairs * k / rest) * r))
    return 2 * probability * math.exp(-0.5 * math.log(growth) - 0.5 * num_pairs * math.log(rest))


@cache
def anytime_quantile(num_pairs: int) -> float:
    """Return c so that mean + c standard errors stays above the true mean at all n, with 95 % confidence.

    Infinite below MIN_PAIRS.
    """
    if num_pairs < MIN_PAIRS:
        return math.inf
    low, high = 0.0, 10.0  # c is 5.6 at MIN_PAIRS, 3.0 from 20 pairs on
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (low, middle) if anytime_evidence(num_pairs, middle) >= THRESHOLD else (middle, high)
    return high


def anytime_interval(mean: float, standard_error: float, num_pairs: int) -> tuple[float, float]:
    """Return the interval of which each end holds at all numbers of pairs with 95 % confidence.

    Infinite below MIN_PAIRS, and for equal values: they do not show how far others may lie.
    """
    if num_pairs < MIN_PAIRS or not standard_error > 0:
        return -math.inf, math.inf
    half_width = anytime_quantile(num_pairs) * standard_error
    return mean - half_width, mean + half_width
