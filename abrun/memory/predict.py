"""memory-profile --predict: a step's peaks by phase and kind, from a recipe and a model's shapes alone.

Each arm is traced by a process of its own (abrun.memory.trace), as the first rank of as many as it asks for.
"""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from abrun.errors import LaunchError, RecipeError
from abrun.experiment.probe import ProbeRefused, run_probe_on_cpu
from abrun.memory.cells import GIB, Point
from abrun.memory.sweep import COMMAND, MASTER_DTYPE, Plan
from abrun.messages.numbers import percent_text
from abrun.processes import find_run_processes, kill_all
from abrun.reasons import Code
from abrun.recipe.algorithms import Ppo
from abrun.recipe.command import CommandRunConfig
from abrun.recipe.experiment import ExperimentDeclaration
from abrun.recipe.policy import COLOCATED_MEMORY_SHARE, MAX_SMALL_CACHE_SHARE
from abrun.recipe.run import OwnRunConfig
from abrun.runs.files import write_json
from abrun.runs.lock import folder_lock
from abrun.runs.rundir import SCHEMA_VERSION

MODULE = "abrun.memory.trace"
# Memory of cards in MiB, as nvidia-smi gives it.
CARDS = {
    "a100-40": 40_960,
    "a100-80": 81_920,
    "h100": 81_559,
    "h200": 143_771,
    "b200": 183_359,
    "l4": 23_034,
    "l40s": 46_068,
    "rtx4090": 24_564,
}
ERROR = 0.1  # of the predicted peak: what calibration allows (docs/memory-prediction.md)
ERROR_BELOW = 0.15  # of PPO's value update and of experts, whose peaks are predicted too low
NOT_IN_IT = (
    "the CUDA context and NCCL's buffers (outside of torch's allocator), fragmentation, rollouts, loading, "
    "ranks that have more to do than the first, and experts that are chosen more often than others"
)
ON_CORES = "cluster.gpus_per_node: 0: what GPUs would take in the place of the cores."
STATES = "weights, gradients and AdamW's moments"  # what --master-dtype is the dtype of

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """One arm at one point: bytes at each phase's peak, by kind."""

    arm: str
    point: Point
    by_phase: dict[str, dict[str, int]]
    engine_bytes: int | None = None  # of a rollout engine on the same device, while it samples
    error_below: float = ERROR  # by how much it may be too low

    @property
    def highest(self) -> tuple[str, int]:
        """The phase with the highest peak, and the peak."""
        peaks = {phase: sum(kinds.values()) for phase, kinds in self.by_phase.items()}
        return max(peaks.items(), key=lambda peak: peak[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predicted sweep."""

    name: str
    peaks: list[Predicted]  # point by point, the baseline's first
    device_bytes: int | None  # None: not known
    not_predicted: Mapping[str, str] = field(default_factory=dict[str, str])  # the reason by arm
    note: str = ""  # a limit of the figures
    master_dtype: str = MASTER_DTYPE  # of weights, gradients and moments

    def fits(self, peaks: Predicted) -> str:
        """Return if a device has room for it, given the error of a prediction; empty: not known."""
        if self.device_bytes is None:
            return ""
        share = peaks.highest[1] / self.device_bytes
        return "no" if share > 1 else "barely" if share > 1 - ERROR else "yes"

    def notes(self) -> list[str]:
        """Return the assumptions and limits of the figures."""
        assumed = f"Assumed: {STATES} in {self.master_dtype}."
        if self.master_dtype != MASTER_DTYPE:
            assumed += f" abrun itself trains with {STATES} in {MASTER_DTYPE}."
        error = f"Within {percent_text(ERROR)} of measured peaks, of PPO's value update and of experts up to"
        limits = f"{error} {percent_text(ERROR_BELOW)} too low. Not in it: {NOT_IN_IT}."
        return [assumed, limits, *filter(None, [self.note])]

    def as_json(self) -> dict[str, Any]:
        """Return the content of prediction.json."""
        cells = [
            {
                "arm": peaks.arm,
                **peaks.point.as_json(),
                "highest_phase": peaks.highest[0],
                "highest_bytes": peaks.highest[1],
                "by_phase": peaks.by_phase,
                "engine_bytes": peaks.engine_bytes,
                "fits": self.fits(peaks),
            }
            for peaks in self.peaks
        ]
        return {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "counter": "predicted peak_allocated_bytes",
            "device_bytes": self.device_bytes,
            "master_dtype": self.master_dtype,
            "not_in_it": NOT_IN_IT,
            "cells": cells,
            "not_predicted": self.not_predicted,
        }


def predict_recipe(plan: Plan, output: Path, *, device_bytes: int | None = None) -> Prediction:
    """Predict the cells of `plan`, and write prediction.json into `output`.

    If an arm cannot be predicted, the others are. Raises LaunchError if no arm can be.
    """
    batches = plan.batches(here=False)
    cells = [(batch, arm, config) for batch in batches for arm, config in batch[2].items()]
    states = {"lengths": list(plan.lengths), "master_dtype": plan.master_dtype}
    jobs = [
        (output / "cells" / f"{number:03d}-{arm}", config, {**states, "num_sequences": batch[1]})
        for number, (batch, arm, config) in enumerate(cells)
    ]
    refused: dict[int, LaunchError] = {}
    with folder_lock(output, COMMAND):
        traces = _trace(jobs, refused)
    reasons: dict[str, str] = {}
    for number, error in sorted(refused.items()):
        reasons.setdefault(cells[number][1], str(error))
    if len(refused) == len(jobs):
        arms_of: dict[str, list[str]] = {}
        for arm, reason in reasons.items():
            arms_of.setdefault(reason, []).append(f"arms.{arm}")
        raise LaunchError("; ".join(f"{', '.join(arms)}: {reason}" for reason, arms in arms_of.items()))
    peaks = [
        _predicted(arm, config, row, device_bytes, swept=batch[0].swept)
        for batch in batches
        for place in range(len(plan.lengths))
        for (of_batch, arm, config), rows in zip(cells, traces, strict=True)
        if of_batch is batch
        for row in rows[place : place + 1]
    ]
    on_cores = any(not config.cluster.gpus_per_node for *_, config in cells)
    prediction = Prediction(
        name=plan.name,
        peaks=peaks,
        device_bytes=device_bytes,
        not_predicted=reasons,
        note=" ".join(filter(None, [plan.note(), ON_CORES if on_cores else ""])),
        master_dtype=plan.master_dtype,
    )
    write_json(output / "prediction.json", prediction.as_json())
    return prediction


def predict_steps(configs: Mapping[str, OwnRunConfig], device_bytes: int) -> list[Predicted]:
    """Predict the step of each arm as its run has it, in up to a minute or two. Raises LaunchError.

    Its microbatches are as large as tasks or budgets make them (abrun.memory.trace).
    """
    rows = _trace_runs(configs, {})
    return [_predicted(arm, configs[arm], row, device_bytes) for arm, row in rows.items()]


def longest_sequences(configs: Mapping[str, OwnRunConfig]) -> dict[str, int]:
    """Return the tokens of each arm's longest sequence, as far as its task tells. Raises LaunchError."""
    return {arm: row["longest"] for arm, row in _trace_runs(configs, {"longest": True}).items()}


def _trace_runs(configs: Mapping[str, OwnRunConfig], job: Mapping[str, Any]) -> dict[str, Row]:
    """Return the row that abrun.memory.trace writes of each arm."""
    with scratch() as folder:
        traces = _trace([(folder / arm, config, job) for arm, config in configs.items()])
        return {arm: row for arm, (row,) in zip(configs, traces, strict=True)}


def _trace(
    jobs: Sequence[tuple[Path, OwnRunConfig, Mapping[str, Any]]],
    refused: dict[int, LaunchError] | None = None,
) -> list[list[Row]]:
    """Return the rows of each job, as many at once as this machine has room for: one or two cores each.

    `refused` takes the errors by job; without it, an error ends the other jobs, as an interrupt does.
    """

    def run(number: int) -> list[Row]:
        directory, config, job = jobs[number]
        try:
            _refuse(config, job.get("master_dtype", MASTER_DTYPE))
            return run_probe_on_cpu(MODULE, directory, config, job)
        except LaunchError as error:
            if refused is None:
                raise
            refused[number] = error
            return []

    with ThreadPoolExecutor(max_workers=max((os.cpu_count() or 1) // 2, 1) + 1) as pool:
        try:
            return list(pool.map(run, range(len(jobs))))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for directory, *_ in jobs:
                kill_all(partial(find_run_processes, directory))
            raise


def _refuse(config: OwnRunConfig, master_dtype: str) -> None:
    """Raise LaunchError for an arm that cannot be predicted."""
    if config.policy.backend.type != "dtensor":
        raise LaunchError(Code.BACKEND_NOT_PREDICTED(backend=config.policy.backend.type))
    if master_dtype not in (MASTER_DTYPE, config.policy.dtype):
        raise LaunchError(Code.MASTER_DTYPE_DIFFERS(master_dtype=master_dtype, dtype=config.policy.dtype))


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Make a folder that is removed, unless a probe fails in it: its error names the log."""
    directory, has_log = Path(tempfile.mkdtemp(prefix="abrun-memory-")), False
    try:
        yield directory
    except LaunchError as error:
        has_log = error.code is Code.PROBE_FAILED
        raise
    finally:
        if not has_log:
            shutil.rmtree(directory, ignore_errors=True)


def memory_lines(
    recipe: ExperimentDeclaration, device_bytes: int, *, besides: Collection[str] = ()
) -> list[str]:
    """Return a line for each arm, except `besides`: the predicted peak of its step beside a device's memory.

    An arm that is not predicted has a line, too: silence would read as if it fitted.
    """
    configs: dict[str, OwnRunConfig] = {}
    lines = []
    for arm in (arm for arm in recipe.arms if arm not in besides):
        config = recipe.run_config(arm)
        reason = _not_predicted(config)
        if isinstance(config, OwnRunConfig) and reason is None:
            configs[arm] = config
        else:
            lines.append(f"arms.{arm}: its peak is not predicted: {reason}")
    try:
        predicted = predict_steps(configs, device_bytes) if configs else []
    except ProbeRefused as why:  # such as a hub's model without a network: a plan is a plan without it
        return [*lines, f"no peak is predicted, as what decides it is not known on this machine: {why}"]
    for peaks in predicted:
        phase, peak = peaks.highest
        size = f"{peaks.point.num_sequences} x {peaks.point.length:,} tokens"
        too_much = ": too much" * (peak > device_bytes)
        lines.append(
            f"arms.{peaks.arm}: a step with microbatches of {size} is predicted to peak at "
            f"{peak / GIB:.1f} GiB in {phase}, and a device has {device_bytes / GIB:.1f} GiB{too_much}"
        )
    return lines


def _not_predicted(config: OwnRunConfig | CommandRunConfig) -> str | None:
    """Return the reason why an arm's peak is not predicted; None: it is."""
    if not isinstance(config, OwnRunConfig):
        return "another trainer's"
    if config.policy.backend.type != "dtensor":
        return f"policy.backend.type is {config.policy.backend.type}"
    if not config.cluster.gpus_per_node:
        return "it trains on CPU cores (cluster.gpus_per_node: 0)"
    return None


def device_memory(size: str | None) -> int | None:
    """Return a device's bytes from `141GiB` or a card's name; of None, this machine's smallest, if known."""
    if size is None:
        return _smallest_here()
    card = CARDS.get(size.lower())
    if card is not None:
        return card * 2**20
    parsed = re.fullmatch(r"([0-9]{1,5}(\.[0-9]{1,3})?)\s*(GiB|GB)?", size)
    if parsed is None or not float(parsed[1]):
        raise RecipeError(Code.DEVICE_MEMORY_SYNTAX(got=size, cards=[*CARDS]))
    return int(float(parsed[1]) * (10**9 if parsed[3] == "GB" else GIB))


def _smallest_here() -> int | None:
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    sizes = [int(line) for line in listed.splitlines() if line.strip().isdigit()]
    return min(sizes) * 2**20 if sizes else None


def _predicted(
    arm: str,
    config: OwnRunConfig,
    row: Row,
    device_bytes: int | None,
    *,
    swept: tuple[tuple[str, Any], ...] = (),
) -> Predicted:
    share, engine_bytes, vllm = config.rollout.gpu_memory_utilization, None, row["vllm"]
    if config.samples_completions and vllm and device_bytes:
        if share or vllm["cache"] is None or vllm["cache"] > MAX_SMALL_CACHE_SHARE * device_bytes:
            engine_bytes = int((share or COLOCATED_MEMORY_SHARE) * device_bytes)
        else:
            engine_bytes = vllm["weights"] + vllm["cache"]
    return Predicted(
        arm=arm,
        point=Point(length=row["length"], num_sequences=row["num_sequences"], swept=swept),
        by_phase=row["by_phase"],
        engine_bytes=engine_bytes,
        error_below=ERROR_BELOW if row["experts"] or isinstance(config.algorithm, Ppo) else ERROR,
    )
