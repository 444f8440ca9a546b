"""One run of an arm against the spread of several runs of the other: is its difference seed noise?"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from abrun.logs.recorded.experiment import RecordedExperiment, RecordedRun, Sides
from abrun.messages.codes import Code, Reason
from abrun.recipe.claims import Claim
from abrun.runs.metric_names import default_transform
from abrun.stats.equivalence import ALPHA, holm, mean_and_sd, sd_with_resolution
from abrun.stats.noise import further_run_p, prediction_half_width
from abrun.verdict.description import (
    MAX_OTHER_METRICS,
    default_window,
    informative_metrics,
    untransformed_claim,
)
from abrun.verdict.evidence import Evidence
from abrun.verdict.grids import majority_grid, select_window
from abrun.verdict.sensitivity import check_distinct_seeds
from abrun.verdict.summaries import find_outside_domain, find_resolution, summarize_runs

PREDICTION_CONFIDENCE = 1 - ALPHA


def has_single_run(experiment: RecordedExperiment, arm: str) -> bool:
    """Return True if one of baseline and treatment has a single finished run, and the other several."""
    smaller, larger = sorted(len(_finished_runs(experiment, name)) for name in (arm, experiment.baseline))
    return smaller == 1 < larger


def measure_new_run(experiment: RecordedExperiment, arm: str, claims: Sequence[Claim]) -> list[Evidence]:
    """Return the place of a single run among several, first for claimed metrics; empty with other runs.

    Three families are corrected: claims, the first metrics by their role, and all others.
    """
    if not has_single_run(experiment, arm):
        return []
    arms = sorted((experiment.baseline, arm), key=lambda name: len(_finished_runs(experiment, name)))
    (run,), runs = (_finished_runs(experiment, name) for name in arms)
    claimed = {claim.metric for claim in claims}
    sides = Sides(baselines=tuple(runs), treatments=(run,), paired=False)
    unclaimed = [
        untransformed_claim(metric) for metric in informative_metrics(sides) if metric not in claimed
    ]
    window = default_window(sides)
    families = (
        [_measure_metric(arm, run, runs, claim, claim.window) for claim in claims],
        [_measure_metric(arm, run, runs, claim, window) for claim in unclaimed[:MAX_OTHER_METRICS]],
        # A search of its own, whose size takes no power from the first metrics
        [_measure_metric(arm, run, runs, claim, window) for claim in unclaimed[MAX_OTHER_METRICS:]],
    )
    return [record for family in families for record in _correct_for_multiplicity(family)]


def _correct_for_multiplicity(family: Sequence[Evidence | None]) -> list[Evidence]:
    """Return the measured metrics with Holm's correction, those without a spread last."""
    new_runs = sorted((record for record in family if record), key=lambda record: record["num_sds"] is None)
    adjusted = holm([record["p"] for record in new_runs]) if new_runs else []
    return [
        replace(record, values={**record.values, "p_holm": p_value, "num_metrics": len(new_runs)})
        for record, p_value in zip(new_runs, adjusted, strict=True)
    ]


def _finished_runs(experiment: RecordedExperiment, arm: str) -> list[RecordedRun]:
    return [run for run in experiment.arm(arm).values() if run.finished]


def _measure_metric(
    arm: str, run: RecordedRun, runs: Sequence[RecordedRun], claim: Claim, window: str
) -> Evidence | None:
    """Return the place of a run among others; None if fewer than two of them have its window.

    `interval` holds a further run of the other arm in 95 of 100 cases: mean ± t * sd * sqrt(1 + 1/n), with
    n - 1 degrees of freedom. Levels are on the scale of the claim (for a ratio, its logarithm).
    """
    metric = claim.metric
    runs, copies = _without_copies(runs, metric)
    grid = majority_grid(runs, metric)
    own_steps = run.series(metric).steps
    grid = grid[grid <= own_steps[-1]] if len(own_steps) else own_steps
    selected = select_window([run, *runs], metric, window, grid)
    transform = claim.transform or default_transform(metric)
    has_run = bool(selected.runs) and selected.runs[0] is run
    if not has_run or len(selected.runs) < 3 or not selected.values.size or not selected.bounds:
        return None
    if find_outside_domain(selected.values, transform):
        return None
    level, *others = summarize_runs(selected.values, claim).tolist()
    step = find_resolution(selected.runs[1:], claim, selected.values[1:])
    levels = np.array(others)
    mean, sd = mean_and_sd(levels)[0], sd_with_resolution(levels, step)
    half_width = prediction_half_width(sd, len(levels), PREDICTION_CONFIDENCE)
    p_value = further_run_p(level - mean, sd, len(levels)) if sd > 0 else 1.0
    measured = {
        "run": str(run),
        "several": runs[0].name.arm,  # the arm with several runs
        "metric": metric,
        "window": window,
        "transform": transform,
        "steps": selected.bounds if run.axis == "steps" else None,  # None: final scores
        "num_runs": len(levels),  # of the arm with several runs
        "mean": mean,
        "sd": sd,
        "level": level,  # of the single run
        "difference": level - mean,
        "num_sds": abs(level - mean) / sd if sd > 0 else None,  # None if the runs do not vary
        "interval": (mean - half_width, mean + half_width),
        "p": p_value,  # two-sided, of a further run this far from the mean; 1 if the runs do not vary
        "p_holm": p_value,  # corrected over `num_metrics`: the claimed metrics, or all others
        "num_metrics": 1,
        "left_out": [*copies, *selected.left_out],  # runs of the other arm without the window
    }
    return Evidence(kind="new run", arm=arm, values=measured)


def _without_copies(runs: Sequence[RecordedRun], metric: str) -> tuple[Sequence[RecordedRun], list[Reason]]:
    """Return the runs without those that repeat another one, and the reasons: a copy adds no spread.

    Runs that all have one curve are kept: such a metric does not vary.
    """
    distinct_runs, reasons = list(runs), []
    while repeated := check_distinct_seeds(
        Sides(baselines=tuple(distinct_runs), treatments=(), paired=False), metric
    ):
        distinct_runs = [run for run in distinct_runs if str(run) != repeated["run"]]
        reasons.append(repeated)
    return (distinct_runs, reasons) if len(distinct_runs) > 1 else (runs, [])


def new_run_reasons(new_runs: Sequence[Evidence]) -> list[Reason]:
    """Return the sentence on the first metric, and one on the other metrics outside their range."""
    main, *others = (row for row in new_runs if row["num_sds"] is not None or row is new_runs[0])
    outside = {
        row["metric"]: row["difference"]
        for row in sorted(others, key=lambda row: row["p"])
        if row["p_holm"] < ALPHA
    }
    found = ("run", "several", "num_runs", "metric", "transform", "difference", "num_sds")
    finding = Code.NEW_RUN(
        **{name: main[name] for name in found}, p=main["p_holm"], is_outside=main["p_holm"] < ALPHA
    )
    ranged = ("several", "steps", "num_runs", "mean", "sd", "level", "interval", "num_metrics")
    spread = Code.NEW_RUN_RANGE(**{name: main[name] for name in ranged})
    further = [Code.NEW_RUN_ELSEWHERE(apart=outside, num_metrics=len(others))] if others else []
    return [finding, spread, *further, *main["left_out"]]
