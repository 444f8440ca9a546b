"""The weights' way from the first rank of a run to its engine processes.

They are a process group of their own, over NCCL between GPUs and over gloo between CPU cores, beside those
that trainer and engines have. Weights go in chunks: an engine first says that it is ready for one, so that
nobody waits in a collective for one that has failed.
"""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from abrun.backends.ranks import COLLECTIVE_TIMEOUT

CHUNK_BYTES = 256 << 20
STORE, FIRST = "weights", 0  # a file in the folder that the processes share; the rank that sends

Described = list[tuple[str, torch.dtype, torch.Size]]


class Transfer:
    """One process's part in it. Making one is collective."""

    def __init__(self, folder: Path, rank: int, size: int, device: torch.device, patience_s: float) -> None:
        store = FileStore(str(folder / STORE), size)
        self._device = device
        on_gpu, timeout = device.type == "cuda", timedelta(seconds=patience_s)
        self._group: Any = _nccl(store, rank, size) if on_gpu else _gloo(store, rank, size, timeout)
        self._broadcast(torch.zeros(1, dtype=torch.uint8, device=device))  # NCCL connects as it is used

    def send(self, chunk: list[tuple[str, Tensor]]) -> None:
        """To those that `receive` what `described` says of it."""
        for _, tensor in chunk:
            self._broadcast(_bytes(tensor.detach().contiguous()))

    def receive(self, described: Described) -> Iterator[tuple[str, Tensor]]:
        """A chunk, all of it received before the first is given."""
        chunk = [
            (name, torch.empty(shape, dtype=dtype, device=self._device)) for name, dtype, shape in described
        ]
        for _, tensor in chunk:
            self._broadcast(_bytes(tensor))
        yield from chunk

    def abort(self) -> None:
        """Give up what is under way, on a GPU: its processes wait for it otherwise."""
        if self._device.type == "cuda":
            self._group.abort()

    def _broadcast(self, raw: Tensor) -> None:
        if raw.numel():
            self._group.broadcast(raw, FIRST).wait()


def chunks(weights: Iterator[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Weights, some at a time."""
    chunk, num_bytes = [], 0
    for name, tensor in weights:
        chunk.append((name, tensor))
        num_bytes += tensor.nbytes
        if num_bytes >= CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk


def described(chunk: list[tuple[str, Tensor]]) -> Described:
    """What has to be known of a chunk to receive it."""
    return [(name, tensor.dtype, tensor.shape) for name, tensor in chunk]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _nccl(store: Any, rank: int, size: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = COLLECTIVE_TIMEOUT  # which ends this process: whoever waits for an answer is sooner
    return dist.ProcessGroupNCCL(store, rank, size, options)  # pyright: ignore[reportAttributeAccessIssue]


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)  # pyright: ignore[reportAttributeAccessIssue]
