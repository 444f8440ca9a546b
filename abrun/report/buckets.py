"""Bucketing of long runs for drawing.

A run shows the smallest and largest value of each bucket, so that no spike is lost. A mean over runs shows
the mean of each bucket, so that it stays readable.
"""

import numpy as np
from numpy.typing import NDArray

from abrun.stats.series import Array, Steps

NUM_BUCKETS = 250


def bucket_indices(num_steps: int, num_buckets: int = NUM_BUCKETS) -> NDArray[np.int64] | None:
    """Return the step indices of each bucket, [B, W]; None if there are too few steps to need buckets.

    A bucket shorter than W repeats its last index.
    """
    if num_steps <= 2 * num_buckets:
        return None
    edges = np.linspace(0, num_steps, num_buckets + 1).astype(np.int64)
    width = int(np.diff(edges).max())
    return np.minimum(edges[:-1, None] + np.arange(width), edges[1:, None] - 1)


def bucket_extremes(values: Array, buckets: NDArray[np.int64]) -> Array:
    """Return the two extremes of each bucket as they occurred, [R, S] -> [R, 2 B]; NaN if it is empty."""
    bucketed = values[:, buckets]
    missing = np.isnan(bucketed)
    smallest = np.where(missing, np.inf, bucketed).argmin(axis=-1)
    largest = np.where(missing, -np.inf, bucketed).argmax(axis=-1)
    order = np.stack([np.minimum(smallest, largest), np.maximum(smallest, largest)], axis=-1)
    return np.take_along_axis(bucketed, order, axis=-1).reshape(len(values), -1)


def bucket_steps(steps: Steps, buckets: NDArray[np.int64]) -> Steps:
    """Return the steps at which the two values of each bucket are drawn, [S] -> [2 B].

    The first and last step stay, because marks are drawn at them.
    """
    width = buckets.shape[1]
    positions = buckets[:, [width // 4, 3 * width // 4]].reshape(-1)
    positions[[0, -1]] = 0, len(steps) - 1
    return steps[positions]


def bucket_means(values: Array, buckets: NDArray[np.int64]) -> Array:
    """Return the mean of the finite values of each bucket, [R, S] -> [R, B]; NaN if it has none."""
    is_finite, starts = np.isfinite(values), buckets[:, 0]
    counts = np.add.reduceat(is_finite, starts, axis=-1, dtype=np.int64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        return np.add.reduceat(np.where(is_finite, values, 0.0), starts, axis=-1) / counts


def average_in_buckets(steps: Steps, values: Array) -> tuple[Steps, Array]:
    """Return steps [D] and rows [R, D] to draw: [S] and [R, S] unchanged, or bucket means of many steps."""
    buckets = bucket_indices(len(steps))
    if buckets is None:
        return steps, values
    return steps[buckets].mean(axis=-1).astype(steps.dtype), bucket_means(values, buckets)
