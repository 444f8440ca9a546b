"""The live view of an experiment: a table on a terminal, plain lines elsewhere.

It only reads the store, so that it works beside any launcher, on any host that sees the run directories.
"""

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from abrun.redaction import shown
from abrun.runs.experiment import open_experiment
from abrun.runs.lock import describe_launcher
from abrun.watch.log import log_of
from abrun.watch.overview import status_json, status_of_experiments
from abrun.watch.reading import ExperimentReader, FindJobs, WatchedRun
from abrun.watch.showing import progress_line, render, said_once, status_line

__all__ = [
    "ExperimentReader",
    "View",
    "WatchedRun",
    "log_of",
    "render",
    "status_json",
    "status_of_experiments",
    "watch",
]

REFRESH_S = 1.0
LINE_EVERY_S = 300.0  # without a terminal: a sign of life from slow runs
LINES_A_RUN = 5  # without a terminal: progress lines from fast runs
OVER = ("finished", "failed", "interrupted")


class View:
    """Shows an experiment while it runs: a table that redraws itself on a terminal, else a line now and then.

    A context manager. `follow` begins it, `tick` may be called as often as one likes.
    """

    def __init__(
        self,
        console: Console,
        find_jobs: FindJobs = lambda experiment_dir: None,
    ) -> None:
        self._console = console
        self._find_jobs = find_jobs
        self._reader: ExperimentReader | None = None
        self._live: Live | None = None
        self._table: RenderableType = ""
        self._lines = _PlainLines(console)
        self._next_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(OSError, ValueError):  # no error of the output is one of the runs
            try:
                if error is None:
                    self.tick(now=True)
            finally:
                if self._live:
                    self._live.update(self._table)
                    self._live.stop()

    def follow(self, experiment_dir: Path) -> None:
        self._reader = ExperimentReader(experiment_dir, self._find_jobs)
        if self._console.is_terminal:
            # Drawn by tick alone: a thread of rich's would draw while a signal is being handled.
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()

    def say(self, line: str) -> None:
        self._console.print(shown(line), soft_wrap=True, highlight=False, markup=False)

    def tick(self, *, now: bool = False) -> list[WatchedRun]:
        """Redraw if a second has passed. Returns the runs, none where it was not time yet."""
        if self._reader is None or (time.monotonic() < self._next_s and not now):
            return []
        self._next_s = time.monotonic() + REFRESH_S
        runs = self._reader.read()
        if self._live:
            name = self._reader.experiment_dir.name
            self._table = render(name, runs, self._console.width, self._console.height - 2)
            # The empty line takes the terminal's echo of ^C, which would wrap at the end of a full one: the
            # next drawing would begin a line too low and leave the top one behind.
            self._live.update(Group(self._table, Text()), refresh=True)
        else:
            self._lines.show(runs)
        return runs


def watch(
    experiment_dir: Path,
    console: Console,
    find_jobs: FindJobs = lambda experiment_dir: None,
) -> None:
    """Follow an experiment until all its runs have ended, or nobody runs it any more."""
    open_experiment(experiment_dir)
    with View(console, find_jobs) as view:
        view.follow(experiment_dir)
        while True:
            statuses = {run.state.status for run in view.tick(now=True)}
            launched = describe_launcher(experiment_dir)
            if statuses <= set(OVER) or not (launched or statuses & {"running", "waiting", "stalled"}):
                break
            time.sleep(REFRESH_S)
    if not statuses & {"unreadable"} and not statuses <= {"finished"} and not launched:
        console.print("nobody launches it now; continue it with: abrun launch ... --resume", highlight=False)


class _PlainLines:
    """One line when a run starts or ends, and a few in between."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: dict[Path, str] = {}
        self._shown: dict[Path, tuple[int, float]] = {}  # the step of the last line, and when it was printed

    def show(self, runs: Iterable[WatchedRun]) -> None:
        failed: list[tuple[str, str]] = []
        for run in runs:
            key, status = run.state.directory, run.state.status
            before = self._status.get(key, "pending")
            self._status[key] = status
            if status != before and status in ("failed", "unreadable"):
                failed.append((run.label, status_line(run)))
            elif status != before:
                self._print(run, status_line(run))
            elif status == "running" and self._is_time(run):
                self._print(run, progress_line(run))
        for line in said_once(failed):
            self._say(line)

    def _is_time(self, run: WatchedRun) -> bool:
        step, shown_s = self._shown[run.state.directory]
        share = LINES_A_RUN * (run.step - step) >= max(1, run.state.num_steps)
        late = run.step > step and time.monotonic() - shown_s > LINE_EVERY_S
        return (share or late) and run.step < run.state.num_steps  # the end has a line of its own

    def _print(self, run: WatchedRun, text: str) -> None:
        self._shown[run.state.directory] = (run.step, time.monotonic())
        self._say(f"{run.label}: {text}")

    def _say(self, line: str) -> None:
        line = f"{time.strftime('%H:%M:%S')} {line}"
        self._console.print(shown(line), soft_wrap=True, highlight=False, markup=False)
