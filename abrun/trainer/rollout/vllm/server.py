"""`python -m abrun.trainer.rollout.vllm.server FD`: a process of an engine on its own devices.

It serves the first rank of the run over the inherited socket FD, and ends with it. Requests: see
`EngineServer`. Answers: (ALIVE, None) as a heartbeat, (ANSWER, value), or (FAILED, message).
"""

import contextlib
import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from abrun.errors import AbrunError
from abrun.recipe.run import OwnRunConfig
from abrun.trainer.backends.ranks import COLLECTIVE_TIMEOUT, limit_memory
from abrun.trainer.rollout.vllm.instance import VllmInstance
from abrun.trainer.rollout.vllm.transfer import GroupTransfer, SharedBufferTransfer, Transfer

ALIVE, ANSWER, FAILED = "alive", "answer", "failed"
BEAT_S = 1.0
CLIENT_ENDED = EOFError, BrokenPipeError, ConnectionResetError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """The first message to an engine process."""

    config: dict[str, Any] = field(default_factory=dict)  # of the run; an engine host has its own
    end_ids: frozenset[int] = frozenset()
    folder: Path  # shared by all engine processes of the run
    engine: int = 0  # index of the engine
    rank: int = 0  # index of the process in its engine
    number: int = 0  # index of the process in all engines
    num_processes: int = 1
    shares_device: bool = False  # with the client
    log: Path | None = None  # of an engine host: into which it prints during this run
    patience_s: float = 0.0  # timeout of the processes for each other


class EngineServer:
    """Executes the requests of a client; a request is the name of a public method and its arguments.

    The client is the first rank of a run, or, of an engine host, each rank of one run after the other.
    """

    def __init__(self, channel: Connection, setup: EngineSetup, vllm: VllmInstance) -> None:
        self._channel, self._setup, self._vllm = channel, setup, vllm
        self._device = vllm.device
        self._last_sent_s = 0.0
        vllm.begin_run(setup.end_ids, self._beat)

    def connect(self) -> None:
        """Join the transfer of weights."""
        setup = self._setup
        self._transfer: Transfer = (
            SharedBufferTransfer(self._device)
            if setup.shares_device
            else GroupTransfer(
                setup.folder, 1 + setup.number, 1 + setup.num_processes, self._device, setup.patience_s
            )
        )

    def generate(self, requests: list[tuple[list[int], int]], temperature: float | None) -> bytes:
        """Return a pickled list with a completion for each (prompt, seed); [] unless this is rank 0.

        Pickled here, because the socket would transfer tensors through shared memory.
        """
        completions = self._vllm.generate(requests, temperature)
        return pickle.dumps(completions if self._setup.rank == 0 else [])

    def load(self) -> None:
        """Load the policy's weights: for each chunk, answer when ready, read its message and receive it."""
        self._vllm.load(self._weights())

    def sleep(self) -> None:
        """Free device memory; see VllmInstance."""
        self._vllm.sleep()

    def memory_bytes(self) -> tuple[int, int]:
        """Return how much device memory the engine needs to wake, and has now; see VllmInstance."""
        return self._vllm.memory_bytes()

    def wake(self) -> bool:
        """Reclaim memory for weights; see VllmInstance."""
        return self._vllm.wake()

    def finish(self) -> None:
        """End the run. An engine host then serves the next one."""
        self._vllm.end_run()

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        while True:
            self._channel.send((ANSWER, None))
            message = self._channel.recv()
            if not message:
                return
            yield from self._transfer.receive(message)

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._last_sent_s > BEAT_S:
            self._last_sent_s = now
            self._channel.send((ALIVE, None))


def serve(channel: Connection, server: EngineServer) -> bool:
    """Serve requests until the run has finished. Return False if its client ends earlier."""
    try:
        channel.send((ANSWER, None))
        while True:
            name, *arguments = channel.recv()
            channel.send((ANSWER, getattr(server, name)(*arguments)))
            if name == "finish":
                return True
    except AbrunError as error:
        channel.send((FAILED, str(error)))
    return False


def start_vllm(config: OwnRunConfig, setup: EngineSetup) -> VllmInstance:
    """Start this process's part of an engine. Collective over the processes of the engine."""
    on_gpu, size = config.cluster.gpus_per_node > 0, config.rollout.tensor_parallel
    device = torch.device("cuda", setup.rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        limit_memory(device, config.cluster.runs_per_gpu)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=FileStore(str(setup.folder / f"engine-{setup.engine}"), size),
        rank=setup.rank,
        world_size=size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if on_gpu else None,
    )
    return VllmInstance(config, device, size, setup.end_ids)


def main() -> None:
    # Only the trainer handles these signals: it ends this process after saving a checkpoint.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    with Connection(int(sys.argv[1])) as channel, contextlib.suppress(*CLIENT_ENDED):
        setup: EngineSetup = channel.recv()
        try:
            vllm = start_vllm(OwnRunConfig.model_validate(setup.config), setup)
            serve(channel, EngineServer(channel, setup, vllm))
        except AbrunError as error:
            channel.send((FAILED, str(error)))
    os._exit(0)  # also ends the threads of the engine


if __name__ == "__main__":
    main()
