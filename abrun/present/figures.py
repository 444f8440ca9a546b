"""How figures look and are saved. matplotlib is loaded by what draws them alone."""

import contextlib
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from abrun.runs.access import PUBLIC_MODE
from abrun.runs.files import write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by people with any colour vision; the baseline is always the first.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
FIGURES = ("png", "svg")
LEGEND_ROW = 0.19  # inches of height
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
    "text.parse_math": False,  # a metric may be called $x$
    "svg.hashsalt": "abrun",  # ids of an SVG are random otherwise
    "svg.fonttype": "none",
}


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Set what every figure is drawn and saved in."""
    from matplotlib import rc_context

    with rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a name's letters that the font does not have
        yield


def save_figure(figure: "Figure", stem: Path, formats: Sequence[str] = FIGURES) -> list[Path]:
    """Write the figure in each format, and return the files: the same figure gives the same bytes."""
    if layout := figure.get_layout_engine():
        layout.execute(figure)
        figure.set_layout_engine("none")  # laid out once for all formats
    paths = [stem.with_name(f"{stem.name}.{form}") for form in formats]
    for form, path in zip(formats, paths, strict=True):
        # No date and no version of matplotlib in the file.
        metadata = {"Date": None} if form == "svg" else {"Software": None}
        drawing = io.BytesIO()
        figure.savefig(drawing, format=form, dpi=150, metadata=metadata)
        write_file(path, drawing.getvalue(), mode=PUBLIC_MODE)
    return paths


def legend_below(figure: "Figure", handles: Mapping[str, Any], columns: int = 2) -> None:
    """Name what is drawn, once for all panels; the figure grows by it, so that panels keep their heights."""
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW * (1 + -(-len(handles) // columns)))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)


def short(name: str, most: int) -> str:
    """Shorten a name to `most` characters by cutting its middle: names differ at their ends."""
    return name if len(name) <= most else f"{name[: most // 2 - 1]}...{name[2 - most // 2 :]}"
