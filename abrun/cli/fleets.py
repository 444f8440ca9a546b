"""Options of `abrun compare --fleet`. Slow imports happen inside the functions."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from abrun.cli.app import console, print_json
from abrun.cli.arguments import typed_command
from abrun.errors import RecipeError
from abrun.reasons import Code

if TYPE_CHECKING:
    from abrun.diagnose.fleet.recipes import FleetOptions
    from abrun.recorded.sources import ReadingOptions

FleetFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Judge many recipes side by side: a folder with a subfolder of runs for each recipe, and "
        "NAME.json, its reference, next to it (or in --reference FOLDER).",
    ),
]
Before = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="With --fleet: --output folder of an earlier fleet, such as the main branch's; what was red "
        "there is `red before`.",
    ),
]
Rerun = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="With --fleet: second runs of some recipes, in subfolders of the same names; what is gone there "
        "has `flaked`.",
    ),
]


def make_fleet_options(
    fleet: Path | None,
    refused: Mapping[str, Any],
    reading: "ReadingOptions",
    references: Path | None,
    before: Path | None,
    rerun: Path | None,
    arm: str | None,
    output: Path | None,
) -> "FleetOptions":
    """Return the settings of a fleet. Raises RecipeError for options that do not apply to fleets."""
    from abrun.diagnose.fleet.recipes import FleetOptions

    if fleet is None:
        raise RecipeError(Code.FLEET_NEEDS_SOURCE())
    for option, value in refused.items():
        if value:
            raise RecipeError(Code.FLEET_OPTION_REFUSED(option=option))
    return FleetOptions(
        folder=fleet,
        references=references,
        rerun=rerun,
        earlier=before,
        arm=arm,
        reading=reading,
        output=output,
        command=typed_command(),
    )


def refuse_fleet_options(values: Mapping[str, Path | None]) -> None:
    """Raise RecipeError for an option that requires --fleet."""
    for option, value in values.items():
        if value is not None:
            raise RecipeError(Code.FLEET_OPTION_NEEDED(option=option))


def judge_fleet(options: "FleetOptions", *, allow_open: bool, as_json: bool) -> NoReturn:
    """Judge a fleet, print it, and exit with its code; `allow_open`: with 0 if recipes are open at worst."""
    from abrun.diagnose.fleet.classify import EXIT_CODES
    from abrun.diagnose.fleet.command import compare_fleet
    from abrun.diagnose.fleet.report import render_terminal

    comparison = compare_fleet(options)
    if as_json:
        print_json(comparison.content)
    else:
        console().print(render_terminal(comparison.fleet, comparison.page and str(comparison.page)))
    code = comparison.fleet.exit_code
    raise typer.Exit(0 if allow_open and code == EXIT_CODES["open"] else code)
