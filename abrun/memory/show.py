"""A memory profile for people: tables, pictures as PNG and SVG, and a page of HTML that loads nothing."""

import html
from collections.abc import Sequence
from pathlib import Path

from abrun.memory.attribution import BEFORE
from abrun.memory.cells import Cell, Longest, MemoryProfile, Point
from abrun.present.figures import save_figure, style
from abrun.present.tables import Table, columns
from abrun.runs.access import PUBLIC
from abrun.runs.files import write_file


def told(cell: Cell, unit: tuple[str, int]) -> str:
    """A line on one cell, as it is done."""
    phase, num_bytes = cell.reached
    reached = f"{_amount(num_bytes, unit)} {unit[0]} in {phase}"
    where = f"{cell.arm}, {', '.join(_point(cell.point))}"
    if cell.out_of_memory:
        return f"{where}: out of memory in {cell.out_of_memory}; highest before that: {reached}"
    return f"{where}: {reached}"


def tables(profile: MemoryProfile) -> list[Table]:
    """For the terminal: peaks by phase; what the allocator had of the device; how far each arm goes."""
    has_allocator = any(cell.reserved_bytes is not None for cell in profile.cells)
    return [
        _peaks(profile),
        *([_allocator(profile)] if has_allocator else []),
        *([_longest(profile)] if profile.longest else []),
    ]


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    numeric = [heading for heading in headings if heading not in _TEXT]
    by_size = range(1, len(rows)) if headings[0] == "tokens" else ()
    sections = [index for index in by_size if rows[index][0] != rows[index - 1][0]]
    return Table(columns(*headings, numeric=numeric, no_wrap=_TEXT), rows, title, sections)


_TEXT = ("arm", "highest in", "ends in", "taken in", "module", "line")


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


# --- pictures and the page ---


def show(profile: MemoryProfile, output: Path) -> None:
    """Write memory.png and .svg, attribution.png and .svg, and memory.html."""
    from abrun.memory import pictures

    with style():
        drawn = {"memory": pictures.peaks(profile), "attribution": pictures.attribution(drawn_cells(profile))}
        files = [save_figure(figure, output / name) for name, figure in drawn.items() if figure is not None]
        svgs = [svg.read_text("utf-8") for _, svg in files]
        write_file(output / "memory.html", page(profile, svgs).encode(), mode=PUBLIC)


def drawn_cells(profile: MemoryProfile) -> list[Cell]:
    """Of each arm one cell with an attribution, all at one point: the largest that most arms have."""
    by_point: dict[Point, list[Cell]] = {}
    for cell in profile.cells:
        if cell.attribution:
            by_point.setdefault(cell.point, []).append(cell)
    if not by_point:
        return []
    size = max(len(cells) for cells in by_point.values())
    return max(
        (cells for cells in by_point.values() if len(cells) == size),
        key=lambda cells: (cells[0].point.length, cells[0].point.num_sequences),
    )


def page(profile: MemoryProfile, svgs: Sequence[str]) -> str:
    """The profile as one HTML file."""
    parts = [f"<h1>{html.escape(profile.name)}: memory</h1>"]
    parts += map(_section, tables(profile))
    if profile.note:
        parts.append(f"<p>{html.escape(profile.note)}</p>")
    parts += [f"<figure>{svg[svg.index('<svg') :]}</figure>" for svg in svgs]
    parts += [_section(top(cell, profile)) for cell in drawn_cells(profile)]
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{html.escape(profile.name)}: memory</title><style>{STYLE}</style><body>{''.join(parts)}"
    )


def top(cell: Cell, profile: MemoryProfile) -> Table:
    """The largest allocations at a cell's peak."""
    assert cell.attribution
    unit, attribution = profile.unit, cell.attribution
    before = attribution["layers"][BEFORE][attribution["peak_at"]]
    rows = [[_amount(before, unit), "-", "-", BEFORE, "-"]]
    rows += [
        [
            _amount(one["bytes"], unit),
            str(one["count"]),
            _named(one["phase"]),
            one["module"] or "-",
            one["line"] or "-",
        ]
        for one in attribution["top"]
    ]
    headings = [unit[0], "blocks", "taken in", "module", "line"]
    return _table(f"{cell.arm}: what is held at the peak", headings, rows)


def _section(table: Table) -> str:
    return f"<h2>{html.escape(table.title)}</h2><div class=wide>{table.html()}</div>"


STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}"
    "h2{font-size:1.05em;margin-top:2em}table{border-collapse:collapse}.wide{overflow-x:auto}"
    "td,th{padding:.25em .7em;border-bottom:1px solid #ddd;text-align:right;white-space:nowrap;"
    "font-variant-numeric:tabular-nums}.text{text-align:left!important}"
    "figure{margin:2em 0}figure svg{max-width:100%;height:auto}"
)
