"""Engine hosts of a launch: processes with a vLLM engine, which serves one run after the other.

Runs of which several have equal engine settings get hosts, one for each rank on the rank's device. They end
with the launcher, with a run that did not finish, and when no waiting run can use them.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from abrun import processes
from abrun.errors import StoreError
from abrun.launch.engine import Devices
from abrun.processes import progress
from abrun.recipe.run import OwnRunConfig, RunConfig
from abrun.runs.files import open_log
from abrun.runs.layout import engine_log_name
from abrun.runs.rundir import RunDir

# A host ends with its connection. One that is killed under MPS with work on the GPU may disturb other runs.
END_GRACE_S = 3.0
HOST_COMMAND = ("abrun.trainer.rollout.vllm.host",)  # after `python -P -m`


def engine_settings(config: RunConfig) -> str | None:
    """Return what a run's engine depends on, as text, or None if no engine host can serve the run.

    Engines on devices of their own, or of several ranks, start with their run. Batch-invariant kernels
    replace the trainer's too, and an injected fault may be in the engine.
    """
    if not isinstance(config, OwnRunConfig) or sys.platform != "linux" or config.injected_fault:
        return None
    rollout = config.rollout
    if rollout.engine != "vllm" or not config.samples_completions or rollout.batch_invariant:
        return None
    if rollout.devices or rollout.tensor_parallel > 1 or config.cluster.nodes > 1:
        return None
    settings = {
        "model": config.model.model_dump(mode="json"),
        "dtype": config.policy.dtype,
        "head_dtype": config.engine_head_dtype,
        "rollout": rollout.model_dump(mode="json"),
        "cluster": config.cluster.model_dump(mode="json"),
        # The size of the cache follows from these
        "sequences": [config.algorithm.batch_size, getattr(config.algorithm, "group_size", 1)],
    }
    return json.dumps(settings, sort_keys=True)


@dataclass(frozen=True, slots=True, eq=False)
class HostSet:
    """The engine hosts of one run at a time, one for each rank."""

    settings: str
    environment: Mapping[str, str]  # of the run, without its mark
    sockets: Sequence[Path]
    processes: Sequence[processes.Popen]

    @property
    def is_alive(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def end(self, grace_s: float = 0.0) -> None:
        """Kill the processes, which hold no state to save, unless they end by themselves within `grace_s`."""
        for process in self.processes:
            if processes.wait_for_exit(process, grace_s, lambda: False) is None:
                processes.kill_all(lambda process=process: processes.find_descendants(process.pid))
                process.kill()
            process.wait()


class EngineHosts:
    """Starts engine hosts, lends them to runs, and ends them."""

    def __init__(self, expected: Sequence[tuple[RunDir, RunConfig]], folder: Path) -> None:
        self._folder, self._num_started = folder, 0
        self._waiting = {run.path: engine_settings(config) for run, config in expected}
        self._num_runs = Counter(self._waiting.values())
        self._idle: list[HostSet] = []
        self._lent: dict[Path, HostSet] = {}

    def lend(
        self, run: RunDir, config: RunConfig, devices: Devices, env: Mapping[str, str]
    ) -> dict[str, str]:
        """Return the variables, in addition to `env`, of a run that is about to start on these devices."""
        settings = engine_settings(config)
        self._waiting.pop(run.path, None)
        environment = {name: value for name, value in env.items() if name != processes.RUN_DIR_VARIABLE}
        # The memory of idle hosts that cannot serve the run is the run's.
        on_gpu, served = set(devices) - {"cpu"}, (settings, environment)

        def is_useless(hosts: HostSet) -> bool:
            is_beside = bool(on_gpu & set(hosts.environment["CUDA_VISIBLE_DEVICES"].split(",")))
            return not hosts.is_alive or (is_beside and (hosts.settings, hosts.environment) != served)

        self._end_idle(is_useless)
        if settings is None or self._num_runs[settings] == 1:
            return {}
        hosts = next((idle for idle in self._idle if (idle.settings, idle.environment) == served), None)
        if hosts:
            self._idle.remove(hosts)
        else:
            with contextlib.suppress(OSError, StoreError):  # the run makes its own engine
                hosts = self._start(run, settings, environment, config.cluster.ranks_per_node)
        if not hosts:
            return {}
        self._lent[run.path] = hosts
        return {processes.ENGINE_HOST_VARIABLE: os.pathsep.join(map(str, hosts.sockets))}

    def take_back(self, run: RunDir, *, finished: bool) -> None:
        """Keep the hosts of an ended run for the next one, or end them."""
        hosts = self._lent.pop(run.path, None)
        if hosts and not (finished and hosts.is_alive):
            hosts.end(END_GRACE_S)
        elif hosts:
            self._idle.append(hosts)
        self._end_idle(lambda idle: idle.settings not in self._waiting.values())

    def close(self) -> None:
        for hosts in (*self._idle, *self._lent.values()):
            hosts.end()
        self._idle.clear()
        self._lent.clear()

    def _end_idle(self, is_useless: Callable[[HostSet], bool]) -> None:
        for hosts in [hosts for hosts in self._idle if is_useless(hosts)]:
            hosts.end()
            self._idle.remove(hosts)

    def _start(self, run: RunDir, settings: str, environment: Mapping[str, str], num_ranks: int) -> HostSet:
        """Start a host for each rank; it reads its settings from the run. Raises OSError."""
        sockets, started = list[Path](), list[processes.Popen]()
        hosts = HostSet(settings, environment, sockets, started)
        gpus = environment["CUDA_VISIBLE_DEVICES"].split(",")
        try:
            for rank in range(num_ranks):
                folder = self._folder / f"host-{self._num_started}"
                self._num_started += 1
                folder.mkdir()
                sockets.append(folder / "socket")
                variables = {
                    "RANK": "0",
                    "LOCAL_RANK": "0",
                    "WORLD_SIZE": "1",
                    "CUDA_VISIBLE_DEVICES": gpus[rank] if rank < len(gpus) else "",
                    progress.FOLDER_VARIABLE: str(folder),
                }
                with (
                    socket.socket(socket.AF_UNIX) as listener,
                    open_log(run.path / engine_log_name(rank)) as log,
                ):
                    listener.bind(str(sockets[-1]))
                    listener.listen(1)
                    command = [sys.executable, "-u", *processes.MODULE_OPTIONS, *HOST_COMMAND]
                    process = processes.start_process(
                        [*command, str(listener.fileno()), str(run.path)],
                        {**environment, **variables},
                        death_signal=signal.SIGTERM,  # ends when its run has saved a checkpoint
                        pass_fds=(listener.fileno(),),
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # Ctrl-C must reach the launcher alone
                    )
                    started.append(process)
        except BaseException:
            hosts.end()
            raise
        return hosts


@contextlib.contextmanager
def engine_hosts_for(runs: Sequence[tuple[RunDir, RunConfig]]) -> Iterator[EngineHosts | None]:
    """Yield the engine hosts of a launch; None if no two runs could share one. Ends them afterwards."""
    settings = [text for _, config in runs if (text := engine_settings(config))]
    if len(settings) == len(set(settings)):
        yield None
        return
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(processes.scratch_folder())
        except OSError:  # the runs will report the same problem
            yield None
            return
        hosts = EngineHosts(runs, folder)
        stack.callback(hosts.close)
        yield hosts
