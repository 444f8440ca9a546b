"""`python -m abrun.rollout.vllm.server FD`: a process of an engine on its own devices.

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
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from abrun.backends.ranks import COLLECTIVE_TIMEOUT
from abrun.errors import AbrunError
from abrun.recipe.run import OwnRunConfig
from abrun.rollout.vllm.instance import VllmInstance
from abrun.rollout.vllm.transfer import Transfer

ALIVE, ANSWER, FAILED = "alive", "answer", "failed"
BEAT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """The first message to an engine process."""

    config: dict[str, Any]  # of the run
    end_ids: frozenset[int]
    folder: Path  # shared by all engine processes of the run
    engine: int  # index of the engine
    rank: int  # index of the process in its engine
    number: int  # index of the process in all engines
    num_processes: int
    patience_s: float  # timeout of the processes for each other


class EngineServer:
    """Executes the requests of the first rank; a request is the name of a public method and its arguments."""

    def __init__(self, channel: Connection) -> None:
        self._channel = channel
        self._last_sent_s = 0.0
        setup: EngineSetup = channel.recv()
        self._setup = setup
        config = OwnRunConfig.model_validate(setup.config)
        on_gpu, size = config.cluster.gpus_per_node > 0, config.rollout.tensor_parallel
        self._device = torch.device("cuda", setup.rank) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self._device)
        else:
            torch.set_num_threads(1)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=FileStore(str(setup.folder / f"engine-{setup.engine}"), size),
            rank=setup.rank,
            world_size=size,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=self._device if on_gpu else None,
        )
        self._vllm = VllmInstance(config, self._device, size, setup.end_ids, self._beat)

    def connect(self) -> None:
        """Join the process group over which weights are sent."""
        setup = self._setup
        self._transfer = Transfer(
            setup.folder, 1 + setup.number, 1 + setup.num_processes, self._device, setup.patience_s
        )

    def generate(self, requests: list[tuple[list[int], int]], temperature: float | None) -> bytes:
        """Return a pickled list with a completion for each (prompt, seed); [] unless this is rank 0.

        Pickled here, because the socket would transfer tensors through shared memory.
        """
        completions = self._vllm.generate(requests, temperature)
        return pickle.dumps(completions if self._setup.rank == 0 else [])

    def load(self) -> None:
        """Load the policy's weights: for each chunk, answer when ready, read its metadata and receive it."""
        self._vllm.load(self._weights())

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        while True:
            self._channel.send((ANSWER, None))
            metadata = self._channel.recv()
            if not metadata:
                return
            yield from self._transfer.receive(metadata)

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._last_sent_s > BEAT_S:
            self._last_sent_s = now
            self._channel.send((ALIVE, None))


def serve(channel: Connection) -> None:
    """Serve requests until the first rank closes the socket, or a request fails."""
    try:
        server = EngineServer(channel)
        channel.send((ANSWER, None))
        while True:
            name, *arguments = channel.recv()
            channel.send((ANSWER, getattr(server, name)(*arguments)))
    except AbrunError as error:
        channel.send((FAILED, str(error)))


def main() -> None:
    # Only the trainer handles these signals: it ends this process after saving a checkpoint.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    with Connection(int(sys.argv[1])) as channel:
        first_rank_ended = EOFError, BrokenPipeError, ConnectionResetError
        with contextlib.suppress(*first_rank_ended):
            serve(channel)
    os._exit(0)  # also ends the threads of the engine


if __name__ == "__main__":
    main()
