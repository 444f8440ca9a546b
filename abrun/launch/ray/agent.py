"""An actor on each node of a run: starts the agent of the node's ranks, and tells how it is."""

import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

from abrun.launch.node import free_port
from abrun.processes import Popen, find_descendants, kill_all, start_process

MOST_TOLD = 1 << 16  # bytes


class NodeAgent:
    """Its methods return at once. When the actor dies, the agent is asked to save a checkpoint and end."""

    def __init__(self) -> None:
        self._process: Popen | None = None
        self._output = tempfile.TemporaryFile("a+b")  # noqa: SIM115

    def where(self) -> tuple[str, str, int]:
        """Host name, address in the cluster, and a port for the ranks to meet at."""
        from ray.util import get_node_ip_address  # pyright: ignore[reportMissingImports]

        return socket.gethostname(), get_node_ip_address(), free_port()

    def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
        self._process = start_process(
            argv,
            {**os.environ, **env},
            death_signal=signal.SIGTERM,
            cwd=cwd,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # else Ray kills it with the actor
        )

    def poll(self, position: int) -> tuple[int | None, bytes]:
        """The exit status once it has ended, and what it has printed from a position on."""
        status = self._process.poll() if self._process else None
        self._output.seek(position)
        return status, self._output.read(MOST_TOLD)

    def stop(self, kill: bool) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        if not kill:
            self._process.terminate()
            return
        pid = self._process.pid
        kill_all(lambda: find_descendants(pid))
        self._process.kill()
