"""Resources of a machine for runs: devices, packages and hub access; needs no torch."""

import contextlib
import os
import platform
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from abrun.experiment.preflight.hub import hub_refusal
from abrun.messages.numbers import count_text
from abrun.recipe.extras import installed_packages


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Devices that runs may use, and the installed packages."""

    gpus: tuple[str, ...]  # names as in CUDA_VISIBLE_DEVICES
    cores: int
    packages: Mapping[str, str]  # installed packages of abrun.recipe.extras.MODULES -> version
    ask_hub: Callable[[str], str | None]  # returns why a hub model is unavailable, or None

    def __str__(self) -> str:
        return f"{count_text(len(self.gpus), 'GPU')} and {count_text(self.cores, 'usable CPU core')}"


def this_machine() -> Machine:
    """Return this machine's current state; the hub is asked once per model."""
    return Machine(
        gpus=find_gpus(), cores=usable_cores(), packages=installed_packages(), ask_hub=cache(hub_refusal)
    )


def find_gpus() -> tuple[str, ...]:
    """Return the GPUs in CUDA_VISIBLE_DEVICES, or all that nvidia-smi lists."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        # CUDA itself reads the list up to its first invalid entry; -1 and an empty one are invalid.
        stop = next((index for index, name in enumerate(names) if name in ("", "-1")), len(names))
        return tuple(names[:stop])
    return tuple(str(index) for index in range(len(gpu_names())))


def gpu_names() -> tuple[str, ...]:
    """Return the product name of every GPU that nvidia-smi lists: `NVIDIA H100 80GB HBM3`."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    lines = [line for line in listed.splitlines() if line.startswith("GPU ")]
    return tuple(line.partition(": ")[2].rpartition(" (UUID")[0] or line for line in lines)


def cpu_name() -> str:
    """Return the product name of this machine's CPU."""
    with contextlib.suppress(OSError):  # of a system other than Linux
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the number of cores this process may use: its affinity, limited by the container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = cgroup.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
