"""A launch: every unfinished run of a plan started as places come free, watched, and stopped when asked.

Everything a run says, it says through its directory; this module keeps `launch.json` there, with how it saw
each run end. One thread, one loop.
"""

import contextlib
import math
import os
import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from abrun.errors import AbrunError, LaunchError
from abrun.experiment.options import LaunchOptions
from abrun.experiment.plan import ExperimentPlan, RunName
from abrun.experiment.preflight.checks import untested_packages
from abrun.launch.engine import Engine, Place
from abrun.launch.prepare import prepared
from abrun.launch.queue import Job, Queue
from abrun.messages import sentence
from abrun.processes import (
    StopRequests,
    catch_stop_signals,
    count_oom_kills,
    ending_reason,
    is_slurm_oom,
    is_unexplained,
    signal_name,
)
from abrun.reasons import Code, Reason
from abrun.recipe.command import referenced_values
from abrun.redaction import hide_secrets_of, hide_values, redacted
from abrun.runs.endings import read_endings
from abrun.runs.experiment import read_run_state
from abrun.runs.lock import Lease
from abrun.runs.records import Status, recorded_reason

POLL_S = 0.2
MOST_ERRORS = 3
# Another start would take as long again, or its log would lack the same metric
HOPELESS = (Code.TIME_LIMIT_REACHED, Code.ALIAS_NOT_LOGGED)
# Printed errors that tell of a cause: a lost peer is an effect of it
CAUSES = (
    *(Code.NODE_LOST, Code.KILLED, Code.OUT_OF_MEMORY_KILLED),
    *(Code.TIME_LIMIT_REACHED, Code.STALL_LIMIT_REACHED),
)
FOREIGN_ERROR = r"^error: (.+)"  # as programs of a command's own print it, such as uv and cargo
GRACE_S = 35.0  # an agent gives its ranks 30 s between SIGTERM and SIGKILL


class Observer(Protocol):
    """Who is told what a launch does: abrun.watch.View, for one."""

    def follow(self, experiment_dir: Path) -> object:
        """The experiment's directory is whole; its runs are about to start."""
        ...

    def say(self, line: str) -> object:
        """A note for people."""
        ...

    def tick(self) -> object:
        """A few times a second, from `follow` to the end."""
        ...


def print_line(line: str) -> None:
    """Say a note in the log of a cluster's job."""
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a launch ended."""

    statuses: dict[RunName, Status]
    stopped_by: int | None  # the signal that ended it early

    @property
    def exit_code(self) -> int:
        """0 when every run finished, 1 when one did not, 128 + signal when stopped."""
        if self.stopped_by:
            return 128 + self.stopped_by
        return 0 if all(status == "finished" for status in self.statuses.values()) else 1


def run_plan(
    plan: ExperimentPlan,
    options: LaunchOptions,
    *,
    engine: Engine,
    observer: Observer,
    grace_s: float = GRACE_S,
    only: Collection[RunName] | None = None,
) -> Outcome:
    """Run every unfinished run of a plan, and the warm starts that they need; returns when all have ended.

    `only`: these runs alone, and the outcome is theirs; the directory is that of the whole plan. Raises
    LaunchError or StoreError, before anything has started, where the plan cannot run there.
    """
    refusals, untested = engine.refusals(plan), untested_packages(plan)
    with prepared(plan, options, refusals, observer.say) as place:
        experiment_dir = place.experiment_dir
        observer.follow(experiment_dir)
        for reason in untested:
            _quiet(observer.say)(sentence(reason))
        wanted = [run for run in plan.runs if only is None or run.name in only]
        queue = Queue(replace(plan, runs=tuple(wanted)), experiment_dir)
        arguments = queue, engine, place.lease, grace_s, place.git
        stopped_by = Supervisor(*arguments, say=observer.say, tick=observer.tick).run()
    states = [read_run_state(experiment_dir, run.name) for run in wanted]
    statuses: dict[RunName, Status] = {state.name: state.status for state in states}
    failed = {job.run.path for job in queue.jobs if job.status == "failed"}
    for state in states:
        if state.status == "finished" and state.directory in failed:  # and could not be repaired
            statuses[state.name] = "failed"
    return Outcome(statuses=statuses, stopped_by=stopped_by)


def _quiet(call: Callable[..., object]) -> Callable[..., None]:
    """Return the call without its I/O errors: none of what an observer reads or prints ends a run."""

    def quiet(*arguments: object) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: of a closed file
            call(*arguments)

    return quiet


class Supervisor:
    """Starts jobs in order as places come free, records how they end, and stops them all when asked."""

    def __init__(
        self,
        queue: Queue,
        engine: Engine,
        lease: Lease,
        grace_s: float,
        git: dict[str, Any] | None,
        *,
        say: Callable[[str], object],
        tick: Callable[[], object] = lambda: None,
    ) -> None:
        self._queue = queue
        self._engine = engine
        self._say, self._tick = _quiet(say), _quiet(tick)
        self._lease = lease
        self._grace_s = grace_s
        self._requests = StopRequests()
        self._git = git

    def run(self) -> int | None:
        """Returns the signal that stopped it, or None when every job has ended by itself."""
        expected = [(job.run, job.config) for job in self._queue.jobs if not job.done]
        hide_secrets_of(os.environ)
        for job in self._queue.jobs:
            hide_values(referenced_values(job.config, os.environ))
        with catch_stop_signals() as self._requests, self._engine.expecting(expected):
            try:
                while self._requests.first_signal is None and not self._queue.done:
                    self._reap()
                    self._start_ready()
                    self._refresh_locks()
                    self._tick()
                    time.sleep(POLL_S)
                if self._requests.first_signal is not None:
                    self._stop_all()
            except BaseException:
                with contextlib.suppress(Exception):  # the first error is the one to tell
                    self._stop_all()
                self._kill(self._queue.running)
                raise
            finally:
                for job in self._queue.jobs:
                    job.lock.close()
        self._tick()
        return self._requests.first_signal

    def _refresh_locks(self) -> None:
        """Raises TakenOverError where another launcher was told to go on with what this one does."""
        for lock in (self._lease, *(job.lock for job in self._queue.running)):
            lock.refresh()

    def _start_ready(self) -> None:
        for jobs, cause, ending in self._queue.hopeless():
            more = f" and {len(jobs) - 1} more" if len(jobs) > 1 else ""
            self._say(f"{jobs[0].label}{more}: not started: {sentence(cause)}")
            for job in jobs:
                self._end_unstarted(job, Code.NOT_STARTED(cause=cause, ending=ending))
        for job in self._queue.ready():
            place = self._engine.place(job.run, job.config)
            if place is None:
                return
            try:
                if job.claim(self._say):
                    self._start(job, place)
            except AbrunError as error:  # such as a directory that is gone: the others go on
                self._give_up(job, error.reason)

    def _start(self, job: Job, place: Place) -> None:
        job.run.begin_launch(place, self._git)
        job.log_start = job.run.log_size()
        job.oom_kills = count_oom_kills()
        job.first_step = job.run.heartbeat().step
        job.started = self._engine.start(job.run, job.config, place)
        job.status = "running"
        job.run.update_launch(pid=job.started.pid)

    def _give_up(self, job: Job, why: Reason) -> None:
        """A job that has no process, or whose process cannot be recorded."""
        self._kill([job])
        self._say(f"{job.label}: {sentence(why)}")
        self._end_unstarted(job, why)

    def _end_unstarted(self, job: Job, why: Reason) -> None:
        job.status = "failed"
        job.lock.close()
        with contextlib.suppress(AbrunError):
            if job.run.exists:
                job.run.begin_launch((), self._git)
                job.run.end_launch("failed", why)

    def _reap(self) -> None:
        for job in self._queue.running:
            status = job.started.poll() if job.started else None
            if status is None:
                continue
            try:
                self._record_end(job, status)
            except AbrunError as error:
                self._give_up(job, error.reason)

    def _record_end(self, job: Job, status: int) -> None:
        if not job.run.exists:
            raise LaunchError(Code.RUN_DIRECTORY_GONE(directory=job.run.path))
        job.status, reason = _ending(job, status)
        seen: dict[str, Any] = {"exit_code": None if status < 0 else status, "signal": signal_name(status)}
        job.run.end_launch(job.status, reason, **seen)
        job.lock.close()
        code = reason and _first(reason).code
        ended = job.status == "finished" or job.stopping
        lost = job.started is not None and job.started.lost and not ended  # which is no fault of the run's
        told = reason and job.status == "failed" and status >= 0 and not is_unexplained(reason)
        at_once = code == Code.ALIAS_NOT_LOGGED or not job.run.heartbeat().step
        if reason and told and at_once and not lost:
            path = str(job.run.path)
            job.failure = reason.map_texts(lambda text: text.replace(path, "RUN_DIR"))
        if lost or (job.status == "failed" and job.may_retry and code not in HOPELESS):
            self._say(f"{job.label}: {reason and sentence(reason)}: starting it again")
            job.begin_again(is_retry=not lost)

    def _stop_all(self) -> None:
        """Ask every run to stop, with time for a checkpoint; then leave nothing of it."""
        running = self._queue.running
        for job in running:
            job.stopping, job.asked_s = True, time.time()
            if job.started:
                job.started.stop(kill=False)
        if running:
            self._say(
                f"stopping {len(running)} run{'s' if len(running) > 1 else ''}: up to {self._grace_s:.0f} s "
                "to save checkpoints; Ctrl-C again, after two seconds, kills them"
            )
        deadline = time.monotonic() + self._grace_s
        while time.monotonic() < deadline and not self._requests.is_forced and self._queue.running:
            self._reap()
            self._tick()
            time.sleep(POLL_S)
        self._kill(self._queue.running)
        self._reap()

    def _kill(self, jobs: list[Job]) -> None:
        for job in jobs:
            job.stopping = True
            if job.started:
                job.started.stop(kill=True)


def _ending(job: Job, status: int) -> tuple[Status, Reason | None]:
    """Status and why. Done means that the run says so, whatever the exit status says."""
    if job.run.finished:
        return "finished", None
    attempt, launched = job.run.attempt(), job.run.launches()[-1]
    itself = attempt.status if attempt.number > launched.attempts else None
    printed = job.run.read_log(job.log_start)
    # A node that is not the first prints what it has to say; so does one on which no attempt has begun
    to_read = itself is None or job.config.cluster.nodes > 1
    errors = _errors(printed, read_endings(job.run, launched.attempts, printed)) if to_read else []
    failed_before = itself == "failed" and (attempt.ended_s or math.inf) < job.asked_s
    if (job.stopping and not failed_before) or (itself == "interrupted" and not errors):
        return "interrupted", Code.STOPPED_BY_SIGNAL()
    if itself == "failed" and not errors:
        return "failed", recorded_reason(attempt)
    if errors:
        named = any(reason.code == Code.OUT_OF_MEMORY_KILLED for error in errors for reason in error.walk())
        starved = not named and is_slurm_oom(printed)
        ending = Code.SEVERAL_ERRORS(errors=errors[:MOST_ERRORS], out_of_memory=starved)
    elif status:
        ending = ending_reason(status, printed, job.oom_kills)
    else:
        ending = Code.ENDED_WITHOUT_RESULT()
    return "failed", Code.SEE_LOG(ending=ending.map_texts(redacted), log=job.run.log)


def _errors(printed: str, noted: Collection[Reason]) -> list[Reason]:
    """What agents noted, causes first; without a note, the errors that a foreign program printed."""
    lines = dict.fromkeys(re.findall(FOREIGN_ERROR, printed, re.MULTILINE))
    errors = list(noted) or [Code.FOREIGN_TEXT(text=line) for line in lines]
    return sorted(errors, key=lambda error: not any(reason.code in CAUSES for reason in error.walk()))


def _first(reason: Reason) -> Reason:
    """The reason that a sentence begins with."""
    if reason.code == Code.SEE_LOG:
        return _first(reason["ending"])
    return _first(reason["errors"][0]) if reason.code == Code.SEVERAL_ERRORS else reason
