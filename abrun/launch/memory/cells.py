"""Cells of a memory profile, each one arm at one size, and the profile itself."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from abrun.recipe.experiment import BASELINE
from abrun.runs.metric_names import PEAK_MEMORY, is_peak_memory

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One combination of sizes in a sweep; every arm is measured or predicted at it."""

    length: int  # tokens per sequence
    num_sequences: int = 1  # per micro-batch and rank
    swept: tuple[tuple[str, Any], ...] = ()  # (recipe key, value) of --sweep

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "swept": dict(self.swept)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Measured memory of one arm at one point; each value is the maximum over ranks.

    `out_of_memory` is the phase in which memory ran out, or None. The peaks are then those reached before.
    """

    arm: str
    point: Point
    by_phase: dict[str, int]  # peak bytes, by `MemoryProfile.counter`
    held: dict[str, int] = field(default_factory=dict)  # bytes that stay allocated between steps
    reserved_bytes: int | None = None  # peak; this and the next three: CUDA only
    inactive_bytes: int | None = None  # unused parts of split blocks after the step
    allocator_retries: int | None = None
    device_used_bytes: dict[str, int] = field(default_factory=dict)  # all processes; "sampling", "training"
    total_bytes: int | None = None  # of the device
    out_of_memory: str | None = None
    peak: dict[str, Any] | None = None  # from abrun.trainer.memory.measure.summarize_peak

    @property
    def highest_peak(self) -> tuple[str, int]:
        """Phase with the highest peak, and its bytes, even if the step ran out of memory."""
        return max(
            self.by_phase.items(),
            key=lambda item: item[1],
            default=(self.out_of_memory or "weights", sum(self.held.values())),
        )

    @property
    def fitting_peak(self) -> tuple[str, int] | None:
        """Phase with the highest peak, and its bytes; None if the step ran out of memory."""
        return self.highest_peak if self.out_of_memory is None else None

    def as_json(self) -> dict[str, Any]:
        phase, num_bytes = self.highest_peak
        fields = {**asdict(self), "highest_phase": phase, "highest_bytes": num_bytes}
        del fields["point"]
        return fields | self.point.as_json()


def merge_rank_rows(arm: str, point: Point, rows: Sequence[Mapping[str, Any]]) -> tuple[Cell, str]:
    """Merge the rows of all ranks into a cell; also return its counter (from PEAK_MEMORY, or empty)."""
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
    """Largest size that fits an arm, and the smallest tried size that does not."""

    arm: str
    swept: tuple[tuple[str, Any], ...]
    what: str  # length or num_sequences
    fits: int | None  # None: no tried size fits
    fails: int | None  # None: the model's maximum fits
    failed_in: str | None  # phase that ran out of memory


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """Measured cells of a sweep, with the size limits of its arms."""

    name: str
    counter: str  # peak_allocated_bytes (CUDA) or peak_live_tensor_bytes (CPU)
    cells: list[Cell]  # ordered by point, the baseline first
    size_limits: list[SizeLimit] = field(default_factory=list)
    note: str = ""  # limitation of the measurements

    def ratio(self, cell: Cell) -> float | None:
        """Return the ratio of a cell's highest peak to that of the first arm at the same point.

        None if either ran out of memory, or if the first arm has no cell there.
        """
        baseline_peaks = (
            other.fitting_peak
            for other in self.cells
            if (other.arm, other.point) == (self.arms[0], cell.point)
        )
        baseline_peak = next(baseline_peaks, None)
        return cell.fitting_peak[1] / baseline_peak[1] if baseline_peak and cell.fitting_peak else None

    @property
    def arms(self) -> list[str]:
        """Arms in order of measurement, the baseline first."""
        return sorted(dict.fromkeys(cell.arm for cell in self.cells), key=lambda arm: arm != BASELINE)

    @property
    def sorted_cells(self) -> list[Cell]:
        """Cells sorted by size, then by arm."""
        swept_values, arms = list(dict.fromkeys(cell.point.swept for cell in self.cells)), self.arms

        def sort_key(cell: Cell) -> tuple[int, ...]:
            point = cell.point
            return swept_values.index(point.swept), point.num_sequences, point.length, arms.index(cell.arm)

        return sorted(self.cells, key=sort_key)

    @property
    def unit(self) -> tuple[str, int]:
        return choose_unit(cell.highest_peak[1] for cell in self.cells)


def choose_unit(peaks: Iterable[int]) -> tuple[str, int]:
    """Return the unit for a table of peaks and its bytes: GiB from 4 GiB on, else MiB."""
    return ("GiB", GIB) if max(peaks, default=0) >= 4 * GIB else ("MiB", 2**20)
