"""`python -m abrun.train.forked FD MODULE...`: imports modules once, for all runs that begin as its copies.

A copy is a run's agent and, while that is one thread yet, forks what will be its ranks.
"""

import atexit
import gc
import importlib
import os
import runpy
import socket
import sys

from abrun.processes import forks
from abrun.processes.output import outlive_output
from abrun.train import agent


def main() -> None:
    asked, *modules = sys.argv[1:]
    gc.disable()  # see abrun.train.startup
    for module in " ".join(modules).split():
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)
    words = forks.serve(socket.socket(fileno=int(asked)), _may_fork)
    # From here on this is a copy.
    outlive_output()
    sys.argv = words
    spares: list[forks.Spare] = []
    for _ in range(agent.asked_for().ranks):
        spares.append(forks.Spare(_run, spares))
    status = agent.main(lambda *rank: spares.pop(0).become(*rank))
    os._exit(status)  # an agent holds nothing that could be lost, and what has been imported ends slowly


def _may_fork() -> bool:
    """Whether a GPU's driver can come up in this copy, as it cannot where it has in the server."""
    import torch

    return not torch.cuda._is_in_bad_fork()


def _run(words: list[str]) -> None:
    """As `python -m` does."""
    import numpy as np

    np.random.seed()  # which was at its import; Python's own is by the fork
    sys.argv = words
    sys.modules.pop(f"{words[0]}.__main__", None)  # else a warning says in the run's log that it is there
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
