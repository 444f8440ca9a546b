"""Options of `abrun compare --fleet`. Slow imports happen inside the functions."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from abrun.cli.app import console, print_json
from abrun.cli.arguments import refuse_options, typed_command
from abrun.messages.codes import Code

if TYPE_CHECKING:
    from abrun.logs.recorded.sources import ReadingOptions

_REFUSED_READING = ("--baseline", "--interim", "--versions-differ")
FleetFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Judge many recipes side by side: a folder with a subfolder NAME of runs for each recipe, "
        "and its reference NAME.json next to it (or in --reference FOLDER).",
    ),
]
Before = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="With --fleet: --output folder of an earlier fleet, such as the main branch's; a recipe that "
        "is red in both is `red before`, not `regressed here`.",
    ),
]
Rerun = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="With --fleet: second runs of some recipes, in subfolders of the same names; a recipe that is "
        "red only the first time has `flaked`.",
    ),
]


@dataclass(frozen=True, slots=True)
class FleetArguments:
    """Options of a fleet, as typed."""

    folder: Path
    references: Path | None
    earlier: Path | None
    rerun: Path | None
    arm: str | None
    output: Path | None
    step_one: bool


def judge_fleet(
    arguments: FleetArguments,
    reading: "ReadingOptions",
    refused: Mapping[str, Any],  # values of options that do not apply to fleets
    *,
    allow_open: bool,  # exit with 0 if a recipe is open, and nothing worse
    as_json: bool,
) -> NoReturn:
    """Judge a fleet, print it, and exit with its code. Raises RecipeError for a refused option."""
    from abrun.recipe.implementations import load_tool

    fleet = load_tool("fleet", "--fleet")
    given = reading.given_options
    refused = {**refused, **{option: given.get(option) for option in _REFUSED_READING}}
    refuse_options(refused, Code.FLEET_OPTION_REFUSED)
    options = fleet.FleetOptions(reading=reading, command=typed_command(), **asdict(arguments))
    comparison = fleet.compare_fleet(options)
    if as_json:
        print_json(comparison.content)
    else:
        console().print(fleet.render_terminal(comparison.fleet, comparison.page and str(comparison.page)))
    code = comparison.fleet.exit_code
    raise typer.Exit(0 if allow_open and code == fleet.EXIT_CODES["open"] else code)
