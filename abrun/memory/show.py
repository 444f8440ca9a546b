"""Tables of measured and predicted peaks, for the terminal."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from abrun.memory.cells import GIB, Cell, Longest, MemoryProfile, Point, unit_of
from abrun.metric_names import PEAK_MEMORY
from abrun.present.tables import Table, columns

if TYPE_CHECKING:
    from abrun.memory.predict import Prediction

VIEWER = "https://pytorch.org/memory_viz"
TEXT_COLUMNS = ("arm", "highest in", "ends in", "taken in", "line")
MIN_SHARE = 0.01  # of the highest predicted peak: a kind of memory below it everywhere is left out


def progress_line(cell: Cell, unit: tuple[str, int]) -> str:
    """Return the line that reports a cell as it is done."""
    phase, num_bytes = cell.reached
    reached = f"{_amount(num_bytes, unit)} {unit[0]} in {phase}"
    place = f"{cell.arm}, {_point(cell.point)}"
    if cell.out_of_memory:
        return f"{place}: out of memory in {cell.out_of_memory}; highest before that: {reached}"
    return f"{place}: {reached}"


def tables(profile: MemoryProfile) -> list[Table]:
    """Return peaks by phase, the allocator's counters, the longest that trains, and what the peaks hold."""
    has_allocator = any(cell.reserved_bytes is not None for cell in profile.cells)
    return [
        _peaks(profile),
        *([_allocator(profile)] if has_allocator else []),
        *([_longest(profile)] if profile.longest else []),
        *(_sites(cell, profile.unit) for cell in _compared_cells(profile)),
    ]


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    numeric = [heading for heading in headings if heading not in TEXT_COLUMNS]
    by_size = range(1, len(rows)) if headings[0] == "tokens" else ()
    sections = [index for index in by_size if rows[index][0] != rows[index - 1][0]]
    return Table(columns(*headings, numeric=numeric, no_wrap=TEXT_COLUMNS), rows, title, sections)


def _peaks(profile: MemoryProfile) -> Table:
    phases = list(dict.fromkeys(phase for cell in profile.cells for phase in cell.by_phase))
    held = list(dict.fromkeys(name for cell in profile.cells for name in cell.held))
    places, unit = _places(profile), profile.unit
    headings = [*places, "arm", *(name.replace("_", " ") for name in held)]
    headings += [*map(_phase_name, phases), "highest in", "ratio"]
    rows = []
    for cell in profile.by_size:
        ratio, phase = profile.ratio(cell), _phase_name(cell.reached[0])
        rows.append(
            [
                *_place(cell.point, places),
                cell.arm,
                *(_amount(cell.held.get(name), unit) for name in held),
                *(_amount(cell.by_phase.get(phase), unit) for phase in phases),
                f"out of memory in {cell.out_of_memory}" if cell.out_of_memory else phase,
                f"{ratio:.3f}" if ratio else "-",
            ]
        )
    on_gpu = profile.counter == PEAK_MEMORY[0]
    counted = "peak memory allocated on a GPU" if on_gpu else "peak of live tensors' bytes on a CPU"
    return _table(f"{profile.name}: {counted}, {unit[0]}, largest of any rank", headings, rows)


def _allocator(profile: MemoryProfile) -> Table:
    places, unit = _places(profile), profile.unit
    users = list(dict.fromkeys(activity for cell in profile.cells for activity in cell.device_used_bytes))
    headings = [*places, "arm", "allocated", "reserved", "idle in split blocks", "retries"]
    headings += [f"device in use, {activity}" for activity in users]
    rows = [
        [
            *_place(cell.point, places),
            cell.arm,
            _amount(cell.reached[1], unit),
            _amount(cell.reserved_bytes, unit),
            _amount(cell.inactive_bytes, unit),
            "-" if cell.allocator_retries is None else str(cell.allocator_retries),
            *(_amount(cell.device_used_bytes.get(activity), unit) for activity in users),
        ]
        for cell in profile.by_size
    ]
    return _table(f"the allocator, {unit[0]}", headings, rows)


def _longest(profile: MemoryProfile) -> Table:
    keys = list(dict.fromkeys(key for longest in profile.longest for key, _ in longest.swept))
    bases = {
        longest.swept: longest.fits for longest in profile.longest[::-1] if longest.arm == profile.arms[0]
    }
    rows = [_longest_row(longest, keys, bases.get(longest.swept)) for longest in profile.longest]
    headings = [*map(_short, keys), "arm", "trains", "does not", "ends in", "ratio"]
    by_length = profile.longest[0].what == "length"
    size = "tokens of a sequence" if by_length else "sequences of a microbatch"
    return _table(f"the most that trains: {size}", headings, rows)


def _longest_row(longest: Longest, keys: Sequence[str], base: int | None) -> list[str]:
    swept = dict(longest.swept)
    return [
        *(str(swept.get(key, "-")) for key in keys),
        longest.arm,
        f"{longest.fits:,}" if longest.fits else "none",
        f"{longest.fails:,}" if longest.fails else "the model takes no more",
        longest.failed_in or "-",
        f"{longest.fits / base:.2f}" if longest.fits and base else "-",
    ]


def _places(profile: MemoryProfile) -> list[str]:
    """Return the headings of what cells differ in besides their arms."""
    keys = list(dict.fromkeys(key for cell in profile.cells for key, _ in cell.point.swept))
    sequences = {cell.point.num_sequences for cell in profile.cells}
    return ["tokens", *(["sequences"] if sequences != {1} else []), *map(_short, keys)]


def _place(point: Point, places: Sequence[str]) -> list[str]:
    values = {"tokens": f"{point.length:,}", "sequences": f"{point.num_sequences:,}"}
    values |= {_short(key): f"{value:,}" if type(value) is int else str(value) for key, value in point.swept}
    return [values.get(place, "None") for place in places]


def _point(point: Point) -> str:
    sequences = [f"{point.num_sequences} sequences"] if point.num_sequences > 1 else []
    swept = (f"{_short(key)} {value}" for key, value in point.swept)
    return ", ".join([f"{point.length:,} tokens", *sequences, *swept])


def _short(key: str) -> str:
    return key.rsplit(".", 1)[-1].replace("_", " ")


def _phase_name(phase: str) -> str:
    return "rollout" if phase == "generation" else phase.replace("_", " ")


def _amount(num_bytes: int | None, unit: tuple[str, int]) -> str:
    return "-" if num_bytes is None else f"{num_bytes / unit[1]:,.1f}"


# --- what a peak holds ---


def hints(profile: MemoryProfile, output: Path) -> list[str]:
    """Return the lines that name the files, torch's snapshots among them."""
    lines = [f"peaks.json is in {output}"]
    if any(cell.peak and cell.reserved_bytes is not None for cell in profile.cells):
        lines.append(f"Each step's allocations: open cells/*/memory-snapshot.pickle there in {VIEWER}")
    return lines


def _compared_cells(profile: MemoryProfile) -> list[Cell]:
    """Return a cell of each arm, all at one point: the largest that most arms have."""
    by_point: dict[Point, list[Cell]] = {}
    for cell in profile.cells:
        if cell.peak:
            by_point.setdefault(cell.point, []).append(cell)
    return max(
        by_point.values(),
        key=lambda cells: (len(cells), cells[0].point.length, cells[0].point.num_sequences),
        default=[],
    )


def _sites(cell: Cell, unit: tuple[str, int]) -> Table:
    """Return the sites that hold most at a cell's peak."""
    assert cell.peak
    rows = [[_amount(cell.peak["before_bytes"], unit), "-", "-", "there before the step"]]
    for site in cell.peak["sites"]:
        line = site["line"] or "code without a Python frame"
        rows.append([_amount(site["bytes"], unit), str(site["count"]), _phase_name(site["phase"]), line])
    title = f"{cell.arm}, {_point(cell.point)}: what is held at the step's peak"
    return _table(title, [unit[0], "blocks", "taken in", "line"], rows)


# --- predictions ---


def prediction_table(prediction: "Prediction") -> Table:
    """Return the peak of each point and arm, and below it those of its phases, by kind."""
    most = max(peaks.highest[1] for peaks in prediction.peaks)
    by_kind = [kinds for peaks in prediction.peaks for kinds in peaks.by_phase.values()]
    kinds = [
        kind
        for kind in dict.fromkeys(kind for kinds in by_kind for kind in kinds)
        if max(kinds.get(kind, 0) for kinds in by_kind) > MIN_SHARE * most
    ]
    unit, room = unit_of([most]), ""
    if prediction.device_bytes is not None:
        room = f" of {prediction.device_bytes / GIB:.1f} GiB a device"
    title = f"{prediction.name}: predicted peak_allocated_bytes, {unit[0]}{room}"
    numbers = ["peak", "fits"] if room else ["peak"]
    blank, rows, sections = [""] * len(numbers[1:]), [], []
    for peaks in prediction.peaks:
        point = peaks.point
        swept = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in point.swept)
        size = f"{point.num_sequences} x {point.length:,} tokens, {peaks.arm}"
        sections.append(len(rows))
        fits = [prediction.fits(peaks)] if room else []
        first = (size, _amount(peaks.highest[1], unit), *fits, swept)
        rows.append([Text(cell, style="bold") for cell in first])
        for phase, of_kind in peaks.by_phase.items():
            amounts = ((kind, _amount(of_kind.get(kind, 0), unit)) for kind in kinds)
            made_of = ", ".join(f"{kind} {amount}" for kind, amount in amounts if amount != "0.0")
            rows.append([f"  {phase}", _amount(sum(of_kind.values()), unit), *blank, made_of])
        if peaks.engine_bytes is not None:
            rows.append(["  vllm, while it samples", _amount(peaks.engine_bytes, unit)])
    titles = columns("", *numbers, "made of", numeric=numbers, no_wrap=("", *numbers))
    return Table(titles, rows, f"{title}; states in {prediction.master_dtype}", sections)
