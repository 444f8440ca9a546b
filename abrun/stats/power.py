"""Power of equivalence tests: how many pairs, or runs of each arm, a margin needs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from abrun.stats.equivalence import ALPHA, MIN_FOR_MISMATCH, sd_with_resolution
from abrun.stats.many_tests import VariancePrior

TARGET_POWER = 0.8
MAX_PAIRS = 1000  # search limit: larger sample sizes are reported as "more than 1000"
NUM_EXPERIMENTS = 8192  # simulated; the expected number of pairs is accurate to half a per cent
Array = NDArray[Any]
# Test of the means [N] of `count` pairs with their standard errors [N], at a level
MeanTest = Callable[[Array, Array, int, float], Array]
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(256)


@dataclass(frozen=True, slots=True, eq=False)
class Decisions:
    """Decisions of simulated experiments [N] on a claim at each analysis [C]."""

    matches: NDArray[np.bool_]  # [C, N]
    mismatches: NDArray[np.bool_]  # [C, N]


def sd_interval(sd: float, num_pairs: float, confidence: float = 0.9) -> tuple[float, float]:
    """Return the chi-square interval of an sd that was estimated from `num_pairs` normal differences."""
    dof = num_pairs - 1
    quantiles = special.chdtri(dof, np.array([0.5 - confidence / 2, 0.5 + confidence / 2]))
    low, high = sd * np.sqrt(dof / quantiles)
    return float(low), float(high)


def sd_upper_bound(sd: float, num_pairs: float, confidence: float) -> float:
    """Return the one-sided upper bound of an sd estimated from `num_pairs` normal differences."""
    return sd * math.sqrt((num_pairs - 1) / float(special.chdtri(num_pairs - 1, confidence)))


def sd_of_difference(sigma: float, correlation: float) -> float:
    """Return the sd of a paired difference between arms that each vary by `sigma` over seeds."""
    return sigma * math.sqrt(2 * (1 - correlation))


def welch_dof_per_run(sds: Sequence[float]) -> float:
    """Return Welch's degrees of freedom per run beyond the first, for arms with equally many runs."""
    sd_difference = math.hypot(*sds)
    weights = [(sd / sd_difference) ** 2 if sd_difference else 0.5 for sd in sds]
    return 1 / (weights[0] ** 2 + weights[1] ** 2)


def planning_sd(
    baseline: Array, treatment: Array, standard_error: float, resolution: float, *, paired: bool
) -> tuple[float, float]:
    """Return the sd of a difference and the degrees of freedom per pair, for `pairs_needed`.

    Of pairs by the standard error of their mean; of independent arms by their own sds.
    """
    if paired:
        return standard_error * math.sqrt(len(baseline)), 1.0
    sds = [sd_with_resolution(values, resolution) for values in (baseline, treatment)]
    return math.hypot(*sds), welch_dof_per_run(sds)


def count_like(num_pairs: int, dof: float, alpha: float = ALPHA) -> float:
    """Return how many pairs alone have a t-interval as wide as `num_pairs` with more degrees of freedom."""
    width = special.stdtrit(dof, 1 - alpha) / math.sqrt(num_pairs)
    counts = np.arange(num_pairs, num_pairs + 50, 0.1)
    return float(counts[special.stdtrit(counts - 1, 1 - alpha) / np.sqrt(counts) >= width].max())


def power_at(
    margin: float,
    sd_difference: float,
    num_pairs: int,
    alpha: float = ALPHA,
    true_difference: float = 0.0,
    dof_per_pair: float = 1.0,
    prior_dof: float = 0.0,
) -> float:
    """Return P(TOST passes) for normal differences, exact: see `tost_power`; approximate with a prior.

    For independent arms, `sd_difference` is the sd of the difference of one run of each arm, `num_pairs` the
    number of runs of each arm, and `dof_per_pair` their `welch_dof_per_run`.
    """
    if num_pairs < 2:
        return 0.0
    error = sd_difference / math.sqrt(num_pairs)
    return tost_power(margin, error, prior_dof + dof_per_pair * (num_pairs - 1), alpha, true_difference)


def tost_power(
    margin: float, standard_error: float, dof: float, alpha: float = ALPHA, true_difference: float = 0.0
) -> float:
    """Return P(TOST passes) for a normal mean difference with this standard error (approximate for Welch).

    TOST passes iff |mean| < margin - t * s / sqrt(n). Mean and s are independent, so the power is the normal
    probability of that event, integrated over the chi distribution of s. The usual normal approximation is
    too optimistic at the 3 to 10 pairs of a typical experiment.
    """
    if standard_error == 0:
        return float(abs(true_difference) < margin)
    scaled_margin, scaled_difference = margin / standard_error, true_difference / standard_error
    critical = special.stdtrit(dof, 1 - alpha)
    # u = s / sd. Above scaled_margin / critical the interval is wider than the margin zone and cannot fit.
    low = math.sqrt(2 * special.gammaincinv(dof / 2, 1e-15) / dof)
    high = min(scaled_margin / critical, math.sqrt(2 * special.gammainccinv(dof / 2, 1e-15) / dof))
    if high <= low:
        return 0.0
    u = low + (high - low) * (_NODES + 1) / 2
    max_mean = scaled_margin - critical * u
    pass_probability = special.ndtr(max_mean - scaled_difference) - special.ndtr(
        -max_mean - scaled_difference
    )
    half = dof / 2
    log_density = (
        math.log(2) + half * math.log(half) - math.lgamma(half) + special.xlogy(dof - 1, u) - half * u**2
    )
    integral = (high - low) / 2 * np.sum(_WEIGHTS * pass_probability * np.exp(log_density))
    return float(np.clip(integral, 0.0, 1.0))


def simulate_tost_decisions(
    margin: float,
    sd_difference: float,
    counts: Sequence[int],
    levels: Sequence[float],
    beyond_levels: Sequence[float],
    *,
    difference: float = 0.0,
    stream: int = 0,
    prior: VariancePrior | None = None,
) -> Decisions:
    """Return what paired TOST and the minimum-effect test decide at each of `counts` pairs.

    `levels` [C] and `beyond_levels` [C] are their alpha at each count, `difference` the true one. Experiments
    of different `stream` are independent. `prior` moderates the variance, as in the verdict.
    """
    rng = np.random.default_rng([0, stream])
    draws = difference + sd_difference * rng.standard_normal((NUM_EXPERIMENTS, counts[-1]))

    def moderate(error: Array, count: int) -> tuple[Array, Array | float]:
        if prior is None:
            return error, count - 1
        variance, dof = prior.moderate_alike(count * error**2, count - 1)
        return np.sqrt(variance / count), dof

    def matches(mean: Array, error: Array, count: int, alpha: float) -> Array:
        error, dof = moderate(error, count)
        return np.abs(mean) + special.stdtrit(dof, 1 - alpha) * error < margin

    def differs(mean: Array, error: Array, count: int, alpha: float) -> Array:
        error, dof = moderate(error, count)
        with np.errstate(divide="ignore", invalid="ignore"):
            tails = [special.stdtr(dof, (end * margin - np.abs(mean)) / error) for end in (1, -1)]
        return np.add(*tails) < alpha

    return decide_at(draws, counts, levels, beyond_levels, matches, differs)


def decide_at(
    draws: Array,  # [N, P] the difference of each pair
    counts: Sequence[int],  # [C] pairs at each analysis
    levels: Sequence[float],  # [C] alpha of a match
    beyond_levels: Sequence[float],  # [C] alpha of a mismatch
    matches: MeanTest,
    differs: MeanTest,
) -> Decisions:
    """Return what two tests of a mean decide at each analysis of simulated experiments."""
    decided: tuple[list[Any], list[Any]] = [], []
    for count, *alphas in zip(counts, levels, beyond_levels, strict=True):
        mean, error = draws[:, :count].mean(axis=1), draws[:, :count].std(axis=1, ddof=1) / math.sqrt(count)
        decided[0].append(matches(mean, error, count, alphas[0]))
        decided[1].append(differs(mean, error, count, alphas[1]) & (count >= MIN_FOR_MISMATCH))
    return Decisions(*map(np.array, decided))


def pairs_needed(
    margin: float,
    sd_difference: float,
    alpha: float = ALPHA,
    max_pairs: int = MAX_PAIRS,
    true_difference: float = 0.0,
    dof_per_pair: float = 1.0,
    prior_dof: float = 0.0,
) -> int | None:
    """Return the smallest number of pairs, or of runs of each arm, with 80 % power; see `power_at`.

    Returns None above `max_pairs`, and if the difference is not smaller than the margin.
    """
    if abs(true_difference) >= margin:
        return None
    return find_min_pairs(
        lambda pairs: power_at(margin, sd_difference, pairs, alpha, true_difference, dof_per_pair, prior_dof),
        max_pairs=max_pairs,
    )


def pairs_needed_range(
    margin: float,
    sd_difference: float,
    num_pairs: float,
    alpha: float = ALPHA,
    dof_per_pair: float = 1.0,
    prior_dof: float = 0.0,
) -> tuple[int | None, int | None]:
    """Return `pairs_needed` at both ends of the 90 % interval of an sd from `num_pairs` differences."""
    low, high = (
        pairs_needed(margin, sd, alpha=alpha, dof_per_pair=dof_per_pair, prior_dof=prior_dof)
        for sd in sd_interval(sd_difference, num_pairs)
    )
    return low, high


def find_min_pairs(
    power_of_pairs: Callable[[int], float], target: float = TARGET_POWER, max_pairs: int = MAX_PAIRS
) -> int | None:
    """Return the smallest number of pairs with power `target`; None above `max_pairs`."""
    low, high = 1, 2
    while power_of_pairs(high) < target:
        if high >= max_pairs:
            return None
        low, high = high, min(2 * high, max_pairs)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power_of_pairs(middle) >= target else (middle, high)
    return high
