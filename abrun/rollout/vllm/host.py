"""`python -m abrun.rollout.vllm.host FD RUN_DIR`: an engine host, whose engine outlives a run.

The launcher starts it for the run in RUN_DIR, and ends it. It serves each rank that connects to the listening
socket FD, one after the other, with requests as in `EngineServer`. It ends with the launcher, and if a
connection ends before its run has finished.
"""

import contextlib
import os
import socket
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from abrun.errors import AbrunError
from abrun.recipe.run import OwnRunConfig
from abrun.rollout.vllm.instance import VllmInstance
from abrun.rollout.vllm.server import (
    CLIENT_ENDED,
    FAILED,
    EngineServer,
    EngineSetup,
    ignore_stop_signals,
    serve,
    start_vllm,
)
from abrun.rollout.vllm.startup import reserves_known_memory
from abrun.runs.files import open_log
from abrun.runs.rundir import RunDir


def serve_runs(listener: socket.socket, config: OwnRunConfig) -> None:
    """Serve one run after the other. Returns when one does not finish. Raises LaunchError."""
    vllm: VllmInstance | None = None
    setup = EngineSetup(folder=Path(listener.getsockname()).parent)
    if reserves_known_memory(config):
        vllm = start_vllm(config, setup)  # while the trainer does its imports and loads its model
        vllm.end_run()
    while True:
        connection, _ = listener.accept()
        with Connection(connection.detach()) as channel, contextlib.suppress(*CLIENT_ENDED):
            run_setup: EngineSetup = channel.recv()
            _print_into(run_setup.log)
            try:
                vllm = vllm or start_vllm(config, setup)
            except AbrunError as error:
                channel.send((FAILED, str(error)))
                return
            if serve(channel, EngineServer(channel, run_setup, vllm)):
                continue
        return


def _print_into(log: Path | None) -> None:
    """Append the output of this process to a run's log."""
    if log is not None:
        with open_log(log) as file:
            for standard_fd in (1, 2):
                os.dup2(file.fileno(), standard_fd)


def main() -> None:
    ignore_stop_signals()
    try:
        config = OwnRunConfig.model_validate(RunDir(Path(sys.argv[2])).record().config)
        serve_runs(socket.socket(fileno=int(sys.argv[1])), config)
    except AbrunError as error:
        print(f"error: {error}", flush=True)
    os._exit(0)  # also ends the threads of the engine


if __name__ == "__main__":
    main()
