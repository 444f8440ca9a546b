"""The cells of memory-profile, each an arm at one size, and the profile that they make up."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from abrun.metric_names import PEAK_MEMORY, is_peak_memory
from abrun.recipe.experiment import BASELINE

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A size of the sweep, at which every arm is measured or predicted."""

    length: int  # tokens of a sequence
    num_sequences: int = 1  # a rank's microbatch
    swept: tuple[tuple[str, Any], ...] = ()  # further keys of the recipe, with their values

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "swept": dict(self.swept)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One arm at one point, the largest of any rank.

    If memory ran out, `out_of_memory` is the phase in which it did, and the peaks are those before that.
    """

    arm: str
    point: Point
    by_phase: dict[str, int]  # peak bytes, by `MemoryProfile.counter`
    held: dict[str, int] = field(default_factory=dict)  # bytes that live between steps
    reserved_bytes: int | None = None  # of the allocator, at most; with the three below of CUDA alone
    inactive_bytes: int | None = None  # idle in split blocks, after the step
    allocator_retries: int | None = None
    device_used_bytes: dict[str, int] = field(default_factory=dict)  # by everybody: "sampling", "training"
    total_bytes: int | None = None  # of the device
    out_of_memory: str | None = None
    peak: dict[str, Any] | None = None  # its sites; see abrun.memory.peak

    @property
    def highest_peak(self) -> tuple[str, int]:
        """The phase with the highest peak, and the peak, also of a step that did not fit."""
        return max(
            self.by_phase.items(),
            key=lambda item: item[1],
            default=(self.out_of_memory or "weights", sum(self.held.values())),
        )

    @property
    def fitting_peak(self) -> tuple[str, int] | None:
        """The same of a step that fits."""
        return self.highest_peak if self.out_of_memory is None else None

    def as_json(self) -> dict[str, Any]:
        phase, num_bytes = self.highest_peak
        fields = {**asdict(self), "highest_phase": phase, "highest_bytes": num_bytes}
        del fields["point"]
        return fields | self.point.as_json()


def merge_rank_rows(arm: str, point: Point, rows: Sequence[Mapping[str, Any]]) -> tuple[Cell, str]:
    """Merge the rows of a cell's ranks; also return the counter of its peaks (of PEAK_MEMORY, or empty)."""
    metrics = _merge_maxima(row["metrics"] for row in rows)
    counter = next((name for name in PEAK_MEMORY if any(key.endswith(f"/{name}") for key in metrics)), "")
    reserved_bytes = [value for key, value in metrics.items() if key.endswith("/peak_reserved_bytes")]
    peaks = [row["peak"] for row in rows if row["peak"]]
    cell = Cell(
        arm=arm,
        point=point,
        by_phase={key.split("/")[1]: value for key, value in metrics.items() if is_peak_memory(key)},
        held=_merge_maxima(row["held"] for row in rows),
        reserved_bytes=max(reserved_bytes, default=None),
        inactive_bytes=metrics.get("memory/inactive_bytes"),
        allocator_retries=metrics.get("memory/allocator_retries"),
        device_used_bytes=_merge_maxima(row["device_used"] for row in rows),
        total_bytes=rows[0]["total_bytes"],
        out_of_memory=next((row["out_of_memory"] for row in rows if row["out_of_memory"]), None),
        peak=max(peaks, key=lambda peak: peak["peak_bytes"], default=None),
    )
    return cell, counter


def _merge_maxima(rows: Iterable[Mapping[str, float]]) -> dict[str, int]:
    merged: dict[str, int] = {}
    for row in rows:
        for key, value in row.items():
            merged[key] = max(merged.get(key, 0), int(value))
    return merged


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeLimit:
    """The largest size with which an arm trains, and the smallest that was tried and fails."""

    arm: str
    swept: tuple[tuple[str, Any], ...]
    what: str  # length, or num_sequences
    fits: int | None  # None: no size that was tried
    fails: int | None  # None: it fits as much as the model takes
    failed_in: str | None  # the phase


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """A measured sweep."""

    name: str
    counter: str  # peak_allocated_bytes (CUDA) or peak_live_tensor_bytes (CPU)
    cells: list[Cell]  # point by point, the baseline's first
    size_limits: list[SizeLimit] = field(default_factory=list)
    note: str = ""  # a limit of the figures

    def ratio(self, cell: Cell) -> float | None:
        """Return the cell's highest peak over the baseline's (or the first arm's) at the same point."""
        baseline_peaks = (
            baseline_peak.fitting_peak
            for baseline_peak in self.cells
            if (baseline_peak.arm, baseline_peak.point) == (self.arms[0], cell.point)
        )
        baseline_peak = next(baseline_peaks, None)
        return cell.fitting_peak[1] / baseline_peak[1] if baseline_peak and cell.fitting_peak else None

    @property
    def arms(self) -> list[str]:
        """In their order, the baseline first."""
        return sorted(dict.fromkeys(cell.arm for cell in self.cells), key=lambda arm: arm != BASELINE)

    @property
    def sorted_cells(self) -> list[Cell]:
        """The cells in the order of a table: by size, then by arm."""
        swept_values, arms = list(dict.fromkeys(cell.point.swept for cell in self.cells)), self.arms

        def sort_key(cell: Cell) -> tuple[int, ...]:
            point = cell.point
            return swept_values.index(point.swept), point.num_sequences, point.length, arms.index(cell.arm)

        return sorted(self.cells, key=sort_key)

    @property
    def unit(self) -> tuple[str, int]:
        return choose_unit(cell.highest_peak[1] for cell in self.cells)


def choose_unit(peaks: Iterable[int]) -> tuple[str, int]:
    """Return MiB, or GiB if the largest peak is large, and its bytes."""
    return ("GiB", GIB) if max(peaks, default=0) >= 4 * GIB else ("MiB", 2**20)
