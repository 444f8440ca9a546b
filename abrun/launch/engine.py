"""Where runs are started: the small questions that a launch asks this machine, or the nodes of a job.

Whatever a run does, it says through its directory; an engine finds it a place, starts it, and stops it.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from abrun.errors import LaunchError
from abrun.experiment.plan import ExperimentPlan
from abrun.reasons import Code, Reason
from abrun.recipe.implementations import LOCAL_LAUNCHERS, SCHEDULERS, load_implementation
from abrun.recipe.run import RunConfig
from abrun.runs.rundir import RunDir

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

    def refusals(self, plan: ExperimentPlan) -> list[Reason]:
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


def make_engine(launcher: str, num_jobs: int | None) -> Engine:
    """The engine that `--launcher` names. Raises LaunchError for a name that none has."""
    if launcher not in LOCAL_LAUNCHERS:
        raise LaunchError(
            Code.NOT_ALLOWED(field="--launcher", got=repr(launcher), allowed=[*LOCAL_LAUNCHERS, *SCHEDULERS])
        )
    return load_implementation(LOCAL_LAUNCHERS[launcher])(num_jobs)
