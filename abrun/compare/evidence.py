"""The three tiers of evidence: step one (T1), divergence against the noise floor (T2), equivalence (T3)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from abrun.compare.experiment import Pair, Reference, Run, stack, stack_pairs, union, window_bounds
from abrun.compare.metrics import (
    TOKEN_MULT_PROB_ERROR,
    Transform,
    default_reduction,
    default_transform,
    reduced,
    transformed,
)
from abrun.equivalence import (
    ALPHA,
    holm,
    paired_tost,
    pairs_needed,
    pairs_needed_range,
    power_at,
    sigma_pairs_needed,
    sigma_power,
    sigma_test,
    t_interval,
)
from abrun.errors import ComparisonError
from abrun.recipe import Compare, Primary
from abrun.series import Array, Steps

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
class Margin:
    """How far arms may differ and still be called equivalent: absolute, or in the runs' own sigmas."""

    absolute: float | None  # in units of the transformed metric
    sigmas: float | None  # of the runs' own spread over seeds, where absolute is None
    text: str


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
    test: Literal["paired TOST", "exact sigma test"]
    margin: float | None  # None: in sigmas, whose size only the exact test's estimate knows
    margin_sigmas: float | None
    margin_text: str
    alpha: float  # of each one-sided test: 0.05, or this look's share of it
    num_pairs: int
    seeds: tuple[int, ...]
    differences: tuple[float, ...] = ()  # treatment - baseline, by seed
    baseline_mean: float | None = None
    baseline_sd: float | None = None
    treatment_mean: float | None = None
    mean_difference: float | None = None
    sd_difference: float | None = None
    ci90: tuple[float, float] | None = None
    interval: tuple[float, float] | None = None  # level 1 - 2 alpha: what the margin is compared with
    certified_bound: float | None = None  # the smallest margin that would have passed
    certified_sigmas: float | None = None  # the same in sigmas, for a margin in sigmas
    p_equivalence: float | None = None
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

    A deviation is relative to the metric's own size, or to that of its rounding errors: see `_scale`. Nothing
    where the first recorded step is a later one than 1: updates have been made by then.
    """
    pairs = [pair for pair in pairs if first_step(pair.baseline) <= 1]
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


def first_step(run: Run) -> int:
    """The first step of a run's training; 0 where it has none. (Evaluations may come before.)"""
    return min((int(run.series(one).steps[0]) for one in STEP_ONE_METRICS if len(run.series(one))), default=0)


def _first_values(baseline: Run, other: Run, metric: str) -> tuple[float, float] | None:
    first = first_step(baseline)
    left, right = baseline.series(metric).at(first), other.series(metric).at(first)
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
        first = first_step(baseline)
        ends = [baseline.series(f"train/advantages/{end}").at(first) for end in ("min", "max")]
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


def resolved_margin(primary: Primary, reference: Reference | None) -> Margin:
    """A claim's margin in numbers. Raises ComparisonError where the reference does not know its sigma."""
    if primary.sigmas is None:
        return Margin(absolute=float(primary.margin), sigmas=None, text=f"±{primary.margin:g}")
    text = f"±{primary.sigmas:g} sigma"
    if reference is None:
        return Margin(absolute=None, sigmas=primary.sigmas, text=f"{text} of these runs (exact test)")
    if not any(
        (c.metric, c.window, c.transform) == (primary.metric, primary.window, primary.transform)
        for c in reference.compare.primary
    ):
        known = ", ".join(f"{claim.metric} over {claim.window}" for claim in reference.compare.primary)
        raise ComparisonError(
            f"{primary.metric}: margin: got {primary.margin!r} over {primary.window!r}, of which the "
            f"reference {reference.name!r} knows no sigma; it holds: {known}"
        )
    runs = [run for run in reference.runs if not run.name.rerun]
    grid = union(run.steps for run in runs)
    first, last = window_bounds(primary.window, grid, primary.metric)
    steps, values = stack(runs, primary.metric)
    sigma = float(summaries(values[:, (first <= steps) & (steps <= last)], primary).std(ddof=1))
    if not sigma > 0:
        raise ComparisonError(
            f"{primary.metric}: margin: got {primary.margin!r}, and the reference {reference.name!r} has no "
            "spread over seeds to measure it in; give an absolute margin"
        )
    margin = primary.sigmas * sigma
    return Margin(
        absolute=margin, sigmas=None, text=f"±{margin:.3g} ({primary.sigmas:g} sigma of {reference.name})"
    )


def judge_primary(
    arm: str, pairs: Sequence[Pair], primary: Primary, margin: Margin, grid: Steps, alpha: float = ALPHA
) -> PrimaryResult:
    """T3 for one claim, over the pairs of which both runs finished with finite values, before `with_holm`.

    Equivalence is an intersection-union test: every claim at full alpha, no correction. Raises
    ComparisonError for an empty window.
    """
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
        test="exact sigma test" if margin.absolute is None else "paired TOST",
        margin=margin.absolute,
        margin_sigmas=margin.sigmas,
        margin_text=margin.text,
        alpha=alpha,
        num_pairs=len(seeds),
        seeds=tuple(seeds),
    )
    if not seeds:
        return result
    return with_statistics(result, *(summaries(x[usable], primary) for x in (baseline, treatment)))


def summaries(values: Array, primary: Primary) -> Array:
    """One number a run [R] of a claim's values in its window [R, W]."""
    transform = primary.transform or default_transform(primary.metric)
    return reduced(transformed(values, transform, primary.metric), primary.metric)


def _in_window(
    pairs: Sequence[Pair], primary: Primary, bounds: tuple[int, int] | None
) -> tuple[Steps, Array, Array]:
    """Steps [W] of the window, and both arms' values [P, W] there."""
    steps, baseline, treatment = stack_pairs(pairs, primary.metric)
    first, last = bounds or (0, 0)
    inside = (steps >= first) & (steps <= last)
    recorded = union(pair.baseline.series(primary.metric).steps for pair in pairs)
    if len(recorded) and not ((first <= recorded) & (recorded <= last)).any():
        raise ComparisonError(
            f"{primary.metric}: window: got {primary.window!r}, which selects none of the {len(recorded)} "
            f"steps {recorded[0]}-{recorded[-1]} at which it was recorded; use a wider window, such as 'all'"
        )
    return steps[inside], baseline[:, inside], treatment[:, inside]


def with_statistics(result: PrimaryResult, baseline: Array, treatment: Array) -> PrimaryResult:
    """A result filled in from one summary a pair; with fewer than two pairs there is nothing to test."""
    if len(baseline) < 2:
        return result
    # The margin is not yet looked at: mean, intervals and correlation are the same for any.
    tost = paired_tost(baseline, treatment, result.margin or 1.0, result.alpha)
    result = replace(
        result,
        differences=tuple((treatment - baseline).tolist()),
        baseline_mean=float(baseline.mean()),
        baseline_sd=float(baseline.std(ddof=1)),
        treatment_mean=float(treatment.mean()),
        mean_difference=tost.mean_difference,
        sd_difference=tost.sd_difference,
        ci90=t_interval(treatment - baseline, 0.9),
        interval=tost.interval,
        certified_bound=tost.certified_bound,
        p_difference=tost.p_difference,
        pair_correlation=tost.pair_correlation,
    )
    if result.margin is None:
        assert result.margin_sigmas is not None
        exact = sigma_test(baseline, treatment, result.margin_sigmas, result.alpha)
        needed = sigma_pairs_needed(result.margin_sigmas, alpha=result.alpha)
        return replace(
            result,
            margin=result.margin_sigmas * exact.sigma,
            certified_sigmas=exact.certified_sigmas,
            p_equivalence=exact.p_equivalence,
            power_now=sigma_power(result.margin_sigmas, exact.num_pairs, result.alpha),
            pairs_needed=needed,
            pairs_needed_range=(needed, needed),
            result="equivalent" if exact.equivalent else "undecided",
        )
    sd, margin, alpha = tost.sd_difference, result.margin, result.alpha
    return replace(
        result,
        p_equivalence=tost.p_tost,
        p_tost=tost.p_tost,
        power_now=power_at(margin, sd, tost.num_pairs, alpha),
        pairs_needed=pairs_needed(margin, sd, alpha=alpha),
        pairs_needed_range=pairs_needed_range(margin, sd, tost.num_pairs, alpha=alpha),
        result="equivalent" if tost.equivalent else "undecided",
    )


def with_holm(results: Sequence[PrimaryResult]) -> list[PrimaryResult]:
    """Holm-corrected p-values, and "different" where one is below alpha with a mean beyond the margin.

    Differences are many looks at one experiment: the family is every claim of every treatment.
    """
    corrected = iter(holm([result.p_difference for result in results if result.p_difference is not None]))
    final = []
    for result in results:
        if result.p_difference is not None and result.mean_difference is not None:
            p_holm = next(corrected)
            assert result.margin is not None
            beyond = p_holm < result.alpha and abs(result.mean_difference) > result.margin
            result = replace(
                result, p_difference_holm=p_holm, result="different" if beyond else result.result
            )
        final.append(result)
    return final
