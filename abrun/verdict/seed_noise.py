"""Seed noise of one arm alone: level, spread over seeds, and the differences that pairs would show."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from abrun.errors import ComparisonError
from abrun.experiment.power import Spread, plan_claim_power
from abrun.logs.recorded.experiment import RecordedExperiment, RecordedRun, Sides
from abrun.messages.codes import Code, Reason
from abrun.recipe.claims import Claim, describe_claim
from abrun.runs.metric_names import DIVERGENCE_RATE, default_transform
from abrun.stats.equivalence import limit_test, sd_with_resolution
from abrun.stats.noise import detectable_difference, gap_of_two_runs, passing_margin, two_groups
from abrun.stats.power import sd_interval, sd_of_difference
from abrun.stats.rates import are_outcomes
from abrun.stats.series import Array, window_bounds
from abrun.verdict.decide import InterimAnalysis, Verdict, decide_verdict, judge_claims
from abrun.verdict.description import (
    MAX_OTHER_METRICS,
    default_window,
    informative_metrics,
    untransformed_claim,
)
from abrun.verdict.evidence import Evidence
from abrun.verdict.grids import majority_grid, select_window
from abrun.verdict.limits import counts_failures
from abrun.verdict.results import ClaimResult
from abrun.verdict.sensitivity import check_distinct_seeds
from abrun.verdict.skewness import VALUES, find_skew
from abrun.verdict.summaries import find_outside_domain, find_resolution, measure_climbs, summarize_runs
from abrun.verdict.validity import check_copies, check_mixed_configs

PAIR_COUNTS = (3, 5, 8, 10)
GAP_CONFIDENCE = 0.95
INTERVAL_CONFIDENCE = 0.9  # of the level and of the sd, as in descriptions
MIN_SD = 1e-12  # relative to the level; a smaller sd is rounding
GROUPS_P = 0.01  # levels that split this clearly are two groups


@dataclass(frozen=True, slots=True, kw_only=True)
class OneArm:
    """One arm without another to compare it with: its seed noise, and what makes it unfit to measure."""

    arm: str
    verdict: Verdict
    reasons: list[Reason]
    claims: list[ClaimResult]  # on the arm's level; others stay open
    evidence: list[Evidence]


def describe_one_arm(experiment: RecordedExperiment) -> OneArm:
    """Test the claims on the level of the baseline, which is the only arm, and measure its seed noise.

    Every run counts for a claim, those that failed, too. The verdict is INVALID for runs that are copies, or
    whose configurations differ in more than the seed. Raises ComparisonError if no run has a metric.
    """
    runs = [run for run in experiment.arm(experiment.baseline).values() if run.finished]
    noise = list(measure_noise(experiment, runs))
    has_levels = any(record["levels"] for record in noise)
    if not (has_levels or counts_failures(experiment.compare.claims)):  # an arm of crashed runs has a rate
        raise ComparisonError(Code.NO_METRIC_TO_DESCRIBE(arm=experiment.baseline))
    sides = Sides(baselines=tuple(runs), treatments=(), paired=False)
    invalid = [*check_copies(runs), *check_mixed_configs(sides)]
    num_unfinished = len(experiment.arm(experiment.baseline)) - len(runs)
    compare, claims = experiment.compare, experiment.compare.claims
    analysis = InterimAnalysis(
        num_pairs=0, alpha=compare.alpha, alpha_difference=compare.alpha, alpha_guards=0.0
    )
    results = judge_claims(experiment, claims, analysis)[experiment.baseline] if claims else []
    verdict, outcomes = decide_verdict(
        invalid,
        (),
        results,
        reads_step_one=False,
        has_recipe=experiment.has_recipe,
        baseline_arm=experiment.baseline,
        require=compare.require,
    )
    reasons = [
        *(outcomes if claims or invalid else ()),
        *noise_reasons(noise),
        *([Code.UNFINISHED_LEFT_OUT(num=num_unfinished)] if num_unfinished else []),
        *([] if claims else [Code.NOTHING_TO_COMPARE()]),
    ]
    if invalid:
        results = [replace(result, result="not tested") for result in results]
    return OneArm(arm=experiment.baseline, verdict=verdict, reasons=reasons, claims=results, evidence=noise)


def measure_noise(experiment: RecordedExperiment, runs: Sequence[RecordedRun]) -> Iterator[Evidence]:
    """Yield the seed noise of each claim, then that of other metrics that describe the training.

    Raises ComparisonError for a claim whose window the runs do not have.
    """
    counted = (claim for claim in experiment.compare.claims if claim.metric != DIVERGENCE_RATE)
    claims = [(claim, True) for claim in counted]
    claimed = {claim.metric for claim, _ in claims}
    sides = Sides(baselines=tuple(runs), treatments=(), paired=False)
    others = [metric for metric in informative_metrics(sides) if metric not in claimed] if runs else []
    claims += [(untransformed_claim(metric), False) for metric in others[:MAX_OTHER_METRICS]]
    for claim, is_claimed in claims:
        yield _measure_metric(experiment, sides, claim, is_claimed=is_claimed)


def _measure_metric(
    experiment: RecordedExperiment, sides: Sides, claim: Claim, *, is_claimed: bool
) -> Evidence:
    """Return one metric of the arm over its seeds, on the scale of its claim (for a ratio, its logarithm)."""
    window = claim.window if is_claimed else default_window(sides)
    grid = majority_grid(sides.runs, claim.metric)
    if is_claimed and len(grid):
        window_bounds(window, grid, claim.metric)  # raises an error
    selected = select_window(sides.runs, claim.metric, window, grid)
    transform = claim.transform or default_transform(claim.metric)
    noise: dict[str, Any] = {
        "metric": claim.metric,
        "window": window,
        "transform": transform,
        "claim": describe_claim(claim) if is_claimed else None,  # None: the metric is not claimed
        "steps": selected.bounds if sides.axis == "steps" else None,  # None: final scores
        "levels": {},  # run -> its level in the window
        "mean": None,
        "mean_interval": None,  # 90 % confidence interval
        "sd": None,  # over seeds; None with fewer than two runs
        "sd_interval": None,  # 90 %, for normal levels
        "gap": None,  # two further runs are no further apart in 95 of 100 cases
        "prospects": [],  # empty without a spread
        "pairs_needed": None,  # for 80 % power of the claim; None: no claim, or more than 1000
        "warnings": selected.left_out,  # runs left out, levels that are not normal
    }

    def without_spread(problem: Reason, **known: object) -> Evidence:
        values = {**noise, **known}
        return Evidence(kind="seed noise", arm=experiment.baseline, reason=problem, values=values)

    if not selected.values.size:
        return without_spread(Code.NO_RUN_IN_WINDOW(metric=claim.metric, window=window))
    if outside := find_outside_domain(selected.values, transform):
        return without_spread(Code.CLAIM_OUTSIDE_DOMAIN(problem=outside))
    levels = summarize_runs(selected.values, claim)
    names = map(str, selected.runs)
    noise |= {"levels": dict(zip(names, levels.tolist(), strict=True)), "mean": float(levels.mean())}
    if len(levels) < 2:
        return without_spread(Code.ONE_RUN_ALONE(run=str(selected.runs[0])))
    step = find_resolution(selected.runs, claim, selected.values)
    used = Sides(baselines=tuple(selected.runs), treatments=(), paired=False)
    if sd_with_resolution(levels, step) <= MIN_SD * float(np.abs(levels).max()):
        problem = check_distinct_seeds(used) or Code.RUNS_ALIKE(num_runs=len(levels))
        return without_spread(problem, sd=0.0)
    if repeated := check_distinct_seeds(used, claim.metric):
        return without_spread(repeated)
    if are_outcomes(levels):
        return without_spread(Code.OUTCOMES_HAVE_NO_GAP(), mean_interval=limit_test(levels, 0.0).interval)

    noise |= _measure_spread(noise, experiment, selected.runs, levels, step, claim if is_claimed else None)
    return Evidence(kind="seed noise", arm=experiment.baseline, values=noise)


def _measure_spread(
    noise: Mapping[str, Any],
    experiment: RecordedExperiment,
    runs: Sequence[RecordedRun],
    levels: Array,
    step: float,
    claim: Claim | None,
) -> dict[str, Any]:
    """Return the spread over at least two runs, and what pairs of runs would show.

    Arms that share their seeds may vary together, and pairs then show more: their correlation counts as 0.
    """
    sd, num_runs = sd_with_resolution(levels, step), len(levels)
    climb = float("nan")
    if claim is not None and noise["steps"]:  # scores do not climb
        climb = float(np.mean(measure_climbs(runs, claim, noise["steps"][1])))
    spread = Spread(
        sigma=sd,
        correlation=0.0,
        sd_difference=sd_of_difference(sd, 0.0),
        num_pairs=num_runs,
        source=f"measured in {experiment.name} over {num_runs} runs",
        level=float(levels.mean()),
        climb=climb if np.isfinite(climb) else None,
    )
    alpha = experiment.compare.alpha
    power = plan_claim_power(claim, experiment.compare, spread, alpha) if claim else None
    prospects = [
        {
            "num_pairs": count,
            # Smallest true difference that is detected with 80 % power
            "difference": detectable_difference(spread.planned_sd, count, alpha),
            # Smallest margin within which equal arms match with 80 % power
            "margin": passing_margin(spread.planned_sd, count, alpha),
            # P(match) of the claim if the arms are equal; None without a margin
            "match_power": power.power(count) if power else None,
        }
        for count in PAIR_COUNTS
    ]
    return {
        "mean_interval": limit_test(levels, 0.0, resolution=step).interval,
        "sd": sd,
        "sd_interval": sd_interval(sd, num_runs, INTERVAL_CONFIDENCE),
        "gap": gap_of_two_runs(sd, num_runs, GAP_CONFIDENCE),
        "prospects": prospects,
        "pairs_needed": power.pairs_needed if power else None,
        "warnings": [*noise["warnings"], *_shape_warnings(noise["levels"], levels, step, sd)],
    }


def _shape_warnings(by_run: dict[str, float], levels: Array, step: float, sd: float) -> Iterator[Reason]:
    """Yield a warning on levels in two groups, or else on skewed ones: intervals are for normal levels."""
    groups = two_groups(levels)
    if groups is not None and groups[1] < GROUPS_P:
        split = groups[0]
        below = [run for run, level in by_run.items() if level < split]
        above = [run for run, level in by_run.items() if level >= split]
        yield Code.TWO_GROUPS(
            runs=[below, above],
            levels=[float(np.mean([by_run[run] for run in group])) for group in (below, above)],
        )
    elif skew := find_skew({VALUES: levels}, step=step, min_sd=1e-9 * sd):
        yield skew


def noise_reasons(noise: Sequence[Evidence]) -> list[Reason]:
    """Return the sentences on the first metric with a spread, or on why there is none."""
    main = next((record for record in noise if record["gap"] is not None), None)
    main = main or next((record for record in noise if record["levels"]), None)
    if main is None:  # an arm of crashed runs
        return []
    unmeasured = [record["metric"] for record in noise if not record["levels"]]
    notes = [*main["warnings"], *([Code.METRICS_WITHOUT_LEVEL(metrics=unmeasured)] if unmeasured else [])]
    shared = {"metric": main["metric"], "level": main["mean"]}
    sample = {"steps": main["steps"], "num_runs": len(main["levels"])}
    if main["gap"] is None:
        problem = [main.reason] if main.reason else []
        return [Code.LEVEL_ALONE(arm=main.arm, **shared, **sample), *problem, *notes]

    shared["transform"] = main["transform"]
    return [
        Code.NORMAL_GAP(**shared, arm=main.arm, gap=main["gap"]),
        Code.SEED_NOISE(**shared, **sample, sd=main["sd"], interval=main["sd_interval"]),
        Code.PAIRS_SHOW(
            counts=[prospect["num_pairs"] for prospect in main["prospects"]],
            differences=[prospect["difference"] for prospect in main["prospects"]],
        ),
        *notes,
    ]
