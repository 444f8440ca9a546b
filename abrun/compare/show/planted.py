"""What a comparison would have caught, as a table and in one sentence; and the library itself."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from abrun.compare.judge.planted import Sensitivity
from abrun.recipe import FAULTS, Fault
from abrun.store import write_json

if TYPE_CHECKING:
    from rich.table import Table

FILE = "sensitivity.json"
COLUMNS = ("fault", "size", "caught by", "at step", "pairs", "verdict")
LIBRARY_COLUMNS = ("name", "seam", "what it does", "size", "needs", "shows", "source")


def write_sensitivity(found: Sensitivity, not_planted: Mapping[str, str], folder: Path) -> Path:
    """All of it as JSON; `not_planted`: what the recipe lacks of what a fault needs."""
    path = folder / FILE
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, {**asdict(found), "not_planted": dict(not_planted)}, mode=0o666)
    return path


def sentence(content: Mapping[str, Any]) -> str:
    """Of `verdict.json`'s section."""
    invisible = [
        one["fault"]
        for one in content["faults"]
        if one["caught_by"] == "nothing" and one["verdict"] != "INVALID"
    ]
    rest = f"; invisible at this size: {', '.join(invisible)}" if invisible else ""
    return f"would have caught {content['num_caught']} of {content['num_judged']} planted faults{rest}"


def rows(content: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """In the order of COLUMNS."""
    return [
        (
            one["fault"],
            "-" if one["size"] is None else f"{one['size']:g} {one['unit']}",
            _evidence(one),
            "-" if one["step"] is None else str(one["step"]),
            str(one["num_pairs"]),
            one["verdict"],
        )
        for one in content["faults"]
    ]


def table(found: Sensitivity) -> "Table":
    """For a terminal."""
    return _table(COLUMNS, rows(asdict(found)))


def library() -> "Table":
    """For a terminal: without the sizes and what they show, which docs/faults.md has."""
    cells = [(one.name, one.seam, one.does, ", ".join(one.needs) or "-", one.source) for one in FAULTS]
    return _table(("name", "seam", "what it does", "needs", "source"), cells)


def library_row(fault: Fault) -> tuple[str, ...]:
    size = "-" if fault.size is None else f"{fault.size:g} {fault.unit}"
    needs = ", ".join(fault.needs) or "-"
    return fault.name, fault.seam, fault.does, size, needs, fault.shows, fault.source


def _evidence(one: Mapping[str, Any]) -> str:
    if one["verdict"] == "INVALID":
        return f"not judged: {one['reason']}"
    if one["caught_by"] == "nothing":
        return "nothing"
    return f"{one['caught_by']}: {one['metric']}" if one["metric"] else one["caught_by"]


def _table(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    from abrun.redaction import shown

    made = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold", no_wrap=column in ("name", "fault"))
    for row in cells:
        made.add_row(*(Text(shown(cell)) for cell in row))
    return made
