"""The pictures of a memory profile: peaks over the sizes, and who holds the memory over a step."""

from collections.abc import Sequence
from typing import Any

import matplotlib

from abrun.memory.attribution import BEFORE, REST
from abrun.memory.cells import Cell, MemoryProfile

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "abrun"
from matplotlib import pyplot  # noqa: E402
from matplotlib.patches import Rectangle  # noqa: E402

COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#E69F00",
    "#332288",
    "#88CCEE",
    "#AA4499",
    "#117733",
    "#999933",
    "#661100",
)
GREYS = {BEFORE: "#8c8c8c", REST: "#dcdcdc"}
MOST_NAMED = 64  # characters of a site in the legend


def peaks(profile: MemoryProfile) -> Any:
    """Highest peak against length, a line an arm; of several microbatches or swept values a panel each."""
    unit, num_bytes = profile.unit
    panels = list(dict.fromkeys((cell.point.num_sequences, cell.point.swept) for cell in profile.cells))
    figure, axes = pyplot.subplots(
        1,
        len(panels),
        figsize=(1 + 6 * len(panels) ** 0.8, 4.2),
        layout="constrained",
        sharey=True,
        squeeze=False,
    )
    for ax, (num_sequences, swept) in zip(axes[0], panels, strict=True):
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
                ax.plot(*zip(*fits, strict=True), marker="o", color=colour, label=arm)
            if ended:
                label = None if fits else f"{arm}: out of memory"
                ax.plot(*zip(*ended, strict=True), marker="x", linestyle="", color=colour, label=label)
        lengths = sorted({cell.point.length for cell in here})
        ax.set_xscale("log", base=2)
        ax.set_xticks(lengths, [f"{length:,}" for length in lengths])
        ax.minorticks_off()
        ax.set_ylim(bottom=0)
        sequences = f"{num_sequences} sequence{'s' * (num_sequences > 1)} a microbatch"
        ax.set_xlabel("tokens of a sequence")
        said = [sequences, *(f"{key} {value}" for key, value in swept)]
        ax.set_title(", ".join(said), loc="left", fontsize=9)
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel(f"{profile.what}, {unit}")
    axes[0][0].legend(frameon=False)
    figure.suptitle(f"{profile.name}: a training step (x: out of memory)", x=0.01, ha="left", fontsize=11)
    return figure


def attribution(cells: Sequence[Cell]) -> Any | None:
    """Who holds the memory over a step, an arm beside the other, on one scale."""
    if not cells:
        return None
    top = max(cell.attribution["peak_bytes"] for cell in cells if cell.attribution)
    unit, num_bytes = ("GiB", 2**30) if top >= 4 * 2**30 else ("MiB", 2**20)
    names = dict.fromkeys(name for cell in cells for name in (cell.attribution or {})["layers"])
    colours = GREYS | dict(zip((name for name in names if name not in GREYS), COLOURS * 9, strict=False))
    figure, axes = pyplot.subplots(
        1, len(cells), figsize=(1.5 + 4.6 * len(cells), 6), layout="constrained", sharey=True, squeeze=False
    )
    for ax, cell in zip(axes[0], cells, strict=True):
        found = cell.attribution or {}
        layers = {name: [value / num_bytes for value in curve] for name, curve in found["layers"].items()}
        places = range(len(layers[REST]))
        ax.stackplot(places, *layers.values(), colors=[colours[name] for name in layers], step="mid")
        _phases(ax, found["phases"], len(places), top / num_bytes)
        ax.plot(found["peak_at"], found["peak_bytes"] / num_bytes, "v", color="black", markersize=6)
        said = f"{cell.arm}: {found['peak_bytes'] / num_bytes:,.1f} {unit}"
        ax.set_title(said + (" (out of memory)" if cell.out_of_memory else ""), loc="left", fontsize=10)
        ax.set_xlabel("allocations and frees of a step, in order")
        ax.set_xticks([])
        ax.set_xlim(0, max(len(places) - 1, 1))
        ax.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel(f"{'allocated' if cells[0].reserved_bytes is not None else 'live tensors'}, {unit}")
    handles = [Rectangle((0, 0), 1, 1, color=colours[name]) for name in names]
    figure.legend(
        handles,
        [_legend(name) for name in names],
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=8,
    )
    return figure


def _phases(ax: Any, phases: Sequence[tuple[str, int]], num_points: int, top: float) -> None:
    """Where each begins, and its name where there is room for it."""
    ends = [start for _, start in phases[1:]] + [num_points]
    for (name, start), end in zip(phases, ends, strict=True):
        ax.axvline(start, color="black", alpha=0.25, linewidth=0.6)
        if end - start > num_points / 12:
            ax.text(
                (start + end) / 2, top * 1.02, name.replace("_", " "), ha="center", fontsize=8, color="#444"
            )


def _legend(name: str) -> str:
    return name if len(name) <= MOST_NAMED else f"...{name[3 - MOST_NAMED :]}"
