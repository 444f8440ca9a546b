"""Clusters that queue jobs: submission, state and cancellation of an experiment's jobs."""

import contextlib
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from abrun.errors import AbrunError, LaunchError
from abrun.experiment.plan import ExperimentPlan
from abrun.messages.numbers import count_text
from abrun.recipe.implementations import find_scheduler, scheduler_names
from abrun.recipe.launcher import LauncherSettings
from abrun.runs.experiment import open_experiment
from abrun.runs.files import read_tail, write_json
from abrun.runs.lock import find_owner
from abrun.runs.state import RunState

# Agents kill ranks that save too slowly, this long before the supervisor or an engine kills the agents.
AGENT_HEAD_START_S = 10.0
ACTIVE_STATUSES = ("running", "stalled", "pending")
COMPARE_LOG = "compare.log"  # output of the compare job, in the cluster's folder


class LeftInQueueError(LaunchError):
    """A submission failed, and jobs that were already submitted could not be withdrawn."""


class ClusterJobs(ABC):
    """The jobs of one experiment on a cluster: submits runs and tracks their jobs.

    Queries its cluster at most once every few seconds.
    """

    query_interval_s: ClassVar[float]
    folder: ClassVar[str]  # folder in an experiment; no arm can have this name
    record_name: ClassVar[str]  # of the file in it that records the jobs
    cleared_fields: ClassVar[Mapping[str, Any]]  # of the record, when no job is submitted
    job_fields: ClassVar[tuple[str, ...]]  # of the record; one has a value once jobs are submitted

    def __init__(self, experiment_dir: Path, settings: Any = None, num_jobs: int | None = None) -> None:
        """Take the launcher's `settings` and `num_jobs` (parallel runs), which only a launch has."""
        self._experiment_dir, self._settings, self._num_jobs = experiment_dir, settings, num_jobs
        self._record: dict[str, Any] = {}
        self._queried_s: float | None = None
        self._answer: Any = None
        self._error: LaunchError | None = None  # of the last query, if the cluster did not answer

    def load(self) -> None:
        self._record = self.read(self._experiment_dir)

    @abstractmethod
    def find_problems(self, plan: ExperimentPlan) -> list[str]:
        """Return the reasons why the plan could never run there."""

    @abstractmethod
    def render_scripts(self, plan: ExperimentPlan, *, compare: bool) -> dict[str, str]:
        """Return the scripts that would be submitted, by name. Call `find_problems` first."""

    @abstractmethod
    def submit(self, plan: ExperimentPlan, git: Mapping[str, Any] | None, *, compare: bool) -> list[str]:
        """Submit all unfinished runs, or none; return the job ids."""

    @staticmethod
    @abstractmethod
    def read(experiment_dir: Path) -> dict[str, Any]:
        """Return the record of an experiment, or an empty one."""

    def write(self, content: Mapping[str, Any]) -> None:
        """Replace the record of the experiment."""
        write_json(self._experiment_dir / self.folder / self.record_name, content)

    @property
    def is_submitted(self) -> bool:
        return any(map(self._record.get, self.job_fields))

    @property
    @abstractmethod
    def active_job_ids(self) -> list[str]:
        """Ids of the jobs that are queued or running."""

    @property
    def has_compare_job(self) -> bool:
        """True if a job compares the runs once they have ended."""
        return bool(self._record.get("compare"))

    @abstractmethod
    def state_of(self, state: RunState) -> RunState:
        """Return a run's state, corrected if the cluster knows more than the run's directory."""

    @abstractmethod
    def query_jobs(self) -> Any:
        """Return what the cluster knows about the jobs. Raises LaunchError if it does not answer."""

    @abstractmethod
    def stop_jobs(self) -> None:
        """Withdraw queued jobs, and let running ones save a checkpoint and end."""

    @property
    def silent(self) -> str | None:
        """Error of the last query, if the cluster did not answer."""
        return str(self._error) if self._error else None

    def cancel(self) -> None:
        """End the jobs and record that they were cancelled."""
        self._record = {**self.read(self._experiment_dir), "cancelled": True}
        self.write(self._record)
        self.stop_jobs()
        self._queried_s = None

    def clear_jobs(self) -> None:
        """Clear ended jobs from the record, so that new ones can be submitted."""
        self.write({**self._record, **self.cleared_fields})

    def read_compare_log(self) -> str | None:
        """Return the output of the compare job, or None if there is no such job."""
        if not self.has_compare_job:
            return None
        with contextlib.suppress(OSError):
            return read_tail(self._experiment_dir / self.folder / COMPARE_LOG).decode(errors="replace")
        return ""

    def _query_cached(self) -> Any:
        """Return the last answer of `query_jobs`. Raises LaunchError at once if there was none just now."""
        if self._queried_s is None or time.monotonic() - self._queried_s > self.query_interval_s:
            try:
                self._answer, self._error = self.query_jobs(), None
            except LaunchError as error:
                self._error = error
            self._queried_s = time.monotonic()
        if self._error:
            raise self._error
        return self._answer


def find_cluster_jobs(experiment_dir: Path) -> ClusterJobs | None:
    """Return the experiment's jobs on whichever cluster has them, or None."""
    for name in scheduler_names():
        try:
            scheduler = find_scheduler(name)
        except AbrunError:  # of a broken package, which has submitted nothing
            continue
        jobs: ClusterJobs = scheduler(experiment_dir)
        jobs.load()
        if jobs.is_submitted:
            return jobs
    return None


def make_cluster(
    settings: LauncherSettings | None, experiment_dir: Path, num_jobs: int | None
) -> ClusterJobs | None:
    """Return the cluster for a launcher's settings, or None if that launcher starts processes itself."""
    scheduler = settings and find_scheduler(settings.type)
    return scheduler and scheduler(experiment_dir, settings, num_jobs)


def agent_grace_s(save_s: float) -> float:
    """Return how many of `save_s` seconds agents give their ranks to save a checkpoint."""
    return max(1.0, save_s - AGENT_HEAD_START_S)


def network_variables(interface: str | None) -> dict[str, str]:
    """Return the environment variables that make ranks use a network interface."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}


def cancel_experiment(experiment_dir: Path) -> str:
    """Ask whatever runs an experiment to save checkpoints and end; return a sentence about it.

    Raises LaunchError if only another machine can do that, StoreError if there is no experiment.
    """
    open_experiment(experiment_dir)
    cluster_jobs = find_cluster_jobs(experiment_dir)
    active = cluster_jobs.active_job_ids if cluster_jobs else []
    if cluster_jobs and active:
        cluster_jobs.cancel()
        count = count_text(len(active), "job")
        return f"cancelled: {count} ({', '.join(active)}); running jobs save a checkpoint first"
    owner = find_owner(experiment_dir)
    if owner is None:
        return f"{experiment_dir.name}: no run is active or queued"
    if not owner.is_visible or owner.pid is None:
        raise LaunchError(f"{experiment_dir}: {owner} is launching it; stop it there")
    try:
        os.kill(owner.pid, signal.SIGTERM)
    except OSError as error:
        problem = f"{owner} is launching it and cannot be reached: {error}"
        raise LaunchError(f"{experiment_dir}: {problem}") from None
    return f"asked {owner} to stop: its runs save checkpoints first"
