"""Probes about memory, side by side: the longest sequence, predicted peaks, a measured step.

Each probe is a process: the ranks of a measured step, or else a fork of one that has imported the trainer.
Answers are kept for later launches (abrun.tools.predict.facts).
"""

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from abrun.errors import LaunchError
from abrun.experiment.command import run_environment
from abrun.experiment.preflight.hub import hub_refusal
from abrun.experiment.preflight.machine import usable_cores
from abrun.experiment.preflight.model_files import hub_model_refusal
from abrun.experiment.probe import LOG, ProbeRefused, collect_rows, is_never_cancelled
from abrun.launch.memory.profile import Point, measure_cell
from abrun.messages.codes import Code
from abrun.processes import MODULE_OPTIONS, Popen, find_run_processes, kill_all, poll_interval
from abrun.recipe.run import OwnRunConfig
from abrun.runs.files import open_log, wrap_write_errors
from abrun.tools.predict.facts import Answer, make_key, read_answer, store_answer, without_section

TRACE = "abrun.tools.predict.trace"
LONGEST_OF_RUN = {"longest": True}  # job of abrun.tools.predict.trace

Kind = Literal["longest", "predicted", "measured"]
IsCancelled = Callable[[], bool]


class TracingProcesses:
    """Processes that answer by abrun.tools.predict.trace, side by side; for several threads.

    They are forked from one that has imported torch, which takes longer than most answers. Values of
    `trainer.env` get one each, because imports may read them. Linux only.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._servers: dict[frozenset[tuple[str, str]], tuple[Popen, socket.socket]] = {}

    def __enter__(self) -> "TracingProcesses":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def do_job(
        self,
        directory: Path,
        config: OwnRunConfig,
        job: Mapping[str, Any],
        is_cancelled: IsCancelled = is_never_cancelled,
    ) -> list[dict[str, Any]]:
        """Return the rows of a job, which asks no GPU.

        Raises ProbeRefused if it cannot be done here, as without the files of a hub model, for which the
        process would retry for half a minute; LaunchError with the path of its output if it fails.
        """
        if why := hub_model_refusal(config, hub_refusal):
            raise ProbeRefused(why)
        return collect_rows(TRACE, directory, config, job, lambda: self._ask(directory, config, is_cancelled))

    def close(self) -> None:
        """End all processes."""
        for process, questions in self._servers.values():
            questions.close()
            process.kill()
            process.wait()
        if self._servers:
            kill_all(lambda: find_run_processes(self.folder))

    def _ask(self, directory: Path, config: OwnRunConfig, is_cancelled: IsCancelled) -> int:
        """Return the exit code of a job's process; -1 if it was killed, or its server could not start."""
        with wrap_write_errors(directory), open_log(directory / LOG) as log:
            log.truncate(0)
            questions = self._start_server(config, log)
        report_fd, process_fd = os.pipe()
        with open(report_fd, "rb", buffering=0) as report:
            with contextlib.suppress(OSError):  # the server has died
                socket.send_fds(questions, [os.fsencode(directory)], [process_fd])
            os.close(process_fd)
            lines = b""  # pid and exit code
            while not is_cancelled():
                if select.select([report], [], [], poll_interval(0.05))[0]:
                    if not (text := report.read(100)):
                        return int(lines.split()[1]) if lines.count(b"\n") == 2 else -1
                    lines += text
        if lines:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(lines.split()[0]), signal.SIGKILL)
        return -1

    def _start_server(self, config: OwnRunConfig, log: IO[bytes]) -> socket.socket:
        """Return the socket of the server with this environment; one that is new prints into `log`."""
        with self._lock:
            key = frozenset(config.trainer.env.items())
            if key in self._servers and self._servers[key][0].poll() is not None:  # killed
                self._servers.pop(key)[1].close()
            if key not in self._servers:
                questions, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with server_end:
                    process = Popen(  # ends with the socket: the thread that starts it may end earlier
                        [sys.executable, *MODULE_OPTIONS, TRACE, str(server_end.fileno())],
                        env=run_environment(self.folder, (), config),
                        pass_fds=(server_end.fileno(),),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                self._servers[key] = process, questions
            return self._servers[key][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Question about one arm, which a process can answer."""

    kind: Kind
    key: str  # of its answer
    arm: str = field(compare=False)
    config: OwnRunConfig = field(compare=False)
    job: dict[str, Any] = field(compare=False)  # as in the module's job.json


def ask_longest(arm: str, config: OwnRunConfig) -> Probe:
    """Return the probe for the longest sequence of a run, which is independent of the policy."""
    key = make_key("longest", without_section(config, "policy"), {})
    return Probe(kind="longest", key=key, arm=arm, config=config, job=dict(LONGEST_OF_RUN))


def ask_predicted(arm: str, config: OwnRunConfig, length: int, num_sequences: int) -> Probe:
    """Return the probe for the predicted peaks of a step, with micro-batches of this size."""
    job: dict[str, Any] = {"lengths": [length], "num_sequences": num_sequences}
    shapes = config.model_copy(update={"steps": 1})
    return Probe(kind="predicted", key=make_key("predicted", shapes, job), arm=arm, config=config, job=job)


def ask_measured(
    arm: str, config: OwnRunConfig, length: int, num_sequences: int, budget_bytes: int, gpus: Sequence[str]
) -> Probe:
    """Return the probe for the measured peak of a step. `gpus`: descriptions of this machine's GPUs."""
    job = {"length": length, "num_sequences": num_sequences, "rollouts": False, "budget_bytes": budget_bytes}
    key = make_key("measured", config.model_copy(update={"steps": 1}), job, *gpus)
    return Probe(kind="measured", key=key, arm=arm, config=config, job=job)


class ProbePool:
    """Answers probes side by side, a process for each core; on exit it ends those that nobody waits for.

    `on_start` is called before the first process starts; with only known answers none does.
    """

    def __init__(self, on_start: Callable[[], object] = lambda: None) -> None:
        self._on_start, self.has_started = on_start, False
        self._executor = ThreadPoolExecutor(max(usable_cores(), 1))
        self._futures: dict[str, Future[Answer]] = {}  # by key
        self._is_cancelled = threading.Event()
        self._processes: TracingProcesses | None = None
        self._num_started = 0
        self.days: dict[str, str] = {}  # of the answers of earlier launches, by key

    def __enter__(self) -> "ProbePool":
        return self

    def __exit__(self, _: object, error: object, __: object) -> None:
        self.cancel()
        self._executor.shutdown()
        if self._processes is None:
            return
        self._processes.close()
        # A failed probe's error names a log in the folder.
        keeps_log = isinstance(error, LaunchError) and any(
            reason.code is Code.PROBE_FAILED for reason in error.reason.walk()
        )
        if not keeps_log:
            shutil.rmtree(self._processes.folder, ignore_errors=True)

    def ask(self, probe: Probe) -> Future[Answer]:
        """Start a probe unless its answer is known; its result raises LaunchError if it fails."""
        if probe.key not in self._futures:
            known = read_answer(probe.key)
            self._futures[probe.key] = future = Future[Answer]() if known else self._start(probe)
            if known:
                self.days[probe.key] = known[1]
                future.set_result(known[0])
        return self._futures[probe.key]

    def answer_all(self, probes: Sequence[Probe]) -> list[Answer]:
        """Return the answers of all probes. Raises LaunchError if one has failed."""
        return [future.result() for future in [self.ask(probe) for probe in probes]]

    def cancel(self) -> None:
        """End the probes that still run or wait for a core."""
        unfinished = {key: future for key, future in self._futures.items() if not future.done()}
        self._is_cancelled.set()
        self._is_cancelled = threading.Event()
        for key, future in unfinished.items():
            future.cancel()
            del self._futures[key]

    def _start(self, probe: Probe) -> Future[Answer]:
        if not self.has_started:
            self.has_started = True
            self._on_start()
        if self._processes is None:
            self._processes = TracingProcesses(Path(tempfile.mkdtemp(prefix="abrun-memory-")))
        self._num_started += 1
        directory = self._processes.folder / f"{self._num_started:03d}" / probe.arm
        return self._executor.submit(
            _find_answer, self._processes, probe, directory, self._is_cancelled.is_set
        )


def _find_answer(
    processes: TracingProcesses, probe: Probe, directory: Path, is_cancelled: IsCancelled
) -> Answer:
    if probe.kind == "measured":
        answer = _measure(probe, directory, is_cancelled)
    else:
        (answer,) = processes.do_job(directory, probe.config, probe.job, is_cancelled)
    if not answer.get("out_of_memory"):  # other processes may have held the memory
        store_answer(probe.key, answer)
    return answer


def _measure(probe: Probe, directory: Path, is_cancelled: IsCancelled) -> Answer:
    job = probe.job
    point = Point(length=job["length"], num_sequences=job["num_sequences"])
    cell, _ = measure_cell(directory, probe.arm, point, probe.config, job, is_cancelled)
    return {
        "phase": cell.out_of_memory or cell.highest_peak[0],
        "peak_bytes": cell.highest_peak[1],
        "reserved_bytes": cell.reserved_bytes,
        "out_of_memory": cell.out_of_memory,
    }
