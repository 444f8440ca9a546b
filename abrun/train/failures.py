"""How the ranks of a node fail: what each writes of it, and which of them failed first.

A rank writes the file that torch's `record` writes, with the code of an error of abrun's beside its words.
"""

import json
import os
import re
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from abrun.errors import AbrunError
from abrun.messages.records import coded, stored_reason
from abrun.processes import PYTHON_ERROR, Child, ending_reason, first_traceback, signal_name, wait_for_exit
from abrun.reasons import Code, Reason

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where torch's `record` writes why a rank fails
GRACE_S = 30.0  # for a checkpoint; launchers wait 35 s before they kill
POLL_S = 0.1
# Of a rank that NCCL has ended: which collective took too long, and how long
WATCHDOG = r"Watchdog caught collective operation timeout: WorkNCCL\((.*?)\) ran for (\d+) milliseconds"
EFFECTS = (Code.RANKS_LOST, Code.RANKS_NOT_FOUND)  # of another rank's end


def record_failure(error: AbrunError) -> None:
    """Write why this rank fails, for the agent or torchrun. Nothing where neither waits for it."""
    file = os.environ.get(ERROR_FILE)
    if not file:
        return
    more = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
    kind = type(error).__name__
    reason = Code.EXCEPTION(kind=kind, error=error.reason, origin=None)
    content = {"message": {"message": f"{kind}: {error}", "extraInfo": more}, "reason": coded(reason)}
    Path(file).write_text(json.dumps(content))


def error_file(scratch: Path, rank: int) -> Path:
    return scratch / f"rank-{rank}.error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a rank failed."""

    rank: int
    status: int  # as `subprocess` gives it
    cause: Reason | None  # by the rank itself; None where it could say nothing any more
    time_s: int

    @property
    def lost_others(self) -> bool:
        """Return True if it is the effect of another's end."""
        return self.cause is not None and any(reason.code in EFFECTS for reason in self.cause.walk())


def first_failure(processes: Mapping[int, Child], scratch: Path) -> Failure | None:
    """Returns once all ranks have ended. The first that fails ends the others, with time for a checkpoint.

    What a rank says that has lost others is an effect, whenever it says so.
    """
    failures, running = dict[int, Failure](), True
    while running and not failures:
        time.sleep(POLL_S)
        running = any(process.poll() is None for process in processes.values())  # and ends are noted after it
        _note_failures(processes, scratch, failures)
    if failures:
        by_themselves = set(failures)
        for process in processes.values():
            process.terminate()
        deadline = time.monotonic() + GRACE_S
        for process in processes.values():
            wait_for_exit(process, deadline - time.monotonic(), lambda: False)
        _note_failures(processes, scratch, failures)  # the cause may take longer to end than its effects
        for rank, process in processes.items():
            process.kill()
            if rank not in by_themselves and process.returncode == -signal.SIGTERM:
                failures.pop(rank, None)
    return min(failures.values(), key=lambda failure: (failure.lost_others, failure.time_s), default=None)


def _note_failures(processes: Mapping[int, Child], scratch: Path, failures: dict[int, Failure]) -> None:
    for rank, process in processes.items():
        status = process.poll()
        if not status or rank in failures:
            continue
        cause, time_s = _recorded(error_file(scratch, rank)) or (None, int(time.time()))
        failures[rank] = Failure(rank=rank, status=status, cause=cause, time_s=time_s)


def _recorded(file: Path) -> tuple[Reason, int] | None:
    """What a rank has written of its failure, and when; None where it could not, or not to the end."""
    try:
        content = json.loads(file.read_text())
        message, more = content["message"]["message"], content["message"]["extraInfo"]
        cause = stored_reason(content.get("reason"), None)
        cause = cause or _of_program(str(message), str(more["py_callstack"]))
        return cause.map_texts(lambda text: " ".join(text.split())), int(more["timestamp"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _of_program(message: str, callstack: str) -> Reason:
    """An exception that is none of abrun's, or has no code; of a failed import, with what it hides."""
    origin = None
    if message.startswith(("ImportError", "ModuleNotFoundError")):  # transformers' own say nothing
        causes = re.findall(PYTHON_ERROR, first_traceback(callstack), re.MULTILINE)
        origin = causes[-1] if causes and causes[-1] not in " ".join(message.split()) else None
    return Code.EXCEPTION(kind=None, error=message, origin=origin)


def cause_of(failure: Failure, printed: str, oom_kills_before: int | None) -> Reason:
    """Why a rank failed: by NCCL's word, its own, or else by how its process ended."""
    late = re.search(WATCHDOG, printed)
    if late and signal_name(failure.status) == "SIGABRT":
        return Code.COLLECTIVE_TIMED_OUT(waited_s=int(late[2]) / 1000, work=late[1])
    if failure.cause and not signal_name(failure.status):
        return failure.cause
    return ending_reason(failure.status, "", oom_kills_before)
