"""`python -m abrun.train.forked FD MODULE...`: imports modules once, for all runs that start as its forks.

Each fork becomes the agent of a run. While it has only one thread, it forks the processes of its ranks.
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
    socket_fd, *modules = sys.argv[1:]
    gc.disable()  # as in abrun.train.startup
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)
    arguments = fork_server.serve_forks(socket.socket(fileno=int(socket_fd)), _can_fork)
    # From here on this is a copy.
    ignore_output_errors()
    sys.argv = arguments
    status = agent.main(start_copy)
    os._exit(status)  # the agent has nothing to save, and a regular exit is slow after large imports


def start_copy(arguments: list[str], env: Mapping[str, str], inherited: list[int]) -> ForkedChild:
    """Start a rank as a fork of this process, which already has the inherited files open."""

    def run() -> None:
        import numpy as np

        os.environ.clear()
        os.environ.update(env)
        np.random.seed()  # NumPy seeded itself before the fork; Python reseeds its own generator
        sys.argv = arguments
        sys.modules.pop(f"{arguments[0]}.__main__", None)  # otherwise runpy warns in the log of the run
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)

    return fork_server.fork_child(run, death_signal=signal.SIGKILL)


def _can_fork() -> bool:
    """Return True if CUDA can be initialised in this fork; False if the server has initialised it."""
    import torch

    return not torch.cuda._is_in_bad_fork()


if __name__ == "__main__":
    main()
