"""T1: the first step, before any treated update can have had an effect, must be the same."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from abrun.compare.read.experiment import Pair, RecordedRun
from abrun.metric_names import (
    ADVANTAGES_MAX,
    ADVANTAGES_MIN,
    GEN_KL_ERROR,
    LOSS,
    MEAN_PROMPT_LENGTH,
    REWARD,
    STEP_ONE,
)
from abrun.recipe import Compare
from abrun.store import started_after

# How far rounding alone may move a step-one metric, relative to its scale. float32 sums over a batch in
# another order differ by 1e-6 to 1e-5; bfloat16 keeps 8 bits (2^-8 = 4e-3) and rounds at every layer.
ROUNDING = {"float32": 1e-4, "bfloat16": 2e-2}
# Entropy of a peaked policy is near 0 while its rounding error is that of log-probs, of order 1.
ENTROPY_SCALE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOne:
    """T1 for one metric: the pair that deviates most, before any treated update can have had an effect."""

    arm: str
    metric: str
    step: int
    seed: int
    num_pairs: int
    baseline: float
    treatment: float
    deviation: float  # |treatment - baseline| / scale
    tolerance: float
    tolerance_from: str
    aa_deviation: float | None  # the largest among same-seed baseline reruns
    passes: bool


def step_one(arm: str, pairs: Sequence[Pair], compare: Compare) -> list[StepOne]:
    """T1 for every metric of the list that the first step of some pair has in both arms.

    A deviation is relative to the metric's own size, or to that of its rounding errors: see `_scale`. Nothing
    where the first recorded step is a later one than the runs' first: updates have been made by then.
    """
    pairs = [
        pair for pair in pairs if first_step(pair.baseline) <= 1 + started_after(pair.baseline.environment)
    ]
    found = (_step_one(arm, pairs, metric, compare) for metric in STEP_ONE)
    return [one for one in found if one]


def _step_one(arm: str, pairs: Sequence[Pair], metric: str, compare: Compare) -> StepOne | None:
    deviations = []
    for pair in pairs:
        values = _first_values(pair.baseline, pair.treatment, metric)
        if values and math.isfinite(values[0]):
            deviations.append((_deviation(pair.baseline, metric, *values), pair, values))
    if not deviations:
        return None
    deviation, pair, (baseline, treatment) = max(deviations, key=lambda one: one[0])
    again = [
        _deviation(pair.baseline, metric, *values)
        for pair in pairs
        for rerun in pair.reruns
        if (values := _first_values(pair.baseline, rerun, metric)) and math.isfinite(values[0])
    ]
    aa_deviation = max(again, default=None)
    tolerance, source = _tolerance(pair, compare, aa_deviation)
    return StepOne(
        arm=arm,
        metric=metric,
        step=first_step(pair.baseline),
        seed=pair.seed,
        num_pairs=len(deviations),
        baseline=baseline,
        treatment=treatment,
        deviation=deviation,
        tolerance=tolerance,
        tolerance_from=source,
        aa_deviation=aa_deviation,
        passes=deviation <= tolerance,
    )


def shares_prompts(pairs: Sequence[Pair]) -> bool:
    """Whether the runs show that both arms of every pair began with the same prompts.

    By their hashes; or by a metric of the first step that varies from pair to pair, and not within any. (Of a
    reward, often 0 in all runs but one or two, that could be by chance.)
    """
    hashes = [
        [(run.environment or {}).get("prompts_sha256") for run in (pair.baseline, pair.treatment)]
        for pair in pairs
    ]
    if all(left and left == right for left, right in hashes):
        return True
    return any(_begins_alike(pairs, one) for one in (MEAN_PROMPT_LENGTH, *STEP_ONE) if one != REWARD)


def _begins_alike(pairs: Sequence[Pair], metric: str) -> bool:
    """Whether a metric's first values differ within pairs by less than 1 % of their sd over pairs."""
    values = [_first_values(pair.baseline, pair.treatment, metric) for pair in pairs]
    known = np.array([both for both in values if both is not None]).reshape(-1, 2)
    if len(known) < max(len(pairs), 2) or not np.isfinite(known).all():
        return False
    spread = float(known[:, 0].std(ddof=1))
    return spread > 0 and float(np.abs(known[:, 1] - known[:, 0]).max()) <= 0.01 * spread


def first_step(run: RecordedRun) -> int:
    """The first step of a run's training; 0 where it has none. (Evaluations may come before.)"""
    return min((int(run.series(one).steps[0]) for one in STEP_ONE if len(run.series(one))), default=0)


def _first_values(baseline: RecordedRun, other: RecordedRun, metric: str) -> tuple[float, float] | None:
    first = first_step(baseline)
    left, right = baseline.series(metric).at(first), other.series(metric).at(first)
    return None if left is None or right is None else (left, right)


def _deviation(baseline: RecordedRun, metric: str, left: float, right: float) -> float:
    if left == right:
        return 0.0
    if not math.isfinite(right):
        return math.inf
    if metric == GEN_KL_ERROR:
        # k3(x) is x^2 / 2 for small x: as the log-prob error x that it stands for, whose scale is 1. Below 0
        # it is the rounding of a trainer that computes it in float32.
        return abs(math.sqrt(2 * max(right, 0.0)) - math.sqrt(2 * max(left, 0.0)))
    return abs(right - left) / _scale(baseline, metric, left, right)


def _scale(baseline: RecordedRun, metric: str, left: float, right: float) -> float:
    """What a rounding error of this metric is proportional to."""
    size = max(abs(left), abs(right))
    if metric.endswith("entropy"):
        return max(size, ENTROPY_SCALE)
    if metric == LOSS:
        # At ratio 1 a policy-gradient loss is the mean of advantages, which cancel: what was rounded are the
        # terms, as large as the largest advantage (about 1 where they are normalised).
        first = first_step(baseline)
        ends = [baseline.series(end).at(first) for end in (ADVANTAGES_MIN, ADVANTAGES_MAX)]
        terms = max((abs(end) for end in ends if end is not None and math.isfinite(end)), default=1.0)
        return max(size, terms)
    return size


def _tolerance(pair: Pair, compare: Compare, aa_deviation: float | None) -> tuple[float, str]:
    if compare.step_one_tolerance is not None:
        return compare.step_one_tolerance, "recipe"
    # A foreign framework's precision is not known, and is most often bfloat16.
    dtypes = {
        str((run.config or {}).get("policy.dtype", "bfloat16")) for run in (pair.baseline, pair.treatment)
    }
    coarsest = max(dtypes, key=lambda dtype: ROUNDING.get(dtype, 0.0))
    rounding = ROUNDING.get(coarsest, ROUNDING["float32"])
    if aa_deviation is not None and 3 * aa_deviation > rounding and math.isfinite(aa_deviation):
        return 3 * aa_deviation, "3x the largest A/A deviation"
    return rounding, f"rounding of {coarsest}"
