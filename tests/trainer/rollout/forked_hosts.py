"""Engine hosts as forks of the tests' fork server, which has done their imports."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, TextIO

from tests.spawn import processes


class ForkedHost:
    """What a launcher uses of `subprocess.Popen`, of a process of the fork server."""

    def __init__(self, process: Any) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout_s: float | None = None) -> int:
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("engine host", timeout_s or 0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


started: list[ForkedHost] = []


def start_forked_host(
    argv: Sequence[str], env: Mapping[str, str], *, pass_fds: Sequence[int], stdout: TextIO, **_: Any
) -> ForkedHost:
    """Start the stand-in's host as `start_process` does, except for the signal at this process's death."""
    socket_fd, run_dir = argv[-2:]
    assert [int(socket_fd)] == list(pass_fds)
    with socket.socket(fileno=os.dup(int(socket_fd))) as listener, Connection(os.dup(stdout.fileno())) as log:
        process = processes.Process(target=_serve, args=(listener, log, dict(env), run_dir), daemon=True)
        process.start()
    started.append(ForkedHost(process))
    return started[-1]


def _serve(listener: socket.socket, log: Connection, env: dict[str, str], run_dir: str) -> None:
    from tests.trainer.rollout import standin

    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    for standard_fd in (1, 2):
        os.dup2(log.fileno(), standard_fd)
    sys.argv = ["tests.trainer.rollout.standin", "host", str(listener.detach()), run_dir]
    standin.main()
