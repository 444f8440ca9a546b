"""Copies among curves: which two of R runs [R, S] are one run but for noise."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from abrun.stats.series import Array

COPIED = 0.99  # correlation of two runs' step changes; distinct seeds of the evidence reach 0.76
REPEATED = 0.9999  # the same where every run moves alike: noise below 1 % of what they share
MIN_STEPS = 10  # and as many distinct values: of fewer, chance gives equal changes
_CLIP = 3.0  # standard deviations: one jump that all seeds make is no copy
_ORDERS = (1, 2, 3)  # of differences: a trend that all seeds follow is gone from the third


def copied(values: Array) -> NDArray[np.bool_]:
    """Return which two curves of [R, S] are one run but for noise [R, R]: changes of every order agree.

    Seeds that see the same batches agree as well, in all runs. So changes must agree after removing the mean
    change of all runs, too, unless almost nothing but that mean is left.
    """
    num_runs, known = len(values), has_detail(values)
    if not known.any():
        return np.zeros((num_runs, num_runs), bool)
    whole, residual = np.ones((num_runs, num_runs)), np.ones((num_runs, num_runs))
    for order in _ORDERS:
        changes = _clipped_changes(values[known], order)
        changes -= changes.mean(axis=-1, keepdims=True)
        shared = changes.mean(axis=0)
        squares = float(shared @ shared)
        loadings = changes @ shared / squares if squares else np.zeros(len(changes))
        inside = np.ix_(known, known)
        whole[inside] = np.minimum(whole[inside], _cosines(changes))
        residual[inside] = np.minimum(residual[inside], _cosines(changes - np.outer(loadings, shared)))
    alike = ((whole > COPIED) & (residual > COPIED)) | (whole > REPEATED)
    return alike & known[:, None] & known[None, :]


def _cosines(changes: Array) -> Array:
    """Return the cosines [R, R] of the angles between rows [R, S]; 0 for a row of zeros."""
    norms = np.sqrt((changes**2).sum(axis=-1))
    scaled = changes / np.where(norms > 0, norms, np.inf)[:, None]
    return scaled @ scaled.T


def has_detail(values: Array) -> NDArray[Any]:
    """Return which curves [R] of [R, S] can tell runs apart: long, finite, neither discrete nor constant."""
    if values.shape[-1] < MIN_STEPS:
        return np.zeros(len(values), bool)
    finite = np.asarray(np.isfinite(values).all(axis=-1))
    sorted_values = np.sort(np.where(finite[:, None], values, 0.0), axis=-1)
    distinct = 1 + (np.diff(sorted_values, axis=-1) > 0).sum(axis=-1)
    changes = np.diff(np.where(finite[:, None], values, 0.0), axis=-1)
    return finite & (distinct >= MIN_STEPS) & (_spread(changes)[..., 0] > 0)


def _clipped_changes(values: Array, order: int) -> Array:
    """Differences [R, S - order], none further than `_CLIP` robust standard deviations from their median."""
    changes = np.diff(np.where(np.isfinite(values), values, 0.0), order, axis=-1)
    middle, spread = np.median(changes, axis=-1, keepdims=True), _CLIP * _spread(changes)
    return np.clip(changes, middle - spread, middle + spread)


def _spread(changes: Array) -> Array:
    """Median absolute deviation [R, 1], scaled to the standard deviation of a normal law."""
    middle = np.median(changes, axis=-1, keepdims=True)
    return 1.4826 * np.median(np.abs(changes - middle), axis=-1, keepdims=True)
