"""Runs as text: a table that fits the terminal, or a line per run."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table as RichTable
from rich.text import Text

from abrun.messages import sentence
from abrun.messages.codes import Code
from abrun.report.present.tables import Column, Table
from abrun.runs.metric_names import CURVES, GRAD_NORM, REWARD, TOKEN_MULT_PROB_ERROR
from abrun.runs.redaction import display_safe
from abrun.watch.reading import WatchedRun, estimate_time_left_s

# Terminal widths from which the table has full headings, wider gaps and elapsed times; and tokens per second.
WIDE = 104
VERY_WIDE = 132
COLOURS = {"running": "cyan", "finished": "green", "failed": "red", "pending": "dim", "waiting": "dim"}
COLOURS |= {"starting": "blue", "unreadable": "red"}
NUMBER_STYLES: dict[str, str] = dict.fromkeys(("nan", "inf", "-inf"), "bold red")
BLOCKS = "▁▂▃▄▅▆▇█"
PENDING_STEPS = "·"  # in place of the rest of the curve


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunColumn:
    heading: str
    cell: Callable[[WatchedRun], str]
    align_right: bool = True
    is_optional: bool = False  # a metric that only some trainers record

    def is_shown(self, runs: Sequence[WatchedRun]) -> bool:
        """Return False for an optional column that no run with steps has a value for."""
        return not (self.is_optional and any(run.latest for run in runs) and not any(map(self.cell, runs)))


def render(name: str, runs: Sequence[WatchedRun], width: int, height: int | None = None) -> RenderableType:
    """Return the table of runs, their messages and a progress bar, for a terminal of this size."""
    planned = [run for run in runs if not run.is_warm_start]
    all_started = all(run.state.status not in ("pending", "waiting") for run in planned)
    # Hide warm starts that have finished, or that no run waits for (their folder was deleted).
    ended_statuses = ("finished", "pending") if all_started else ("finished",)
    candidates = [run for run in runs if not (run.is_warm_start and run.state.status in ended_statuses)]
    # Warm starts first, then runs by seed, in launch order
    seeds = list(dict.fromkeys(run.state.name.seed for run in candidates))
    candidates.sort(key=lambda run: (not run.is_warm_start, seeds.index(run.state.name.seed)))
    message_lines = _message_lines(candidates, wrap=height is None)
    # Five lines are not rows: title, two lines of headings, progress bar, note on omitted rows.
    max_rows = None if height is None else max(3, height - 5 - min(len(message_lines), 5))
    selected = _select_runs(candidates, max_rows)
    renderables: list[RenderableType] = [_title_line(name, planned), _runs_table(selected, width)]
    if len(selected) < len(candidates):
        left_out = Counter(run.status for run in candidates if run not in selected)
        counts = ", ".join(f"{count} {status}" for status, count in left_out.items())
        renderables.append(Text(f"and {counts}", style="dim"))
    renderables += message_lines[:5]
    renderables.append(_progress_bar(runs, width))
    return Group(*renderables)


def _message_lines(runs: Sequence[WatchedRun], *, wrap: bool) -> list[Text]:
    """Return failures, then runs without a recent step, then what runs wait for, each message once.

    Lines are cut at the terminal's width unless `wrap`.
    """
    messages: dict[str, list[tuple[str, str]]] = {"red": [], "yellow": [], "blue": [], "dim": []}
    for run in runs:
        if run.state.message and run.state.status not in ("interrupted", "stalled"):
            style = "dim" if run.state.status == "waiting" else "red"
            messages[style].append((run.label, run.state.message))
    for group, activity in merge_activities(runs):
        style = "dim" if group[0].warm_start else "yellow" if _is_suspect(group[0]) else "blue"
        messages[style] += [(run.label, activity) for run in group]
    return [
        Text(display_safe(line), style=style, overflow="fold" if wrap else "ellipsis", no_wrap=not wrap)
        for style, labelled_messages in messages.items()
        for line in merge_same_messages(labelled_messages)
    ]


def _is_suspect(run: WatchedRun) -> bool:
    """Return True for a run without a recent step, unless abrun's own trainer is at work on its start."""
    has_limit = run.state.progress is not None and run.state.progress.limit_s is not None
    return run.is_silent and (has_limit or not run.is_starting)


def _select_runs(runs: Sequence[WatchedRun], max_rows: int | None) -> list[WatchedRun]:
    """Select up to `max_rows` runs and keep their order: running, failed, then the last that finished."""
    if max_rows is None or len(runs) <= max_rows:
        return list(runs)
    ranks = {"running": 0, "stalled": 0, "failed": 1, "interrupted": 1, "unreadable": 1}
    ranks |= {"finished": 2, "waiting": 3, "pending": 4}
    statuses = [run.state.status for run in runs]
    order = sorted(
        range(len(runs)), key=lambda i: (ranks[statuses[i]], -i if statuses[i] == "finished" else i)
    )
    return [runs[i] for i in sorted(order[:max_rows])]


def _title_line(name: str, runs: Sequence[WatchedRun]) -> Text:
    counts = Counter(run.status for run in runs)
    title = Text(display_safe(name), style="bold")
    for status, count in counts.items():
        title.append("  ")
        title.append(f"{count} {status}", style=COLOURS.get(status, "yellow"))
        silent = [run for run in runs if run.status == status and run.is_silent and not run.is_starting]
        silent_s = [run.since_step_s or 0.0 for run in silent]
        if silent_s:
            share = "" if len(silent_s) == count else f"{len(silent_s)}: "
            title.append(f" ({share}no step for {format_clock(max(silent_s))})", style="yellow")
    title.no_wrap, title.overflow = True, "ellipsis"
    return title


def _runs_table(runs: Sequence[WatchedRun], width: int) -> RenderableType:
    curve_metric = _choose_curve_metric([run for run in runs if not run.is_warm_start])
    columns = [column for column in _run_columns(curve_metric, width) if column.is_shown(runs)]
    rows = [[column.cell(run) for column in columns] for run in runs]
    # Show each seed once.
    for index in reversed(range(1, len(runs))):
        if rows[index][0] == rows[index - 1][0]:
            rows[index][0] = ""
    gap = 2 if width >= WIDE else 1
    texts = zip((column.heading for column in columns), *rows, strict=True)
    widths = [max(len(line) for text in cells for line in text.split("\n")) for cells in texts]
    curve_width = max(6, min(40, width - sum(widths) - gap * len(widths)))
    # All curves share one range, so that arms share one scale
    values = [value for run in runs for value in run.curves.get(curve_metric, ()) if math.isfinite(value)]
    value_range = (min(values), max(values)) if values else (0.0, 1.0)
    curve_index = next(index for index, column in enumerate(columns) if not column.heading)
    status_index = next(index for index, column in enumerate(columns) if column.heading == "status")
    cells = []
    for run, row in zip(runs, rows, strict=True):
        colour = "yellow" if _is_suspect(run) else COLOURS.get(run.status, "yellow")
        row_style = colour if colour == "dim" else ""
        texts = [Text(text, row_style or NUMBER_STYLES.get(text, "")) for text in row]
        texts[status_index].style = colour
        texts[curve_index] = _draw_curve(run, curve_metric, curve_width, value_range)
        cells.append(texts)
    aligned_columns = [
        Column(Text("\n" * ("\n" not in column.heading) + column.heading), column.align_right, no_wrap=True)
        for column in columns
    ]
    return Table(aligned_columns, cells).to_rich(padding=(0, gap, 0, 0))


def _run_columns(curve_metric: str, width: int) -> list[_RunColumn]:
    is_wide = width >= WIDE
    columns = [
        _RunColumn(heading="seed", cell=lambda run: "" if run.is_warm_start else str(run.state.name.seed)),
        _RunColumn(heading="arm", cell=lambda run: display_safe(run.arm_label), align_right=False),
        _RunColumn(heading="status", cell=lambda run: run.status, align_right=False),
        _RunColumn(heading="step", cell=lambda run: f"{run.step}/{run.state.num_steps}"),
        _RunColumn(
            heading=curve_metric.removeprefix("train/"),
            cell=lambda run: _format_number(run.latest.get(curve_metric), 3),
        ),
        # The curve takes the remaining width.
        _RunColumn(heading="", cell=lambda run: "", align_right=False),
        _RunColumn(
            heading="token_mult\nprob_error" if is_wide else "prob\nerror",
            cell=lambda run: _format_number(run.latest.get(TOKEN_MULT_PROB_ERROR), 4),
            is_optional=True,
        ),
        _RunColumn(
            heading="grad\nnorm",
            cell=lambda run: _format_number(run.latest.get(GRAD_NORM), 3),
            is_optional=True,
        ),
        _RunColumn(heading="peak\nmemory", cell=lambda run: format_bytes(run.peak_bytes), is_optional=True),
        _RunColumn(heading="step\ntime", cell=lambda run: _format_seconds(run.step_time_s), is_optional=True),
    ]
    if width >= VERY_WIDE:
        heading = "tokens/s\nper device"
        columns.append(_RunColumn(heading=heading, cell=_format_rate, is_optional=True))
    if is_wide:
        columns.append(_RunColumn(heading="\nelapsed", cell=lambda run: format_clock(run.elapsed_s)))
    return [*columns, _RunColumn(heading="\nETA", cell=lambda run: format_clock(run.eta_s))]


def _draw_curve(run: WatchedRun, metric: str, width: int, value_range: tuple[float, float]) -> Text:
    """Return a curve as wide as the share of steps done, then dots for the steps to come."""
    values = run.curves.get(metric, ())
    share_done = min(1.0, run.step / run.state.num_steps) if run.state.num_steps else 0.0
    curve = sparkline(values, max(1, round(width * share_done)) if values else 0, value_range)
    pending = PENDING_STEPS * (width - len(curve)) if run.status in ("running", "starting") else ""
    return Text.assemble((curve, "cyan"), (pending, "dim"))


def _choose_curve_metric(runs: Sequence[WatchedRun]) -> str:
    """Return the metric to plot: the reward, or the loss if no run has rewards."""
    return next((key for key in CURVES if any(run.curves.get(key) for run in runs)), REWARD)


def _progress_bar(runs: Sequence[WatchedRun], width: int) -> RichTable:
    """Return the steps done of all planned runs, and the time elapsed, before them that of the warm start."""
    planned = [run for run in runs if not run.is_warm_start]
    num_steps = sum(run.state.num_steps for run in planned)
    num_done = sum(min(run.step, run.state.num_steps) for run in planned)
    elapsed_s, seconds_left = compute_elapsed_s(planned), estimate_time_left_s(runs)
    if elapsed_s is not None:
        elapsed_text = f"  {format_clock(elapsed_s)} elapsed"
    else:
        warm_start_s = compute_elapsed_s([run.warm_start for run in runs if run.warm_start])
        elapsed_text = "" if warm_start_s is None else f"  {format_clock(warm_start_s)} of warm start"
    left_text = "" if seconds_left is None else f"  {format_clock(seconds_left)} left"
    text = f" {num_done}/{num_steps} steps  {num_done / max(1, num_steps):.0%}{elapsed_text}{left_text}"
    grid = RichTable.grid()
    grid.add_row(
        ProgressBar(total=max(1, num_steps), completed=num_done, width=max(10, width - len(text) - 1)), text
    )
    return grid


def sparkline(values: Sequence[float], width: int, value_range: tuple[float, float]) -> str:
    """Return a curve of at most `width` characters, each the mean of its bucket; "!" is NaN or Inf."""
    num_buckets = min(width, len(values))
    low, high = value_range
    curve = ""
    for index in range(num_buckets):
        bucket = values[index * len(values) // num_buckets : (index + 1) * len(values) // num_buckets]
        mean = sum(bucket) / len(bucket)
        if not math.isfinite(mean):
            curve += "!"
        else:
            height = (mean - low) / (high - low) if high > low else 0.5
            curve += BLOCKS[min(len(BLOCKS) - 1, int(height * len(BLOCKS)))]
    return curve


def compute_elapsed_s(runs: Sequence[WatchedRun]) -> float | None:
    """Return the seconds from the first start to now or to the last step; None if no run has started."""
    spans = [
        (start, start + elapsed_s)
        for run in runs
        if (start := run.state.started_s) is not None and (elapsed_s := run.elapsed_s) is not None
    ]
    return max(end for _, end in spans) - min(start for start, _ in spans) if spans else None


# --- a run without a recent step: what it does, for how long, and how long it may ---

# Reasons of a stalled run that say no more than that it takes no step
BARE_STALLS = (Code.NO_NEW_STEP, Code.NO_SIGN_OF_LIFE)


def describe_activity(run: WatchedRun, seconds: float | None = None) -> str | None:
    """Return what a run without a recent step does, such as `no step for 5:13 (limit 30:00)`.

    None for a run that takes steps, waits for devices or has ended. `seconds` replaces the measured time.
    """
    if run.warm_start:
        elapsed_s = run.warm_start.elapsed_s
        elapsed_text = "" if elapsed_s is None else f", {format_clock(elapsed_s)} so far"
        return f"waiting for the warm start{elapsed_text}"
    if run.since_step_s is None or not (run.is_starting or run.is_silent):
        return None
    progress, reason = run.state.progress, run.state.reason
    clock = format_clock(_silence_s(run) if seconds is None else seconds)
    limit_s, activity = (progress.limit_s, progress.activity) if progress else (None, None)
    limit = f" (limit {format_clock(limit_s)})" if limit_s is not None else ""
    suffix = f": {activity}" if activity else ""
    if reason and reason.code not in BARE_STALLS:
        return f"{sentence(reason)}{limit}"
    if run.is_starting:
        return f"starting for {clock}{suffix or ': no step logged yet'}{limit}"
    if run.step >= run.state.num_steps:
        return f"last step {clock} ago{suffix}{limit}"
    return f"no step for {clock}{suffix}{limit}"


def _silence_s(run: WatchedRun) -> float:
    """Return the seconds since the last step, or since the start of a run without one."""
    return (run.elapsed_s if run.is_starting else run.since_step_s) or 0.0


def merge_activities(runs: Iterable[WatchedRun]) -> list[tuple[list[WatchedRun], str]]:
    """Return what the runs do, each activity once, with its runs and the longest of their times."""
    groups: dict[str, list[WatchedRun]] = {}
    for run in runs:
        if activity := describe_activity(run, 0.0):
            groups.setdefault(activity, []).append(run)
    return [(group, describe_activity(max(group, key=_silence_s)) or "") for group in groups.values()]


# --- one line per run ---


def merge_same_messages(labelled_messages: Iterable[tuple[str, str]]) -> list[str]:
    """Return `run: text` lines; runs with the same text share one, such as `run and 3 more: text`."""
    labels: dict[str, list[str]] = {}
    for label, text in labelled_messages:
        labels.setdefault(text, []).append(label)
    return [
        f"{first_label}{f' and {len(other_labels)} more' if other_labels else ''}: {text}"
        for text, (first_label, *other_labels) in labels.items()
    ]


def status_line(run: WatchedRun) -> str:
    state, activity = run.state, describe_activity(run)
    if activity and (run.is_silent or run.step):
        return activity if run.is_starting else f"{run.status} {run.step}/{state.num_steps}, {activity}"
    if state.status == "running":
        return f"started, {state.num_steps} steps" if run.step == 0 else f"running, {progress_line(run)}"
    if state.status == "finished":
        return f"finished, {progress_line(run)}"
    return f"{state.status} at step {run.step}/{state.num_steps}: {state.message or 'no reason recorded'}"


def progress_line(run: WatchedRun) -> str:
    fields = [f"step {run.step}/{run.state.num_steps}"]
    curve_metric = _choose_curve_metric([run])
    for key, label, decimals in (
        (curve_metric, curve_metric.removeprefix("train/"), 3),
        (TOKEN_MULT_PROB_ERROR, "token_mult_prob_error", 4),
        (GRAD_NORM, "grad norm", 3),
    ):
        if isinstance(run.latest.get(key), int | float):
            fields.append(f"{label} {_format_number(run.latest[key], decimals)}")
    if run.step_time_s is not None:
        fields.append(f"{_format_seconds(run.step_time_s)} per step")
    return ", ".join(fields)


# --- number formats ---


def format_bytes(num_bytes: float | None) -> str:
    if num_bytes is None or not math.isfinite(num_bytes):
        return ""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{num_bytes / size:{'.3g' if num_bytes < 1000 * size else '.0f'}} {unit}"
    return f"{num_bytes / 2**10:.0f} KiB"


def _format_number(value: Any, decimals: int) -> str:
    if not isinstance(value, int | float):
        return ""
    if not math.isfinite(value):
        return str(value)
    return f"{value:.{decimals}f}" if 0.001 <= abs(value) < 100 or value == 0 else f"{value:.2e}"


def _format_rate(run: WatchedRun) -> str:
    rate = run.tokens_per_s
    return f"{rate:,.0f}" if rate is not None and math.isfinite(rate) else ""


def _format_seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s" if value < 100 else f"{value:.0f} s"


def format_clock(seconds: float | None) -> str:
    """Return seconds as `5:13` or `1:05:13`; None as nothing."""
    if seconds is None:
        return ""
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest_s:02}" if hours else f"{minutes}:{rest_s:02}"
