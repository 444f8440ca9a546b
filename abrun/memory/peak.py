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


class AllocationSite(NamedTuple):
    """Where memory was taken: on which line, in which phase of the step."""

    line: str  # empty for C++ code without a Python frame
    phase: str


class AllocationEvent(NamedTuple):
    """A block of memory grew by so many bytes, or shrank."""

    block: Hashable
    num_bytes: int
    site: AllocationSite | None  # None if it shrank


class AllocationRecorder:
    """Record the allocations of a rank's device while entered; `peak` then names what the peak holds.

    `snapshot`: the file for torch's snapshot, written on CUDA alone.
    """

    def __init__(self, phases: Phases, snapshot: Path) -> None:
        self._phases, self._snapshot = phases, snapshot
        self._events: list[AllocationEvent] = []
        self._phase_starts: list[tuple[int, str]] = []  # of phases, in microseconds
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
        """Return `held_at_peak` of what was recorded; None if nothing was."""
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
        """Read the history before it ends, also after memory ran out."""
        snapshot: Any = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(None)
        with self._snapshot.open("wb") as file:  # as torch.cuda.memory._dump_snapshot does
            pickle.dump(snapshot, file)
        trace = snapshot["device_traces"][torch.cuda.current_device()]
        self._events = list(parse_trace(trace, self._phase_starts))


def parse_trace(
    trace: Iterable[Mapping[str, Any]], phase_starts: Sequence[tuple[int, str]]
) -> Iterator[AllocationEvent]:
    """Yield the changes of one device's events, `device_traces[i]` of torch's snapshot.

    `starts`: when (microseconds) which phase began, in order.
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
    """Return `peak_bytes`; `before_bytes` of it, there before the step; and `sites`, the largest first.

    A site has `line`, `phase`, `bytes` and `count`, its number of blocks.
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
    """Return the innermost frame outside of torch: `package/file.py:12 function`; empty if there is none.

    Of code that autograd runs itself it is the name of its node.
    """
    for frame in frames:
        path = PACKAGE.sub("", str(frame["filename"]))  # a checkout may lie in a folder named torch
        if path == AUTOGRAD:
            return str(frame["name"])
        if not LIBRARIES.search(path) and path.endswith(".py"):
            return f"{path}:{frame['line']} {frame['name']}"
    return ""


def _iterate_frames() -> Iterator[dict[str, Any]]:
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
