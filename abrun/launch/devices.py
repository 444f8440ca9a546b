"""What this machine can run at once, found without torch."""

import importlib.util
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from abrun.errors import LaunchError
from abrun.plan import Plan
from abrun.recipe import Cluster, CommandRun, Run, RunConfig, invocation


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The devices that runs may occupy: GPUs as CUDA_VISIBLE_DEVICES names them, and CPU cores."""

    gpus: tuple[str, ...]
    cores: int

    def __str__(self) -> str:
        return f"{_count(len(self.gpus), 'GPU')} and {_count(self.cores, 'usable CPU core')}"


def this_machine() -> Machine:
    return Machine(gpus=find_gpus(), cores=usable_cores())


def find_gpus() -> tuple[str, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES allows, or all that nvidia-smi lists."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        # CUDA itself reads the list up to its first invalid entry; -1 and an empty one are invalid.
        stop = next((index for index, name in enumerate(names) if name in ("", "-1")), len(names))
        return tuple(names[:stop])
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    num_gpus = sum(line.startswith("GPU ") for line in listed.splitlines())
    return tuple(str(index) for index in range(num_gpus))


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """The cores this process may use: its affinity, within its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = cgroup.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


class Slots:
    """Hands the machine's devices to runs. `num_jobs` caps the runs at once and may oversubscribe cores."""

    def __init__(self, machine: Machine, num_jobs: int | None = None) -> None:
        self._gpus = list(machine.gpus)
        self._cores = machine.cores
        self._num_free = num_jobs
        self._cores_limit = num_jobs is None

    def take(self, cluster: Cluster) -> tuple[str, ...] | None:
        """Devices for one run, a name a rank; None where it has to wait."""
        if self._num_free == 0:
            return None
        if cluster.gpus_per_node:
            if cluster.gpus_per_node > len(self._gpus):
                return None
            devices = tuple(self._gpus[: cluster.gpus_per_node])
            del self._gpus[: cluster.gpus_per_node]
        else:
            if self._cores_limit and cluster.cpu_ranks > self._cores:
                return None
            devices = ("cpu",) * cluster.cpu_ranks
            self._cores -= cluster.cpu_ranks
        if self._num_free is not None:
            self._num_free -= 1
        return devices

    def give_back(self, devices: tuple[str, ...]) -> None:
        self._cores += devices.count("cpu")
        self._gpus += [device for device in devices if device != "cpu"]
        if self._num_free is not None:
            self._num_free += 1


def refusal(plan: Plan, machine: Machine, num_jobs: int | None) -> LaunchError | None:
    """Why this machine cannot run the plan, or None where it can."""
    reference = plan.recipe.compare.reference
    if reference and not Path(reference).expanduser().is_file():
        return LaunchError(
            f"{plan.recipe.name}: compare.reference: got {reference!r}, no such file here; "
            "abrun freeze makes one"
        )
    for arm, config in {run.name.arm: run.config for run in plan.runs}.items():
        missing = _missing(config)
        if missing:
            return LaunchError(f"{plan.recipe.name}, arm {arm}: {missing}")
        cluster, where = config.cluster, f"{plan.recipe.name}, arm {arm}: cluster"
        if cluster.nodes > 1:
            return LaunchError(
                f"{where}.nodes: got {cluster.nodes}; the local launcher has this one machine: use nodes: 1"
            )
        if cluster.gpus_per_node > len(machine.gpus):
            return LaunchError(
                f"{where}.gpus_per_node: got {cluster.gpus_per_node} ranks; this machine has "
                f"{_count(len(machine.gpus), 'visible GPU')}: use at most that many (0 trains on CPU cores)"
            )
        if not cluster.gpus_per_node and cluster.cpu_ranks > machine.cores:
            return LaunchError(
                f"{where}.cpu_ranks: got {cluster.cpu_ranks} ranks; this machine has "
                f"{_count(machine.cores, 'usable CPU core')}: use at most that many"
            )
        if num_jobs and cluster.gpus_per_node * num_jobs > len(machine.gpus):
            return LaunchError(
                f"--jobs: got {num_jobs} runs at once of {_count(cluster.gpus_per_node, 'GPU')} each; this "
                f"machine has {len(machine.gpus)}: use at most {len(machine.gpus) // cluster.gpus_per_node}"
            )
    return None


def _missing(config: Run) -> str | None:
    """What a run needs besides devices and is not on this machine."""
    if isinstance(config, CommandRun):
        return _missing_command(config)
    assert isinstance(config, RunConfig)
    return _missing_file(config) or _missing_kernel(config)


def _missing_command(config: CommandRun) -> str | None:
    """A command that cannot be found; neither an arm nor a seed changes where it is looked for."""
    filled = invocation(config, experiment="experiment", arm="arm", seed=0, rerun=0, run_dir="run_dir")
    path = filled.env.get("PATH", os.environ.get("PATH"))
    if shutil.which(filled.argv[0], path=path) is None:
        return (
            f"trainer.argv.0: got {filled.argv[0]!r}, no such command on PATH; "
            "install it, or give the path of an executable file"
        )
    return None


def _missing_file(config: RunConfig) -> str | None:
    """A file of the recipe that is not on this machine; a model without a leading / . or ~ is a hub's."""
    data, weights = getattr(config.task, "path", None), config.model.path
    if data and not Path(data).expanduser().is_file():
        return f"task.path: got {data!r}, no such file here; give a JSON-lines file"
    held_out = config.validation.path if config.validation else None
    if held_out and not Path(held_out).expanduser().is_file():
        return f"validation.path: got {held_out!r}, no such file here; give a JSON-lines file"
    if weights and weights[0] in "/.~" and not Path(weights).expanduser().is_dir():
        return f"model.path: got {weights!r}, no such folder here; give a checkpoint's folder, or a hub name"
    return None


def _missing_kernel(config: RunConfig) -> str | None:
    """Why the Triton kernels cannot run here, said before a trainer asks the kernels themselves."""
    if config.policy.logprobs.impl != "triton":
        return None
    got = "policy.logprobs.impl: got 'triton'"
    if importlib.util.find_spec("triton") is None:
        return f"{got} without the package triton; pip install 'abrun[triton]', or use impl: chunked"
    if not config.cluster.gpus_per_node and os.environ.get("TRITON_INTERPRET") != "1":
        return (
            f"{got} with cluster.gpus_per_node: 0; on CPU cores it runs only in Triton's slow interpreter, "
            "with TRITON_INTERPRET=1 in the environment: use impl: chunked, or GPUs"
        )
    return None


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"
