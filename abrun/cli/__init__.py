"""Command line: each command parses its options, calls one function and prints the result."""

import os
import sys
from pathlib import Path
from typing import Any

import typer
from typer.exceptions import TyperException

from abrun.cli import demo, starting, experiments, judging, controls, measuring, bisecting  # isort: skip  (as --help lists)
from abrun.cli.app import app, finish_help, print_error
from abrun.errors import AbrunError
from abrun.processes.output import standard_streams
from abrun.redaction import hide_secrets_of

__all__ = [
    "bisecting",
    "controls",
    "demo",
    "experiments",
    "judging",
    "main",
    "measuring",
    "starting",
]

RENAMED_OPTIONS = {"--primary": "--claim", "--looks": "--interim"}

finish_help()


def main() -> None:
    """Run the command line: every error that a user can fix is one line on stderr and exit code 2."""
    with standard_streams():
        code = _run()
    sys.exit(code)


def _run() -> int:
    hide_secrets_of(os.environ)
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="abrun", standalone_mode=False) or 0
        sys.stdout.flush()
        return code
    except TyperException as error:
        return print_error(_usage_error_text(error))
    except AbrunError as error:
        return print_error(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:  # the reader of the output exited, as in `abrun status | head`
        return 1
    except OSError as error:  # such as a path that is too long, or an unreadable folder
        if isinstance(error, PermissionError) and isinstance(error.filename, str):
            from abrun.runs.access import has_permission, unreadable_error

            if not has_permission(error.filename, os.R_OK):
                return print_error(str(unreadable_error(Path(error.filename))))
        where = error.filename or "a file, perhaps standard output"
        return print_error(f"{where}: {error.strerror or error}")


def _usage_error_text(error: Any) -> str:
    """Return typer's usage error as one line."""
    renamed = RENAMED_OPTIONS.get(getattr(error, "option_name", ""))
    if renamed:
        return f"{error.option_name} was renamed; use {renamed}"
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "abrun"
    invalid = getattr(error.__cause__, "errors", list)()  # pydantic's errors include the value
    got = f"got {invalid[0]['input']!r}; " if invalid else ""
    message = error.format_message().rstrip(".").replace("Input should be ", f"{got}allowed: ")
    return f"{message}; see: {command} --help"
