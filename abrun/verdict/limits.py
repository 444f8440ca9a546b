"""Claims that are no equivalence: limits on a level or on a ratio, and bit-exactness."""

from dataclasses import replace

import numpy as np

from abrun.metric_names import (
    FINAL_WEIGHTS,
    MEMORY_PEAK,
    Transform,
    default_reduction,
    find_metric,
    is_clock,
    unit_of,
)
from abrun.reasons import Code, Reason
from abrun.recipe.claims import Claim, describe_claim
from abrun.recorded.experiment import RecordedRun, Sides, stack
from abrun.stats.equivalence import equivalence_test, limit_test
from abrun.stats.series import Array, Series, Steps, on_shared_steps, window_bounds
from abrun.verdict.claims import pairs_lacking
from abrun.verdict.final_weights import distance
from abrun.verdict.guards import shared_memory_metrics, shared_peak_counter
from abrun.verdict.results import (
    ONE_TEST,
    ClaimResult,
    ClaimTerms,
    Detected,
    ErrorRates,
    Estimate,
    Reduction,
    detect,
)
from abrun.verdict.sensitivity import cut_short, no_signal, one_run_as_two_seeds
from abrun.verdict.skewness import ARMS, HARMLESS, VALUES, skew_warning
from abrun.verdict.summaries import comparable, moving
from abrun.verdict.summaries import resolution as resolution_of

_REDUCED = {"mean": np.mean, "median": np.median, "maximum": np.max, "minimum": np.min}


def judge_limit(
    arm: str,
    sides: Sides,
    claim: Claim,
    grid: Steps,
    rates: ErrorRates = ONE_TEST,
) -> ClaimResult:
    """A limit or an exact claim over the pairs, before `with_holm`; every planned pair (run) is needed.

    A limit holds where the one-sided 1 - alpha bound of the mean over seeds keeps it (of the ratio: the
    geometric mean over pairs; of a metric on the scale `log_excess` the ratio of excesses over 1), and is
    broken where the opposite bound is beyond it. Raises ComparisonError for a window that the runs do not
    hold.
    """
    finished = sides.finished
    bounds = window_bounds(claim.window, grid, claim.metric) if len(grid) else None
    of_ratio = claim.limit is not None and claim.limit[1]
    terms = ClaimTerms(
        metric=claim.metric,
        window=claim.window,
        steps=bounds,
        num_steps=0,
        transform="log_excess" if claim.is_limit_on_excess else "identity",
        reduction=_reduction(claim.metric),
        test="exact" if claim.exact else "ratio limit" if of_ratio else "limit",
        margin=None,
        margin_unit="",
        margin_number=claim.limit[0] if claim.limit else 0.0,
        margin_text=describe_claim(claim),
        alpha=rates.alpha,
        alpha_difference=rates.alpha_difference,
    ).over(finished)
    problem = _untestable(claim, sides)
    if bounds and not claim.exact and len(shared := stack(finished.runs, claim.metric)[0]):
        inside = shared[(bounds[0] <= shared) & (shared <= bounds[1])]
        bounds = on_shared_steps(claim.window, bounds, inside)
        terms = replace(terms, steps=bounds)
        finished = _on_shared_steps(finished, claim.metric, shared)
    result = ClaimResult(arm=arm, claim=terms, problem=problem)
    if bounds is None or not min(finished.sizes) or problem:
        return replace(result, problem=problem or Code.NONE_FINISHED(paired=sides.paired))
    return _exact(result, finished, bounds) if claim.exact else _limit(result, finished, claim, bounds)


def _untestable(claim: Claim, sides: Sides) -> Reason | None:
    """Return why these runs cannot show a limit, or that arms are the same bit for bit."""
    finished, metric = sides.finished, claim.metric
    if (claim.exact or metric == FINAL_WEIGHTS) and not sides.paired:
        return Code.PAIRS_ALONE(exact=claim.exact)
    of_machine = metric == MEMORY_PEAK or is_clock(metric) or unit_of(metric) == "bytes"  # no seed moves it
    repeated = None if claim.exact or of_machine else one_run_as_two_seeds(finished, metric)
    lacking = None if finished.sizes == sides.sizes else pairs_lacking(finished, sides, equivalence=False)
    return cut_short(finished.runs) or repeated or lacking


def _on_shared_steps(sides: Sides, metric: str, shared: Steps) -> Sides:
    """The runs with a metric at the steps that all of them have."""

    def cut(run: RecordedRun) -> RecordedRun:
        series = run.series(metric)
        inside = np.isin(series.steps, shared)
        cut_series = Series(series.steps[inside], series.values[inside])
        return replace(run, metrics={**run.metrics, metric: cut_series})

    baselines, treatments = (tuple(map(cut, runs)) for runs in (sides.baselines, sides.treatments))
    return replace(sides, baselines=baselines, treatments=treatments)


def _exact(result: ClaimResult, sides: Sides, bounds: tuple[int, int]) -> ClaimResult:
    metric = result.claim.metric
    empty = no_signal(sides, metric, may_repeat=True) or one_run_as_two_seeds(sides)
    for pair in zip(sides.baselines, sides.treatments, strict=True):
        problem, where = _first_difference(pair, metric, bounds)
        if problem:
            return replace(result, problem=problem)
        if where:
            return replace(result, result="different", estimate=Estimate(detail=where))
    return replace(result, problem=empty) if empty else replace(result, result="holds")


def _first_difference(
    pair: tuple[RecordedRun, RecordedRun], metric: str, bounds: tuple[int, int]
) -> tuple[Reason | None, Reason | None]:
    """Why a pair cannot be compared, and where its runs first differ."""
    seed = pair[0].name.seed
    if metric == FINAL_WEIGHTS:
        hashes = [run.final_weights_hash for run in pair]
        if None in hashes:
            return Code.WEIGHTS_UNKNOWN(seed=seed), None
        return None, None if hashes[0] == hashes[1] else Code.WEIGHTS_DIFFER(seed=seed)
    left, right = (_inside(run.series(metric), bounds) for run in pair)
    if not len(left) or not np.array_equal(left.steps, right.steps):
        return Code.STEPS_DIFFER(seed=seed), None
    same = (left.values == right.values) | (np.isnan(left.values) & np.isnan(right.values))
    if same.all():
        return None, None
    first = int(np.flatnonzero(~same)[0])
    return None, Code.VALUES_DIFFER(
        step=left.steps[first], seed=seed, baseline=left.values[first], treatment=right.values[first]
    )


def _limit(result: ClaimResult, sides: Sides, claim: Claim, bounds: tuple[int, int]) -> ClaimResult:
    assert claim.limit is not None
    if claim.metric == FINAL_WEIGHTS:
        return _distances(result, sides, claim.limit[0])
    limit, of_ratio = claim.limit
    counter = shared_peak_counter(sides.runs)

    def levels(transform: Transform) -> list[Array]:
        arms = (sides.baselines, sides.treatments)
        return [
            np.array([_level(run, result.claim, bounds, counter, transform) for run in runs]) for runs in arms
        ]

    baseline, treatment = levels("identity")
    transform: Transform = "identity"
    left, right = baseline, treatment
    if claim.is_limit_on_excess:
        transform = "log_excess"
        left, right = levels(transform)
    elif of_ratio:
        transform = "log"
        left, right = comparable(baseline, transform), comparable(treatment, transform)
    needed = np.concatenate([left, right]) if of_ratio else right
    if not np.isfinite(needed).all():
        kind = "excess" if claim.is_limit_on_excess else "positive" if of_ratio else "number"
        return replace(result, problem=Code.VALUES_UNFIT(needed=kind))
    scale = claim.model_copy(update={"transform": transform})
    window = _averaged(result.claim, sides, bounds, of_ratio=of_ratio)
    step, is_below = resolution_of(sides.runs, scale, window), claim.below is not None
    estimate = Estimate(
        baseline_mean=float(baseline.mean()) if np.isfinite(baseline).all() else None,
        treatment_mean=float(treatment.mean()),
        detected=_detected(left, right, result.claim.alpha, step, paired=sides.paired),
    )
    result = replace(result, estimate=estimate)
    if not of_ratio:
        left = None
    elif sides.paired:
        left, right = None, right - left
    return _tested(result, left, right, limit, is_log=of_ratio, below=is_below, resolution=step)


def _detected(left: Array, right: Array, alpha: float, resolution: float, *, paired: bool) -> Detected | None:
    """Compare both arms of a limit: a treatment may keep it and yet be worse than its baseline."""
    if min(len(left), len(right)) < 2 or not np.isfinite(np.concatenate([left, right])).all():
        return None
    test = equivalence_test(left, right, 1.0, alpha, resolution=resolution, paired=paired)
    return detect(left, right, test.mean_difference, test.interval, paired=paired)


def _averaged(claim: ClaimTerms, sides: Sides, bounds: tuple[int, int], *, of_ratio: bool) -> Array:
    """The recorded values whose mean is limited [N, W]; of pairs' ratios their differences."""
    runs = sides.runs if of_ratio else sides.treatments
    steps, values = stack(runs, claim.metric)
    values = values[:, (bounds[0] <= steps) & (steps <= bounds[1])]
    if claim.reduction != "mean":
        return values[:, :0]
    num_baselines = len(runs) - len(sides.treatments)
    return moving(values[:num_baselines], values[num_baselines:], paired=of_ratio and sides.paired)


def _distances(result: ClaimResult, sides: Sides, limit: float) -> ClaimResult:
    """Of the final weights of each pair: their mean, not that of their logarithms.

    Two runs part all at once, some seeds sooner than others, so that distances of one treatment can be 3e-5
    and 0.7: a geometric mean would say nothing of the large ones.
    """
    distances = [distance(*pair) for pair in zip(sides.baselines, sides.treatments, strict=True)]
    unknown = next((known for known in distances if isinstance(known, Reason)), None)
    if unknown is not None:
        return replace(result, problem=unknown)
    return _tested(result, None, np.array(distances, np.float64), limit, is_log=False, below=True)


def _tested(
    result: ClaimResult,
    left: Array | None,
    right: Array,
    limit: float,
    *,
    is_log: bool,
    below: bool,
    resolution: float = 0.0,
) -> ClaimResult:
    """Of one sample, or of the difference right - left of two that are not paired."""
    scale = np.exp if is_log else float
    bound = float(np.log(limit)) if is_log else limit
    if min(len(right), len(right if left is None else left)) < 2:
        mean = right.mean() - (0.0 if left is None else left.mean())
        estimate = replace(result.estimate, limited=float(scale(mean)))
        return replace(result, estimate=estimate, result="undecided")
    test = limit_test(right, bound, result.claim.alpha, resolution, left)
    arms = {VALUES: right} if left is None else dict(zip(ARMS, (left, right), strict=True))
    room = abs(bound - float(np.median(right) - (0.0 if left is None else np.median(left))))
    holds, broken = (test.p_below, test.p_above) if below else (test.p_above, test.p_below)
    skewed = skew_warning(arms, step=resolution, least=HARMLESS * room, level=0.05 / len(arms))
    return replace(
        result,
        estimate=replace(
            result.estimate,
            limited=float(scale(test.mean)),
            limited_interval=(float(scale(test.interval[0])), float(scale(test.interval[1]))),
            p_equivalence=holds,
            p_beyond=broken,
        ),
        warnings=(skewed,) if skewed else (),
        result="holds" if holds < result.claim.alpha else "undecided",
    )


def _level(
    run: RecordedRun,
    claim: ClaimTerms,
    bounds: tuple[int, int],
    counter: str | None,
    transform: Transform,
) -> float:
    """Return a run's number: its window, transformed and reduced; of `memory` the largest of all phases.

    NaN where it is not recorded, or outside the transform's domain.
    """
    metrics = [claim.metric]
    if claim.metric == MEMORY_PEAK:
        metrics = shared_memory_metrics([run], counter) if counter else []
    series = [_inside(run.series(metric), bounds).values for metric in metrics]
    found = np.concatenate([one for one in series if len(one)] or [np.array([np.nan])])
    return float(_REDUCED[claim.reduction](comparable(found, transform)))


def _inside(series: Series, bounds: tuple[int, int]) -> Series:
    inside = (bounds[0] <= series.steps) & (series.steps <= bounds[1])
    return Series(series.steps[inside], series.values[inside])


def _reduction(metric: str) -> Reduction:
    """A maximum of the batch, or a peak, is limited at its largest step; all else as it is summarised."""
    found = find_metric(metric)
    if metric == MEMORY_PEAK or unit_of(metric) == "bytes" or (found and found.combined == "maximum"):
        return "maximum"
    return "minimum" if found and found.combined == "minimum" else default_reduction(metric)
