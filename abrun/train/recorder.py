"""What a running trainer writes into its run directory; the other side of the boundary is abrun.store."""

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from abrun import store
from abrun.errors import StoreError
from abrun.recipe import Policy, RunConfig
from abrun.train.wandb_mirror import WandbMirror

RECORDED_PACKAGES = ("abrun", "triton", "transformers", "safetensors", "numpy", "math-verify")


class FencedError(StoreError):
    """A newer attempt owns the run directory: this process must not write any more."""


class Recorder:
    """Rank 0's writer of one run directory. On the other ranks every method does nothing.

    Every write first checks the fence: an attempt that was replaced stops instead of writing.
    """

    def __init__(self, directory: Path, config: RunConfig, record: Mapping[str, Any]) -> None:
        self.directory = directory
        self.attempt = store.current_attempt(directory)
        self._writes = dist.get_rank() == 0
        self._mirror: WandbMirror | None = None
        if self._writes:
            self._metrics = store.LineWriter(directory / "metrics.jsonl")
            self._events = store.LineWriter(directory / "events.jsonl")
            if config.validation:
                self._validations = store.LineWriter(directory / store.VALIDATION)
            if config.wandb:
                self._mirror = WandbMirror(
                    config, record, directory, lambda text: self.event("wandb", message=text)
                )

    def environment(self, config: RunConfig, device: torch.device, prompts: Iterable[str]) -> None:
        """Record what the run depends on besides its configuration. Collective."""
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (socket.gethostname(), _device_name(device)))
        if not self._writes:
            return
        digest = prompts_sha256(prompts)
        self._check_fence()
        content = {
            "attempt": self.attempt,
            "python": platform.python_version(),
            "versions": {name: _version(name) for name in RECORDED_PACKAGES} | {"torch": torch.__version__},
            "devices": [name for _, name in ranks],
            "hosts": sorted({host for host, _ in ranks}),
            "dtype": config.policy.dtype,
            "precision": _precision(config.policy, device),
            "prompts_sha256": digest,
        }
        store.write_json(self.directory / "environment.json", content)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Append one step, and let the heart beat."""
        if self._writes:
            self._check_fence()
            row = {"step": step, "attempt": self.attempt, "time_s": time.time(), **values}
            self._metrics.write(row)
            self.heartbeat(step)
            if self._mirror:
                self._mirror.log(row)

    def validation(
        self, step: int, prompts: Iterable[str], rewards: Sequence[float], lengths: Sequence[int]
    ) -> None:
        """Append what a validation found, prompt by prompt."""
        if self._writes:
            self._check_fence()
            content = {"prompts_sha256": prompts_sha256(prompts), "rewards": rewards, "lengths": lengths}
            self._validations.write({"step": step, "attempt": self.attempt, **content})

    def heartbeat(self, step: int) -> None:
        if self._writes:
            content = {"time_s": time.time(), "step": step, "pid": os.getpid(), "attempt": self.attempt}
            store.write_json(self.directory / "heartbeat.json", content)

    def event(self, event: str, **details: Any) -> None:
        """Append to events.jsonl, and to stdout.log for whoever reads along."""
        if self._writes:
            self._check_fence()
            self._events.write({"time_s": time.time(), "attempt": self.attempt, "event": event, **details})
            print(f"{event}: {', '.join(f'{key} {value}' for key, value in details.items())}", flush=True)

    def failed(self, message: str) -> None:
        """Say why the run failed; a fenced attempt and a full disk can only say it on stderr."""
        with contextlib.suppress(StoreError):
            self.event("failed", message=message)

    def finish(self, step: int) -> None:
        """Write result.json, last of all: from now on the run is finished."""
        if self._writes:
            self.event("finished", step=step)
            if self._mirror:
                self._mirror.finish()
            store.write_json(self.directory / "result.json", {"step": step, "attempt": self.attempt})

    def _check_fence(self) -> None:
        owner = store.current_attempt(self.directory)
        if owner != self.attempt:
            raise FencedError(
                f"{self.directory}: attempt {owner} owns this run now; attempt {self.attempt} stops"
            )


def prompts_sha256(prompts: Iterable[str]) -> str:
    """Identifies prompts in their order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(prompt.encode() + b"\0")
    return digest.hexdigest()


def failed_to_start(directory: Path, message: str) -> None:
    """Rank 0's `failed` event of a run whose ranks did not find together, so that there is no Recorder."""
    if os.environ.get("RANK", "0") == "0":
        row = {"time_s": time.time(), "attempt": store.current_attempt(directory), "event": "failed"}
        with contextlib.suppress(StoreError):
            store.LineWriter(directory / "events.jsonl").write({**row, "message": message})


def _precision(policy: Policy, device: torch.device) -> dict[str, str]:
    """At which precision the log-probs of the LM head were computed; see abrun.kernels."""
    projection = policy.logprobs.head_dtype or policy.dtype
    backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    float32_products = backend.matmul.fp32_precision
    return {
        "projection": projection,
        "logits": projection if policy.logprobs.impl == "logits" else "float32",
        "float32_products": "ieee" if float32_products == "none" else float32_products,  # none: never set
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
