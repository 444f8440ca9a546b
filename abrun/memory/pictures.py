"""The pictures of a memory profile: peaks over the sizes, and who holds the memory over a step."""

import math
import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from abrun.memory.attribution import BEFORE, REST
from abrun.memory.cells import Cell, MemoryProfile
from abrun.present.figures import COLORS, legend_below, short

MORE_COLOURS = ("#332288", "#88CCEE", "#AA4499", "#117733", "#999933", "#661100")
COLOURS = (*COLORS[:4], COLORS[5], COLORS[4], *MORE_COLOURS)
GREYS = {BEFORE: "#8c8c8c", REST: "#dcdcdc"}
MOST_NAMED = 64  # characters of a site in the legend
MOST_COLUMNS = 3  # of panels
PHASES_ROOM = 0.16  # of the highest peak, above it
CHARACTER = 1 / 60  # of the width of a panel: one of a phase's name
LEAST_APART = 1 / 8  # of an axis of lengths: labels closer than that would hide each other


def _panels(num_panels: int, width: float, height: float) -> tuple[Any, Any, list[Any]]:
    """A figure, those of its axes that stand at its left, and all of them: of one scale, in rows."""
    columns = min(num_panels, MOST_COLUMNS)
    rows = -(-num_panels // columns)
    size = 1 + width * columns**0.8, height * rows
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for ax in grid.flat[num_panels:]:
        ax.remove()
    return figure, grid[:, 0], list(grid.flat[:num_panels])


def peaks(profile: MemoryProfile) -> Any:
    """Highest peak against length, a line an arm; of several microbatches or swept values a panel each."""
    unit, num_bytes = profile.unit
    points = list(dict.fromkeys((cell.point.num_sequences, cell.point.swept) for cell in profile.cells))
    figure, at_the_left, axes = _panels(len(points), width=6, height=4)
    lines: dict[str, Any] = {}
    for ax, (num_sequences, swept) in zip(axes, points, strict=True):
        here = [
            cell
            for cell in profile.cells
            if (cell.point.num_sequences, cell.point.swept) == (num_sequences, swept)
        ]
        for arm, colour in zip(profile.arms, COLOURS * 9, strict=False):
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
    for ax in at_the_left:
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
        if math.log2(named[-1] / length) >= LEAST_APART * (high - low) > 0:
            named.append(length)
    return named[::-1]


def attribution(cells: Sequence[Cell]) -> Any | None:
    """Who holds the memory over a step, an arm beside the other, on one scale."""
    if not cells:
        return None
    top = max(cell.attribution["peak_bytes"] for cell in cells if cell.attribution)
    unit, num_bytes = ("GiB", 2**30) if top >= 4 * 2**30 else ("MiB", 2**20)
    names = dict.fromkeys(name for cell in cells for name in (cell.attribution or {})["layers"])
    colours = GREYS | dict(zip((name for name in names if name not in GREYS), COLOURS * 9, strict=False))
    figure, at_the_left, axes = _panels(len(cells), width=5, height=4.6)
    for ax, cell in zip(axes, cells, strict=True):
        found = cell.attribution or {}
        layers = {name: [value / num_bytes for value in curve] for name, curve in found["layers"].items()}
        places = range(len(layers[REST]))
        ax.stackplot(places, *layers.values(), colors=[colours[name] for name in layers], step="mid")
        _phases(ax, found["phases"], len(places), top / num_bytes)
        ax.plot(found["peak_at"], found["peak_bytes"] / num_bytes, "v", color="black", markersize=6)
        said = f"{short(cell.arm, 24)}: {found['peak_bytes'] / num_bytes:,.1f} {unit}"
        ax.set_title(said + (" (out of memory)" if cell.out_of_memory else ""), fontsize=9)
        ax.set_xlabel("allocations and frees of a step, in order")
        ax.set_xticks([])
        ax.set_xlim(0, max(len(places) - 1, 1))
        ax.grid(visible=False)
    axes[0].set_ylim(0, top / num_bytes * (1 + PHASES_ROOM))
    for ax in at_the_left:
        ax.set_ylabel(f"{'allocated' if cells[0].reserved_bytes is not None else 'live tensors'}, {unit}")
    legend_below(figure, {_legend(name): Rectangle((0, 0), 1, 1, color=colours[name]) for name in names})
    return figure


def _phases(ax: Any, phases: Sequence[tuple[str, int]], num_points: int, top: float) -> None:
    """Where each begins, and its name, a word a line, where there is room for it."""
    ends = [start for _, start in phases[1:]] + [num_points]
    for (name, start), end in zip(phases, ends, strict=True):
        ax.axvline(start, color="black", alpha=0.25, linewidth=0.6)
        words = name.split("_")
        if (end - start) / num_points > CHARACTER * max(map(len, words)):
            place = (start + end) / 2, top * (1 + 0.95 * PHASES_ROOM)
            ax.text(*place, "\n".join(words), ha="center", va="top", fontsize=8, color="#444")


def _legend(name: str) -> str:
    return name if len(name) <= MOST_NAMED else f"...{name[3 - MOST_NAMED :]}"
