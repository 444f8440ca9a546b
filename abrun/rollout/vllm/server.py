"""`python -m abrun.rollout.vllm.server FD`: a process of an engine with devices of its own.

It does what the run's first rank asks for, over the socket that it has inherited as FD, and dies with it.
Requests: see `Server`. Answers: (ALIVE, None) now and then, (ANSWER, value), or (FAILED, a line).
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
from abrun.rollout.vllm.instance import Instance
from abrun.rollout.vllm.transfer import Transfer

ALIVE, ANSWER, FAILED = "alive", "answer", "failed"
BEAT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The first thing that a process is told."""

    config: dict[str, Any]  # of the run
    end_ids: frozenset[int]
    folder: Path  # that all processes of the run's engines share
    engine: int  # of them
    rank: int  # among the processes of this engine
    number: int  # among the processes of all engines
    num_processes: int
    patience_s: float  # how long they wait for each other


class Server:
    """What the first rank may ask for: a method's name and its arguments."""

    def __init__(self, channel: Connection) -> None:
        self._channel = channel
        self._spoke_s = 0.0
        setup: Setup = channel.recv()
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
        self._vllm = Instance(config, self._device, size, setup.end_ids, self._beat)

    def connect(self) -> None:
        """Join those that weights are sent to."""
        setup = self._setup
        self._transfer = Transfer(
            setup.folder, 1 + setup.number, 1 + setup.num_processes, self._device, setup.patience_s
        )

    def generate(self, requests: list[tuple[list[int], int]], temperature: float | None) -> bytes:
        """Return a completion for each prompt and its seed, pickled: the engine's first process has them.

        The socket's own pickling would hand over tensors as shared memory.
        """
        completions = self._vllm.generate(requests, temperature)
        return pickle.dumps(completions if self._setup.rank == 0 else [])

    def load(self) -> None:
        """Take the policy's weights: it answers when ready for a chunk, is told which, and receives it."""
        self._vllm.load(self._weights())

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        while True:
            self._channel.send((ANSWER, None))
            described = self._channel.recv()
            if not described:
                return
            yield from self._transfer.receive(described)

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._spoke_s > BEAT_S:
            self._spoke_s = now
            self._channel.send((ALIVE, None))


def serve(channel: Connection) -> None:
    """Do as told until the other side hangs up, or something fails."""
    try:
        server = Server(channel)
        channel.send((ANSWER, None))
        while True:
            name, *arguments = channel.recv()
            channel.send((ANSWER, getattr(server, name)(*arguments)))
    except AbrunError as error:
        channel.send((FAILED, str(error)))


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):  # for the trainer, which ends this one when it has saved
        signal.signal(number, signal.SIG_IGN)
    with Connection(int(sys.argv[1])) as channel:
        gone = EOFError, BrokenPipeError, ConnectionResetError  # the one who asks
        with contextlib.suppress(*gone):
            serve(channel)
    os._exit(0)  # what the engine has started ends with it


if __name__ == "__main__":
    main()
