"""The arguments that commands share, and lists in them. What does not read is a RecipeError, one line."""

import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from abrun.errors import RecipeError
from abrun.reasons import Code
from abrun.redaction import shortened
from abrun.regular_files import is_directory

MOST_SEEDS = 1000


def recipe_file(given: Path | None) -> Path | None:
    """The file that was named, or else the recipe of that name that ships, which is said; None: as it is."""
    if given is None:
        return None
    from abrun.experiment.starter.shipped import find_recipe

    found = find_recipe(given)
    if found != given:
        print(f"abrun: {given} is the recipe that ships: {found}", file=sys.stderr)
    return found


def names_of_recipes(incomplete: str) -> list[str]:
    """For a shell that completes: those that ship. (What is a file, the shell completes itself.)"""
    from abrun.experiment.starter.shipped import recipe_files

    return [name for name in recipe_files() if name.startswith(incomplete)]


def names_of_experiments(incomplete: str) -> list[str]:
    """For a shell that completes: those under `runs/`."""
    from abrun.runs.experiment import list_experiments

    runs = Path("runs")
    found = list_experiments(runs) if is_directory(runs) else []
    return [path.name for path in found if path.name.startswith(incomplete)]


RecipeFile = Annotated[
    Path,
    typer.Argument(
        help="A recipe: a YAML file; the name of one that ships, such as quickstart (abrun recipes); or an "
        "experiment's folder, such as runs/quickstart: what that was launched with.",
        callback=recipe_file,
        autocompletion=names_of_recipes,
    ),
]
RunsDir = Annotated[Path, typer.Option(help="Folder that holds all experiments.")]
Json = Annotated[bool, typer.Option("--json", help="For machines: as JSON.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a value by its dotted key, such as compare.claims.0.sigma=0.1; repeatable. A mapping or a "
        "list replaces what was there, 'arms={...}' too.",
    ),
]
Experiment = Annotated[
    str, typer.Argument(help="A path, or a name under --runs-dir.", autocompletion=names_of_experiments)
]
Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE...",
        help="An experiment (a path, or a name under --runs-dir); or folders and files of runs, one an arm "
        "(NAME=PATH names it); or tb:PATH, wandb:ENTITY/PROJECT, csv:PATH, jsonl:PATH, parquet:PATH.",
    ),
]
Claims = Annotated[
    list[str] | None,
    typer.Option(
        "--claim",
        metavar="METRIC:WINDOW:MARGIN",
        help="A claim instead of the declared ones, such as 'train/reward:last 20%:0.05'; repeatable.",
    ),
]
Baseline = Annotated[str | None, typer.Option(help="Which arm is the baseline.")]
Pattern = Annotated[
    str | None, typer.Option(help="How names of runs hold arm and seed, such as '{arm}-s{seed}'.")
]
Group = Annotated[str | None, typer.Option(help="Only the wandb runs of this group.")]
Aliases = Annotated[
    list[str] | None,
    typer.Option(
        metavar="OURS=THEIRS",
        help="What a metric is called there, such as train/reward=critic/score/mean, or a framework, such as "
        "verl; repeatable. Without: recognised where it can be.",
    ),
]
StepColumn = Annotated[str | None, typer.Option(help="The column or key that counts steps.")]
Seeds = Annotated[
    str | None, typer.Option(help="Only the runs of these seeds, such as 0-3 or 1,5: what both arms have.")
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RUN",
        help="Leave out a run, such as new/seed-2, or all that a pattern matches: by arm and seed, by "
        "name in the log, or by wandb id; repeatable. The report says so.",
    ),
]
VersionsDiffer = Annotated[
    bool,
    typer.Option(
        "--versions-differ", help="Package versions are the treatment: they differ by arm, not within one."
    ),
]
Reference = Annotated[
    Path | None, typer.Option(help="Compare one arm with a frozen reference ensemble; see abrun freeze.")
]
Unpaired = Annotated[
    bool,
    typer.Option("--unpaired", help="Runs are independent, with other seeds or none: Welch's test."),
]
Interim = Annotated[
    str | None,
    typer.Option(
        metavar="3,5,8",
        help="Interim analyses of runs that abrun did not launch, at these numbers of pairs (in the order of "
        "their seeds): give the same at each. An experiment declares compare.interim.",
    ),
]
NoStepOne = Annotated[
    bool,
    typer.Option("--no-step-one", help="The first recorded step follows an update: skip it."),
]
ReportFolder = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="Where the report goes; default: <experiment>/report (report-post-hoc-HASH of a comparison that "
        "was not declared), or <name>-report (<name>-report-HASH where that is of another comparison).",
    ),
]
Formats = Annotated[
    str | None,
    typer.Option("--format", help="What to write: terminal, html, markdown, json, png, svg; default: all."),
]
AllowInconclusive = Annotated[
    bool, typer.Option("--allow-inconclusive", help="Exit with 0 instead of 4 on INCONCLUSIVE.")
]
ToWandb = Annotated[bool, typer.Option("--wandb", help="Upload the report to wandb, with its verdict.")]
TakeOver = Annotated[
    bool,
    typer.Option("--take-over", help="Claim what a launcher on another machine holds; it stops."),
]
Launcher = Annotated[
    str | None, typer.Option(help="What starts the runs: local, slurm, ray; default: the recipe's, or local.")
]
Name = Annotated[str | None, typer.Option(help="Folder of the experiment; default: the recipe's name.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and what it lacks; write nothing.")]
DeviceMemory = Annotated[
    str | None,
    typer.Option(
        help="What a GPU has, 80GiB or h200 (default: this machine's): what the policy's values of auto have "
        "to fit, and what --dry-run predicts arms to exceed."
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the experiment's unfinished runs.")]
UntilDecided = Annotated[
    bool,
    typer.Option(
        "--until-decided", help="Run pairs in stages, judge after each, and stop once it is decided."
    ),
]
MaxSeeds = Annotated[
    int | None,
    typer.Option(
        min=3,
        max=MOST_SEEDS,
        help="With --until-decided: seeds of the last stage (12, or the last interim analysis').",
    ),
]
Detach = Annotated[bool, typer.Option("--detach", help="Return once the jobs are in the queue of a cluster.")]
ExitZero = Annotated[
    bool, typer.Option("--exit-zero", help="Exit with 0 when every run finished, whatever the verdict.")
]
NoCompare = Annotated[bool, typer.Option("--no-compare", help="Do not compare the arms at the end.")]


def parse_formats(text: str | None) -> list[str]:
    text = "terminal,html,markdown,json,png,svg" if text is None else text
    wanted = [part.strip() for part in text.split(",") if part.strip()]
    allowed = ("terminal", "html", "markdown", "json", "png", "svg")
    for form in wanted:
        if form not in allowed:
            raise RecipeError(Code.NOT_ALLOWED(field="--format", got=repr(form), allowed=allowed))
    if not wanted:
        raise RecipeError(
            Code.NOT_ALLOWED(field="--format", got=f"{text!r}, nothing to write", allowed=allowed)
        )
    return wanted


def parse_lengths(text: str, option: str = "--lengths", least: int = 2) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,10}", part) and int(part) >= least for part in parts):
        raise RecipeError(
            Code.NOT_ALLOWED(
                field=option,
                got=repr(text),
                allowed=f"numbers of at least {least}, such as "
                f"{','.join(str(least * factor) for factor in (1, 2, 4))}",
            )
        )
    return sorted({int(part) for part in parts})


def typed_command() -> str:
    """The command line, as a report names what made it."""
    return shlex.join(["abrun", *sys.argv[1:]])


def parse_seeds(text: str) -> list[int]:
    """`0,1,2`, `0-4`, or both mixed."""
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not re.fullmatch(r"[0-9]{1,10}(-[0-9]{1,10})?", part.strip()):
            raise RecipeError(Code.SETTING_REFUSED(field="--seeds", got=repr(text)))
        start, stop = int(first), int(last or first)
        if stop < start:
            raise RecipeError(Code.SEEDS_BACKWARDS(got=part.strip(), last=last, first=first))
        if stop - start >= MOST_SEEDS:
            raise RecipeError(Code.SEEDS_TOO_MANY(got=part.strip(), max_seeds=MOST_SEEDS))
        seeds += range(start, stop + 1)
    return seeds


def parse_interim(text: str) -> tuple[int, ...]:
    """`3,5,8`: numbers of pairs."""
    if not re.fullmatch(r" *[0-9]{1,6} *(, *[0-9]{1,6} *)*", text):
        raise RecipeError(Code.SETTING_REFUSED(field="--interim", got=shortened(text)))
    return tuple(map(int, text.split(",")))


def with_seeds(overrides: list[str] | None, seeds: str | None) -> list[str]:
    """The overrides of a recipe, its seeds among them. Raises RecipeError for what reads as a count."""
    if seeds is not None and re.fullmatch(r"[2-9]|[1-9][0-9]{1,9}", seeds.strip()):
        number = int(seeds)
        raise RecipeError(Code.SEEDS_READ_AS_COUNT(got=number, last=number - 1))
    return [*(overrides or []), *([] if seeds is None else [f"seeds={parse_seeds(seeds)}"])]
