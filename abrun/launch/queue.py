"""The runs of a launch on their way from pending to done: in which order, and which are ready to start."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from abrun.errors import LaunchError, StoreError
from abrun.experiment.plan import ExperimentPlan, RunName
from abrun.launch.engine import Started
from abrun.launch.prepare import warm_start_dir, write_run
from abrun.messages import sentence
from abrun.processes import find_run_processes, kill_all
from abrun.reasons import Code, Reason
from abrun.recipe.run import OwnRunConfig, RunConfig
from abrun.runs.experiment import WARM_STARTS, run_dir
from abrun.runs.files import wrap_read_errors
from abrun.runs.lock import Lease, LockedError
from abrun.runs.records import Status
from abrun.runs.rundir import RunDir

LEAVE_S = 40.0  # a run that has lost its launcher takes up to 30 s to save a checkpoint
WARM_START = RunName(arm="warm-start", seed=0)


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One run directory on its way from pending to done."""

    label: str
    run: RunDir
    config: RunConfig
    needs: "Job | None" = None  # the warm start to wait for
    seed: int = 0
    arm: str | None = None  # None: of a control, whose own arm is the baseline
    shared: bool = False  # a warm start: other experiments may want it, too
    said_waiting: bool = False
    leave_until_s: float | None = None  # when processes of an earlier launcher are killed
    started: Started | None = None
    log_start: int = 0
    oom_kills: int | None = None  # as counted when it was started
    first_step: int = 0  # that it had reached when it was started
    num_retries: int = 0
    stopping: bool = False
    asked_s: float = 0.0  # when it was asked to stop
    status: Status = "pending"
    failure: Reason | None = None  # why it failed before its first step; an exit code alone is no reason
    lock: Lease = field(init=False)  # a warm start's: the runs of an experiment are owned with it

    def __post_init__(self) -> None:
        self.lock = Lease(self.run.path)

    @property
    def done(self) -> bool:
        return self.status in ("finished", "failed", "interrupted")

    @property
    def may_retry(self) -> bool:
        """Whether another start may help: not where this one came no further than the one before."""
        further = self.run.heartbeat().step > self.first_step
        return further and self.num_retries < self.config.limits.retries and not self.stopping

    def begin_again(self, *, is_retry: bool) -> None:
        """Wait for a place again; the run goes on from its newest checkpoint."""
        self.started, self.status, self.num_retries = None, "pending", self.num_retries + is_retry

    def claim(self, say: Callable[[str], object]) -> bool:
        """Own the run directory, where nobody else works, nor makes this warm start for others.

        Raises StoreError for a run whose record cannot be read: it has failed, the others go on.
        """
        if not self.shared:
            with wrap_read_errors(self.run.path):
                self.run.record()
            if self._left_behind(say):
                return False
            if self.run.finished:
                self.run.reopen(incomplete(self) or "")
            return True
        try:
            note = self.lock.acquire()
        except LockedError as error:
            if not self.said_waiting:
                say(f"{self.label}: another launcher makes it now; waiting for that ({error})")
            self.said_waiting = True
            return False
        try:
            made = self._is_made(say)
            if made or self._left_behind(say):
                self.lock.close()
                self.status = "finished" if made else self.status
                return False
        except BaseException:
            self.lock.close()
            raise
        if note:
            say(f"{self.label}: {sentence(note)}")
        write_run(self.run.path, WARM_STARTS, WARM_START, self.config)
        return True

    def _left_behind(self, say: Callable[[str], object]) -> bool:
        """Whether processes of a launcher that is gone still work there: they have a while to end."""
        found = find_run_processes(self.run.path)
        if not found:
            return False
        now = time.monotonic()
        if self.leave_until_s is None:
            self.leave_until_s = now + LEAVE_S
            say(
                f"{self.label}: processes of a launcher that is gone work there ({_ids(found)}); "
                "waiting for them"
            )
        left = kill_all(lambda: find_run_processes(self.run.path)) if now > self.leave_until_s else None
        if left:  # another user's, or in the hands of a driver
            raise LaunchError(Code.PROCESSES_SURVIVE(pids=_ids(left)))
        return True

    def _is_made(self, say: Callable[[str], object]) -> bool:
        """Whether the warm start is there, whole; what is not, is trained again."""
        if not self.run.finished:
            return False
        wrong = incomplete(self) or self.run.describe_weights_damage()
        if wrong:
            say(f"{self.label}: trained again: {wrong}")
            self.run.reopen(wrong)
        return wrong is None


def _ids(processes: set[psutil.Process]) -> str:
    return ", ".join(map(str, sorted(process.pid for process in processes)))


def incomplete(job: Job) -> str | None:
    """Return what a finished run lacks of its metrics; of a command, which may log any steps, the end."""
    with contextlib.suppress(StoreError):  # a damaged file, which the comparison names
        if isinstance(job.config, OwnRunConfig):
            return job.run.describe_missing_steps(job.config.steps)
        return job.run.describe_missing_last_step()


class Queue:
    """The jobs of a plan in launch order, each warm start before the first run that needs it."""

    def __init__(self, plan: ExperimentPlan, experiment_dir: Path) -> None:
        self.jobs: list[Job] = []
        warm_starts: dict[str, Job] = {}
        for planned in plan.runs:
            run = RunDir(run_dir(experiment_dir, planned.name))
            job = Job(
                label=str(planned.name),
                run=run,
                config=planned.config,
                seed=planned.name.seed,
                arm=None if planned.is_control else planned.name.arm,
            )
            key = planned.warm_start
            if run.finished and not incomplete(job):
                job.status = "finished"
            elif key:
                if key not in warm_starts:
                    warm_starts[key] = Job(
                        label=f"warm start {key}",
                        run=RunDir(warm_start_dir(experiment_dir, key)),
                        config=plan.warm_starts[key],
                        shared=True,
                    )
                    self.jobs.append(warm_starts[key])
                job.needs = warm_starts[key]
            self.jobs.append(job)

    @property
    def done(self) -> bool:
        return all(job.done for job in self.jobs)

    @property
    def running(self) -> list[Job]:
        return [job for job in self.jobs if job.started and not job.done]

    def ready(self) -> Iterator[Job]:
        """What waits for a place alone, in order: a later run that would fit must not starve an earlier.

        Nothing while `failed_alike` waits for the runs at work.
        """
        if self.running and self.failed_alike():
            return
        for job in self.jobs:
            if not (job.started or job.done) and (job.needs is None or job.needs.status == "finished"):
                yield job

    def hopeless(self) -> Iterator[tuple[list[Job], Reason, Reason | None]]:
        """What shall not start any more; because of what, and why that failed."""
        waiting: dict[Job, list[Job]] = {}
        for job in self.jobs:
            if not job.done and job.needs and job.needs.done and job.needs.status != "finished":
                waiting.setdefault(job.needs, []).append(job)
        for need, jobs in waiting.items():
            cause = Code.WARM_START_FAILED(directory=need.run.path, status=need.status)
            yield jobs, cause, need.run.state(WARM_START).reason
        tried = [] if self.running else self.failed_alike()
        left = [job for job in self.jobs if not job.done]
        if tried and left:
            first, num_more = tried[0], len(tried) - 1
            cause = Code.FAILED_ALIKE(run=first.label, num_more=num_more)
            yield left, cause, first.run.state(WARM_START).reason

    def failed_alike(self) -> list[Job]:
        """All runs that have ended, where they failed by the same reason before their first step, whatever
        their seed, at least one of every arm, and no other has ever taken one or waits for a warm start: what
        fails them is no single run's, nor a single arm's.
        """
        ended = [job for job in self.jobs if job.done and not job.shared]
        left = [job for job in self.jobs if not job.done]
        alike = len({job.failure for job in ended}) == 1 and ended[0].failure is not None
        untried = {job.arm for job in left} - {job.arm for job in [*ended, *self.running]} - {None}
        if not alike or len({job.seed for job in ended}) == 1 or untried:
            return []
        return [] if any(job.shared or job.run.heartbeat().step for job in left) else ended
