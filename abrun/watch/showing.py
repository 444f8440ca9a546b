"""Runs as people read them: a table for a terminal's size, a line a run elsewhere."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table as RichTable
from rich.text import Text

from abrun.metric_names import CURVES, GRAD_NORM, REWARD, TOKEN_MULT_PROB_ERROR
from abrun.present.tables import Column, Table
from abrun.redaction import shown
from abrun.watch.reading import WatchedRun, time_left_s

WIDE = 104  # columns from which the table has full headings, two spaces between them, and elapsed times
VERY_WIDE = 132  # and tokens per second
COLOURS = {"running": "cyan", "finished": "green", "failed": "red", "pending": "dim", "waiting": "dim"}
COLOURS |= {"starting": "blue", "unreadable": "red"}
BLOCKS = "▁▂▃▄▅▆▇█"
TO_COME = "·"  # where a curve will be


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    heading: str
    cell: Callable[[WatchedRun], str]
    right: bool = True
    recorded: bool = False  # by some trainers, and not by others

    def is_shown(self, runs: Sequence[WatchedRun]) -> bool:
        """Unless there are steps, and none of them has it."""
        return not (self.recorded and any(run.latest for run in runs) and not any(map(self.cell, runs)))


def render(
    name: str,
    runs: Sequence[WatchedRun],
    width: int,
    height: int | None = None,
) -> RenderableType:
    """Table, what went wrong and progress, for a terminal of that size."""
    planned = [run for run in runs if not run.is_warm_start]
    begun = all(run.state.status not in ("pending", "waiting") for run in planned)
    # A warm start that is over, or (its folder deleted since) that nothing waits for, is no news.
    over = ("finished", "pending") if begun else ("finished",)
    listed = [run for run in runs if not (run.is_warm_start and run.state.status in over)]
    listed = _by_pair(listed)
    troubles = _troubles(listed, whole=height is None)
    # Lines that are not rows: title, two of headings, bar, and the note on rows left out.
    room = None if height is None else max(3, height - 5 - min(len(troubles), 5))
    fitting = _most_telling(listed, room)
    parts: list[RenderableType] = [_title(name, planned), _table(fitting, width)]
    if len(fitting) < len(listed):
        left_out = Counter(run.status for run in listed if run not in fitting)
        counts = ", ".join(f"{count} {status}" for status, count in left_out.items())
        parts.append(Text(f"and {counts}", style="dim"))
    parts += troubles[:5]
    parts.append(_progress(planned, time_left_s(runs), width))
    return Group(*parts)


def _by_pair(runs: Sequence[WatchedRun]) -> list[WatchedRun]:
    """Warm starts first, then the runs of each seed together, in the order in which they are launched."""
    seeds = list(dict.fromkeys(run.state.name.seed for run in runs))
    return sorted(runs, key=lambda run: (not run.is_warm_start, seeds.index(run.state.name.seed)))


def _troubles(runs: Sequence[WatchedRun], *, whole: bool) -> list[Text]:
    """What failed, then what is waited for; a reason once, in a line each or `whole`."""
    reasons: dict[str, list[tuple[str, str]]] = {"red": [], "dim": []}
    for run in runs:
        if run.state.message and run.state.status != "interrupted":
            style = "dim" if run.state.status == "waiting" else "red"
            reasons[style].append((run.label, run.state.message))
    return [
        Text(shown(line), style=style, overflow="fold" if whole else "ellipsis", no_wrap=not whole)
        for style, of in reasons.items()
        for line in said_once(of)
    ]


def _most_telling(runs: Sequence[WatchedRun], room: int | None) -> list[WatchedRun]:
    """All where there is room; else those at work or in trouble first, then the latest to finish."""
    if room is None or len(runs) <= room:
        return list(runs)
    ranks = {
        "running": 0,
        "stalled": 0,
        "failed": 1,
        "interrupted": 1,
        "unreadable": 1,
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
    counts = Counter(run.status for run in runs)
    title = Text(shown(name), style="bold")
    for status, count in counts.items():
        title.append("  ")
        title.append(f"{count} {status}", style=COLOURS.get(status, "yellow"))
    title.no_wrap, title.overflow = True, "ellipsis"
    return title


def _table(runs: Sequence[WatchedRun], width: int) -> RenderableType:
    followed = _followed([run for run in runs if not run.is_warm_start])
    listed = [column for column in _columns(followed, width) if column.is_shown(runs)]
    rows = [[column.cell(run) for column in listed] for run in runs]
    for index in reversed(range(1, len(runs))):  # a seed once for all runs of it
        if rows[index][0] == rows[index - 1][0]:
            rows[index][0] = ""
    gap = 2 if width >= WIDE else 1
    widths = [
        max(
            len(line) for text in (column.heading, *(row[index] for row in rows)) for line in text.split("\n")
        )
        for index, column in enumerate(listed)
    ]
    room = max(6, min(40, width - sum(widths) - gap * len(widths)))
    limits = _limits(runs, followed)
    curve_at = next(index for index, column in enumerate(listed) if not column.heading)
    status_at = next(index for index, column in enumerate(listed) if column.heading == "status")
    cells = []
    for run, row in zip(runs, rows, strict=True):
        colour = COLOURS.get(run.status, "yellow")
        cells.append(
            [Text(text, style=_style(text, colour, status=i == status_at)) for i, text in enumerate(row)]
        )
        cells[-1][curve_at] = _curve(run, followed, room, limits)
    aligned = [
        Column(Text("\n" * ("\n" not in one.heading) + one.heading), one.right, no_wrap=True)
        for one in listed
    ]
    return Table(aligned, cells).rich(padding=(0, gap, 0, 0))


def _columns(followed: str, width: int) -> list[_Column]:
    wide = width >= WIDE
    columns = [
        _Column(heading="seed", cell=lambda run: "" if run.is_warm_start else str(run.state.name.seed)),
        _Column(heading="arm", cell=_arm, right=False),
        _Column(heading="status", cell=lambda run: run.status, right=False),
        _Column(heading="step", cell=lambda run: f"{run.step}/{run.state.num_steps}"),
        _Column(
            heading=followed.removeprefix("train/"), cell=lambda run: _number(run.latest.get(followed), 3)
        ),
        _Column(heading="", cell=lambda run: "", right=False),  # the curve gets what room is left
        _Column(
            heading="token_mult\nprob_error" if wide else "prob\nerror",
            cell=lambda run: _number(run.latest.get(TOKEN_MULT_PROB_ERROR), 4),
            recorded=True,
        ),
        _Column(heading="grad\nnorm", cell=lambda run: _number(run.latest.get(GRAD_NORM), 3), recorded=True),
        _Column(heading="peak\nmemory", cell=lambda run: memory(run.peak_bytes), recorded=True),
        _Column(heading="step\ntime", cell=lambda run: _seconds(run.step_time_s), recorded=True),
    ]
    if width >= VERY_WIDE:
        rate = "tokens/s\na device"
        columns.append(_Column(heading=rate, cell=lambda run: _rate(run.tokens_per_s), recorded=True))
    if wide:
        columns.append(_Column(heading="\nelapsed", cell=lambda run: _clock(run.elapsed_s)))
    return [*columns, _Column(heading="\nETA", cell=lambda run: _clock(run.eta_s))]


def _curve(run: WatchedRun, followed: str, room: int, limits: tuple[float, float]) -> Text:
    """What there is of a curve in as much of the room as steps are done, and dots for those to come."""
    values = run.curves.get(followed, ())
    share = min(1.0, run.step / run.state.num_steps) if run.state.num_steps else 0.0
    done = sparkline(values, max(1, round(room * share)) if values else 0, limits)
    to_come = TO_COME * (room - len(done)) if run.status in ("running", "starting") else ""
    return Text.assemble((done, "cyan"), (to_come, "dim"))


def _style(text: str, colour: str, *, status: bool) -> str:
    if colour == "dim" or status:
        return colour
    return "bold red" if text in ("nan", "inf", "-inf") else ""


def _followed(runs: Sequence[WatchedRun]) -> str:
    """The metric to show of these runs: the reward, or the loss where no run has rewards."""
    return next((key for key in CURVES if any(run.curves.get(key) for run in runs)), REWARD)


def _arm(run: WatchedRun) -> str:
    return shown(run.state.name.arm) + (f" aa{run.state.name.rerun}" if run.state.name.rerun else "")


def _progress(runs: Sequence[WatchedRun], seconds_left: float | None, width: int) -> RichTable:
    total = sum(run.state.num_steps for run in runs)
    done = sum(min(run.step, run.state.num_steps) for run in runs)
    elapsed_s = elapsed(runs)
    since = "" if elapsed_s is None else f"  {_clock(elapsed_s)} elapsed"
    left = "" if seconds_left is None else f"  {_clock(seconds_left)} left"
    text = f" {done}/{total} steps  {done / max(1, total):.0%}{since}{left}"
    grid = RichTable.grid()
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


def elapsed(runs: Sequence[WatchedRun]) -> float | None:
    """Seconds from the first start to now, or to the last step of the last run; None: none began."""
    spans = [(run.state.started_s, run.elapsed_s) for run in runs]
    known = [(start, start + took) for start, took in spans if start is not None and took is not None]
    return max(end for _, end in known) - min(start for start, _ in known) if known else None


# --- a run in a line ---


def said_once(lines: Iterable[tuple[str, str]]) -> list[str]:
    """`run: text`, and for several runs with the same text the first and how many more."""
    labels: dict[str, list[str]] = {}
    for label, text in lines:
        labels.setdefault(text, []).append(label)
    return [
        f"{first}{f' and {len(more)} more' if more else ''}: {text}"
        for text, (first, *more) in labels.items()
    ]


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


def _rate(value: Any) -> str:
    return f"{value:,.0f}" if isinstance(value, int | float) and math.isfinite(value) else ""


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
