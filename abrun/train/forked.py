"""`python -m abrun.train.forked FD MODULE...`: imports modules once, for all runs that begin as its copies.

A copy is a run's agent and, while that is one thread yet, forks what will be its ranks.
"""

import atexit
import gc
import importlib
import os
import runpy
import signal
import socket
import sys
from collections.abc import Mapping

from abrun.processes import ForkedChild, fork_server
from abrun.processes.output import ignore_output_errors
from abrun.train import agent


def main() -> None:
    asked, *modules = sys.argv[1:]
    gc.disable()  # see abrun.train.startup
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)
    words = fork_server.serve_forks(socket.socket(fileno=int(asked)), _may_fork)
    # From here on this is a copy.
    ignore_output_errors()
    sys.argv = words
    status = agent.main(start_copy)
    os._exit(status)  # an agent holds nothing that could be lost, and what has been imported ends slowly


def start_copy(words: list[str], env: Mapping[str, str], inherited: list[int]) -> ForkedChild:
    """A rank; the open files it inherits are among this process's, all of which it has."""

    def run() -> None:
        import numpy as np

        os.environ.clear()
        os.environ.update(env)
        np.random.seed()  # which was at its import; Python's own is by the fork
        sys.argv = words
        sys.modules.pop(f"{words[0]}.__main__", None)  # else a warning says in the run's log that it is there
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)

    return fork_server.fork_child(run, death_signal=signal.SIGKILL)


def _may_fork() -> bool:
    """Whether a GPU's driver can come up in this copy, as it cannot where it has in the server."""
    import torch

    return not torch.cuda._is_in_bad_fork()


if __name__ == "__main__":
    main()
