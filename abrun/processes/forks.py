"""Processes that begin as copies of one that has done its imports: a server of them, and who asks it (Linux).

The server forks once for each order, before it has a thread or a GPU's driver, and says how its copies end.
When it dies they are asked to end, as it is when whoever started it does.
"""

import contextlib
import fcntl
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from abrun.processes import MODULE, RUN_DIR, Popen, die_with_parent, shell_code, start

POLL_S = 0.05
ANSWER_S = 10.0  # a server that says nothing for so long hangs
NO_COPY = -1  # said where none can be forked
MOST_BYTES, MOST_FILES = 1 << 17, 8  # of an order
RUN_DIR_ROOM, COMMAND_ROOM = 4096, 400  # bytes: for what the system shows of a copy
# Where in /proc/PID/stat, behind the name, it says where they lie: fields 48 and 50 of proc_pid_stat(5)
COMMAND, ENVIRONMENT = 45, 47


class ForkServer:
    """A server, from its start: `python -P -m MODULE FD WORD...`, which calls `serve`.

    Raises OSError where it cannot be started.
    """

    def __init__(self, module: str, words: Sequence[str], env: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._may_ask = False
        self._ended = dict[int, int]()
        with theirs:
            self._process: Popen = start(
                [sys.executable, *MODULE, module, str(theirs.fileno()), *words, " " * COMMAND_ROOM],
                {**env, RUN_DIR: " " * RUN_DIR_ROOM},
                dies_by=signal.SIGTERM,
                pass_fds=(theirs.fileno(),),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def fork(self, words: Sequence[str], variables: Mapping[str, str | None], output: int) -> "Copy | None":
        """A copy that has these variables set (None: not set), RUN_DIR among them, and prints into `output`.

        None where there is nothing to be copied: the server has not done its imports, is gone, or hangs.
        """
        self._hear()
        order = json.dumps({"words": [*words], "variables": {**variables}})
        if not self._may_ask or len(order) > MOST_BYTES:
            return None
        pid, (waiting, telling) = None, os.pipe()
        try:
            with contextlib.suppress(OSError):
                socket.send_fds(self._socket, [order.encode()], [output, waiting])
                pid = self._hear(ANSWER_S)
            if pid is None or pid == NO_COPY:
                self._may_ask = False
                return None
            copy = Copy(self, pid)
            os.write(telling, b".")  # begin: one that is forked later than this waits for it never does
        finally:
            os.close(waiting)
            os.close(telling)
        return copy

    def status_of(self, pid: int) -> int | None:
        """How a copy has ended, where the server has said so."""
        self._hear()
        return self._ended.get(pid)

    @property
    def gone(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """End the server, and so ask what copies there are to end."""
        self._socket.close()
        self._process.kill()  # which even one ends by that a signal has stopped
        self._process.wait()

    def _hear(self, timeout_s: float = 0.0) -> int | None:
        """Take in what the server has said; with a `timeout_s`, until it has forked: returns the process."""
        deadline, pid = time.monotonic() + timeout_s, None
        with contextlib.suppress(OSError, ValueError):  # it is gone, or closed
            while pid is None and _readable(self._socket.fileno(), deadline - time.monotonic()):
                said = self._socket.recv(MOST_BYTES)
                if not said:
                    self._may_ask = False
                    break
                told: dict[str, Any] = json.loads(said)
                self._may_ask = self._may_ask or "ready" in told
                if "forked" in told:
                    pid = int(told["forked"])
                    self._ended.pop(pid, None)  # of an earlier one, whose id it has got
                if "ended" in told:
                    self._ended[told["ended"]] = told["status"]
        return pid


class Copy:
    """A process that a server has forked, with what abrun asks of a `subprocess.Popen`."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._seen_ended_s = math.inf
        self._file: int | None = None  # None: it had ended before
        with contextlib.suppress(ProcessLookupError):
            self._file = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Of one that outlived the server, whose end asks it for its own, the status is that of SIGTERM.

        A server that does not say how this one has ended is ended itself.
        """
        if self.returncode is None:
            lives, alone = self._lives(), self._server.gone
            self.returncode = self._server.status_of(self.pid)
            if self.returncode is None and not lives:
                self._seen_ended_s = min(self._seen_ended_s, time.monotonic())
                if alone:
                    self.returncode = -signal.SIGTERM
                elif time.monotonic() - self._seen_ended_s > ANSWER_S:
                    self._server.close()
            if self.returncode is not None and self._file is not None:
                os.close(self._file)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None and self._file is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._file, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        while (status := self.poll()) is None:
            time.sleep(POLL_S)
        return status

    def _lives(self) -> bool:
        return self._file is not None and not _readable(self._file)


def serve(asked: socket.socket, may_fork: Callable[[], bool]) -> list[str]:
    """Fork a copy for each order; returns its words in the copy, and in the server never.

    The server ends at once where a copy would not do what a process of its own does: `may_fork` is asked in
    one. It ends when nobody can ask any more.
    """
    if threading.active_count() > 1 or not _forks(may_fork):
        sys.exit(1)
    die_with_parent(signal.SIGKILL, os.getppid())  # even where a signal has stopped it
    server = os.getpid()
    _say(asked, {"ready": server})
    while True:
        if _readable(asked.fileno(), POLL_S):
            sent, files, _, _ = socket.recv_fds(asked, MOST_BYTES, 2)
            if not sent:
                sys.exit(0)
            order = json.loads(sent)
            try:
                pid = os.fork()
            except OSError:  # no reason to end, and the others with it
                pid = NO_COPY
            if pid == 0:
                asked.close()
                _begin(server, signal.SIGTERM)
                output, told = files
                if not os.read(told, 1):  # nobody waits for this one any more
                    os._exit(0)
                os.close(told)
                _move([output, os.dup(output)], [1, 2])
                _set(order["variables"])
                show_run(order["variables"][RUN_DIR])
                show_command(order["words"])
                return order["words"]
            for file in files:
                os.close(file)
            _say(asked, {"forked": pid})
        while ended := _ended():
            pid, status = ended
            _say(asked, {"ended": pid, "status": status})
            os.waitpid(pid, 0)  # now that this is told its id may be another's


class Spare:
    """A copy of this process that waits to be told what to run, and answers as a `subprocess.Popen` does.

    In the copy this never returns: it ends once `run` has returned, or when this process has gone. To be made
    before there are threads, `others` by others' side.
    """

    def __init__(self, run: Callable[[list[str]], object], others: Sequence["Spare"]) -> None:
        self.returncode: int | None = None
        self._variables = dict(os.environ)
        self._socket, told = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid:
            told.close()
            return
        for spare in (self, *others):  # or the end of their parent would not end them
            spare._socket.close()
        _begin(parent, signal.SIGKILL)
        order, files, _, _ = socket.recv_fds(told, MOST_BYTES, MOST_FILES)
        told.close()
        if order:
            told_to = json.loads(order)
            _move(files, told_to["numbers"])
            _set(told_to["variables"])
            show_command(told_to["words"])
            run(told_to["words"])
        sys.exit()

    def become(self, words: Sequence[str], env: Mapping[str, str], files: Sequence[int]) -> "Spare":
        """Run `words` with this environment, these open files and this process's output."""
        changed = {name: value for name, value in env.items() if self._variables.get(name) != value}
        changed |= dict.fromkeys(self._variables.keys() - env.keys())
        numbers = [1, 2, *files]
        order = {"words": [*words], "numbers": numbers, "variables": changed}
        with self._socket, contextlib.suppress(ConnectionError):  # how it has ended says more
            socket.send_fds(self._socket, [json.dumps(order).encode()], numbers)
        return self

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # else its id may be another's
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _begin(parent: int, dies_by: int) -> None:
    """Make a copy that has just been forked a process of its own, until its parent dies."""
    os.setsid()
    die_with_parent(dies_by, parent)


def _move(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Give open files these numbers."""
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, 1 + max(numbers)) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(high, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def show_run(run_dir: str) -> None:
    """Let the system say of this copy which run it is of, as `processes_of` asks.

    Into the environment that the server was given, which has room for it. Raises OSError or ValueError where
    it has not, or where the system lets nobody write there.
    """
    room = os.fsencode(f"{RUN_DIR}=") + b" " * RUN_DIR_ROOM
    variable = os.fsencode(f"{RUN_DIR}={run_dir}")
    if len(variable) > len(room):
        raise ValueError(f"{run_dir}: longer than {RUN_DIR_ROOM} bytes")
    with _shown(ENVIRONMENT) as (memory, start, end):
        at = memory.read(end - start).index(room)
        memory.seek(start + at)
        memory.write(variable.ljust(len(room), b"\0"))


def show_command(words: Sequence[str]) -> None:
    """Let the system say what this copy runs, as far as there is room. Errors: as of `show_run`."""
    command = b"\0".join(map(os.fsencode, (sys.executable, *MODULE, *words)))
    with _shown(COMMAND) as (memory, start, end):
        memory.write(command[: end - start - 1].ljust(end - start, b"\0"))


@contextlib.contextmanager
def _shown(field: int) -> Iterator[tuple[Any, int, int]]:
    """This process's memory, open at what the system shows of it, and where that begins and ends."""
    stat = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
    start, end = map(int, stat[field : field + 2])
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        yield memory, start, end


def _forks(may_fork: Callable[[], bool]) -> bool:
    """Whether a copy is as good as a process of its own, by its own word."""
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(Exception):
            os.close(os.pidfd_open(os.getpid()))
            show_run("/here")
            show_command(["here"])
            shown = Path("/proc/self/environ").read_bytes().split(b"\0")
            status = 0 if os.fsencode(f"{RUN_DIR}=/here") in shown and may_fork() else 1
        os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


def _ended() -> tuple[int, int] | None:
    """A copy that has ended, which keeps its id, and its exit status as `subprocess` gives it."""
    with contextlib.suppress(ChildProcessError):  # there is none
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            return ended.si_pid, ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    return None


def _readable(file: int, timeout_s: float = 0.0) -> bool:
    """Whether there is something to read, or an end. Raises ValueError for a file that is closed."""
    poll = select.poll()  # select.select takes no file beyond the 1,024th
    poll.register(file, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


def _say(asked: socket.socket, told: Mapping[str, int]) -> None:
    """To whoever asks; the server ends where that one is gone."""
    try:
        asked.send(json.dumps(told).encode())
    except OSError:
        sys.exit(shell_code(-signal.SIGTERM))
