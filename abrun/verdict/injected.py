"""What a comparison would have caught: faults injected in the baseline, each judged as a treatment is."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from abrun.messages.numbers import certified_text
from abrun.metric_names import TOKEN_MULT_PROB_ERROR
from abrun.reasons import Code, Reason
from abrun.recipe.faults import LIBRARY, ONE_ULP, Fault, InjectedFault
from abrun.recorded.experiment import Pair, RecordedExperiment
from abrun.verdict.decide import ArmVerdict, Verdict, judge
from abrun.verdict.results import ClaimResult

Evidence = Literal["step one", "guard", "claim", "nothing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultFound:
    """One injected fault against the baseline, by the ordinary judge."""

    fault: str
    arm: str
    size: float | None  # None: it has none
    unit: str
    verdict: Verdict
    caught_by: Evidence  # what makes the verdict MISMATCH, the earliest of it; nothing: it is none
    metric: str | None  # that of the step or of the claim, or the guard's name
    step: int | None  # when it could be known: the guard's first step above its limit, a claim's last
    num_pairs: int  # or runs of each arm, where they are not paired
    # Of what caught it, beside the limit; of one not caught, what the first claim found, if anything
    figures: Reason | None
    reason: Reason  # the verdict's first
    advice: Reason | None  # of one not caught: what could show it

    @property
    def caught(self) -> bool:
        return self.caught_by != "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Of the injected faults, in the order of the recipe."""

    num_caught: int
    num_judged: int  # those that are INVALID say nothing
    num_pairs: int  # at most, of a fault
    num_steps: int  # of the runs
    faults: list[FaultFound]


def sensitivity(experiment: RecordedExperiment) -> Sensitivity | None:
    """None where no fault is injected. Never part of a verdict: each fault is judged by itself."""
    faults = {arm: injected for arm, injected in experiment.injected.items() if injected.name != ONE_ULP}
    if not faults or experiment.regression:
        return None
    found = [_found(experiment, arm, injected) for arm, injected in faults.items()]
    return Sensitivity(
        num_caught=sum(one.caught for one in found),
        num_judged=sum(one.verdict != "INVALID" for one in found),
        num_pairs=max(one.num_pairs for one in found),
        num_steps=_num_steps(experiment),
        faults=found,
    )


def _found(experiment: RecordedExperiment, arm: str, injected: InjectedFault) -> FaultFound:
    alone = replace(
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
    (judged,) = judge(alone, alone.compare.claims)
    caught_by, metric, step, figures = _evidence(judged, alone)
    fault = LIBRARY[injected.name]
    missed = caught_by == "nothing" and judged.verdict != "INVALID"
    return FaultFound(
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
        advice=_advice(fault, injected.amount, judged, _num_steps(experiment)) if missed else None,
        reason=next(
            (one for one in judged.reasons if one.code is Code.STEP_ONE_DIFFERS and one["metric"] == metric),
            judged.reasons[0],
        ),
    )


def _evidence(
    judged: ArmVerdict, experiment: RecordedExperiment
) -> tuple[Evidence, str | None, int | None, Reason | None]:
    """The earliest that makes it a mismatch: step one, then a guard, then a claim; and its figures."""
    if judged.verdict != "MISMATCH":
        return "nothing", None, None, _figures(judged.claims[0]) if judged.claims else None
    differing = [one for one in judged.step_one if one.result == "fail"]
    if differing:
        worst = max(differing, key=lambda one: one.deviation / one.tolerance)
        figures = Code.FOUND_BY_STEP_ONE(
            deviation=worst.deviation,
            scale=worst.scale,
            scale_from=worst.scale_from,
            tolerance=worst.tolerance,
        )
        return "step one", worst.metric, worst.step, figures
    failing = next((one for one in judged.guards if one.result == "fail"), None)
    if failing is not None:
        limit = experiment.compare.guards.token_mult_prob_error_median
        is_error = failing.reason.code is Code.TOKEN_ERROR_EXCEEDED
        step = _first_above(experiment.pairs(judged.arm), limit) if is_error else None
        known = failing.value is not None and failing.limit is not None
        figures = Code.FOUND_BY_GUARD(value=failing.value, limit=failing.limit) if known else failing.reason
        return "guard", failing.guard, step, figures
    differing = next(result for result in judged.claims if result.result == "different")
    claim = differing.claim
    return "claim", claim.metric, claim.steps[1] if claim.steps else None, _figures(differing)


def _figures(result: ClaimResult) -> Reason | None:
    """Return what a claim found, beside what it allows; None: nothing."""
    claim, estimate = result.claim, result.estimate
    if estimate.limited is not None:
        return Code.LIMITED_METRIC(metric=claim.metric, value=estimate.limited, limit=claim.margin_text)
    if estimate.mean_difference is None:
        return None
    return Code.MOVED_METRIC(
        metric=claim.metric,
        difference=estimate.mean_difference,
        bound=certified_text(estimate.certified_bound, estimate.certified_number, claim.margin_unit),
        margin=claim.margin_text,
    )


def _advice(fault: Fault, amount: float, judged: ArmVerdict, num_steps: int) -> Reason:
    """Return what a larger experiment, or a larger fault, could show."""
    num_pairs = min(judged.num_runs) if judged.num_runs else judged.num_pairs
    unsure = [one.metric for one in judged.step_one if one.result == "open"]
    within = [
        one
        for one in judged.step_one
        if one.aa_deviation is not None and one.aa_deviation < one.deviation <= one.tolerance
    ]
    worst = max(within, key=lambda one: one.deviation, default=None)
    can_grow = fault.size is not None and (fault.most is None or amount < fault.most)
    return Code.FAULT_MISSED(
        num_pairs=num_pairs if judged.verdict == "INCONCLUSIVE" else None,
        paired=judged.num_runs is None,
        rounded_metric=unsure[0] if unsure else None,
        tolerance=worst
        and {"metric": worst.metric, "deviation": worst.deviation, "aa_deviation": worst.aa_deviation},
        amount=amount if can_grow else None,
        most=fault.most,
        num_steps=num_steps,
        shows=fault.shows,
    )


def _num_steps(experiment: RecordedExperiment) -> int:
    """Of the longest run."""
    steps = [run.steps for run in (*experiment.runs.values(), *experiment.controls.values())]
    return max((int(each[-1]) for each in steps if len(each)), default=0)


def _first_above(pairs: Sequence[Pair], limit: float) -> int | None:
    """The first step at which the engine and the trainer of any run are further apart than a guard allows."""
    steps = [
        series.steps[above][0]
        for pair in pairs
        for series in [pair.treatment.series(TOKEN_MULT_PROB_ERROR)]
        if (above := ~(series.values <= limit)).any()
    ]
    return int(np.min(steps)) if steps else None
