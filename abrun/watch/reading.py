"""The state and progress of an experiment's runs. Growing files are read incrementally."""

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
from abrun.processes.progress import MIN_PATIENCE_S, PATIENCE_STEPS
from abrun.runs.experiment import WARM_START, planned_runs, read_run_state, read_warm_starts
from abrun.runs.files import UnreadableError
from abrun.runs.layout import RunName
from abrun.runs.metric_names import CURVES, STEP_TIME, is_peak_memory
from abrun.runs.rundir import RunDir
from abrun.runs.state import RunState

TOKENS_PER_S = "performance/tokens_per_sec_per_gpu"


class JobStates(Protocol):
    """The job states of an experiment, as known by a cluster's scheduler.

    `silent` says why the scheduler could not be asked, if so.
    """

    @property
    def silent(self) -> str | None: ...

    def state_of(self, state: RunState) -> RunState: ...


# Experiment directory -> its jobs, as abrun.launch.cluster.find_cluster_jobs returns them
FindJobStates = Callable[[Path], JobStates | None]


@dataclass(slots=True, kw_only=True)
class WatchedRun:
    """The state, latest values and curves of one run, as shown in the table."""

    state: RunState
    curves: dict[str, list[float]] = field(default_factory=dict)  # metric of CURVES -> values in step order
    latest: dict[str, Any] = field(default_factory=dict)
    step_time_s: float | None = None  # median of the last ten steps
    tokens_per_s: float | None = None  # per device, median of the last ten steps
    start_up_s: float | None = None  # of the last attempt, from process start to first step
    peak_bytes: float | None = None  # maximum over all steps and phases
    row_interval_s: float = 0.0  # median time between the last ten rows; 0 before the second
    warm_start: "WatchedRun | None" = None  # the warm start that a pending run waits for

    @property
    def is_warm_start(self) -> bool:
        return self.state.name == WARM_START

    @property
    def label(self) -> str:
        return "warm start" if self.is_warm_start else str(self.state.name)

    @property
    def arm_label(self) -> str:
        name = self.state.name
        return f"{name.arm} aa{name.rerun}" if name.rerun else name.arm

    @property
    def status(self) -> str:
        """The status on disk, with `starting` for a running process that has not taken a step yet."""
        return "starting" if self.state.status == "running" and self.is_starting else self.state.status

    @property
    def is_starting(self) -> bool:
        """True if a running or stalled process has not taken a step since the last start."""
        if self.state.status not in ("running", "stalled"):
            return False
        row_attempt, progress = self.latest.get("attempt"), self.state.progress
        if type(row_attempt) is int and progress and progress.attempt is not None:
            return row_attempt < progress.attempt  # the clock may have been set back since the start
        row_s, started_s = self.latest.get("time_s"), self.state.started_s
        if isinstance(row_s, int | float) and started_s is not None:
            return row_s < started_s
        return self.step == 0

    @property
    def since_step_s(self) -> float | None:
        """Seconds since the last step, or the last start if later; None for a run that is not running."""
        progress = self.state.progress
        seconds = max(0.0, time.time() - progress.last_step_s) if progress else math.inf
        return seconds if is_plausible(seconds) else None

    @property
    def is_silent(self) -> bool:
        """True for a stalled run, and after a minute and ten usual intervals without a step or a start."""
        if self.state.status == "stalled":
            return True
        patience_s = max(MIN_PATIENCE_S, PATIENCE_STEPS * self.row_interval_s)
        return self.since_step_s is not None and self.since_step_s > patience_s

    @property
    def step(self) -> int:
        if self.state.status == "finished":
            return self.state.num_steps
        return max(self.state.step, self.latest.get("step", 0))

    @property
    def ended_s(self) -> float | None:
        """Time of an ended run's end, or of its last step; None if unknown."""
        last_s = self.latest.get("time_s")
        if self.state.status not in ("finished", "failed", "interrupted"):
            return None
        return self.state.ended_s or (last_s if isinstance(last_s, float) else None)

    @property
    def elapsed_s(self) -> float | None:
        """Seconds from the last start to now, or to the last step of an ended run; None if unknown."""
        if self.state.started_s is None:
            return None
        is_active = self.state.status in ("running", "stalled")
        last_s = time.time() if is_active else self.latest.get("time_s")
        if not isinstance(last_s, float) or not is_plausible(last_s - self.state.started_s):
            # No step since the run was restarted, or a clock was set.
            return None
        return last_s - self.state.started_s

    @property
    def eta_s(self) -> float | None:
        if self.state.status != "running" or self.step_time_s is None or self.is_silent:
            return None
        return self.step_time_s * (self.state.num_steps - self.step)


# Every row of a run has the same keys.
@functools.lru_cache(maxsize=64)
def _peak_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(filter(is_peak_memory, keys))


class _RunReader:
    """An incremental reader of one run's metrics file."""

    def __init__(self, directory: Path) -> None:
        self._row_reader = RunDir(directory).metrics_reader()
        self._curves: dict[str, dict[int, float]] = {key: {} for key in CURVES}
        self._latest: dict[str, Any] = {}
        self._step_times: deque[float] = deque(maxlen=10)
        self._rates: deque[float] = deque(maxlen=10)
        self._intervals_s: deque[float] = deque(maxlen=10)
        self._first_row: dict[str, Any] = {}  # first row of the latest attempt
        self._peak_bytes: float | None = None

    def read(self, state: RunState) -> WatchedRun:
        for row in self._row_reader.read():
            self._add_row(row)
        return WatchedRun(
            state=state,
            curves={key: [values[step] for step in sorted(values)] for key, values in self._curves.items()},
            latest=self._latest,
            step_time_s=statistics.median(self._step_times) if self._step_times else None,
            tokens_per_s=statistics.median(self._rates) if self._rates else None,
            start_up_s=_measure_start_up_s(state, self._first_row),
            peak_bytes=self._peak_bytes,
            row_interval_s=statistics.median(self._intervals_s) if self._intervals_s else 0.0,
        )

    def _add_row(self, row: dict[str, Any]) -> None:
        step = row.get("step")
        # The comparison reports malformed rows.
        if type(step) is not int:
            return
        for key, values in self._curves.items():
            if isinstance(row.get(key), int | float):
                values[step] = row[key]
        if isinstance(row.get(STEP_TIME), int | float):
            self._step_times.append(row[STEP_TIME])
        if isinstance(row.get(TOKENS_PER_S), int | float):
            self._rates.append(row[TOKENS_PER_S])
        if row.get("attempt") != self._latest.get("attempt") or not self._first_row:
            self._first_row = row
        elif all(isinstance(times.get("time_s"), int | float) for times in (row, self._latest)):
            self._intervals_s.append(row["time_s"] - self._latest["time_s"])
        for key in _peak_keys(tuple(row)):
            value = row[key]
            if isinstance(value, int | float) and math.isfinite(value):
                self._peak_bytes = max(value, self._peak_bytes or 0.0)
        self._latest = row


def _measure_start_up_s(state: RunState, first_row: Mapping[str, Any]) -> float | None:
    """Return the seconds from the last attempt's start to the start of its first step; None before that."""
    step_end_s, step_time_s = first_row.get("time_s"), first_row.get(STEP_TIME)
    if not isinstance(step_end_s, int | float) or not isinstance(step_time_s, int | float):
        return None
    if state.started_s is None:
        return None
    seconds = step_end_s - step_time_s - state.started_s
    # Negative if the row is one of an earlier attempt.
    return seconds if is_plausible(seconds) else None


class ExperimentReader:
    """A reader of the current state of an experiment's runs, warm starts first."""

    def __init__(self, experiment_dir: Path, find_jobs: FindJobStates = lambda experiment_dir: None) -> None:
        self.experiment_dir = experiment_dir
        self._jobs = find_jobs(experiment_dir)
        self._followers: dict[Path, _RunReader] = {}
        self._finished: dict[RunName, WatchedRun] = {}

    def read(self) -> list[WatchedRun]:
        """Return the runs. A corrupt run has a message; a corrupt experiment file raises StoreError."""
        names = planned_runs(self.experiment_dir)
        unfinished = [name for name in names if name not in self._finished]
        runs, warm_starts, current = list[WatchedRun](), dict[RunName, WatchedRun](), {**self._finished}
        for state, dependents in read_warm_starts(self.experiment_dir, unfinished):
            runs.append(self._read_run(state))
            if runs[-1].state.status in ("running", "stalled"):
                warm_starts |= dict.fromkeys(dependents, runs[-1])
        for name in unfinished:
            run = self._read_run(read_run_state(self.experiment_dir, name))
            run.warm_start = warm_starts.get(name) if run.state.status == "pending" else None
            current[name] = run
            if run.state.status == "finished":
                self._finished[name] = run
        return [*runs, *(current[name] for name in names)]

    def _read_run(self, state: RunState) -> WatchedRun:
        follower = self._followers.setdefault(state.directory, _RunReader(state.directory))
        state = self._jobs.state_of(state) if self._jobs else state
        try:
            return follower.read(state)
        except UnreadableError as error:
            return WatchedRun(state=replace(state, status="unreadable", reason=error.reason))
        except StoreError as error:
            return WatchedRun(state=replace(state, reason=error.reason))


def estimate_time_left_s(runs: Sequence[WatchedRun]) -> float | None:
    """Estimate the seconds until all runs have ended; None until step times are known.

    Pending runs are assumed to start in order, each as soon as another ends, with the median start-up time.
    """
    start_ups = [run.start_up_s for run in runs if run.start_up_s is not None]
    start_up_s = statistics.median(start_ups) if start_ups else 0.0
    ends = [_estimate_seconds_left(run, runs, start_up_s) for run in runs if run.state.status == "running"]
    known_ends = [end for end in ends if end is not None]
    if not ends or len(known_ends) < len(ends):
        return None
    heapq.heapify(known_ends)
    for run in runs:
        if run.is_warm_start or run.state.status not in ("pending", "waiting"):
            continue
        seconds = _estimate_seconds_left(run, runs, start_up_s)
        if seconds is None:
            return None
        heapq.heapreplace(known_ends, known_ends[0] + seconds)
    return max(known_ends)


def _estimate_seconds_left(run: WatchedRun, runs: Sequence[WatchedRun], start_up_s: float) -> float | None:
    """Estimate the seconds left in a run's start-up and steps; None if no step time is known."""
    step_time_s = _estimate_step_time_s(run, runs)
    if step_time_s is None or (run.is_silent and not run.is_starting):
        return None
    seconds = step_time_s * (run.state.num_steps - run.step)
    if run.start_up_s is None:
        began_s = run.state.started_s if run.state.status == "running" else None
        seconds += min(start_up_s, max(0.0, start_up_s - (time.time() - began_s if began_s else 0.0)))
    return seconds


def _estimate_step_time_s(run: WatchedRun, runs: Sequence[WatchedRun]) -> float | None:
    """Return the step time of the run, else the median of its arm, else of all runs of its kind."""
    same_kind = [peer for peer in runs if peer.is_warm_start == run.is_warm_start]
    same_arm = [peer for peer in same_kind if peer.state.name.arm == run.state.name.arm]
    for peers in ([run], same_arm, same_kind):
        times = [peer.step_time_s for peer in peers if peer.step_time_s is not None]
        if times:
            return statistics.median(times)
    return None


MAX_START_S = 366 * 86_400.0  # longer, or negative: a clock was set meanwhile


def is_plausible(seconds: float) -> bool:
    """Return whether a difference of two times is one that a start can last."""
    return 0 <= seconds <= MAX_START_S
