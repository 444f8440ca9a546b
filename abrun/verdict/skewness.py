"""Skewed samples: whether values look unlike normal ones, which every t-test takes them to be."""

import math
from collections.abc import Mapping
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from abrun.reasons import Code, Reason
from abrun.stats.equivalence import sd_with_resolution

ARMS: tuple[str, str] = ("baseline", "treatment")  # names of samples
DIFFERENCES, VALUES = "differences", "values"
HARMLESS_SHARE = (
    0.1  # of a margin: what a single value may be off without a warning, were all others the same
)
_NUM_SAMPLES = 40_000  # of normal values


def find_skew(
    samples: Mapping[str, ArrayLike], *, step: float, min_sd: float, level: float = 0.05
) -> Reason | None:
    """Name a sample that is skewed beyond what normal samples are by chance, `level` of the time for each.

    Values that move in steps too wide to tell (see `skewness`) are warned of where one value is far off (see
    `far_off`). So are all where two of five or more are: once in 60 times for normal values, or for a t with
    5 degrees of freedom.
    """
    for num_outliers, (name, values) in product((1, 2), samples.items()):
        measured = skewness_and_p(values) if num_outliers == 1 else None
        p_value = measured[1] if measured else outlier_p(values, step, min_sd, num_outliers)
        if p_value is not None and p_value < level:
            how = (measured[0], None) if measured else (None, num_outliers)
            return Code.SKEWED(sample=name, skewness=how[0], num_far=how[1], p=p_value)
    return None


def skewness_and_p(values: ArrayLike) -> tuple[float, float] | None:
    """The sample skewness and its two-sided p among normal samples of that size: simulated, rounded up.

    None below four: of three values every skewness below 0.71 is as likely. And None where no more than half
    of the values are distinct, as of counts: among those samples are often skewed, though the law is not.
    """
    sample = np.asarray(values, float)
    gaps = np.diff(np.sort(sample))
    if len(sample) < 4 or 1 + np.sum(gaps > 1e-9 * np.ptp(sample)) <= len(sample) / 2:
        return None
    measured, normal_skewness = float(_sample_skewness(sample)), _skewness_of_normal(len(sample))
    count = len(normal_skewness) - int(np.searchsorted(normal_skewness, abs(measured)))
    upper_count = count + 2 * math.sqrt(count)
    return measured, min(
        1.0, (1 + upper_count) / (1 + len(normal_skewness))
    )  # never 0 (Phipson and Smyth 2010)


def outlier_p(values: ArrayLike, step: float, min_sd: float, num_outliers: int = 1) -> float | None:
    """The p, among normal samples of that size, of `num` values on one side as far from all others as these.

    For one so far that the others look alike, which `skewness` takes for counts; and for two, of which few
    values hardly look skewed. The distance of the nearest from the others' mean, in their sd, gives a t; any
    `num` values may be those (Bonferroni). The sd counts as no less than `least`, nor than what values in
    steps of `step` leave open. None where fewer than three are left.
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
    # Of values that are closer than a step, it is no more than how far off the nearest is.
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
