"""The application that commands register with, and how they print."""

import functools
import inspect
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer

from abrun.processes.output import ignore_output_errors
from abrun.redaction import shown

if TYPE_CHECKING:
    from abrun.present.terminal import Terminal

# Headings of `abrun --help`
BEGIN, RUN, JUDGE, LOOK_CLOSER = "To begin", "Runs", "Verdicts", "To look closer"

P = ParamSpec("P")
R = TypeVar("R")

app = typer.Typer(
    help="Run paired A/B experiments in RL post-training, and say whether the arms converge the same way.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"abrun {version('abrun')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def finish_help() -> None:
    """Give every command its docstring as help, in the terminal's width, with its examples at the end."""
    for command in app.registered_commands:
        said = inspect.cleandoc((command.callback and command.callback.__doc__) or "")
        text, _, examples = said.partition("\n\nExamples:\n")
        command.help = "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))
        lines = ["Examples:", *(f"  {line.strip()}" for line in examples.splitlines())]
        command.epilog = "\n\n".join(lines)


def print_json(content: Any) -> None:
    """For machines, on the standard output: NaN and Inf as text, as all files of abrun have them."""
    from abrun.runs.files import encode_non_finite

    is_utf = (sys.stdout.encoding or "").lower().startswith("utf")
    print(json.dumps(encode_non_finite(content), indent=1, ensure_ascii=not is_utf, allow_nan=False))


def complain(message: str) -> int:
    """One line on stderr, and the exit code of bad input."""
    print(f"abrun: {shown(' '.join(message.split()))}", file=sys.stderr)
    return 2


def outlives_output(command: Callable[P, R]) -> Callable[P, R]:
    """Decorate a command that does more than print: no failure to print ends it or changes its exit code.

    A dry run, and JSON, are but what they print.
    """

    @functools.wraps(command)
    def wrapped(*args: P.args, **options: P.kwargs) -> R:
        if not (options.get("dry_run") or options.get("as_json")):
            ignore_output_errors()
        return command(*args, **options)

    return wrapped


def console() -> "Terminal":
    from abrun.present.terminal import terminal

    return terminal()
