"""Processes of this host by id: whose they are, and their children. Read from /proc, or else from ps."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process and when it started: ids are reused, the two together are not."""

    pid: int
    started: str


def descendants(pid: int) -> set[Process]:
    """The process and everything below it, in whatever session or process group."""
    parents = _parents()
    family = {pid}
    while True:
        children = {process.pid for process, parent in parents.items() if parent in family} - family
        if not children:
            return {process for process in parents if process.pid in family}
        family |= children


def kill(processes: Iterable[Process]) -> None:
    """SIGKILL to those that still live."""
    alive = _parents()
    for process in processes:
        if process in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def works_in(pid: int, directory: Path) -> bool:
    """Whether a living process was started for a run directory, which its command line then names."""
    if Path("/proc/self").exists():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()  # a zombie has none
        except OSError:
            return False
        return os.fsencode(directory) in command.split(b"\0")
    listed = subprocess.run(["ps", "-ww", "-o", "command=", "-p", str(pid)], capture_output=True, check=False)
    return listed.stdout.rstrip().endswith(os.fsencode(directory))


def _parents() -> dict[Process, int]:
    """Every living process of this host with its parent's id."""
    if not Path("/proc/self").exists():
        listed = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid=,lstart="], capture_output=True, text=True, check=False
        ).stdout
        rows = (line.split(maxsplit=2) for line in listed.splitlines())
        return {Process(int(pid), started): int(parent) for pid, parent, started in rows}
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The name, in parentheses, may hold anything: count the fields from behind it.
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                state, parent, started = fields[0], int(fields[1]), fields[19]
                if state != "Z":
                    parents[Process(int(entry.name), started)] = parent
    return parents
