"""Tests of shares of steps: are more of the treatment's steps beyond a limit than of the baseline's?

M baseline runs and N treated ones (M pairs if paired), W steps.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from abrun.stats.equivalence import MIN_FOR_MISMATCH, estimate_difference, p_above

Array = NDArray[np.float64]
Hits = Sequence[Sequence[NDArray[np.bool_]]]  # arm, run, [W]
Direction = Literal["higher", "lower"]
MAX_NOISE = 3.0  # robust sds of step noise within which no step counts as apart


def p_value_of_increase(
    baseline: Array, treatment: Array, least_error: float = 0.0, *, paired: bool
) -> float:
    """Return the one-sided p-value of treatment > baseline; 1 with too few pairs, or runs, for a mismatch."""
    if min(len(baseline), len(treatment)) < MIN_FOR_MISMATCH:
        return 1.0
    mean, error, dof = estimate_difference(baseline, treatment, paired=paired)
    return p_above(mean, max(error, least_error), dof)


def p_value_of_more_hits(hits: Hits, *, paired: bool) -> float:
    """Return the one-sided p-value of a larger share of steps in the treatment, over the runs of both arms.

    The standard error is at least that of counting: three equal small counts would give an sd of 0.
    """
    arms = [np.concatenate(runs) for runs in hits]
    pooled = float(np.concatenate(arms).mean())
    counting_error = math.sqrt(pooled * (1 - pooled) * sum(1 / len(steps) for steps in arms))
    baseline, treatment = map(run_shares, hits)
    return p_value_of_increase(baseline, treatment, counting_error, paired=paired)


def run_shares(hits: Sequence[NDArray[np.bool_]]) -> Array:
    """Return the share of steps with a hit, for each run."""
    return np.array([run_hits.mean() for run_hits in hits])


def find_steps_apart(
    baseline: Array,  # [M, W]
    treatment: Array,  # [N, W]
    margin: float,
    direction: Direction | None = None,
    *,
    paired: bool,
) -> tuple[float, list[NDArray[np.bool_]], list[NDArray[np.bool_]]]:
    """Return a distance, and the steps of each run [M, W], [N, W] that lie further from the other seeds.

    The other seeds of a run are all baselines but that of its pair (of independent arms: but itself), at the
    same step, by their median. So both runs of a pair are measured against the same values, and of equal arms
    they lie apart equally often, whatever the noise and the trend. The distance is the margin, or that within
    which noise keeps nearly all steps of the baselines if that is larger. `direction`: None for either.
    """
    others = np.array([np.median(np.delete(baseline, row, axis=0), axis=0) for row in range(len(baseline))])
    deviations = baseline - others, treatment - (others if paired else np.median(baseline, axis=0))
    noise = 1.4826 * float(np.median(np.abs(deviations[0] - np.median(deviations[0]))))
    distance = max(margin, MAX_NOISE * noise)
    apart, treated_apart = ([*(_sizes(values, direction) > distance)] for values in deviations)
    return distance, apart, treated_apart


def largest_differences(differences: Array, worse: Direction | None) -> Array:
    """Return the difference of each pair [P] at the step of [P, W] where it is largest, or worst."""
    largest = _sizes(differences, worse).argmax(axis=-1)[..., None]
    return np.take_along_axis(differences, largest, axis=-1)[..., 0]


def _sizes(values: Array, direction: Direction | None) -> Array:
    """Return how far values lie in a direction; None: in either."""
    return np.abs(values) if direction is None else values if direction == "higher" else -values
