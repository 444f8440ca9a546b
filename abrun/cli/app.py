"""The application that commands register with, and how they print."""

import inspect
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from abrun.redaction import shown

if TYPE_CHECKING:
    from abrun.terminal import Terminal

# Headings of `abrun --help`
BEGIN, RUN, JUDGE, LOOK_CLOSER = "To begin", "Runs", "Verdicts", "To look closer"

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
    from abrun.store import encode

    print(json.dumps(encode(content), indent=1, ensure_ascii=False, allow_nan=False))


def complain(message: str) -> int:
    """One line on stderr, and the exit code of bad input."""
    print(f"abrun: {shown(' '.join(message.split()))}", file=sys.stderr)
    return 2


def console() -> "Terminal":
    from abrun.terminal import terminal

    return terminal()
