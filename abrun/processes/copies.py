"""Processes that begin as copies of one that has done its imports: a server of them, and who asks it (Linux).

A copy is a child of the process that asks for it, as any other that it starts: the server forks twice, and
who asks adopts what that leaves. So a server that dies or hangs takes no copy along.
"""

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from abrun.processes import (
    MODULE,
    RUN_DIR,
    STOPPING_SIGNALS,
    Fork,
    Popen,
    adopt_orphans,
    die_with_parent,
    mark_of,
    start,
)

ANSWER_S = 10.0  # a server that says nothing for so long hangs
MOST_BYTES = 1 << 17  # of an order


class Server:
    """A server, from its start: `python -P -m MODULE FD WORD...`, which calls `serve`.

    Until `close` this process adopts orphans. Raises OSError where none can be started.
    """

    def __init__(self, module: str, words: Sequence[str], env: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ready = False
        with theirs:
            self._process: Popen = start(
                [sys.executable, *MODULE, module, str(theirs.fileno()), *words],
                env,
                dies_by=signal.SIGKILL,
                pass_fds=(theirs.fileno(),),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def fork(self, words: Sequence[str], variables: Mapping[str, str | None], output: int) -> Fork | None:
        """Return a copy that has these variables set (None: not set), RUN_DIR among them, and prints into
        `output`; None where the server has not done its imports, is gone, hangs, or cannot fork.
        """
        order = json.dumps({"words": [*words], "variables": {**variables}, "parent": os.getpid()}).encode()
        waiting, telling = os.pipe()
        try:
            if not self._is_ready() or len(order) > MOST_BYTES:
                return None
            adopt_orphans()
            self._socket.settimeout(ANSWER_S)
            socket.send_fds(self._socket, [order], [output, waiting])
            copy = Fork(int(self._socket.recv(100)))
            os.write(telling, b".")  # begin: one that answers too late is never told to
            return copy
        except (OSError, ValueError):
            self.close()
            return None
        finally:
            os.close(waiting)
            os.close(telling)

    def close(self) -> None:
        """End the server. Its copies go on."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _is_ready(self) -> bool:
        if not self._ready and self._socket.fileno() >= 0:
            self._socket.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                self._ready = self._socket.recv(100) == b"ready"
        return self._ready and self._socket.fileno() >= 0


def serve(asked: socket.socket, may_fork: Callable[[], bool]) -> list[str]:
    """Fork a copy for each order; returns its words in the copy, and in the server never.

    The server ends at once where a copy would not do what a process of its own does: `may_fork` is asked in
    one. It ends when nobody can ask any more.
    """
    if threading.active_count() > 1 or not _answers(may_fork):
        sys.exit(1)
    asked.send(b"ready")
    while True:
        sent, files, _, _ = socket.recv_fds(asked, MOST_BYTES, 2)
        if not sent:
            sys.exit(0)
        order = json.loads(sent)
        middle = _fork()
        if middle == 0:
            copy = _fork()
            if copy == 0:
                _begin(asked, files, order["variables"], order["parent"])
                return order["words"]
            os._exit(copy is None)
        if middle is None or os.waitpid(middle, 0)[1]:
            asked.send(b"no copy")
        for file in files:
            os.close(file)


def fork_child(run: Callable[[], object], dies_by: int) -> Fork:
    """A copy of this process, one thread yet, that calls `run` and ends; what this one cleans up is not its.

    In a session of its own, with the default for every signal to stop, until its parent dies.
    """
    parent = os.getpid()
    sys.stdout.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING_SIGNALS)  # or a handler of this process would hear them
    try:
        pid = os.fork()
        if pid:
            return Fork(pid)
        for number in STOPPING_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING_SIGNALS)
    os.setsid()
    die_with_parent(dies_by, parent)
    _run_to_end(run)


def _run_to_end(run: Callable[[], object]) -> NoReturn:
    """End as the interpreter does after a program, without the frames of the process that was copied."""
    status: object = 1
    try:
        run()
        status = 0
    except SystemExit as error:
        status = error.code or 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    with contextlib.suppress(BaseException):
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  # as multiprocessing does
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)


def _begin(
    asked: socket.socket, files: Sequence[int], variables: Mapping[str, str | None], parent: int
) -> None:
    """Make a copy that has just been forked a process of its own, of the run that its variables name."""
    output, told = files
    os.setsid()
    deadline = time.monotonic() + ANSWER_S
    while os.getppid() != parent and time.monotonic() < deadline:
        time.sleep(0.0005)
    die_with_parent(signal.SIGTERM, parent)
    Path("/proc/self/comm").write_text(mark_of(variables[RUN_DIR] or ""))
    with asked:
        asked.send(str(os.getpid()).encode())
    if not os.read(told, 1):  # nobody waits for this one any more
        os._exit(0)
    os.close(told)
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _fork() -> int | None:
    """The child's id, 0 in the child; None where no more processes are allowed."""
    try:
        return os.fork()
    except OSError:
        return None


def _answers(question: Callable[[], bool]) -> bool:
    """Return True if a copy of this process says so."""
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(Exception):
            status = not question()
        os._exit(status)
    return os.waitpid(pid, 0)[1] == 0
