"""Ratio of the largest of some deviations to the largest of others, for noise floors measured by reruns."""

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy import special

_NUM_NODES = 2000  # dense near 0, which determines the tail of the ratio


def maxima_ratio_quantile(num_pairs: int, num_reruns: int, alpha: float) -> float:
    """Return the 1 - alpha quantile of max |x_1..n| / max |y_1..m| for independent normal x, y with equal sd.

    P(ratio > c) is the integral of 1 - F(c y)^n over the distribution of the largest of m, F the half-normal,
    by quadrature and bisection: exact. With one rerun it is in the thousands, with three about twenty.
    """
    nodes, weights = _quadrature_nodes()
    share = (nodes + 1) / 2
    largest = math.sqrt(2) * special.erfinv(share ** (1 / num_reruns))  # quantiles of max |y|

    def beyond(factor: float) -> float:
        inside = special.erf(factor * largest / math.sqrt(2)) ** num_pairs
        return float(np.sum(weights * (1 - inside)) / 2)

    low, high = 0.0, 1.0
    while beyond(high) > alpha and high < 1e9:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if beyond(middle) > alpha else (low, middle)
    return high


@cache
def _quadrature_nodes() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return Gauss-Legendre nodes and weights. They take a second to compute, and only reruns need them."""
    return np.polynomial.legendre.leggauss(_NUM_NODES)
