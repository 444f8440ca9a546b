"""Time and peak memory of each phase of a step.

On CUDA the peaks come from the allocator, reset for each phase, minus the memory that a sleeping rollout
engine has freed but the allocator still counts (`absent_bytes`). On a CPU there is no allocator to ask.
`LiveTensors` instead counts the bytes of the storages returned by operators and compiled code, under another
key (`peak_live_tensor_bytes`) because the two are not comparable: it sees neither temporaries inside of an
operator nor fragmentation. It reports the peak of a step without LiveTensors; see `find_overwritten_storage`.
"""

import contextlib
import functools
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._C._dynamo import guards
from torch.autograd.graph import _engine_run_backward
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from abrun.processes import progress

COMPILING = "compile"  # not a phase: its seconds are part of other phases

aten: Any = torch.ops.aten
# Code that wraps dispatch modes
WRAPPERS = tuple(f"{Path(torch.__file__).parent}/{name}" for name in ("_compile.py", "_dynamo/"))
# Autograd's C++ code calls these operators only while a dispatch mode is entered. Otherwise it overwrites
# their first operand: a gradient to which another one is added (torch/csrc/autograd/input_buffer.cpp), or
# new zeros (`isTensorSubclassLike` in torch/csrc/autograd/FunctionsManual.cpp and the backward passes of
# indexing).
ALLOCATES_WHILE_WATCHED = frozenset(
    {
        aten.add.Tensor,
        aten.index_add.default,
        aten.index_fill.int_Tensor,
        aten.index_put.default,
        aten.masked_scatter.default,
        aten.put.default,
        aten.scatter.src,
        aten.scatter_add.default,
    }
)
# Position of the argument `accumulate`. If True, the operator adds to new zeros, else it copies a gradient.
ACCUMULATES = {aten.index_put.default: 3, aten.put.default: 3}


def find_overwritten_storage(func: Any, args: tuple[Any, ...], result: Any) -> torch.UntypedStorage | None:
    """Return the storage that `result` would overwrite if no dispatch mode were entered.

    None if `func` allocates its result in either case. Call it from `__torch_dispatch__`. Autograd overwrites
    an operand only if nothing else refers to it. The caller can detect this: the operand's storage is then
    freed immediately after the call.
    """
    if func not in ALLOCATES_WHILE_WATCHED or torch.is_grad_enabled() or not _is_called_by_autograd():
        return None
    if any(isinstance(operand, DTensor) for operand in (*args, result)):
        return None
    if func in ACCUMULATES and not any(args[ACCUMULATES[func] :]):
        return None
    storage = args[0].untyped_storage()
    # Sizes differ if the operand was expanded.
    return storage if storage.nbytes() == result.untyped_storage().nbytes() else None


def _is_called_by_autograd() -> bool:
    """Return True if autograd's C++ code called the operator, rather than Python code in a backward pass."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (
        frame.f_code.co_name == "__torch_dispatch__" or frame.f_code.co_filename.startswith(WRAPPERS)
    ):
        frame = frame.f_back
    return frame is not None and frame.f_code is _engine_run_backward.__code__


@dataclass(slots=True)
class PendingStorage:
    """A storage that replaces another one if that is freed before anything else is counted."""

    overwritten_key: int  # key of the storage that it may replace
    storage: "weakref.ref[torch.UntypedStorage]"
    live_bytes: int  # before it was made


class LiveTensors(TorchDispatchMode):
    """Dispatch mode that counts every storage an operator returns until it is freed.

    It also counts the storages of compiled code that was loaded after the first LiveTensors was made.
    `follow` adds tensors made outside of the mode (parameters, optimizer state). A storage that is emptied
    and refilled by resizing, as FSDP does with gathered parameters, counts while it is filled. `on_change` is
    called with the key of a storage and the number of bytes by which it has grown.
    """

    def __init__(self) -> None:
        super().__init__()
        # Inductor's code imports the function from this module when it is loaded.
        guards._empty_strided_cpu = _empty_strided  # pyright: ignore[reportAttributeAccessIssue]
        self.on_change: Callable[[int, int], None] = lambda storage, num_bytes: None
        self.live_bytes = 0
        self._peak_bytes = 0
        self._pending: PendingStorage | None = None
        self._counted: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}  # storage -> bytes

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True; otherwise torch.compile would silently compile nothing while the mode is entered."""
        return True

    def __enter__(self) -> "LiveTensors":
        resize = torch.UntypedStorage.resize_

        @functools.wraps(resize)
        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._count(storage)
            return result

        self._resizing = patch.object(torch.UntypedStorage, "resize_", resized)
        self._resizing.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._resizing.stop()

    def follow(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._count((tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in ALLOCATES_WHILE_WATCHED and (overwritten := find_overwritten_storage(func, args, result)):
            self._settle()
            self._pending = PendingStorage(
                overwritten._cdata, weakref.ref(result.untyped_storage()), self.live_bytes
            )
        elif type(result) is Tensor and not kwargs:  # nearly every call
            self._count(result.untyped_storage())
        else:
            # Include `out`: FSDP refills emptied storages by an operator that returns nothing.
            leaves = tree_leaves((result, kwargs.get("out")))
            self.follow(leaf for leaf in leaves if isinstance(leaf, Tensor))
        return result

    @property
    def peak_bytes(self) -> int:
        self._settle()
        return self._peak_bytes

    def reset_peak(self) -> None:
        """Start a new peak from the storages that live now, without those emptied by resizing since."""
        self._settle()
        for reference, _ in list(self._counted.values()):
            storage = reference()
            if storage is not None:
                self._count(storage)
        self._peak_bytes = self.live_bytes

    def _count(self, storage: torch.UntypedStorage) -> None:
        if self._pending is not None:
            self._settle()
        known = self._counted.get(storage._cdata)
        if known is None or known[1] != storage.nbytes():
            self._add(storage, self.live_bytes)

    def _add(self, storage: torch.UntypedStorage, live_bytes: int) -> None:
        """Count `storage`, which was made or resized when `live_bytes` were alive."""
        key, num_bytes = storage._cdata, storage.nbytes()
        reference, counted = self._counted.get(key) or (weakref.ref(storage, lambda _: self._forget(key)), 0)
        self._counted[key] = reference, num_bytes
        self.live_bytes += num_bytes - counted
        self._peak_bytes = max(self._peak_bytes, live_bytes + num_bytes - counted)
        if num_bytes != counted:
            self.on_change(key, num_bytes - counted)

    def _forget(self, key: int) -> None:
        num_bytes = self._counted.pop(key)[1]
        self.live_bytes -= num_bytes
        self.on_change(key, -num_bytes)
        if self._pending is not None and self._pending.overwritten_key == key:
            self._pending.live_bytes = self.live_bytes  # the predecessor was overwritten
            self._settle()

    def _settle(self) -> None:
        """Count the pending storage as new memory: its predecessor has not been freed."""
        pending, self._pending = self._pending, None
        storage = pending.storage() if pending else None
        if pending and storage is not None:
            self._add(storage, pending.live_bytes)


def _empty_strided(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate for compiled code by an operator, which dispatch modes see; its own allocator is invisible."""
    return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


class Phases:
    """Timer and memory meter for the phases of a step, on one rank.

    Usage: `with phases("logprobs"): ...` any number of times a step, then `phases.collect()`. On a CPU, every
    phase first asks `resident` for the tensors that live between steps, because a resumed run makes its
    optimizer state outside of any phase.
    """

    def __init__(
        self,
        device: torch.device,
        resident: Callable[[], Iterable[Tensor]] = lambda: (),
        *,
        compiles: bool = False,
    ) -> None:
        self._device = device
        self.tracker = None if device.type == "cuda" else LiveTensors()
        self._residents = [resident]
        self._initial_seconds = {COMPILING: 0.0} if compiles else {}  # keys that every step reports
        self._seconds: dict[str, float] = dict(self._initial_seconds)
        self._peaks: dict[str, int] = {}
        self._num_retries = 0
        self.absent_bytes = 0  # freed by a sleeping rollout engine, but still counted by the allocator
        self._started = time.perf_counter()
        self._memory_label = ""  # key of the peak that is being measured
        self.on_memory_label: Callable[[str], None] = lambda label: None  # called when the label changes
        self.interrupted: str | None = None  # the innermost phase that raised an error
        if compiles:
            self._follow_compilers()

    @contextlib.contextmanager
    def __call__(self, phase: str, *, memory: bool = True, in_every_step: bool = True) -> Iterator[None]:
        """Time `phase`, and record its memory peak if `memory`."""
        progress.report(phase, in_every_step=in_every_step)
        start = time.perf_counter()
        try:
            with self._measured(phase) if memory else contextlib.nullcontext():
                yield
        except BaseException:
            # The innermost phase is the first to handle the error.
            self.interrupted = self.interrupted or (
                self._memory_label if memory and self._memory_label else phase
            )
            raise
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    @contextlib.contextmanager
    def _measured(self, phase: str) -> Iterator[None]:
        """Record the peak of the block, even if it ends in an error such as out of memory."""
        self._memory_label = phase
        if self.tracker is None:
            torch.cuda.synchronize(self._device)
        else:
            self.tracker.follow(self.resident_tensors())
        self._start_peak(phase)
        try:
            with self.tracker or contextlib.nullcontext():
                yield
            if self.tracker is None:
                torch.cuda.synchronize(self._device)
        finally:
            self._end_peak()

    def label_memory(self, name: str) -> None:
        """Record the memory peak under `name` from here on, until the current phase ends."""
        if self.tracker is None:
            torch.cuda.synchronize(self._device)
        self._end_peak()
        self._start_peak(name)

    def _start_peak(self, label: str) -> None:
        if self.tracker is None:
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self.tracker.reset_peak()
        self._memory_label = label
        self.on_memory_label(label)

    def _end_peak(self) -> None:
        if self.tracker is None:
            allocated, reserved = torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved
            self._record_peak("peak_allocated_bytes", allocated(self._device) - self.absent_bytes)
            self._record_peak("peak_reserved_bytes", reserved(self._device) - self.absent_bytes)
        else:
            self._record_peak("peak_live_tensor_bytes", self.tracker.peak_bytes)

    def add_resident(self, resident: Callable[[], Iterable[Tensor]]) -> None:
        """Add a source of tensors that live between steps, such as a reference's weights."""
        self._residents.append(resident)

    def resident_tensors(self) -> list[Tensor]:
        """Return the tensors that live on the device between steps."""
        return [tensor for resident in self._residents for tensor in resident()]

    def collect(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return seconds (`timing/train/...`) and memory (`memory/...`) since the last call."""
        now = time.perf_counter()
        seconds = {f"timing/train/{phase}_s": value for phase, value in self._seconds.items()}
        seconds["timing/train/total_step_time_s"] = now - self._started
        peaks = {key: float(value) for key, value in (self._peaks | self._fragmentation()).items()}
        self._seconds, self._peaks, self._started = dict(self._initial_seconds), {}, now
        return seconds, peaks

    def _follow_compilers(self) -> None:
        """Add the time of torch.compile, in forward and backward passes, to the counter COMPILING."""
        from torch._dynamo.callback import on_compile_end, on_compile_start

        began = time.perf_counter()

        @on_compile_start
        def begin(_: object) -> None:
            nonlocal began
            began = time.perf_counter()

        @on_compile_end
        def end(_: object) -> None:
            self._seconds[COMPILING] += time.perf_counter() - began

    def _fragmentation(self) -> dict[str, int]:
        """Return how often the allocator had to free its cache, and the idle bytes of split blocks."""
        if self.tracker is not None:
            return {}
        counters = torch.cuda.memory_stats(self._device)
        previous_retries, self._num_retries = self._num_retries, counters["num_alloc_retries"]
        return {
            "memory/allocator_retries": self._num_retries - previous_retries,
            "memory/inactive_bytes": counters["inactive_split_bytes.all.current"],
        }

    def _record_peak(self, kind: str, num_bytes: int) -> None:
        key = f"memory/{self._memory_label}/{kind}"
        self._peaks[key] = max(self._peaks.get(key, 0), num_bytes)
