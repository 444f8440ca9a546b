"""Tests for skew and outliers: every t-test assumes values that look normal."""

import math
from collections.abc import Mapping
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from abrun.messages.codes import Code, Reason
from abrun.stats.equivalence import sd_with_resolution

ARMS: tuple[str, str] = ("baseline", "treatment")  # names of samples
DIFFERENCES, VALUES = "differences", "values"
HARMLESS_SHARE = 0.1  # share of a margin that one value may be off without a warning
_NUM_SAMPLES = 40_000  # simulated normal samples


def find_skew(
    samples: Mapping[str, ArrayLike], *, step: float, min_sd: float, level: float = 0.05
) -> Reason | None:
    """Return the first sample that is skewed beyond chance: `level` of normal samples each are reported too.

    Samples that move in steps too wide to tell (see `skewness_and_p`) are tested for one outlier (see
    `outlier_p`). All samples of five or more are also tested for two outliers, which one in 60 normal samples
    has, and one in 60 of a t with 5 degrees of freedom.
    """
    for num_outliers, (name, values) in product((1, 2), samples.items()):
        measured = skewness_and_p(values) if num_outliers == 1 else None
        p_value = measured[1] if measured else outlier_p(values, step, min_sd, num_outliers)
        if p_value is not None and p_value < level:
            skewness_or_outliers = (measured[0], None) if measured else (None, num_outliers)
            return Code.SKEWED(
                sample=name, skewness=skewness_or_outliers[0], num_far=skewness_or_outliers[1], p=p_value
            )
    return None


def skewness_and_p(values: ArrayLike) -> tuple[float, float] | None:
    """Return the sample skewness and its two-sided p among normal samples of that size (simulated, rounded
    up).

    None below four values: for three, every skewness below 0.71 is equally likely. None also if at most
    half of the values are distinct, as for counts: such samples are often skewed although their
    distribution is not.
    """
    sample = np.asarray(values, float)
    gaps = np.diff(np.sort(sample))
    if len(sample) < 4 or 1 + np.sum(gaps > 1e-9 * np.ptp(sample)) <= len(sample) / 2:
        return None
    measured, normal_skewness = float(_sample_skewness(sample)), _skewness_of_normal(len(sample))
    count = len(normal_skewness) - int(np.searchsorted(normal_skewness, abs(measured)))
    upper_count = count + 2 * math.sqrt(count)
    # The p-value is never 0 (Phipson and Smyth 2010).
    return measured, min(1.0, (1 + upper_count) / (1 + len(normal_skewness)))


def outlier_p(values: ArrayLike, step: float, min_sd: float, num_outliers: int = 1) -> float | None:
    """Return the p-value, among normal samples of that size, of `num_outliers` values this far off on one
    side.

    It covers what `skewness_and_p` misses: an outlier so far off that the others look like counts, and two
    outliers, which hardly skew a small sample. The distance of the nearest outlier from the others' mean,
    in their sd, gives a t; any `num_outliers` values may be the outliers (Bonferroni). The sd counts as at
    least `min_sd`, and as at least what steps of `step` leave open. None if fewer than three others
    remain.
    """
    sample = np.sort(np.asarray(values, float))
    if len(sample) < num_outliers + 3:
        return None
    is_low = np.median(sample) - sample[num_outliers - 1] > sample[-num_outliers] - np.median(sample)
    nearest, inliers = (
        (sample[num_outliers - 1], sample[num_outliers:])
        if is_low
        else (sample[-num_outliers], sample[:-num_outliers])
    )
    gaps = np.diff(inliers)
    distinct_gaps = gaps[gaps > 1e-9 * gaps.sum()]
    # If values lie closer than a step, they do not move in steps: the step adds nothing to their sd.
    in_steps = not len(distinct_gaps) or distinct_gaps.min() > step / 2
    sd = max(sd_with_resolution(inliers, step if in_steps else 0.0), min_sd)
    distance = abs(nearest - inliers.mean())
    if sd == 0:
        return float(distance == 0)
    t = distance / sd / math.sqrt(1 + 1 / len(inliers))
    return min(1.0, 2 * math.comb(len(sample), num_outliers) * float(special.stdtr(len(inliers) - 1, -t)))


@cache
def _skewness_of_normal(size: int) -> NDArray[np.float64]:
    return np.sort(np.abs(_sample_skewness(np.random.default_rng(0).standard_normal((_NUM_SAMPLES, size)))))


def _sample_skewness(values: NDArray[np.float64]) -> NDArray[np.float64]:
    centred = values - values.mean(axis=-1, keepdims=True)
    return (centred**3).mean(axis=-1) / (centred**2).mean(axis=-1) ** 1.5
