"""Actor on each node of a run: starts the agent of the node's ranks and reports its state."""

import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

from abrun.experiment.command import find_free_port
from abrun.processes import Popen, find_descendants, kill_all, start_process

MAX_OUTPUT_BYTES = 1 << 16


class NodeAgent:
    """Actor whose methods return at once. When it dies, the agent saves a checkpoint and ends."""

    def __init__(self) -> None:
        self._process: Popen | None = None
        self._output = tempfile.TemporaryFile("a+b")  # noqa: SIM115

    def get_address(self) -> tuple[str, str, int]:
        """Return the host name, the address in the cluster, and a free port where the ranks rendezvous."""
        from ray.util import get_node_ip_address  # pyright: ignore[reportMissingImports]

        return socket.gethostname(), get_node_ip_address(), find_free_port()

    def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
        self._process = start_process(
            argv,
            {**os.environ, **env},
            death_signal=signal.SIGTERM,
            cwd=cwd,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # otherwise Ray kills it with the actor
        )

    def poll(self, position: int) -> tuple[int | None, bytes]:
        """Return the exit status, or None while running, and the output from `position` on."""
        status = self._process.poll() if self._process else None
        self._output.seek(position)
        return status, self._output.read(MAX_OUTPUT_BYTES)

    def stop(self, kill: bool) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        if not kill:
            self._process.terminate()
            return
        pid = self._process.pid
        kill_all(lambda: find_descendants(pid))
        self._process.kill()
