"""Supervisor of a launch: starts the unfinished runs of a plan as devices come free, and can stop them.

Runs report through their directories. This module adds `launch.json`, with how it saw each run end. It is
one loop in one thread.
"""

import contextlib
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from abrun import processes
from abrun.errors import AbrunError, LaunchError
from abrun.experiment.options import LaunchOptions
from abrun.experiment.plan import ExperimentPlan, RunName
from abrun.experiment.preflight.checks import untested_packages
from abrun.launch.cluster import ClusterJobs, LeftInQueueError
from abrun.launch.engine import Devices, Engine
from abrun.launch.prepare import prepare_experiment
from abrun.launch.queue import LaunchJob, LaunchQueue
from abrun.messages import sentence
from abrun.messages.codes import Code, Reason, in_words
from abrun.messages.numbers import count_text
from abrun.recipe.command import referenced_values
from abrun.runs.experiment import read_run_state
from abrun.runs.launches import begin_launch, end_launch, read_endings, update_launch
from abrun.runs.lock import Lease
from abrun.runs.records import Status, recorded_reason
from abrun.runs.redaction import hide_secrets_of, hide_values, redacted

POLL_S = processes.poll_interval(0.2)
MAX_ERRORS = 3
# A retry would only take as long again, or its log would lack the same metric.
NO_RETRY_CODES = (Code.TIME_LIMIT_REACHED, Code.ALIAS_NOT_LOGGED)
# Printed errors that name a cause. A lost peer is only an effect.
CAUSE_CODES = (
    *(Code.NODE_LOST, Code.KILLED, Code.OUT_OF_MEMORY_KILLED),
    *(Code.TIME_LIMIT_REACHED, Code.START_LIMIT_REACHED, Code.STALL_LIMIT_REACHED),
)
FOREIGN_ERROR = r"^error: (.+)"  # format of programs such as uv and cargo
# Agents give their ranks 30 s between SIGTERM and SIGKILL.
GRACE_S = 35.0


class Observer(Protocol):
    """Receives the progress of a launch; for example abrun.watch.View."""

    def follow(self, experiment_dir: Path) -> object:
        """Called when the experiment's directory is complete and its runs are about to start."""

    def say(self, line: str) -> object:
        """Called with a note for the user."""

    def tick(self) -> object:
        """Called a few times a second, from `follow` to the end."""


def print_line(line: str) -> None:
    """Print a note, with the time, in the log of a cluster's job."""
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOutcome:
    """Outcome of a launch."""

    statuses: dict[RunName, Status]
    stopped_by: int | None  # the signal that ended it early

    @property
    def exit_code(self) -> int:
        """Exit code: 0 if every run finished, 1 if one did not, 128 + signal if stopped."""
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
) -> LaunchOutcome:
    """Run every unfinished run of a plan and the warm starts that they need, until all have ended.

    With `only`, run just these runs and report only their outcome; the directory is that of the whole plan.
    Raises LaunchError or StoreError, before anything has started, if the plan cannot run there.
    """
    problems, untested = engine.find_problems(plan), untested_packages(plan)
    with prepare_experiment(plan, options, problems, observer.say) as (experiment_dir, lease, git):
        observer.follow(experiment_dir)
        for line in untested:
            _ignore_io_errors(observer.say)(line)
        selected_runs = [run for run in plan.runs if only is None or run.name in only]
        queue = LaunchQueue(replace(plan, runs=tuple(selected_runs)), experiment_dir)
        supervisor = Supervisor(queue, engine, lease, grace_s, git, say=observer.say, tick=observer.tick)
        stopped_by = supervisor.run()
    states = [read_run_state(experiment_dir, run.name) for run in selected_runs]
    statuses: dict[RunName, Status] = {state.name: state.status for state in states}
    failed_paths = {job.run.path for job in queue.jobs if job.status == "failed"}
    for state in states:
        # A finished run is relaunched only for missing results; here that repair failed.
        if state.status == "finished" and state.directory in failed_paths:
            statuses[state.name] = "failed"
    return LaunchOutcome(statuses=statuses, stopped_by=stopped_by)


def _ignore_io_errors(call: Callable[..., object]) -> Callable[..., None]:
    """Return the call without its I/O errors, so that no observer can end a run."""

    def quiet(*arguments: object) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: closed file
            call(*arguments)

    return quiet


class Supervisor:
    """Starts jobs in order as devices come free, records how they end, and stops all of them on request."""

    def __init__(
        self,
        queue: LaunchQueue,
        engine: Engine,
        lease: Lease,
        grace_s: float,
        git: dict[str, Any] | None,
        *,
        say: Callable[[str], object],
        tick: Callable[[], object] = lambda: None,
    ) -> None:
        self._queue, self._engine, self._lease = queue, engine, lease
        self._grace_s, self._git = grace_s, git
        self._say, self._tick = _ignore_io_errors(say), _ignore_io_errors(tick)
        self._requests = processes.StopRequests()

    def run(self) -> int | None:
        """Run all jobs. Return the signal that stopped the launch, or None if every job ended by itself."""
        expected = [(job.run, job.config) for job in self._queue.jobs if not job.is_done]
        hide_secrets_of(os.environ)
        for job in self._queue.jobs:
            hide_values(referenced_values(job.config, os.environ))
        with processes.catch_stop_signals() as self._requests, self._engine.prepare_for(expected, self._say):
            try:
                while self._requests.first_signal is None and not self._queue.is_done:
                    self._reap()
                    self._start_ready()
                    # Raises TakenOverError if another launcher has taken over this experiment
                    for lock in (self._lease, *(job.lock for job in self._queue.running_jobs)):
                        lock.refresh()
                    self._tick()
                    time.sleep(POLL_S)
                if self._requests.first_signal is not None:
                    self._stop_all()
            except BaseException:
                with contextlib.suppress(Exception):  # the first error is the one to report
                    self._stop_all()
                self._kill(self._queue.running_jobs)
                raise
            finally:
                for job in self._queue.jobs:
                    job.lock.close()
        self._tick()
        return self._requests.first_signal

    def _start_ready(self) -> None:
        for jobs, cause, ending in self._queue.find_unstartable():
            suffix = f" and {len(jobs) - 1} more" if len(jobs) > 1 else ""
            self._say(f"{jobs[0].label}{suffix}: not started: {cause}")
            for job in jobs:
                self._end_unstarted(job, in_words(f"not started: {cause}: {ending}"))
        for job in self._queue.ready_jobs():
            devices = self._engine.find_devices(job.run, job.config)
            if devices is None:
                return
            try:
                if job.claim(self._say):
                    self._start(job, devices)
            except AbrunError as error:  # for example a deleted directory; other runs continue
                self._fail_job(job, error.reason)

    def _start(self, job: LaunchJob, devices: Devices) -> None:
        begin_launch(job.run, devices, self._git, runs_per_gpu=job.config.cluster.runs_per_gpu)
        job.log_start = job.run.log_size()
        job.oom_kills = processes.count_oom_kills()
        job.first_step = job.run.heartbeat().step
        job.started = self._engine.start(job.run, job.config, devices)
        job.status = "running"
        update_launch(job.run, pid=job.started.pid)

    def _fail_job(self, job: LaunchJob, reason: Reason) -> None:
        """Fail a job that has no process, or whose process cannot be recorded."""
        self._kill([job])
        self._say(f"{job.label}: {sentence(reason)}")
        self._end_unstarted(job, reason)

    def _end_unstarted(self, job: LaunchJob, reason: Reason) -> None:
        job.status = "failed"
        job.lock.close()
        with contextlib.suppress(AbrunError):
            if job.run.exists:
                begin_launch(job.run, (), self._git)
                end_launch(job.run, "failed", reason)

    def _reap(self) -> None:
        for job in self._queue.running_jobs:
            exit_status = job.started.poll() if job.started else None
            if exit_status is None:
                continue
            try:
                self._record_end(job, exit_status)
            except AbrunError as error:
                self._fail_job(job, error.reason)

    def _record_end(self, job: LaunchJob, exit_status: int) -> None:
        if not job.run.exists:
            raise LaunchError(f"{job.run.path} no longer exists")
        job.status, reason = _determine_ending(job, exit_status)
        exit_code = None if exit_status < 0 else exit_status
        end_launch(
            job.run, job.status, reason, exit_code=exit_code, signal=processes.signal_name(exit_status)
        )
        job.lock.close()
        code = reason and _leading_reason(reason).code
        is_expected = job.status == "finished" or job.is_stopping
        is_lost = job.started is not None and job.started.is_lost and not is_expected  # not the run's fault
        is_explained = (
            reason and job.status == "failed" and exit_status >= 0 and not processes.is_unexplained(reason)
        )
        failed_at_start = code == Code.ALIAS_NOT_LOGGED or not job.run.heartbeat().step
        if reason and is_explained and failed_at_start and not is_lost:
            path = str(job.run.path)
            job.failure = reason.map_texts(lambda text: text.replace(path, "RUN_DIR"))
        if is_lost or (job.status == "failed" and job.can_retry and code not in NO_RETRY_CODES):
            self._say(f"{job.label}: {reason and sentence(reason)}: restarting")
            job.restart(is_retry=not is_lost)

    def _stop_all(self) -> None:
        """Ask every run to save a checkpoint and stop; after the grace period, kill what is left."""
        running = self._queue.running_jobs
        for job in running:
            job.is_stopping, job.stop_requested_s = True, time.time()
            if job.started:
                job.started.stop(kill=False)
        if running:
            self._say(
                f"stopping {count_text(len(running), 'run')}: up to {self._grace_s:.0f} s "
                "to save checkpoints; Ctrl-C again, after two seconds, kills them"
            )
        deadline = time.monotonic() + self._grace_s
        while time.monotonic() < deadline and not self._requests.is_forced and self._queue.running_jobs:
            self._reap()
            self._tick()
            time.sleep(POLL_S)
        self._kill(self._queue.running_jobs)
        self._reap()

    def _kill(self, jobs: list[LaunchJob]) -> None:
        for job in jobs:
            job.is_stopping = True
            if job.started:
                job.started.stop(kill=True)


def _determine_ending(job: LaunchJob, exit_status: int) -> tuple[Status, Reason | None]:
    """Return the status of an ended run and the reason.

    A run counts as finished if its record says so, whatever its exit status.
    """
    if job.run.finished:
        return "finished", None
    attempt, launch = job.run.attempt(), job.run.launches()[-1]
    recorded_status = attempt.status if attempt.number > launch.attempts else None
    printed = job.run.read_log(job.log_start)
    # Nodes other than the first only print their errors, and so do nodes on which no attempt has started.
    reads_output = recorded_status is None or job.config.started_nodes > 1
    errors = list[Reason]()
    if reads_output:  # those that agents noted, or else those that a foreign program printed, causes first
        lines = re.findall(FOREIGN_ERROR, printed, re.MULTILINE)
        errors = read_endings(job.run, launch.attempts, printed) or list(map(in_words, dict.fromkeys(lines)))
        errors.sort(key=lambda error: not any(reason.code in CAUSE_CODES for reason in error.walk()))
    failed_before = recorded_status == "failed" and (attempt.ended_s or math.inf) < job.stop_requested_s
    if (job.is_stopping and not failed_before) or (recorded_status == "interrupted" and not errors):
        return "interrupted", Code.STOPPED_BY_SIGNAL()
    if recorded_status == "failed" and not errors:
        return "failed", recorded_reason(attempt)
    if errors:
        codes = {reason.code for error in errors for reason in error.walk()}
        is_oom = Code.OUT_OF_MEMORY_KILLED not in codes and processes.is_slurm_oom(printed)
        ending = Code.SEVERAL_ERRORS(errors=errors[:MAX_ERRORS], out_of_memory=is_oom)
    elif exit_status:
        ending = processes.ending_reason(exit_status, printed, job.oom_kills)
    else:
        ending = in_words("ended without a result")
    return "failed", Code.SEE_LOG(ending=ending.map_texts(redacted), log=job.run.log)


def _leading_reason(reason: Reason) -> Reason:
    """Return the reason that the sentence for `reason` begins with."""
    if reason.code == Code.SEE_LOG:
        return _leading_reason(reason["ending"])
    return _leading_reason(reason["errors"][0]) if reason.code == Code.SEVERAL_ERRORS else reason


JOBS_POLL_S = processes.poll_interval(0.5)
# A file server may take this long to show the last records of jobs that have ended.
SETTLE_TIMEOUT_S = 20.0


def submit_plan(
    plan: ExperimentPlan, options: LaunchOptions, *, cluster: ClusterJobs, observer: Observer
) -> list[str]:
    """Submit every unfinished run of a plan; return the job ids. Raises the same errors as `run_plan`."""
    problems = cluster.find_problems(plan)
    with prepare_experiment(plan, options, problems, observer.say) as (experiment_dir, _, git):
        try:
            submitted = cluster.submit(plan, git, compare=options.compare)
        except LeftInQueueError:  # queued jobs and `cancel` need the directory
            raise
        except BaseException:
            if not options.resume:  # no job is queued
                shutil.rmtree(experiment_dir, ignore_errors=True)
            raise
    cluster.load()
    return submitted


def wait_for_jobs(
    plan: ExperimentPlan, experiment_dir: Path, cluster: ClusterJobs, observer: Observer
) -> LaunchOutcome:
    """Watch submitted jobs until none is queued or active. If this is interrupted, the jobs continue."""
    observer.follow(experiment_dir)
    is_active = True
    while is_active:
        observer.tick()
        time.sleep(JOBS_POLL_S)
        try:
            is_active = bool(cluster.active_job_ids)
        except LaunchError as error:  # perhaps the controller is restarting
            observer.say(str(error))
            time.sleep(10 * JOBS_POLL_S)
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        states = [read_run_state(experiment_dir, run.name) for run in plan.runs]
        if time.monotonic() > deadline or not any(state.status == "running" for state in states):
            break
        time.sleep(JOBS_POLL_S)
    statuses: dict[RunName, Status] = {state.name: cluster.state_of(state).status for state in states}
    return LaunchOutcome(statuses=statuses, stopped_by=None)
