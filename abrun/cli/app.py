"""The application that commands register with, and how they print."""

import sys
from typing import TYPE_CHECKING

import typer

from abrun.redaction import shown

if TYPE_CHECKING:
    from abrun.terminal import Terminal

app = typer.Typer(
    help="Run paired A/B experiments in RL post-training, and say whether the arms converge the same way.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    add_completion=False,
)


def complain(message: str) -> int:
    """One line on stderr, and the exit code of bad input."""
    print(f"abrun: {shown(' '.join(message.split()))}", file=sys.stderr)
    return 2


def console() -> "Terminal":
    from abrun.terminal import terminal

    return terminal()
