"""Source lines that allocated the memory held at a step's peak.

On CUDA the allocation history of the step is also written as torch's memory snapshot, for
https://pytorch.org/memory_viz. Recording takes host memory and time, but no device memory.
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
MAX_SITES = 8  # in the table
MAX_EVENTS = 500_000  # in the allocator's history
MAX_FRAMES = 60
AUTOGRAD = "autograd"  # stands for the file name in frames of autograd nodes
LIBRARIES = re.compile(r"(^|/)torch/|(^|/)triton/|<|importlib|abrun/(memory|train/phases)\b")
PACKAGE = re.compile(r".*/(?:site-packages|dist-packages)/|.*/(?=abrun/)")


class AllocationSite(NamedTuple):
    """Source line and phase of an allocation."""

    line: str  # empty: C++ code without a Python frame
    phase: str


class AllocationEvent(NamedTuple):
    """Growth (positive) or shrinkage (negative) of a block of memory, in bytes."""

    block: Hashable
    num_bytes: int
    site: AllocationSite | None  # None: the block shrank


class AllocationRecorder:
    """Context manager that records the allocations of a rank's device.

    `snapshot` is the file for torch's memory snapshot, written only on CUDA.
    """

    def __init__(self, phases: Phases, snapshot: Path) -> None:
        self._phases, self._snapshot = phases, snapshot
        self._events: list[AllocationEvent] = []
        self._phase_starts: list[tuple[int, str]] = []  # (microseconds, phase)
        self._base_bytes = 0

    def __enter__(self) -> "AllocationRecorder":
        self._stack = contextlib.ExitStack()
        self._stack.callback(setattr, self._phases, "on_memory_label", self._phases.on_memory_label)
        self._phases.on_memory_label = lambda phase: self._phase_starts.append(
            (time.time_ns() // 1000, phase)
        )
        if self._phases.tracker is None:
            self._base_bytes = torch.cuda.memory_allocated() - self._phases.absent_bytes
            self._stack.callback(self._stop_recording)
            torch.cuda.memory._record_memory_history(
                "all", context="alloc", stacks="python", max_entries=MAX_EVENTS, clear_history=True
            )
        else:
            self._record_tracker(self._phases.tracker)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def summarize(self) -> dict[str, Any] | None:
        """Return the result of `summarize_peak`, or None if nothing was recorded."""
        return summarize_peak(self._events, self._base_bytes) if self._events else None

    def _record_tracker(self, tracker: Any) -> None:
        tracker.follow(self._phases.resident_tensors())
        tracker.reset_peak()
        self._base_bytes = tracker.live_bytes
        on_change: Callable[[int, int], None] = tracker.on_change

        def record_event(storage: int, num_bytes: int) -> None:
            phase = self._phase_starts[-1][1] if self._phase_starts else ""
            site = AllocationSite(find_source_line(_iterate_frames()), phase) if num_bytes > 0 else None
            self._events.append(AllocationEvent(storage, num_bytes, site))
            on_change(storage, num_bytes)

        tracker.on_change = record_event
        self._stack.callback(setattr, tracker, "on_change", on_change)

    def _stop_recording(self) -> None:
        """Save the allocator's history and stop it, also after an OOM."""
        snapshot: Any = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(None)
        with self._snapshot.open("wb") as file:  # as torch.cuda.memory._dump_snapshot does
            pickle.dump(snapshot, file)
        trace = snapshot["device_traces"][torch.cuda.current_device()]
        self._events = list(parse_trace(trace, self._phase_starts))


def parse_trace(
    trace: Iterable[Mapping[str, Any]], phase_starts: Sequence[tuple[int, str]]
) -> Iterator[AllocationEvent]:
    """Yield the allocations and frees in `device_traces[i]` of torch's snapshot.

    `phase_starts`: (microseconds, phase) of each start, in order.
    """
    phase, pending_starts = "", list(reversed(phase_starts))
    for record in trace:
        while pending_starts and pending_starts[-1][0] <= record["time_us"]:
            phase = pending_starts.pop()[1]
        if record["action"] == "alloc":
            yield AllocationEvent(
                record["addr"],
                record["size"],
                AllocationSite(find_source_line(record.get("frames", ())), phase),
            )
        elif record["action"] == "free_requested":
            yield AllocationEvent(record["addr"], -record["size"], None)


def summarize_peak(events: Sequence[AllocationEvent], base_bytes: int) -> dict[str, Any]:
    """Summarize the memory held at the peak.

    Returns `peak_bytes`, `before_bytes` (the part allocated before recording began) and `sites`, largest
    first. A site has `line`, `phase`, `bytes` and `count` (its number of blocks).
    """
    live_bytes = peak_bytes = base_bytes
    num_peak_events = 0
    for index, event in enumerate(events, 1):
        live_bytes += event.num_bytes
        if live_bytes > peak_bytes:
            peak_bytes, num_peak_events = live_bytes, index
    blocks: dict[Hashable, tuple[int, AllocationSite]] = {}
    for block, num_bytes, site in events[:num_peak_events]:
        block_bytes, block_site = blocks.pop(block, (0, site))
        if block_site is not None and block_bytes + num_bytes > 0:
            blocks[block] = block_bytes + num_bytes, site or block_site
    sites: dict[AllocationSite, tuple[int, int]] = {}
    for num_bytes, site in blocks.values():
        site_bytes, count = sites.get(site, (0, 0))
        sites[site] = site_bytes + num_bytes, count + 1
    largest = sorted(sites.items(), key=lambda item: -item[1][0])[:MAX_SITES]
    return {
        "peak_bytes": peak_bytes,
        "before_bytes": peak_bytes - sum(num_bytes for num_bytes, _ in blocks.values()),
        "sites": [
            {**site._asdict(), "bytes": num_bytes_at_site, "count": count}
            for site, (num_bytes_at_site, count) in largest
        ],
    }


def find_source_line(frames: Iterable[Mapping[str, Any]]) -> str:
    """Return the innermost frame outside torch as `package/file.py:12 function`, or an empty string.

    For code that autograd runs itself, return the name of the autograd node.
    """
    for frame in frames:
        path = PACKAGE.sub("", str(frame["filename"]))  # the folder of a checkout may be named torch
        if path == AUTOGRAD:
            return str(frame["name"])
        if not LIBRARIES.search(path) and path.endswith(".py"):
            return f"{path}:{frame['line']} {frame['name']}"
    return ""


def _iterate_frames() -> Iterator[dict[str, Any]]:
    """Yield the frames of the caller, innermost first; in a backward pass the last is the autograd node."""
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
