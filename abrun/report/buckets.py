"""Long runs in buckets of steps: a run by a bucket's smallest and largest value, which shows every spike,
and a mean over runs by the bucket's mean, which can be read."""

import numpy as np
from numpy.typing import NDArray

from abrun.stats.series import Array, Steps

NUM_BUCKETS = 250


def bucket_indices(num_steps: int, num_buckets: int = NUM_BUCKETS) -> NDArray[np.int64] | None:
    """Which steps a bucket holds, [B, W], a shorter bucket repeating its last; None for few enough steps."""
    if num_steps <= 2 * num_buckets:
        return None
    edges = np.linspace(0, num_steps, num_buckets + 1).astype(np.int64)
    width = int(np.diff(edges).max())
    return np.minimum(edges[:-1, None] + np.arange(width), edges[1:, None] - 1)


def bucket_extremes(values: Array, buckets: NDArray[np.int64]) -> Array:
    """[R, S] -> [R, 2 B]: two values a bucket, in the order in which they occurred; NaN where it has none."""
    bucketed = values[:, buckets]
    missing = np.isnan(bucketed)
    smallest = np.where(missing, np.inf, bucketed).argmin(axis=-1)
    largest = np.where(missing, -np.inf, bucketed).argmax(axis=-1)
    order = np.stack([np.minimum(smallest, largest), np.maximum(smallest, largest)], axis=-1)
    return np.take_along_axis(bucketed, order, axis=-1).reshape(len(values), -1)


def bucket_steps(steps: Steps, buckets: NDArray[np.int64]) -> Steps:
    """[S] -> [2 B]: where a bucket's two values are drawn; the ends stay, for marks that stand at them."""
    width = buckets.shape[1]
    positions = buckets[:, [width // 4, 3 * width // 4]].reshape(-1)
    positions[[0, -1]] = 0, len(steps) - 1
    return steps[positions]


def bucket_means(values: Array, buckets: NDArray[np.int64]) -> Array:
    """[R, S] -> [R, B]: the mean of a bucket's finite values; NaN where it has none."""
    is_finite, starts = np.isfinite(values), buckets[:, 0]
    counts = np.add.reduceat(is_finite, starts, axis=-1, dtype=np.int64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        return np.add.reduceat(np.where(is_finite, values, 0.0), starts, axis=-1) / counts


def average_in_buckets(steps: Steps, values: Array) -> tuple[Steps, Array]:
    """Steps [D] and rows [R, D] to draw of [S] and [R, S]: themselves, or means where there are many."""
    buckets = bucket_indices(len(steps))
    if buckets is None:
        return steps, values
    return steps[buckets].mean(axis=-1).astype(steps.dtype), bucket_means(values, buckets)
