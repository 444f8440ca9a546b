"""Limits of a comparison: what a reader might believe was tested, and was not."""

from collections.abc import Iterator, Sequence

import numpy as np

from abrun.metric_names import MEMORY_PEAK, TOKEN_MULT_PROB_ERROR
from abrun.reasons import Code, Reason
from abrun.recipe.claims import Claim
from abrun.recipe.faults import ONE_ULP
from abrun.recorded.experiment import RecordedExperiment, RecordedRun, Sides
from abrun.stats.equivalence import ALPHA
from abrun.verdict.divergence import Divergence
from abrun.verdict.guards import shared_memory_metrics, shared_peak_counter
from abrun.verdict.machines import INITIAL_WEIGHTS, code_notes, has_treated_machine
from abrun.verdict.sensitivity import learning_metrics
from abrun.verdict.step_one import RAISED_BY_ROUNDING, StepOne, first_step_unread_reason, has_shared_prompts


def step_one_unread_reason(
    experiment: RecordedExperiment, arm: str, first_steps: Sequence[StepOne]
) -> Reason | None:
    """Return why step one says nothing about the treatment; None if it does."""
    if experiment.axis != "steps":
        return Code.FIRST_STEP_OF_SCORES()
    if not experiment.compare.paired:
        return Code.FIRST_STEP_NOT_PAIRED()
    if not experiment.compare.step_one:
        option = "compare.step_one: false" if experiment.has_recipe else "--no-step-one"
        return Code.FIRST_STEP_OFF(option=option)
    if has_treated_machine(experiment, arm):
        if experiment.regression:
            return Code.FIRST_STEP_OTHER_REFERENCE()
        return Code.FIRST_STEP_OTHER_VERSIONS()
    pairs = experiment.pairs(arm)
    if pairs and all(pair.has_restarted_counter for pair in pairs):
        return Code.FIRST_STEP_COUNTED_ANEW()
    if not first_steps and experiment.launched_compare_sha256 is None:
        return first_step_unread_reason(experiment.pairs(arm), experiment.metrics())
    checks = [check for check in first_steps if check.sampled_anew or check.result != "not tested"]
    differing = [check for check in checks if check.result not in ("pass", "redefined")]
    if not differing or has_shared_prompts(experiment.pairs(arm)):
        return None
    worst = max(differing, key=lambda step_one: step_one.deviation)
    return Code.PROMPTS_NOT_KNOWN(
        metric=worst.metric,
        baseline=experiment.baseline,
        baseline_value=worst.baseline,
        arm=arm,
        value=worst.treatment,
        step=worst.step,
        seed=worst.seed,
        hashes=experiment.has_recipe,
    )


def _claimed_metrics(sides: Sides, claims: Sequence[Claim]) -> set[str]:
    """Return the metrics under claims; a claim on `memory` covers the peaks of all phases."""
    claimed = {claim.metric for claim in claims}
    runs = sides.finished.runs
    counter = shared_peak_counter(runs) if MEMORY_PEAK in claimed else None
    return claimed | {*(shared_memory_metrics(runs, counter) if counter else ())}


def list_not_tested(
    experiment: RecordedExperiment,
    sides: Sides,
    claims: Sequence[Claim],
    first_steps: Sequence[StepOne],
    diverged: Sequence[Divergence],
    step_one_unread: Reason | None,
) -> list[Reason]:
    """Return what a reader might believe was tested, and was not."""
    begun = [run for run in sides.runs if run.status != "pending"]
    # Missing and unreadable runs are reported as INVALID.
    runs = [run for run in begun if run.status not in ("missing", "unreadable")]
    steps = experiment.all_steps()
    num_unclaimed = len({*experiment.metrics()} - _claimed_metrics(sides, claims))
    reasons = [*experiment.left_out]
    reasons += _note_unsettled(first_steps, has_recipe=experiment.has_recipe)
    reasons += [*_note_unrecorded(runs, sides), *([Code.OTHER_CODE()] if code_notes(experiment) else [])]
    if step_one_unread:
        reasons.append(Code.STEP_ONE_NOT_READ(why=step_one_unread))
    reasons += _note_unmeasured_token_error(runs)
    if not sides.paired:
        shared = {run.name.seed for run in sides.baselines} & {run.name.seed for run in sides.treatments}
        reasons.append(Code.NOT_PAIRED(num_shared_seeds=len(shared) if experiment.seeds_known else 0))
    if any(run.trains_on_recording for run in runs):
        reasons.append(Code.SAMPLER_NOT_TESTED())
    reasons += _note_unused_seeds(experiment, sides)
    reasons += [
        Code.ULP_RUN_NOT_FINISHED(run=str(run), why=run.failure or run.status)
        for name, run in experiment.controls.items()
        if experiment.injected[name.arm].name == ONE_ULP and not run.finished
    ]
    if any(record.noise_floor == "unknown" for record in diverged):
        reasons.append(Code.NO_RERUNS(has_recipe=experiment.has_recipe))
    baselines = [run for run in runs if run.name.arm == experiment.baseline]
    if baselines and claims and not learning_metrics(baselines):
        reasons.append(Code.LEARNING_NOT_RECORDED())
    num_clean = len(sides.finished.treatments)
    if num_clean and num_clean == len(sides.treatments):
        rate = 1 - ALPHA ** (1 / num_clean)
        reasons.append(Code.RARE_FAILURES(num_runs=num_clean, paired=sides.paired, rate=rate))
    if claims and all(claim.margin is None for claim in claims):
        reasons.append(Code.NO_MARGIN())
    unlearned = [claim.metric for claim in claims if not claim.climbs]
    if unlearned and experiment.axis == "steps":
        reasons.append(Code.LEARNING_NOT_CHECKED(metrics=unlearned))
    launched = experiment.launched_compare_sha256 is not None and not experiment.regression
    if claims and launched and all(injected.name == ONE_ULP for injected in experiment.injected.values()):
        faults = experiment.describe_arm_faults()
        reasons.append(Code.NO_FAULT_INJECTED(faults=faults, can_inject=experiment.can_inject))
    if claims and num_unclaimed > 0:
        reasons.append(Code.METRICS_WITHOUT_CLAIM(num_metrics=num_unclaimed))
    if experiment.axis != "steps":
        reasons.append(Code.OTHER_SCORES())
    elif len(steps):
        reasons.append(
            Code.OTHER_CONDITIONS(first=steps[0], last=steps[-1], has_recipe=experiment.has_recipe)
        )
    return reasons


def _note_unsettled(first_steps: Sequence[StepOne], *, has_recipe: bool) -> Iterator[Reason]:
    """Yield the metrics whose first step neither agrees nor shows a fault."""
    unsettled = [record for record in first_steps if record.result == "not tested"]
    size = ("metric", "seed", "deviation", "scale", "scale_from", "tolerance", "tolerance_from")
    for record in unsettled:
        if not record.sampled_anew:
            values = {name: getattr(record, name) for name in size}
            is_raised = record.metric in RAISED_BY_ROUNDING
            yield Code.STEP_ONE_NOT_SETTLED(**values, raised_by_rounding=is_raised, has_recipe=has_recipe)
    if sampled_metrics := [record.metric for record in unsettled if record.sampled_anew]:
        yield Code.COMPLETIONS_SAMPLED_ANEW(metrics=sampled_metrics)


def _note_unmeasured_token_error(runs: Sequence[RecordedRun]) -> Iterator[Reason]:
    values = [run.series(TOKEN_MULT_PROB_ERROR).values for run in runs]
    if all(TOKEN_MULT_PROB_ERROR not in run.metrics for run in runs):
        yield Code.TOKEN_ERROR_NOT_MEASURED(metric=TOKEN_MULT_PROB_ERROR, recorded=False)
    elif not any(np.isfinite(curve).any() for curve in values):
        yield Code.TOKEN_ERROR_NOT_MEASURED(metric=TOKEN_MULT_PROB_ERROR, recorded=True)


def _note_unused_seeds(experiment: RecordedExperiment, sides: Sides) -> Iterator[Reason]:
    """Yield the seeds of a reference that the later runs do not have."""
    seeds = {run.name.seed for run in sides.treatments}
    if experiment.regression and sides.paired and seeds:
        unused_seeds = sorted(experiment.arm(experiment.baseline).keys() - seeds)
        if unused_seeds:
            yield Code.REFERENCE_SEEDS_UNUSED(seeds=unused_seeds)


def _note_unrecorded(runs: Sequence[RecordedRun], sides: Sides) -> list[Reason]:
    is_unrecorded = {
        "exit status": any(run.status == "unknown" for run in runs),
        "configurations": any(run.config is None for run in runs),
        "package versions and devices": any(not (run.environment or {}).get("versions") for run in runs),
    }
    if sides.paired:
        for name, key in (("prompts", "prompts_sha256"), ("initial weights", INITIAL_WEIGHTS)):
            is_unrecorded[name] = any(not (run.environment or {}).get(key) for run in runs)
    unrecorded = [name for name, is_unknown in is_unrecorded.items() if runs and is_unknown]
    return [Code.RUNS_DO_NOT_SAY(missing=unrecorded)] if unrecorded else []
