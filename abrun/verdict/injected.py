"""Sensitivity of a comparison: faults injected in the baseline, each judged like a treatment."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from abrun.logs.recorded.experiment import Pair, RecordedExperiment
from abrun.messages.codes import Code, Reason
from abrun.messages.numbers import certified_text
from abrun.recipe.faults import LIBRARY, ONE_ULP, Fault, InjectedFault
from abrun.runs.metric_names import TOKEN_MULT_PROB_ERROR
from abrun.verdict.decide import FAILING, ArmVerdict, Verdict, judge
from abrun.verdict.results import ClaimResult

Evidence = Literal["step one", "guard", "claim", "nothing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultResult:
    """One injected fault, judged against the baseline by the ordinary judge."""

    fault: str
    arm: str
    size: float | None  # None if the fault has no size
    unit: str
    verdict: Verdict
    caught_by: Evidence  # earliest evidence; "nothing" unless the verdict is MISMATCH
    metric: str | None  # metric of the step or claim, or name of the guard
    step: int | None  # first step that shows it: for a claim its last step
    num_pairs: int  # unpaired: runs of each arm
    # Value and limit of what caught it; for a missed fault, the first claim's estimate, if any.
    figures: Reason | None
    reason: Reason  # first reason of the verdict
    advice: Reason | None  # for a missed fault: what could show it

    @property
    def caught(self) -> bool:
        return self.caught_by != "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """All injected faults, in the order of the recipe."""

    num_caught: int
    num_judged: int  # all but INVALID ones
    num_pairs: int  # maximum over faults
    num_steps: int  # of the longest run
    faults: list[FaultResult]


def measure_sensitivity(experiment: RecordedExperiment) -> Sensitivity | None:
    """Judge each injected fault by itself; None if there is none. Never part of a verdict."""
    faults = {arm: injected for arm, injected in experiment.injected.items() if injected.name != ONE_ULP}
    if not faults or experiment.regression:
        return None
    judged_faults = [_judge_fault(experiment, arm, injected) for arm, injected in faults.items()]
    return Sensitivity(
        num_caught=sum(fault.caught for fault in judged_faults),
        num_judged=sum(fault.verdict != "INVALID" for fault in judged_faults),
        num_pairs=max(fault.num_pairs for fault in judged_faults),
        num_steps=_max_num_steps(experiment),
        faults=judged_faults,
    )


def _judge_fault(experiment: RecordedExperiment, arm: str, injected: InjectedFault) -> FaultResult:
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
    is_missed = caught_by == "nothing" and judged.verdict != "INVALID"
    return FaultResult(
        fault=fault.name,
        arm=arm,
        size=None if fault.size is None else injected.amount,
        unit=fault.unit,
        verdict=judged.verdict,
        caught_by=caught_by,
        metric=metric,
        step=step,
        num_pairs=min(judged.num_runs) if judged.num_runs else judged.num_pairs,
        figures=figures,
        advice=_advise(fault, injected.amount, judged, _max_num_steps(experiment)) if is_missed else None,
        reason=next(iter(shown), judged.reasons[0]),
    )


def _find_evidence(
    judged: ArmVerdict, experiment: RecordedExperiment
) -> tuple[Evidence, str | None, int | None, Reason | None]:
    """Return the earliest evidence of a mismatch (step one, then guards, then claims) with its figures."""
    if judged.verdict not in FAILING:
        return "nothing", None, None, _claim_figures(judged.claims[0]) if judged.claims else None
    differing = [evidence for evidence in judged.step_one if evidence.result == "fail"]
    if differing:
        worst = max(differing, key=lambda evidence: evidence.deviation / evidence.tolerance)
        figures = Code.FOUND_BY_STEP_ONE(
            deviation=worst.deviation,
            scale=worst.scale,
            scale_from=worst.scale_from,
            tolerance=worst.tolerance,
        )
        return "step one", worst.metric, worst.step, figures
    failing = next((evidence for evidence in judged.guards if evidence.result == "fail"), None)
    if failing is not None:
        limit = experiment.compare.guards.token_mult_prob_error_median
        is_error = failing.reason.code is Code.TOKEN_ERROR_EXCEEDED
        step = _first_step_above(experiment.pairs(judged.arm), limit) if is_error else None
        has_figures = failing.value is not None and failing.limit is not None
        figures = (
            Code.FOUND_BY_GUARD(value=failing.value, limit=failing.limit) if has_figures else failing.reason
        )
        return "guard", failing.guard, step, figures
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
    undecided_metrics = [step_one.metric for step_one in judged.step_one if step_one.result == "open"]
    within_tolerance = [
        check
        for check in judged.step_one
        if check.aa_deviation is not None and check.aa_deviation < check.deviation <= check.tolerance
    ]
    worst = max(within_tolerance, key=lambda check: check.deviation, default=None)
    can_grow = fault.size is not None and (fault.most is None or amount < fault.most)
    return Code.FAULT_MISSED(
        num_pairs=num_pairs if judged.verdict == "INCONCLUSIVE" else None,
        paired=judged.num_runs is None,
        rounded_metric=undecided_metrics[0] if undecided_metrics else None,
        tolerance=worst
        and {"metric": worst.metric, "deviation": worst.deviation, "aa_deviation": worst.aa_deviation},
        amount=amount if can_grow else None,
        most=fault.most,
        num_steps=num_steps,
        shows=fault.shows,
    )


def _max_num_steps(experiment: RecordedExperiment) -> int:
    steps = [run.steps for run in (*experiment.runs.values(), *experiment.controls.values())]
    return max((int(run_steps[-1]) for run_steps in steps if len(run_steps)), default=0)


def _first_step_above(pairs: Sequence[Pair], limit: float) -> int | None:
    """Return the first step at which any run exceeds the guard on engine and trainer; None if none does."""
    steps = [
        series.steps[above][0]
        for pair in pairs
        for series in [pair.treatment.series(TOKEN_MULT_PROB_ERROR)]
        if (above := ~(series.values <= limit)).any()
    ]
    return int(np.min(steps)) if steps else None
