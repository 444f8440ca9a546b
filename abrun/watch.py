"""The live view of an experiment: a table on a terminal, plain lines elsewhere.

It only reads the store, and of a growing file only what is new, so that it works beside any launcher, on any
host that sees the run directories.
"""

import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from abrun import store
from abrun.errors import StoreError
from abrun.plan import RunName
from abrun.store import RunState

REWARD = "train/reward"
LOSS = "train/loss"
CURVES = (REWARD, LOSS)  # what a run is followed by: the first that it has
PROB_ERROR = "train/token_mult_prob_error"
GRAD_NORM = "train/grad_norm"
STEP_TIME = "timing/train/total_step_time_s"
PEAK_MEMORY = ("/peak_allocated_bytes", "/peak_live_tensor_bytes")

REFRESH_S = 1.0
LINE_EVERY_S = 300.0  # without a terminal: a sign of life from slow runs
LINES_A_RUN = 5  # without a terminal: progress lines from fast runs
WIDE = 104  # columns from which the table has full headings and two spaces between them
COLOURS = {"running": "cyan", "finished": "green", "failed": "red", "pending": "dim"}
OVER = ("finished", "failed", "interrupted")
BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(slots=True, kw_only=True)
class RunView:
    """What the table shows of one run."""

    state: RunState
    curves: dict[str, list[float]] = field(default_factory=dict)  # of CURVES, in step order
    latest: dict[str, Any] = field(default_factory=dict)
    step_time_s: float | None = None  # median of the last ten

    @property
    def is_warm_start(self) -> bool:
        return self.state.name.arm == "warm-start"

    @property
    def label(self) -> str:
        return "warm start" if self.is_warm_start else str(self.state.name)

    @property
    def step(self) -> int:
        if self.state.status == "finished":
            return self.state.num_steps
        return max(self.state.step, self.latest.get("step", 0))

    @property
    def eta_s(self) -> float | None:
        if self.state.status != "running" or self.step_time_s is None:
            return None
        return self.step_time_s * (self.state.num_steps - self.step)

    @property
    def peak_bytes(self) -> float | None:
        peaks = [
            value
            for key, value in self.latest.items()
            if key.startswith("memory/") and key.endswith(PEAK_MEMORY)
        ]
        return max(peaks, default=None)


class _Follower:
    """Keeps one run's view up to date, reading what its metrics file has got since the last time."""

    def __init__(self, directory: Path) -> None:
        self._lines = store.LineReader(directory / "metrics.jsonl")
        self._curves: dict[str, dict[int, float]] = {key: {} for key in CURVES}
        self._latest: dict[str, Any] = {}
        self._step_times: deque[float] = deque(maxlen=10)

    def view(self, state: RunState) -> RunView:
        for row in self._lines.read():
            step = row.get("step", 0)
            for key, values in self._curves.items():
                if isinstance(row.get(key), int | float):
                    values[step] = row[key]
            if isinstance(row.get(STEP_TIME), int | float):
                self._step_times.append(row[STEP_TIME])
            self._latest = row
        return RunView(
            state=state,
            curves={key: [values[step] for step in sorted(values)] for key, values in self._curves.items()},
            latest=self._latest,
            step_time_s=statistics.median(self._step_times) if self._step_times else None,
        )


class ExperimentReader:
    """The runs of an experiment as they are now, warm starts first."""

    def __init__(self, experiment_dir: Path) -> None:
        self.experiment_dir = experiment_dir
        self._followers: dict[Path, _Follower] = {}
        self._finished: dict[RunName, RunView] = {}

    def read(self) -> list[RunView]:
        """Raises StoreError for a corrupt file of the experiment itself; a run's own fault is its message."""
        views = [self._view(state) for state in store.warm_start_states(self.experiment_dir)]
        for name in store.planned_runs(self.experiment_dir):
            if name not in self._finished:
                view = self._view(store.run_state(self.experiment_dir, name))
                if view.state.status == "finished":
                    self._finished[name] = view
                views.append(view)
            else:
                views.append(self._finished[name])
        return views

    def _view(self, state: RunState) -> RunView:
        follower = self._followers.setdefault(state.directory, _Follower(state.directory))
        try:
            return follower.view(state)
        except StoreError as error:
            return RunView(state=replace(state, message=str(error)))


class View:
    """Shows an experiment while it runs: a table that redraws itself on a terminal, else a line now and then.

    A context manager. `follow` begins it, `tick` may be called as often as one likes.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._reader: ExperimentReader | None = None
        self._live: Live | None = None
        self._lines = _PlainLines(console)
        self._next_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            if error is None:
                self.tick(now=True)
        finally:
            if self._live:
                self._live.stop()

    def follow(self, experiment_dir: Path) -> None:
        self._reader = ExperimentReader(experiment_dir)
        if self._console.is_terminal:
            # Drawn by tick alone: a thread of rich's would draw while a signal is being handled.
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()

    def say(self, line: str) -> None:
        self._console.print(escape(line), soft_wrap=True, highlight=False)

    def tick(self, *, now: bool = False) -> list[RunView]:
        """Redraw if a second has passed. Returns the runs, none where it was not time yet."""
        if self._reader is None or (time.monotonic() < self._next_s and not now):
            return []
        self._next_s = time.monotonic() + REFRESH_S
        views = self._reader.read()
        if self._live:
            name = self._reader.experiment_dir.name
            self._live.update(
                render(name, views, self._console.width, self._console.height - 1), refresh=True
            )
        else:
            self._lines.show(views)
        return views


def watch(experiment_dir: Path, console: Console) -> None:
    """Follow an experiment until all its runs have ended, or nobody runs it any more."""
    store.open_experiment(experiment_dir)
    with View(console) as view:
        view.follow(experiment_dir)
        while True:
            statuses = {run.state.status for run in view.tick(now=True)}
            launched = store.launcher_of(experiment_dir)
            if statuses <= set(OVER) or not (launched or "running" in statuses):
                break
            time.sleep(REFRESH_S)
    if not statuses <= {"finished"} and not launched:
        console.print("nobody launches it now; continue it with: abrun launch ... --resume", highlight=False)


class _PlainLines:
    """One line when a run starts or ends, and a few in between."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: dict[Path, str] = {}
        self._shown: dict[Path, tuple[int, float]] = {}  # the step of the last line, and when it was printed

    def show(self, views: Iterable[RunView]) -> None:
        for view in views:
            key, status = view.state.directory, view.state.status
            before = self._status.get(key, "pending")
            self._status[key] = status
            if status != before:
                self._print(view, _status_line(view))
            elif status == "running" and self._is_time(view):
                self._print(view, _progress_line(view))

    def _is_time(self, view: RunView) -> bool:
        step, shown_s = self._shown[view.state.directory]
        share = LINES_A_RUN * (view.step - step) >= max(1, view.state.num_steps)
        late = view.step > step and time.monotonic() - shown_s > LINE_EVERY_S
        return (share or late) and view.step < view.state.num_steps  # the end has a line of its own

    def _print(self, view: RunView, text: str) -> None:
        self._shown[view.state.directory] = (view.step, time.monotonic())
        clock = time.strftime("%H:%M:%S")
        self._console.print(f"{clock} {view.label}: {text}", soft_wrap=True, highlight=False, markup=False)


def _status_line(view: RunView) -> str:
    state = view.state
    if state.status == "running":
        return f"started, {state.num_steps} steps" if view.step == 0 else f"running, {_progress_line(view)}"
    if state.status == "finished":
        return f"finished, {_progress_line(view)}"
    return f"{state.status} at step {view.step}/{state.num_steps}: {state.message or 'no reason recorded'}"


def _progress_line(view: RunView) -> str:
    parts = [f"step {view.step}/{view.state.num_steps}"]
    followed = _followed([view])
    for key, label in (
        (followed, followed.removeprefix("train/")),
        (PROB_ERROR, "token_mult_prob_error"),
        (GRAD_NORM, "grad norm"),
    ):
        if isinstance(view.latest.get(key), int | float):
            parts.append(f"{label} {_number(view.latest[key], 4 if key == PROB_ERROR else 3)}")
    if view.step_time_s is not None:
        parts.append(f"{_seconds(view.step_time_s)} a step")
    return ", ".join(parts)


# --- the table ---


def render(name: str, views: Sequence[RunView], width: int, height: int | None = None) -> RenderableType:
    """Table, progress bar and what went wrong, for a terminal of that size."""
    runs = [view for view in views if not view.is_warm_start]
    views = [view for view in views if not (view.is_warm_start and view.state.status == "finished")]
    troubles = [view for view in views if view.state.message and view.state.status != "interrupted"]
    # Lines that are not rows: title, two of headings, bar, and the note on rows left out.
    room = None if height is None else max(3, height - 5 - min(len(troubles), 5))
    shown = _most_telling(views, room)
    parts: list[RenderableType] = [_title(name, runs), _table(shown, width)]
    if len(shown) < len(views):
        left_out = Counter(view.state.status for view in views if view not in shown)
        counts = ", ".join(f"{count} {status}" for status, count in left_out.items())
        parts.append(Text(f"and {counts}", style="dim"))
    parts += [
        Text(f"{view.label}: {view.state.message}", style="red", overflow="ellipsis", no_wrap=True)
        for view in troubles[:5]
    ]
    parts.append(_progress(runs, width))
    return Group(*parts)


def _most_telling(views: Sequence[RunView], room: int | None) -> list[RunView]:
    """All where there is room; else those at work or in trouble first, then the latest to finish."""
    if room is None or len(views) <= room:
        return list(views)
    ranks = {"running": 0, "stalled": 0, "failed": 1, "interrupted": 1, "finished": 2, "pending": 3}
    order = sorted(
        range(len(views)),
        key=lambda i: (ranks[views[i].state.status], -i if views[i].state.status == "finished" else i),
    )
    return [views[i] for i in sorted(order[:room])]


def _title(name: str, runs: Sequence[RunView]) -> Text:
    counts = Counter(view.state.status for view in runs)
    title = Text(name, style="bold")
    for status, count in counts.items():
        title.append("  ")
        title.append(f"{count} {status}", style=COLOURS.get(status, "yellow"))
    title.no_wrap, title.overflow = True, "ellipsis"
    return title


def _table(views: Sequence[RunView], width: int) -> Table:
    wide = width >= WIDE
    followed = _followed([view for view in views if not view.is_warm_start])
    rows = [_cells(view, followed) for view in views]
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
    limits = _limits(views, followed)
    for index, heading in enumerate(headings):
        heading = heading if "\n" in heading else f"\n{heading}"
        table.add_column(heading, justify="left" if index in (0, 2, 5) else "right", no_wrap=True)
    for view, cells in zip(views, rows, strict=True):
        colour = COLOURS.get(view.state.status, "yellow")
        cells[5] = sparkline(view.curves.get(followed, ()), curve, limits)
        table.add_row(*(Text(text, style=_style(i, text, colour)) for i, text in enumerate(cells)))
    return table


def _style(column: int, text: str, colour: str) -> str:
    if colour == "dim" or column == 2:
        return colour
    return "bold red" if text in ("nan", "inf", "-inf") else "cyan" if column == 5 else ""


def _followed(views: Sequence[RunView]) -> str:
    """The metric to show of these runs: the reward, or the loss where no run has rewards."""
    return next((key for key in CURVES if any(view.curves.get(key) for view in views)), REWARD)


def _cells(view: RunView, followed: str) -> list[str]:
    state, latest = view.state, view.latest
    return [
        state.name.arm,
        "" if view.is_warm_start else _seed(state.name),
        state.status,
        f"{view.step}/{state.num_steps}",
        _number(latest.get(followed), 3),
        "",  # the curve gets what room is left
        _number(latest.get(PROB_ERROR), 4),
        _number(latest.get(GRAD_NORM), 3),
        memory(view.peak_bytes),
        _seconds(view.step_time_s),
        _clock(view.eta_s),
    ]


def _seed(name: RunName) -> str:
    return f"{name.seed}-aa{name.rerun}" if name.rerun else str(name.seed)


def _progress(runs: Sequence[RunView], width: int) -> Table:
    total = sum(view.state.num_steps for view in runs)
    done = sum(min(view.step, view.state.num_steps) for view in runs)
    speed = sum(1 / view.step_time_s for view in runs if view.step_time_s and view.state.status == "running")
    left = f"{_clock((total - done) / speed)} left" if speed else ""
    text = f" {done}/{total} steps  {done / max(1, total):.0%}  {left}".rstrip()
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


def _limits(views: Sequence[RunView], followed: str) -> tuple[float, float]:
    """One scale for all curves, so that arms can be compared by eye."""
    values = (value for view in views for value in view.curves.get(followed, ()))
    finite = [value for value in values if math.isfinite(value)]
    return (min(finite), max(finite)) if finite else (0.0, 1.0)


def status_of_experiments(runs_dir: Path) -> RenderableType:
    """One row an experiment. Raises StoreError where the folder is missing."""
    if not runs_dir.is_dir():
        raise StoreError(f"{runs_dir}: no such folder; launch a recipe first, or give another --runs-dir")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for heading in ("experiment", "runs", "steps", "launched by"):
        table.add_column(heading)
    paths = sorted(path.parent for path in runs_dir.glob("*/experiment.json"))
    for experiment_dir in paths:
        states = [store.run_state(experiment_dir, name) for name in store.planned_runs(experiment_dir)]
        counts = Counter(state.status for state in states)
        total = sum(state.num_steps for state in states)
        done = sum(state.num_steps if state.status == "finished" else state.step for state in states)
        table.add_row(
            experiment_dir.name,
            ", ".join(f"{count} {status}" for status, count in counts.items()),
            f"{done}/{total}",
            store.launcher_of(experiment_dir) or "",
        )
    return table if paths else Text(f"{runs_dir}: no experiments yet")


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
