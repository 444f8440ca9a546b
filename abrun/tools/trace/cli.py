"""The command `abrun trace`. Slow imports happen inside it."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from abrun.cli.app import console, make_group, print_json, survive_output_errors
from abrun.cli.arguments import Json, Overrides, RecipeFile, RunsDir, typed_command

if TYPE_CHECKING:
    from rich.console import RenderableType

    from abrun.runs.traces import TracedTensor, TraceResult

DIFFERS = 3  # exit code, as of MISMATCH

commands = make_group()


@commands.command(rich_help_panel="Diagnostics")
@survive_output_errors
def trace(
    recipe: RecipeFile,
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
    step that are perturbed by one ULP.

    Exit code: 0 if the arms agree up to rounding, 3 if they differ.

    Examples:
        abrun trace quickstart
        abrun trace recipe.yaml --step 2 --arm treatment
    """
    from abrun.recipe.experiment import load_recipe
    from abrun.report.next_step import TRAIN_IN_FLOAT32
    from abrun.runs.experiment import is_experiment
    from abrun.runs.files import is_directory
    from abrun.runs.traces import FOLDER
    from abrun.tools.trace.command import trace_recipe

    screen = console()
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
        screen.say(f"trace.json is in {folder}")
        if is_experiment(folder.parent) and folder.name == FOLDER:
            screen.say(f"abrun compare {folder.parent} shows this in its report")
        if result.first is None and not result.is_in_float32:
            screen.say(f"{TRAIN_IN_FLOAT32}: {typed_command()} --set policy.dtype=float32")
    raise typer.Exit(DIFFERS if result.first else 0)


# Terminal output of a trace.

COLUMNS = ("tensor", "relative error", "ULPs")
NEIGHBOURS = 3  # rows shown before and after the first difference
MAX_MISSING = 6  # names of tensors that one arm lacks


def summary(result: "TraceResult") -> "RenderableType":
    """Return what the trace found, and the tensors around it: without a difference, the largest errors."""
    from rich.console import Group
    from rich.text import Text

    from abrun.report.present.tables import Table, columns

    rows = [_row(result, tensor) for tensor in _shown(result)]
    titles = (*COLUMNS, "times a replica's", "")
    table = Table(columns(*titles, numeric=titles[1:4]), rows)
    return Group(Text("\n".join(_headlines(result))), table.to_rich(pad_edge=True))


def _headlines(result: "TraceResult") -> Iterator[str]:
    first, last = result.first, result.last_agreeing
    of = f"step {result.step}, {len(result.tensors)} tensors"
    if first is None:
        yield f"{of}: the arms agree up to rounding"
    else:
        yield f"{of}: the arms first differ in {first.name}"
        before = "nothing before it is compared" if last is None else f"up to {last.name} they agree"
        yield f"{before}; {len(result.beyond)} tensors differ"
    yield (
        f"limit: {result.limit:.3g} times the mean error of {result.num_replicas} repeats of the baseline, "
        f"perturbed by one ULP; arms that agree exceed it in at most {100 * result.level:.2g} % of traces"
    )
    if result.first is None and result.least_sensitive:
        sizes = (f"{tensor.detectable_error:.2g} in {tensor.name}" for tensor in result.least_sensitive)
        yield (
            "smallest relative errors that would have been flagged, at the least sensitive tensors: "
            + ", ".join(sizes)
        )
    if result.first is None and result.zero:
        yield (
            f"zero in the baseline: {len(result.zero)} tensors, the first is {result.zero[0].name}; an error "
            "that only scales them does not show; use --step to trace a step whose rewards differ"
        )
    if result.missing:
        shown, omitted = result.missing[:MAX_MISSING], len(result.missing) - MAX_MISSING
        more = f" and {omitted} more" if omitted > 0 else ""
        yield f"not compared, because one arm lacks them: {', '.join(shown)}{more}"


def _shown(result: "TraceResult") -> "list[TracedTensor]":
    tensors = list(result.tensors)
    if result.first is None:
        largest = sorted(tensors, key=lambda tensor: tensor.ratio, reverse=True)[: 2 * NEIGHBOURS]
        return [tensor for tensor in tensors if tensor in largest]
    index = tensors.index(result.first)
    return tensors[max(index - NEIGHBOURS, 0) : index + NEIGHBOURS + 1]


def _row(result: "TraceResult", tensor: "TracedTensor") -> tuple[str, ...]:
    values = (tensor.relative_error, tensor.ulps, tensor.ratio)
    mark = "<- first" if tensor is result.first else "differs" if tensor in result.beyond else ""
    return tensor.name, *(f"{value:.2g}" for value in values), mark
