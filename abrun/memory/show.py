"""A memory profile for people: tables for the terminal, and the peaks over the sizes as PNG and SVG."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from abrun.memory.cells import Cell, Longest, MemoryProfile, Point
from abrun.present.figures import COLORS, legend_below, save_figure, short, style
from abrun.present.tables import Table, columns

VIEWER = "https://pytorch.org/memory_viz"
MAX_COLUMNS = 3  # of panels
MIN_LABEL_GAP = 1 / 8  # of an axis of lengths: closer labels would overlap


def told(cell: Cell, unit: tuple[str, int]) -> str:
    """A line on one cell, as it is done."""
    phase, num_bytes = cell.reached
    reached = f"{_amount(num_bytes, unit)} {unit[0]} in {phase}"
    where = f"{cell.arm}, {', '.join(_point(cell.point))}"
    if cell.out_of_memory:
        return f"{where}: out of memory in {cell.out_of_memory}; highest before that: {reached}"
    return f"{where}: {reached}"


def tables(profile: MemoryProfile) -> list[Table]:
    """Return peaks by phase, the allocator's counters, how far each arm goes, and whose the peaks are."""
    has_allocator = any(cell.reserved_bytes is not None for cell in profile.cells)
    return [
        _peaks(profile),
        *([_allocator(profile)] if has_allocator else []),
        *([_longest(profile)] if profile.longest else []),
        *(_held(cell, profile) for cell in _compared_cells(profile)),
    ]


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    numeric = [heading for heading in headings if heading not in _TEXT]
    by_size = range(1, len(rows)) if headings[0] == "tokens" else ()
    sections = [index for index in by_size if rows[index][0] != rows[index - 1][0]]
    return Table(columns(*headings, numeric=numeric, no_wrap=_TEXT), rows, title, sections)


_TEXT = ("arm", "highest in", "ends in", "taken in", "line")


def _peaks(profile: MemoryProfile) -> Table:
    phases = list(dict.fromkeys(phase for cell in profile.cells for phase in cell.by_phase))
    held = list(dict.fromkeys(name for cell in profile.cells for name in cell.held))
    floor = any(cell.floor for cell in profile.cells)
    places, unit = _places(profile), profile.unit
    headings = [*places, "arm", *(name.replace("_", " ") for name in held)]
    headings += [*(_named(phase) for phase in phases), "highest in", "ratio", *(["floor"] if floor else [])]
    rows = []
    for cell in profile.by_size:
        ratio = profile.ratio(cell)
        rows.append(
            [
                *(_place(cell.point, place) for place in places),
                cell.arm,
                *(_amount(cell.held.get(name), unit) for name in held),
                *(_amount(cell.by_phase.get(phase), unit) for phase in phases),
                f"out of memory in {cell.out_of_memory}" if cell.out_of_memory else _named(cell.reached[0]),
                f"{ratio:.3f}" if ratio else "-",
                *([_amount(sum(cell.floor.values()) if cell.floor else None, unit)] if floor else []),
            ]
        )
    return _table(f"{profile.name}: {profile.what}, {unit[0]}, largest of any rank", headings, rows)


def _allocator(profile: MemoryProfile) -> Table:
    places, unit = _places(profile), profile.unit
    used = list(dict.fromkeys(doing for cell in profile.cells for doing in cell.device_used))
    headings = [*places, "arm", "allocated", "reserved", "idle in split blocks", "retries"]
    headings += [f"device in use, {doing}" for doing in used]
    rows = [
        [
            *(_place(cell.point, place) for place in places),
            cell.arm,
            _amount(cell.reached[1], unit),
            _amount(cell.reserved_bytes, unit),
            _amount(cell.inactive_bytes, unit),
            "-" if cell.allocator_retries is None else str(cell.allocator_retries),
            *(_amount(cell.device_used.get(doing), unit) for doing in used),
        ]
        for cell in profile.by_size
    ]
    return _table(f"the allocator, {unit[0]}", headings, rows)


def _longest(profile: MemoryProfile) -> Table:
    keys = list(dict.fromkeys(key for one in profile.longest for key, _ in one.swept))
    first = {one.swept: one.fits for one in reversed(profile.longest) if one.arm == profile.arms[0]}
    rows = []
    for one in profile.longest:
        base, swept = first.get(one.swept), dict(one.swept)
        rows.append(
            [
                *(str(swept.get(key, "-")) for key in keys),
                one.arm,
                f"{one.fits:,}" if one.fits else "none",
                f"{one.fails:,}" if one.fails else "the model takes no more",
                one.failed_in or "-",
                f"{one.fits / base:.2f}" if one.fits and base else "-",
            ]
        )
    headings = [*map(_short, keys), "arm", "trains", "does not", "ends in", "ratio"]
    return _table(f"the most that trains: {_quantity(profile.longest)}", headings, rows)


def _quantity(longest: Sequence[Longest]) -> str:
    return "tokens of a sequence" if longest[0].what == "length" else "sequences of a microbatch"


def _places(profile: MemoryProfile) -> list[str]:
    """What cells differ in besides their arms."""
    keys = list(dict.fromkeys(key for cell in profile.cells for key, _ in cell.point.swept))
    sequences = {cell.point.num_sequences for cell in profile.cells}
    return ["tokens", *(["sequences"] if sequences != {1} else []), *map(_short, keys)]


def _place(point: Point, place: str) -> str:
    own = {"tokens": point.length, "sequences": point.num_sequences}
    value = (own | {_short(key): value for key, value in point.swept}).get(place)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _point(point: Point) -> list[str]:
    said = [f"{point.length:,} tokens"]
    said += [f"{point.num_sequences} sequences"] if point.num_sequences > 1 else []
    return said + [f"{_short(key)} {value}" for key, value in point.swept]


def _short(key: str) -> str:
    return key.rsplit(".", 1)[-1].replace("_", " ")


def _named(phase: str) -> str:
    return "rollout" if phase == "generation" else phase.replace("_", " ")


def _amount(num_bytes: int | None, unit: tuple[str, int]) -> str:
    return "-" if num_bytes is None else f"{num_bytes / unit[1]:,.1f}"


# --- whose memory a peak is ---


def hints(profile: MemoryProfile, output: Path) -> list[str]:
    """Return the lines that say where the files are, torch's snapshots among them."""
    lines = [f"peaks.json and memory.png are in {output}"]
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


def _held(cell: Cell, profile: MemoryProfile) -> Table:
    """The sites that hold most at a cell's peak."""
    assert cell.peak
    unit = profile.unit
    rows = [[_amount(cell.peak["before_bytes"], unit), "-", "-", "there before the step"]]
    for site in cell.peak["sites"]:
        line = site["line"] or "code without a Python frame"
        rows.append([_amount(site["bytes"], unit), str(site["count"]), _named(site["phase"]), line])
    title = f"{cell.arm}, {', '.join(_point(cell.point))}: what is held at the step's peak"
    return _table(title, [unit[0], "blocks", "taken in", "line"], rows)


# --- the picture ---


def show(profile: MemoryProfile, output: Path) -> None:
    """Write memory.png and memory.svg."""
    with style():
        save_figure(draw_peaks(profile), output / "memory")


def draw_peaks(profile: MemoryProfile) -> Any:
    """Highest peak against length, a line an arm; of several microbatches or swept values a panel each."""
    from matplotlib.figure import Figure

    unit, num_bytes = profile.unit
    points = list(dict.fromkeys((cell.point.num_sequences, cell.point.swept) for cell in profile.cells))
    columns = min(len(points), MAX_COLUMNS)
    rows = -(-len(points) // columns)
    figure = Figure(figsize=(1 + 6 * columns**0.8, 4 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for ax in grid.flat[len(points) :]:
        ax.remove()
    axes = list(grid.flat[: len(points)])
    lines: dict[str, Any] = {}
    for ax, (num_sequences, swept) in zip(axes, points, strict=True):
        here = [
            cell
            for cell in profile.cells
            if (cell.point.num_sequences, cell.point.swept) == (num_sequences, swept)
        ]
        for arm, colour in zip(profile.arms, COLORS * 9, strict=False):
            mine = sorted((cell for cell in here if cell.arm == arm), key=lambda cell: cell.point.length)
            fits = [(cell.point.length, cell.reached[1] / num_bytes) for cell in mine if cell.highest]
            ended = [(cell.point.length, cell.reached[1] / num_bytes) for cell in mine if not cell.highest]
            if fits:
                (lines[arm],) = ax.plot(*zip(*fits, strict=True), marker="o", color=colour)
            if ended:
                (crosses,) = ax.plot(*zip(*ended, strict=True), marker="x", linestyle="", color=colour)
                lines.setdefault(arm, crosses)
        lengths = _named_lengths({cell.point.length for cell in here})
        ax.set_xscale("log", base=2)
        ax.set_xticks(lengths, [f"{length:,}" for length in lengths])
        ax.minorticks_off()
        sequences = f"{num_sequences} sequence{'s' * (num_sequences > 1)} a microbatch"
        ax.set_xlabel("tokens of a sequence")
        said = [sequences, *(f"{key} {value}" for key, value in swept)]
        ax.set_title(textwrap.fill(", ".join(said), 64), fontsize=9)
    axes[0].set_ylim(0, 1.04 * axes[0].get_ylim()[1])  # of all: what the last of them drew is on it
    for ax in grid[:, 0]:
        ax.set_ylabel(f"{profile.what}, {unit}")
    title = f"{short(profile.name, 48)}: a training step (x: out of memory)"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    legend_below(figure, {short(arm, 48): lines[arm] for arm in profile.arms if arm in lines})
    return figure


def _named_lengths(lengths: set[int]) -> list[int]:
    """Those whose names have room on a logarithmic axis; a search tries some that are close to each other."""
    low, high = (math.log2(end(lengths)) for end in (min, max))
    named = [max(lengths)]
    for length in sorted(lengths, reverse=True):
        if math.log2(named[-1] / length) >= MIN_LABEL_GAP * (high - low) > 0:
            named.append(length)
    return named[::-1]
