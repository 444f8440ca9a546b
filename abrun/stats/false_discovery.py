"""False discovery rate: Benjamini and Hochberg's procedure over many independent tests.

Benjamini and Hochberg (1995, doi:10.1111/j.2517-6161.1995.tb02031.x) bound the expected share of false
rejections among all rejections under independence, and Benjamini and Yekutieli (2001,
doi:10.1214/aos/1013699998) also under positive dependence. Their bound for any dependence divides the level
by the harmonic sum, 5.6 for 150 tests.
"""

import numpy as np
from numpy.typing import ArrayLike
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
