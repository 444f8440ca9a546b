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
from typing import Any

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
MIN_EXCESS = 0.2  # variance of the logarithms of true variances: sds that differ by a factor of 1.25
TINY_P = 0.001


@dataclass(frozen=True, slots=True)
class VariancePrior:
    """The common distribution of the variances: its scale, and its weight in degrees of freedom."""

    variance: float
    dof: float

    def moderate(self, variance: float, dof: float) -> tuple[float, float]:
        """Return the moderated variance of one sample, and its degrees of freedom."""
        total = self.dof + dof
        return (self.dof * self.variance + dof * variance) / total, total

    def moderate_alike(self, variance: ArrayLike, dof: float) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return `moderate` of variances that are like this distribution, and any other with its own dof.

        Unlike: noisier by the F test at 5 %, or of another kind, such as runs that differ by rounding alone:
        below a quantile so small that leaving out the prior costs a level of 0.05 nothing.
        """
        variances, total = np.asarray(variance, float), self.dof + dof
        low, high = (special.fdtri(dof, self.dof, p) * self.variance for p in (TINY_P, 0.95))
        is_like = (low < variances) & (variances <= high)
        moderated = (self.dof * self.variance + dof * variances) / total
        return np.where(is_like, moderated, variances), np.where(is_like, total, dof)


def fit_prior(variances: Sequence[float], dofs: Sequence[float]) -> VariancePrior | None:
    """Fit the distribution of the variances; None for fewer than MIN_SAMPLES positive, finite ones."""
    centred, noise = _centre_logs(variances, dofs)
    if len(centred) < MIN_SAMPLES:
        return None
    excess = float(centred.var(ddof=1)) - noise
    return _make_prior(float(centred.mean()), max(excess, 1e-6))


def predict_variance(variances: Sequence[float], dofs: Sequence[float]) -> VariancePrior | None:
    """Return the distribution of the variance of the next sample; None without a positive, finite one.

    With K samples the mean of their logarithms errs by (excess + noise) / K, which widens the distribution,
    and an excess that few samples estimate is at least MIN_EXCESS. One sample of 2 degrees of freedom then
    counts as 1.7, and no number of samples is too small (simulated in `tests/bench/bench_history.py`).
    """
    centred, noise = _centre_logs(variances, dofs)
    if not len(centred):
        return None
    excess = max(float(centred.var(ddof=1)) - noise if len(centred) > 1 else 0.0, MIN_EXCESS)
    return _make_prior(float(centred.mean()), excess + (excess + noise) / len(centred))


def _centre_logs(variances: Sequence[float], dofs: Sequence[float]) -> tuple[NDArray[np.float64], float]:
    """Return unbiased logarithms of the true variances, and the mean variance of their sampling noise.

    Runs without spread have no logarithm and are left out.
    """
    samples, freedom = np.asarray(variances, float), np.asarray(dofs, float)
    is_usable = (samples > 0) & np.isfinite(samples)
    samples, halves = samples[is_usable], freedom[is_usable] / 2
    noise = float(special.polygamma(1, halves).mean()) if len(samples) else 0.0
    return np.log(samples) - special.digamma(halves) + np.log(halves), noise


def _make_prior(mean_log: float, log_variance: float) -> VariancePrior:
    """Return the distribution whose logarithm has this mean and variance."""
    dof = 2 * _invert_trigamma(log_variance)
    variance = math.exp(mean_log + float(special.digamma(dof / 2)) - math.log(dof / 2))
    return VariancePrior(variance, min(dof, MAX_PRIOR_DOF))


def _invert_trigamma(value: float) -> float:
    """Return x with trigamma(x) = value, by bisection; trigamma falls from infinity to 0."""
    low, high = 1e-6, 1e6
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if special.polygamma(1, middle) > value else (low, middle)
    return high
