"""Transfer of weights from a rank to its engine processes, in chunks.

On other devices they form a process group of their own, with NCCL on GPUs and gloo on CPUs. On the rank's own
GPU, where NCCL allows no second process, they share a buffer. An engine first reports that it is ready for a
chunk, so that no process waits in a collective for a failed one, and no chunk overwrites another.
"""

import ctypes
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from abrun.trainer.backends.ranks import COLLECTIVE_TIMEOUT

CHUNK_BYTES = 256 << 20
STORE, FIRST = "weights", 0  # file name in the shared folder; rank of the sender
ALIGNMENT = 256  # bytes, of a tensor in a shared buffer
HANDLE_BYTES = 64  # CUipcMemHandle
ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag of cuIpcOpenMemHandle

ChunkMetadata = list[tuple[str, torch.dtype, torch.Size]]
Chunk = list[tuple[str, Tensor]]


class Transfer(Protocol):
    """One process's end of a transfer of chunks. A subclass inherits steps that it does not need."""

    def prepare(self, chunk: Chunk) -> Any:
        """Return the message about a chunk that the engine processes need for `receive`."""
        ...

    def send(self, chunk: Chunk) -> None:
        """Send a chunk whose message the engine processes have been sent."""

    def receive(self, message: Any) -> Chunk:
        """Return a chunk, given its message. The sender may reuse its memory afterwards."""
        ...

    def release(self) -> None:
        """Free the sender's memory after the last chunk."""

    def abort(self) -> None:
        """Abort a pending transfer on GPUs; the processes would wait for it otherwise."""


class GroupTransfer(Transfer):
    """Transfer over a process group. The constructor is collective."""

    def __init__(self, folder: Path, rank: int, size: int, device: torch.device, patience_s: float) -> None:
        store = FileStore(str(folder / STORE), size)
        self._device = device
        library: Any = dist  # whose stubs lack the classes of groups
        if device.type == "cuda":
            options = library.ProcessGroupNCCL.Options()
            options._timeout = COLLECTIVE_TIMEOUT  # ends this process; the wait for an answer ends earlier
            self._group: Any = library.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = library.ProcessGroupGloo(store, rank, size, timedelta(seconds=patience_s))
        self._broadcast(torch.zeros(1, dtype=torch.uint8, device=device))  # NCCL connects on first use

    def prepare(self, chunk: Chunk) -> ChunkMetadata:
        return [(name, tensor.dtype, tensor.shape) for name, tensor in chunk]

    def send(self, chunk: Chunk) -> None:
        for _, tensor in chunk:
            self._broadcast(_view_bytes(tensor))

    def receive(self, message: ChunkMetadata) -> Chunk:
        chunk = [
            (name, torch.empty(shape, dtype=dtype, device=self._device)) for name, dtype, shape in message
        ]
        for _, tensor in chunk:
            self._broadcast(_view_bytes(tensor))
        return chunk

    def abort(self) -> None:
        if self._device.type == "cuda":
            self._group.abort()

    def _broadcast(self, raw: Tensor) -> None:
        if raw.numel():
            self._group.broadcast(raw, FIRST).wait()


class SharedBufferTransfer(Transfer):
    """Transfer through a buffer of GPU memory that two processes on the same GPU share.

    The driver allocates the buffer, because torch would leave its reference counts in shared memory if it
    were killed, and cannot share every kind of segment. The buffer lives only during a sync.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._buffer: Tensor | None = None  # the sender's
        self._handle = b""

    def prepare(self, chunk: Chunk) -> tuple[bytes, ChunkMetadata]:
        metadata = [(name, tensor.dtype, tensor.shape) for name, tensor in chunk]
        num_bytes = _buffer_bytes(metadata)
        if self._buffer is None or num_bytes > self._buffer.numel():
            self.release()
            self._buffer = self._allocate(num_bytes)
        for (_, tensor), place in zip(chunk, _places(self._buffer, metadata), strict=True):
            place.copy_(tensor.detach())
        torch.cuda.synchronize(self._device)
        return self._handle, metadata

    def receive(self, message: tuple[bytes, ChunkMetadata]) -> Chunk:
        handle, metadata = message
        address = ctypes.c_uint64()
        torch.cuda.synchronize(self._device)  # makes the device's context current
        by_value, flags = _Handle.from_buffer_copy(handle), ctypes.c_uint(ENABLE_PEER_ACCESS)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), by_value, flags)
        buffer = _view_address(address.value, _buffer_bytes(metadata), self._device)
        places = _places(buffer, metadata)
        chunk = [(name, place.clone()) for (name, _, _), place in zip(metadata, places, strict=True)]
        torch.cuda.synchronize(self._device)
        # Closed before the answer to this chunk: the sender may then free the buffer.
        self._call("cuIpcCloseMemHandle", address)
        return chunk

    def release(self) -> None:
        if self._buffer is not None:
            address, self._buffer = ctypes.c_uint64(self._buffer.data_ptr()), None
            self._call("cuMemFree_v2", address)

    def _allocate(self, num_bytes: int) -> Tensor:
        address, handle = ctypes.c_uint64(), _Handle()
        torch.cuda.synchronize(self._device)  # makes the device's context current
        try:
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        except RuntimeError:
            torch.cuda.empty_cache()  # torch's allocator may hold what is free
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        self._handle = bytes(handle.reserved)
        return _view_address(address.value, num_bytes, self._device)

    def _call(self, function: str, *arguments: Any) -> None:
        """Call a function of the driver. Raises RuntimeError if it fails."""
        status = getattr(self._driver, function)(*arguments)
        if status:
            raise RuntimeError(f"{function} failed with CUDA error {status}")


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


class _Memory:
    """Memory of the driver, as torch accepts it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _view_address(address: int, num_bytes: int, device: torch.device) -> Tensor:  # [num_bytes] uint8
    return torch.as_tensor(_Memory(address, num_bytes), device=device)


def _places(buffer: Tensor, metadata: ChunkMetadata) -> Iterator[Tensor]:
    """Yield a view of the buffer for each tensor, one after the other."""
    start = 0
    for _, dtype, shape in metadata:
        num_bytes = _num_bytes(dtype, shape)
        yield buffer[start : start + num_bytes].view(dtype).view(shape)
        start += _aligned(num_bytes)


def _num_bytes(dtype: torch.dtype, shape: torch.Size) -> int:
    return shape.numel() * dtype.itemsize


def _buffer_bytes(metadata: ChunkMetadata) -> int:
    """Return the size of a buffer for this chunk, which most others fit too."""
    return max(CHUNK_BYTES, sum(_aligned(_num_bytes(dtype, shape)) for _, dtype, shape in metadata))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def split_into_chunks(weights: Iterator[tuple[str, Tensor]]) -> Iterator[Chunk]:
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


def _view_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
