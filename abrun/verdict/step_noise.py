"""The share of step-to-step noise in the spread over seeds: what a longer window would save."""

from functools import cache

import numpy as np
from scipy import special

from abrun.experiment.power import StepNoise
from abrun.metric_names import default_reduction, default_transform
from abrun.recipe.claims import Primary
from abrun.stats.series import Array
from abrun.verdict.summaries import transformed

MIN_PAIRS, MIN_STEPS = 5, 15
MIN_SHARE = 0.2  # of the interval's lower end, below which nothing is said
MOST_STEPS = 200  # that the autocorrelation is read of
AUTOCORRELATIONS = np.linspace(0.0, 0.95, 39)  # between steps; less than none counts as none


def step_noise(baseline: Array, treatment: Array, primary: Primary) -> StepNoise | None:
    """Return the share of step noise in a claim's windows [P, W]; None of medians, too."""
    transform = primary.transform or default_transform(primary.metric)
    if default_reduction(primary.metric) != "mean":
        return None
    before, after = (transformed(values, transform, primary.metric) for values in (baseline, treatment))
    return noise_share(after - before)


def noise_share(differences: Array) -> StepNoise | None:
    """Return the share of paired differences [P, W], or None where it is not known to be worth saying.

    Each pair's differences lose their linear trend; their variance and first autocorrelation, pooled over
    pairs, give the variance of a window's mean (autoregression of order 1, unbiased by the detrending). The
    interval is F's. Twice the steps halve the share s, which is worth n s / (2 - s) more pairs.
    """
    num_pairs, num_steps = differences.shape
    if num_pairs < MIN_PAIRS or num_steps < MIN_STEPS:
        return None
    of_pairs = float(differences.mean(axis=1).var(ddof=1))
    if not of_pairs > 0:
        return None
    of_steps, effective = variance_of_mean(differences)
    ratio, freedom = of_steps / of_pairs, (num_pairs - 1, max(1.0, num_pairs * effective))
    low, high = (min(1.0, float(ratio * special.fdtri(*freedom, p))) for p in (0.05, 0.95))
    if low < MIN_SHARE:
        return None
    share = min(1.0, ratio)
    worth = [num_pairs * one / (2 - one) for one in (share, low, high)]
    return StepNoise(share=share, interval=(low, high), worth_pairs=(worth[0], worth[1], worth[2]))


def variance_of_mean(differences: Array) -> tuple[float, float]:
    """Return the variance of the mean of one row [R, W] by its noise, and the freedom that a row gives it."""
    num_steps = min(differences.shape[1], MOST_STEPS)
    rows = differences[:, -num_steps:]
    basis = _basis(num_steps)
    residuals = rows - rows @ basis @ basis.T
    squares = float((residuals**2).sum(axis=1).mean())
    if squares == 0:
        return 0.0, 1.0
    observed = float((residuals[:, 1:] * residuals[:, :-1]).sum(axis=1).mean()) / squares
    expected, sums, means = _by_autocorrelation(num_steps)
    at = int(np.abs(expected - observed).argmin())
    correlation = float(AUTOCORRELATIONS[at])
    variance = float(squares / sums[at] * means[at]) * num_steps / differences.shape[1]
    effective = (num_steps - 2) * (1 - abs(correlation)) / (1 + abs(correlation))
    return variance, effective / 2  # the autocorrelation is estimated, too


def _basis(num_steps: int) -> Array:
    """Return the orthonormal basis [W, 2] of level and trend."""
    time = np.arange(num_steps) - (num_steps - 1) / 2
    return np.column_stack([np.full(num_steps, num_steps**-0.5), time / np.sqrt(time @ time)])


@cache
def _by_autocorrelation(num_steps: int) -> tuple[Array, Array, Array]:
    """Return, at each of AUTOCORRELATIONS, what noise of variance 1 gives in W detrended steps.

    That is the ratio of the sums of lagged products and of squares, the sum of squares, and the variance of
    the mean before detrending.
    """
    apart = np.abs(np.subtract.outer(np.arange(num_steps), np.arange(num_steps)))
    basis = _basis(num_steps)
    ratios, sums, means = [], [], []
    for correlation in AUTOCORRELATIONS:
        covariance = correlation**apart
        half = covariance - basis @ (basis.T @ covariance)
        detrended = half - (half @ basis) @ basis.T
        sums.append(np.trace(detrended))
        ratios.append(np.trace(detrended, offset=1) / sums[-1])
        means.append(covariance.mean())
    return np.array(ratios), np.array(sums), np.array(means)
