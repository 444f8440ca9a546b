"""Sensitivity of a comparison: faults injected in the baseline, each judged like a treatment."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from abrun.logs.recorded.experiment import Pair, RecordedExperiment
from abrun.messages.codes import Code, Reason
from abrun.messages.numbers import certified_text
from abrun.recipe.faults import LIBRARY, ONE_ULP, Fault, InjectedFault
from abrun.runs.metric_names import TOKEN_MULT_PROB_ERROR
from abrun.verdict.decide import FAILING, ArmVerdict, judge
from abrun.verdict.evidence import Evidence
from abrun.verdict.results import ClaimResult

CaughtBy = Literal["step one", "guard", "claim", "nothing"]


def measure_sensitivity(experiment: RecordedExperiment) -> list[Evidence]:
    """Judge each injected fault by itself, in the order of the recipe. Never part of a verdict."""
    if experiment.regression:
        return []
    return [
        _judge_fault(experiment, arm, injected)
        for arm, injected in experiment.injected.items()
        if injected.name != ONE_ULP
    ]


def _judge_fault(experiment: RecordedExperiment, arm: str, injected: InjectedFault) -> Evidence:
    """Return one injected fault, judged against the baseline as a treatment is; its result is a verdict."""
    fault_experiment = replace(
        experiment,
        arms=(experiment.baseline, arm),
        compare=experiment.compare.model_copy(update={"interim": []}),
        runs={
            name: run
            for name, run in {**experiment.runs, **experiment.controls}.items()
            if name.arm in (experiment.baseline, arm)
        },
        injected={},
        controls={},
    )
    (judged,) = judge(fault_experiment, fault_experiment.compare.claims)
    caught_by, metric, step, figures = _find_evidence(judged, fault_experiment)
    fault = LIBRARY[injected.name]
    differing = (reason for reason in judged.reasons if reason.code is Code.STEP_ONE_DIFFERS)
    shown = [reason for reason in differing if reason["metric"] == metric]
    runs = (*experiment.runs.values(), *experiment.controls.values())
    num_steps = max((int(run.steps[-1]) for run in runs if len(run.steps)), default=0)
    is_missed = caught_by == "nothing" and judged.verdict != "INVALID"
    values = {
        "fault": fault.name,
        "size": None if fault.size is None else injected.amount,
        "unit": fault.unit,
        "caught_by": caught_by,  # the earliest evidence; "nothing" unless the verdict is MISMATCH
        "metric": metric,  # of the step or claim, or the name of the guard
        "step": step,  # first step that shows it: for a claim its last step
        "num_pairs": min(judged.num_runs) if judged.num_runs else judged.num_pairs,
        "num_steps": num_steps,  # of the longest run of the experiment
        # Value and limit of what caught it; for a missed fault, the first claim's estimate, if any
        "figures": figures,
        # For a missed fault: what could show it
        "advice": _advise(fault, injected.amount, judged, num_steps) if is_missed else None,
    }
    reason = next(iter(shown), judged.reasons[0])
    return Evidence(kind="injected fault", arm=arm, result=judged.verdict, reason=reason, values=values)


def _find_evidence(
    judged: ArmVerdict, experiment: RecordedExperiment
) -> tuple[CaughtBy, str | None, int | None, Reason | None]:
    """Return the earliest evidence of a mismatch (step one, then guards, then claims) with its figures."""
    if judged.verdict not in FAILING:
        return "nothing", None, None, _claim_figures(judged.claims[0]) if judged.claims else None
    checks, guards = (
        [item for item in judged.select(kind) if item.result == "fail"] for kind in ("step one", "guard")
    )
    if checks:
        worst = max(checks, key=lambda check: check["deviation"] / check["tolerance"])
        sizes = ("deviation", "scale", "scale_from", "tolerance")
        figures = Code.FOUND_BY_STEP_ONE(**{name: worst[name] for name in sizes})
        return "step one", worst["metric"], worst["step"], figures
    if guards:
        failing = guards[0]
        limit = experiment.compare.guards.token_mult_prob_error_median
        is_error = failing.reason is not None and failing.reason.code is Code.TOKEN_ERROR_EXCEEDED
        step = _first_step_above(experiment.pairs(judged.arm), limit) if is_error else None
        numbers = {name: failing[name] for name in ("value", "limit")}
        figures = failing.reason if None in numbers.values() else Code.FOUND_BY_GUARD(**numbers)
        return "guard", failing["guard"], step, figures
    differing = next(result for result in judged.claims if result.result == "different")
    claim = differing.claim
    return "claim", claim.metric, claim.steps[1] if claim.steps else None, _claim_figures(differing)


def _claim_figures(result: ClaimResult) -> Reason | None:
    """Return a claim's estimate and its allowed size; None without an estimate."""
    terms, estimate = result.claim, result.estimate
    if estimate.limited is not None:
        return Code.LIMITED_METRIC(metric=terms.metric, value=estimate.limited, limit=terms.margin_text)
    if estimate.mean_difference is None:
        return None
    return Code.MOVED_METRIC(
        metric=terms.metric,
        difference=estimate.mean_difference,
        bound=certified_text(estimate.certified_bound, estimate.certified_number, terms.margin_unit),
        margin=terms.margin_text,
    )


def _advise(fault: Fault, amount: float, judged: ArmVerdict, num_steps: int) -> Reason:
    """Return what a larger experiment, or a larger fault, could show."""
    num_pairs = min(judged.num_runs) if judged.num_runs else judged.num_pairs
    checks = judged.select("step one")
    undecided_metrics = [check["metric"] for check in checks if check.result == "open"]
    within_tolerance = [
        check
        for check in checks
        if check["aa_deviation"] is not None
        and check["aa_deviation"] < check["deviation"] <= check["tolerance"]
    ]
    worst = max(within_tolerance, key=lambda check: check["deviation"], default=None)
    can_grow = fault.size is not None and (fault.most is None or amount < fault.most)
    return Code.FAULT_MISSED(
        num_pairs=num_pairs if judged.verdict == "INCONCLUSIVE" else None,
        paired=judged.num_runs is None,
        rounded_metric=undecided_metrics[0] if undecided_metrics else None,
        tolerance=worst and {name: worst[name] for name in ("metric", "deviation", "aa_deviation")},
        amount=amount if can_grow else None,
        most=fault.most,
        num_steps=num_steps,
        shows=fault.shows,
    )


def _first_step_above(pairs: Sequence[Pair], limit: float) -> int | None:
    """Return the first step at which any run exceeds the guard on engine and trainer; None if none does."""
    steps = [
        series.steps[above][0]
        for pair in pairs
        for series in [pair.treatment.series(TOKEN_MULT_PROB_ERROR)]
        if (above := ~(series.values <= limit)).any()
    ]
    return int(np.min(steps)) if steps else None
