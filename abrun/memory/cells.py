"""What memory-profile measures: cells, each an arm at one size, and the profile that they make up."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from abrun.metric_names import PEAK_MEMORY, is_peak_memory
from abrun.recipe.experiment import BASELINE


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A size of the sweep, at which every arm is measured."""

    length: int  # tokens of a sequence; of a head alone, its tokens
    num_sequences: int = 1  # a rank's microbatch
    swept: tuple[tuple[str, Any], ...] = ()  # further keys of the recipe, with their values


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One arm at one point, the largest of any rank.

    Where memory ran out, `out_of_memory` is the phase in which it did, and the peaks are how far it came.
    """

    arm: str
    point: Point
    by_phase: dict[str, int]  # peak bytes, by `MemoryProfile.counter`
    held: dict[str, int] = field(default_factory=dict)  # bytes that live between steps
    reserved_bytes: int | None = None  # of the allocator, at most; with the three below of CUDA alone
    inactive_bytes: int | None = None  # idle parts of split blocks, after the step
    allocator_retries: int | None = None
    device_used: dict[str, int] = field(default_factory=dict)  # by everybody, while sampling, while training
    total_bytes: int | None = None  # what there was to take
    out_of_memory: str | None = None
    floor: dict[str, int] | None = None  # what has to be there, by what it is; see abrun.memory.floor
    peak: dict[str, Any] | None = None  # whose memory it is; see abrun.memory.peak

    @property
    def reached(self) -> tuple[str, int]:
        """The phase with the highest peak, and the peak, also of a step that did not fit."""
        return max(
            self.by_phase.items(),
            key=lambda item: item[1],
            default=(self.out_of_memory or "weights", sum(self.held.values())),
        )

    @property
    def highest(self) -> tuple[str, int] | None:
        """The same of a step that fits."""
        return self.reached if self.out_of_memory is None else None

    def as_json(self) -> dict[str, Any]:
        return {
            "arm": self.arm,
            "length": self.point.length,
            "num_sequences": self.point.num_sequences,
            "swept": dict(self.point.swept),
            "out_of_memory": self.out_of_memory,
            "highest_phase": self.reached[0],
            "highest_bytes": self.reached[1],
            "by_phase": self.by_phase,
            "held": self.held,
            "reserved_bytes": self.reserved_bytes,
            "inactive_bytes": self.inactive_bytes,
            "allocator_retries": self.allocator_retries,
            "device_used_bytes": self.device_used,
            "total_bytes": self.total_bytes,
            "floor": self.floor,
            "peak": self.peak,
        }


def cell_of(arm: str, point: Point, rows: Sequence[Mapping[str, Any]]) -> tuple[Cell, str]:
    """A cell from what its ranks wrote, and the counter of its peaks (one of PEAK_MEMORY, or empty)."""
    metrics = _largest(row["metrics"] for row in rows)
    counter = next((one for one in PEAK_MEMORY if any(key.endswith(f"/{one}") for key in metrics)), "")
    reserved = [value for key, value in metrics.items() if key.endswith("/peak_reserved_bytes")]
    on_cuda = counter == PEAK_MEMORY[0]
    peaks = [row["peak"] for row in rows if row["peak"]]
    cell = Cell(
        arm=arm,
        point=point,
        by_phase={key.split("/")[1]: value for key, value in metrics.items() if is_peak_memory(key)},
        held=_largest(row["held"] for row in rows),
        reserved_bytes=max(reserved, default=None),
        inactive_bytes=metrics.get("memory/inactive_bytes") if on_cuda else None,
        allocator_retries=metrics.get("memory/allocator_retries") if on_cuda else None,
        device_used=_largest(row["device_used"] for row in rows),
        total_bytes=rows[0]["total_bytes"],
        out_of_memory=next((row["out_of_memory"] for row in rows if row["out_of_memory"]), None),
        peak=max(peaks, key=lambda peak: peak["peak_bytes"], default=None),
    )
    return cell, counter


def _largest(of_ranks: Iterable[Mapping[str, float]]) -> dict[str, int]:
    merged: dict[str, int] = {}
    for one in of_ranks:
        for key, value in one.items():
            merged[key] = max(merged.get(key, 0), int(value))
    return merged


@dataclass(frozen=True, slots=True, kw_only=True)
class Longest:
    """How far an arm trains: the largest size that fits, and the smallest that was tried and does not."""

    arm: str
    swept: tuple[tuple[str, Any], ...]
    what: str  # length, or num_sequences
    fits: int | None  # None: nothing that was tried
    fails: int | None  # None: it fits as much as the model takes
    failed_in: str | None  # the phase


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """A measured sweep."""

    name: str
    counter: str  # peak_allocated_bytes (CUDA) or peak_live_tensor_bytes (CPU)
    cells: list[Cell]  # point by point, the baseline's first
    longest: list[Longest] = field(default_factory=list)
    note: str = ""  # on what the figures are not

    def ratio(self, cell: Cell) -> float | None:
        """The cell's highest peak over that of the baseline (or of the first arm) at the same point."""
        bases = (one.highest for one in self.cells if one.arm == self.arms[0] and one.point == cell.point)
        base = next(bases, None)
        return cell.highest[1] / base[1] if base and cell.highest else None

    @property
    def arms(self) -> list[str]:
        """In their order, the baseline first."""
        return sorted(dict.fromkeys(cell.arm for cell in self.cells), key=lambda arm: arm != BASELINE)

    @property
    def by_size(self) -> list[Cell]:
        """The cells as a table has them: by size, then by arm."""
        swept, arms = list(dict.fromkeys(cell.point.swept for cell in self.cells)), self.arms

        def place(cell: Cell) -> tuple[int, ...]:
            point = cell.point
            return swept.index(point.swept), point.num_sequences, point.length, arms.index(cell.arm)

        return sorted(self.cells, key=place)

    @property
    def unit(self) -> tuple[str, int]:
        """MiB, or GiB where the peaks are large, and its bytes."""
        largest = max((cell.reached[1] for cell in self.cells), default=0)
        return ("GiB", 2**30) if largest >= 4 * 2**30 else ("MiB", 2**20)

    @property
    def what(self) -> str:
        """What the peaks are of, in words that say which device's."""
        on_gpu = self.counter == PEAK_MEMORY[0]
        return "peak memory allocated on a GPU" if on_gpu else "peak of live tensors' bytes on a CPU"
