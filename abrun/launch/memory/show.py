"""Tables of measured and predicted peaks, for the terminal."""

from collections.abc import Sequence
from pathlib import Path

from abrun.launch.memory.profile import (
    Cell,
    MemoryProfile,
    Point,
    describe_point,
    format_bytes,
    shorten_key,
)
from abrun.report.present.tables import Table, columns
from abrun.runs.metric_names import PEAK_MEMORY

VIEWER = "https://pytorch.org/memory_viz"
TEXT_COLUMNS = ("arm", "highest in", "fails in", "allocated in", "line")


def make_tables(profile: MemoryProfile) -> list[Table]:
    """Return the tables of peaks, allocator counters, size limits and allocation sites."""
    has_allocator = any(cell.reserved_bytes is not None for cell in profile.cells)
    return [
        _make_peak_table(profile),
        *([_make_allocator_table(profile)] if has_allocator else []),
        *([_make_limit_table(profile)] if profile.size_limits else []),
        *(_make_site_table(cell, profile.unit) for cell in _choose_compared_cells(profile)),
    ]


def _make_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    numeric_headings = [heading for heading in headings if heading not in TEXT_COLUMNS]
    return Table(columns(*headings, numeric=numeric_headings, no_wrap=TEXT_COLUMNS), rows, title)


def _make_peak_table(profile: MemoryProfile) -> Table:
    phases = list(dict.fromkeys(phase for cell in profile.cells for phase in cell.by_phase))
    resident_kinds = list(dict.fromkeys(name for cell in profile.cells for name in cell.held))
    size_headings, unit = _size_headings(profile), profile.unit
    headings = [*size_headings, "arm", *(name.replace("_", " ") for name in resident_kinds)]
    headings += [*map(_format_phase, phases), "highest in", "ratio"]
    rows = []
    for cell in profile.sorted_cells:
        ratio, phase = profile.ratio(cell), _format_phase(cell.highest_peak[0])
        sizes = [*map(cell.held.get, resident_kinds), *map(cell.by_phase.get, phases)]
        where = f"out of memory in {cell.out_of_memory}" if cell.out_of_memory else phase
        rows.append(
            [
                *(*_format_size(cell.point, size_headings), cell.arm),
                *(format_bytes(size, unit) for size in sizes),
                *(where, f"{ratio:.3f}" if ratio else "-"),
            ]
        )
    on_gpu = profile.counter == PEAK_MEMORY[0]
    counter_text = "peak memory allocated on a GPU" if on_gpu else "peak of live tensors' bytes on a CPU"
    return _make_table(f"{profile.name}: {counter_text}, {unit[0]}, maximum over ranks", headings, rows)


def _make_allocator_table(profile: MemoryProfile) -> Table:
    size_headings, unit = _size_headings(profile), profile.unit
    activities = list(dict.fromkeys(name for cell in profile.cells for name in cell.device_used_bytes))
    headings = [*size_headings, "arm", "allocated", "reserved", "idle in split blocks", "retries"]
    headings += [f"device memory used, {activity}" for activity in activities]
    rows = [
        [
            *_format_size(cell.point, size_headings),
            cell.arm,
            format_bytes(cell.highest_peak[1], unit),
            format_bytes(cell.reserved_bytes, unit),
            format_bytes(cell.inactive_bytes, unit),
            "-" if cell.allocator_retries is None else str(cell.allocator_retries),
            *(format_bytes(cell.device_used_bytes.get(activity), unit) for activity in activities),
        ]
        for cell in profile.sorted_cells
    ]
    return _make_table(f"CUDA allocator, {unit[0]}", headings, rows)


def _make_limit_table(profile: MemoryProfile) -> Table:
    keys = list(dict.fromkeys(key for limit in profile.size_limits for key, _ in limit.swept))
    baseline_sizes = {
        limit.swept: limit.fits for limit in profile.size_limits[::-1] if limit.arm == profile.arms[0]
    }
    rows = []
    for limit in profile.size_limits:
        swept, baseline_size = dict(limit.swept), baseline_sizes.get(limit.swept)
        rows.append(
            [
                *(str(swept.get(key, "-")) for key in keys),
                limit.arm,
                f"{limit.fits:,}" if limit.fits else "none",
                f"{limit.fails:,}" if limit.fails else "none (model's maximum fits)",
                limit.failed_in or "-",
                f"{limit.fits / baseline_size:.2f}" if limit.fits and baseline_size else "-",
            ]
        )
    headings = [*map(shorten_key, keys), "arm", "fits", "does not fit", "fails in", "ratio"]
    is_length = profile.size_limits[0].what == "length"
    unit_text = "tokens per sequence" if is_length else "sequences per micro-batch"
    return _make_table(f"largest size that fits: {unit_text}", headings, rows)


def _size_headings(profile: MemoryProfile) -> list[str]:
    """Return the headings of the sizes and swept keys in which cells differ."""
    keys = list(dict.fromkeys(key for cell in profile.cells for key, _ in cell.point.swept))
    sequences = {cell.point.num_sequences for cell in profile.cells}
    return ["tokens", *(["sequences"] if sequences != {1} else []), *map(shorten_key, keys)]


def _format_size(point: Point, headings: Sequence[str]) -> list[str]:
    values = {"tokens": f"{point.length:,}", "sequences": f"{point.num_sequences:,}"}
    values |= {
        shorten_key(key): f"{value:,}" if type(value) is int else str(value) for key, value in point.swept
    }
    return [values.get(heading, "None") for heading in headings]


def _format_phase(phase: str) -> str:
    return "rollout" if phase == "generation" else phase.replace("_", " ")


# --- allocation sites ---


def describe_files(profile: MemoryProfile, output: Path) -> list[str]:
    """Return lines that say where peaks.json and torch's memory snapshots are."""
    lines = [f"peaks.json is in {output}"]
    if any(cell.peak and cell.reserved_bytes is not None for cell in profile.cells):
        lines.append(
            f"To see every allocation of a step, open {output}/cells/*/memory-snapshot.pickle in {VIEWER}"
        )
    return lines


def _choose_compared_cells(profile: MemoryProfile) -> list[Cell]:
    """Return the cells of the largest point at which most arms were measured."""
    by_point: dict[Point, list[Cell]] = {}
    for cell in profile.cells:
        if cell.peak:
            by_point.setdefault(cell.point, []).append(cell)
    return max(
        by_point.values(),
        key=lambda cells: (len(cells), cells[0].point.length, cells[0].point.num_sequences),
        default=[],
    )


def _make_site_table(cell: Cell, unit: tuple[str, int]) -> Table:
    """Return the table of the sites that hold the most memory at a cell's peak."""
    assert cell.peak
    rows = [[format_bytes(cell.peak["before_bytes"], unit), "-", "-", "allocated before the step"]]
    for site in cell.peak["sites"]:
        line, phase = site["line"] or "C++ code without a Python frame", _format_phase(site["phase"])
        rows.append([format_bytes(site["bytes"], unit), str(site["count"]), phase, line])
    title = f"{cell.arm}, {describe_point(cell.point)}: memory held at the step's peak"
    return _make_table(title, [unit[0], "blocks", "allocated in", "line"], rows)
