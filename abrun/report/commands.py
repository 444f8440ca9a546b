"""Commands of next steps that depend on the experiment: fresh runs, claims as options, launches."""

import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from abrun.experiment.plan import compare_hash
from abrun.reasons import Code, Reason
from abrun.recipe.claims import Claim, claim_option
from abrun.recorded.experiment import RecordedExperiment
from abrun.report.facts import ENGINE_ERRORS, Facts
from abrun.report.pasted import AGAIN, UNPAIRED, folder_of, name_of
from abrun.verdict.description import claim_on


@dataclass(frozen=True, slots=True)
class FreshRuns:
    """A command on fresh runs; `with_origin` adds to a text where they come from, if not from the command."""

    command: str
    with_origin: Callable[[Reason], Reason] | None = None


def fresh_runs(experiment: RecordedExperiment, num_pairs: int | None = None) -> FreshRuns:
    """Seeds that no interim analysis has used, as many as there were unless more are needed."""
    first = 1 + max((seed for arm in experiment.arms for seed in experiment.arm(arm)), default=-1)
    count = num_pairs or max([1, *(len(experiment.arm(arm)) for arm in experiment.treatments)])
    last = first + count - 1
    if experiment.regression:
        file = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', experiment.name).strip('-')}-fresh.json"
        command = f"abrun freeze NEW{claim_options(experiment)} --output {file}"
        return FreshRuns(command, lambda step: Code.FRESH_REFERENCE(step=step, first=first, last=last))
    if experiment.directory:
        options = f"--seeds {first}-{last}{declared_options(experiment, count)}"
        return FreshRuns(f"abrun launch RECIPE {options} --name {folder_name(experiment, '-fresh')}")
    if not experiment.seeds_known:
        command = f"abrun compare NEW NEW --unpaired{claim_options(experiment)}"
        return FreshRuns(command, lambda step: Code.FRESH_FOLDERS(step=step, num_runs=count))
    command = f"abrun compare RUNS --seeds {first}-{last}"
    return FreshRuns(command, lambda step: Code.FRESH_SEEDS(step=step, first=first, last=last))


def folder_name(experiment: RecordedExperiment, suffix: str = "") -> str:
    assert experiment.directory
    return shlex.quote(experiment.directory.name + suffix)


def claiming(experiment: RecordedExperiment, claims: Sequence[Claim]) -> RecordedExperiment:
    """Return the experiment with other claims."""
    return replace(experiment, compare=experiment.compare.model_copy(update={"claims": [*claims]}))


def claim_options(experiment: RecordedExperiment) -> str:
    """Return the claims as options of a command."""
    return "".join(f" --claim {shlex.quote(claim_option(one))}" for one in experiment.compare.claims)


def declared_options(experiment: RecordedExperiment, num_pairs: int | None = None) -> str:
    """Return the option that sets the comparison, unless it is the launched one and its analyses fit."""
    compare = experiment.compare
    interim = compare.interim if num_pairs in (None, *compare.interim[-1:]) else []
    if compare_hash(compare) != experiment.launched_compare_sha256:
        content = compare.model_copy(update={"interim": interim}).model_dump(
            mode="json", exclude_defaults=True
        )
        return f" --set {shlex.quote(f'compare={json.dumps(content)}')}"
    return "" if interim == compare.interim else " --set compare.interim=[]"


# --- commands of one rule each ---


def fresh(facts: Facts) -> FreshRuns:
    return fresh_runs(facts.experiment)


def three_seeds(facts: Facts) -> FreshRuns:
    return fresh_runs(facts.experiment, 3)


def fresh_that_decide(facts: Facts) -> FreshRuns:
    return fresh_runs(facts.experiment, facts.num_that_decide)


def fresh_with_rounding(facts: Facts) -> FreshRuns:
    tolerances = {"step_one_tolerance": facts.rounding_tolerances}
    compare = facts.experiment.compare.model_copy(update=tolerances)
    needed = max((one.power.pairs_needed or 0 for one in facts.undecided), default=0)
    return fresh_runs(replace(facts.experiment, compare=compare), needed or None)


def fresh_with_claim(facts: Facts) -> FreshRuns:
    return fresh_runs(_with_claim(facts), facts.num_to_claim)


def plan_of_claim(facts: Facts) -> str:
    return _plan(_with_claim(facts))


def plan_of_same(facts: Facts) -> str:
    return _plan(facts.experiment)


def with_other_claims(facts: Facts) -> str | FreshRuns:
    claimed = claiming(facts.experiment, facts.other_claims)
    return fresh_runs(claimed) if facts.launched else f"abrun compare RUNS{claim_options(claimed)}"


def with_claim(facts: Facts) -> str:
    return f"abrun compare RUNS{'' if facts.paired else UNPAIRED}{claim_options(_with_claim(facts))}"


def at_next_analysis(facts: Facts) -> str:
    seeds = listed([*facts.seeds, *facts.seeds_to_come])
    return f"abrun compare RUNS --seeds {seeds} --interim {listed(facts.experiment.compare.interim)}"


def with_other_seeds(facts: Facts) -> str:
    """Of a reference, where later runs lack some: several are compared alone."""
    there, here = facts.reference_seeds
    if len(there - here) > 1:
        seeds = listed(sorted(there - here))
        if facts.launched:
            return f"abrun launch RECIPE --seeds {seeds} --name NEW --no-compare && {AGAIN}"
        return f"abrun compare RUNS --seeds {seeds}"
    if not facts.launched:
        return "abrun compare RUNS"
    options = f"--seeds {listed(sorted(there | here))} --name {folder_name(facts.experiment)}"
    return f"abrun launch RECIPE {options} --resume --no-compare && abrun compare RUNS"


def by_other_names(facts: Facts) -> str:
    experiment = facts.experiment
    assert experiment.directory
    path = folder_of(experiment.directory)
    arms = " ".join(shlex.quote(f"{arm}={path}/{arm}") for arm in experiment.arms)
    names = (f"--alias {shlex.quote(f'{ours}={theirs}')}" for ours, theirs in facts.better_aliases.items())
    return f"abrun compare {arms} {' '.join(names)}{claim_options(experiment)}"


def resumed(facts: Facts) -> str:
    return f"abrun launch RECIPE {_stages(facts)}--name {folder_name(facts.experiment)} --resume"


def longer(facts: Facts) -> str:
    grid = facts.experiment.all_steps()
    steps = f"--set steps={2 * int(grid[-1]) if len(grid) else 1}{declared_options(facts.experiment)}"
    return f"abrun launch RECIPE {steps} {_stages(facts)}--name {folder_name(facts.experiment, '-longer')}"


def in_float32(facts: Facts) -> str:
    options = "--set policy.dtype=float32 --set steps=1 --set 'controls={}'"
    return f"abrun launch RECIPE {options} --name {folder_name(facts.experiment, '-float32')}"


def frozen(facts: Facts) -> str:
    experiment, of, file = facts.experiment, "RUNS", f"{name_of(facts.experiment)}.json"
    if facts.launched:
        of, file = name_of(experiment), f"{folder_name(experiment)}.json"
    return f"abrun freeze {of}{'' if facts.declared else claim_options(experiment)} --output {file}"


def status(facts: Facts) -> str:
    return f"abrun status {name_of(facts.experiment)}"


def first_log(facts: Facts) -> str:
    began = next(run for run in facts.broken if run.status != "missing")
    return f"abrun logs {name_of(facts.experiment)}/{began.name}"


def mismatch(facts: Facts) -> str:
    before = [f" --step {one.step - 1}" for one in facts.deviating if one.metric in ENGINE_ERRORS]
    return f"abrun mismatch {_first_run(facts)}{''.join(before[:1])}"  # its first update


def samples(facts: Facts) -> str:
    step = f" --step {facts.deviating[0].step}" if facts.deviating else ""
    other = f"{name_of(facts.experiment)}/{facts.experiment.baseline}/seed-{facts.first_run[1]}"
    return f"abrun samples {_first_run(facts)} --against {other}{step}"


def listed(seeds: Sequence[int]) -> str:
    return ",".join(map(str, seeds))


def _first_run(facts: Facts) -> str:
    arm, seed = facts.first_run
    return f"{name_of(facts.experiment)}/{shlex.quote(arm)}/seed-{seed}"


def _with_claim(facts: Facts) -> RecordedExperiment:
    assert facts.claimable
    return claiming(facts.experiment, [claim_on(facts.claimable)])


def _plan(experiment: RecordedExperiment) -> str:
    return f"abrun plan RECIPE{declared_options(experiment)} --from {name_of(experiment)}"


def _stages(facts: Facts) -> str:
    """An experiment with interim analyses is launched in stages, however it was begun."""
    interim = facts.experiment.compare.interim
    return f"--until-decided --max-seeds {interim[-1]} " if interim else ""
