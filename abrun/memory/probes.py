"""Probes about memory, side by side: the longest sequence, predicted peaks, a measured step.

Each probe is a process. Those of a kind are forked from a server that has done their imports. Answers are
kept for later launches (abrun.memory.facts).
"""

import contextlib
import queue
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from abrun.errors import LaunchError
from abrun.experiment.command import modules_to_preload
from abrun.experiment.preflight.machine import usable_cores
from abrun.experiment.probe import (
    UNCONTROLLED,
    ProbeControl,
    ProbeServer,
    read_rows,
    require_devices,
    run_probe,
    run_probe_on_cpu,
)
from abrun.memory.cells import Cell, Point, merge_rank_rows
from abrun.memory.facts import Answer, make_key, read_answer, store_answer, without_section
from abrun.reasons import Code
from abrun.recipe.run import OwnRunConfig

TRACE, MEASURE, FORKED_RUN = "abrun.memory.trace", "abrun.memory.measure", "abrun.train.forked"
# Imported before the fork that measures, in addition to those of a run
MEASURE_IMPORTS = ("abrun.memory.measure", "abrun.models.parts")
NUM_TRACE_WORDS = 4  # python -P -m MODULE
LONGEST_OF_RUN = {"longest": True}  # job of abrun.memory.trace

Kind = Literal["longest", "predicted", "measured"]


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


@dataclass(slots=True)
class _Running:
    """Probe that a thread waits for."""

    probe: Probe
    is_cancelled: threading.Event = field(default_factory=threading.Event)


class ProbePool:
    """Runs probes side by side: one for each core, of which one measures. On exit it ends all of them.

    `on_start` is called before the first process starts; with only known answers none does.
    """

    def __init__(self, on_start: Callable[[], object] = lambda: None) -> None:
        self._on_start, self.has_started = on_start, False
        self._answers: dict[str, Answer] = {}
        self._looked_up: set[str] = set()
        self._errors: dict[str, LaunchError] = {}
        self._running: dict[str, _Running] = {}
        self._ended: queue.SimpleQueue[tuple[str, Answer | BaseException]] = queue.SimpleQueue()
        self._servers: dict[bool, ProbeServer | None] = {}  # by whether it serves measurements
        self._folder: Path | None = None
        self._num_started = 0
        self.days: dict[str, str] = {}  # of the answers that were known, by key

    def __enter__(self) -> "ProbePool":
        return self

    def __exit__(self, _: object, error: object, __: object) -> None:
        self.request([])
        while self._running:
            self.wait()
        for server in filter(None, self._servers.values()):
            server.close()
        # A failed probe's error names a log in the folder.
        keeps_log = isinstance(error, LaunchError) and any(
            reason.code is Code.PROBE_FAILED for reason in error.reason.walk()
        )
        if self._folder and not keeps_log:
            shutil.rmtree(self._folder, ignore_errors=True)

    def answer(self, probe: Probe) -> Answer | None:
        """Return a probe's answer, or None if it is not known yet. Raises LaunchError if it has failed."""
        if (error := self._errors.get(probe.key)) is not None:
            raise error
        return self._answers.get(probe.key) if self._is_answered(probe.key) else None

    def request(self, probes: Sequence[Probe]) -> None:
        """Start the probes without an answer, in this order, as far as cores are free; end all others."""
        requested = {probe.key for probe in probes}
        for key, running in self._running.items():
            if key not in requested:
                running.is_cancelled.set()
        for probe in probes:
            if len(self._running) >= max(usable_cores(), 1):
                return
            is_known = probe.key in self._running or probe.key in self._errors or self._is_answered(probe.key)
            must_wait = probe.kind == "measured" and any(
                running.probe.kind == "measured" for running in self._running.values()
            )
            if not is_known and not must_wait:
                self._start(probe)

    def wait(self) -> None:
        """Wait until a running probe ends, with an answer or without."""
        key, result = self._next_ended()
        running = self._running.pop(key)
        if running.is_cancelled.is_set():
            return
        if isinstance(result, LaunchError):
            self._errors[key] = result
        elif isinstance(result, BaseException):
            raise result
        else:
            self._answers[key] = result
            if not result.get("out_of_memory"):  # other processes may have held the memory
                store_answer(key, result)

    def answer_all(self, probes: Sequence[Probe]) -> list[Answer]:
        """Return the answers of all probes. Raises LaunchError if one has failed."""
        while True:
            answers = [answer for probe in probes if (answer := self.answer(probe)) is not None]
            if len(answers) == len(probes):
                return answers
            self.request(probes)
            self.wait()

    def _is_answered(self, key: str) -> bool:
        """Look for an answer of this pool, and once for one of an earlier launch."""
        if key not in self._looked_up:
            self._looked_up.add(key)
            if known := read_answer(key):
                self._answers[key], self.days[key] = known
        return key in self._answers

    def _start(self, probe: Probe) -> None:
        if not self.has_started:
            self.has_started = True
            self._on_start()
        running = self._running[probe.key] = _Running(probe)
        self._launch(running)

    def _launch(self, running: _Running) -> None:
        self._folder = self._folder or Path(tempfile.mkdtemp(prefix="abrun-memory-"))
        self._num_started += 1
        probe = running.probe
        directory = self._folder / f"{self._num_started:03d}" / probe.arm
        control = ProbeControl(server=self._find_server(probe), is_cancelled=running.is_cancelled.is_set)
        threading.Thread(target=self._run, args=(probe, directory, control), daemon=True).start()

    def _next_ended(self) -> tuple[str, Answer | BaseException]:
        return self._ended.get()

    def _run(self, probe: Probe, directory: Path, control: ProbeControl) -> None:
        try:
            run = _measure if probe.kind == "measured" else _trace
            self._ended.put((probe.key, run(probe, directory, control)))
        except BaseException as error:
            self._ended.put((probe.key, error))

    def prepare_measuring(self, config: OwnRunConfig) -> None:
        """Start the imports of a measurement, which may follow."""
        self._find_server(Probe(kind="measured", key="", arm="", config=config, job={}))

    def _find_server(self, probe: Probe) -> ProbeServer | None:
        measures = probe.kind == "measured"
        if measures not in self._servers:
            self._servers[measures] = None
            if sys.platform != "linux":
                return None
            with contextlib.suppress(OSError, LaunchError):
                make = partial(_serve_measurements if measures else _serve_traces, probe.config)
                self._servers[measures] = make()
        return self._servers[measures]


def _trace(probe: Probe, directory: Path, control: ProbeControl) -> Answer:
    (row,) = run_probe_on_cpu(TRACE, directory, probe.config, probe.job, control)
    return row


def _measure(probe: Probe, directory: Path, control: ProbeControl) -> Answer:
    job = probe.job
    point = Point(length=job["length"], num_sequences=job["num_sequences"])
    cell, _ = measure_cell(directory, probe.arm, point, probe.config, job, control)
    return {
        "phase": cell.out_of_memory or cell.highest_peak[0],
        "peak_bytes": cell.highest_peak[1],
        "reserved_bytes": cell.reserved_bytes,
        "out_of_memory": cell.out_of_memory,
    }


def measure_cell(
    directory: Path,
    arm: str,
    point: Point,
    config: OwnRunConfig,
    job: Mapping[str, Any],
    control: ProbeControl = UNCONTROLLED,
) -> tuple[Cell, str]:
    """Measure a cell and return it with the counter of its peaks. Out of memory is a valid result.

    Raises LaunchError if the cell cannot be measured.
    """
    try:
        rows = run_probe(MEASURE, directory, config, job, control)
    except LaunchError:
        rows = read_rows(directory)
        if not any(row["out_of_memory"] for row in rows):
            raise
    return merge_rank_rows(arm, point, rows)


def _serve_traces(config: OwnRunConfig) -> ProbeServer:
    return ProbeServer(TRACE, ["serve"], config, num_skipped=NUM_TRACE_WORDS)


def _serve_measurements(config: OwnRunConfig) -> ProbeServer:
    num_gpus = config.devices_per_node if config.cluster.gpus_per_node else 0
    gpus = require_devices(config).gpus[:num_gpus]
    modules = [*modules_to_preload(config), *MEASURE_IMPORTS]
    return ProbeServer(FORKED_RUN, modules, config, gpus, num_skipped=NUM_TRACE_WORDS - 1)
