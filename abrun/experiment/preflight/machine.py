"""What a machine has that runs may use: devices, packages, and a way to ask the hub; found without torch."""

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from abrun.experiment.preflight.hub import hub_refusal
from abrun.extras import installed_packages
from abrun.messages.numbers import count_text
from abrun.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The devices that runs may occupy, and what is installed there."""

    gpus: tuple[str, ...]  # as CUDA_VISIBLE_DEVICES names them
    cores: int
    packages: Mapping[str, str]  # version by name, of those of abrun.extras.MODULES that are installed
    ask_hub: Callable[[str], Reason | None]  # why a hub's model cannot be had here

    def __str__(self) -> str:
        return f"{count_text(len(self.gpus), 'GPU')} and {count_text(self.cores, 'usable CPU core')}"


def this_machine() -> Machine:
    """Return what is here now; it asks the hub once a model."""
    return Machine(
        gpus=find_gpus(), cores=usable_cores(), packages=installed_packages(), ask_hub=cache(hub_refusal)
    )


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
