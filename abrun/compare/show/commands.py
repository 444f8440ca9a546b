"""Commands of next steps that depend on the experiment: fresh runs, claims as options, launches."""

import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from abrun.compare.read.experiment import Experiment
from abrun.compare.show.pasted import AGAIN, UNPAIRED, folder_of, name_of
from abrun.plan import compare_hash
from abrun.reasons import Code, Reason
from abrun.recipe import Primary, primary_option


@dataclass(frozen=True, slots=True)
class FreshRuns:
    """A command on fresh runs; `with_origin` adds to a text where they come from, if not from the command."""

    command: str
    with_origin: Callable[[Reason], Reason] | None = None


def fresh_runs(experiment: Experiment, num_pairs: int | None = None) -> FreshRuns:
    """Seeds that no look has been taken at, as many as there were unless more are needed."""
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


def folder_name(experiment: Experiment, suffix: str = "") -> str:
    assert experiment.directory
    return shlex.quote(experiment.directory.name + suffix)


def claiming(experiment: Experiment, claims: Sequence[Primary]) -> Experiment:
    """Return the experiment with other claims."""
    return replace(experiment, compare=experiment.compare.model_copy(update={"primary": [*claims]}))


def claim_options(experiment: Experiment) -> str:
    """Return the claims as options of a command."""
    return "".join(f" --primary {shlex.quote(primary_option(one))}" for one in experiment.compare.primary)


def declared_options(experiment: Experiment, num_pairs: int | None = None) -> str:
    """Return the option that sets the comparison, if it is not the launched one or its looks do not fit."""
    compare = experiment.compare
    looks = compare.looks if num_pairs in (None, *compare.looks[-1:]) else []
    if compare_hash(compare) != experiment.launched_compare_sha256:
        content = compare.model_copy(update={"looks": looks}).model_dump(mode="json", exclude_defaults=True)
        return f" --set {shlex.quote(f'compare={json.dumps(content)}')}"
    return "" if looks == compare.looks else " --set compare.looks=[]"


def stages(experiment: Experiment) -> str:
    """Return the options that an experiment with looks is launched with, however it was begun."""
    looks = experiment.compare.looks
    return f"--until-decided --max-seeds {looks[-1]} " if looks else ""


def resumed(experiment: Experiment) -> str:
    return f"abrun launch RECIPE {stages(experiment)}--name {folder_name(experiment)} --resume"


def longer(experiment: Experiment) -> str:
    """Return the launch of twice the steps."""
    grid = experiment.all_steps()
    steps = f"--set steps={2 * int(grid[-1]) if len(grid) else 1}{declared_options(experiment)}"
    name = folder_name(experiment, "-longer")
    return f"abrun launch RECIPE {steps} {stages(experiment)}--name {name}"


def in_float32(experiment: Experiment) -> str:
    options = "--set policy.dtype=float32 --set steps=1 --set 'controls={}'"
    return f"abrun launch RECIPE {options} --name {folder_name(experiment, '-float32')}"


def planned(experiment: Experiment) -> str:
    return f"abrun plan RECIPE{declared_options(experiment)} --from {name_of(experiment)}"


def frozen(experiment: Experiment) -> str:
    """Return what freezes all runs, with the claims unless they were declared."""
    of, file = "RUNS", f"{name_of(experiment)}.json"
    if experiment.directory:
        of, file = name_of(experiment), f"{folder_name(experiment)}.json"
    declared = compare_hash(experiment.compare) == experiment.launched_compare_sha256
    return f"abrun freeze {of}{'' if declared else claim_options(experiment)} --output {file}"


def compared(experiment: Experiment, *, paired: bool = True) -> str:
    """Return the comparison of the same runs with the experiment's claims."""
    return f"abrun compare RUNS{'' if paired else UNPAIRED}{claim_options(experiment)}"


def in_stages(fresh: FreshRuns, num_pairs: int) -> str:
    """Return the same command with interim analyses after each third of its pairs; empty: too few pairs."""
    looks = [-(-num_pairs * third // 3) for third in (1, 2, 3)]
    return f"{fresh.command} --looks {listed(looks)}" if looks[0] >= 2 else ""


def other_seeds(experiment: Experiment, there: set[int], here: set[int]) -> str:
    """Return what trains and compares the seeds of a reference that later runs lack: several alone."""
    if len(there - here) > 1:
        seeds = listed(sorted(there - here))
        if experiment.directory:
            return f"abrun launch RECIPE --seeds {seeds} --name NEW --no-compare && {AGAIN}"
        return f"abrun compare RUNS --seeds {seeds}"
    if not experiment.directory:
        return "abrun compare RUNS"
    options = f"--seeds {listed(sorted(there | here))} --name {folder_name(experiment)}"
    return f"abrun launch RECIPE {options} --resume --no-compare && abrun compare RUNS"


def compared_by_name(experiment: Experiment, aliases: dict[str, str]) -> str:
    """Return the comparison of a launch's runs under the names that they log."""
    assert experiment.directory
    path = folder_of(experiment.directory)
    arms = " ".join(shlex.quote(f"{arm}={path}/{arm}") for arm in experiment.arms)
    names = " ".join(f"--alias {shlex.quote(f'{ours}={theirs}')}" for ours, theirs in aliases.items())
    return f"abrun compare {arms} {names}{claim_options(experiment)}"


def listed(seeds: Sequence[int]) -> str:
    return ",".join(map(str, seeds))
