"""Descriptions of arms without a testable claim: levels, differences, and what a claim would need.

With one run of each arm, no test can separate the treatment's effect from seed noise. With several runs,
the confidence interval of the difference shows what could be claimed. The suggested margin depends on the
baseline alone. The other metrics that differ are found at a false discovery rate, over all of them.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from scipy import special

from abrun.errors import ComparisonError
from abrun.logs.recorded.experiment import (
    RecordedExperiment,
    Sides,
    has_prompts_as_units,
    select_units,
    stack_runs,
)
from abrun.messages.codes import Code, Reason
from abrun.recipe.claims import DEFAULT_WINDOW, Claim
from abrun.runs.metric_names import (
    FINAL_WEIGHTS,
    MEMORY_PEAK,
    REWARD,
    STEP_ONE,
    default_transform,
    is_clock,
    is_counter,
    is_memory,
    metric_unit,
    metrics_with_role,
)
from abrun.stats.curves import MIN_STEPS, ROUNDING, is_factor, level_shift_p, ratio_at_each_step
from abrun.stats.equivalence import equivalence_test
from abrun.stats.many_tests import benjamini_hochberg
from abrun.stats.power import pairs_needed, planning_sd
from abrun.stats.series import Array, in_window, window_bounds
from abrun.verdict.claims import judge_equivalence
from abrun.verdict.evidence import Evidence
from abrun.verdict.grids import find_gap, majority_grid
from abrun.verdict.margins import resolve_margin
from abrun.verdict.results import SampleUnit, detect
from abrun.verdict.summaries import (
    find_resolution,
    learning_direction,
    measure_climbs,
    reduce_arms,
    spread_values,
)

MAX_OTHER_METRICS = 12  # of one arm alone: first metrics with a learning direction, then step one's
MAX_CLAIMABLE = 200  # ranked metrics that are tried as a claim
FALSE_DISCOVERY_RATE = 0.1  # of the other metrics that are said to differ (Benjamini and Hochberg 1995)
SHARE_OF_CLIMB, SHARE_OF_LEVEL = 0.1, 0.05  # suggested margin as a share of the baseline
MAX_RATIOS = 3  # reasons about ratios
MIN_MARGIN_BASE = 1e-300  # smallest level or climb that a margin is derived from
# Metrics beside a match that are far apart
MAX_P = 1e-3  # of the step-to-step noise of the mean curves
FAR_LEVEL = 2.0  # ratio of the arms' levels
FAR_PEAK = 5.0  # ratio of the arms' largest distances from their medians


def describe_metrics(experiment: RecordedExperiment, arm: str, claims: Sequence[Claim]) -> list[Evidence]:
    """Describe the claimed metrics, then others; with several runs per arm only if nothing is claimed.

    Returns an empty list if abrun launched the runs and there are several, or if an arm has none.
    """
    sides = experiment.sides(arm).finished
    launched = experiment.launched_compare_sha256 is not None
    has_tests = max(sides.sizes) > 1 or has_prompts_as_units(sides)
    if min(sides.sizes) == 0 or (has_tests and (claims or launched)):
        return []
    windows = {claim.metric: claim.window for claim in claims}
    unclaimed = [metric for metric in rank_metrics(sides) if metric not in windows]
    windows |= dict.fromkeys(unclaimed, default_window(sides))
    declared = experiment if claims or launched else None
    described = (_describe_metric(arm, sides, metric, window, declared) for metric, window in windows.items())
    rows = [row for row in described if row]
    if not rows:
        return []
    leading, *others = rows
    # The first metric is the question; the others are a search, so that their number counts
    p_values = [row["p"] for row in others]
    adjusted = [
        replace(row, values={**row.values, "p_adjusted": p_adjusted, "num_metrics": len(p_values)})
        for row, p_adjusted in zip(others, benjamini_hochberg(p_values), strict=True)
    ]
    claimed = [row for row in adjusted if row["metric"] in [claim.metric for claim in claims]]
    searched = [row for row in adjusted if row not in claimed]
    # A saving of memory, which has no noise, is often what the treatment is for
    searched.sort(key=lambda row: (is_memory(row["metric"]), row["p"]) if is_discovered(row) else (2, 0.0))
    return [leading, *claimed, *searched]


def is_discovered(row: Evidence) -> bool:
    """Return whether a metric other than the first is said to differ."""
    return row["p_adjusted"] is not None and row["p_adjusted"] <= FALSE_DISCOVERY_RATE


def find_claimable_metric(
    experiment: RecordedExperiment, redefined: Collection[str] = ()
) -> Evidence | Reason | None:
    """Return the first metric for which some treatment's runs could have shown a sensible difference.

    The margin is in the metric's own units. A `redefined` metric measures something else in each arm. Without
    any such metric: why the first one shows nothing; None if nothing could be described.
    """
    first_problem = None
    for arm in experiment.treatments:
        all_sides = experiment.sides(arm).finished
        if min(all_sides.sizes) == 0:
            continue
        window = default_window(all_sides)
        for metric in rank_metrics(all_sides)[:MAX_CLAIMABLE]:
            if metric in (
                MEMORY_PEAK,
                FINAL_WEIGHTS,
                *redefined,
            ):  # the first two mean another thing in a claim
                continue
            declared = experiment if experiment.launched_compare_sha256 else None
            description = _describe_metric(arm, all_sides, metric, window, declared)
            if description is None or description["margin"] is None:
                continue
            grid, (first_step, last_step) = experiment.metric_steps(metric), description["steps"]
            if (
                all_sides.axis == "steps" and last_step < grid[-1]
            ):  # a claim's window ends with the longest run
                shared_window = {"window": f"steps {first_step}-{last_step}"}
                description = replace(description, values={**description.values, **shared_window})
            sides, _ = _select_recorded(all_sides, metric, window)
            units, claim = select_units(sides, metric), build_claim(description)
            margin = resolve_margin(claim, None)
            problem = judge_equivalence(arm, units, claim, margin, grid, may_repeat=True).problem
            if problem is None and default_transform(metric) == "identity":
                return description
            first_problem = first_problem or problem
    return first_problem


def build_claim(description: Evidence) -> Claim:
    """Return a claim on the described metric with its suggested margin."""
    claimed = {name: description[name] for name in ("metric", "window", "margin")}
    return Claim(**claimed, climbs=description["axis"] == "steps")


def default_window(sides: Sides) -> str:
    return DEFAULT_WINDOW if sides.axis == "steps" else "all"


def count_metrics(sides: Sides) -> tuple[int, int]:
    """Return the number of metrics that every run recorded, and the number that any run recorded."""
    recorded = [{*run.metrics} for run in sides.finished.runs]
    return len(set.intersection(*recorded)), len(set.union(*recorded))


def no_shared_metric_reason(sides: Sides) -> Reason:
    """Return which metrics each arm recorded, if none of them can be described."""
    recorded = [sorted({name for run in runs for name in run.metrics}) for runs in sides.arms]
    names = {*recorded[0], *recorded[1]}
    unread = [problem for run in sides.runs for name, problem in run.unread.items() if name in names]
    return Code.NO_SHARED_METRIC(
        baseline=recorded[0][:4], treatment=recorded[1][:4], unread=unread[0] if unread else None
    )


def rank_metrics(sides: Sides) -> list[str]:
    """Return the metrics that describe the training, first those with a learning direction.

    At least half of the runs of each arm recorded them; a run that did not is left out for that metric.
    """
    counts = [Counter(name for run in runs for name in run.metrics) for runs in sides.arms if runs]
    recorded = [
        metric
        for metric in counts[0]
        if all(
            2 * count[metric] >= len(runs)
            for count, runs in zip(counts, filter(None, sides.arms), strict=True)
        )
    ]
    informative = (metric for metric in recorded if not (is_clock(metric) or is_counter(metric)))
    return sorted(informative, key=lambda metric: _metric_rank(sides, metric))


def informative_metrics(sides: Sides) -> list[str]:
    """Return the ranked metrics without those that the configuration sets, such as the learning rate."""
    configured = metrics_with_role("configured")
    return [metric for metric in rank_metrics(sides) if metric not in configured]


def _metric_rank(sides: Sides, metric: str) -> tuple[bool, int, int, str]:
    values = np.concatenate([run.series(metric).values for run in sides.runs])
    is_constant = len(values) > 1 and bool((values == values[0]).all())  # a setting, not a result
    direction = learning_direction(sides.baselines[0], metric)
    direction_rank = 0 if metric == REWARD else 1 if direction == 1 else 2 if direction == -1 else 3
    step_one_rank = STEP_ONE.index(metric) if metric in STEP_ONE else len(STEP_ONE)
    is_repeated = " vs " in metric  # Megatron-LM logs curves twice: `lm loss vs samples`
    return (
        is_constant and metric != REWARD,
        direction_rank + 4 * is_repeated,
        step_one_rank + 100 * (metric in metrics_with_role("configured")),
        metric,
    )


def _describe_metric(
    arm: str, sides: Sides, metric: str, window: str, declared: RecordedExperiment | None
) -> Evidence | None:
    """Describe one metric; None if the window holds no finite value of every run.

    If nothing was declared, the window is taken over the steps at which every run recorded the metric.
    """
    axis, unit = sides.axis, "prompt" if has_prompts_as_units(sides) else "seed"
    sides, left_out = _select_recorded(sides, metric, window)
    sides = select_units(sides, metric)
    steps, values = stack_runs(sides.runs, metric)
    grid = declared.metric_steps(metric) if declared else steps
    is_finite = np.isfinite(values).all(axis=0)
    steps, values = steps[is_finite], values[:, is_finite]
    try:
        first_step, last_step = window_bounds(window, grid, metric) if len(grid) else (0, -1)
    except ComparisonError:
        return None
    inside = in_window(steps, (first_step, last_step))
    if not inside.any():
        return None
    first, second = np.split(values[:, inside], [sides.sizes[0]])
    curves = values[: sides.sizes[0]], values[sides.sizes[0] :]
    baseline, treatment = reduce_arms(first, second, metric, stepwise=sides.share_rollouts)
    distance = np.abs(values[-1] - values[0]) if sides.sizes == (1, 1) else None
    varying = spread_values(first, second, paired=sides.paired)
    step = find_resolution(sides.runs, untransformed_claim(metric), varying)
    if sides.paired and len(steps) >= MIN_STEPS and not (curves[1] - curves[0]).any():
        step = 0.0  # a curve that is repeated at every step repeats itself for good reason
    margin, margin_is = _suggest_margin(sides, metric, float(baseline.mean()), last_step)
    ratio = ratio_at_each_step(*curves)
    described = {
        "metric": metric,
        "window": window,
        "axis": axis,
        "unit": unit,  # what a pair shares
        "steps": (first_step, last_step),  # of the window
        "num_runs": sides.sizes,  # prompts of one run each if they are the unit
        "paired": sides.paired,
        "baseline": float(baseline.mean()),  # over runs, of the window's mean (median for spiky metrics)
        "treatment": float(treatment.mean()),
        "difference": float(treatment.mean() - baseline.mean()),
        # Distance of the two curves over all shared steps; None with several runs of an arm
        "mean_distance": None if distance is None else float(distance.mean()),
        "largest_distance": None if distance is None else float(distance.max()),
        "largest_at": None if distance is None else int(steps[distance.argmax()]),
        **(
            _describe_errors(sides, metric)
            or _describe_test(sides, unit, (baseline, treatment), margin, step, curves)
        ),
        "p_adjusted": None,  # over the `num_metrics` other metrics (Benjamini-Hochberg); None of the first
        "num_metrics": 1,
        "margin": margin,  # suggested from the baseline alone; None if the baseline is 0
        "margin_is": margin_is,  # how the margin was derived
        # Geometric mean, minimum and maximum of treatment / baseline over all steps and pairs, if all of
        # these ratios are on one side of 1 and their mean is not near it; None otherwise
        "ratio_at_each_step": ratio,
        # That ratio is nearly constant and explains the treatment better than a shift
        "is_factor": ratio is not None and is_factor(ratio, *curves),
        "num_steps": len(steps),  # that all runs share
        "left_out": left_out,  # runs that do not count for this metric, each with its reason
    }
    return Evidence(kind="description", arm=arm, values=described)


def _select_recorded(sides: Sides, metric: str, window: str) -> tuple[Sides, list[Reason]]:
    """Return the runs that recorded a window of a metric, and why the others are left out.

    Values that are not finite exclude a run only if others remain.
    """
    grid = majority_grid(sides.runs, metric)
    try:
        bounds = window_bounds(window, grid, metric) if len(grid) and sides.axis == "steps" else None
    except ComparisonError:
        bounds = None
    problems = [[find_gap(run, metric, bounds) for run in runs] for runs in sides.arms]
    for ignored in ((), (Code.LEFT_OUT_NOT_FINITE,)):
        masks = [[problem is None or problem.code in ignored for problem in arm] for arm in problems]
        usable = sides.select(masks[0], masks[1])
        if min(usable.sizes):
            left_out = [problem for arm in problems for problem in arm if problem]
            return usable, [problem for problem in left_out if problem.code not in ignored]
    return sides, []


def _describe_errors(sides: Sides, metric: str) -> dict[str, Any] | None:
    """Return the test of two values by their standard errors; None if they have none.

    z = (b - a) / sqrt(SE_a^2 + SE_b^2), as in `model_comparator.py` of lm-evaluation-harness.
    """
    errors = [run.standard_errors.get(metric, 0.0) for run in sides.runs]
    if sides.sizes != (1, 1) or not math.isfinite(error := math.hypot(*errors)) or not all(errors):
        return None
    first, second = (float(run.series(metric).values[0]) for run in sides.runs)
    half_width = float(special.ndtri(0.95)) * error
    return {
        "p": float(2 * special.ndtr(-abs(second - first) / error)),
        "interval": (second - first - half_width, second - first + half_width),
        **dict.fromkeys(("detected", "certified_bound", "runs_needed")),
    }


def _describe_test(
    sides: Sides,
    unit: SampleUnit,
    arms: tuple[Array, Array],  # [R] one summary per run
    margin: float | None,
    resolution: float,
    curves: tuple[Array, Array],  # [R, S]
) -> dict[str, Any]:
    """Return what an equivalence test says of two arms' values; only a p with one run of each arm."""
    level = max(np.abs(values).max() for values in curves)
    is_rounding = bool(np.abs(arms[1].mean() - arms[0].mean()) <= ROUNDING * level)
    if min(sides.sizes) == 1:
        p_value = float(level_shift_p(curves[1].mean(axis=0) - curves[0].mean(axis=0)))
        unknown = dict.fromkeys(("detected", "interval", "certified_bound", "runs_needed"))
        return {"p": 1.0 if is_rounding else p_value, **unknown}
    paired = sides.paired
    test = equivalence_test(*arms, 1.0, resolution=resolution, paired=paired)
    detected = detect(*arms, test.mean_difference, test.interval, paired=paired, unit=unit)
    sd, dof_per_pair = planning_sd(*arms, test.standard_error, resolution, paired=paired)
    return {
        # Two-sided, of no difference; with one run of each arm beside the noise from step to step
        "p": 1.0 if is_rounding else test.p_difference,
        "detected": detected and asdict(detected),  # None if the interval includes zero
        "interval": test.interval,  # 90 % confidence interval of the difference
        "certified_bound": test.certified_bound,  # smallest margin that would pass now
        # Sample size for 80 % power at the suggested margin; None above 1000
        "runs_needed": pairs_needed(margin, sd, dof_per_pair=dof_per_pair) if margin else None,
    }


def _ratio_reasons(described: Sequence[Evidence], baseline: str) -> list[Reason]:
    """Return the metrics in which one arm is above the other at every step, the largest ratios first."""
    unlearned = metrics_with_role("configured")
    ratios = [
        row
        for row in described
        if row["ratio_at_each_step"]
        and row["metric"] not in unlearned
        and metric_unit(row["metric"]) != "bytes"
    ]
    ratios.sort(key=lambda row: -abs(math.log(row["ratio_at_each_step"][0])))
    return [
        Code.RATIO_AT_EACH_STEP(
            metric=row["metric"],
            arm=row.arm,
            baseline=baseline,
            ratio=row["ratio_at_each_step"],
            steps=row["num_steps"],
            pairs=row["num_runs"][0],
            # A treatment may be for less memory or time, which is no other scale
            constant=row["is_factor"] and not (is_clock(row["metric"]) or is_memory(row["metric"])),
        )
        for row in ratios[:MAX_RATIOS]
    ]


def description_reasons(described: Sequence[Evidence], baseline: str) -> list[Reason]:
    """Return reasons: ratios that hold at every step, the first metric's difference, and the others'."""
    main, *further = described
    fields = ("metric", "steps", "axis", "unit", "paired", "difference", "interval", "detected")
    finding = Code.DESCRIBED(
        arm=main.arm,
        baseline=baseline,
        levels=[main["baseline"], main["treatment"]],
        runs=main["num_runs"],
        **{name: main[name] for name in fields},
    )
    differences = {row["metric"]: row["difference"] for row in further if is_discovered(row)}
    return [
        *_ratio_reasons(described, baseline),
        finding,
        *(
            Code.OTHER_METRICS(
                apart=differences,
                num_metrics=row["num_metrics"],
                rate=FALSE_DISCOVERY_RATE,
                of_steps=max(main["num_runs"]) == 1 and main["axis"] == "steps",
            )
            for row in further[:1]
        ),
        *_left_out_reasons(described),
    ]


def _left_out_reasons(described: Sequence[Evidence]) -> Iterator[Reason]:
    """Yield the runs that do not count, each with the metrics for which they do not."""
    rows_of: dict[Reason, list[Evidence]] = {}
    for row in described:
        for reason in row["left_out"]:
            rows_of.setdefault(Reason(reason.code, {**reason.values, "metric": ""}), []).append(row)
    for reason, rows in rows_of.items():
        yield Code.LEFT_OUT_OF_METRICS(
            metrics=[row["metric"] for row in rows],
            remaining=rows[0]["num_runs"],
            paired=rows[0]["paired"],
            **{name: reason.values.get(name) for name in ("run", "covered", "step")},
        )


def untransformed_claim(metric: str) -> Claim:
    """Return a claim on the metric as it is recorded: descriptions take no logarithm."""
    # Not validated: a log may have a metric `memory`, which a declared claim reads as the peak of all phases.
    return Claim.model_construct(metric=metric, margin=1.0, transform="identity")


def _suggest_margin(sides: Sides, metric: str, level: float, last_step: int) -> tuple[float | None, Reason]:
    """Return a tenth of the baseline's climb, or else a twentieth of its level, rounded up to one digit."""
    climb = float(np.mean(measure_climbs(sides.baselines, untransformed_claim(metric), last_step)))
    if sides.axis == "steps" and math.isfinite(climb) and climb > MIN_MARGIN_BASE:  # scores do not climb
        return _round_margin(SHARE_OF_CLIMB, "climb", climb)
    if math.isfinite(level) and abs(level) > MIN_MARGIN_BASE:
        return _round_margin(SHARE_OF_LEVEL, "level", abs(level))
    return None, Code.MARGIN_OFFERED(of="zero", size=0.0, rounded_up_to=None)


def _round_margin(share: float, of: str, size: float) -> tuple[float, Reason]:
    """Return a margin of one digit and its origin: rounded up, unless the share has one digit itself."""
    digit = 10.0 ** math.floor(math.log10(share * size))
    margin = float(f"{math.ceil(round(share * size / digit, 6)) * digit:.1g}")
    is_exact = f"{share * size:.3g}" == f"{margin:.3g}"
    return margin, Code.MARGIN_OFFERED(of=of, size=size, rounded_up_to=None if is_exact else margin)


# Metrics without a claim in which arms are far apart although every claim holds: a line, and no verdict


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
