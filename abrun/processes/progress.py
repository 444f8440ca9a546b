"""Progress of a rank: a status line that it overwrites, read by the agent that watches the ranks of a node.

A rank that hangs in a loop, a lock or a collective stops updating its line. The log does not show that,
since other code writes to it too.
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

# Environment variables: the agent's pid, the folder of the status lines, and, for rank 0, the descriptor of
# the socket at which all ranks rendezvous.
AGENT_PID_VARIABLE = "ABRUN_AGENT"
FOLDER_VARIABLE = "ABRUN_PROGRESS"
LISTENING_FD_VARIABLE = "ABRUN_LISTENING"
DUMP_STACK_SIGNAL = signal.SIGUSR2
# A rank seems to hang if it is silent for longer than this many steps and this many seconds.
PATIENCE_STEPS, MIN_PATIENCE_S = 10, 60.0
# Number of recent steps that a typical step time is computed from. The first steps compile.
MIN_STEPS, MAX_STEPS = 3, 20
STUCK_STATES = {
    psutil.STATUS_STOPPED: "a process that a signal has stopped",
    psutil.STATUS_DISK_SLEEP: "a call of the system that does not return",
}
_STATUS_LINE_BYTES = 200


class _StatusLine:
    """The status line of this process; it has no file until `report_to_agent` opens one."""

    def __init__(self) -> None:
        self.file: int | None = None
        self.activity = ""
        self.in_every_step = False  # the current activity is part of every step
        self.is_waiting = False  # for other ranks, outside of torch's own code
        self.reported_s = 0.0
        self.step_ended_s: float | None = None
        self.steps_s = deque[float](maxlen=MAX_STEPS)


_status_line = _StatusLine()


def report_to_agent() -> None:
    """Tie this rank's life to the agent's, open its status line, and dump its stack on request.

    Must be the first call of a rank, before any large import. Does nothing without an agent.
    """
    folder, agent, rank = map(os.environ.get, (FOLDER_VARIABLE, AGENT_PID_VARIABLE, "RANK"))
    if not (folder and agent and rank):
        return
    die_with_parent(signal.SIGKILL, int(agent))
    _status_line.file = os.open(Path(folder) / f"rank-{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
    # Stays open for the signal handler.
    stack = os.open(_stack_path(folder, rank), os.O_WRONLY | os.O_CREAT, 0o600)
    # Main thread only: faulthandler can crash in a thread that is just ending.
    faulthandler.register(DUMP_STACK_SIGNAL, file=stack, all_threads=False)
    report("imports", in_every_step=False)


@contextlib.contextmanager
def open_status_lines(folder: Path, ranks: range) -> Iterator[dict[int, int]]:
    """Create the status lines; yields a file descriptor per rank, usable even if the files are deleted.

    The lines are written once here, so that overwriting them later needs no disk space. Raises OSError if
    there is none now.
    """
    with contextlib.ExitStack() as stack:
        fds = {}
        for rank in ranks:
            fds[rank] = os.open(folder / f"rank-{rank}", os.O_RDWR | os.O_CREAT, 0o600)
            stack.callback(os.close, fds[rank])
            os.pwrite(fds[rank], b" " * _STATUS_LINE_BYTES, 0)
        yield fds


def report(activity: str | None = None, *, in_every_step: bool = True) -> None:
    """Report a sign of life and, if given, the activity that begins now. Takes microseconds.

    `in_every_step`: the activity is part of every step, so recent steps bound how long it may take.
    """
    if activity:
        _status_line.activity, _status_line.in_every_step = activity, in_every_step
    _status_line.reported_s = time.monotonic()
    _write_status_line()


@contextlib.contextmanager
def waiting_for_ranks() -> Iterator[None]:
    """Report that this rank waits for other ranks, during which it cannot report anything."""
    _status_line.is_waiting = True
    _write_status_line()
    try:
        yield
    finally:
        _status_line.is_waiting = False
        _write_status_line()


def _write_status_line() -> None:
    if _status_line.file is None:
        return
    timeout_s = hang_timeout_s(_status_line.steps_s) if _status_line.in_every_step else math.inf
    line = _status_line
    is_first_step = line.in_every_step and line.step_ended_s is not None and not line.steps_s
    activity = line.activity + " of the first step" * is_first_step
    text = f"{os.getpid()} {line.reported_s:.3f} {timeout_s:.1f} {line.is_waiting:d} {activity}"
    with contextlib.suppress(OSError):  # for example a full disk
        os.pwrite(_status_line.file, text.encode()[:_STATUS_LINE_BYTES].ljust(_STATUS_LINE_BYTES), 0)


def report_step() -> None:
    """Report that a step has ended, or that the first one begins."""
    now = time.monotonic()
    if _status_line.step_ended_s is not None:
        _status_line.steps_s.append(now - _status_line.step_ended_s)
    _status_line.step_ended_s = now
    report()


def current_activity() -> str:
    """Return the activity that this process reported last."""
    return _status_line.activity


def hang_timeout_s(steps_s: Sequence[float]) -> float:
    """Return the seconds of silence after which a run with these recent step times seems to hang.

    Infinite if there are fewer than MIN_STEPS.
    """
    if len(steps_s) < MIN_STEPS:
        return math.inf
    return max(MIN_PATIENCE_S, PATIENCE_STEPS * statistics.median(steps_s))


class RankStatus(NamedTuple):
    """The last status that a rank has reported."""

    pid: int
    time_s: float  # time.monotonic(), which all processes of a host share
    hang_timeout_s: float  # seconds of silence after which the rank seems to hang
    is_waiting: bool  # for other ranks
    activity: str


def read_statuses(status_lines: Mapping[int, int]) -> dict[int, RankStatus]:
    """Return the last status that each rank has reported, given the descriptors of the status lines."""
    statuses = {}
    for rank, fd in status_lines.items():
        try:
            pid, time_s, timeout_s, is_waiting, activity = (
                os.pread(fd, _STATUS_LINE_BYTES, 0).decode().split(" ", 4)
            )
            statuses[rank] = RankStatus(
                int(pid), float(time_s), float(timeout_s), is_waiting == "1", activity.strip()
            )
        except (OSError, ValueError):
            continue
    return statuses


class CodeLocation(NamedTuple):
    """Innermost function of a rank's main thread. Without a file, `function` says why it is unknown."""

    function: str
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        name = "/".join(Path(self.file).parts[-3:])
        return f"{self.function} ({name}:{self.line})" if self.file else self.function


def locate_ranks(
    folder: Path, statuses: Mapping[int, RankStatus], wait_s: float = 0.5
) -> dict[int, CodeLocation]:
    for status in statuses.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(status.pid, DUMP_STACK_SIGNAL)
    time.sleep(wait_s)
    return {rank: _locate(status.pid, _stack_path(folder, rank)) for rank, status in statuses.items()}


def _locate(pid: int, stack_file: Path) -> CodeLocation:
    """Return the innermost function in a stack, or why the process cannot dump it, from its kernel state."""
    with contextlib.suppress(psutil.Error):
        if state := STUCK_STATES.get(psutil.Process(pid).status()):
            return CodeLocation(state)
    text = ""
    with contextlib.suppress(OSError):  # removed by a cleanup of temporary files
        text = stack_file.read_text(errors="replace")
    newest_stack = text.rpartition("most recent call first")[2]
    frame = re.search(r'^  File "(.*)", line (\d+) in (.*)$', newest_stack, re.MULTILINE)
    if frame is None:
        return CodeLocation("an unknown place")
    source_file, line, function = frame.groups()
    return CodeLocation(function, source_file, int(line))


def _stack_path(folder: str | Path, rank: int | str) -> Path:
    return Path(folder) / f"rank-{rank}.stack"
