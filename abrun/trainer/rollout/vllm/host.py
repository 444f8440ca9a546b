"""`python -m abrun.trainer.rollout.vllm.host FD RUN_DIR`: an engine host, whose engine outlives a run.

The launcher starts it for the run in RUN_DIR, and ends it. It serves each rank that connects to the listening
socket FD, one after the other, with requests as in `EngineServer`. It ends with the launcher, and if a
connection ends before its run has finished.
"""

import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

from abrun.errors import AbrunError
from abrun.recipe.experiment import parse_stored_own_run
from abrun.recipe.run import OwnRunConfig
from abrun.runs.files import open_log
from abrun.runs.rundir import RunDir
from abrun.trainer.rollout.vllm.instance import VllmInstance
from abrun.trainer.rollout.vllm.server import (
    CLIENT_ENDED,
    FAILED,
    EngineServer,
    EngineSetup,
    serve,
    start_vllm,
)
from abrun.trainer.rollout.vllm.startup import reserves_known_memory

LAST_RUN_S = 40.0  # a run that has lost its launcher takes up to 30 s to save a checkpoint
POLL_S = 0.1


def serve_runs(listener: socket.socket, config: OwnRunConfig, is_serving: threading.Event) -> None:
    """Serve one run after the other. Returns when one does not finish. Raises LaunchError."""
    vllm: VllmInstance | None = None
    setup = EngineSetup(folder=Path(listener.getsockname()).parent)
    if reserves_known_memory(config):
        vllm = start_vllm(config, setup)  # while the trainer does its imports and loads its model
        vllm.end_run()
    gc.collect()
    gc.freeze()  # as in abrun.trainer.loop.startup
    while True:
        connection, _ = listener.accept()
        is_serving.set()
        with Connection(connection.detach()) as channel, contextlib.suppress(*CLIENT_ENDED):
            run_setup: EngineSetup = channel.recv()
            if run_setup.log is not None:  # append the output of this process to the run's log
                with open_log(run_setup.log) as file:
                    for standard_fd in (1, 2):
                        os.dup2(file.fileno(), standard_fd)
            try:
                vllm = vllm or start_vllm(config, setup)
            except AbrunError as error:
                channel.send((FAILED, str(error)))
                return
            if serve(channel, EngineServer(channel, run_setup, vllm)):
                is_serving.clear()
                continue
        return


def end_with_launcher(is_serving: threading.Event) -> None:
    """End this process after SIGTERM, the sign that the launcher has died.

    A run that it serves may sample for its last step before, for LAST_RUN_S.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    # Unlike a handler, this does not wait for the main thread.
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)

    def wait() -> None:
        while reader.recv(1) != bytes([signal.SIGTERM]):
            pass
        deadline = time.monotonic() + LAST_RUN_S
        while is_serving.is_set() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    is_serving = threading.Event()
    end_with_launcher(is_serving)
    try:
        config = parse_stored_own_run(RunDir(Path(sys.argv[2])).record().config)
        serve_runs(socket.socket(fileno=int(sys.argv[1])), config, is_serving)
    except AbrunError as error:
        print(f"error: {error}", flush=True)
    os._exit(0)  # also ends the threads of the engine


if __name__ == "__main__":
    main()
