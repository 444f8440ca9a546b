"""Clusters that queue jobs, which then run without a launcher: how runs are handed over."""

import contextlib
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from abrun.errors import LaunchError
from abrun.experiment.plan import ExperimentPlan
from abrun.reasons import Code, Reason
from abrun.recipe.implementations import SCHEDULERS, load_implementation
from abrun.recipe.launcher import LauncherSettings, ManifestSettings
from abrun.regular_files import read_tail
from abrun.runs.experiment import open_experiment
from abrun.runs.lock import find_owner
from abrun.runs.records import RunState

AGENTS_FIRST_S = (
    10.0  # agents kill ranks that save too slowly before the supervisor, or an engine, kills agents
)
AT_WORK = ("running", "stalled", "pending")
COMPARED = "compare.log"  # what the job that compares has printed, in the folder of the cluster


class LeftInQueueError(LaunchError):
    """A submission failed, and what had been submitted before could not be taken back."""


class Cluster(ABC):
    """The jobs of one experiment on a cluster: hands runs over, and knows what became of them.

    It asks its cluster every few seconds at most.
    """

    ask_every_s: ClassVar[float]
    folder: ClassVar[str]  # of an experiment; no arm can be called so
    forgotten: ClassVar[Mapping[str, Any]]  # what a record says once others take the place of its jobs

    def __init__(self, experiment_dir: Path, settings: Any = None, num_jobs: int | None = None) -> None:
        """`settings` of the launcher and `num_jobs` at once are those of a launch, which hands over."""
        self._experiment_dir, self._settings, self._num_jobs = experiment_dir, settings, num_jobs
        self._record: dict[str, Any] = {}
        self._asked_s: float | None = None
        self._answer: Any = None
        self._error: LaunchError | None = None  # what was said when the cluster did not answer

    def load(self) -> None:
        """Take the experiment's jobs from its record."""
        self._record = self.read(self._experiment_dir)

    @abstractmethod
    def refusals(self, plan: ExperimentPlan) -> list[Reason]:
        """Return why the plan could never run there; nothing where it could."""

    @abstractmethod
    def scripts(self, plan: ExperimentPlan, *, compare: bool) -> dict[str, str]:
        """What would be handed over, by name. After `refusals`."""

    @abstractmethod
    def submit(self, plan: ExperimentPlan, git: Mapping[str, Any] | None, *, compare: bool) -> list[str]:
        """Hand over every unfinished run, whole or not at all; returns the ids of the jobs."""

    @staticmethod
    @abstractmethod
    def read(experiment_dir: Path) -> dict[str, Any]:
        """The record of an experiment; empty where there is none."""

    @staticmethod
    @abstractmethod
    def write(experiment_dir: Path, content: Mapping[str, Any]) -> None: ...

    @property
    @abstractmethod
    def is_handed_over(self) -> bool: ...

    @property
    @abstractmethod
    def busy(self) -> list[str]:
        """The ids of those that wait or work."""

    @property
    def compares(self) -> bool:
        """Whether a job compares the runs once they have ended."""
        return bool(self._record.get("compare"))

    @abstractmethod
    def state_of(self, state: RunState) -> RunState:
        """A run's state, where the cluster knows better than the run's directory."""

    @abstractmethod
    def ask(self) -> Any:
        """What the cluster knows of the jobs now. Raises LaunchError where it does not answer."""

    @abstractmethod
    def end(self) -> None:
        """Take back what waits, and let what runs save a checkpoint and end."""

    @property
    def silent(self) -> str | None:
        """What went wrong where the cluster did not answer when it was last asked."""
        return str(self._error) if self._error else None

    def cancel(self) -> None:
        """End the jobs, and keep in mind that this was asked for."""
        self._record = {**self.read(self._experiment_dir), "cancelled": True}
        self.write(self._experiment_dir, self._record)
        self.end()
        self._asked_s = None

    def forget(self) -> None:
        """Let others take the place of jobs that have ended."""
        self.write(self._experiment_dir, {**self._record, **self.forgotten})

    def compared(self) -> str | None:
        """What the job that compares has printed; None where there is none."""
        if not self.compares:
            return None
        with contextlib.suppress(OSError):
            return read_tail(self._experiment_dir / self.folder / COMPARED).decode(errors="replace")
        return ""

    def _known(self) -> Any:
        """The last answer of `ask`. Raises LaunchError, at once where there was none just now."""
        if self._asked_s is None or time.monotonic() - self._asked_s > self.ask_every_s:
            try:
                self._answer, self._error = self.ask(), None
            except LaunchError as error:
                self._error = error
            self._asked_s = time.monotonic()
        if self._error:
            raise self._error
        return self._answer


def queued_jobs(experiment_dir: Path) -> Cluster | None:
    """The jobs of an experiment, whichever cluster has them; None where none was asked."""
    for cluster in SCHEDULERS.values():
        jobs: Cluster = load_implementation(cluster)(experiment_dir)
        jobs.load()
        if jobs.is_handed_over:
            return jobs
    return None


def make_cluster(
    settings: LauncherSettings | None, experiment_dir: Path, num_jobs: int | None
) -> Cluster | None:
    """The cluster that a launcher's settings are of; None where they are of one that starts processes."""
    if isinstance(settings, ManifestSettings):
        raise LaunchError(Code.LAUNCHER_EXPORTS_ONLY(launcher=settings.type))
    if settings is None or settings.type not in SCHEDULERS:
        return None
    return load_implementation(SCHEDULERS[settings.type])(experiment_dir, settings, num_jobs)


def agents_grace_s(save_s: float) -> float:
    """Seconds that the agents of a run give its ranks to save a checkpoint, of `save_s` in all."""
    return max(1.0, save_s - AGENTS_FIRST_S)


def network(interface: str | None) -> dict[str, str]:
    """The variables by which ranks find each other over a network interface."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}


def cancel(experiment_dir: Path) -> str:
    """Ask whatever runs an experiment to save checkpoints and end; returns what was done, for people.

    Raises LaunchError where only another machine can, StoreError where there is no experiment.
    """
    open_experiment(experiment_dir)
    queued = queued_jobs(experiment_dir)
    busy = queued.busy if queued else []
    if queued and busy:
        queued.cancel()
        count = "1 job" if len(busy) == 1 else f"{len(busy)} jobs"
        return f"cancelled: {count} ({', '.join(busy)}); what runs saves a checkpoint first"
    owner = find_owner(experiment_dir)
    if owner is None:
        return f"{experiment_dir.name}: nothing of it runs or waits"
    if not owner.is_visible or owner.pid is None:
        raise LaunchError(Code.LAUNCHED_ELSEWHERE(directory=experiment_dir, owner=str(owner)))
    try:
        os.kill(owner.pid, signal.SIGTERM)
    except OSError as error:
        raise LaunchError(
            Code.LAUNCHER_UNREACHABLE(directory=experiment_dir, owner=str(owner), error=str(error))
        ) from None
    return f"asked {owner} to stop: its runs save checkpoints first"
