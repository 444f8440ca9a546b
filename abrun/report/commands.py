"""The commands that next steps suggest, with RECIPE, RUNS and NEW as placeholders."""

import json
import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from pathlib import Path

from abrun.experiment.plan import compare_hash
from abrun.logs.recorded.experiment import RecordedExperiment
from abrun.messages.codes import Code, Reason
from abrun.recipe.claims import Claim, claim_option
from abrun.recipe.extras import missing_package
from abrun.report.facts import ENGINE_ERRORS, NextStepFacts
from abrun.runs.regular_files import is_directory
from abrun.runs.rundir import RunDir
from abrun.verdict.description import build_claim


@dataclass(frozen=True, slots=True)
class FreshRunsCommand:
    """A command on fresh runs. `add_origin` adds to a reason how to get them, if the command does not."""

    command: str
    add_origin: Callable[[Reason], Reason] | None = None


def fresh_runs_command(experiment: RecordedExperiment, num_pairs: int | None = None) -> FreshRunsCommand:
    """Seeds that no interim analysis has used, as many as there were unless more are needed."""
    first_seed = 1 + max((seed for arm in experiment.arms for seed in experiment.arm(arm)), default=-1)
    count = num_pairs or max([1, *(len(experiment.arm(arm)) for arm in experiment.treatments)])
    last_seed = first_seed + count - 1
    if experiment.regression:
        file = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', experiment.name).strip('-')}-fresh.json"
        command = f"abrun reference save NEW{claim_options(experiment)} --output {file}"
        return FreshRunsCommand(
            command, lambda step: Code.FRESH_REFERENCE(step=step, first=first_seed, last=last_seed)
        )
    if experiment.directory:
        options = f"--seeds {first_seed}-{last_seed}{comparison_options(experiment, count)}"
        name = folder_name(experiment, "-fresh")
        command = f"abrun launch RECIPE {options} --name {name}"
        if experiment.launched_baseline:
            command += f" --no-compare && abrun compare {name} --baseline {shlex.quote(experiment.baseline)}"
        return FreshRunsCommand(command)
    if not experiment.seeds_known:
        command = f"abrun compare NEW NEW --unpaired{claim_options(experiment)}"
        return FreshRunsCommand(command, lambda step: Code.FRESH_FOLDERS(step=step, num_runs=count))
    command = f"abrun compare RUNS --seeds {first_seed}-{last_seed}"
    return FreshRunsCommand(
        command, lambda step: Code.FRESH_SEEDS(step=step, first=first_seed, last=last_seed)
    )


def folder_name(experiment: RecordedExperiment, suffix: str = "") -> str:
    assert experiment.directory
    return shlex.quote(experiment.directory.name + suffix)


def with_claims(experiment: RecordedExperiment, claims: Sequence[Claim]) -> RecordedExperiment:
    """Return the experiment with these claims."""
    return replace(experiment, compare=experiment.compare.model_copy(update={"claims": [*claims]}))


def claim_options(experiment: RecordedExperiment) -> str:
    """Return the claims as options of a command."""
    return "".join(f" --claim {shlex.quote(claim_option(claim))}" for claim in experiment.compare.claims)


def comparison_options(experiment: RecordedExperiment, num_pairs: int | None = None) -> str:
    """Return the option that sets the comparison, unless it is the launched one and its analyses fit."""
    compare = experiment.compare
    interim = compare.interim if num_pairs in (None, *compare.interim[-1:]) else []
    if compare_hash(compare) != experiment.launched_compare_sha256:
        content = compare.model_copy(update={"interim": interim}).model_dump(
            mode="json", exclude_defaults=True
        )
        return f" --set {shlex.quote(f'compare={json.dumps(content)}')}"
    return "" if interim == compare.interim else " --set compare.interim=[]"


# --- one command per rule ---


def run_fresh_seeds(facts: NextStepFacts) -> FreshRunsCommand:
    return fresh_runs_command(facts.experiment)


def run_three_fresh_seeds(facts: NextStepFacts) -> FreshRunsCommand:
    return fresh_runs_command(facts.experiment, 3)


def run_enough_fresh_seeds(facts: NextStepFacts) -> FreshRunsCommand:
    return fresh_runs_command(facts.experiment, facts.num_pairs_that_decide)


def run_fresh_seeds_with_tolerances(facts: NextStepFacts) -> FreshRunsCommand:
    tolerances = {"step_one_tolerance": facts.rounding_tolerances}
    compare = facts.experiment.compare.model_copy(update=tolerances)
    num_pairs = max((claim.power.pairs_needed or 0 for claim in facts.undecided_claims), default=0)
    return fresh_runs_command(replace(facts.experiment, compare=compare), num_pairs or None)


def run_fresh_seeds_with_claim(facts: NextStepFacts) -> FreshRunsCommand:
    return fresh_runs_command(_with_suggested_claim(facts), facts.num_pairs_to_claim)


def plan_with_claim(facts: NextStepFacts) -> str:
    return _plan_command(_with_suggested_claim(facts))


def plan_experiment(facts: NextStepFacts) -> str:
    return _plan_command(facts.experiment)


def compare_with_other_claims(facts: NextStepFacts) -> str | FreshRunsCommand:
    experiment = with_claims(facts.experiment, facts.replacement_claims)
    return (
        fresh_runs_command(experiment) if facts.launched else f"abrun compare RUNS{claim_options(experiment)}"
    )


def compare_with_claim(facts: NextStepFacts) -> str:
    return (
        f"abrun compare RUNS{'' if facts.paired else UNPAIRED}{claim_options(_with_suggested_claim(facts))}"
    )


def at_next_analysis(facts: NextStepFacts) -> str:
    seeds = join_numbers([*facts.treatment_seeds, *facts.seeds_to_come])
    return f"abrun compare RUNS --seeds {seeds} --interim {join_numbers(facts.experiment.compare.interim)}"


def compare_with_other_seeds(facts: NextStepFacts) -> str:
    """Return a command that covers the reference's missing seeds; several are compared alone."""
    reference_seeds, run_seeds = facts.reference_seeds
    if len(reference_seeds - run_seeds) > 1:
        seeds = join_numbers(sorted(reference_seeds - run_seeds))
        if facts.launched:
            return f"abrun launch RECIPE --seeds {seeds} --name NEW --no-compare && {COMPARE_WITH_REFERENCE}"
        return f"abrun compare RUNS --seeds {seeds}"
    if not facts.launched:
        return "abrun compare RUNS"
    options = (
        f"--seeds {join_numbers(sorted(reference_seeds | run_seeds))} --name {folder_name(facts.experiment)}"
    )
    return f"abrun launch RECIPE {options} --resume --no-compare && abrun compare RUNS"


def compare_with_aliases(facts: NextStepFacts) -> str:
    experiment = facts.experiment
    assert experiment.directory
    path = relative_folder(experiment.directory)
    arms = " ".join(shlex.quote(f"{arm}={path}/{arm}") for arm in experiment.arms)
    alias_options = (
        f"--alias {shlex.quote(f'{metric}={logged_name}')}"
        for metric, logged_name in facts.suggested_aliases.items()
    )
    return f"abrun compare {arms} {' '.join(alias_options)}{claim_options(experiment)}"


def resume_launch(facts: NextStepFacts) -> str:
    return f"abrun launch RECIPE {_stage_options(facts)}--name {folder_name(facts.experiment)} --resume"


def launch_longer(facts: NextStepFacts) -> str:
    grid = facts.experiment.all_steps()
    steps = f"--set steps={2 * int(grid[-1]) if len(grid) else 1}{comparison_options(facts.experiment)}"
    name = folder_name(facts.experiment, "-longer")
    return f"abrun launch RECIPE {steps} {_stage_options(facts)}--name {name}"


def launch_in_float32(facts: NextStepFacts) -> str:
    options = "--set policy.dtype=float32 --set steps=1 --set 'controls={}'"
    return f"abrun launch RECIPE {options} --name {folder_name(facts.experiment, '-float32')}"


def freeze_runs(facts: NextStepFacts) -> str:
    experiment, source, file = facts.experiment, "RUNS", f"{experiment_argument(facts.experiment)}.json"
    if facts.launched:
        source, file = experiment_argument(experiment), f"{folder_name(experiment)}.json"
    claims = "" if facts.is_declared else claim_options(experiment)
    return f"abrun reference save {source}{claims} --output {file}"


def compare_with_new_runs(facts: NextStepFacts) -> str:
    directory = facts.experiment.directory
    return f"abrun compare {shlex.quote(relative_folder(directory)) if directory else 'RUNS'} NEW"


def show_status(facts: NextStepFacts) -> str:
    return f"abrun status {experiment_argument(facts.experiment)}"


def show_first_log(facts: NextStepFacts) -> str:
    first_started = next(run for run in facts.unfinished_runs if run.status != "missing")
    return f"abrun logs {experiment_argument(facts.experiment)}/{first_started.name}"


def measure_mismatch(facts: NextStepFacts) -> str:
    # The weights before the update of the failed step; without a checkpoint, the initial ones
    step_options = [
        f" --step {check['step'] - 1}" for check in facts.failed_checks if check["metric"] in ENGINE_ERRORS
    ]
    arm, seed = facts.first_failing_run
    assert facts.experiment.directory
    if not is_directory(RunDir(facts.experiment.directory / arm / f"seed-{seed}").checkpoints):
        step_options.append(" --step 0")
    return f"abrun logprob-diff {_first_failing_run_path(facts)}{''.join(step_options[:1])}"


def trace_arms(facts: NextStepFacts) -> str:
    check = facts.failed_checks[0]
    arm = f" --arm {shlex.quote(check.arm)}" if len(facts.experiment.treatments) > 1 else ""
    return f"abrun trace RECIPE{arm}" + (f" --step {check['step']}" if check["step"] > 1 else "")


def show_samples(facts: NextStepFacts) -> str:
    step = f" --step {facts.failed_checks[0]['step']}" if facts.failed_checks else ""
    experiment, seed = experiment_argument(facts.experiment), facts.first_failing_run[1]
    baseline_run = f"{experiment}/{facts.experiment.baseline}/seed-{seed}"
    return f"abrun completions {_first_failing_run_path(facts)} --against {baseline_run}{step}"


def install_trainer(facts: NextStepFacts, command: str) -> str:
    """Return the command that must precede one that trains on this machine: empty if nothing is missing."""
    trains = command.split()[1] in (
        "trace",
        "logprob-diff",
        *(LAUNCH_COMMANDS if facts.launches_here else ()),
    )
    is_lacking = trains and facts.is_own_trainer and missing_package("train")
    return "pip install 'abrun[train]' && " if is_lacking else ""


def join_numbers(seeds: Sequence[int]) -> str:
    return ",".join(map(str, seeds))


def _first_failing_run_path(facts: NextStepFacts) -> str:
    arm, seed = facts.first_failing_run
    return f"{experiment_argument(facts.experiment)}/{shlex.quote(arm)}/seed-{seed}"


def _with_suggested_claim(facts: NextStepFacts) -> RecordedExperiment:
    assert facts.claimable
    return with_claims(facts.experiment, [build_claim(facts.claimable)])


def _plan_command(experiment: RecordedExperiment) -> str:
    return f"abrun power RECIPE{comparison_options(experiment)} --from {experiment_argument(experiment)}"


def _stage_options(facts: NextStepFacts) -> str:
    """An experiment with interim analyses is launched in stages, however it was begun."""
    interim = facts.experiment.compare.interim
    return f"--until-decided --max-seeds {interim[-1]} " if interim else ""


# Placeholders in suggested commands, filled from the command line that the user typed.

RUNS_DIR = Path("runs")  # default of --runs-dir
UNPAIRED, VERSIONS_DIFFER = " --unpaired", " --versions-differ"
COMPARE_WITH_REFERENCE = "abrun compare NEW --reference FILE"
LAUNCH_COMMANDS = ("launch", "faults")  # commands that start runs
# Options that say how to read foreign runs
READING_OPTIONS = ("--baseline", "--pattern", "--group", "--alias", "--step-column", "--runs-dir")


def fill_placeholders(command: str, experiment: RecordedExperiment, words: Sequence[str]) -> str:
    """Replace RECIPE and RUNS by the user's recipe and sources, as far as they are known."""
    if experiment.directory:
        command = command.replace("RECIPE", _recipe_arguments(command, experiment.directory, words), 1)
    compare_words = list(words[2:]) if list(words[:2]) == ["abrun", "compare"] else []
    sources = [*takewhile(lambda word: not word.startswith("-"), compare_words)]
    options = compare_words[len(sources) :]
    if _split_options(options, ["--reference"])[0]:
        command = command.replace(COMPARE_WITH_REFERENCE, shlex.join(["abrun", "compare", "NEW", *options]))
    elif experiment.directory:
        # The experiment's recipe names the reference
        command = command.replace(f" --no-compare && {COMPARE_WITH_REFERENCE}", "")
    if not compare_words:
        return command.replace("RUNS", experiment_argument(experiment)) if experiment.directory else command
    if command.startswith(
        ("abrun reference save NEW", "abrun compare NEW NEW")
    ):  # read as those that were compared
        flags = (
            [VERSIONS_DIFFER.strip()] if "compare" in command and VERSIONS_DIFFER.strip() in options else []
        )
        return shlex.join([*shlex.split(command), *_split_options(options, READING_OPTIONS)[0], *flags])
    if command.startswith("abrun compare RUNS NEW"):  # the report of these runs stays where it is
        return shlex.join(["abrun", "compare", *sources, "NEW", *_split_options(options, READING_OPTIONS)[0]])
    if UNPAIRED.strip() in options:
        command = command.replace(UNPAIRED, "")
    replaced_options = [
        option for option in ("--seeds", "--claim", "--step-column") if f" {option} " in command
    ]
    replaced_options += ["--interim"] * (" --seeds " in command)  # declared for the runs compared before
    _, options = _split_options(options, replaced_options)
    if command.startswith("abrun reference save"):
        sources += _split_options(options, (*READING_OPTIONS, "--seeds", "--exclude"))[0]
    command = command.replace("abrun compare RUNS", shlex.join(["abrun", "compare", *sources, *options]))
    return command.replace("RUNS", shlex.join(sources) or "RUNS")


def experiment_argument(experiment: RecordedExperiment) -> str:
    """Return the argument by which commands find an experiment; for other runs, a name for files."""
    if experiment.directory is None:
        return shlex.quote(experiment.name)
    path = _relative_path(experiment.directory)
    return shlex.quote(path.name if path.parent == RUNS_DIR else str(path))


def relative_folder(directory: Path) -> str:
    """Return the folder of an experiment, relative if it is below the working directory."""
    return str(_relative_path(directory))


def _recipe_arguments(command: str, directory: Path, words: Sequence[str]) -> str:
    """Return the recipe and options of the typed launch, or the experiment's folder, which stores them.

    A value that the command sets itself is left out of the typed options.
    """
    launch_words = list(words[2:]) if list(words[:2]) == ["abrun", "launch"] else []
    typed_recipe = [word for word in launch_words[:1] if not word.startswith("-")]
    typed_recipe = typed_recipe or [word for word in launch_words if word.endswith((".yaml", ".yml"))][:1]
    path = _relative_path(directory)
    arguments = typed_recipe or [str(path)]
    command_words = shlex.split(command)
    starts_runs = command_words[1] in LAUNCH_COMMANDS
    if typed_recipe:
        options = ["--launcher", *["--seeds"] * (not _has_seeds(command_words))] if starts_runs else []
        kept_options = _split_options(launch_words, options)[0]
        has_seeds = _has_seeds([*command_words, *kept_options])
        arguments += (
            _typed_overrides(launch_words, [*_set_keys(command), *["seeds"] * has_seeds]) + kept_options
        )
    if starts_runs and path.parent != RUNS_DIR:
        arguments += ["--runs-dir", str(path.parent)]
    return shlex.join(arguments)


def _has_seeds(words: Sequence[str]) -> bool:
    """Return whether the words set --seeds; the same text inside the value of another option does not."""
    return any(word.partition("=")[0] == "--seeds" for word in words)


def _set_keys(command: str) -> list[str]:
    """Return the dotted keys of a command's --set options."""
    words = shlex.split(command)
    return [value.partition("=")[0] for word, value in pairwise(words) if word == "--set"]


def _typed_overrides(launch_words: Sequence[str], replaced_keys: Sequence[str]) -> list[str]:
    """Return the typed --set options: the last one of each key, and none at or below the replaced keys."""
    words = iter(_split_options(launch_words, ["--set"])[0])
    texts = [next(words, "") if word == "--set" else word.partition("=")[2] for word in words]
    values = {text.partition("=")[0]: text for text in texts}
    return [
        word
        for key, text in values.items()
        if not any(f"{key}.".startswith(f"{replaced}.") for replaced in replaced_keys)
        for word in ("--set", text)
    ]


def _split_options(words: Sequence[str], names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split words into the named options with their values, and the rest."""
    selected: list[str] = []
    remaining: list[str] = []
    words_left = iter(words)
    for word in words_left:
        name, equals, _ = word.partition("=")
        if name in names:
            selected += [word] if equals else [word, next(words_left, "")]
        else:
            remaining.append(word)
    return selected, remaining


def _relative_path(directory: Path) -> Path:
    """Return the relative path of a directory below, unless it looks like a name; else the full path."""
    directory = directory.resolve()
    if directory.parent == RUNS_DIR.resolve():
        return RUNS_DIR / directory.name
    path = Path(os.path.relpath(directory))
    return directory if path.parts[:1] == ("..",) or len(path.parts) < 2 else path
