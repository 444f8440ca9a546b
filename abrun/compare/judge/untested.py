"""What of a comparison a reader might believe was looked at, and was not."""

from collections.abc import Iterator, Sequence

import numpy as np

from abrun.compare.judge.assay import learning_metrics
from abrun.compare.judge.code import code_untested
from abrun.compare.judge.divergence import Divergence
from abrun.compare.judge.guards import shared_memory_metrics, shared_peak_counter
from abrun.compare.judge.machines import INITIAL_WEIGHTS, other_machine
from abrun.compare.judge.step_one import (
    RAISED_BY_ROUNDING,
    StepOne,
    share_of_scale,
    shares_prompts,
    unreadable,
)
from abrun.compare.read.experiment import Experiment, RecordedRun, Sides
from abrun.equivalence import ALPHA
from abrun.metric_names import MEMORY_PEAK, TOKEN_MULT_PROB_ERROR
from abrun.recipe import ONE_ULP, Primary


def step_one_unread(experiment: Experiment, arm: str, first_steps: Sequence[StepOne]) -> str | None:
    """Why step one says nothing about the treatment; None: it does."""
    if not experiment.compare.paired:
        return "runs that are not paired have no first step in common"
    if not experiment.compare.step_one:
        return f"switched off ({'compare.step_one: false' if experiment.has_recipe else '--no-step-one'})"
    if other_machine(experiment, arm):
        return (
            "the reference was made with other package versions or devices"
            if experiment.regression
            else "the arms ran other package versions"
        )
    pairs = experiment.pairs(arm)
    if pairs and all(pair.begins_anew for pair in pairs):
        return "the step counters begin anew, so that what is recorded as step 1 may be a later one"
    if not first_steps and experiment.launched_compare_sha256 is None:
        return unreadable(experiment.pairs(arm), experiment.metrics())
    differing = [one for one in first_steps if one.result in ("fail", "open")]
    if not differing or shares_prompts(experiment.pairs(arm)):
        return None
    worst_one = max(differing, key=lambda one: one.deviation)
    hashes = " (environment.json: prompts_sha256)" if experiment.has_recipe else ""
    return (
        f"{worst_one.metric} is {worst_one.baseline:.6g} in {experiment.baseline} and "
        f"{worst_one.treatment:.6g} in {arm} at step {worst_one.step} (seed {worst_one.seed}), and nothing "
        f"says that the arms saw the same prompts{hashes}, so that this tells nothing of the treatment; "
        "--no-step-one leaves it out"
    )


def _claimed_metrics(sides: Sides, primaries: Sequence[Primary]) -> set[str]:
    """Return the metrics that claims are on; one on `memory` is on the peaks of all phases."""
    claimed = {primary.metric for primary in primaries}
    runs = sides.finished.runs
    counter = shared_peak_counter(runs) if MEMORY_PEAK in claimed else None
    return claimed | {*(shared_memory_metrics(runs, counter) if counter else ())}


def not_tested(
    experiment: Experiment,
    sides: Sides,
    primaries: Sequence[Primary],
    first_steps: Sequence[StepOne],
    diverged: Sequence[Divergence],
    step_one_unread: str | None,
) -> list[str]:
    """What a reader might believe was looked at, and was not: one sentence each."""
    begun = [run for run in sides.runs if run.status != "pending"]
    runs = [run for run in begun if run.status not in ("missing", "unreadable")]  # that is said
    steps = experiment.all_steps()
    others = len({*experiment.metrics()} - _claimed_metrics(sides, primaries))
    unsettled = [one for one in first_steps if one.result == "not tested"]
    sentences = [*experiment.left_out]
    sentences += [_step_one_open(one, has_recipe=experiment.has_recipe) for one in unsettled]
    sentences += [*_unsaid(runs, sides), *code_untested(experiment)]
    if step_one_unread:
        sentences.append(f"step one: {step_one_unread}")
    sentences += _unmeasured_token_error(runs)
    if not sides.paired:
        both = {run.name.seed for run in sides.baselines} & {run.name.seed for run in sides.treatments}
        said = both if experiment.seeds_known else ()
        shared = f" ({counted(len(said), 'seed')} of both arms not paired, as asked)" if said else ""
        sentences.append(
            f"how the arms part step by step, and from their first one: they are unpaired{shared}"
        )
    sentences += _left_out(experiment, sides)
    sentences += _unfinished_ulps(experiment)
    if any(one.noise_floor == "unknown" for one in diverged):
        reruns = _how_to_rerun(has_recipe=experiment.has_recipe)
        sentences.append(f"divergence against the noise floor: no A/A reruns ({reruns})")
    baselines = [run for run in runs if run.name.arm == experiment.baseline]
    if baselines and primaries and not learning_metrics(baselines):
        sentences.append("whether the baseline learned: no reward, accuracy or supervised loss is recorded")
    clean = len(sides.finished.treatments)
    if clean and clean == len(sides.treatments):
        most = 1 - ALPHA ** (1 / clean)
        of = "seed" if sides.paired else "treated run"
        rate = f"a failure rate of up to {100 * most:.0f} % (95 % bound)"
        sentences.append(f"rare failures: {counted(clean, of)} can miss {rate}")
    sentences += _unclaimed(primaries)
    launched = experiment.launched_compare_sha256 is not None and not experiment.regression
    if primaries and launched and all(planted.name == ONE_ULP for planted in experiment.planted.values()):
        own, how = experiment.faults_of_arms(), " (abrun sensitivity)" * experiment.can_plant
        beside = f" beside {', '.join(own)}" if own else ""
        sentences.append(f"what it would have caught: no fault was planted{beside}{how}")
    if primaries and others > 0:
        sentences.append(f"{counted(others, 'other metric')}: recorded, without a claim")
    if len(steps):
        made = "this recipe, these seeds" if experiment.has_recipe else "these runs' configurations, seeds"
        sentences.append(f"anything but {made} and steps {steps[0]}-{steps[-1]}")
    return sentences


def _unclaimed(primaries: Sequence[Primary]) -> Iterator[str]:
    """Yield what the claims leave out as they were declared."""
    if primaries and all(primary.margin is None for primary in primaries):
        yield "whether the arms converge alike: no claim has a margin"
    unlearned = [primary.metric for primary in primaries if not primary.climbs]
    if unlearned:
        declared = ", ".join(unlearned)
        yield f"whether the baseline learned anything: `climbs: false` is declared for {declared}"


def _unmeasured_token_error(runs: Sequence[RecordedRun]) -> Iterator[str]:
    values = [run.series(TOKEN_MULT_PROB_ERROR).values for run in runs]
    if all(TOKEN_MULT_PROB_ERROR not in run.metrics for run in runs):
        yield f"agreement of trainer and rollout engine: {TOKEN_MULT_PROB_ERROR} is not recorded"
    elif not any(np.isfinite(one).any() for one in values):
        every = f"{TOKEN_MULT_PROB_ERROR} is not a number at any step of any run"
        yield f"agreement of trainer and rollout engine: {every}"


def _left_out(experiment: Experiment, sides: Sides) -> Iterator[str]:
    """Later runs may have fewer seeds than their reference."""
    seeds = {run.name.seed for run in sides.treatments}
    if experiment.regression and sides.paired and seeds:
        left = sorted(experiment.arm(experiment.baseline).keys() - seeds)
        if left:
            named = ", ".join(map(str, left))
            yield f"seed{'s' * (len(left) > 1)} {named} of the reference: without a later run"


def _unfinished_ulps(experiment: Experiment) -> Iterator[str]:
    for name, run in experiment.controls.items():
        if experiment.planted[name.arm].name == ONE_ULP and not run.finished:
            why = run.failure or run.status
            yield f"what one ULP grows into: {run} did not finish ({why}): launch with --resume"


def _step_one_open(one: StepOne, *, has_recipe: bool) -> str:
    """A first step that neither agrees nor shows a fault, and what would settle it."""
    share = share_of_scale(one.deviation, one.scale, one.scale_from)
    found = f"step one of {one.metric}: in seed {one.seed} it deviates by {share}"
    limit = f"{one.tolerance:.2g} ({one.tolerance_from})"
    reruns = _how_to_rerun(has_recipe=has_recipe)
    if one.tolerance >= 1:
        return f"{found}, and {limit} allows anything: more reruns narrow it ({reruns})"
    settling = f"reruns where they differ ({reruns})"
    if one.metric in RAISED_BY_ROUNDING:  # of which the baseline's reruns say nothing
        settling = "one step in float32"
    settles = f"{'compare.step_one_tolerance, or ' * has_recipe}{settling}"
    return f"{found}, beyond {limit}, and nothing says how far rounding takes it here: give {settles}"


def _how_to_rerun(*, has_recipe: bool) -> str:
    return "controls.aa_reruns" if has_recipe else "names that end in -aa1"


def _unsaid(runs: Sequence[RecordedRun], sides: Sides) -> list[str]:
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
    return [f"the runs do not say: {', '.join(silent)}"] if silent else []


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
