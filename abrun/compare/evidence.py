"""The three tiers of evidence: step one (T1), divergence against the noise floor (T2), equivalence (T3)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from abrun.compare.metrics import (
    TOKEN_MULT_PROB_ERROR,
    Array,
    Transform,
    default_reduction,
    default_transform,
    reduced,
    transformed,
)
from abrun.compare.sources import Pair, Run, Steps, stack, stack_pairs, window_bounds
from abrun.equivalence import ALPHA, holm, paired_tost, pairs_needed, pairs_needed_range, power_at
from abrun.errors import ComparisonError
from abrun.recipe import Compare, Primary

STEP_ONE_METRICS = (
    "train/reward",
    "train/loss",
    "train/grad_norm",
    "train/entropy",
    "train/approx_entropy",
    TOKEN_MULT_PROB_ERROR,
    "train/sampling_importance_ratio",
    "train/probs_ratio",
    "train/mean_gen_tokens_per_sample",
    "train/critic/loss",
)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """T2 for one metric: how the arms part, against how same-seed baselines part. Never gating."""

    arm: str
    metric: str
    num_reruns: int
    noise_floor: Literal["measured", "zero", "unknown"]  # zero: the baseline repeats itself bit for bit
    mean_difference: float  # over steps and pairs, of |treatment - baseline|
    aa_mean_difference: float | None
    ratio: float | None
    first_step_outside: int | None  # where the median pair leaves the running maximum of the A/A differences


@dataclass(frozen=True, slots=True, kw_only=True)
class PrimaryResult:
    """T3 for one declared claim. Summaries and differences are in units of the transformed metric."""

    arm: str
    metric: str
    window: str
    steps: tuple[int, int] | None  # first and last step of the window
    num_steps: int  # steps in it at which the metric was recorded by every pair
    transform: Transform
    reduction: Literal["mean", "median"]
    margin: float
    num_pairs: int
    seeds: tuple[int, ...]
    baseline_mean: float | None = None
    baseline_sd: float | None = None
    treatment_mean: float | None = None
    mean_difference: float | None = None
    sd_difference: float | None = None
    ci90: tuple[float, float] | None = None
    certified_bound: float | None = None
    p_tost: float | None = None
    p_difference: float | None = None
    p_difference_holm: float | None = None
    pair_correlation: float | None = None
    power_now: float | None = None  # if the arms are truly equal and sd_difference is the true one
    pairs_needed: int | None = None  # for 80 % power; None: more than 1000
    pairs_needed_range: tuple[int | None, int | None] | None = None  # over the 90 % interval of the sd
    result: Literal["equivalent", "different", "undecided", "not tested"] = "not tested"


# --- T1 ---


def step_one(arm: str, pairs: Sequence[Pair], compare: Compare) -> list[StepOne]:
    """T1 for every metric of the list that the first step of some pair has in both arms.

    A deviation is relative to the metric's own size, or to that of its rounding errors: see `_scale`.
    """
    found = (_step_one(arm, pairs, metric, compare) for metric in STEP_ONE_METRICS)
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
        if (values := _first_values(pair.baseline, rerun, metric))
    ]
    aa_deviation = max(again, default=None)
    tolerance, source = _tolerance(pair, compare, aa_deviation)
    return StepOne(
        arm=arm,
        metric=metric,
        step=int(pair.baseline.steps[0]),
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


def _first_values(baseline: Run, other: Run, metric: str) -> tuple[float, float] | None:
    if not len(baseline.steps):
        return None
    first = int(baseline.steps[0])
    left, right = baseline.series(metric).get(first), other.series(metric).get(first)
    return None if left is None or right is None else (left, right)


def _deviation(baseline: Run, metric: str, left: float, right: float) -> float:
    if left == right:
        return 0.0
    return abs(right - left) / _scale(baseline, metric, left, right) if math.isfinite(right) else math.inf


def _scale(baseline: Run, metric: str, left: float, right: float) -> float:
    """What a rounding error of this metric is proportional to."""
    size = max(abs(left), abs(right))
    if metric.endswith("entropy"):
        return max(size, ENTROPY_SCALE)
    if metric == "train/loss":
        # At ratio 1 a policy-gradient loss is the mean of advantages, which cancel: what was rounded are the
        # terms, as large as the largest advantage (about 1 where they are normalised).
        first = int(baseline.steps[0])
        ends = [baseline.series(f"train/advantages/{end}").get(first) for end in ("min", "max")]
        terms = max((abs(end) for end in ends if end is not None and math.isfinite(end)), default=1.0)
        return max(size, terms)
    return size


def _tolerance(pair: Pair, compare: Compare, aa_deviation: float | None) -> tuple[float, str]:
    if compare.step_one_tolerance is not None:
        return compare.step_one_tolerance, "recipe"
    dtypes = {str(run.config.get("policy.dtype")) for run in (pair.baseline, pair.treatment)}
    coarsest = max(dtypes, key=lambda dtype: ROUNDING.get(dtype, 0.0))
    rounding = ROUNDING.get(coarsest, ROUNDING["float32"])
    if aa_deviation is not None and 3 * aa_deviation > rounding and math.isfinite(aa_deviation):
        return 3 * aa_deviation, "3x the largest A/A deviation"
    return rounding, f"rounding of {coarsest}"


# --- T2 ---


def divergence(arm: str, pairs: Sequence[Pair], primaries: Sequence[Primary]) -> list[Divergence]:
    """T2 for the step-one metrics and the primaries, as far as they are recorded."""
    finished = [pair for pair in pairs if pair.finished]
    metrics = dict.fromkeys([*(primary.metric for primary in primaries), *STEP_ONE_METRICS])
    found = (_divergence(arm, finished, metric) for metric in metrics) if finished else ()
    return [one for one in found if one]


def _divergence(arm: str, pairs: Sequence[Pair], metric: str) -> Divergence | None:
    steps, baseline, treatment = stack_pairs(pairs, metric)
    differences = np.abs(treatment - baseline)
    known = np.isfinite(differences).all(axis=0)
    steps, differences = steps[known], differences[:, known]
    if not len(steps):
        return None
    repeats = [(pair.baseline, rerun) for pair in pairs for rerun in pair.reruns if rerun.finished]
    floors = [floor for one in repeats if (floor := _noise(one, metric, steps)) is not None]
    mean = float(differences.mean())
    result = Divergence(
        arm=arm,
        metric=metric,
        num_reruns=len(floors),
        noise_floor="unknown",
        mean_difference=mean,
        aa_mean_difference=None,
        ratio=None,
        first_step_outside=None,
    )
    if not floors:
        return result
    # Both curves start together and part: a later step may by chance be close again, the envelope may not.
    envelope = np.maximum.accumulate(np.max(floors, axis=0))
    outside = steps[np.median(differences, axis=0) > envelope]
    floor = float(np.mean(floors))
    return replace(
        result,
        noise_floor="measured" if floor else "zero",
        aa_mean_difference=floor,
        ratio=mean / floor if floor else None,
        first_step_outside=int(outside[0]) if len(outside) else None,
    )


def _noise(repeat: tuple[Run, Run], metric: str, steps: Steps) -> Array | None:
    shared, values = stack(repeat, metric)
    noise = np.abs(values[1] - values[0])
    if not np.isin(steps, shared).all():
        return None
    noise = noise[np.isin(shared, steps)]
    return noise if np.isfinite(noise).all() else None


# --- T3 ---


def judge_primaries(
    arm: str, pairs: Sequence[Pair], primaries: Sequence[Primary], grid: Steps
) -> list[PrimaryResult]:
    """T3 for every declared claim, over the pairs of which both runs finished with finite values.

    Equivalence is an intersection-union test: every claim at full alpha, no correction. Differences are many
    looks at one experiment: Holm over the claims.
    """
    return with_holm([judge_primary(arm, pairs, primary, grid) for primary in primaries])


def judge_primary(arm: str, pairs: Sequence[Pair], primary: Primary, grid: Steps) -> PrimaryResult:
    """T3 for one claim, before the correction over claims. Raises ComparisonError for an empty window."""
    metric, finished = primary.metric, [pair for pair in pairs if pair.finished]
    transform = primary.transform or default_transform(metric)
    bounds = window_bounds(primary.window, grid, metric) if len(grid) else None
    steps, baseline, treatment = _in_window(finished, primary, bounds)
    usable = np.flatnonzero(np.isfinite(baseline + treatment).all(axis=1)) if len(steps) else []
    seeds = [finished[index].seed for index in usable]
    result = PrimaryResult(
        arm=arm,
        metric=metric,
        window=primary.window,
        steps=bounds,
        num_steps=len(steps),
        transform=transform,
        reduction=default_reduction(metric),
        margin=primary.margin,
        num_pairs=len(seeds),
        seeds=tuple(seeds),
    )
    if not seeds:
        return result
    summaries = (reduced(transformed(x[usable], transform, metric), metric) for x in (baseline, treatment))
    return with_statistics(result, *summaries)


def _in_window(
    pairs: Sequence[Pair], primary: Primary, bounds: tuple[int, int] | None
) -> tuple[Steps, Array, Array]:
    """Steps [W] of the window, and both arms' values [P, W] there."""
    steps, baseline, treatment = stack_pairs(pairs, primary.metric)
    first, last = bounds or (0, 0)
    inside = (steps >= first) & (steps <= last)
    recorded = sorted({step for pair in pairs for step in pair.baseline.series(primary.metric)})
    if recorded and not any(first <= step <= last for step in recorded):
        raise ComparisonError(
            f"{primary.metric}: window: got {primary.window!r}, which selects none of the {len(recorded)} "
            f"steps {recorded[0]}-{recorded[-1]} at which it was recorded; use a wider window, such as 'all'"
        )
    return steps[inside], baseline[:, inside], treatment[:, inside]


def with_statistics(result: PrimaryResult, baseline: Array, treatment: Array) -> PrimaryResult:
    """A result filled in from one summary a pair; with fewer than two pairs there is nothing to test."""
    if len(baseline) < 2:
        return result
    tost = paired_tost(baseline, treatment, result.margin)
    sd = tost.sd_difference
    return replace(
        result,
        baseline_mean=float(baseline.mean()),
        baseline_sd=float(baseline.std(ddof=1)),
        treatment_mean=float(treatment.mean()),
        mean_difference=tost.mean_difference,
        sd_difference=sd,
        ci90=tost.interval,
        certified_bound=tost.certified_bound,
        p_tost=tost.p_tost,
        p_difference=tost.p_difference,
        pair_correlation=tost.pair_correlation,
        power_now=power_at(result.margin, sd, tost.num_pairs),
        pairs_needed=pairs_needed(result.margin, sd),
        pairs_needed_range=pairs_needed_range(result.margin, sd, tost.num_pairs),
        result="equivalent" if tost.equivalent else "undecided",
    )


def with_holm(results: Sequence[PrimaryResult]) -> list[PrimaryResult]:
    """Holm-corrected p-values, and "different" where one is below alpha with a mean beyond the margin."""
    corrected = iter(holm([result.p_difference for result in results if result.p_difference is not None]))
    final = []
    for result in results:
        if result.p_difference is not None and result.mean_difference is not None:
            p_holm = next(corrected)
            beyond = p_holm < ALPHA and abs(result.mean_difference) > result.margin
            result = replace(
                result, p_difference_holm=p_holm, result="different" if beyond else result.result
            )
        final.append(result)
    return final
