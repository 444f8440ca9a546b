"""vLLM on its own devices: `rollout.devices` processes, `tensor_parallel` of them for each engine.

The first rank starts the processes, sends them weights and requests, and distributes the completions. The
processes die with it. A process that ends, or is silent for 0.9 of `limits.stalled_s`, ends the run.
"""

import os
from collections.abc import Iterator

import torch
from torch import Tensor

from abrun.errors import LaunchError
from abrun.processes import progress
from abrun.recipe.run import OwnRunConfig
from abrun.trainer.backends import Backend
from abrun.trainer.models import Text
from abrun.trainer.rollout import Completion
from abrun.trainer.rollout.vllm.client import ChildProcess, EngineClient
from abrun.trainer.rollout.vllm.server import EngineSetup
from abrun.trainer.rollout.vllm.transfer import GroupTransfer
from abrun.trainer.seeds import Draws


class SeparateEngine:
    """Engine on its own devices; see abrun.trainer.rollout.RolloutEngine."""

    def __init__(self, config: OwnRunConfig, backend: Backend, text: Text) -> None:
        self._ranks = backend.ranks
        self._engines = _start_engines(config, backend.ranks.device, text) if self._ranks.is_first else None

    def generate(
        self, prompts: list[list[int]], draws: Draws, *, temperature: float | None = None
    ) -> list[Completion]:
        requests_by_replica = self._ranks.all_gather_data([list(zip(prompts, draws.seeds(), strict=True))])
        requests = [request for replica_requests in requests_by_replica for request in replica_requests]
        sampled = self._engines.generate(requests, temperature) if self._engines else None
        completions = self._ranks.broadcast_world(sampled)
        start = sum(map(len, requests_by_replica[: self._ranks.data.rank()]))
        return completions[start : start + len(prompts)]

    def sync(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        if self._engines:
            self._engines.load(weights)
        for _ in weights:  # the other ranks take part in the collective of each tensor
            pass

    def sleep(self) -> int:
        """Do nothing: the engine does not use the training devices."""
        return 0

    def wake(self) -> bool:
        """Do nothing."""
        return False

    def close(self, *, finished: bool = False) -> None:
        if self._engines:
            self._engines.close()


def _start_engines(config: OwnRunConfig, device: torch.device, text: Text) -> EngineClient:
    """Start the engine processes and connect to them."""
    progress.report("starting vllm")
    size, gpus = config.rollout.tensor_parallel, _assign_gpus(config)
    client = EngineClient(size, config.stalled_s)
    try:
        folder = client.make_folder()
        for number in range(len(gpus)):
            engine, rank = divmod(number, size)
            process = ChildProcess(number, rank, size, gpus[engine * size : (engine + 1) * size], folder)
            setup = EngineSetup(
                config=config.model_dump(mode="json"),
                end_ids=text.end_ids,
                folder=folder,
                engine=engine,
                rank=rank,
                number=number,
                num_processes=len(gpus),
                patience_s=client.silence_s,
            )
            client.add(process, setup)
        client.connect(lambda: GroupTransfer(folder, 0, 1 + len(gpus), device, client.silence_s))
    except BaseException:
        client.close()
        raise
    return client


def _assign_gpus(config: OwnRunConfig) -> list[str]:
    """Return the GPU of each process, as in CUDA_VISIBLE_DEVICES; they follow the training GPUs."""
    number, training = config.engine_devices, config.cluster.gpus_per_node
    if not training:
        return [""] * number
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = listed.split(",") if listed else [str(index) for index in range(torch.cuda.device_count())]
    if len(visible) < training + number:
        raise LaunchError(
            f"rollout.devices: got {number} with cluster.gpus_per_node {training}, but only {len(visible)} "
            "GPU(s) are visible; make more visible, or use devices: null"
        )
    return visible[training : training + number]
