"""The foreign command as a process group that ends with this process, whatever ends it."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from abrun.errors import LaunchError

STOPPING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def command(argv: Sequence[str], env: Mapping[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a command in a process group of its own; at the end nothing of that group is left.

    Raises LaunchError where it cannot be started.
    """
    prepare = _ending_with_parent(signal.SIGKILL)
    try:
        process = subprocess.Popen(
            argv, env=dict(env), stdin=subprocess.DEVNULL, process_group=0, preexec_fn=prepare
        )
    except OSError as error:
        raise LaunchError(
            f"trainer.argv: got {argv[0]!r}, which cannot be started: {error.strerror}; "
            "give the path of an executable file"
        ) from None
    try:
        yield process
    finally:
        signal_group(process, signal.SIGKILL)
        process.wait()


def signal_group(process: "subprocess.Popen[bytes]", number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def stop(process: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """SIGTERM to the group, time for a checkpoint, then SIGKILL."""
    signal_group(process, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    signal_group(process, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def stopping_signals() -> Iterator[list[int]]:
    """The signals to stop that have come, in a list that grows."""
    received: list[int] = []
    old = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in STOPPING_SIGNALS
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield received
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def wait(process: "subprocess.Popen[bytes]", timeout_s: float, stopped: Callable[[], Any]) -> int | None:
    """The exit status, or None where time is up or a signal has come first."""
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline and not stopped():
        time.sleep(0.05)
    return process.poll()


def ending_of(status: int) -> tuple[str, int]:
    """A process's end in words, and the exit code with which a shell would report it."""
    if status >= 0:
        return f"exit code {status}", status
    try:
        name = signal.Signals(-status).name
    except ValueError:  # a real-time signal has no name
        name = f"signal {-status}"
    memory = ": was the machine out of memory?" if name == "SIGKILL" else ""
    return f"killed by {name}{memory}", 128 - status


def stop_with_parent() -> None:
    """From now on the death of the launcher is a SIGTERM to this process: no orphan goes on writing."""
    arrange = _ending_with_parent(signal.SIGTERM)
    if arrange:
        arrange()


def _ending_with_parent(number: int) -> Callable[[], None] | None:
    """What makes the calling process get a signal when its parent dies, on Linux."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)  # loaded here: a forked child must not

    def arrange() -> None:
        libc.prctl(PR_SET_PDEATHSIG, number)

    return arrange
