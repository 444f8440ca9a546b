"""A fork server for the processes that tests launch: as forks of it, they repeat none of its imports.

`python -m tests.launch.forked FD` is the server. Each process that launches runs has its own. A fork is a
child of the process that asked for it: the server forks twice, and the orphan is adopted. Linux only.
"""

import contextlib
import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from abrun.processes import (
    MODULE_OPTIONS,
    PR_SET_CHILD_SUBREAPER,
    RUN_DIR_VARIABLE,
    Popen,
    adopt_orphans,
    die_with_parent,
    run_to_end,
    start_process,
)
from abrun.runs.files import open_log
from abrun.runs.rundir import RunDir

ANSWER_TIMEOUT_S = 60.0  # the first answer comes after the imports
MAX_ORDER_BYTES = 1 << 17
MODULES = ("abrun.external.run", "abrun.processes.progress", "abrun.recipe.experiment")
ROOM = "/" * 4096  # for the path of a run, in the server's environment


class ForkedChild:
    """The part of `subprocess.Popen` that abrun uses of a run's first process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.01)
        return self.returncode or 0

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class SharedForkServer:
    """Starts `python -m MODULE ARGUMENT...` as forks of one server, which it starts at the first."""

    def __init__(self) -> None:
        self._server: Popen | None = None
        self._num_users = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Adopt the forks of a launch; after the last launch this process adopts no orphans, as before it."""
        with self._lock:
            self._num_users += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1
                if not self._num_users:
                    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0)

    def start(self, run: RunDir, words: Sequence[str], env: Mapping[str, str]) -> Any:
        """Start a run's process, which prints into the run's log."""
        order = {"folder": os.getcwd(), "words": [*words], "environment": {**env}, "parent": os.getpid()}
        with self._lock, open_log(run.log) as output:
            self.start_server()
            adopt_orphans()
            socket.send_fds(self._socket, [json.dumps(order).encode()], [output.fileno()])
            return ForkedChild(int(self._socket.recv(100)))

    def start_server(self) -> None:
        """Start the server, which outlives tests, unless it is there."""
        if self._server and self._server.poll() is None:
            return
        self._socket, server_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(ANSWER_TIMEOUT_S)
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), RUN_DIR_VARIABLE: ROOM}
        with server_socket:
            self._server = start_process(
                [sys.executable, *MODULE_OPTIONS, "tests.launch.forked", str(server_socket.fileno())],
                env,
                death_signal=signal.SIGKILL,
                pass_fds=(server_socket.fileno(),),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )


SHARED_SERVER = SharedForkServer()


def main() -> None:
    for module in MODULES:
        __import__(module)
    read_a_log()
    orders = socket.socket(fileno=int(sys.argv[1]))
    while True:
        message, fds, _, _ = socket.recv_fds(orders, MAX_ORDER_BYTES, 1)
        if not message:
            return
        middle_pid = os.fork()
        if middle_pid == 0:
            if os.fork():
                os._exit(0)
            become(json.loads(message), fds[0], orders)
        os.waitpid(middle_pid, 0)
        os.close(fds[0])


def read_a_log() -> None:
    """The first log takes long to read, and an external run reads seldom what takes long."""
    from abrun.logs import read_log

    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as log:
        log.write('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25}\n')
        log.flush()
        read_log(Path(log.name), "jsonl")


def become(order: dict[str, Any], output: int, orders: socket.socket) -> None:
    """Turn a process that has just been forked into the process that was asked for; does not return."""
    os.setsid()
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while os.getppid() != order["parent"] and time.monotonic() < deadline:
        time.sleep(0.0005)
    die_with_parent(signal.SIGTERM, order["parent"])
    show_run_dir(order["environment"].get(RUN_DIR_VARIABLE, ""))
    with orders:
        orders.send(str(os.getpid()).encode())
    for standard_fd in (1, 2):
        os.dup2(output, standard_fd)
    os.close(output)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    sys.argv = order["words"]
    # A regular exit takes 0.12 CPU seconds, four times what the fork itself does.
    run_to_end(lambda: runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True))


def show_run_dir(run_dir: str) -> None:
    """Write the run directory over the server's in what others read as this process's environment."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = map(int, fields[47:49])  # env_start and env_end of proc(5)
    reserved = f"{RUN_DIR_VARIABLE}={ROOM}".encode()
    position = ctypes.string_at(start, end - start).index(reserved)
    shown = f"{RUN_DIR_VARIABLE}={run_dir}".encode("utf-8", "surrogateescape") + b"\0_="
    ctypes.memmove(start + position, shown.ljust(len(reserved), b"_"), len(reserved))


if __name__ == "__main__":
    main()
