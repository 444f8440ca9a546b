"""The live view of an experiment: a table on a terminal, plain lines elsewhere.

It only reads the run directories, so it works with any launcher, on any host that can read them.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from abrun.errors import StoreError
from abrun.messages.records import encode_reasons
from abrun.report.present.tables import Table, columns
from abrun.runs.experiment import (
    ReportedVerdict,
    inaccessible_folders,
    list_experiments,
    open_experiment,
    planned_runs,
    read_reported_verdict,
    read_run_state,
)
from abrun.runs.files import is_directory
from abrun.runs.lock import describe_launcher
from abrun.runs.redaction import display_safe
from abrun.watch.log import read_log
from abrun.watch.reading import ExperimentReader, FindJobStates, WatchedRun, estimate_time_left_s
from abrun.watch.showing import describe_activity, merge_same_messages, progress_line, render, status_line

__all__ = [
    "ExperimentReader",
    "View",
    "WatchedRun",
    "read_log",
    "render",
    "render_experiments",
    "status_json",
    "watch",
]

REFRESH_S = 1.0
# Without a terminal, a run prints LINES_PER_RUN progress lines, and a slow run one every LINE_EVERY_S.
LINE_EVERY_S = 300.0
LINES_PER_RUN = 5
ENDED_STATUSES = ("finished", "failed", "interrupted")


class View:
    """A context manager that shows a running experiment.

    On a terminal it redraws a table, elsewhere it prints occasional lines. Call `follow` once, then `tick` as
    often as you like.
    """

    def __init__(self, console: Console, find_jobs: FindJobStates = lambda experiment_dir: None) -> None:
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
        # A closed terminal must not fail the experiment.
        with contextlib.suppress(OSError, ValueError):
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
            # Only `tick` draws: rich's refresh thread could draw while a signal is being handled.
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()

    def say(self, line: str) -> None:
        self._console.print(display_safe(line), soft_wrap=True, highlight=False, markup=False)

    def tick(self, *, now: bool = False) -> list[WatchedRun]:
        """Redraw if REFRESH_S have passed or `now` is set. Return the runs, or [] if nothing was redrawn."""
        if self._reader is None or (time.monotonic() < self._next_s and not now):
            return []
        self._next_s = time.monotonic() + REFRESH_S
        runs = self._reader.read()
        if self._live:
            name = self._reader.experiment_dir.name
            self._table = render(name, runs, self._console.width, self._console.height - 2)
            # The empty line takes the terminal's echo of ^C. At the end of a full line the echo would wrap,
            # the next drawing would begin one line too low, and its top line would stay on the screen.
            self._live.update(Group(self._table, Text()), refresh=True)
        else:
            self._lines.show(runs)
        return runs


def watch(
    experiment_dir: Path, console: Console, find_jobs: FindJobStates = lambda experiment_dir: None
) -> None:
    """Show an experiment until all its runs have ended or nothing runs it any more."""
    open_experiment(experiment_dir)
    with View(console, find_jobs) as view:
        view.follow(experiment_dir)
        while True:
            # A warm start that is not there is made only if a run still waits for it.
            runs = [run for run in view.tick(now=True) if not (run.is_warm_start and run.status == "pending")]
            statuses = {run.state.status for run in runs}
            launcher = describe_launcher(experiment_dir)
            is_active = launcher or statuses & {"running", "waiting", "stalled"}
            if statuses <= set(ENDED_STATUSES) or not is_active:
                break
            time.sleep(REFRESH_S)
    if statuses == {"finished"}:
        reported, problems = _read_verdict(experiment_dir)
        verdict = f"{reported.verdict} (exit code {reported.exit_code})" if reported else "no report yet"
        state = "; ".join([verdict, *problems])
        view.say(f"all runs have finished: {state}; abrun compare {experiment_dir}")
    elif not launcher and not statuses & {"unreadable"}:
        view.say("no launcher is running; resume with: abrun launch ... --resume")


class _PlainLines:
    """A printer of one line when a run starts or ends, a few in between, and some while no step comes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: dict[Path, str] = {}
        self._shown: dict[Path, tuple[int, float]] = {}  # step and time of the last printed line
        self._silent: set[Path] = set()  # runs whose last printed line says that they take no step

    def show(self, runs: Iterable[WatchedRun]) -> None:
        failed: list[tuple[str, str]] = []
        failed_s: list[float | None] = []
        for run in runs:
            key, status = run.state.directory, run.state.status
            previous_status = self._status.get(key, "pending")
            self._status[key] = status
            if status != previous_status and status in ("failed", "unreadable"):
                failed.append((run.label, status_line(run)))
                failed_s.append(run.ended_s)
            elif run.is_silent:
                if key not in self._silent or time.monotonic() - self._shown[key][1] > LINE_EVERY_S:
                    self._print(run, status_line(run))
                    self._silent.add(key)
            elif status != previous_status:
                self._print(run, status_line(run))
            elif status == "running" and (key in self._silent or self._is_line_due(run)):
                self._print(run, progress_line(run))
        for line in merge_same_messages(failed):
            self._say(line, max(filter(None, failed_s), default=None))

    def _is_line_due(self, run: WatchedRun) -> bool:
        printed_step, printed_s = self._shown[run.state.directory]
        has_advanced = LINES_PER_RUN * (run.step - printed_step) >= max(1, run.state.num_steps)
        is_overdue = run.step > printed_step and time.monotonic() - printed_s > LINE_EVERY_S
        # The last step gets the line of the finished run.
        return (has_advanced or is_overdue) and run.step < run.state.num_steps

    def _print(self, run: WatchedRun, text: str) -> None:
        self._shown[run.state.directory] = (run.step, time.monotonic())
        self._silent.discard(run.state.directory)
        self._say(f"{run.label}: {text}", run.ended_s)

    def _say(self, line: str, time_s: float | None = None) -> None:
        """Print a line with the time of what it says: by default now."""
        moment, now = time.localtime(time_s), time.localtime()
        clock = time.strftime("%H:%M:%S" if moment[:3] == now[:3] else "%Y-%m-%d %H:%M:%S", moment)
        line = display_safe(f"{clock} {line}")
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)


MAX_QUERY_S = 5.0  # for schedulers, over all experiments


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """One experiment: the number of its runs by status, and its progress."""

    experiment: str
    runs: dict[str, int]  # status -> number of runs
    step: int  # summed over all runs
    num_steps: int  # summed over all runs
    verdict: str | None  # of its report; DESCRIPTION without a claim; None: no report
    is_verdict_old: bool  # a run started or finished after the report was written
    launched_by: str | None  # the launcher at work


def read_overviews(runs_dir: Path, find_jobs: FindJobStates) -> tuple[list[Overview], list[str]]:
    """Return all experiments, and notes on what could not be read or asked.

    Schedulers are asked about unfinished experiments, for about MAX_QUERY_S in all. Raise StoreError if the
    folder is missing.
    """
    if not is_directory(runs_dir):
        raise StoreError(f"{runs_dir}: no such folder; launch a recipe first, or give another --runs-dir")
    overviews, problems = list[Overview](), list[str]()
    query_s, num_not_asked, unreachable = 0.0, 0, set[str | None]()
    for experiment_dir in list_experiments(runs_dir):
        try:
            states = [read_run_state(experiment_dir, name) for name in planned_runs(experiment_dir)]
            all_finished = all(state.status == "finished" for state in states)
            jobs = None if all_finished else find_jobs(experiment_dir)
            if jobs and query_s < MAX_QUERY_S:
                began_s = time.monotonic()
                states = list(map(jobs.state_of, states))
                query_s += time.monotonic() - began_s
                unreachable |= {jobs.silent} - {None}
            elif jobs:
                num_not_asked += 1
        except StoreError as error:
            problems.append(str(error))
            continue
        reported, problem = _read_verdict(experiment_dir)
        problems += problem
        steps = (state.num_steps if state.status == "finished" else state.step for state in states)
        overviews.append(
            Overview(
                experiment=experiment_dir.name,
                runs=dict(Counter(state.status for state in states)),
                step=sum(steps),
                num_steps=sum(state.num_steps for state in states),
                verdict=reported and reported.verdict,
                is_verdict_old=reported is not None and reported.is_older_than(states),
                launched_by=describe_launcher(experiment_dir),
            )
        )
    problems += map(str, inaccessible_folders(runs_dir))
    if num_not_asked:
        unreachable.add(
            f"the scheduler was not asked about {num_not_asked} more experiments, after {query_s:.0f} s for "
            "others: abrun status EXPERIMENT asks about one"
        )
    return overviews, [*problems, *map(str, unreachable)]


def _read_verdict(experiment_dir: Path) -> tuple[ReportedVerdict | None, list[str]]:
    """Return the verdict in an experiment's report, if it can be read, and why it cannot."""
    try:
        return read_reported_verdict(experiment_dir), []
    except StoreError as error:
        return None, [str(error)]


def render_experiments(
    runs_dir: Path, find_jobs: FindJobStates = lambda experiment_dir: None
) -> RenderableType:
    """Return a table with a row for each experiment. Raise StoreError if the folder is missing."""
    overviews, problems = read_overviews(runs_dir, find_jobs)
    rows = [
        (
            overview.experiment,
            ", ".join(f"{count} {status}" for status, count in overview.runs.items()),
            f"{overview.step}/{overview.num_steps}",
            (overview.verdict or "-") + " (old)" * overview.is_verdict_old,
            overview.launched_by or "",
        )
        for overview in overviews
    ]
    table = Table(columns("experiment", "runs", "steps", "verdict", "launched by"), rows)
    if not (overviews or problems):
        return Text(f"{runs_dir}: no experiments yet")
    return Group(table, *(Text(display_safe(line), style="red") for line in problems))


def status_json(
    runs_dir: Path, experiment_dir: Path | None, find_jobs: FindJobStates = lambda experiment_dir: None
) -> dict[str, Any]:
    """Return all experiments of a folder, or one with its runs, as JSON."""
    if experiment_dir is None:
        overviews, problems = read_overviews(runs_dir, find_jobs)
        return {
            "runs_dir": str(runs_dir),
            "experiments": [asdict(overview) for overview in overviews],
            "notes": problems,
        }
    runs = ExperimentReader(experiment_dir, find_jobs).read()
    reported, _ = _read_verdict(experiment_dir)
    return {
        "experiment": experiment_dir.name,
        "directory": str(experiment_dir),
        "verdict": reported and reported.verdict,
        "is_verdict_old": reported is not None and reported.is_older_than([run.state for run in runs]),
        "launched_by": describe_launcher(experiment_dir),
        "time_left_s": estimate_time_left_s(runs),
        "runs": [_run_json(run) for run in runs],
    }


def _run_json(run: WatchedRun) -> dict[str, Any]:
    return {
        "run": run.label,
        "directory": str(run.state.directory),
        "status": run.status,
        "step": run.step,
        "num_steps": run.state.num_steps,
        "started_s": run.state.started_s,
        "message": run.state.message,
        "message_code": encode_reasons(run.state.reason),
        "activity": describe_activity(run),
        "since_step_s": run.since_step_s,
        "stall_limit_s": run.state.progress and run.state.progress.limit_s,
        "step_time_s": run.step_time_s,
        "eta_s": run.eta_s,
        "peak_memory_bytes": run.peak_bytes,
        "latest": dict(run.latest),
    }
