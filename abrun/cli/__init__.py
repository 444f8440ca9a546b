"""Command line: each command parses its options, calls one function and prints the result."""

import errno
import os
import re
import resource
import sys
from functools import cache
from pathlib import Path
from typing import Any

import typer
from typer.exceptions import TyperException
from typer.main import get_command

from abrun.cli import experiments, judging, measuring, starting
from abrun.cli.app import app, finish_help, print_error, print_notes
from abrun.errors import AbrunError
from abrun.processes.output import standard_streams
from abrun.runs.redaction import hide_secrets_of

__all__ = ["experiments", "judging", "main", "measuring", "starting"]

# What a user may type: the option to use instead, and why
MISTAKEN_OPTIONS = {
    "--primary": ("--claim", "was renamed; use --claim"),
    "--looks": ("--interim", "was renamed; use --interim"),
    "--format": ("--output", "was removed; use --output FOLDER for the whole report, --json for JSON"),
    "--export": (
        "--launcher",
        "was removed; run abrun launch on the nodes, see docs/how-to/run-on-a-cluster.md",
    ),
    "--margin": ("--claim", "is part of a claim; use --claim METRIC:WINDOW:MARGIN"),
}
OUT_OF_MEMORY = "out of memory for data, threads or processes; free some, or raise ulimit -v and -u"
MIN_ADDRESS_SPACE_MIB = 512  # with less, OpenBLAS (numpy's, scipy's) retries for minutes or fails
RENAMED_COMMANDS = {
    "cancel": "stop",
    "samples": "completions",
    "freeze": "reference save",
    "ledger": "reference show, or abrun reference add",
    "plan": "power",
    "sensitivity": "faults run",
    "mismatch": "logprob-diff",
    "sync": "wandb-sync",
    "schema": "recipes --schema",
}

finish_help(app)


def main() -> None:
    """Run the command line: every error that a user can fix is one line on stderr and exit code 2."""
    with standard_streams():
        code = _run()
    sys.exit(code)


def _run() -> int:
    hide_secrets_of(os.environ)
    command, *options = sys.argv[1:] or ["--help"]
    if command in RENAMED_COMMANDS:
        return print_error(f"{command} was renamed; use abrun {RENAMED_COMMANDS[command]}")
    try:
        _check_address_space()
        code = _commands()([command, *options], prog_name="abrun", standalone_mode=False) or 0
        print_notes()
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
    except (ImportError, MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or re.search("can't start new thread|failed to map", str(error)):
            return print_error(OUT_OF_MEMORY)
        raise
    except OSError as error:  # such as a path that is too long, or an unreadable folder
        if isinstance(error, PermissionError) and isinstance(error.filename, str):
            from abrun.runs.files import has_permission, unreadable_error

            path = Path(error.filename)
            is_there = os.path.lexists(path) or not has_permission(path.parent, os.X_OK)
            if is_there and not has_permission(path, os.R_OK):
                return print_error(str(unreadable_error(path)))
        if error.errno == errno.ENOMEM:
            return print_error(OUT_OF_MEMORY)
        where = error.filename or "a file, perhaps standard output"
        return print_error(f"{where}: {error.strerror or error}")


def _check_address_space() -> None:
    """Raise AbrunError if `ulimit -v` is too low for numpy; under any limit OpenBLAS gets one thread."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if limit < MIN_ADDRESS_SPACE_MIB * 2**20:
        raise AbrunError(
            f"ulimit -v is {limit // 2**20} MiB; abrun needs {MIN_ADDRESS_SPACE_MIB}; try ulimit -v unlimited"
        )


@cache
def _commands() -> Any:
    """Return the command line's group of commands; building it takes 10 ms."""
    return get_command(app)


def _usage_error_text(error: Any) -> str:
    """Return typer's usage error as one line."""
    context = getattr(error, "ctx", None)
    option, advice = MISTAKEN_OPTIONS.get(getattr(error, "option_name", ""), ("", ""))
    if context and any(option in parameter.opts for parameter in context.command.params):
        return f"{error.option_name} {advice}"
    command = context.command_path if context else "abrun"
    invalid = getattr(error.__cause__, "errors", list)()  # pydantic's errors include the value
    got = f"got {invalid[0]['input']!r}; " if invalid else ""
    message = error.format_message().rstrip(".").replace("Input should be ", f"{got}allowed: ")
    return f"{message}; see: {command} --help"
