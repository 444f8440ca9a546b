"""What a rank is doing, in a line that it overwrites, for the process that watches over the ranks of a node.

A rank that hangs in a loop, a lock or a collective gives no sign; the log, which others fill, does not tell.
"""

import contextlib
import faulthandler
import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from abrun.processes import die_with_parent

AGENT = "ABRUN_AGENT"  # the environment variable that names the process that watches
FOLDER = "ABRUN_PROGRESS"  # and where the lines are
SHOW_STACK = signal.SIGUSR2
_LINE = 200  # bytes


class _Line:
    """This process's line: none until it joins."""

    def __init__(self) -> None:
        self.file: int | None = None
        self.doing = ""


_line = _Line()


def join() -> None:
    """Live no longer than the process that watches, say what this rank does, show its stack when asked.

    The first thing that a rank does, before it imports anything large. Nothing where nobody watches.
    """
    folder, agent, rank = os.environ.get(FOLDER), os.environ.get(AGENT), os.environ.get("RANK")
    if not (folder and agent and rank):
        return
    die_with_parent(signal.SIGKILL, int(agent))
    _line.file = os.open(Path(folder) / f"rank-{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
    stack = os.open(_stack(folder, rank), os.O_WRONLY | os.O_CREAT, 0o600)  # stays open for the handler
    # Not all threads: faulthandler can crash in one that is just ending.
    faulthandler.register(SHOW_STACK, file=stack, all_threads=False)
    beat("starting")


def prepare(folder: Path, ranks: range) -> None:
    """Room for the lines. Raises OSError where there is none; overwritten they need no more."""
    for rank in ranks:
        (folder / f"rank-{rank}").write_bytes(b" " * _LINE)


def beat(doing: str | None = None) -> None:
    """A sign of life, and what begins now, where that is another thing than before. Takes microseconds."""
    if _line.file is None:
        return
    _line.doing = doing or _line.doing
    text = f"{os.getpid()} {time.monotonic():.3f} {_line.doing}"
    with contextlib.suppress(OSError):  # such as a full disk
        os.pwrite(_line.file, text.encode()[:_LINE].ljust(_LINE), 0)


class Sign(NamedTuple):
    """The last that a rank has said."""

    pid: int
    time_s: float  # of time.monotonic, which the processes of a host share
    doing: str


def signs(folder: Path, ranks: range) -> dict[int, Sign]:
    """The last sign of every one of these ranks that has given one."""
    found = {}
    for rank in ranks:
        try:
            pid, time_s, doing = (folder / f"rank-{rank}").read_text().split(" ", 2)
            found[rank] = Sign(int(pid), float(time_s), doing.strip())
        except (OSError, ValueError):
            continue
    return found


def places(folder: Path, ranks: Mapping[int, Sign], patience_s: float = 0.5) -> dict[int, str]:
    """Where the main threads of ranks are: `function (file:line)`, the innermost."""
    for sign in ranks.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(sign.pid, SHOW_STACK)
    time.sleep(patience_s)
    return {rank: _place(_stack(folder, rank)) for rank in ranks}


def _place(stack: Path) -> str:
    try:
        shown = stack.read_text(errors="replace")
    except OSError:  # removed by whoever tidies the folder of temporary files
        shown = ""
    frame = re.search(r'^  File "(.*)", line (\d+) in (.*)$', shown, re.MULTILINE)
    if frame is None:
        return "an unknown place"
    file, line, function = frame.groups()
    return f"{function} ({'/'.join(Path(file).parts[-3:])}:{line})"


def _stack(folder: str | Path, rank: int | str) -> Path:
    return Path(folder) / f"rank-{rank}.stack"
