"""Engine interface: finds devices for runs, and starts and stops them, on this machine or in a cluster job.

Runs report through their directories, not through the engine.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from abrun.errors import LaunchError
from abrun.experiment.plan import ExperimentPlan
from abrun.messages.numbers import listed
from abrun.recipe.implementations import LOCAL_LAUNCHERS, load_implementation, scheduler_names
from abrun.recipe.run import RunConfig
from abrun.runs.rundir import RunDir

Devices = tuple[str, ...]  # names of one run's devices: one per rank, then those of its rollout engines


class StartedRun(Protocol):
    """A run that an engine has started."""

    @property
    def pid(self) -> int | None:
        """Pid of the run's first process, if it is on this host."""

    @property
    def is_lost(self) -> bool:
        """True if the run ended because a machine was lost, and may restart on another."""
        ...

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal, or None while the run is active."""

    def stop(self, *, kill: bool) -> None:
        """Ask the run to save a checkpoint and end, or kill all its processes."""


class Engine(ABC):
    """A launcher's engine, constructed with the maximum number of parallel runs (`--jobs`) or None."""

    def find_problems(self, plan: ExperimentPlan) -> list[str]:
        """Return the reasons why the plan cannot run here; none if nodes report their own problems."""
        return []

    def prepare_for(
        self, runs: Sequence[tuple[RunDir, RunConfig]], say: Callable[[str], object]
    ) -> AbstractContextManager[None]:
        """Return a context in which these runs are started and end, for shared preparations.

        `say` is called with notes for the user.
        """
        return contextlib.nullcontext()

    @abstractmethod
    def find_devices(self, run: RunDir, config: RunConfig) -> Devices | None:
        """Return the devices on which a run could start now, or None if it must wait."""

    @abstractmethod
    def start(self, run: RunDir, config: RunConfig, devices: Devices) -> StartedRun:
        """Start a run, with output to its log. It holds its devices until `poll` returns its exit status."""


def make_engine(launcher: str, num_jobs: int | None) -> Engine:
    """Return the engine of `--launcher`. Raises LaunchError for an unknown name."""
    if launcher not in LOCAL_LAUNCHERS:
        raise LaunchError(
            f"--launcher: got {launcher!r}; allowed: {listed([*LOCAL_LAUNCHERS, *scheduler_names()])}"
        )
    return load_implementation(LOCAL_LAUNCHERS[launcher])(num_jobs)
