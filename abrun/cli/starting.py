"""Commands for getting started. Slow imports happen inside the commands."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from abrun.cli.app import app, console, print_error, print_json, survive_output_errors
from abrun.cli.arguments import Json
from abrun.errors import RecipeError
from abrun.runs.redaction import display_safe

Answer = TypeVar("Answer")
SKILL = Path(__file__).with_name("SKILL.md")


@app.command()
@survive_output_errors
def demo(
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="Folder for the runs and their reports; one that has them is reused."
        ),
    ] = Path("abrun-demo"),
) -> None:
    """Judge bundled runs in seconds, one of them with a bug.

    Each is about a change to the training code; the second change has a bug, which curves hide. Runs
    offline and without torch, and writes a report page for each verdict.

    Examples:
        abrun demo
        abrun demo -o first-look
    """
    from abrun.api.demo import render_demo, run_demo

    verdicts, screen = run_demo(output), console()
    screen.print(render_demo(verdicts, screen.width), crop=False)  # a command is copied whole


@app.command()
@survive_output_errors
def init(
    kind: Annotated[
        str | None,
        typer.Option(
            help="Kind of comparison: recipe (abrun's own trainer), external (another trainer) or "
            "regression (CI)."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the recipe and its file.")] = None,
    model: Annotated[
        str | None, typer.Option(help="With --kind recipe: a preset, a folder or a hub name.")
    ] = None,
    trainer: Annotated[
        str | None,
        typer.Option(help="With --kind external: trl, verl, nemo-rl, skyrl, torchtitan, fast-llm, other."),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="With --kind regression: recipe to train on every pull request.")
    ] = None,
    to: Annotated[Path, typer.Option(help="Folder for the files.")] = Path(),
) -> None:
    """Create a starter recipe and the files that it needs.

    Asks interactively for values not given by options: the kind of comparison, a name, and the model,
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
        default_name,
        initial_files,
        kind_question,
        next_commands,
        require_options,
        write_files,
    )

    answers = {"--model": model, "--trainer": trainer, "--recipe": recipe}
    if not sys.stdin.isatty():
        require_options(kind, name, answers)
    choices = "\n".join(f"  {key:<11}{text}" for key, text in KINDS.items())
    kind_prompt = f"What do you compare?\n{choices}\nKind"
    kind, last_question = _answer(kind, kind_prompt, "recipe", lambda kind: (kind, kind_question(kind)))
    name = _answer(name, "Name of the recipe", default_name(kind), check_name)
    last_question.refuse_other_options(kind, answers)
    files = _answer(
        answers[last_question.option],
        last_question.text,
        last_question.default,
        lambda answer: initial_files(kind, name, answer),
    )
    for path in write_files(files, to):
        print(display_safe(f"wrote {path}"))
    cd_prefix = "" if to == Path() else f"cd {to} && "
    for line in next_commands(kind, name):
        print(display_safe(f"next:  {cd_prefix}{line}"))


def _answer(value: str | None, question: str, default: str, check: Callable[[str], Answer]) -> Answer:
    """Return the checked value of an option, or prompt at a terminal until the answer is valid.

    Raises RecipeError if the option is invalid.
    """
    if value is not None:
        return check(value)
    while True:
        try:
            return check(str(typer.prompt(question, default=default)))
        except RecipeError as error:
            print_error(str(error))


@app.command()
def recipes(
    name: Annotated[
        str | None, typer.Argument(help="Print this recipe (redirect it to a file to edit it).")
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of recipes, for editors.")
    ] = False,
    show_all: Annotated[
        bool, typer.Option("--all", help="With whole descriptions, and the experiments of docs/evidence.md.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the built-in recipes with their cost, or print one.

    `abrun launch NAME` works in any folder. With the schema, an editor completes and checks recipes whose
    first line names it; `abrun init` writes that line.

    Examples:
        abrun recipes
        abrun recipes quickstart > mine.yaml
        abrun recipes --schema > recipe.schema.json
        abrun launch quickstart
    """
    from abrun.experiment.starter.schema import recipe_schema
    from abrun.experiment.starter.shipped import RECIPE_GROUPS, find_recipe, list_shipped_recipes

    if schema:
        if name is not None:
            raise RecipeError(
                f"--schema: got the recipe {name!r}, but all recipes have one schema; drop one of them"
            )
        print(json.dumps(recipe_schema(), indent=1))
        return
    if name is not None:
        sys.stdout.write(find_recipe(Path(name)).read_text())
        return
    shipped = list_shipped_recipes()
    if as_json:
        print_json([asdict(recipe) for recipe in shipped])
        return
    from rich.text import Text

    from abrun.report.present.tables import Table, columns

    titles = ("On a laptop, without a GPU", "On GPUs", "For other trainers")
    screen = console()
    for group, title in zip(RECIPE_GROUPS, titles, strict=True):
        listed = [recipe for recipe in shipped if recipe.where == group]
        listed = [recipe for recipe in listed if show_all or not recipe.is_evidence]
        rows = [(recipe.name, recipe.cost if show_all else recipe.size, recipe.about) for recipe in listed]
        costs = "cost" if show_all else "runs x steps"
        table = Table(columns("name", costs, "about", no_wrap=("name",), fold=True), rows)
        table = table if show_all else table.cut_to(screen.width)
        screen.print(Text(title, style="bold"), table, Text(), sep="\n")
    if not show_all:
        num_more = sum(recipe.is_evidence for recipe in shipped)
        screen.print(f"{num_more} more, of docs/evidence.md, and whole descriptions: abrun recipes --all")
    usage = "abrun launch NAME runs one; abrun recipes NAME prints it; fields: docs/reference/recipes.md."
    screen.print(usage)


@app.command()
def skill() -> None:
    """Print how a coding agent uses abrun, as a SKILL.md.

    Examples:
        abrun skill
        abrun skill > SKILL.md
    """
    sys.stdout.write(SKILL.read_text())


@app.command()
def doctor(as_json: Json = False) -> None:
    """Check this machine: devices, packages and backends.

    Says how to fix what is missing.

    Exit code: always 0.

    Examples:
        abrun doctor
        abrun doctor --json
    """
    from abrun.report.doctor import diagnose

    diagnosis = diagnose()
    if as_json:
        print(diagnosis.as_json())
    else:
        console().print(diagnosis.render())
