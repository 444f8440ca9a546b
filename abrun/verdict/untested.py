"""What of a comparison a reader might believe was looked at, and was not."""

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
from abrun.verdict.machines import INITIAL_WEIGHTS, code_notes, other_machine
from abrun.verdict.sensitivity import learning_metrics
from abrun.verdict.step_one import RAISED_BY_ROUNDING, StepOne, shares_prompts, unreadable


def step_one_unread(
    experiment: RecordedExperiment, arm: str, first_steps: Sequence[StepOne]
) -> Reason | None:
    """Return why step one says nothing about the treatment; None: it does."""
    if not experiment.compare.paired:
        return Code.FIRST_STEP_NOT_PAIRED()
    if not experiment.compare.step_one:
        option = "compare.step_one: false" if experiment.has_recipe else "--no-step-one"
        return Code.FIRST_STEP_OFF(option=option)
    if other_machine(experiment, arm):
        if experiment.regression:
            return Code.FIRST_STEP_OTHER_REFERENCE()
        return Code.FIRST_STEP_OTHER_VERSIONS()
    pairs = experiment.pairs(arm)
    if pairs and all(pair.has_restarted_counter for pair in pairs):
        return Code.FIRST_STEP_COUNTED_ANEW()
    if not first_steps and experiment.launched_compare_sha256 is None:
        return unreadable(experiment.pairs(arm), experiment.metrics())
    differing = [one for one in first_steps if one.result in ("fail", "open")]
    if not differing or shares_prompts(experiment.pairs(arm)):
        return None
    worst_one = max(differing, key=lambda one: one.deviation)
    return Code.PROMPTS_NOT_KNOWN(
        metric=worst_one.metric,
        baseline=experiment.baseline,
        baseline_value=worst_one.baseline,
        arm=arm,
        value=worst_one.treatment,
        step=worst_one.step,
        seed=worst_one.seed,
        hashes=experiment.has_recipe,
    )


def _claimed_metrics(sides: Sides, claims: Sequence[Claim]) -> set[str]:
    """Return the metrics that claims are on; one on `memory` is on the peaks of all phases."""
    claimed = {claim.metric for claim in claims}
    runs = sides.finished.runs
    counter = shared_peak_counter(runs) if MEMORY_PEAK in claimed else None
    return claimed | {*(shared_memory_metrics(runs, counter) if counter else ())}


def not_tested(
    experiment: RecordedExperiment,
    sides: Sides,
    claims: Sequence[Claim],
    first_steps: Sequence[StepOne],
    diverged: Sequence[Divergence],
    step_one_unread: Reason | None,
) -> list[Reason]:
    """Return what a reader might believe was looked at, and was not."""
    begun = [run for run in sides.runs if run.status != "pending"]
    runs = [run for run in begun if run.status not in ("missing", "unreadable")]  # that is said
    steps = experiment.all_steps()
    others = len({*experiment.metrics()} - _claimed_metrics(sides, claims))
    unsettled = [one for one in first_steps if one.result == "not tested"]
    reasons = [*experiment.left_out]
    reasons += [_step_one_not_settled(one, has_recipe=experiment.has_recipe) for one in unsettled]
    reasons += [*_unsaid(runs, sides), *([Code.OTHER_CODE()] if code_notes(experiment) else [])]
    if step_one_unread:
        reasons.append(Code.STEP_ONE_NOT_READ(why=step_one_unread))
    reasons += _unmeasured_token_error(runs)
    if not sides.paired:
        shared = {run.name.seed for run in sides.baselines} & {run.name.seed for run in sides.treatments}
        reasons.append(Code.NOT_PAIRED(num_shared_seeds=len(shared) if experiment.seeds_known else 0))
    reasons += _unused_seeds(experiment, sides)
    reasons += _unfinished_ulps(experiment)
    if any(one.noise_floor == "unknown" for one in diverged):
        reasons.append(Code.NO_RERUNS(has_recipe=experiment.has_recipe))
    baselines = [run for run in runs if run.name.arm == experiment.baseline]
    if baselines and claims and not learning_metrics(baselines):
        reasons.append(Code.LEARNING_NOT_RECORDED())
    clean = len(sides.finished.treatments)
    if clean and clean == len(sides.treatments):
        rate = 1 - ALPHA ** (1 / clean)
        reasons.append(Code.RARE_FAILURES(num_runs=clean, paired=sides.paired, rate=rate))
    reasons += _unclaimed(claims)
    launched = experiment.launched_compare_sha256 is not None and not experiment.regression
    if claims and launched and all(injected.name == ONE_ULP for injected in experiment.injected.values()):
        faults = experiment.describe_arm_faults()
        reasons.append(Code.NO_FAULT_INJECTED(faults=faults, can_inject=experiment.can_inject))
    if claims and others > 0:
        reasons.append(Code.METRICS_WITHOUT_CLAIM(num_metrics=others))
    if len(steps):
        reasons.append(
            Code.OTHER_CONDITIONS(first=steps[0], last=steps[-1], has_recipe=experiment.has_recipe)
        )
    return reasons


def _unclaimed(claims: Sequence[Claim]) -> Iterator[Reason]:
    """Yield what the claims leave out as they were declared."""
    if claims and all(claim.margin is None for claim in claims):
        yield Code.NO_MARGIN()
    unlearned = [claim.metric for claim in claims if not claim.climbs]
    if unlearned:
        yield Code.LEARNING_NOT_CHECKED(metrics=unlearned)


def _unmeasured_token_error(runs: Sequence[RecordedRun]) -> Iterator[Reason]:
    values = [run.series(TOKEN_MULT_PROB_ERROR).values for run in runs]
    if all(TOKEN_MULT_PROB_ERROR not in run.metrics for run in runs):
        yield Code.TOKEN_ERROR_NOT_MEASURED(metric=TOKEN_MULT_PROB_ERROR, recorded=False)
    elif not any(np.isfinite(one).any() for one in values):
        yield Code.TOKEN_ERROR_NOT_MEASURED(metric=TOKEN_MULT_PROB_ERROR, recorded=True)


def _unused_seeds(experiment: RecordedExperiment, sides: Sides) -> Iterator[Reason]:
    """Later runs may have fewer seeds than their reference."""
    seeds = {run.name.seed for run in sides.treatments}
    if experiment.regression and sides.paired and seeds:
        left = sorted(experiment.arm(experiment.baseline).keys() - seeds)
        if left:
            yield Code.REFERENCE_SEEDS_UNUSED(seeds=left)


def _unfinished_ulps(experiment: RecordedExperiment) -> Iterator[Reason]:
    for name, run in experiment.controls.items():
        if experiment.injected[name.arm].name == ONE_ULP and not run.finished:
            yield Code.ULP_RUN_NOT_FINISHED(run=str(run), why=run.failure or run.status)


def _step_one_not_settled(one: StepOne, *, has_recipe: bool) -> Reason:
    """Return that a first step neither agrees nor shows a fault."""
    return Code.STEP_ONE_NOT_SETTLED(
        metric=one.metric,
        seed=one.seed,
        deviation=one.deviation,
        scale=one.scale,
        scale_from=one.scale_from,
        tolerance=one.tolerance,
        tolerance_from=one.tolerance_from,
        raised_by_rounding=one.metric in RAISED_BY_ROUNDING,
        has_recipe=has_recipe,
    )


def _unsaid(runs: Sequence[RecordedRun], sides: Sides) -> list[Reason]:
    unknown = {
        "how they ended": any(run.status == "unknown" for run in runs),
        "their configurations": any(run.config is None for run in runs),
        "package versions and devices": any(not (run.environment or {}).get("versions") for run in runs),
    }
    if sides.paired:
        for what, key in (
            ("prompts", "prompts_sha256"),
            ("initial weights", INITIAL_WEIGHTS),
        ):
            unknown[f"their {what}"] = any(not (run.environment or {}).get(key) for run in runs)
    silent = [what for what, is_unknown in unknown.items() if runs and is_unknown]
    return [Code.RUNS_DO_NOT_SAY(missing=silent)] if silent else []
