"""Shared arguments of commands and their parsers, which raise a one-line RecipeError for bad values."""

import functools
import inspect
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from abrun.cli.app import note
from abrun.errors import RecipeError
from abrun.runs.redaction import shortened

if TYPE_CHECKING:
    from abrun.logs.recorded.sources import ReadingOptions
    from abrun.recipe.claims import Claim

MAX_SEEDS = 1000
R = TypeVar("R")


def resolve_recipe_file(context: typer.Context, path: Path | None) -> Path | None:
    """Return the given file, or print and return the recipe of that name; None stays None.

    A name is that of a built-in recipe or of an experiment under --runs-dir, which is parsed before.
    """
    if path is None:
        return None
    from abrun.experiment.starter.shipped import find_recipe
    from abrun.runs.files import is_directory

    recipe_path = find_recipe(path, context.params.get("runs_dir", Path("runs")))
    if recipe_path != path:
        kind = "the recipe of experiment" if is_directory(recipe_path) else "built-in recipe"
        note(f"using {kind} {path}: {recipe_path}")
    return recipe_path


def complete_recipe(incomplete: str) -> list[str]:
    """Return built-in recipes for shell completion; the shell completes files itself."""
    from abrun.experiment.starter.shipped import recipe_files

    return [name for name in recipe_files() if name.startswith(incomplete)]


def complete_experiment(incomplete: str) -> list[str]:
    """Return the experiments under `runs/` for shell completion."""
    from abrun.runs.experiment import list_experiments
    from abrun.runs.files import is_directory

    runs = Path("runs")
    experiments = list_experiments(runs) if is_directory(runs) else []
    return [path.name for path in experiments if path.name.startswith(incomplete)]


def recipe_argument(description: str) -> Any:
    """Return an argument that is a recipe's file or name."""
    return typer.Argument(help=description, callback=resolve_recipe_file, autocompletion=complete_recipe)


RecipeFile = Annotated[
    Path,
    recipe_argument(
        "Recipe: a YAML file, a built-in recipe such as quickstart (see abrun recipes), or an experiment (a "
        "path, or a name under --runs-dir) to reuse its recipe."
    ),
]
RunFolder = Annotated[
    str, typer.Argument(help="A run's folder, or its name such as quickstart/baseline/seed-0.")
]
# Eager: parsed before the arguments that name an experiment in it.
RunsDir = Annotated[Path, typer.Option(help="Folder of all experiments.", is_eager=True)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print all evidence, definitions and next commands.")
]
DryRunJson = Annotated[bool, typer.Option("--json", help="With --dry-run: print the plan as JSON.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a recipe value by its dotted key, such as steps=100 or compare.claims.0.sigma=0.1; "
        "repeatable. Mappings and lists replace the old value.",
    ),
]
Experiment = Annotated[
    str,
    typer.Argument(
        help="Experiment: a path, or a name under --runs-dir.", autocompletion=complete_experiment
    ),
]
_SOURCES = typer.Argument(
    metavar="SOURCE",
    help="An experiment (a path, or a name under --runs-dir); or one folder or file of runs per arm "
    "(NAME=PATH names the arm); or wandb:ENTITY/PROJECT. tb:PATH, wandb:PATH, csv:PATH, jsonl:PATH, "
    "parquet:PATH, mlflow:PATH, trackio:PATH, swanlab:PATH and lm-eval:PATH select a format.",
)
Sources = Annotated[list[str], _SOURCES]
OptionalSources = Annotated[list[str] | None, _SOURCES]
Claims = Annotated[
    list[str] | None,
    typer.Option(
        "--claim",
        metavar="METRIC:WINDOW:MARGIN",
        help="Claim to use instead of the declared ones, such as 'train/reward:last 20%:0.05' (the arms "
        "differ by less than this); repeatable. Instead of 0.05 also 'not_worse 0.05', 'better 0.05', "
        "'>0.65' (level), '<0.6x' (ratio), 'sd <1.5x' (spread) or exact; ', lower is better' or ', higher "
        "is better' may follow. A share of runs: 'rate of divergence:<5%'.",
    ),
]
Alpha = Annotated[
    float | None,
    typer.Option(
        help="Level of each one-sided test, such as 0.01; default: the declared one, or 0.05. If every claim "
        "must hold, none is corrected for their number (intersection-union test)."
    ),
]
Require = Annotated[
    str | None,
    typer.Option(
        metavar="all|any",
        help="all: every claim must hold; any: one suffices, with Holm's correction. Default: the declared "
        "value, or all.",
    ),
]
Baseline = Annotated[str | None, typer.Option(help="Name of the baseline arm.")]
Pattern = Annotated[str | None, typer.Option(help="Pattern of run names, such as '{arm}-s{seed}'.")]
ArmsBy = Annotated[
    str | None, typer.Option(metavar="SETTING", help="Setting of the runs that tells the arms.")
]
SeedsBy = Annotated[
    str | None, typer.Option(metavar="SETTING", help="Setting of the runs that holds the seed.")
]
Group = Annotated[str | None, typer.Option(help="Only read wandb runs of this group.")]
Aliases = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=LOG_NAME|FRAMEWORK",
        help="Map a metric to its name in the log, such as train/reward=critic/score/mean, or give a "
        "framework, such as verl, to use its names; repeatable. Default: recognised automatically if "
        "possible.",
    ),
]
StepColumn = Annotated[str | None, typer.Option(help="Column or key of the step number.")]
Seeds = Annotated[str | None, typer.Option(help="Use only these seeds, such as 0-3 or 1,5.")]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RUN",
        help="Exclude a run, such as new/seed-2, or all runs that match a pattern: by arm and seed, name in "
        "the log, or wandb id; repeatable. The output lists excluded runs.",
    ),
]
VersionsDiffer = Annotated[
    bool,
    typer.Option(
        "--versions-differ", help="Package versions are the treatment: they may differ between arms."
    ),
]
Reference = Annotated[
    Path | None,
    typer.Option(
        help="Compare one arm with a frozen reference (see abrun reference save). With --fleet: their folder."
    ),
]
ReferenceArm = Annotated[
    str | None,
    typer.Option("--arm", help="With --reference: the arm to compare; required if there are several."),
]
Unpaired = Annotated[
    bool, typer.Option("--unpaired", help="Runs are independent, not paired by seed: use Welch's test.")
]
Interim = Annotated[
    str | None,
    typer.Option(
        metavar="3,5,8",
        help="For runs not launched by abrun: numbers of pairs, in seed order, at which to make interim "
        "analyses; pass the same list each time. Experiments declare compare.interim instead.",
    ),
]
NoStepOne = Annotated[
    bool,
    typer.Option(
        "--no-step-one",
        help="Skip the check that arms agree at step one, before any update; for runs whose first recorded "
        "step follows an update.",
    ),
]
ReportFolder = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FOLDER",
        help="Write the report into this folder: report.html, report.md, verdict.json and figures. Default: "
        "write nothing.",
    ),
]
AllowInconclusive = Annotated[
    bool, typer.Option("--allow-inconclusive", help="Exit with 0 instead of 4 if INCONCLUSIVE.")
]
ToWandb = Annotated[bool, typer.Option("--wandb", help="With --output: upload report and verdict to wandb.")]
TakeOver = Annotated[
    bool,
    typer.Option(
        "--take-over", help="Take over the experiment from a launcher on another machine, which then stops."
    ),
]
NewSeeds = Annotated[str | None, typer.Option(help="Seeds instead of the recipe's: 0,1,2 or 0-4.")]
Jobs = Annotated[
    int | None, typer.Option(min=1, help="Maximum concurrent runs; default: as many as the devices allow.")
]
Launcher = Annotated[
    str | None, typer.Option(help="Launcher: local, slurm or ray; default: the recipe's, or local.")
]
Name = Annotated[str | None, typer.Option(help="Folder of the experiment; default: the recipe's name.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and any problems; write nothing.")]
PlanOnly = Annotated[
    bool,
    typer.Option("--plan-only", help="As --dry-run, but exit with 0 if another machine could run the plan."),
]
DeviceMemory = Annotated[
    str | None,
    typer.Option(
        help="GPU memory to plan for, such as 80GiB or h200: predicts OOM and resolves `auto` in the "
        "recipe's policy section. Default: this machine's."
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Resume the experiment's unfinished runs.")]
UntilDecided = Annotated[
    bool,
    typer.Option(
        "--until-decided", help="Run pairs in stages with an interim analysis after each; stop once decided."
    ),
]
MaxSeeds = Annotated[
    int | None,
    typer.Option(
        min=3,
        max=MAX_SEEDS,
        help="Maximum number of seeds with --until-decided; default: 12, or the last of compare.interim.",
    ),
]
Detach = Annotated[bool, typer.Option("--detach", help="Return once the jobs are queued on the cluster.")]
ExitZero = Annotated[
    bool, typer.Option("--exit-zero", help="Exit with 0 if every run finished, whatever the verdict.")
]
NoCompare = Annotated[bool, typer.Option("--no-compare", help="Do not compare the arms at the end.")]


def refuse_options(
    values_by_option: Mapping[str, object],
    problem: str = "{option} requires {needed}; add it, or drop {option}",
    needed: str = "",
) -> None:
    """Raise RecipeError for the first option that was given; by default it needs another one."""
    for option, value in values_by_option.items():
        if value not in (None, False, (), []):
            raise RecipeError(problem.format(option=option, needed=needed))


def parse_lengths(text: str, option: str = "--lengths", minimum: int = 2) -> list[int]:
    lengths = [length.strip() for length in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,10}", length) and int(length) >= minimum for length in lengths):
        raise RecipeError(
            f"{option}: got {text!r}; allowed: numbers of at least {minimum}, such as "
            f"{','.join(str(minimum * factor) for factor in (1, 2, 4))}"
        )
    return sorted({int(length) for length in lengths})


def typed_command() -> str:
    """Return the command line for the report."""
    return shlex.join(["abrun", *sys.argv[1:]])


def parse_seeds(text: str) -> list[int]:
    """Parse seeds such as `0,1,2`, `0-4` or a mix."""
    seeds: list[int] = []
    for seed_range in text.split(","):
        start_text, _, stop_text = seed_range.strip().partition("-")
        if not re.fullmatch(r"[0-9]{1,10}(-[0-9]{1,10})?", seed_range.strip()):
            raise RecipeError(f"--seeds: got {text!r}; allowed: numbers such as 0,1,2 or ranges such as 0-4")
        start, stop = int(start_text), int(stop_text or start_text)
        if stop < start:
            raise RecipeError(
                f"--seeds: got {seed_range.strip()!r}, which runs backwards; write {stop_text}-{start_text}"
            )
        if stop - start >= MAX_SEEDS:
            raise RecipeError(f"--seeds: got {seed_range.strip()!r}; allowed: at most {MAX_SEEDS} seeds")
        seeds += range(start, stop + 1)
    return seeds


def parse_interim(text: str | None) -> tuple[int, ...]:
    """Parse numbers of pairs such as `3,5,8`; None gives none."""
    if text is None:
        return ()
    if not re.fullmatch(r" *[0-9]{1,6} *(, *[0-9]{1,6} *)*", text):
        raise RecipeError(f"--interim: got {shortened(text)}; allowed: numbers of pairs, such as 3,5,8")
    return tuple(map(int, text.split(",")))


def add_seeds(overrides: list[str] | None, seeds: str | None) -> list[str]:
    """Return overrides including the seeds. Raises RecipeError if `seeds` looks like a count."""
    if seeds is not None and re.fullmatch(r"[2-9]|[1-9][0-9]{1,9}", seeds.strip()):
        number = int(seeds)
        raise RecipeError(
            f"--seeds: {number} is one seed, number {number}; for {number} seeds write 0-{number - 1}, for "
            f"that seed alone {number}-{number}"
        )
    return [*(overrides or []), *([] if seeds is None else [f"seeds={parse_seeds(seeds)}"])]


_READING = {
    "pattern": Pattern,
    "group": Group,
    "alias": Aliases,
    "step_column": StepColumn,
    "seeds": Seeds,
    "exclude": Exclude,
    "runs_dir": RunsDir,
}


def reads_runs(command: Callable[..., R]) -> Callable[..., R]:
    """Give a command the options that say how to read runs; it gets them as the keyword `reading`."""

    @functools.wraps(command)
    def wrapped(**values: Any) -> R:
        options = {name: values.pop(name) for name in _READING}
        return command(**values, reading=_make_reading(**options))

    parameters = dict(inspect.signature(command).parameters)
    del parameters["reading"]
    for name, kind in _READING.items():
        default = Path("runs") if name == "runs_dir" else None
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters[name] = inspect.Parameter(name, keyword, default=default, annotation=kind)
    vars(wrapped)["__signature__"] = inspect.Signature(list(parameters.values()))
    wrapped.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    return wrapped


def _make_reading(
    *, alias: list[str] | None, seeds: str | None, exclude: list[str] | None, **options: Any
) -> "ReadingOptions":
    from abrun.logs.readers import load_readers
    from abrun.logs.recorded.sources import ReadingOptions

    for problem in load_readers()[1]:
        note(problem)
    return ReadingOptions(
        aliases=tuple(alias or ()),
        seeds=None if seeds is None else tuple(parse_seeds(seeds)),
        exclude=tuple(exclude or ()),
        **options,
    )


def parse_claims(claim: list[str] | None) -> "list[Claim] | None":
    from abrun.recipe.claims import parse_claim

    return [parse_claim(text) for text in claim] if claim else None


def parse_require(require: str | None) -> Literal["all", "any"] | None:
    if require in (None, "all", "any"):
        return require
    raise RecipeError(f"--require: got {require!r}; allowed: all, any")


def option_text(values_by_option: Mapping[str, Sequence[str | None]]) -> str:
    """Return options as shell text for a suggested command."""
    pairs = ((option, value) for option, values in values_by_option.items() for value in values if value)
    return "".join(f" {option} {shlex.quote(value)}" for option, value in pairs)
