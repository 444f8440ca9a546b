"""The local engine: runs as processes on this machine, as many as fit its devices at once."""

import signal
import subprocess
from dataclasses import dataclass

from abrun.launch.command import command_of, environment
from abrun.launch.engine import Place
from abrun.launch.requirements import Machine, refusals, this_machine
from abrun.plan import Plan
from abrun.processes import Popen, below, end_all, processes_of, start
from abrun.recipe import RunConfig
from abrun.store import RunDir


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


class LocalEngine:
    """Runs in sessions of their own, on devices that they do not share."""

    def __init__(self, num_jobs: int | None = None) -> None:
        self._machine = this_machine()
        self._num_jobs = num_jobs
        self._slots = Slots(self._machine, num_jobs)

    def refusals(self, plan: Plan) -> list[str]:
        return refusals(plan, self._machine, self._num_jobs)

    def place(self, run: RunDir, config: RunConfig) -> Place | None:
        return self._slots.find(config)

    def start(self, run: RunDir, config: RunConfig, place: Place) -> "LocalRun":
        with run.open_log() as output:
            process = start(
                self.command(run, config, place),
                self.environment(run, config, place),
                dies_by=signal.SIGTERM,  # with the launcher, but after a checkpoint
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must reach the launcher alone
            )
        self._slots.take(place)
        return LocalRun(run, process, place, self._slots)

    def command(self, run: RunDir, config: RunConfig, place: Place) -> list[str]:
        return command_of(run.path, config)

    def environment(self, run: RunDir, config: RunConfig, place: Place) -> dict[str, str]:
        return environment(run.path, place, config)


@dataclass(slots=True, eq=False)
class LocalRun:
    """A run's first process, which passes SIGTERM on, and all that came of it."""

    run: RunDir
    process: Popen
    place: Place
    slots: Slots
    ended: bool = False

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def lost(self) -> bool:
        return False  # so is this launcher, then

    def poll(self) -> int | None:
        status = self.process.poll()
        if status is not None and not self.ended:
            self.ended = True
            end_all(lambda: processes_of(self.run.path))  # what a killed first process could not end
            self.slots.give_back(self.place)
        return status

    def stop(self, *, kill: bool) -> None:
        if not kill:
            self.process.terminate()
            return
        if self.process.poll() is None:
            end_all(lambda: below(self.pid) | processes_of(self.run.path))
            self.process.kill()  # should its environment not be readable
        self.process.wait()
        self.poll()
