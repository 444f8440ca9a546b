"""The client's end of engine processes: it sends them requests and weights, and waits for their answers."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import Any

from torch import Tensor

from abrun.errors import LaunchError
from abrun.messages import sentence
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
from abrun.runs.files import open_log
from abrun.runs.layout import engine_log_name
from abrun.trainer.rollout import Completion
from abrun.trainer.rollout.vllm.server import ALIVE, FAILED, EngineSetup
from abrun.trainer.rollout.vllm.startup import MAX_LOG_LINES, quote_lines
from abrun.trainer.rollout.vllm.transfer import Transfer, split_into_chunks

POLL_S = 1.0
PATIENCE = 0.9  # share of limits.stalled_s, so that the process is named before the run counts as stalled
MAX_LOG_BYTES = 1 << 16  # read from the end of a log
ENDING_S = 5.0  # to wait for the exit of a process that has closed its socket


class ProcessLostError(LaunchError):
    """An engine process has closed its socket, or refuses to serve."""


class EngineClient:
    """Controls engine processes, `size` of them for each engine."""

    def __init__(self, size: int, stalled_s: float) -> None:
        self._size, self.silence_s = size, PATIENCE * stalled_s
        self._open = contextlib.ExitStack()
        self._transfer: Transfer | None = None
        self._processes: list[EngineProcess] = []

    def make_folder(self) -> Path:
        """Return a temporary folder that this client shares with its processes."""
        folder = tempfile.TemporaryDirectory(dir=os.environ.get(progress.FOLDER_VARIABLE))
        return Path(self._open.enter_context(folder))

    def add(self, process: "EngineProcess", setup: EngineSetup) -> None:
        """Set up a process; `close` ends it."""
        self._processes.append(process)
        process.send(setup)

    def connect(self, join_transfer: Callable[[], Transfer]) -> None:
        """Wait for all processes; `join_transfer` joins the transfer of weights together with them."""
        self._wait_for_answers("start")
        self._send_to_all(("connect",))
        self._transfer = join_transfer()
        self._wait_for_answers("connect to the trainer")

    def generate(self, requests: list[tuple[list[int], int]], temperature: float | None) -> list[Completion]:
        """Return a completion for each (prompt, seed); adjacent requests go to the same engine."""
        count = -(-len(requests) // (len(self._processes) // self._size))
        for process in self._processes:
            start = process.number // self._size * count
            process.send(("generate", requests[start : start + count], temperature))
        answers = [pickle.loads(completions) for completions in self._wait_for_answers("generate")]
        return [completion for completions in answers for completion in completions]

    def load(self, weights: Iterator[tuple[str, Tensor]], on_sent: Callable[[], None] = lambda: None) -> None:
        """Send the policy's weights to all engines at once.

        `on_sent` is called when the copies here are freed, and before an engine allocates its cache.
        """
        assert self._transfer is not None
        action = "take the policy's weights"
        self._send_to_all(("load",))
        for chunk in split_into_chunks(weights):
            self._wait_for_answers(action)  # ready
            try:
                self._send_to_all(self._transfer.prepare(chunk))
                self._transfer.send(chunk)
            except RuntimeError as error:  # from torch's process group, or CUDA
                self._wait_for_answers(action, ENDING_S)  # raises if a process has ended or hangs
                reason = " ".join(str(error).split())[:400]
                raise LaunchError(f"rollout.engine: vllm cannot be sent weights: {reason}") from error
            del chunk
        self._wait_for_answers(action)
        self._transfer.release()
        on_sent()
        self._send_to_all(None)
        self._wait_for_answers(action)

    def request(self, name: str, action: str) -> list[Any]:
        """Return all answers to a request without arguments; `action` completes "failed to"."""
        self._send_to_all((name,))
        return self._wait_for_answers(action)

    def close(self) -> None:
        """End the connections, and the processes that are children of this one."""
        if self._transfer:
            self._transfer.abort()
        for process in self._processes:
            process.end()
        self._open.close()

    def _send_to_all(self, message: Any) -> None:
        for process in self._processes:
            process.send(message)

    def _wait_for_answers(self, action: str, patience_s: float | None = None) -> list[Any]:
        """Return the answers of all processes, in order. Raises LaunchError if one ends or hangs."""
        patience_s = patience_s or self.silence_s
        answers: dict[int, Any] = {}
        awake, last_message_s = PauseDetector(), time.monotonic()
        while len(answers) < len(self._processes):
            pending = [process for process in self._processes if process.number not in answers]
            readable = wait([process.channel for process in pending], POLL_S)
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


class EngineProcess:
    """An engine process and the socket to it."""

    def __init__(self, number: int, channel: Connection, log: Path) -> None:
        self.number, self.channel, self._log = number, channel, log
        self._printed_before = log.stat().st_size if log.exists() else 0

    def __str__(self) -> str:
        return f"vllm's process {self.number} ({self._log.name})"

    def send(self, message: Any) -> None:
        """Send a message. The end of the process is not an error here, but in the wait for its answer."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.channel.send(message)

    def receive(self, action: str) -> tuple[str, Any]:
        """Receive the next message. Raises LaunchError if the process has ended or reports a failure."""
        try:
            kind, value = self.channel.recv()
        except (EOFError, ConnectionResetError):
            raise ProcessLostError(
                f"rollout.engine: {self} failed to {action}: {self._describe_ending()}; last lines of its "
                f"log: {quote_lines(self._printed().splitlines()[-MAX_LOG_LINES:]) or 'none'}"
            ) from None
        if kind == FAILED:
            raise LaunchError(value)
        return kind, value

    def end(self) -> None:
        self.channel.close()

    def _describe_ending(self) -> str:
        return "closed its socket"

    def _printed(self) -> str:
        """Return what the process has printed for this run, without empty lines."""
        if not self._log.exists():
            return ""
        with self._log.open("rb") as log:
            log.seek(max(self._printed_before, self._log.stat().st_size - MAX_LOG_BYTES))
            printed = log.read().decode(errors="replace")
        return "\n".join(" ".join(line.split()) for line in printed.splitlines() if line.strip())


class ChildProcess(EngineProcess):
    """An engine process of this run alone."""

    def __init__(self, number: int, rank: int, size: int, gpus: Sequence[str], folder: Path) -> None:
        self._oom_kills = count_oom_kills()
        channel, child_end = Pipe()
        super().__init__(number, channel, engine_log(number, folder))
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        }
        with child_end, open_log(self._log) as log:
            self._process = start_process(
                [
                    sys.executable,
                    "-u",
                    *MODULE_OPTIONS,
                    "abrun.trainer.rollout.vllm.server",
                    str(child_end.fileno()),
                ],
                {**os.environ, **variables},
                death_signal=signal.SIGKILL,
                pass_fds=(child_end.fileno(),),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __str__(self) -> str:
        return f"vllm's process {self.number} (pid {self._process.pid}, {self._log.name})"

    def end(self) -> None:
        """Kill the process and its descendants."""
        super().end()
        if self._process.poll() is None:
            kill_all(lambda: find_descendants(self._process.pid))
            self._process.kill()
        self._process.wait()

    def _describe_ending(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING_S)
        status = self._process.poll()
        ending = None if status is None else ending_reason(status, self._printed(), self._oom_kills)
        return sentence(ending) if ending else super()._describe_ending()


class HostProcess(EngineProcess):
    """An engine host, which outlives this run. Raises OSError if none listens at the socket."""

    def __init__(self, path: str, log: Path) -> None:
        super().__init__(0, Client(path, "AF_UNIX"), log)

    def __str__(self) -> str:
        return f"the engine host ({self._log.name})"


def engine_log(number: int, folder: Path) -> Path:
    """Return the log of an engine process: in the run's directory, or else in `folder`."""
    return Path(os.environ.get(RUN_DIR_VARIABLE, folder)) / engine_log_name(number)
