"""vLLM in an engine host: a process of the launcher, on this rank's device, which outlives the run.

The host has the engine of `ColocatedEngine`, with equal results. A run that finds none, or loses it,
continues with an engine in its own process.
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
from abrun.trainer.backends.ranks import limit_memory
from abrun.trainer.models import Text
from abrun.trainer.rollout import Completion, RolloutEngine
from abrun.trainer.rollout.vllm.client import EngineClient, HostProcess, ProcessLostError, engine_log
from abrun.trainer.rollout.vllm.instance import SPARE_BYTES
from abrun.trainer.rollout.vllm.server import EngineSetup
from abrun.trainer.rollout.vllm.transfer import GroupTransfer, SharedBufferTransfer
from abrun.trainer.seeds import Draws

Answer = TypeVar("Answer")


class HostedEngine:
    """Engine in a host for each rank; see abrun.trainer.rollout.RolloutEngine.

    `make_own` returns an engine in the ranks' own processes, for all ranks if the host of one is lost.
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
