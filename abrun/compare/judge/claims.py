"""T3: each declared claim, by equivalence over the pairs (verdict.md, rules 1, 2 and 6)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from abrun.compare.judge.summaries import outside_domain, reduced, transformed
from abrun.compare.read.experiment import Pair, RecordedRun, Reference, stack, stack_pairs, union
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
from abrun.metric_names import (
    GRAD_NORM,
    LEARNING_RATE,
    Transform,
    default_reduction,
    default_transform,
    find,
    is_clock,
    unit_of,
)
from abrun.recipe import Primary
from abrun.series import NO_SERIES, Array, Steps, window_bounds


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
    pairs_needed_observed: int | None = None  # the same if the true difference is the observed one
    problem: str | None = None  # why these runs cannot show equivalence, whatever the numbers are
    result: Literal["equivalent", "different", "undecided", "not tested"] = "not tested"

    @property
    def excludes_zero(self) -> bool:
        """Whether a difference was detected, be it within the margin or beyond."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


_NO_PAIR = np.empty(0, np.int64)


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

    Equivalence is an intersection-union test: every claim at full alpha, no correction. It needs every pair
    and runs that could have shown a difference. Raises ComparisonError for an empty window.
    """
    metric, finished = primary.metric, [pair for pair in pairs if pair.finished]
    transform = primary.transform or default_transform(metric)
    bounds = window_bounds(primary.window, grid, metric) if len(grid) else None
    steps, baseline, treatment = _in_window(finished, primary, bounds)
    usable = np.flatnonzero(np.isfinite(baseline + treatment).all(axis=1)) if len(steps) else _NO_PAIR
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
        problem=_no_signal(finished, metric),
    )
    in_window = np.stack([baseline[usable], treatment[usable]])
    outside = outside_domain(in_window, transform)
    if outside:
        return replace(result, problem=result.problem or f"{outside} (or declare another transform)")
    if seeds:
        result = with_statistics(result, *(summaries(values, primary) for values in in_window))
    if len(seeds) < len(pairs) and not result.problem:
        lacking = f"{len(seeds)} of {len(pairs)} planned pairs are usable"
        result = replace(result, problem=f"{lacking}, and equivalence needs every one")
    return replace(result, result="not tested") if result.problem else result


def _no_signal(pairs: Sequence[Pair], metric: str) -> str | None:
    """Why these runs would have agreed on a metric whatever the treatment does; None: they need not have."""
    found = find(metric)
    if found and "given" in found.roles:
        return "it follows from recipe and seed, whatever the arms learn"
    baselines, treatments = [pair.baseline for pair in pairs], [pair.treatment for pair in pairs]
    for runs, arm in ((baselines, "baseline"), (treatments, "treatment")):
        for driver in (GRAD_NORM, LEARNING_RATE):
            values = _recorded(runs, driver)
            if len(values) and not np.nan_to_num(values, posinf=0.0, neginf=0.0).any():
                what = "0" if np.isfinite(values).all() else "0 or not a number"
                return f"{driver} is {what} at every step of every {arm} run: nothing was learned"
    values = _recorded([*baselines, *treatments], metric)
    values = values[np.isfinite(values)]
    if len(values) and np.ptp(values) == 0 and unit_of(metric) != "bytes":  # memory need not move
        return f"it is {values[0]:.6g} at every step of every run of both arms"
    return _one_run_as_two_seeds(baselines, metric) or _one_run_as_two_seeds(treatments, metric)


def _recorded(runs: Sequence[RecordedRun], metric: str) -> Array:
    return np.concatenate([run.series(metric).values for run in runs] or [NO_SERIES.values])


def _one_run_as_two_seeds(runs: Sequence[RecordedRun], metric: str) -> str | None:
    """Two seeds of an arm with the same numbers, but for what a machine adds, are not two observations."""
    seen: dict[bytes, list[RecordedRun]] = {}
    for run in runs:
        alike = seen.setdefault(run.series(metric).values.tobytes(), [])
        twin = next((other for other in alike if _same_numbers(run, other)), None)
        if twin is not None:
            return f"{run} holds the numbers of {twin} at every step: one run, or a seed that changes nothing"
        alike.append(run)
    return None


def _same_numbers(run: RecordedRun, other: RecordedRun) -> bool:
    learned = [one for one in {*run.metrics, *other.metrics} if not is_clock(one) and unit_of(one) != "bytes"]
    return bool(learned) and all(
        np.array_equal(run.series(one).steps, other.series(one).steps)
        and np.array_equal(run.series(one).values, other.series(one).values, equal_nan=True)
        for one in learned
    )


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
    runs = [run for pair in pairs for run in (pair.baseline, pair.treatment)]
    recorded = union(run.series(primary.metric).steps for run in runs)
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
        pairs_needed_observed=pairs_needed(margin, sd, alpha=alpha, true_difference=tost.mean_difference),
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
