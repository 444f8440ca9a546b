"""Whose memory a step's peak is: the lines of source that hold the most of it.

On CUDA the step's whole history is also written as torch's memory snapshot, for https://pytorch.org/memory_viz.
Recording takes host memory and time, and none of the device's.
"""

import contextlib
import pickle
import re
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from abrun.train.phases import Phases

SNAPSHOT = "memory-snapshot.pickle"
MAX_SITES = 8  # of the table
MAX_EVENTS = 500_000  # of the allocator's history
MAX_FRAMES = 60
AUTOGRAD = "autograd"  # in the place of a node's file
LIBRARIES = re.compile(r"(^|/)torch/|(^|/)triton/|<|importlib|abrun/(memory|train/phases)\b")
PACKAGE = re.compile(r".*/(?:site-packages|dist-packages)/|.*/(?=abrun/)")


class Site(NamedTuple):
    """Where memory was taken: on which line, in which phase of the step."""

    line: str  # empty for C++ code without a Python frame
    phase: str


class Change(NamedTuple):
    """A block of memory grew by so many bytes, or shrank."""

    block: Hashable
    num_bytes: int
    site: Site | None  # None if it shrank


class PeakHistory:
    """Record the allocations of a rank's device while entered; `peak` then names what the peak holds.

    `snapshot`: the file for torch's snapshot, written on CUDA alone.
    """

    def __init__(self, phases: Phases, snapshot: Path) -> None:
        self._phases, self._snapshot = phases, snapshot
        self._changes: list[Change] = []
        self._starts: list[tuple[int, str]] = []  # of phases, in microseconds
        self._base_bytes = 0

    def __enter__(self) -> "PeakHistory":
        self._stack = contextlib.ExitStack()
        self._stack.callback(setattr, self._phases, "on_memory_label", self._phases.on_memory_label)
        self._phases.on_memory_label = lambda phase: self._starts.append((time.time_ns() // 1000, phase))
        if self._phases.tracker is None:
            self._base_bytes = torch.cuda.memory_allocated() - self._phases.absent_bytes
            self._stack.callback(self._stop)
            torch.cuda.memory._record_memory_history(
                "all", context="alloc", stacks="python", max_entries=MAX_EVENTS, clear_history=True
            )
        else:
            self._follow(self._phases.tracker)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def peak(self) -> dict[str, Any] | None:
        """Return `held_at_peak` of what was recorded; None if nothing was."""
        return held_at_peak(self._changes, self._base_bytes) if self._changes else None

    def _follow(self, tracker: Any) -> None:
        tracker.follow(self._phases.resident_tensors())
        tracker.reset_peak()
        self._base_bytes = tracker.live_bytes
        on_change: Callable[[int, int], None] = tracker.on_change

        def note(storage: int, num_bytes: int) -> None:
            phase = self._starts[-1][1] if self._starts else ""
            site = Site(line_of(_frames()), phase) if num_bytes > 0 else None
            self._changes.append(Change(storage, num_bytes, site))
            on_change(storage, num_bytes)

        tracker.on_change = note
        self._stack.callback(setattr, tracker, "on_change", on_change)

    def _stop(self) -> None:
        """Read the history before it ends, also after memory ran out."""
        snapshot: Any = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(None)
        with self._snapshot.open("wb") as file:  # as torch.cuda.memory._dump_snapshot does
            pickle.dump(snapshot, file)
        trace = snapshot["device_traces"][torch.cuda.current_device()]
        self._changes = list(changes_of_trace(trace, self._starts))


def changes_of_trace(
    trace: Iterable[Mapping[str, Any]], starts: Sequence[tuple[int, str]]
) -> Iterator[Change]:
    """Yield the changes of one device's events, `device_traces[i]` of torch's snapshot.

    `starts`: when (microseconds) which phase began, in order.
    """
    phase, following = "", list(reversed(starts))
    for event in trace:
        while following and following[-1][0] <= event["time_us"]:
            phase = following.pop()[1]
        if event["action"] == "alloc":
            yield Change(event["addr"], event["size"], Site(line_of(event.get("frames", ())), phase))
        elif event["action"] == "free_requested":
            yield Change(event["addr"], -event["size"], None)


def held_at_peak(changes: Sequence[Change], base_bytes: int) -> dict[str, Any]:
    """Return `peak_bytes`; `before_bytes` of it, there before the step; and `sites`, the largest first.

    A site has `line`, `phase`, `bytes` and `count`, its number of blocks.
    """
    total = peak_bytes = base_bytes
    num_changes = 0
    for index, change in enumerate(changes, 1):
        total += change.num_bytes
        if total > peak_bytes:
            peak_bytes, num_changes = total, index
    blocks: dict[Hashable, tuple[int, Site]] = {}
    for block, num_bytes, site in changes[:num_changes]:
        held, owner = blocks.pop(block, (0, site))
        if owner is not None and held + num_bytes > 0:
            blocks[block] = held + num_bytes, site or owner
    sites: dict[Site, tuple[int, int]] = {}
    for num_bytes, site in blocks.values():
        so_far, count = sites.get(site, (0, 0))
        sites[site] = so_far + num_bytes, count + 1
    largest = sorted(sites.items(), key=lambda item: -item[1][0])[:MAX_SITES]
    return {
        "peak_bytes": peak_bytes,
        "before_bytes": peak_bytes - sum(num_bytes for num_bytes, _ in blocks.values()),
        "sites": [{**site._asdict(), "bytes": size, "count": count} for site, (size, count) in largest],
    }


def line_of(frames: Iterable[Mapping[str, Any]]) -> str:
    """Return the innermost frame outside of torch: `package/file.py:12 function`; empty if there is none.

    Of code that autograd runs itself it is the name of its node.
    """
    for frame in frames:
        name = PACKAGE.sub("", str(frame["filename"]))  # a checkout may lie in a folder named torch
        if name == AUTOGRAD:
            return str(frame["name"])
        if not LIBRARIES.search(name) and name.endswith(".py"):
            return f"{name}:{frame['line']} {frame['name']}"
    return ""


def _frames() -> Iterator[dict[str, Any]]:
    """Yield the caller's frames; in a backward pass that autograd runs, at last its node, without a line."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MAX_FRAMES):
        if frame is None:
            return
        code = frame.f_code
        if code.co_name == "_engine_run_backward":
            node = torch._C._current_autograd_node()
            if node is not None:
                yield {"filename": AUTOGRAD, "name": node.name()}
            return
        yield {"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name}
        frame = frame.f_back
