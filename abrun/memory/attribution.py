"""Who holds the memory: a step's allocations and frees as a curve, and the sites at its peak.

Pure: allocations come from the CUDA allocator's snapshot, as `torch.cuda.memory._snapshot` documents it, or
from the tracker of live tensors, and go through one form. A site is a module and a line of source.
"""

import bisect
import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

MOST_SITES = 12  # named at the peak
MOST_LAYERS, LEAST_SHARE = 6, 0.01  # of those, drawn apart: with so much of the peak
MOST_POINTS = 240  # of the curve
BEFORE, REST = "there before the step", "everything else"
LIBRARIES = re.compile(r"(^|/)torch/|(^|/)triton/|<|importlib|abrun/(memory|train/phases)\b")
PACKAGE = re.compile(r".*/(?:site-packages|dist-packages)/|.*/(?=abrun/)")


class Site(NamedTuple):
    """Where memory was taken: in which module, on which line, in which phase of the step."""

    module: str
    line: str
    phase: str

    @property
    def label(self) -> str:
        """For a legend: the module with its layers as one, and the line."""
        return " ".join(filter(None, (self.module, self.line))) or "code without a Python frame"


class Change(NamedTuple):
    """A block of memory grew by so many bytes, or shrank."""

    block: Hashable
    num_bytes: int
    site: Site | None  # None of what shrinks


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """A step's memory over its allocations and frees, and what was held at its highest point."""

    peak_bytes: int
    peak_at: int  # index into the curve
    phases: list[tuple[str, int]]  # each with the point of the curve where it begins
    layers: dict[str, list[int]]  # bytes by site over the curve; they add up to the whole
    top: list[dict[str, Any]]  # at the peak: module, line, phase, bytes, count; the largest first

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def changes_of_trace(
    trace: Iterable[Mapping[str, Any]], phases: Sequence[tuple[int, str]]
) -> Iterator[Change]:
    """The allocator's events of one device, `device_traces[i]` of a snapshot, as changes.

    An allocation ends when it is freed (`free_requested`), or, of what is freed on another stream, when that
    is done: whichever stands first. `phases`: (time_us, name) as they began.
    """
    starts, live, gone = [time_us for time_us, _ in phases], set(), set()
    for event in trace:
        action, address = event["action"], event.get("addr")  # "oom" has none
        if action == "alloc":
            place = bisect.bisect_right(starts, event["time_us"]) - 1
            phase = phases[place][1] if place >= 0 else ""
            site = Site(
                layers_as_one(event.get("user_metadata", "")), line_of(event.get("frames", ())), phase
            )
            live.add(address)
            gone.discard(address)
            yield Change(address, event["size"], site)
        elif action in ("free_requested", "free_completed"):
            if address in live:
                live.remove(address)
                yield Change(address, -event["size"], None)
            elif address in gone:  # the second event of one end
                gone.remove(address)
                continue
            else:
                yield Change(address, -event["size"], None)  # there before the history
            if action == "free_requested":
                gone.add(address)


def line_of(frames: Iterable[Mapping[str, Any]]) -> str:
    """The innermost frame outside of torch: `package/file.py:12 function`; empty where there is none."""
    for frame in frames:
        name = PACKAGE.sub("", str(frame["filename"]))  # a checkout may lie in a folder named torch
        if not LIBRARIES.search(name) and name.endswith(".py"):
            return f"{name}:{frame['line']} {frame['name']}"
    return ""


def attribute(changes: Sequence[Change], base_bytes: int) -> Attribution:
    """What `changes` make of `base_bytes`, which were there before them."""
    totals, peak_index = [base_bytes], 0
    for change in changes:
        totals.append(totals[-1] + change.num_bytes)
        if totals[-1] > totals[peak_index]:
            peak_index = len(totals) - 1
    top = _held_at(changes, peak_index)
    worth_it = [site.label for site, num_bytes, _ in top if num_bytes >= LEAST_SHARE * totals[peak_index]]
    layers = list(dict.fromkeys(worth_it))[:MOST_LAYERS]
    points = _points(totals, peak_index)
    held = dict.fromkeys((BEFORE, *layers, REST), 0) | {BEFORE: base_bytes}
    curves: dict[str, list[int]] = {name: [] for name in held}
    phases: list[tuple[str, int]] = []
    moves = _moves(changes, lambda site: site.label if site.label in layers else REST)
    wanted = set(points)
    for index, moved in enumerate(itertools.chain([[]], moves)):
        for name, num_bytes, _ in moved:
            held[name] += num_bytes
        site = changes[index - 1].site if index else None
        if site is not None and (not phases or phases[-1][0] != site.phase):
            phases.append((site.phase, len(curves[REST])))
        if index in wanted:
            for name, curve in curves.items():
                curve.append(held[name])
    return Attribution(
        peak_bytes=totals[peak_index],
        peak_at=points.index(peak_index),
        phases=phases,
        layers=curves,
        top=[
            {**site._asdict(), "bytes": num_bytes, "count": count}
            for site, num_bytes, count in top[:MOST_SITES]
        ],
    )


def _moves(changes: Iterable[Change], name_of: Callable[[Site], Any]) -> Iterator[list[tuple[Any, int, int]]]:
    """Of each change whose bytes and blocks it moves: (name, bytes, blocks).

    A block gives back what the history saw it take; beyond that, what was there before.
    """
    owners: dict[Hashable, dict[Any, int]] = {}
    for block, num_bytes, site in changes:
        owner = owners.setdefault(block, {})
        moved = []
        if num_bytes > 0 and site is not None:
            name = name_of(site)
            moved.append((name, num_bytes, name not in owner))
            owner[name] = owner.get(name, 0) + num_bytes
        else:
            left = -num_bytes
            for name in list(owner):
                part = min(owner[name], left)
                owner[name], left = owner[name] - part, left - part
                moved.append((name, -part, -(not owner[name])))
                if not owner[name]:
                    del owner[name]
            moved += [(BEFORE, -left, 0)] if left else []
        yield moved


def _held_at(changes: Sequence[Change], index: int) -> list[tuple[Site, int, int]]:
    """After so many changes: each site with its bytes and its number of blocks, the largest first."""
    held: dict[Any, tuple[int, int]] = {}
    for moved in _moves(changes[:index], lambda site: site):
        for name, num_bytes, num_blocks in moved:
            so_far, count = held.get(name, (0, 0))
            held[name] = so_far + num_bytes, count + num_blocks
    found = [(name, *sums) for name, sums in held.items() if name != BEFORE and sums[0]]
    return sorted(found, key=lambda one: -one[1])


def _points(totals: Sequence[int], peak_index: int) -> list[int]:
    """At most MOST_POINTS places of a curve, the highest of each stretch: no peak is lost."""
    size = max(1, -(-len(totals) // MOST_POINTS))
    places = [
        max(range(start, min(start + size, len(totals))), key=totals.__getitem__)
        for start in range(0, len(totals), size)
    ]
    return sorted({peak_index if place // size == peak_index // size else place for place in places})


def layers_as_one(module: str) -> str:
    """A module's path with the layers of a model as one."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", module)
