"""The command line: parse, call one function, print."""

import os
import sys
from pathlib import Path
from typing import Any

import typer
from typer.exceptions import TyperException

from abrun.cli import starting, experiments, judging, controls, measuring, bisecting  # isort: skip  (as --help lists)
from abrun.cli.app import app, complain, finish_help
from abrun.errors import AbrunError
from abrun.processes.output import standard_streams
from abrun.redaction import hide_secrets_of

__all__ = [
    "bisecting",
    "controls",
    "experiments",
    "judging",
    "main",
    "measuring",
    "starting",
]  # the modules of commands, which register themselves

RENAMED_OPTIONS = {"--primary": "--claim", "--looks": "--interim"}

finish_help()


def main() -> None:
    """The entry point: every error that a user can mend is one line on stderr and exit code 2."""
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
        return complain(_usage(error))
    except AbrunError as error:
        return complain(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `abrun status | head`
        return 1
    except OSError as error:  # such as a path that is too long, or a folder that may not be read
        if isinstance(error, PermissionError) and isinstance(error.filename, str):
            from abrun.runs.access import has_permission, unreadable_error

            if not has_permission(error.filename, os.R_OK):
                return complain(str(unreadable_error(Path(error.filename))))
        where = error.filename or "a file, perhaps standard output"
        return complain(f"{where}: {error.strerror or error}")


def _usage(error: Any) -> str:
    """Return typer's usage error as one line."""
    renamed = RENAMED_OPTIONS.get(getattr(error, "option_name", ""))
    if renamed:
        return f"{error.option_name}: was renamed; use {renamed}"
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "abrun"
    invalid = getattr(error.__cause__, "errors", list)()  # pydantic's, which knows the value
    got = f"got {invalid[0]['input']!r}; " if invalid else ""
    message = error.format_message().rstrip(".").replace("Input should be ", f"{got}allowed: ")
    return f"{message}; see: {command} --help"
