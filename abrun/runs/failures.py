"""Failures of the ranks on a node: what each rank writes about its failure, and which failed first.

A rank writes the same file as torch's `record`, plus the reason code of the error.
"""

import contextlib
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
from abrun.messages.codes import Code, Reason
from abrun.messages.records import encode_reasons, stored_reason
from abrun.processes import PYTHON_ERROR, Popen, ending_reason, first_traceback, signal_name, wait_for_exit

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where torch's `record` writes why a rank fails
GRACE_S = 30.0  # for a checkpoint; launchers wait 35 s before they kill
POLL_S = 0.1
# Message of NCCL's watchdog when it ends a rank: the collective that timed out, and after how long
WATCHDOG = r"Watchdog caught collective operation timeout: WorkNCCL\((.*?)\) ran for (\d+) milliseconds"
EFFECTS = (Code.RANKS_LOST, Code.RANKS_NOT_FOUND)  # failures caused by the end of another rank


def record_failure(error: AbrunError) -> None:
    """Write the error file of this rank, for the agent or torchrun; do nothing if neither started it."""
    file = os.environ.get(ERROR_FILE)
    if not file:
        return
    extra_info = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
    kind = type(error).__name__
    reason = Code.EXCEPTION(kind=kind, error=error.reason, origin=None)
    message = {"message": f"{kind}: {error}", "extraInfo": extra_info}
    content = {"message": message, "reason": encode_reasons(reason)}
    Path(file).write_text(json.dumps(content))


def record_exception(error: Exception) -> None:
    """Add the reason to the error file that torch's `record` has written for an exception.

    A failed import also names the error behind it, because the message of transformers does not.
    """
    file = os.environ.get(ERROR_FILE)
    if not file:
        return
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        content = json.loads(Path(file).read_text())
        message, callstack = content["message"]["message"], content["message"]["extraInfo"]["py_callstack"]
        # The error that the first traceback of the chain ends with, unless the message includes it
        causes = re.findall(PYTHON_ERROR, first_traceback(callstack), re.MULTILINE)
        is_new = isinstance(error, ImportError) and causes and causes[-1] not in " ".join(message.split())
        origin = causes[-1] if is_new else None
        content["reason"] = encode_reasons(Code.EXCEPTION(kind=None, error=message, origin=origin))
        Path(file).write_text(json.dumps(content))


def error_file(scratch: Path, rank: int) -> Path:
    return scratch / f"rank-{rank}.error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The failure of one rank."""

    rank: int
    status: int  # exit code, or -N for signal N
    cause: Reason | None  # from the rank's error file; None if it wrote none
    time_s: int

    @property
    def is_effect(self) -> bool:
        """Return True if the rank failed because another rank ended."""
        return self.cause is not None and any(reason.code in EFFECTS for reason in self.cause.walk())


def first_failure(processes: Mapping[int, Popen], scratch: Path) -> Failure | None:
    """Wait until all ranks have ended; return the first failure, or None.

    The first failure ends the other ranks, with time for a checkpoint. Failures of ranks that have lost
    others count as effects, even if they come first.
    """
    failures, running = dict[int, Failure](), True
    while running and not failures:
        time.sleep(POLL_S)
        # Polled before the failures are noted, so that no end is missed.
        running = any(process.poll() is None for process in processes.values())
        _note_failures(processes, scratch, failures)
    if failures:
        failed_first = set(failures)
        for process in processes.values():
            process.terminate()
        deadline = time.monotonic() + GRACE_S
        for process in processes.values():
            wait_for_exit(process, deadline - time.monotonic(), lambda: False)
        _note_failures(processes, scratch, failures)  # the cause may take longer to end than its effects
        for rank, process in processes.items():
            process.kill()
            if rank not in failed_first and process.returncode == -signal.SIGTERM:
                failures.pop(rank, None)
    return min(failures.values(), key=lambda failure: (failure.is_effect, failure.time_s), default=None)


def _note_failures(processes: Mapping[int, Popen], scratch: Path, failures: dict[int, Failure]) -> None:
    for rank, process in processes.items():
        status = process.poll()
        if not status or rank in failures:
            continue
        cause, time_s = _read_error_file(error_file(scratch, rank)) or (None, int(time.time()))
        failures[rank] = Failure(rank=rank, status=status, cause=cause, time_s=time_s)


def _read_error_file(file: Path) -> tuple[Reason, int] | None:
    """Return a rank's reason and its time (s since the epoch); None if the file is missing or incomplete."""
    try:
        content = json.loads(file.read_text())
        message, extra_info = content["message"]["message"], content["message"]["extraInfo"]
        cause = stored_reason(content.get("reason"), None)
        cause = cause or Code.EXCEPTION(kind=None, error=str(message), origin=None)
        return cause.map_texts(lambda text: " ".join(text.split())), int(extra_info["timestamp"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def cause_of(failure: Failure, printed: str, oom_kills_before: int | None) -> Reason:
    """Return the reason of a failure: from NCCL's watchdog, the rank's error file, or its exit status."""
    late = re.search(WATCHDOG, printed)
    if late and signal_name(failure.status) == "SIGABRT":
        return Code.COLLECTIVE_TIMED_OUT(waited_s=int(late[2]) / 1000, work=late[1])
    if failure.cause and not signal_name(failure.status):
        return failure.cause
    return ending_reason(failure.status, "", oom_kills_before)
