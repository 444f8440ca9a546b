"""Stacked bars: where the time of each candidate goes, and how much it is."""

from collections.abc import Mapping
from pathlib import Path

COLOURS = [
    *("#0072B2", "#56B4E9", "#E69F00", "#F0E442", "#009E73"),
    *("#CC79A7", "#D55E00", "#882255", "#999999", "#444444"),
]
COLUMNS = 4  # of the legend


def chart(parts: Mapping[str, Mapping[str, float]], file: Path, unit: str) -> None:
    """A bar a candidate of its parts, as `file`.png and `file`.svg; what is 0 for all keeps its colour."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(name for of_one in parts.values() for name in of_one))
    size = 9, 1 + 0.45 * len(parts) + 0.25 * -(-len(names) // COLUMNS)
    figure, ax = pyplot.subplots(figsize=size, layout="constrained")
    left = dict.fromkeys(parts, 0.0)
    for name, colour in zip(names, COLOURS * 2, strict=False):
        widths = [of_one.get(name, 0.0) for of_one in parts.values()]
        if not any(widths):
            continue
        ax.barh(list(parts), widths, left=list(left.values()), color=colour, label=name)
        left = {one: left[one] + width for one, width in zip(parts, widths, strict=True)}
    for row, total in enumerate(left.values()):
        ax.annotate(
            f"{total:#.3g}", (total, row), (4, 0), textcoords="offset points", va="center", fontsize=9
        )
    ax.margins(x=0.08)
    ax.invert_yaxis()
    ax.set_xlabel(unit)
    ax.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, ncols=COLUMNS, fontsize=9, loc="outside upper left")
    file.parent.mkdir(parents=True, exist_ok=True)
    for ending in (".png", ".svg"):
        figure.savefig(file.with_suffix(ending), dpi=150)
    pyplot.close(figure)
