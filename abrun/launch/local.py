"""Local engine: runs as processes on this machine, as many in parallel as fit its devices."""

import contextlib
import math
import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from abrun import processes
from abrun.experiment.command import run_command, run_environment
from abrun.experiment.plan import ExperimentPlan
from abrun.experiment.preflight.checks import find_problems
from abrun.experiment.preflight.machine import Machine, this_machine
from abrun.launch.engine import Devices, Engine
from abrun.launch.hosts import EngineHosts, engine_hosts_for
from abrun.launch.mps import NO_DAEMON, PIPE_VARIABLE, MpsService, is_served, mps_for, shares_by_mps
from abrun.recipe.run import RunConfig
from abrun.runs.files import open_log
from abrun.runs.launches import update_launch
from abrun.runs.rundir import RunDir


class Slots:
    """The machine's free places: `cluster.runs_per_gpu` on each GPU, one on each CPU core.

    `num_jobs` limits the parallel runs, and allows them to share CPU cores.
    """

    def __init__(self, machine: Machine, num_jobs: int | None = None) -> None:
        self._num_runs = dict.fromkeys(machine.gpus, 0)  # on each GPU
        self._cores = machine.cores
        self._num_free = num_jobs
        self._cores_limit = num_jobs is None

    def find_devices(self, config: RunConfig) -> Devices | None:
        """Return devices for one run, the GPUs with the fewest runs; None if it must wait.

        Among GPUs with equally many, those come first that no run has left for the longest.
        """
        if self._num_free == 0:
            return None
        count = config.devices_per_node
        if config.cluster.gpus_per_node:
            limit = config.cluster.runs_per_gpu
            with_place = [gpu for gpu, num_runs in self._num_runs.items() if num_runs < limit]
            chosen = sorted(with_place, key=self._num_runs.__getitem__)[:count]
            return tuple(chosen) if len(chosen) == count else None
        if self._cores_limit and count > self._cores:
            return None
        return ("cpu",) * count

    def take(self, devices: Devices) -> None:
        self._cores -= devices.count("cpu")
        for gpu in (device for device in devices if device != "cpu"):
            self._num_runs[gpu] += 1
        if self._num_free is not None:
            self._num_free -= 1

    def release(self, devices: Devices) -> None:
        self._cores += devices.count("cpu")
        for gpu in (device for device in devices if device != "cpu"):
            self._num_runs[gpu] = self._num_runs.pop(gpu) - 1  # to the end
        if self._num_free is not None:
            self._num_free += 1


def count_parallel_runs(machine: Machine, num_jobs: int | None, configs: Iterable[RunConfig]) -> int:
    """Return how many of these runs, in order, fit on a machine at the same time."""
    slots, count = Slots(machine, num_jobs), 0
    for config in configs:
        if (devices := slots.find_devices(config)) is None:
            break
        slots.take(devices)
        count += 1
    return count


class LocalEngine(Engine):
    """Starts each run in its own session, on devices with a free place."""

    def __init__(self, num_jobs: int | None = None) -> None:
        self._machine = this_machine()
        self._num_jobs = num_jobs
        self._slots = Slots(self._machine, num_jobs)
        self._hosts: EngineHosts | None = None
        self._mps: MpsService | None = None

    def find_problems(self, plan: ExperimentPlan) -> list[str]:
        return [problem.text for problem in find_problems(plan, self._machine, self._num_jobs)]

    @contextlib.contextmanager
    def prepare_for(
        self, runs: Sequence[tuple[RunDir, RunConfig]], say: Callable[[str], object]
    ) -> Iterator[None]:
        """Serve runs that share GPUs by MPS. Engine hosts start with the first run that can use them."""
        with self._serve_mps(runs, say), engine_hosts_for(runs) as self._hosts:
            yield
        self._hosts = None

    @contextlib.contextmanager
    def _serve_mps(
        self, runs: Sequence[tuple[RunDir, RunConfig]], say: Callable[[str], object]
    ) -> Iterator[None]:
        with mps_for((config for _, config in runs), say) as self._mps:
            yield
        self._mps = None

    def find_devices(self, run: RunDir, config: RunConfig) -> Devices | None:
        return self._slots.find_devices(config)

    def start(self, run: RunDir, config: RunConfig, devices: Devices) -> "LocalRun":
        command, env = self.command(run, config, devices), self.environment(run, config, devices)
        if shares_by_mps(config) and is_served(env):
            update_launch(run, mps=True)  # before the start, since it may fail
        hosts = self._hosts
        if hosts:
            env |= hosts.lend(run, config, devices, env)
        try:
            process = self._start_process(run, command, env)
        except BaseException:
            if hosts:
                hosts.take_back(run, finished=False)
            raise
        self._slots.take(devices)
        return LocalRun(run, process, devices, self._slots, hosts)

    def _start_process(self, run: RunDir, command: list[str], env: Mapping[str, str]) -> processes.Popen:
        with open_log(run.log) as output:
            return processes.start_process(
                command,
                env,
                death_signal=signal.SIGTERM,  # ends with the launcher, after a checkpoint
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must reach the launcher alone
            )

    def command(self, run: RunDir, config: RunConfig, devices: Devices) -> list[str]:
        return run_command(run.path, config)

    def environment(self, run: RunDir, config: RunConfig, devices: Devices) -> dict[str, str]:
        num_threads = self._machine.cores // max(len(self._machine.gpus) * config.cluster.runs_per_gpu, 1)
        return run_environment(run.path, devices, config) | self._sharing_variables(config, num_threads)

    def _sharing_variables(self, config: RunConfig, num_threads: int) -> dict[str, str]:
        """Return the variables of a run that shares its GPUs: of MPS, and each rank's CPU threads."""
        if config.cluster.runs_per_gpu == 1:
            return {}
        mps_variables = self._mps.variables if self._mps and shares_by_mps(config) else {}
        if not shares_by_mps(config) and is_served():
            mps_variables = {PIPE_VARIABLE: NO_DAEMON}
        threads = os.environ.get("OMP_NUM_THREADS", str(max(num_threads, 1)))
        return {"OMP_NUM_THREADS": threads, **mps_variables}


@dataclass(slots=True, eq=False)
class LocalRun:
    """First process of a run, which passes SIGTERM on to the run's other processes."""

    run: RunDir
    process: processes.Popen
    devices: Devices
    slots: Slots
    hosts: EngineHosts | None = None  # that may have been lent to it
    is_lost: bool = False  # always: losing this machine would end the launcher too
    ended: bool = False

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        status = self.process.poll()
        if status is not None and not self.ended:
            self.ended = True
            # A first process that was killed could not end the others.
            processes.kill_all(lambda: processes.find_run_processes(self.run.path))
            if self.hosts:
                self.hosts.take_back(self.run, finished=status == 0)
            self.slots.release(self.devices)
        return status

    def stop(self, *, kill: bool) -> None:
        if not kill:
            self.process.terminate()
            return
        if self.process.poll() is None:
            processes.kill_run(self.run.path, self.pid)
            self.process.kill()  # in case its environment was unreadable
        processes.wait_for_exit(self.process, math.inf, lambda: False)
        self.poll()
