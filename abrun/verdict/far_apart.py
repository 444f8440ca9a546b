"""Metrics without a claim in which arms are far apart although every claim holds: a line, and no verdict."""

import numpy as np

from abrun.logs.recorded.experiment import Sides, stack_runs
from abrun.messages.codes import Code, Reason
from abrun.runs.metric_names import is_memory
from abrun.stats.curves import MIN_STEPS, level_shift_p
from abrun.stats.series import Array
from abrun.verdict.description import informative_metrics

MAX_P = 1e-3  # of the step-to-step noise of the mean curves
FAR_LEVEL = 2.0  # ratio of the arms' levels
FAR_PEAK = 5.0  # ratio of the arms' largest distances from their medians


def far_apart_reason(sides: Sides, claimed: set[str]) -> Reason | None:
    """Return the metrics beside the claimed ones whose level or largest spike is far apart; None without any.

    In each of them, all runs of one arm are beyond all runs of the other. Equal arms of three runs show this
    in 3 % of metrics with one spike in two runs, and in none of a hundred others (2,000 simulated pairs).
    """
    finished = sides.finished
    if sides.axis != "steps" or not min(finished.sizes):
        return None
    levels: dict[str, list[float]] = {}
    spikes: dict[str, list[float]] = {}
    for metric in informative_metrics(finished):
        values = stack_runs(finished.runs, metric)[1]
        values = values[:, np.isfinite(values).all(axis=0)]
        if metric in claimed or is_memory(metric) or values.shape[1] < MIN_STEPS:
            continue
        curves = np.split(values, [finished.sizes[0]])
        if _has_far_level(*curves):
            levels[metric] = [float(arm.mean()) for arm in curves]
        elif _has_far_peak(*curves):
            spikes[metric] = [float(arm.flat[np.abs(arm).argmax()]) for arm in curves]
    return Code.FAR_APART(levels=levels, spikes=spikes) if levels or spikes else None


def _has_far_level(baseline: Array, treatment: Array) -> bool:
    """Return whether the levels of two arms [R, S] differ by a factor, or in sign, beyond their noise."""
    low, high = sorted((baseline.mean(axis=1), treatment.mean(axis=1)), key=lambda means: means.mean())
    if not low.max() < high.min():
        return False
    size = max(abs(low.mean()), abs(high.mean()))
    p_value = level_shift_p(treatment.mean(axis=0) - baseline.mean(axis=0))
    return bool(high.mean() - low.mean() > (1 - 1 / FAR_LEVEL) * size and p_value < MAX_P)


def _has_far_peak(baseline: Array, treatment: Array) -> bool:
    """Return whether every run of one arm spikes far beyond the runs of the other, on curves that move."""
    peaks = [np.abs(arm - np.median(arm, axis=1, keepdims=True)).max(axis=1) for arm in (baseline, treatment)]
    low, high = sorted(peaks, key=np.mean)
    return bool(low.min() > 0 and high.min() > FAR_PEAK * low.max())
