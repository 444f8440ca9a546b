"""vLLM on devices of its own: `rollout.devices` processes, of which `tensor_parallel` make an engine.

The first rank starts them, sends them weights and requests, and shares out what they sample. They die with
it; one that ends, or says nothing for nine tenths of `limits.stalled_s`, ends the run.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from abrun.backends import Backend
from abrun.errors import LaunchError
from abrun.messages import sentence
from abrun.models import Text
from abrun.processes import (
    MODULE_OPTIONS,
    RUN_DIR_VARIABLE,
    PauseDetector,
    count_oom_kills,
    ending_reason,
    find_descendants,
    kill_all,
    progress,
    start_process,
)
from abrun.recipe.run import OwnRunConfig
from abrun.rollout import Completion
from abrun.rollout.draws import Draws
from abrun.rollout.vllm.server import ALIVE, FAILED, Setup
from abrun.rollout.vllm.starting import MOST_LINES, quoted
from abrun.rollout.vllm.transfer import Transfer, chunks, described
from abrun.runs.files import open_log
from abrun.runs.layout import engine_log_name

POLL_S = 1.0
PATIENCE = 0.9  # of the time after which the run would count as hanging itself
MOST_READ = 1 << 16  # bytes of a log
ENDING_S = 5.0  # for a process whose socket is closed to be gone


class Separate:
    """See abrun.rollout.RolloutEngine."""

    def __init__(self, config: OwnRunConfig, backend: Backend, text: Text) -> None:
        self._ranks = backend.ranks
        self._engines = Engines(config, backend.ranks.device, text) if self._ranks.is_first else None

    def generate(
        self, prompts: list[list[int]], draws: Draws, *, temperature: float | None = None
    ) -> list[Completion]:
        of_replicas = self._ranks.all_gather_data([list(zip(prompts, draws.seeds(), strict=True))])
        requests = [request for of_replica in of_replicas for request in of_replica]
        sampled = self._engines.generate(requests, temperature) if self._engines else None
        completions = self._ranks.broadcast_world(sampled)
        first = sum(map(len, of_replicas[: self._ranks.data.rank()]))
        return completions[first : first + len(prompts)]

    def sync(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        if self._engines:
            self._engines.load(weights)
        for _ in weights:  # a collective each
            pass

    def sleep(self) -> int:
        """Nothing: its memory is not the trainer's."""
        return 0

    def wake(self) -> bool:
        """Nothing."""
        return False

    def close(self) -> None:
        if self._engines:
            self._engines.close()


class Engines:
    """The processes, as the first rank has them."""

    def __init__(self, config: OwnRunConfig, device: torch.device, text: Text) -> None:
        self._size, self._silence_s = config.rollout.tensor_parallel, PATIENCE * config.stalled_s
        self._open = contextlib.ExitStack()
        self._transfer: Transfer | None = None
        self._processes: list[Process] = []
        try:
            folder = tempfile.TemporaryDirectory(dir=os.environ.get(progress.FOLDER_VARIABLE))
            self._start(config, text.end_ids, Path(self._open.enter_context(folder)), device)
        except BaseException:
            self.close()
            raise

    def _start(
        self, config: OwnRunConfig, end_ids: frozenset[int], folder: Path, device: torch.device
    ) -> None:
        progress.report("starting vllm")
        size, places = self._size, _places(config)
        for number in range(len(places)):
            engine, rank = divmod(number, size)
            process = Process(number, rank, size, places[engine * size : (engine + 1) * size], folder)
            self._processes.append(process)
            setup = Setup(
                config=config.model_dump(mode="json"),
                end_ids=end_ids,
                folder=folder,
                engine=engine,
                rank=rank,
                number=number,
                num_processes=len(places),
                patience_s=self._silence_s,
            )
            process.tell(setup)
        self._answers("start")
        self._ask("connect")
        self._transfer = Transfer(folder, 0, 1 + len(places), device, self._silence_s)
        self._answers("connect to the trainer")

    def generate(self, requests: list[tuple[list[int], int]], temperature: float | None) -> list[Completion]:
        """A completion for each prompt and its seed, neighbours by one engine."""
        count = -(-len(requests) // (len(self._processes) // self._size))
        for process in self._processes:
            first = process.number // self._size * count
            process.tell(("generate", requests[first : first + count], temperature))
        answers = [pickle.loads(completions) for completions in self._answers("generate")]
        return [completion for completions in answers for completion in completions]

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Send the policy's weights, to all engines at once."""
        assert self._transfer is not None
        doing = "take the policy's weights"
        self._ask("load")
        for chunk in chunks(weights):
            self._answers(doing)  # ready
            self._tell(described(chunk))
            try:
                self._transfer.send(chunk)
            except RuntimeError as error:  # from torch's process group
                self._answers(doing, ENDING_S)  # the one that has ended, or hangs
                reason = " ".join(str(error).split())[:400]
                raise LaunchError(f"rollout.engine: vllm cannot be sent weights: {reason}") from error
        self._answers(doing)
        self._tell([])
        self._answers(doing)

    def close(self) -> None:
        """End the processes, whatever they do: nothing of theirs is to be kept."""
        if self._transfer:
            self._transfer.abort()
        for process in self._processes:
            process.end()
        self._open.close()

    def _ask(self, *request: Any) -> None:
        self._tell(request)

    def _tell(self, message: Any) -> None:
        for process in self._processes:
            process.tell(message)

    def _answers(self, doing: str, patience_s: float | None = None) -> list[Any]:
        """What each process answers, in their order."""
        patience_s = patience_s or self._silence_s
        answers: dict[int, Any] = {}
        awake, heard_s = PauseDetector(), time.monotonic()
        while len(answers) < len(self._processes):
            waiting = [one for one in self._processes if one.number not in answers]
            heard = wait([one.channel for one in waiting], POLL_S)
            for process in waiting:
                if process.channel not in heard:
                    continue
                heard_s = time.monotonic()
                progress.report()
                kind, value = process.hear(doing)
                if kind != ALIVE:
                    answers[process.number] = value
            silent_s = time.monotonic() - max(heard_s, awake.running_since_s())
            if silent_s > patience_s:
                raise LaunchError(
                    f"rollout.engine: {waiting[0]}, asked to {doing}: said nothing for {silent_s:.0f} s; it "
                    "may hang, or need a larger limits.stalled_s"
                )
        return [answers[process.number] for process in self._processes]


class Process:
    """A process of an engine, and the socket to it."""

    def __init__(self, number: int, rank: int, size: int, gpus: Sequence[str], folder: Path) -> None:
        self.number = number
        self._log = Path(os.environ.get(RUN_DIR_VARIABLE, folder)) / engine_log_name(number)
        self._oom_kills = count_oom_kills()
        self.channel, theirs = Pipe()
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        }
        with theirs, open_log(self._log) as log:
            self._printed_before = log.tell()
            self._process = start_process(
                [sys.executable, "-u", *MODULE_OPTIONS, "abrun.rollout.vllm.server", str(theirs.fileno())],
                {**os.environ, **variables},
                death_signal=signal.SIGKILL,
                pass_fds=(theirs.fileno(),),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __str__(self) -> str:
        return f"vllm's process {self.number} (pid {self._process.pid}, {self._log.name})"

    def tell(self, message: Any) -> None:
        """Send it; one that is gone is found out when an answer is waited for."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.channel.send(message)

    def hear(self, doing: str) -> tuple[str, Any]:
        """The next thing it says. Raises LaunchError where that is its end."""
        try:
            kind, value = self.channel.recv()
        except (EOFError, ConnectionResetError):
            raise LaunchError(self._ending(doing)) from None
        if kind == FAILED:
            raise LaunchError(value)
        return kind, value

    def end(self) -> None:
        """At once, and what it has started."""
        self.channel.close()
        if self._process.poll() is None:
            kill_all(lambda: find_descendants(self._process.pid))
            self._process.kill()
        self._process.wait()

    def _ending(self, doing: str) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING_S)
        with self._log.open("rb") as log:
            log.seek(max(self._printed_before, self._log.stat().st_size - MOST_READ))
            printed = log.read().decode(errors="replace")
        lines = [" ".join(line.split()) for line in printed.splitlines() if line.strip()][-MOST_LINES:]
        status = self._process.poll()
        ending = None if status is None else ending_reason(status, printed, self._oom_kills)
        how = sentence(ending) if ending else "hung up"
        return (
            f"rollout.engine: {self}, asked to {doing}: {how}; last in its log: {quoted(lines) or 'nothing'}"
        )


def _places(config: OwnRunConfig) -> list[str]:
    """The GPU of each process, as CUDA_VISIBLE_DEVICES names it; those that train come first."""
    number, training = config.engine_devices, config.cluster.gpus_per_node
    if not training:
        return [""] * number
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = listed.split(",") if listed else [str(index) for index in range(torch.cuda.device_count())]
    if len(visible) < training + number:
        raise LaunchError(
            f"rollout.devices: got {number} with cluster.gpus_per_node {training}, and {len(visible)} GPU(s) "
            "are visible; make more visible, or use devices: null"
        )
    return visible[training : training + number]
