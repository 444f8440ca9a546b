"""Fork server: a process that has done its imports, and from which runs are forked (Linux only).

A forked run is a child of the process that asked for it, like any other run: the server forks twice, and
the client adopts the orphan. So a server that dies or hangs does not affect running processes.
"""

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

from abrun.processes import (
    MODULE_OPTIONS,
    RUN_DIR_VARIABLE,
    STOP_SIGNALS,
    ForkedChild,
    Popen,
    adopt_orphans,
    die_with_parent,
    process_name_of,
    run_to_end,
    start_process,
)

ANSWER_TIMEOUT_S = 10.0
MAX_ORDER_BYTES = 1 << 17


class ForkServer:
    """Client of a fork server, which it starts: `python -P -m MODULE FD WORD...`, which calls `serve_forks`.

    This process adopts orphans until `close`. Raises OSError if the server cannot be started.
    """

    def __init__(self, module: str, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        self._socket, server_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ready = False
        with server_socket:
            self._process: Popen = start_process(
                [sys.executable, *MODULE_OPTIONS, module, str(server_socket.fileno()), *arguments],
                env,
                death_signal=signal.SIGKILL,
                pass_fds=(server_socket.fileno(),),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def fork(
        self, arguments: Sequence[str], variables: Mapping[str, str | None], output_fd: int
    ) -> ForkedChild | None:
        """Return a forked process with these `variables` (None: unset), which prints into `output_fd`.

        RUN_DIR_VARIABLE must be among the variables. Returns None if the server is still importing, is dead,
        hangs, or cannot fork.
        """
        order = json.dumps(
            {"words": [*arguments], "variables": {**variables}, "parent": os.getpid()}
        ).encode()
        go_read_end, go_write_end = os.pipe()
        try:
            if not self._is_ready() or len(order) > MAX_ORDER_BYTES:
                return None
            adopt_orphans()
            self._socket.settimeout(ANSWER_TIMEOUT_S)
            socket.send_fds(self._socket, [order], [output_fd, go_read_end])
            child = ForkedChild(int(self._socket.recv(100)))
            # The process may begin. One that answered too late never gets this byte, and exits.
            os.write(go_write_end, b".")
            return child
        except (OSError, ValueError):
            self.close()
            return None
        finally:
            os.close(go_read_end)
            os.close(go_write_end)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_ready(self, timeout_s: float) -> bool:
        """Wait until the server has done its imports; return False if it has not, or is dead."""
        with contextlib.suppress(OSError):
            if not self._ready:
                self._socket.settimeout(timeout_s)
                self._ready = self._socket.recv(100) == b"ready"
        return self._ready and self._socket.fileno() >= 0

    def close(self) -> None:
        """End the server. Processes forked from it keep running."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _is_ready(self) -> bool:
        if not self._ready and self._socket.fileno() >= 0:
            self._socket.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                self._ready = self._socket.recv(100) == b"ready"
        return self._ready and self._socket.fileno() >= 0


def serve_forks(orders: socket.socket, can_fork: Callable[[], bool]) -> list[str]:
    """Fork a process for each order, and return the order's words in it. Never returns in the server.

    The server exits at once if a forked process would differ from a fresh one: `can_fork`, called in a fork,
    returns False. It also exits when the client has closed the connection.
    """
    if threading.active_count() > 1 or not _holds_in_copy(can_fork):
        sys.exit(1)
    orders.send(b"ready")
    while True:
        message, fds, _, _ = socket.recv_fds(orders, MAX_ORDER_BYTES, 2)
        if not message:
            sys.exit(0)
        order = json.loads(message)
        middle_pid = _try_fork()
        if middle_pid == 0:
            child_pid = _try_fork()
            if child_pid == 0:
                _become_run_process(orders, fds, order["variables"], order["parent"])
                return order["words"]
            os._exit(child_pid is None)
        if middle_pid is None or os.waitpid(middle_pid, 0)[1]:
            orders.send(b"no copy")
        for file in fds:
            os.close(file)


def fork_child(run: Callable[[], object], death_signal: int) -> ForkedChild:
    """Fork this single-threaded process into a child that calls `run` and exits.

    The child leads its own session, has default handlers for stop signals, gets `death_signal` when its
    parent dies, and does not run this process's cleanup.
    """
    parent_pid = os.getpid()
    sys.stdout.flush()
    # Otherwise this process's handler would receive a signal that is meant for the child.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        pid = os.fork()
        if pid:
            return ForkedChild(pid)
        for signal_number in STOP_SIGNALS:
            signal.signal(signal_number, signal.SIG_DFL)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    os.setsid()
    die_with_parent(death_signal, parent_pid)
    run_to_end(run)


def _become_run_process(
    orders: socket.socket, fds: Sequence[int], variables: Mapping[str, str | None], parent_pid: int
) -> None:
    """Turn a process that has just been forked into a process of the run that `variables` name."""
    output_fd, go_fd = fds
    os.setsid()
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while os.getppid() != parent_pid and time.monotonic() < deadline:
        time.sleep(0.0005)
    die_with_parent(signal.SIGTERM, parent_pid)
    Path("/proc/self/comm").write_text(process_name_of(variables[RUN_DIR_VARIABLE] or ""))
    with orders:
        orders.send(str(os.getpid()).encode())
    # The client has given up on this process.
    if not os.read(go_fd, 1):
        os._exit(0)
    os.close(go_fd)
    for standard_fd in (1, 2):
        os.dup2(output_fd, standard_fd)
    os.close(output_fd)
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _try_fork() -> int | None:
    """Return the child's pid, 0 in the child, or None if the system allows no more processes."""
    try:
        return os.fork()
    except OSError:
        return None


def _holds_in_copy(predicate: Callable[[], bool]) -> bool:
    """Return True if `predicate` returns True in a forked copy of this process."""
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(Exception):
            status = not predicate()
        os._exit(status)
    return os.waitpid(pid, 0)[1] == 0
