"""A fork server for the processes that tests launch: as forks of it, they repeat none of its imports.

`python -m tests.launch.forked FD` is the server. Each process that launches runs has its own.
"""

import contextlib
import os
import runpy
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from abrun.processes import ForkedChild, adopt_orphans, fork_server, run_to_end
from abrun.runs.rundir import RunDir

IMPORTS_TIMEOUT_S = 60
MODULES = ("abrun.external.__main__", "abrun.processes.progress", "abrun.recipe.experiment")


class SharedForkServer:
    """Starts `python -m MODULE ARGUMENT...` as forks of one server, which it starts at the first."""

    def __init__(self) -> None:
        self._server: fork_server.ForkServer | None = None
        self._env: dict[str, str] = {}
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
                    adopt_orphans(False)

    def start(self, run: RunDir, words: Sequence[str], env: Mapping[str, str]) -> ForkedChild:
        """Start a run's process, which prints into the run's log."""
        with self._lock, run.open_log() as output:
            server = self.find_server()
            changed = {name: env.get(name) for name, _ in self._env.items() ^ env.items()}
            child = server.fork([os.getcwd(), *words], changed, output)
        assert child, "the fork server does not answer"
        return child

    def find_server(self) -> fork_server.ForkServer:
        """Return the server, which outlives tests."""
        if not (self._server and self._server.is_alive):
            self._env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
            self._server = fork_server.ForkServer("tests.launch.forked", [], self._env)
            assert self._server.wait_until_ready(IMPORTS_TIMEOUT_S)
        return self._server


SHARED_SERVER = SharedForkServer()


def main() -> None:
    for module in MODULES:
        __import__(module)
    folder, *sys.argv = fork_server.serve_forks(socket.socket(fileno=int(sys.argv[1])), lambda: True)
    # From here on this is a fork.
    os.chdir(folder)
    # A regular exit takes 0.12 CPU seconds, four times what the fork itself does.
    run_to_end(lambda: runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True))


if __name__ == "__main__":
    main()
