"""vLLM on its own devices: `rollout.devices` processes, `tensor_parallel` of them for each engine.

The first rank starts the processes, sends them weights and requests, and distributes the completions. The
processes die with it. A process that ends, or is silent for 0.9 of `limits.stalled_s`, ends the run.
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
from abrun.rollout.vllm.server import ALIVE, FAILED, EngineSetup
from abrun.rollout.vllm.startup import MAX_LOG_LINES, quote_lines
from abrun.rollout.vllm.transfer import Transfer, describe_chunk, split_into_chunks
from abrun.runs.files import open_log
from abrun.runs.layout import engine_log_name

POLL_S = 1.0
PATIENCE = 0.9  # share of limits.stalled_s, so that the process is named before the run counts as stalled
MAX_LOG_BYTES = 1 << 16  # read from the end of a log
ENDING_S = 5.0  # to wait for the exit of a process that has closed its socket


class SeparateEngine:
    """Engine on its own devices; see abrun.rollout.RolloutEngine."""

    def __init__(self, config: OwnRunConfig, backend: Backend, text: Text) -> None:
        self._ranks = backend.ranks
        self._engines = EngineProcesses(config, backend.ranks.device, text) if self._ranks.is_first else None

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

    def close(self) -> None:
        if self._engines:
            self._engines.close()


class EngineProcesses:
    """The engine processes, as controlled by the first rank."""

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
        size, gpus = self._size, _assign_gpus(config)
        for number in range(len(gpus)):
            engine, rank = divmod(number, size)
            process = Process(number, rank, size, gpus[engine * size : (engine + 1) * size], folder)
            self._processes.append(process)
            setup = EngineSetup(
                config=config.model_dump(mode="json"),
                end_ids=end_ids,
                folder=folder,
                engine=engine,
                rank=rank,
                number=number,
                num_processes=len(gpus),
                patience_s=self._silence_s,
            )
            process.send(setup)
        self._wait_for_answers("start")
        self._request("connect")
        self._transfer = Transfer(folder, 0, 1 + len(gpus), device, self._silence_s)
        self._wait_for_answers("connect to the trainer")

    def generate(self, requests: list[tuple[list[int], int]], temperature: float | None) -> list[Completion]:
        """Return a completion for each (prompt, seed); adjacent requests go to the same engine."""
        count = -(-len(requests) // (len(self._processes) // self._size))
        for process in self._processes:
            start = process.number // self._size * count
            process.send(("generate", requests[start : start + count], temperature))
        answers = [pickle.loads(completions) for completions in self._wait_for_answers("generate")]
        return [completion for completions in answers for completion in completions]

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Send the policy's weights to all engines at once."""
        assert self._transfer is not None
        action = "take the policy's weights"
        self._request("load")
        for chunk in split_into_chunks(weights):
            self._wait_for_answers(action)  # ready
            self._send_to_all(describe_chunk(chunk))
            try:
                self._transfer.send(chunk)
            except RuntimeError as error:  # from torch's process group
                self._wait_for_answers(action, ENDING_S)  # raises if a process has ended or hangs
                reason = " ".join(str(error).split())[:400]
                raise LaunchError(f"rollout.engine: vllm cannot be sent weights: {reason}") from error
        self._wait_for_answers(action)
        self._send_to_all([])
        self._wait_for_answers(action)

    def close(self) -> None:
        """Kill the processes; they hold no state to save."""
        if self._transfer:
            self._transfer.abort()
        for process in self._processes:
            process.end()
        self._open.close()

    def _request(self, *request: Any) -> None:
        self._send_to_all(request)

    def _send_to_all(self, message: Any) -> None:
        for process in self._processes:
            process.send(message)

    def _wait_for_answers(self, action: str, patience_s: float | None = None) -> list[Any]:
        """Return the answers of all processes, in order. Raises LaunchError if one ends or hangs."""
        patience_s = patience_s or self._silence_s
        answers: dict[int, Any] = {}
        awake, last_message_s = PauseDetector(), time.monotonic()
        while len(answers) < len(self._processes):
            pending = [
                engine_process for engine_process in self._processes if engine_process.number not in answers
            ]
            readable = wait([engine_process.channel for engine_process in pending], POLL_S)
            for process in pending:
                if process.channel not in readable:
                    continue
                last_message_s = time.monotonic()
                progress.report()
                kind, value = process.receive(action)
                if kind != ALIVE:
                    answers[process.number] = value
            silent_s = time.monotonic() - max(last_message_s, awake.running_since_s())
            if silent_s > patience_s:
                raise LaunchError(
                    f"rollout.engine: {pending[0]} was silent for {silent_s:.0f} s after the request to "
                    f"{action}; it may hang, or need a larger limits.stalled_s"
                )
        return [answers[process.number] for process in self._processes]


class Process:
    """An engine process and the socket to it."""

    def __init__(self, number: int, rank: int, size: int, gpus: Sequence[str], folder: Path) -> None:
        self.number = number
        self._log = Path(os.environ.get(RUN_DIR_VARIABLE, folder)) / engine_log_name(number)
        self._oom_kills = count_oom_kills()
        self.channel, child_end = Pipe()
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        }
        with child_end, open_log(self._log) as log:
            self._printed_before = log.tell()
            self._process = start_process(
                [sys.executable, "-u", *MODULE_OPTIONS, "abrun.rollout.vllm.server", str(child_end.fileno())],
                {**os.environ, **variables},
                death_signal=signal.SIGKILL,
                pass_fds=(child_end.fileno(),),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __str__(self) -> str:
        return f"vllm's process {self.number} (pid {self._process.pid}, {self._log.name})"

    def send(self, message: Any) -> None:
        """Send a message. The end of the process is not an error here, but in the wait for its answer."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.channel.send(message)

    def receive(self, action: str) -> tuple[str, Any]:
        """Receive the next message. Raises LaunchError if the process has ended or reports a failure."""
        try:
            kind, value = self.channel.recv()
        except (EOFError, ConnectionResetError):
            raise LaunchError(self._describe_ending(action)) from None
        if kind == FAILED:
            raise LaunchError(value)
        return kind, value

    def end(self) -> None:
        """Kill the process and its descendants."""
        self.channel.close()
        if self._process.poll() is None:
            kill_all(lambda: find_descendants(self._process.pid))
            self._process.kill()
        self._process.wait()

    def _describe_ending(self, action: str) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING_S)
        with self._log.open("rb") as log:
            log.seek(max(self._printed_before, self._log.stat().st_size - MAX_LOG_BYTES))
            printed = log.read().decode(errors="replace")
        lines = [" ".join(line.split()) for line in printed.splitlines() if line.strip()][-MAX_LOG_LINES:]
        status = self._process.poll()
        ending = None if status is None else ending_reason(status, printed, self._oom_kills)
        ending_text = sentence(ending) if ending else "closed its socket"
        return (
            f"rollout.engine: {self} failed to {action}: {ending_text}; last lines of its log: "
            f"{quote_lines(lines) or 'none'}"
        )


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
