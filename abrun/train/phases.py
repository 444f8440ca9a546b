"""How long each phase of a step takes, and how much memory it needs at its peak.

On CUDA the peaks are the allocator's own, reset per phase, less what a sleeping rollout engine has given
away, which it counts on (`absent_bytes`). On a CPU there is no allocator to ask:
`LiveTensors` counts the bytes of the storages that the operators and compiled code hand out, under another
key (`peak_live_tensor_bytes`), because the two are not comparable: it sees no temporaries inside an operator
and no fragmentation. It reports the peak of a step that nobody watches: see `overwritten`.
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

COMPILING = "compile"  # no phase: seconds inside of others

aten: Any = torch.ops.aten
WRAPPERS = tuple(f"{Path(torch.__file__).parent}/{name}" for name in ("_compile.py", "_dynamo/"))  # of modes
# Autograd's C++ code calls these only while a dispatch mode is entered. Otherwise it overwrites their first
# operand: a gradient to which another one is added (torch/csrc/autograd/input_buffer.cpp), or new zeros
# (`isTensorSubclassLike` in torch/csrc/autograd/FunctionsManual.cpp and the backward passes of indexing).
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
# What is put into new zeros is added to them; otherwise a gradient is copied, with zeros in some places.
ACCUMULATES = {aten.index_put.default: 3, aten.put.default: 3}  # where the argument is that says so


def overwritten(func: Any, args: tuple[Any, ...], result: Any) -> torch.UntypedStorage | None:
    """Return the storage that `result` would have been written into if no dispatch mode were entered.

    None if `func` allocates its result in either case. Call it from `__torch_dispatch__`. Autograd overwrites
    an operand only if nobody else holds it, which the caller sees: the storage is then freed at once.
    """
    if func not in ALLOCATES_WHILE_WATCHED or torch.is_grad_enabled() or not _is_called_by_autograd():
        return None
    if any(isinstance(operand, DTensor) for operand in (*args, result)):
        return None
    if func in ACCUMULATES and not any(args[ACCUMULATES[func] :]):
        return None
    before = args[0].untyped_storage()
    return before if before.nbytes() == result.untyped_storage().nbytes() else None  # not an expanded one


def _is_called_by_autograd() -> bool:
    """True if an operator was called by autograd's C++ code, and not by Python code in a backward pass."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (
        frame.f_code.co_name == "__torch_dispatch__" or frame.f_code.co_filename.startswith(WRAPPERS)
    ):
        frame = frame.f_back
    return frame is not None and frame.f_code is _engine_run_backward.__code__


@dataclass(slots=True)
class Successor:
    """A storage that takes the place of another one, if that is freed before anything else is counted."""

    predecessor: int  # its key
    storage: "weakref.ref[torch.UntypedStorage]"
    live_bytes: int  # when it was made, without it


class LiveTensors(TorchDispatchMode):
    """While entered, follows every storage that an operator returns until it is freed.

    So it does those that compiled code takes, if it was loaded after the first of these was made. `follow`
    adds tensors made outside (parameters, optimizer state), counted for as long as they live. A storage that
    is emptied and refilled by hand, as FSDP does with gathered parameters, counts as long as it is filled.
    `on_change` is called with a storage and by how many bytes it has grown, or shrunk.
    """

    def __init__(self) -> None:
        super().__init__()
        # Inductor's code takes it from there as it is loaded.
        guards._empty_strided_cpu = _empty_strided  # pyright: ignore[reportAttributeAccessIssue]
        self.on_change: Callable[[int, int], None] = lambda storage, num_bytes: None
        self.live_bytes = 0
        self._peak_bytes = 0
        self._successor: Successor | None = None
        self._counted: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}  # storage -> bytes

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Else torch.compile compiles nothing while a mode is entered, and says so to nobody."""
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
        if before := overwritten(func, args, result):
            self._settle()
            self._successor = Successor(before._cdata, weakref.ref(result.untyped_storage()), self.live_bytes)
            return result
        # `out` too: FSDP refills the storages that it emptied by an operator that returns nothing.
        written = result if "out" not in kwargs else (result, kwargs["out"])
        leaves = (written,) if isinstance(written, Tensor) else tree_leaves(written)
        self.follow(leaf for leaf in leaves if isinstance(leaf, Tensor))
        return result

    @property
    def peak_bytes(self) -> int:
        self._settle()
        return self._peak_bytes

    def reset_peak(self) -> None:
        """Start a new peak from what lives now, less the storages emptied by hand since."""
        self._settle()
        for reference, _ in list(self._counted.values()):
            storage = reference()
            if storage is not None:
                self._count(storage)
        self._peak_bytes = self.live_bytes

    def _count(self, storage: torch.UntypedStorage) -> None:
        self._settle()
        self._add(storage, self.live_bytes)

    def _add(self, storage: torch.UntypedStorage, live_bytes: int) -> None:
        """Count `storage`, made or resized when `live_bytes` were alive."""
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
        if self._successor is not None and self._successor.predecessor == key:
            self._successor.live_bytes = self.live_bytes  # the predecessor was overwritten
            self._settle()

    def _settle(self) -> None:
        """Count a result whose place in memory was not yet known."""
        successor, self._successor = self._successor, None
        storage = successor.storage() if successor else None
        if successor and storage is not None:
            self._add(storage, successor.live_bytes)


def _empty_strided(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """By an operator, which a mode sees, what compiled code takes past them all."""
    return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


class Phases:
    """Times the phases of a step and records their memory peaks, for one rank.

    Usage: `with phases("logprobs"): ...` any number of times a step, then `phases.collect()`. On a CPU every
    phase first asks `resident` for what lives between steps: a resumed run made its optimizer state outside
    of any phase.
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
        self._usual = {COMPILING: 0.0} if compiles else {}  # what every step reports
        self._seconds: dict[str, float] = dict(self._usual)
        self._peaks: dict[str, int] = {}
        self._num_retries = 0
        self.absent_bytes = 0  # counted by the allocator, and given away: a rollout engine's that sleeps
        self._started = time.perf_counter()
        self._part = ""  # what the memory of the phase under way counts as
        self.on_part: Callable[[str], None] = lambda part: None  # told what it counts as from now on
        self.interrupted: str | None = None  # the phase that an error has ended
        if compiles:
            self._follow_compilers()

    @contextlib.contextmanager
    def __call__(self, phase: str, *, memory: bool = True, usual: bool = True) -> Iterator[None]:
        """Time `phase`, and record its peak unless `memory` is False. `usual`: whether every step has it."""
        progress.report(phase, in_every_step=usual)
        start = time.perf_counter()
        try:
            with self._measured(phase) if memory else contextlib.nullcontext():
                yield
        except BaseException:
            # The innermost is the first to know
            self.interrupted = self.interrupted or (self._part if memory and self._part else phase)
            raise
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    @contextlib.contextmanager
    def _measured(self, phase: str) -> Iterator[None]:
        """Record the peak of what runs inside, also of what ends in an error, such as for want of memory."""
        self._part = phase
        if self.tracker is None:
            torch.cuda.synchronize(self._device)
        else:
            self.tracker.follow(self.resident_tensors())
        self._begin(phase)
        try:
            with self.tracker or contextlib.nullcontext():
                yield
            if self.tracker is None:
                torch.cuda.synchronize(self._device)
        finally:
            self._end()

    def part(self, name: str) -> None:
        """From here on the memory of the phase under way counts as `name`, until it ends."""
        if self.tracker is None:
            torch.cuda.synchronize(self._device)
        self._end()
        self._begin(name)

    def _begin(self, part: str) -> None:
        if self.tracker is None:
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self.tracker.reset_peak()
        self._part = part
        self.on_part(part)

    def _end(self) -> None:
        if self.tracker is None:
            allocated, reserved = torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved
            self._raise(self._part, "peak_allocated_bytes", allocated(self._device) - self.absent_bytes)
            self._raise(self._part, "peak_reserved_bytes", reserved(self._device) - self.absent_bytes)
        else:
            self._raise(self._part, "peak_live_tensor_bytes", self.tracker.peak_bytes)

    def reside(self, resident: Callable[[], Iterable[Tensor]]) -> None:
        """Count what else lives between steps, such as a reference's weights."""
        self._residents.append(resident)

    def resident_tensors(self) -> list[Tensor]:
        """What lives on the device between steps."""
        return [tensor for resident in self._residents for tensor in resident()]

    def collect(self) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds (`timing/train/...`) and counters of memory (`memory/...`) since the last call."""
        now = time.perf_counter()
        seconds = {f"timing/train/{phase}_s": value for phase, value in self._seconds.items()}
        seconds["timing/train/total_step_time_s"] = now - self._started
        peaks = {key: float(value) for key, value in (self._peaks | self._fragmentation()).items()}
        self._seconds, self._peaks, self._started = dict(self._usual), {}, now
        return seconds, peaks

    def _follow_compilers(self) -> None:
        """Count what torch.compile takes, forwards and backwards, in whichever phase it does."""
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
        """How often the allocator had to give its cache back, and what of split blocks lies idle now."""
        if self.tracker is not None:
            return {}
        counters = torch.cuda.memory_stats(self._device)
        before, self._num_retries = self._num_retries, counters["num_alloc_retries"]
        return {
            "memory/allocator_retries": self._num_retries - before,
            "memory/inactive_bytes": counters["inactive_split_bytes.all.current"],
        }

    def _raise(self, phase: str, kind: str, num_bytes: int) -> None:
        key = f"memory/{phase}/{kind}"
        self._peaks[key] = max(self._peaks.get(key, 0), num_bytes)
