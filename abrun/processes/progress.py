"""What a rank is doing, in a line that it overwrites, for the process that watches over the ranks of a node.

A rank that hangs in a loop, a lock or a collective gives no sign; the log, which others fill, does not tell.
"""

import contextlib
import faulthandler
import math
import os
import re
import signal
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from abrun.processes import die_with_parent

AGENT = "ABRUN_AGENT"  # the environment variable that names the process that watches
FOLDER = "ABRUN_PROGRESS"  # and where the lines are
LISTENING = "ABRUN_LISTENING"  # of the first rank: the descriptor of the socket where all ranks meet
SHOW_STACK = signal.SIGUSR2
PATIENCE, LEAST_PATIENCE_S = 10, 60.0  # a silence longer than that many steps, and than that, is unusual
FEWEST_STEPS, LAST_STEPS = 3, 20  # to judge by: the first ones compile
STUCK = {
    psutil.STATUS_STOPPED: "a process that a signal has stopped",
    psutil.STATUS_DISK_SLEEP: "a call of the system that does not return",
}
_LINE = 200  # bytes


class _Line:
    """This process's line: none until it joins."""

    def __init__(self) -> None:
        self.file: int | None = None
        self.doing = ""
        self.usual = False  # whether what this rank does now is a part of every step
        self.waits = False  # for the other ranks, where no code of torch shows it
        self.beat_s = 0.0  # the last sign of life
        self.stepped_s: float | None = None
        self.steps_s = deque[float](maxlen=LAST_STEPS)


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


@contextlib.contextmanager
def lines(folder: Path, ranks: range) -> Iterator[dict[int, int]]:
    """Room for the lines; yields a file descriptor for each, good also once somebody tidies the folder.

    Raises OSError where there is none; overwritten they need no more.
    """
    with contextlib.ExitStack() as stack:
        files = {}
        for rank in ranks:
            files[rank] = os.open(folder / f"rank-{rank}", os.O_RDWR | os.O_CREAT, 0o600)
            stack.callback(os.close, files[rank])
            os.pwrite(files[rank], b" " * _LINE, 0)
        yield files


def beat(doing: str | None = None, *, usual: bool = True) -> None:
    """A sign of life, and what begins now, where that is another thing than before. Takes microseconds.

    `usual`: whether it is a part of every step, so that the last steps say how long it may take at most.
    """
    if doing:
        _line.doing, _line.usual = doing, usual
    _line.beat_s = time.monotonic()
    _write_line()


@contextlib.contextmanager
def waiting_for_ranks() -> Iterator[None]:
    """Say that this rank waits for the others, which gives no sign of life."""
    _line.waits = True
    _write_line()
    try:
        yield
    finally:
        _line.waits = False
        _write_line()


def _write_line() -> None:
    if _line.file is None:
        return
    patience_s = patience(_line.steps_s) if _line.usual else math.inf
    text = f"{os.getpid()} {_line.beat_s:.3f} {patience_s:.1f} {_line.waits:d} {_line.doing}"
    with contextlib.suppress(OSError):  # such as a full disk
        os.pwrite(_line.file, text.encode()[:_LINE].ljust(_LINE), 0)


def stepped() -> None:
    """A step has ended, or the first one begins."""
    now = time.monotonic()
    if _line.stepped_s is not None:
        _line.steps_s.append(now - _line.stepped_s)
    _line.stepped_s = now
    beat()


def doing() -> str:
    """What this process said last that it does."""
    return _line.doing


def patience(steps_s: Sequence[float]) -> float:
    """Seconds of silence after which a run that took these for its last steps seems to hang.

    Infinite where they are too few to say.
    """
    if len(steps_s) < FEWEST_STEPS:
        return math.inf
    return max(LEAST_PATIENCE_S, PATIENCE * statistics.median(steps_s))


class Sign(NamedTuple):
    """The last that a rank has said."""

    pid: int
    time_s: float  # of time.monotonic, which the processes of a host share
    patience_s: float  # of silence from then on, after which it seems to hang
    waits: bool  # for the other ranks
    doing: str


def signs(lines: Mapping[int, int]) -> dict[int, Sign]:
    """The last sign of every rank that has given one, by the descriptors of their lines."""
    found = {}
    for rank, file in lines.items():
        try:
            pid, time_s, patience_s, waits, doing = os.pread(file, _LINE, 0).decode().split(" ", 4)
            found[rank] = Sign(int(pid), float(time_s), float(patience_s), waits == "1", doing.strip())
        except (OSError, ValueError):
            continue
    return found


class Place(NamedTuple):
    """The innermost function of a rank's main thread; without a file, why that is unknown."""

    function: str
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        name = "/".join(Path(self.file).parts[-3:])
        return f"{self.function} ({name}:{self.line})" if self.file else self.function


def places(folder: Path, ranks: Mapping[int, Sign], patience_s: float = 0.5) -> dict[int, Place]:
    """Return where the main thread of each rank is."""
    for sign in ranks.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(sign.pid, SHOW_STACK)
    time.sleep(patience_s)
    return {rank: _stuck(sign.pid) or _place(_stack(folder, rank)) for rank, sign in ranks.items()}


def _stuck(pid: int) -> Place | None:
    """Why a process cannot say where it is, by the kernel's word."""
    try:
        said = STUCK.get(psutil.Process(pid).status())
    except psutil.Error:
        return None
    return Place(said) if said else None


def _place(stack: Path) -> Place:
    try:
        shown = stack.read_text(errors="replace")
    except OSError:  # removed by whoever tidies the folder of temporary files
        shown = ""
    last = shown.rpartition("most recent call first")[2]
    frame = re.search(r'^  File "(.*)", line (\d+) in (.*)$', last, re.MULTILINE)
    if frame is None:
        return Place("an unknown place")
    file, line, function = frame.groups()
    return Place(function, file, int(line))


def _stack(folder: str | Path, rank: int | str) -> Path:
    return Path(folder) / f"rank-{rank}.stack"
