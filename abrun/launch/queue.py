"""Queue of a launch: the order of its runs, and which of them are ready to start."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from abrun.errors import LaunchError, StoreError
from abrun.experiment.plan import ExperimentPlan
from abrun.launch.engine import StartedRun
from abrun.messages.codes import Reason
from abrun.processes import find_run_processes, kill_all
from abrun.recipe.run import OwnRunConfig, RunConfig
from abrun.runs.experiment import WARM_START, WARM_STARTS, run_dir, warm_start_dir
from abrun.runs.files import wrap_read_errors
from abrun.runs.launches import reopen, write_config
from abrun.runs.lock import Lease, LockedError
from abrun.runs.records import Status
from abrun.runs.rundir import RunDir
from abrun.runs.state import read_state

# A run that has lost its launcher takes up to 30 s to save a checkpoint.
ORPHAN_GRACE_S = 40.0


@dataclass(slots=True, kw_only=True, eq=False)
class LaunchJob:
    """One run or warm start of a launch, from pending to finished, failed or interrupted."""

    label: str
    run: RunDir
    config: RunConfig
    depends_on: "tuple[LaunchJob, ...]" = ()  # a warm start; the run that records its rollouts
    seed: int = 0
    arm: str | None = None  # None for a control run, which counts for no arm
    is_warm_start: bool = False  # other experiments may share it
    has_reported_waiting: bool = False
    kill_orphans_at_s: float | None = None  # deadline for processes of an earlier launcher
    started: StartedRun | None = None
    log_start: int = 0
    oom_kills: int | None = None  # counter when the job was started
    first_step: int = 0  # step reached when the job was started
    num_retries: int = 0
    is_stopping: bool = False
    stop_requested_s: float = 0.0  # time of the request to stop
    status: Status = "pending"
    failure: Reason | None = None  # explained failure before the first step; not a bare exit code
    lock: Lease = field(init=False)  # used by warm starts; the experiment's lock covers its runs

    def __post_init__(self) -> None:
        self.lock = Lease(self.run.path)

    @property
    def is_done(self) -> bool:
        return self.status in ("finished", "failed", "interrupted")

    @property
    def can_retry(self) -> bool:
        """True if a retry may help: this start got further than the one before."""
        made_progress = self.run.heartbeat().step > self.first_step
        return made_progress and self.num_retries < self.config.limits.retries and not self.is_stopping

    def restart(self, *, is_retry: bool) -> None:
        """Queue the job again; its run resumes from the newest checkpoint."""
        self.started, self.status, self.num_retries = None, "pending", self.num_retries + is_retry

    def claim(self, say: Callable[[str], object]) -> bool:
        """Take ownership of the run directory. Return False if it is busy or needs no run.

        It is busy while orphan processes work there or another launcher trains the warm start. Raises
        StoreError if the run's record is unreadable: that run has failed, other runs continue.
        """
        if not self.is_warm_start:
            with wrap_read_errors(self.run.path):
                self.run.record()
            if self._has_orphans(say):
                return False
            if self.run.finished:
                reopen(self.run, describe_missing(self) or "")
            return True
        try:
            note = self.lock.acquire()
        except LockedError as error:
            if not self.has_reported_waiting:
                say(f"{self.label}: another launcher is training it; waiting ({error})")
            self.has_reported_waiting = True
            return False
        try:
            is_complete = self.run.finished
            if is_complete and (damage := describe_missing(self) or self.run.describe_weights_damage()):
                say(f"{self.label}: trained again: {damage}")
                reopen(self.run, damage)
                is_complete = False
            if is_complete or self._has_orphans(say):
                self.lock.close()
                self.status = "finished" if is_complete else self.status
                return False
        except BaseException:
            self.lock.close()
            raise
        if note:
            say(f"{self.label}: {note}")
        write_config(self.run, WARM_STARTS, WARM_START, self.config.model_dump(mode="json"))
        return True

    def _has_orphans(self, say: Callable[[str], object]) -> bool:
        """Return True while processes of a dead launcher work there. They are killed after a grace period."""
        orphans = find_run_processes(self.run.path)
        if not orphans:
            return False
        now = time.monotonic()
        if self.kill_orphans_at_s is None:
            self.kill_orphans_at_s = now + ORPHAN_GRACE_S
            pids = ", ".join(map(str, sorted(process.pid for process in orphans)))
            still = f"processes of a dead launcher still work there ({pids})"
            say(f"{self.label}: {still}; waiting for them to end")
        is_late = now > self.kill_orphans_at_s
        survivors = kill_all(lambda: find_run_processes(self.run.path)) if is_late else None
        if survivors:  # another user's processes, or processes stuck in a driver
            pids = ", ".join(map(str, sorted(process.pid for process in survivors)))
            raise LaunchError(f"processes of an earlier launch cannot be killed ({pids}); end them")
        return True


def describe_missing(job: LaunchJob) -> str | None:
    """Return which metrics a finished run lacks, or None. Of a command, only its last step is checked."""
    with contextlib.suppress(StoreError):  # the comparison reports damaged files
        if isinstance(job.config, OwnRunConfig):
            return job.run.describe_missing_steps(job.config.steps)
        return job.run.describe_missing_last_step()


class LaunchQueue:
    """The jobs of a plan in launch order, each warm start before the first run that needs it.

    A run that trains on another run's rollouts waits for that run.
    """

    def __init__(self, plan: ExperimentPlan, experiment_dir: Path) -> None:
        self.jobs: list[LaunchJob] = []
        warm_starts: dict[str, LaunchJob] = {}
        for planned in plan.runs:
            run = RunDir(run_dir(experiment_dir, planned.name))
            job = LaunchJob(
                label=str(planned.name),
                run=run,
                config=planned.config,
                seed=planned.name.seed,
                arm=None if planned.is_control else planned.name.arm,
            )
            key = planned.warm_start
            if run.finished and not describe_missing(job):
                job.status = "finished"
            elif key:
                if key not in warm_starts:
                    warm_starts[key] = LaunchJob(
                        label=f"warm start {key}",
                        run=RunDir(warm_start_dir(experiment_dir, key)),
                        config=plan.warm_starts[key],
                        is_warm_start=True,
                    )
                    self.jobs.append(warm_starts[key])
                job.depends_on += (warm_starts[key],)
            self.jobs.append(job)
        jobs = {job.label: job for job in self.jobs}
        for planned in plan.runs:
            recorder = planned.trains_on(plan.recipe.arms)
            if recorder and not jobs[str(planned.name)].is_done:
                jobs[str(planned.name)].depends_on += (jobs[str(recorder)],)

    @property
    def is_done(self) -> bool:
        return all(job.is_done for job in self.jobs)

    @property
    def running_jobs(self) -> list[LaunchJob]:
        return [job for job in self.jobs if job.started and not job.is_done]

    def ready_jobs(self) -> Iterator[LaunchJob]:
        """Yield jobs that only wait for devices, in order, so that later runs cannot starve earlier ones.

        Yields nothing while `find_common_failure` waits for the outcome of active runs.
        """
        if self.running_jobs and self.find_common_failure():
            return
        for job in self.jobs:
            if not (job.started or job.is_done) and all(need.status == "finished" for need in job.depends_on):
                yield job

    def find_unstartable(self) -> Iterator[tuple[list[LaunchJob], str, Reason | None]]:
        """Yield jobs that will not be started, with the reason and the failure behind it."""
        waiting: dict[LaunchJob, list[LaunchJob]] = {}
        for job in self.jobs:
            lost = [need for need in job.depends_on if need.is_done and need.status != "finished"]
            if lost and not job.is_done:
                waiting.setdefault(lost[0], []).append(job)
        for needed, jobs in waiting.items():
            what = f"{needed.label}, whose rollouts it trains on,"
            what = f"the warm start in {needed.run.path}" if needed.is_warm_start else what
            yield jobs, f"{what} {needed.status}", read_state(needed.run, WARM_START).reason
        failed_jobs = [] if self.running_jobs else self.find_common_failure()
        unfinished = [job for job in self.jobs if not job.is_done]
        if failed_jobs and unfinished:
            first_job, num_more = failed_jobs[0], len(failed_jobs) - 1
            which = f"{first_job.label} and {num_more} more, of several seeds,"
            reason = read_state(first_job.run, WARM_START).reason
            yield unfinished, f"{which} failed in the same way at their start", reason

    def find_common_failure(self) -> list[LaunchJob]:
        """Return all ended runs if a common cause makes further runs pointless, or else an empty list.

        All of them failed for the same reason before their first step, with at least two seeds and at least
        one run of every arm. No other run has ever taken a step or waits for a warm start.
        """
        ended = [job for job in self.jobs if job.is_done and not job.is_warm_start]
        unfinished = [job for job in self.jobs if not job.is_done]
        failed_alike = len({job.failure for job in ended}) == 1 and ended[0].failure is not None
        tried_arms = {job.arm for job in [*ended, *self.running_jobs]} | {None}
        untried_arms = {job.arm for job in unfinished} - tried_arms
        if not failed_alike or len({job.seed for job in ended}) == 1 or untried_arms:
            return []
        return [] if any(job.is_warm_start or job.run.heartbeat().step for job in unfinished) else ended
