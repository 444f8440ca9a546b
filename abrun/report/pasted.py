"""Commands to paste: what was typed in the place of what stands for it."""

import os
import shlex
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from abrun.recorded.experiment import RecordedExperiment

RUNS_DIR = Path("runs")  # where commands look without --runs-dir
UNPAIRED, VERSIONS_DIFFER = " --unpaired", " --versions-differ"
AGAIN = "abrun compare NEW --reference FILE"
LAUNCHING = ("launch", "sensitivity")  # commands that start runs
READING = ("--baseline", "--pattern", "--group", "--alias", "--step-column", "--runs-dir")  # of foreign runs


def filled(command: str, experiment: RecordedExperiment, words: Sequence[str]) -> str:
    """With what is launched in the place of RECIPE, and what was typed in that of RUNS, as far as known."""
    if experiment.directory:
        command = command.replace("RECIPE", _recipe(command, experiment.directory, words), 1)
    compared = list(words[2:]) if list(words[:2]) == ["abrun", "compare"] else []
    sources = [*takewhile(lambda word: not word.startswith("-"), compared)]
    options = compared[len(sources) :]
    if _options(options, ["--reference"])[0]:
        command = command.replace(AGAIN, shlex.join(["abrun", "compare", "NEW", *options]))
    elif experiment.directory:
        command = command.replace(f" --no-compare && {AGAIN}", "")  # its recipe names the reference
    if not compared:
        return command.replace("RUNS", name_of(experiment)) if experiment.directory else command
    if command.startswith(("abrun freeze NEW", "abrun compare NEW NEW")):  # read as those that were compared
        flags = (
            [VERSIONS_DIFFER.strip()] if "compare" in command and VERSIONS_DIFFER.strip() in options else []
        )
        return shlex.join([*shlex.split(command), *_options(options, READING)[0], *flags])
    if UNPAIRED.strip() in options:
        command = command.replace(UNPAIRED, "")
    replaced = [option for option in ("--seeds", "--claim", "--step-column") if f" {option} " in command]
    replaced += ["--interim"] * (" --seeds " in command)  # of other runs
    _, options = _options(options, replaced)
    if command.startswith("abrun freeze"):
        sources += _options(options, (*READING, "--seeds", "--exclude"))[0]
    command = command.replace("abrun compare RUNS", shlex.join(["abrun", "compare", *sources, *options]))
    return command.replace("RUNS", shlex.join(sources) or "RUNS")


def name_of(experiment: RecordedExperiment) -> str:
    """By which commands find an experiment of the store; of other runs, a name for files."""
    if experiment.directory is None:
        return shlex.quote(experiment.name)
    path = _path(experiment.directory)
    return shlex.quote(path.name if path.parent == RUNS_DIR else str(path))


def folder_of(directory: Path) -> str:
    """The folder of an experiment, from here where it is below."""
    return str(_path(directory))


def _recipe(command: str, directory: Path, words: Sequence[str]) -> str:
    """Of the launch that was typed, with what was set; else the experiment's folder, which holds that."""
    launch = list(words[2:]) if list(words[:2]) == ["abrun", "launch"] else []
    named = [word for word in launch[:1] if not word.startswith("-")]
    named = named or [word for word in launch if word.endswith((".yaml", ".yml"))][:1]
    path = _path(directory)
    found = named or [str(path)]
    starts = command.split()[1] in LAUNCHING
    if named:
        seeds = ["--seeds"] * (starts and " --seeds " not in command)
        found += _options(launch, ["--set", *seeds, *(["--launcher"] * starts)])[0]
    if starts and path.parent != RUNS_DIR:
        found += ["--runs-dir", str(path.parent)]
    return shlex.join(found)


def _options(words: Sequence[str], names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Of a command line the options of those names, with their values, and all the rest."""
    those: list[str] = []
    others: list[str] = []
    left = iter(words)
    for word in left:
        name, equals, _ = word.partition("=")
        if name in names:
            those += [word] if equals else [word, next(left, "")]
        else:
            others.append(word)
    return those, others


def _path(directory: Path) -> Path:
    """From here, where it is below; a path of one part could be taken for a name."""
    directory = directory.resolve()
    if directory.parent == RUNS_DIR.resolve():
        return RUNS_DIR / directory.name
    path = Path(os.path.relpath(directory))
    return directory if path.parts[:1] == ("..",) or len(path.parts) < 2 else path
