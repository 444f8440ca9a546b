"""Commands that one begins with. Everything slow to import waits inside its command."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from abrun.cli.app import BEGIN, app, complain, console, outlives_output, print_json
from abrun.cli.arguments import Json
from abrun.errors import RecipeError
from abrun.reasons import Code
from abrun.redaction import shown

Answer = TypeVar("Answer")


@app.command(rich_help_panel=BEGIN)
@outlives_output
def init(
    kind: Annotated[
        str | None,
        typer.Option(help="What is compared: recipe, external (another trainer), regression (CI)."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the recipe and its file.")] = None,
    model: Annotated[
        str | None, typer.Option(help="With --kind recipe: a preset, a folder or a hub name.")
    ] = None,
    trainer: Annotated[
        str | None, typer.Option(help="With --kind external: trl, verl, nemo-rl, skyrl, other.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="With --kind regression: what to train on every pull request.")
    ] = None,
    to: Annotated[Path, typer.Option(help="The folder that the files go into.")] = Path(),
) -> None:
    """Write a recipe to begin with: its file, the schema that editors check it by, and what it needs.

    Asks for what no option says, until the answer is a good one: what is compared, its name, and the model,
    trainer or recipe.

    Examples:
        abrun init
        abrun init --kind recipe --name heads --model qwen2-tiny
        abrun init --kind external --name mine --trainer other
        abrun init --kind regression --name convergence --recipe quickstart-regression
    """
    from abrun.experiment.starter.initial import (
        KINDS,
        check_name,
        initial_files,
        next_commands,
        third_question,
        write_files,
    )

    choices = "\n".join(f"  {key:<11}{text}" for key, text in KINDS.items())
    what = f"What do you compare?\n{choices}\nKind"
    kind, third = _answer("--kind", kind, what, "recipe", lambda kind: (kind, third_question(kind)))
    usual = "convergence" if kind == "regression" else "mine"
    name = _answer("--name", name, "Name of the recipe", usual, check_name)
    given = {"--model": model, "--trainer": trainer, "--recipe": recipe}
    for option, value in given.items():
        if value is not None and option != third.option:
            raise RecipeError(
                Code.OPTION_OF_OTHER_KIND(option=option, got=value, kind=kind, takes=third.option)
            )
    files = _answer(
        third.option,
        given[third.option],
        third.text,
        third.default,
        lambda answer: initial_files(kind, name, answer),
    )
    for path in write_files(files, to):
        print(shown(f"wrote {path}"))
    where = "" if to == Path() else f"cd {to} && "
    for line in next_commands(kind, name):
        print(shown(f"next:  {where}{line}"))


def _answer(
    option: str, given: str | None, question: str, default: str, check: Callable[[str], Answer]
) -> Answer:
    """What `check` makes of an option's value, or else of the first good answer of somebody at a terminal.

    Raises RecipeError for an option that is not, or missing where nobody can be asked.
    """
    if given is not None:
        return check(given)
    if not sys.stdin.isatty():
        raise RecipeError(Code.OPTION_NOT_ASKED(option=option, example=default))
    while True:
        try:
            return check(str(typer.prompt(question, default=default)))
        except RecipeError as error:
            complain(str(error))


@app.command(rich_help_panel=BEGIN)
def recipes(
    name: Annotated[str | None, typer.Argument(help="One of them, whole, as a file of one's own.")] = None,
    as_json: Json = False,
) -> None:
    """List the recipes that ship, with what each takes to run: `abrun launch` knows them by name, anywhere.

    Examples:
        abrun recipes
        abrun recipes quickstart > mine.yaml
        abrun launch quickstart
    """
    from abrun.experiment.starter.shipped import WHERE, find_recipe, shipped_recipes

    if name is not None:
        sys.stdout.write(find_recipe(Path(name)).read_text())
        return
    found = shipped_recipes()
    if as_json:
        print_json([asdict(one) for one in found])
        return
    from rich.text import Text

    from abrun.present.tables import Table, columns

    titles = dict(zip(WHERE, ("On a laptop, without a GPU", "On GPUs", "Of other trainers"), strict=True))
    screen = console()
    for where in WHERE:
        rows = [(one.name, one.cost, one.about) for one in found if one.where == where]
        table = Table(columns("name", "cost", "about", no_wrap=("name",), fold=True), rows)
        screen.print(Text(f"{titles[where]}", style="bold"), table, Text(), sep="\n")
    screen.print("abrun launch NAME runs one; abrun recipes NAME prints it; docs/recipes.md has every field.")


@app.command(rich_help_panel=BEGIN)
def schema(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A file; default: the standard output.")
    ] = None,
) -> None:
    """Print the JSON schema of recipes, by which an editor completes and checks them.

    The first line of a recipe names it: # yaml-language-server: $schema=recipe.schema.json

    Examples:
        abrun schema --output recipe.schema.json
    """
    from abrun.experiment.starter.schema import recipe_schema

    text = json.dumps(recipe_schema(), indent=1)
    if output is None:
        print(text)
    else:
        output.write_text(text + "\n")
