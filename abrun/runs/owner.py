"""Identity of the process that wrote a file. A process id alone is ambiguous across machines and time."""

import functools
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from abrun.runs.schemas import ProcessId


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process, identified across machines and reboots. A field is None if the system lacks it."""

    pid: ProcessId | None = None
    host: str | None = None
    boot_id: str | None = None  # of the running kernel; containers on one machine share it
    pid_namespace: str | None = None  # the namespace that `pid` belongs to
    process_started: str | None = None  # start time in kernel ticks

    @property
    def is_known(self) -> bool:
        return self.pid is not None and self.host is not None

    @property
    def shares_kernel(self) -> bool:
        """True if the process ran on this machine since its last boot, so that kernel locks apply to it."""
        current_boot_id = boot_id()
        return (
            self.boot_id == current_boot_id
            if self.boot_id and current_boot_id
            else self.host == socket.gethostname()
        )

    @property
    def is_visible(self) -> bool:
        """True if this process can check whether the owner is alive: same machine and pid namespace."""
        shares_pid_namespace = self.pid_namespace is None or self.pid_namespace == pid_namespace()
        return (
            self.is_known
            and self.shares_kernel
            and shares_pid_namespace
            and self.host == socket.gethostname()
        )

    @property
    def is_gone(self) -> bool:
        """True if the owner ran on this machine and has ended; False if that cannot be determined."""
        if not self.is_visible or self.pid is None:
            return False
        if not _exists(self.pid):
            return True
        current_start = start_ticks(self.pid)
        return (
            current_start is not None
            and self.process_started is not None
            and current_start != self.process_started
        )

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}" if self.is_known else "another process"


def this_process_fields() -> dict[str, Any]:
    return {**this_machine_fields(), **process_fields(os.getpid())}


def this_machine_fields() -> dict[str, Any]:
    return {"host": socket.gethostname(), "boot_id": boot_id(), "pid_namespace": pid_namespace()}


def process_fields(pid: int) -> dict[str, Any]:
    """Return the fields of `Owner` that identify a living process on this machine."""
    return {"pid": pid, "process_started": start_ticks(pid)}


@functools.cache
def boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


@functools.cache
def pid_namespace() -> str | None:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def start_ticks(pid: int) -> str | None:
    """Return a process's start time in kernel ticks; None if the system does not provide it."""
    fields = _read_stat(pid)
    return fields[19] if len(fields) > 19 else None


def _exists(pid: int) -> bool:
    fields = _read_stat(pid)
    if fields:
        return fields[0] != "Z"  # a zombie has ended
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the process name, which may contain any characters."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
