"""Runs as people read them: a table for a terminal's size, a line a run elsewhere."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from abrun.layout import RunName
from abrun.metric_names import CURVES, GRAD_NORM, REWARD, TOKEN_MULT_PROB_ERROR
from abrun.redaction import shown
from abrun.watch.reading import WatchedRun, time_left_s

WIDE = 104  # columns from which the table has full headings and two spaces between them
COLOURS = {"running": "cyan", "finished": "green", "failed": "red", "pending": "dim", "waiting": "dim"}
BLOCKS = "▁▂▃▄▅▆▇█"


def render(name: str, runs: Sequence[WatchedRun], width: int, height: int | None = None) -> RenderableType:
    """Table, progress bar and what went wrong, for a terminal of that size."""
    planned = [run for run in runs if not run.is_warm_start]
    begun = all(run.state.status not in ("pending", "waiting") for run in planned)
    # A warm start that is over, or (its folder deleted since) that nothing waits for, is no news.
    over = ("finished", "pending") if begun else ("finished",)
    listed = [run for run in runs if not (run.is_warm_start and run.state.status in over)]
    troubles = [run for run in listed if run.state.message and run.state.status != "interrupted"]
    # Lines that are not rows: title, two of headings, bar, and the notes on rows left out and skimmed.
    room = None if height is None else max(3, height - 6 - min(len(troubles), 5))
    fitting = _most_telling(listed, room)
    parts: list[RenderableType] = [_title(name, planned), _table(fitting, width)]
    if len(fitting) < len(listed):
        left_out = Counter(run.state.status for run in listed if run not in fitting)
        counts = ", ".join(f"{count} {status}" for status, count in left_out.items())
        parts.append(Text(f"and {counts}", style="dim"))
    for run in troubles[:5]:
        text = f"{run.label}: {shown(run.state.message or '')}"
        parts.append(Text(text, style=_trouble(run), overflow="ellipsis", no_wrap=True))
    if any(run.skimmed for run in fitting):
        parts.append(Text("curve, peak memory: of some steps of long runs", style="dim"))
    parts.append(_progress(planned, time_left_s(runs), width))
    return Group(*parts)


def _trouble(run: WatchedRun) -> str:
    return "dim" if run.state.status == "waiting" else "red"


def _most_telling(runs: Sequence[WatchedRun], room: int | None) -> list[WatchedRun]:
    """All where there is room; else those at work or in trouble first, then the latest to finish."""
    if room is None or len(runs) <= room:
        return list(runs)
    ranks = {
        "running": 0,
        "stalled": 0,
        "failed": 1,
        "interrupted": 1,
        "finished": 2,
        "waiting": 3,
        "pending": 4,
    }
    order = sorted(
        range(len(runs)),
        key=lambda i: (ranks[runs[i].state.status], -i if runs[i].state.status == "finished" else i),
    )
    return [runs[i] for i in sorted(order[:room])]


def _title(name: str, runs: Sequence[WatchedRun]) -> Text:
    counts = Counter(run.state.status for run in runs)
    title = Text(shown(name), style="bold")
    for status, count in counts.items():
        title.append("  ")
        title.append(f"{count} {status}", style=COLOURS.get(status, "yellow"))
    title.no_wrap, title.overflow = True, "ellipsis"
    return title


def _table(runs: Sequence[WatchedRun], width: int) -> Table:
    wide = width >= WIDE
    followed = _followed([run for run in runs if not run.is_warm_start])
    rows = [_cells(run, followed) for run in runs]
    headings = [
        "arm",
        "seed",
        "status",
        "step",
        followed.removeprefix("train/"),
        "",
        "token_mult\nprob_error" if wide else "prob\nerror",
    ]
    headings += ["grad\nnorm", "peak\nmemory", "step\ntime", "\nETA"]
    gap = 2 if wide else 1
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold", show_edge=False)
    columns = list(zip(*rows, strict=True)) or [()] * len(headings)
    widths = [
        max(len(line) for text in (heading, *cells) for line in str(text).split("\n"))
        for heading, cells in zip(headings, columns, strict=True)
    ]
    curve = max(6, min(40, width - sum(widths) - gap * len(widths)))
    limits = _limits(runs, followed)
    for index, heading in enumerate(headings):
        heading = heading if "\n" in heading else f"\n{heading}"
        table.add_column(heading, justify="left" if index in (0, 2, 5) else "right", no_wrap=True)
    for run, cells in zip(runs, rows, strict=True):
        colour = COLOURS.get(run.state.status, "yellow")
        cells[5] = sparkline(run.curves.get(followed, ()), curve, limits)
        table.add_row(*(Text(text, style=_style(i, text, colour)) for i, text in enumerate(cells)))
    return table


def _style(column: int, text: str, colour: str) -> str:
    if colour == "dim" or column == 2:
        return colour
    return "bold red" if text in ("nan", "inf", "-inf") else "cyan" if column == 5 else ""


def _followed(runs: Sequence[WatchedRun]) -> str:
    """The metric to show of these runs: the reward, or the loss where no run has rewards."""
    return next((key for key in CURVES if any(run.curves.get(key) for run in runs)), REWARD)


def _cells(run: WatchedRun, followed: str) -> list[str]:
    state, latest = run.state, run.latest
    return [
        shown(state.name.arm),
        "" if run.is_warm_start else _seed(state.name),
        state.status,
        f"{run.step}/{state.num_steps}",
        _number(latest.get(followed), 3),
        "",  # the curve gets what room is left
        _number(latest.get(TOKEN_MULT_PROB_ERROR), 4),
        _number(latest.get(GRAD_NORM), 3),
        memory(run.peak_bytes),
        _seconds(run.step_time_s),
        _clock(run.eta_s),
    ]


def _seed(name: RunName) -> str:
    return f"{name.seed}-aa{name.rerun}" if name.rerun else str(name.seed)


def _progress(runs: Sequence[WatchedRun], seconds_left: float | None, width: int) -> Table:
    total = sum(run.state.num_steps for run in runs)
    done = sum(min(run.step, run.state.num_steps) for run in runs)
    left = "" if seconds_left is None else f"  {_clock(seconds_left)} left"
    text = f" {done}/{total} steps  {done / max(1, total):.0%}{left}"
    grid = Table.grid()
    grid.add_row(ProgressBar(total=max(1, total), completed=done, width=max(10, width - len(text) - 1)), text)
    return grid


def sparkline(values: Sequence[float], width: int, limits: tuple[float, float]) -> str:
    """A curve of at most `width` characters, each the mean of its share of the values; "!" is NaN or Inf."""
    buckets = min(width, len(values))
    low, high = limits
    curve = ""
    for index in range(buckets):
        share = values[index * len(values) // buckets : (index + 1) * len(values) // buckets]
        mean = sum(share) / len(share)
        if not math.isfinite(mean):
            curve += "!"
        else:
            height = (mean - low) / (high - low) if high > low else 0.5
            curve += BLOCKS[min(len(BLOCKS) - 1, int(height * len(BLOCKS)))]
    return curve


def _limits(runs: Sequence[WatchedRun], followed: str) -> tuple[float, float]:
    """One scale for all curves, so that arms can be compared by eye."""
    values = (value for run in runs for value in run.curves.get(followed, ()))
    finite = [value for value in values if math.isfinite(value)]
    return (min(finite), max(finite)) if finite else (0.0, 1.0)


# --- a run in a line ---


def status_line(run: WatchedRun) -> str:
    state = run.state
    if state.status == "running":
        return f"started, {state.num_steps} steps" if run.step == 0 else f"running, {progress_line(run)}"
    if state.status == "finished":
        return f"finished, {progress_line(run)}"
    return f"{state.status} at step {run.step}/{state.num_steps}: {state.message or 'no reason recorded'}"


def progress_line(run: WatchedRun) -> str:
    parts = [f"step {run.step}/{run.state.num_steps}"]
    followed = _followed([run])
    for key, label in (
        (followed, followed.removeprefix("train/")),
        (TOKEN_MULT_PROB_ERROR, "token_mult_prob_error"),
        (GRAD_NORM, "grad norm"),
    ):
        if isinstance(run.latest.get(key), int | float):
            parts.append(f"{label} {_number(run.latest[key], 4 if key == TOKEN_MULT_PROB_ERROR else 3)}")
    if run.step_time_s is not None:
        parts.append(f"{_seconds(run.step_time_s)} a step")
    return ", ".join(parts)


# --- numbers for people ---


def memory(num_bytes: float | None) -> str:
    if num_bytes is None or not math.isfinite(num_bytes):
        return ""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return (
                f"{num_bytes / size:.3g} {unit}"
                if num_bytes < 1000 * size
                else f"{num_bytes / size:.0f} {unit}"
            )
    return f"{num_bytes / 2**10:.0f} KiB"


def _number(value: Any, decimals: int) -> str:
    if not isinstance(value, int | float):
        return ""
    if not math.isfinite(value):
        return str(value)
    return f"{value:.{decimals}f}" if 0.001 <= abs(value) < 100 or value == 0 else f"{value:.2e}"


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s" if value < 100 else f"{value:.0f} s"


def _clock(value: float | None) -> str:
    if value is None:
        return ""
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
