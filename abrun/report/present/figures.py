"""Style and saving of figures. Importing this module does not import matplotlib."""

import contextlib
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from abrun.runs.files import PUBLIC_MODE, write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The palette of Okabe and Ito, safe for colour-blind readers. The baseline has the first colour.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
FIGURE_FORMATS = ("png", "svg")
LEGEND_ROW_INCHES = 0.19
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.framealpha": 0.8,
    "legend.edgecolor": "none",
    "legend.fontsize": 8,
    # A metric may be called $x$.
    "text.parse_math": False,
    # Without a salt, the ids in an SVG are random and the bytes differ from run to run.
    "svg.hashsalt": "abrun",
    "svg.fonttype": "none",
}


@contextlib.contextmanager
def figure_style() -> Iterator[None]:
    """Apply the common style while figures are drawn and saved."""
    from matplotlib import rc_context

    with rc_context(STYLE), warnings.catch_warnings():
        # matplotlib warns of each letter that the font lacks.
        warnings.simplefilter("ignore", UserWarning)
        yield


def save_figure(figure: "Figure", stem: Path, formats: Sequence[str] = FIGURE_FORMATS) -> list[Path]:
    """Write the figure in each format and return the paths. The same figure gives the same bytes."""
    if layout := figure.get_layout_engine():
        # Lay out once, so that all formats agree.
        layout.execute(figure)
        figure.set_layout_engine("none")
    paths = [stem.with_name(f"{stem.name}.{form}") for form in formats]
    for form, path in zip(formats, paths, strict=True):
        # Keep the date and the version of matplotlib out of the file.
        metadata = {"Date": None} if form == "svg" else {"Software": None}
        drawing = io.BytesIO()
        figure.savefig(drawing, format=form, dpi=150, metadata=metadata)
        write_file(path, drawing.getvalue(), mode=PUBLIC_MODE)
    return paths


def add_legend_below(figure: "Figure", handles: Mapping[str, Any], columns: int = 2) -> None:
    """Add one legend for all panels below them. The figure grows, so the panels keep their height."""
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW_INCHES * (1 + -(-len(handles) // columns)))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)


def shorten(name: str, max_chars: int) -> str:
    """Shorten a name to `max_chars` characters by cutting its middle: names often differ at their ends."""
    return name if len(name) <= max_chars else f"{name[: max_chars // 2 - 1]}...{name[2 - max_chars // 2 :]}"
