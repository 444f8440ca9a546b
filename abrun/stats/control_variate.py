"""Unused seeds of a frozen reference as a control variate of the paired difference.

A reference of N seeds of which n have a later run tells more of its mean than those n do. The estimate
mean(t - c b) - (1 - c) mean(b of the other seeds) has the same expectation as mean(t - b) for every fixed c
(control variates: Lavenberg and Welch 1981, doi:10.1287/mnsc.27.3.322).
Pure functions on arrays.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from abrun.stats.equivalence import ALPHA, Tost, paired_tost, tost_of

CORRELATION = 0.5  # of paired runs, assumed: c is fixed before the runs, or it would cost its own error
MOST_FREEDOM = 1.1  # times n - 1: Satterthwaite's freedom is itself estimated, from two of three pairs
NARROWER, WIDENED = 0.5, 1.5  # a pairs' standard error below that share replaces the other, times that

Array = NDArray[np.float64]


def estimate(
    baseline: Array, treatment: Array, unused: Array, correlation: float = CORRELATION
) -> tuple[Array, Array, Array]:
    """Return mean difference, standard error and freedom, of pairs [..., n] and unused seeds [..., m].

    `correlation` of the arms over seeds makes the best c: n/N + m/N correlation. The freedom is
    Satterthwaite's of both variances, at most MOST_FREEDOM (n - 1). Arms that correlate more closely than
    assumed are better compared by their pairs alone. That is seen only by the pairs' small standard error,
    which is wider then: one that is chosen for being small is too small.
    """
    num, others = baseline.shape[-1], unused.shape[-1]
    total = num + others
    c = (num + others * correlation) / total
    adjusted = treatment - c * baseline
    mean = adjusted.mean(axis=-1) - (1 - c) * unused.mean(axis=-1)
    of_pairs = adjusted.var(axis=-1, ddof=1) / num
    reference = np.concatenate([baseline, unused], axis=-1)
    of_unused = (1 - c) ** 2 * reference.var(axis=-1, ddof=1) / others
    variance = np.maximum(of_pairs + of_unused, 1e-300)
    share = of_pairs / variance
    freedom = 1 / (share**2 / (num - 1) + (1 - share) ** 2 / (total - 1))
    freedom, error = np.minimum(freedom, MOST_FREEDOM * (num - 1)), np.sqrt(variance)
    differences = treatment - baseline
    of_differences = differences.std(axis=-1, ddof=1) / np.sqrt(num)
    pairs = (of_differences < NARROWER * error) & (num > 2)  # the spread of two says too little
    return (
        np.where(pairs, differences.mean(axis=-1), mean),
        np.where(pairs, np.maximum(WIDENED * of_differences, 1e-150), error),
        np.where(pairs, num - 1.0, freedom),
    )


def control_variate_tost(
    baseline: ArrayLike,  # [n] one summary a pair
    treatment: ArrayLike,  # [n]
    unused: ArrayLike,  # [m] of the reference's other seeds
    margin: float,
    alpha: float = ALPHA,
    correlation: float = CORRELATION,
) -> Tost:
    """TOST of |mean(treatment - baseline)| < margin with the reference's unused seeds.

    The sd of the difference and the correlation are those of the pairs, as of `paired_tost`.
    """
    left, right, others = (np.asarray(values, float) for values in (baseline, treatment, unused))
    pairs = paired_tost(left, right, margin, alpha)
    mean, error, freedom = map(float, estimate(left, right, others, correlation))

    def tail(sign: int, share: float) -> float:
        return float(special.stdtr(freedom, (sign * mean - share) / error))

    error_and_freedom, rho = (error, freedom), pairs.pair_correlation
    sd = pairs.sd_difference
    return tost_of(mean, sd, error_and_freedom, tail, margin, alpha, absolute=True, correlation=rho)
