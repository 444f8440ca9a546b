"""What the runs of an experiment are doing, read from the store: of a growing file only what is new."""

import functools
import heapq
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from abrun.errors import StoreError
from abrun.metric_names import CURVES, STEP_TIME, is_peak_memory
from abrun.runs.access import UnreadableError
from abrun.runs.experiment import planned_runs, read_run_state, read_warm_start_states
from abrun.runs.layout import RunName
from abrun.runs.records import RunState
from abrun.runs.rundir import RunDir

TOKENS_PER_S = "performance/tokens_per_sec_per_gpu"


class Jobs(Protocol):
    """What a cluster's scheduler knows of an experiment."""

    @property
    def silent(self) -> str | None: ...

    def state_of(self, state: RunState) -> RunState: ...


FindJobs = Callable[[Path], Jobs | None]  # of an experiment's directory; abrun.launch.cluster.queued_jobs


@dataclass(slots=True, kw_only=True)
class WatchedRun:
    """What the table shows of one run."""

    state: RunState
    curves: dict[str, list[float]] = field(default_factory=dict)  # of CURVES, in step order
    latest: dict[str, Any] = field(default_factory=dict)
    step_time_s: float | None = None  # median of the last ten
    tokens_per_s: float | None = None  # a device; the same
    start_up_s: float | None = (
        None  # of the last attempt: from its process to its first step, once there is one
    )
    peak_bytes: float | None = None  # over all steps and phases

    @property
    def is_warm_start(self) -> bool:
        return self.state.name.arm == "warm-start"

    @property
    def label(self) -> str:
        return "warm start" if self.is_warm_start else str(self.state.name)

    @property
    def status(self) -> str:
        """That of its files, where a process without a step so far is `starting`."""
        return "starting" if self.state.status == "running" and self.step == 0 else self.state.status

    @property
    def step(self) -> int:
        if self.state.status == "finished":
            return self.state.num_steps
        return max(self.state.step, self.latest.get("step", 0))

    @property
    def elapsed_s(self) -> float | None:
        """Since its last start: until now, or, where it is over, its last step; None: it is not known."""
        if self.state.started_s is None:
            return None
        last_s = time.time() if self.state.status == "running" else self.latest.get("time_s")
        if not isinstance(last_s, float) or last_s < self.state.started_s:
            return None  # no step since it was started again
        return last_s - self.state.started_s

    @property
    def eta_s(self) -> float | None:
        if self.state.status != "running" or self.step_time_s is None:
            return None
        return self.step_time_s * (self.state.num_steps - self.step)


@functools.lru_cache(maxsize=64)  # the same keys in every row
def _peak_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(filter(is_peak_memory, keys))


class _Follower:
    """Keeps one run up to date, reading what its metrics file has got since the last time."""

    def __init__(self, directory: Path) -> None:
        self._lines = RunDir(directory).metrics_reader()
        self._curves: dict[str, dict[int, float]] = {key: {} for key in CURVES}
        self._latest: dict[str, Any] = {}
        self._step_times: deque[float] = deque(maxlen=10)
        self._rates: deque[float] = deque(maxlen=10)
        self._first: dict[str, Any] = {}  # row of the latest attempt
        self._peak_bytes: float | None = None

    def read(self, state: RunState) -> WatchedRun:
        for row in self._lines.read():
            self._add(row)
        return WatchedRun(
            state=state,
            curves={key: [values[step] for step in sorted(values)] for key, values in self._curves.items()},
            latest=self._latest,
            step_time_s=statistics.median(self._step_times) if self._step_times else None,
            tokens_per_s=statistics.median(self._rates) if self._rates else None,
            start_up_s=_start_up_s(state, self._first),
            peak_bytes=self._peak_bytes,
        )

    def _add(self, row: dict[str, Any]) -> None:
        step = row.get("step")
        if type(step) is not int:  # no row of a run's: whoever compares says so
            return
        for key, values in self._curves.items():
            if isinstance(row.get(key), int | float):
                values[step] = row[key]
        if isinstance(row.get(STEP_TIME), int | float):
            self._step_times.append(row[STEP_TIME])
        if isinstance(row.get(TOKENS_PER_S), int | float):
            self._rates.append(row[TOKENS_PER_S])
        if row.get("attempt") != self._latest.get("attempt") or not self._first:
            self._first = row
        for key in _peak_keys(tuple(row)):
            value = row[key]
            if isinstance(value, int | float) and math.isfinite(value):
                self._peak_bytes = max(value, self._peak_bytes or 0.0)
        self._latest = row


def _start_up_s(state: RunState, first: Mapping[str, Any]) -> float | None:
    """Seconds from the last attempt's start to the first step that it made; None before that."""
    ended, took = first.get("time_s"), first.get(STEP_TIME)
    if state.started_s is None or not isinstance(ended, int | float) or not isinstance(took, int | float):
        return None
    seconds = ended - took - state.started_s
    return seconds if seconds >= 0 else None  # below: an earlier attempt's row


class ExperimentReader:
    """The runs of an experiment as they are now, warm starts first."""

    def __init__(self, experiment_dir: Path, find_jobs: FindJobs = lambda experiment_dir: None) -> None:
        self.experiment_dir = experiment_dir
        self._jobs = find_jobs(experiment_dir)
        self._followers: dict[Path, _Follower] = {}
        self._finished: dict[RunName, WatchedRun] = {}

    def read(self) -> list[WatchedRun]:
        """Raises StoreError for a corrupt file of the experiment itself; a run's own fault is its message."""
        names = planned_runs(self.experiment_dir)
        left = [name for name in names if name not in self._finished]
        runs = [self._read(state) for state in read_warm_start_states(self.experiment_dir, left)]
        for name in names:
            if name not in self._finished:
                run = self._read(read_run_state(self.experiment_dir, name))
                if run.state.status == "finished":
                    self._finished[name] = run
                runs.append(run)
            else:
                runs.append(self._finished[name])
        return runs

    def _read(self, state: RunState) -> WatchedRun:
        follower = self._followers.setdefault(state.directory, _Follower(state.directory))
        state = self._jobs.state_of(state) if self._jobs else state
        try:
            return follower.read(state)
        except UnreadableError as error:
            return WatchedRun(state=replace(state, status="unreadable", reason=error.reason))
        except StoreError as error:
            return WatchedRun(state=replace(state, reason=error.reason))


def time_left_s(runs: Sequence[WatchedRun]) -> float | None:
    """Seconds until the runs at work and those to come have ended; None while no step has said how long.

    Runs to come begin in their order, each as soon as one at work ends, and start up as long as others did.
    """
    start_ups = [run.start_up_s for run in runs if run.start_up_s is not None]
    start_up_s = statistics.median(start_ups) if start_ups else 0.0
    ends = [_seconds_left(run, runs, start_up_s) for run in runs if run.state.status == "running"]
    to_come = [run for run in runs if run.state.status in ("pending", "waiting") and not run.is_warm_start]
    known = [end for end in ends if end is not None]
    if not ends or len(known) < len(ends):
        return None
    heapq.heapify(known)
    for run in to_come:
        seconds = _seconds_left(run, runs, start_up_s)
        if seconds is None:
            return None
        heapq.heapreplace(known, known[0] + seconds)
    return max(known)


def _seconds_left(run: WatchedRun, runs: Sequence[WatchedRun], start_up_s: float) -> float | None:
    """What is left of a run's start-up, and its steps; None where nothing says how long a step takes."""
    step_time_s = _step_time_s(run, runs)
    if step_time_s is None:
        return None
    starting_s = 0.0
    if run.start_up_s is None:
        began_s = run.state.started_s if run.state.status == "running" else None
        starting_s = max(0.0, start_up_s - (time.time() - began_s if began_s else 0.0))
    return starting_s + step_time_s * (run.state.num_steps - run.step)


def _step_time_s(run: WatchedRun, runs: Sequence[WatchedRun]) -> float | None:
    """A run's own time a step, else its arm's, else that of all of its kind."""
    kind = [other for other in runs if other.is_warm_start == run.is_warm_start]
    arm = [other for other in kind if other.state.name.arm == run.state.name.arm]
    for those in ([run], arm, kind):
        times = [other.step_time_s for other in those if other.step_time_s is not None]
        if times:
            return statistics.median(times)
    return None
