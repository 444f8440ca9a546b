"""The commands that next steps suggest, with RECIPE, RUNS and NEW as placeholders."""

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from pathlib import Path

from abrun.experiment.plan import compare_hash
from abrun.logs.recorded.experiment import RecordedExperiment
from abrun.recipe.claims import Claim, claim_option


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
        compare = compare.model_copy(update={"interim": interim})
        content = json.dumps(compare.model_dump(mode="json", exclude_defaults=True))
        return f" --set {shlex.quote(f'compare={content}')}"
    return "" if interim == compare.interim else " --set compare.interim=[]"


def join_numbers(seeds: Sequence[int]) -> str:
    return ",".join(map(str, seeds))


# Placeholders in suggested commands, filled from the command line that the user typed.

RUNS_DIR = Path("runs")  # default of --runs-dir
UNPAIRED = " --unpaired"
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
    reading = _split_options(options, READING_OPTIONS)[0]
    if command.startswith(("abrun reference save NEW", "abrun compare NEW NEW")):
        # New runs are read as those that were compared
        flags = ["--versions-differ"] * ("compare" in command and "--versions-differ" in options)
        return shlex.join([*shlex.split(command), *reading, *flags])
    if command.startswith("abrun compare RUNS NEW"):  # the report of these runs stays where it is
        return shlex.join(["abrun", "compare", *sources, "NEW", *reading])
    if UNPAIRED.strip() in options:
        command = command.replace(UNPAIRED, "")
    replaced = [option for option in ("--seeds", "--claim", "--step-column") if f" {option} " in command]
    replaced += ["--interim"] * ("--seeds" in replaced)  # declared for the runs compared before
    _, options = _split_options(options, replaced)
    if command.startswith("abrun reference save"):
        sources += _split_options(options, (*READING_OPTIONS, "--seeds", "--exclude"))[0]
    command = command.replace("abrun compare RUNS", shlex.join(["abrun", "compare", *sources, *options]))
    return command.replace("RUNS", shlex.join(sources) or "RUNS")


def experiment_argument(experiment: RecordedExperiment) -> str:
    """Return the argument by which commands find an experiment; for other runs, a name for files."""
    if experiment.directory is None:
        return shlex.quote(experiment.name)
    path = relative_path(experiment.directory)
    return shlex.quote(path.name if path.parent == RUNS_DIR else str(path))


def _recipe_arguments(command: str, directory: Path, words: Sequence[str]) -> str:
    """Return the recipe and options of the typed launch, or the experiment's folder, which stores them.

    A value that the command sets itself is left out of the typed options.
    """
    launch_words = list(words[2:]) if list(words[:2]) == ["abrun", "launch"] else []
    typed_recipe = [word for word in launch_words[:1] if not word.startswith("-")]
    typed_recipe = typed_recipe or [word for word in launch_words if word.endswith((".yaml", ".yml"))][:1]
    path = relative_path(directory)
    arguments = typed_recipe or [str(path)]
    command_words = shlex.split(command)
    starts_runs = command_words[1] in LAUNCH_COMMANDS
    if typed_recipe:
        options = ["--launcher", *["--seeds"] * (not _has_seeds(command_words))] if starts_runs else []
        kept_options = _split_options(launch_words, options)[0]
        set_keys = [value.partition("=")[0] for word, value in pairwise(command_words) if word == "--set"]
        set_keys += ["seeds"] * _has_seeds([*command_words, *kept_options])
        arguments += [*_typed_overrides(launch_words, set_keys), *kept_options]
    if starts_runs and path.parent != RUNS_DIR:
        arguments += ["--runs-dir", str(path.parent)]
    return shlex.join(arguments)


def _has_seeds(words: Sequence[str]) -> bool:
    """Return whether the words set --seeds; the same text inside the value of another option does not."""
    return any(word.partition("=")[0] == "--seeds" for word in words)


def _typed_overrides(launch_words: Sequence[str], replaced_keys: Sequence[str]) -> list[str]:
    """Return the typed --set options: the last one of each key, and none at or below the replaced keys."""
    typed = iter(_split_options(launch_words, ["--set"])[0])
    texts = [next(typed, "") if word == "--set" else word.partition("=")[2] for word in typed]
    values = {text.partition("=")[0]: text for text in texts}
    words = []
    for key, text in values.items():
        if not any(f"{key}.".startswith(f"{replaced}.") for replaced in replaced_keys):
            words += ["--set", text]
    return words


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


def relative_path(directory: Path) -> Path:
    """Return the relative path of a directory below, unless it looks like a name; else the full path."""
    directory = directory.resolve()
    if directory.parent == RUNS_DIR.resolve():
        return RUNS_DIR / directory.name
    path = Path(os.path.relpath(directory))
    return directory if path.parts[:1] == ("..",) or len(path.parts) < 2 else path
