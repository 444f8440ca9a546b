"""Transfer of weights from the first rank of a run to its engine processes.

They form a process group of their own, with NCCL on GPUs and gloo on CPUs. Weights are sent in chunks. An
engine first reports that it is ready for a chunk, so that no process waits in a collective for a failed one.
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
STORE, FIRST = "weights", 0  # file name in the shared folder; rank of the sender

ChunkMetadata = list[tuple[str, torch.dtype, torch.Size]]


class Transfer:
    """One process's end of the transfer. The constructor is collective."""

    def __init__(self, folder: Path, rank: int, size: int, device: torch.device, patience_s: float) -> None:
        store = FileStore(str(folder / STORE), size)
        self._device = device
        on_gpu, timeout = device.type == "cuda", timedelta(seconds=patience_s)
        self._group: Any = (
            _make_nccl_group(store, rank, size) if on_gpu else _make_gloo_group(store, rank, size, timeout)
        )
        self._broadcast(torch.zeros(1, dtype=torch.uint8, device=device))  # NCCL connects on first use

    def send(self, chunk: list[tuple[str, Tensor]]) -> None:
        """Send a chunk; the engine processes must call `receive` with its `describe_chunk`."""
        for _, tensor in chunk:
            self._broadcast(_view_bytes(tensor.detach().contiguous()))

    def receive(self, metadata: ChunkMetadata) -> Iterator[tuple[str, Tensor]]:
        """Receive a chunk, then yield its tensors."""
        chunk = [
            (name, torch.empty(shape, dtype=dtype, device=self._device)) for name, dtype, shape in metadata
        ]
        for _, tensor in chunk:
            self._broadcast(_view_bytes(tensor))
        yield from chunk

    def abort(self) -> None:
        """Abort a pending transfer on GPUs; the processes would wait for it otherwise."""
        if self._device.type == "cuda":
            self._group.abort()

    def _broadcast(self, raw: Tensor) -> None:
        if raw.numel():
            self._group.broadcast(raw, FIRST).wait()


def split_into_chunks(weights: Iterator[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Group the weights into chunks of at least CHUNK_BYTES."""
    chunk, num_bytes = [], 0
    for name, tensor in weights:
        chunk.append((name, tensor))
        num_bytes += tensor.nbytes
        if num_bytes >= CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk


def describe_chunk(chunk: list[tuple[str, Tensor]]) -> ChunkMetadata:
    """Return name, dtype and shape of each tensor, which the receiver needs."""
    return [(name, tensor.dtype, tensor.shape) for name, tensor in chunk]


def _view_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _make_nccl_group(store: Any, rank: int, size: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = COLLECTIVE_TIMEOUT  # ends this process; the wait for an answer times out earlier
    return dist.ProcessGroupNCCL(store, rank, size, options)  # pyright: ignore[reportAttributeAccessIssue]


def _make_gloo_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)  # pyright: ignore[reportAttributeAccessIssue]
