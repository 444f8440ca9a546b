"""vLLM as rollout engine: on the training devices, in the ranks or in engine hosts, or on its own devices.

An engine has its own copy of the weights, which every sync replaces. On the training devices,
`tensor_parallel` ranks share an engine, and it sleeps during training on a GPU: its cache and its weights are
freed.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from abrun.errors import LaunchError
from abrun.processes import ENGINE_HOST_VARIABLE, progress
from abrun.recipe.run import CONTEXT_BYTES, OwnRunConfig, share_of_device
from abrun.trainer.backends import Backend
from abrun.trainer.backends.ranks import all_gather_lists, limit_memory
from abrun.trainer.models.text import Text
from abrun.trainer.rollout import Completion, RolloutEngine
from abrun.trainer.rollout.vllm.client import (
    ChildProcess,
    EngineClient,
    HostProcess,
    ProcessLostError,
    engine_log,
)
from abrun.trainer.rollout.vllm.instance import SPARE_BYTES, VllmInstance
from abrun.trainer.rollout.vllm.server import EngineSetup
from abrun.trainer.rollout.vllm.transfer import GroupTransfer, SharedBufferTransfer
from abrun.trainer.seeds import Draws


def make_engine(config: OwnRunConfig, backend: Backend, text: Text) -> RolloutEngine:
    """See abrun.trainer.rollout.make_engine. Collective."""
    if config.rollout.devices:
        return SeparateEngine(config, backend, text)
    if os.environ.get(ENGINE_HOST_VARIABLE):
        return HostedEngine(config, backend, text, lambda: ColocatedEngine(config, backend, text))
    return ColocatedEngine(config, backend, text)


class ColocatedEngine:
    """Engine in the ranks' own processes; see rollout.RolloutEngine.

    Each rank samples a share of its replica's rows.
    """

    def __init__(self, config: OwnRunConfig, backend: Backend, text: Text) -> None:
        self._ranks = backend.ranks
        self._vllm = VllmInstance(config, backend.ranks.device, backend.ranks.size, text.end_ids)

    def generate(
        self, prompts: list[list[int]], draws: Draws, *, temperature: float | None = None
    ) -> list[Completion]:
        local_rows = self._ranks.replica_slice(len(prompts))
        requests = list(zip(prompts[local_rows], draws.seeds()[local_rows], strict=True))
        return self._ranks.all_gather_replica(self._sample(requests, temperature))

    def sync(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self._vllm.load(weights)

    def sleep(self) -> int:
        return self._vllm.sleep()

    def wake(self) -> bool:
        return self._vllm.wake()

    def close(self, *, finished: bool = False) -> None:
        self._vllm.close()

    def _sample(self, requests: list[tuple[list[int], int]], temperature: float | None) -> list[Completion]:
        """Sample the requests; ranks that share an engine submit the requests of all of them in one order."""
        group = self._vllm.group
        if group is None:
            return self._vllm.generate(requests, temperature)
        requests_by_rank = all_gather_lists([requests], group)
        completions = self._vllm.generate(
            [request for rank_requests in requests_by_rank for request in rank_requests], temperature
        )
        start = sum(map(len, requests_by_rank[: group.rank()]))
        return completions[start : start + len(requests)]


Answer = TypeVar("Answer")


class HostedEngine:
    """Engine in a host for each rank; see abrun.trainer.rollout.RolloutEngine.

    A host is a process of the launcher on this rank's device, which outlives the run. It has the engine of
    `ColocatedEngine`, with equal results. `make_own` returns an engine in the ranks' own processes, for all
    ranks if the host of one is missing or lost.
    """

    def __init__(
        self, config: OwnRunConfig, backend: Backend, text: Text, make_own: Callable[[], RolloutEngine]
    ) -> None:
        self._backend, self._ranks, self._make_own = backend, backend.ranks, make_own
        self._device = backend.ranks.device
        self._runs_per_gpu = config.cluster.runs_per_gpu
        # Device memory that the engine allocates when it wakes, and that of its process while it sleeps
        self._asleep_bytes, self._resident_bytes = 0, 0
        self._own: RolloutEngine | None = None
        self._host = EngineClient(1, config.stalled_s)
        self._ask(lambda: self._connect(text))

    def generate(
        self, prompts: list[list[int]], draws: Draws, *, temperature: float | None = None
    ) -> list[Completion]:
        completions = None
        if not self._own:
            local_rows = self._ranks.replica_slice(len(prompts))
            requests = list(zip(prompts[local_rows], draws.seeds()[local_rows], strict=True))
            completions = self._ask(lambda: self._host.generate(requests, temperature))
        if self._own:
            return self._own.generate(prompts, draws, temperature=temperature)
        return self._ranks.all_gather_replica(completions or [])

    def sync(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        if self._own:
            self._own.sync(weights)
        else:
            self._ask(lambda: self._load(weights))

    def sleep(self) -> int:
        """Free the engine's device memory. Returns 0: torch's allocator here never counted it."""
        if not self._own:
            self._ask(self._sleep)
        return self._own.sleep() if self._own else 0

    def wake(self) -> bool:
        answers = None if self._own else self._ask(self._wake)
        return self._own.wake() if self._own else any(answers or ())

    def close(self, *, finished: bool = False) -> None:
        """End the connection. The host serves another run if this one has `finished`."""
        if self._own:
            self._own.close()
        elif finished:
            with contextlib.suppress(LaunchError):  # the run needs it no more
                self._host.request("finish", "end a run")
        self._host.close()

    def _connect(self, text: Text) -> None:
        progress.report("starting vllm")
        paths, rank = os.environ[ENGINE_HOST_VARIABLE].split(os.pathsep), self._ranks.rank
        host, on_gpu = self._host, self._device.type == "cuda"
        folder = host.make_folder()
        log = engine_log(rank, folder)
        setup = EngineSetup(
            end_ids=text.end_ids, folder=folder, shares_device=on_gpu, log=log, patience_s=host.silence_s
        )
        try:
            host.add(HostProcess(paths[rank], log), setup)
            if on_gpu:
                torch.cuda.empty_cache()  # the engine may start now
            host.connect(
                lambda: (
                    SharedBufferTransfer(self._device)
                    if on_gpu
                    else GroupTransfer(folder, 0, 2, self._device, host.silence_s)
                )
            )
            self._note_memory()
        except (LaunchError, OSError, IndexError) as error:  # it is gone, or its engine did not start
            raise ProcessLostError(
                f"rollout.engine: the engine host does not serve this run: {error}"
            ) from error

    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        try:
            self._host.load(weights, self._yield_memory)
        except ProcessLostError:
            for _ in weights:  # the other ranks take part in the collective of each tensor
                pass
            raise

    def _wake(self) -> list[bool]:
        self._free_cache()
        return self._host.request("wake", "wake")

    def _sleep(self) -> None:
        self._host.request("sleep", "sleep")
        self._note_memory()

    def _note_memory(self) -> None:
        ((self._asleep_bytes, allocated_bytes),) = self._host.request("memory_bytes", "measure its memory")
        if self._device.type == "cuda":
            self._resident_bytes = allocated_bytes + CONTEXT_BYTES
            self._limit_memory(self._resident_bytes)

    def _free_cache(self) -> None:
        """Empty torch's cache if it may hold memory that the engine is about to allocate."""
        if self._device.type != "cuda":
            return
        free_bytes, device_bytes = torch.cuda.mem_get_info(self._device)
        spare_bytes = SPARE_BYTES // self._runs_per_gpu
        if self._runs_per_gpu > 1:
            share_bytes = share_of_device(device_bytes, self._runs_per_gpu)
            free_bytes = share_bytes - self._resident_bytes - torch.cuda.memory_reserved(self._device)
        if free_bytes < self._asleep_bytes + spare_bytes:
            torch.cuda.empty_cache()

    def _yield_memory(self) -> None:
        """Leave the engine the memory for its cache, now that the copies of the weights are freed."""
        self._free_cache()
        if self._device.type == "cuda":
            self._limit_memory(self._resident_bytes + self._asleep_bytes)

    def _limit_memory(self, engine_bytes: int) -> None:
        """Limit this process to what the engine leaves of the run's share of a GPU."""
        limit_memory(self._device, self._runs_per_gpu, unmapped_bytes=-engine_bytes)

    def _ask(self, request: Callable[[], Answer]) -> Answer | None:
        """Return the answer of this rank's host. Collective.

        If the host of any rank is lost, replaces all of them by `_own`, with the policy's weights, and
        returns None.
        """
        answer, loss = None, None
        try:
            answer = request()
        except ProcessLostError as error:
            loss = error
        is_lost = loss is not None
        if self._ranks.size > 1:
            is_lost = bool(self._ranks.all_reduce_max_world([is_lost])[0])
        if not is_lost:
            return answer
        if loss:
            print(f"{loss}; continuing with an engine in this process", file=sys.stderr, flush=True)
        self._host.close()
        if self._device.type == "cuda":  # the lost host's part of the share, too, is this process's now
            limit_memory(self._device, self._runs_per_gpu)
            torch.cuda.empty_cache()
        self._own = self._make_own()
        self._own.sync(self._backend.gather_weights())
        return None


class SeparateEngine(RolloutEngine):
    """Engine on its own devices, where it never sleeps; see abrun.trainer.rollout.RolloutEngine.

    It has `rollout.devices` processes, `tensor_parallel` of them for each vLLM engine. The first rank starts
    them, sends them weights and requests, and distributes the completions. They die with it. A process that
    ends, or is silent for 0.9 of `limits.stalled_s`, ends the run.
    """

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
