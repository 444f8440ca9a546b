"""The command `abrun trace`. Slow imports happen inside it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from abrun.cli.app import console, make_group, print_json, survive_output_errors
from abrun.cli.arguments import Json, Overrides, RunsDir, recipe_argument, typed_command
from abrun.runs.files import is_directory

Dumps = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="DUMP", help="The other arm's dump, then repeats of the baseline's, which give the tolerance."
    ),
]
DIFFERS, UNDECIDED = 3, 4  # exit codes, as of MISMATCH and INCONCLUSIVE


commands = make_group()


@commands.command(rich_help_panel="Diagnostics")
@survive_output_errors
def trace(
    recipe: Annotated[
        Path,
        recipe_argument("Recipe: a YAML file, a built-in recipe, or an experiment; or the baseline's dump."),
    ],
    dumps: Dumps = None,
    overrides: Overrides = None,
    step: Annotated[int, typer.Option(min=1, help="Step to run; the baseline trains up to it.")] = 1,
    arm: Annotated[
        str | None, typer.Option(help="Arm to trace against the baseline; default: the only one.")
    ] = None,
    replicas: Annotated[
        int, typer.Option(min=2, help="Perturbed repeats of the step; k give a level of 1 / (k + 1).")
    ] = 19,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder of captures and trace.json; default: EXPERIMENT/trace."),
    ] = None,
    as_json: Json = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Find the first tensor in which one step of two arms differs.

    Both run the step from the same state on the same rollouts. Tolerances come from repeats of the baseline's
    step that are perturbed by one ULP. Dumps of SGLang's dumper and of msprobe are compared as they are.

    Exit code: 0 if the arms agree up to rounding, 3 if they differ, 4 if dumps differ and there is no repeat.

    Examples:
        abrun trace quickstart
        abrun trace recipe.yaml --step 2 --arm treatment
        abrun trace dumps/base dumps/changed dumps/base-again
    """
    from abrun.recipe.experiment import load_recipe
    from abrun.report.next_step import TRAIN_IN_FLOAT32
    from abrun.runs.experiment import is_experiment
    from abrun.runs.traces import FOLDER, StoredTrace
    from abrun.tools.trace.command import trace_dumps, trace_recipe
    from abrun.tools.trace.report import summary

    screen = console()
    if dumps:
        _refuse_options({"--set": overrides, "--arm": arm, "--step": step != 1, "--replicas": replicas != 19})
        result, folder = trace_dumps(recipe, dumps[0], dumps[1:], output), output
    else:
        loaded = load_recipe(recipe, overrides or ())
        result, folder = trace_recipe(
            loaded,
            recipe if is_directory(recipe) else runs_dir / loaded.name,
            step=step,
            arm=arm,
            num_replicas=replicas,
            output=output,
            say=(lambda line: None) if as_json else screen.say,
        )
    if as_json:
        print_json(result.as_json())
    else:
        screen.print(summary(result))
        if folder:
            screen.say(f"trace.json is in {folder}")
        if folder and is_experiment(folder.parent) and folder.name == FOLDER:
            screen.say(f"abrun compare {folder.parent} shows this in its report")
        if isinstance(result, StoredTrace) and result.first is None and not result.is_in_float32:
            screen.say(f"{TRAIN_IN_FLOAT32}: {typed_command()} --set policy.dtype=float32")
    is_open = result.limit is None and any(tensor.ulps for tensor in result.tensors)
    raise typer.Exit(DIFFERS if result.first else UNDECIDED if is_open else 0)


def _refuse_options(options: Mapping[str, object]) -> None:
    """Raise RecipeError for an option that dumps have no use for."""
    from abrun.errors import RecipeError

    for name, value in options.items():
        if value:
            raise RecipeError(f"{name}: given with dumps, which are compared as they are; drop it")
