"""MLPerf's test of convergence against reference convergence points (RCPs).

A reference point is a set of runs at one batch size, each with the samples (or epochs) until it converged.
A submission passes if its mean is not significantly below the reference's mean: a one-sided t-test at 5 %
with pooled variance, in which the submission is assumed to vary like the reference. Means are olympic: the
fastest and the slowest run do not count. Source of all rules: mlcommons/logging,
mlperf_logging/rcp_checker/rcp_checker.py (version 4.1.59). What differs from a textbook test is kept, since
the purpose is the same answer: the sd is that of all runs with divisor n although the mean is trimmed, and
the limit is bisected to 0.0001.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

ALPHA = 0.05
TOLERANCE = 1e-4  # of the bisection for the limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencePoint:
    """Convergence of the reference at one batch size, in samples or epochs."""

    batch_size: float
    mean: float  # olympic
    sd: float  # of all runs, divisor n
    limit: float  # smallest accepted olympic mean of a submission
    values: tuple[float, ...] = ()  # of its runs; empty: interpolated between two batch sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Numbers that the rules fix for a benchmark."""

    num_runs: int  # of a submission
    num_trimmed: int = 1  # fastest and slowest runs each that do not count
    allowance: float = 0.0  # subtracted from every limit


def olympic_mean(values: Sequence[float], num_trimmed: int) -> float:
    """Return the mean without the `num_trimmed` smallest and largest values.

    Raises ValueError if none is left.
    """
    counted = sorted(values)[num_trimmed : len(values) - num_trimmed]
    if not counted:
        raise ValueError(f"expected more than {2 * num_trimmed} values; got {len(values)}")
    return float(np.mean(counted))


def make_point(batch_size: float, values: Sequence[float], rules: Rules) -> ReferencePoint:
    mean, sd = olympic_mean(values, rules.num_trimmed), float(np.std(sorted(values)))
    num_counted = len(values) - 2 * rules.num_trimmed
    return ReferencePoint(
        batch_size=batch_size,
        mean=mean,
        sd=sd,
        limit=_find_limit(mean, sd, num_counted, rules),
        values=tuple(sorted(values)),
    )


def _find_limit(mean: float, sd: float, num_reference: int, rules: Rules) -> float:
    """Return the smallest mean of a submission that the t-test does not reject; the mean itself at sd 0.

    With pooled variance and equal sd, it is mean - t(0.95, n + m - 2) * sd * sqrt(1 / n + 1 / m).
    """
    if sd == 0:
        return mean
    num_submitted = rules.num_runs - 2
    quantile = float(special.stdtrit(num_reference + num_submitted - 2, 1 - ALPHA))
    exact = mean - quantile * sd * math.sqrt(1 / num_reference + 1 / num_submitted)
    low, high = 0.0, mean
    while high - low > TOLERANCE:
        middle = (low + high) / 2
        low, high = (low, middle) if middle > exact else (middle, high)
    return (low + high) / 2


def interpolate(batch_size: float, low: ReferencePoint, high: ReferencePoint, rules: Rules) -> ReferencePoint:
    """Return the point between two others: mean and sd are linear in the batch size."""
    sizes = [low.batch_size, high.batch_size]
    mean = float(np.interp(batch_size, sizes, [low.mean, high.mean]))
    sd = float(np.interp(batch_size, sizes, [low.sd, high.sd]))
    limit = _find_limit(mean, sd, 2 * rules.num_runs, rules)
    return ReferencePoint(batch_size=batch_size, mean=mean, sd=sd, limit=limit)


def prune(points: Sequence[ReferencePoint], rules: Rules) -> list[ReferencePoint]:
    """Return the points that count.

    Batch sizes below that of the fastest point do not count, nor does a point that is slower than the line
    between its neighbours.
    """
    ordered = sorted(points, key=lambda point: point.batch_size)
    fastest = min(ordered, key=lambda point: point.mean)
    counted = [point for point in ordered if point.batch_size >= fastest.batch_size]
    index = 1
    while index < len(counted) - 1:
        predicted = interpolate(counted[index].batch_size, counted[index - 1], counted[index + 1], rules)
        if counted[index].mean > predicted.mean:
            del counted[index]
        else:
            index += 1
    sizes = {point.batch_size for point in counted}
    return [point for point in ordered if point.batch_size in sizes]


def passes(mean: float, point: ReferencePoint, rules: Rules) -> bool:
    """Return whether a submission's olympic mean is not below the limit, up to rounding as in the source."""
    return mean >= point.mean / (point.mean / (point.limit - rules.allowance))


def failure_rate_of_equals(num_reference: int, rules: Rules, confidence: float = 0.95) -> tuple[float, float]:
    """Return how often a submission like the reference may fail if all reference runs are identical.

    If none of n runs converged an evaluation earlier, up to 1 - 0.05**(1 / n) of all runs may do so (exact
    binomial bound, 95 %). The limit is then the common value, and a submission's olympic mean is below it as
    soon as more runs are earlier than are trimmed. Returns that share of runs, and the rate of failure.
    """
    share = 1 - (1 - confidence) ** (1 / num_reference)
    allowed = range(rules.num_trimmed + 1)
    num_runs = rules.num_runs
    passing = sum(math.comb(num_runs, k) * share**k * (1 - share) ** (num_runs - k) for k in allowed)
    return share, 1 - passing
