"""Records who takes memory in a step: from the CUDA allocator's history, or from the tracker of a CPU.

The module is the one whose forward pass runs; in a backward pass the one whose outputs' gradient came last.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from abrun.memory.attribution import (
    Attribution,
    Change,
    Site,
    attribute,
    changes_of_trace,
    layers_as_one,
    line_of,
)
from abrun.train.phases import Phases

MOST_EVENTS = 500_000  # of the allocator's history
DEPTH = 60  # frames looked at
SEEN = "abrun.memory"  # in a node's metadata: its gradient tells a module


class History:
    """While entered, records the allocations of a rank's device; then `attribution` says whose they were.

    `by_module`: also by which module, through hooks, which code that torch.compile traces does not allow.
    """

    def __init__(self, phases: Phases, *, by_module: bool) -> None:
        self._phases, self._by_module = phases, by_module
        self._changes: list[Change] = []
        self._began: list[tuple[int, str]] = []  # phases, in microseconds
        self._module = self._phase = ""
        self._base_bytes = 0

    def __enter__(self) -> "History":
        self._stack = contextlib.ExitStack()
        before = self._phases.on_part
        self._phases.on_part = self._begin
        self._stack.callback(setattr, self._phases, "on_part", before)
        if self._by_module:
            self._stack.enter_context(_following_modules(self._enter_module))
        if self._phases.tracker is None:
            self._base_bytes = torch.cuda.memory_allocated() - self._phases.absent_bytes
            self._stack.callback(self._stop)
            torch.cuda.memory._record_memory_history(
                "all", context="alloc", stacks="python", max_entries=MOST_EVENTS, clear_history=True
            )
        else:
            self._follow(self._phases.tracker)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def attribution(self) -> dict[str, Any] | None:
        """As JSON; None where nothing was recorded."""
        found: Attribution = attribute(self._changes, self._base_bytes)
        return found.as_json() if self._changes else None

    def _follow(self, tracker: Any) -> None:
        tracker.follow(self._phases.resident_tensors())
        tracker.reset_peak()
        self._base_bytes = tracker.live_bytes
        before: Callable[[int, int], None] = tracker.on_change

        def note(storage: int, num_bytes: int) -> None:
            site = Site(layers_as_one(self._module), _line_here(), self._phase) if num_bytes > 0 else None
            self._changes.append(Change(storage, num_bytes, site))
            before(storage, num_bytes)

        tracker.on_change = note
        self._stack.callback(setattr, tracker, "on_change", before)

    def _stop(self) -> None:
        """The history is read before it ends, also where memory ran out."""
        snapshot: Any = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(None)
        trace = snapshot["device_traces"][torch.cuda.current_device()]
        self._changes = list(changes_of_trace(trace, self._began))

    def _begin(self, part: str) -> None:
        self._phase = part
        self._began.append((time.time_ns() // 1000, part))

    def _enter_module(self, name: str) -> None:
        self._module = name
        if self._phases.tracker is None and hasattr(torch.cuda.memory, "_set_memory_metadata"):
            torch.cuda.memory._set_memory_metadata(name)


@contextlib.contextmanager
def _following_modules(enter: Callable[[str], None]) -> Iterator[None]:
    """Calls `enter` with the path of the module that runs, from the outermost one that was called."""
    running: list[nn.Module] = []
    paths: dict[int, str] = {}

    def path_of(module: nn.Module) -> str:
        if id(module) not in paths:
            if running:
                inside = {id(part): name for name, part in running[-1].named_modules()}
                parts = paths.get(id(running[-1]), ""), inside.get(id(module), type(module).__name__)
                paths[id(module)] = ".".join(filter(None, parts))
            else:
                paths[id(module)] = ""
        return paths[id(module)]

    def before(module: nn.Module, inputs: Any) -> None:
        enter(path_of(module))
        running.append(module)

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        if running:
            running.pop()
        enter(path_of(running[-1]) if running else "")
        for leaf in tree_leaves(output):
            # The innermost module is the first to see its output
            node: Any = leaf.grad_fn if isinstance(leaf, Tensor) else None
            if node is not None and SEEN not in node.metadata:
                node.metadata[SEEN] = True
                leaf.register_hook(lambda gradient: enter(path_of(module)))

    hooks = [
        nn.modules.module.register_module_forward_pre_hook(before),
        nn.modules.module.register_module_forward_hook(after, always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        enter("")


def _line_here() -> str:
    """The innermost line outside of torch; in a backward pass of torch's own, the node that runs."""
    frame: FrameType | None = sys._getframe(1)
    frames: list[dict[str, Any]] = []
    while frame is not None and len(frames) < DEPTH:
        code = frame.f_code
        if code.co_name == "_engine_run_backward":
            node = torch._C._current_autograd_node()
            return line_of(frames) or (node.name() if node is not None else "")
        frames.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
        frame = frame.f_back
    return line_of(frames)
