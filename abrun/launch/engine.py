"""Where runs are started: the small questions that a launcher asks this machine, or a cluster.

Whatever a run does, it says through its directory; an engine finds it a place, starts it, and stops it.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from abrun.errors import LaunchError
from abrun.experiment.plan import Plan
from abrun.reasons import Code, Reason
from abrun.recipe.exported import Exported
from abrun.recipe.implementations import LAUNCHERS, SCHEDULERS, load
from abrun.recipe.launcher import LauncherSettings
from abrun.recipe.run import RunConfig
from abrun.runs.records import RunState
from abrun.runs.rundir import RunDir


class LeftInQueueError(LaunchError):
    """A submission failed, and what had been submitted before could not be taken back."""


Place = tuple[str, ...]  # the devices of one run by name: a rank each, then those of its rollout engines


class Started(Protocol):
    """A run that an engine has started."""

    @property
    def pid(self) -> int | None:
        """The first process of the run, where that is one of this host."""
        ...

    @property
    def lost(self) -> bool:
        """Whether it has ended because a machine is gone, and may begin again on another."""
        ...

    def poll(self) -> int | None:
        """The exit status once it has ended, negative for the signal that killed it; None before."""
        ...

    def stop(self, *, kill: bool) -> None:
        """Ask it to save and end, or else leave no process of it."""
        ...


class Engine(Protocol):
    """One class a launcher, made with the most runs at once that `--jobs` allows, or None."""

    def refusals(self, plan: Plan) -> list[Reason]:
        """Return why the plan cannot run here; nothing where it can."""
        ...

    def expecting(self, runs: Sequence[tuple[RunDir, RunConfig]]) -> AbstractContextManager[None]:
        """While these are started and end: what it prepares for so many, a null context where nothing."""
        ...

    def place(self, run: RunDir, config: RunConfig) -> Place | None:
        """Where a run could start now; None where it has to wait for others to end."""
        ...

    def start(self, run: RunDir, config: RunConfig, place: Place) -> Started:
        """Start a run, which prints into its log; it holds its place until `poll` has seen its end."""
        ...


class Scheduler(Protocol):
    """One class a cluster that queues jobs, which then run without a launcher."""

    def refusals(self, plan: Plan) -> list[Reason]:
        """Return why the plan could never run there; nothing where it could."""
        ...

    def scripts(self, plan: Plan, experiment_dir: Path, *, compare: bool) -> dict[str, str]:
        """What would be handed over, by name. After `refusals`."""
        ...

    def submit(
        self, plan: Plan, experiment_dir: Path, git: Mapping[str, Any] | None, *, compare: bool
    ) -> list[str]:
        """Hand over every unfinished run, whole or not at all; returns the ids of the jobs."""
        ...


class Queued(Protocol):
    """The jobs of an experiment that was handed over."""

    @property
    def busy(self) -> list[str]:
        """The ids of those that wait or work."""
        ...

    @property
    def silent(self) -> str | None:
        """What went wrong where the scheduler did not answer when it was last asked."""
        ...

    def state_of(self, state: RunState) -> RunState:
        """A run's state, where the scheduler knows better than the run's directory."""
        ...

    def cancel(self) -> None:
        """Take back what waits, and let what runs save a checkpoint and end."""
        ...

    def revive(self) -> str | None:
        """Hand over again what has ended without its last word; the new job, None where there is none."""
        ...

    def forget(self) -> None:
        """Let others take the place of jobs that have ended."""
        ...

    def compared(self) -> str | None:
        """What the job that compares has printed; None where there is none."""
        ...


def queued_jobs(experiment_dir: Path) -> Queued | None:
    """The jobs of an experiment, whichever scheduler has them; None where none was asked."""
    for _, jobs in SCHEDULERS.values():
        found = load(jobs).of(experiment_dir)
        if found:
            return found
    return None


def make_scheduler(settings: LauncherSettings | None, num_jobs: int | None) -> Scheduler | None:
    """The scheduler that a launcher's settings are of; None where they are of one that starts processes."""
    if isinstance(settings, Exported):
        raise LaunchError(Code.LAUNCHER_EXPORTS_ONLY(launcher=settings.type))
    known = settings is not None and settings.type in SCHEDULERS
    return load(SCHEDULERS[settings.type][0])(settings, num_jobs) if settings and known else None


def make_engine(launcher: str, num_jobs: int | None) -> Engine:
    """The engine that `--launcher` names. Raises LaunchError for a name that none has."""
    if launcher not in LAUNCHERS:
        raise LaunchError(
            Code.NOT_ALLOWED(field="--launcher", got=repr(launcher), allowed=[*LAUNCHERS, *SCHEDULERS])
        )
    return load(LAUNCHERS[launcher])(num_jobs)
