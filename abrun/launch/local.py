"""The local engine: runs as processes on this machine, as many as fit its devices at once."""

import contextlib
import math
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

from abrun.experiment.command import AGENT, modules_to_preload, run_command, run_environment
from abrun.experiment.plan import ExperimentPlan
from abrun.experiment.preflight.checks import find_problems
from abrun.experiment.preflight.machine import Machine, this_machine
from abrun.launch.engine import Place
from abrun.processes import (
    MODULE_OPTIONS,
    RUN_DIR_VARIABLE,
    Child,
    adopt_orphans,
    find_descendants,
    find_run_processes,
    kill_all,
    start_process,
    wait_for_exit,
)
from abrun.processes.fork_server import ForkServer
from abrun.reasons import Reason
from abrun.recipe.run import OwnRunConfig, RunConfig
from abrun.runs.rundir import RunDir

FORKED = "abrun.train.forked"
FEWEST_LATER = 2  # runs of a kind that wait for others' places, for which imports once more are worth it
# With it torch asks for GPUs, as its compiler does when imported, without the driver, which no fork survives:
# docs.pytorch.org/docs/stable/notes/cuda.html#environment-variables
NO_DRIVER = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class Slots:
    """The machine's devices, free or taken. `num_jobs` caps the runs at once and may oversubscribe cores."""

    def __init__(self, machine: Machine, num_jobs: int | None = None) -> None:
        self._gpus = list(machine.gpus)
        self._cores = machine.cores
        self._num_free = num_jobs
        self._cores_limit = num_jobs is None

    def find(self, config: RunConfig) -> Place | None:
        """Devices for one run; None where it has to wait."""
        if self._num_free == 0:
            return None
        count = config.devices_per_node
        if config.cluster.gpus_per_node:
            return tuple(self._gpus[:count]) if count <= len(self._gpus) else None
        if self._cores_limit and count > self._cores:
            return None
        return ("cpu",) * count

    def take(self, place: Place) -> None:
        self._cores -= place.count("cpu")
        self._gpus = [gpu for gpu in self._gpus if gpu not in place]
        if self._num_free is not None:
            self._num_free -= 1

    def give_back(self, place: Place) -> None:
        self._cores += place.count("cpu")
        self._gpus += [device for device in place if device != "cpu"]
        if self._num_free is not None:
            self._num_free += 1


def runs_at_once(machine: Machine, num_jobs: int | None, configs: Iterable[RunConfig]) -> int:
    """Count the first of these runs that fit on a machine side by side."""
    slots, count = Slots(machine, num_jobs), 0
    for config in configs:
        if (place := slots.find(config)) is None:
            break
        slots.take(place)
        count += 1
    return count


# What runs have in common that begin as copies of one process: its imports, and its environment
Kind = tuple[tuple[str, ...], frozenset[tuple[str, str]]]


class LocalEngine:
    """Runs in sessions of their own, on devices that they do not share."""

    def __init__(self, num_jobs: int | None = None) -> None:
        self._machine = this_machine()
        self._num_jobs = num_jobs
        self._slots = Slots(self._machine, num_jobs)
        self._servers: dict[Kind, ForkServer] = {}

    def refusals(self, plan: ExperimentPlan) -> list[Reason]:
        return [problem.reason for problem in find_problems(plan, self._machine, self._num_jobs)]

    @contextlib.contextmanager
    def expecting(self, runs: Sequence[tuple[RunDir, RunConfig]]) -> Iterator[None]:
        """A process for each kind of runs of which many wait for places, for them to begin as its copies.

        It does its imports beside the first runs.
        """
        found = [(self._kind(run, config), config) for run, config in runs]
        counts = Counter(kind for kind, _ in found)
        try:
            for kind, config in dict(found).items():
                if (
                    kind
                    and counts[kind] - runs_at_once(self._machine, self._num_jobs, repeat(config))
                    >= FEWEST_LATER
                ):
                    with contextlib.suppress(OSError):  # what hinders it the runs will say
                        self._servers[kind] = ForkServer(FORKED, kind[0], dict(kind[1]))
            yield
        finally:
            for server in self._servers.values():
                server.close()
            if self._servers:
                adopt_orphans(False)
            self._servers.clear()

    def place(self, run: RunDir, config: RunConfig) -> Place | None:
        return self._slots.find(config)

    def start(self, run: RunDir, config: RunConfig, place: Place) -> "LocalRun":
        command, env = self.command(run, config, place), self.environment(run, config, place)
        kind = self._kind(run, config) if self._servers else None
        server = self._servers.get(kind) if kind else None
        process: Child | None = None
        with run.open_log() as output:
            if kind and server:
                changed = {name: env.get(name) for name, _ in kind[1] ^ env.items()}
                process = server.fork(command[command.index(AGENT) :], changed, output)
            if not process:
                process = start_process(
                    command,
                    env,
                    death_signal=signal.SIGTERM,  # with the launcher, but after a checkpoint
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C must reach the launcher alone
                )
        self._slots.take(place)
        return LocalRun(run, process, place, self._slots)

    def command(self, run: RunDir, config: RunConfig, place: Place) -> list[str]:
        return run_command(run.path, config)

    def environment(self, run: RunDir, config: RunConfig, place: Place) -> dict[str, str]:
        return run_environment(run.path, place, config)

    def _kind(self, run: RunDir, config: RunConfig) -> Kind | None:
        """None of runs that are not our own trainer's, started as it is started here."""
        on_gpus = bool(config.cluster.gpus_per_node)
        place = self._machine.gpus if on_gpus else ("cpu",) * config.devices_per_node
        if not isinstance(config, OwnRunConfig) or sys.platform != "linux":
            return None
        if self.command(run, config, place)[:4] != [sys.executable, *MODULE_OPTIONS, AGENT]:
            return None
        env = self.environment(run, config, place) | NO_DRIVER
        env.pop(RUN_DIR_VARIABLE)
        return modules_to_preload(config), frozenset(env.items())


@dataclass(slots=True, eq=False)
class LocalRun:
    """A run's first process, which passes SIGTERM on, and all that came of it."""

    run: RunDir
    process: Child
    place: Place
    slots: Slots
    lost: bool = False  # what can get lost here takes this launcher along
    ended: bool = False

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        status = self.process.poll()
        if status is not None and not self.ended:
            self.ended = True
            kill_all(lambda: find_run_processes(self.run.path))  # what a killed first process could not end
            self.slots.give_back(self.place)
        return status

    def stop(self, *, kill: bool) -> None:
        if not kill:
            self.process.terminate()
            return
        if self.process.poll() is None:
            kill_all(lambda: find_descendants(self.pid) | find_run_processes(self.run.path))
            self.process.kill()  # should its environment not be readable
        wait_for_exit(self.process, math.inf, lambda: False)
        self.poll()
