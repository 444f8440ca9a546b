"""Many tests or samples at once: false discoveries, largest deviations, variances.

False discovery rate: Benjamini and Hochberg's procedure over many independent tests.

Benjamini and Hochberg (1995, doi:10.1111/j.2517-6161.1995.tb02031.x) bound the expected share of false
rejections among all rejections under independence, and Benjamini and Yekutieli (2001,
doi:10.1214/aos/1013699998) also under positive dependence. Their bound for any dependence divides the level
by the harmonic sum, 5.6 for 150 tests.

Ratio of the largest of some deviations to the largest of others, for noise floors measured by reruns.

Variances of many small samples, each moderated by all others (empirical Bayes).

Smyth (2004, doi:10.2202/1544-6115.1027): true variances follow a scaled inverse chi-square distribution,
fitted by the mean and variance of the logarithms of the sample variances. The moderated variance then has the
degrees of freedom of the sample plus those of the distribution.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special


def benjamini_hochberg(p_values: ArrayLike) -> list[float]:
    """Return adjusted p-values: the smallest false discovery rate at which each test is rejected.

    The i-th smallest of m p-values times m / i, made monotone from the largest down, at most 1.
    """
    raw = np.asarray(p_values, float)
    order = np.argsort(raw, kind="stable")[::-1]
    ranks = np.arange(len(raw), 0, -1)
    adjusted = np.empty_like(raw)
    adjusted[order] = np.minimum(np.minimum.accumulate(raw[order] * len(raw) / ranks), 1.0)
    return adjusted.tolist()


def p_of_failures(num_failed: int, num_runs: int, rate: float) -> float:
    """Return P(at least `num_failed` of `num_runs` fail) if each fails with probability `rate`."""
    return float(special.bdtrc(num_failed - 1, num_runs, rate)) if num_failed else 1.0


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


MIN_SAMPLES = 10
# The fit overrates how alike the samples are if a few vary far more than the rest. With 4 degrees of freedom,
# three pairs find 18 of 150 recipes with a power of 0.9 to 1 instead of 0.1 to 0.2 alone, and more would add
# nothing; the simulated false discovery rate stays at 0.06 even if a tenth varies five times as much.
MAX_PRIOR_DOF = 4.0


@dataclass(frozen=True, slots=True)
class VariancePrior:
    """The common distribution of the variances: its scale, and its weight in degrees of freedom."""

    variance: float
    dof: float

    def moderate(self, variance: float, dof: float) -> tuple[float, float]:
        """Return the moderated variance of one sample, and its degrees of freedom."""
        total = self.dof + dof
        return (self.dof * self.variance + dof * variance) / total, total


def fit_prior(variances: Sequence[float], dofs: Sequence[float]) -> VariancePrior | None:
    """Fit the distribution of the variances; None for fewer than MIN_SAMPLES positive, finite ones."""
    samples, freedom = np.asarray(variances, float), np.asarray(dofs, float)
    is_usable = (samples > 0) & np.isfinite(samples)  # runs without spread have no logarithm
    samples, freedom = samples[is_usable], freedom[is_usable]
    if len(samples) < MIN_SAMPLES:
        return None
    centred = np.log(samples) - special.digamma(freedom / 2) + np.log(freedom / 2)
    excess = float(centred.var(ddof=1) - special.polygamma(1, freedom / 2).mean())
    dof = 2 * _invert_trigamma(max(excess, 1e-6))
    log_variance = float(centred.mean() + special.digamma(dof / 2) - math.log(dof / 2))
    return VariancePrior(math.exp(log_variance), min(dof, MAX_PRIOR_DOF))


def _invert_trigamma(value: float) -> float:
    """Return x with trigamma(x) = value, by bisection; trigamma falls from infinity to 0."""
    low, high = 1e-6, 1e6
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if special.polygamma(1, middle) > value else (low, middle)
    return high
