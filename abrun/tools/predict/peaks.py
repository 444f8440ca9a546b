"""Predicted memory peaks of a training step, by phase and kind, from a recipe and the model's shapes.

Each arm is traced in a process of its own (abrun.tools.predict.trace), as the first of the ranks it asks for.
"""

import os
import re
import subprocess
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from abrun.errors import LaunchError, RecipeError
from abrun.experiment.probe import ProbeRefused
from abrun.launch.memory.profile import COMMAND, GIB, MASTER_DTYPE, Point, SweepPlan
from abrun.messages.numbers import listed, percent_text
from abrun.recipe.algorithms import Ppo
from abrun.recipe.command import CommandRunConfig
from abrun.recipe.experiment import ExperimentDeclaration
from abrun.recipe.policy import COLOCATED_MEMORY_SHARE, MAX_SMALL_CACHE_SHARE
from abrun.recipe.run import OwnRunConfig, largest_microbatch, share_of_device
from abrun.runs.files import write_json
from abrun.runs.lock import folder_lock
from abrun.runs.records import SCHEMA_VERSION
from abrun.tools.predict.facts import Answer
from abrun.tools.predict.probes import Probe, ProbePool, TracingProcesses, ask_longest, ask_predicted

# Memory of a sleeping vLLM engine on the trainer's device (docs/measured.md).
SLEEPING_ENGINE_BYTES = GIB // 4
# Kinds that stay allocated between steps (abrun.tools.predict.fake_device)
RESIDENT_KINDS = ("weights", "optimizer state", "reference weights")
# As reported by nvidia-smi
DEVICE_MEMORY_MIB = {
    "a100-40": 40_960,
    "a100-80": 81_920,
    "h100": 81_559,
    "h200": 143_771,
    "b200": 183_359,
    "l4": 23_034,
    "l40s": 46_068,
    "rtx4090": 24_564,
}
# Relative errors that calibration allows (docs/explanation/memory-prediction.md)
MAX_ERROR = 0.1
MAX_UNDERESTIMATE = 0.15  # for PPO's value update and mixture-of-experts models
NOT_INCLUDED = (
    "the CUDA context and NCCL buffers (outside torch's allocator), fragmentation, rollouts, model loading, "
    "ranks with more work than the first, and unbalanced expert routing"
)
CPU_RANKS_NOTE = "cluster.gpus_per_node is 0: the prediction is for a GPU in place of each CPU rank."
TRAINING_STATE = "weights, gradients and AdamW moments"  # have the dtype of --master-dtype

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakPrediction:
    """Predicted bytes of one arm at one point, at the peak of each phase, by kind."""

    arm: str
    point: Point
    by_phase: dict[str, dict[str, int]]
    engine_bytes: int | None = None  # rollout engine on the same device, while it samples
    decoding_bytes: int = 0  # of sampling from the policy's own modules
    max_underestimate: float = MAX_ERROR  # relative error below the real peak

    @property
    def highest_peak(self) -> tuple[str, int]:
        """Phase with the highest peak, and its bytes."""
        peaks = {phase: sum(kinds.values()) for phase, kinds in self.by_phase.items()}
        return max(peaks.items(), key=lambda phase_and_bytes: phase_and_bytes[1])

    @property
    def asleep_bytes(self) -> int:
        return 0 if self.engine_bytes is None else SLEEPING_ENGINE_BYTES

    @property
    def training_bytes(self) -> int:
        """Highest peak, with a sleeping engine."""
        return self.highest_peak[1] + self.asleep_bytes

    @property
    def sampling_bytes(self) -> int:
        """Bytes during rollouts: those of the engine, or of decoding, and what stays between steps."""
        resident = (sum(kinds.get(kind, 0) for kind in RESIDENT_KINDS) for kinds in self.by_phase.values())
        return max(resident, default=0) + (self.engine_bytes or self.decoding_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPrediction:
    """Predicted peaks of a sweep."""

    name: str
    peaks: list[PeakPrediction]  # ordered by point, the baseline first
    device_bytes: int | None  # None: unknown
    not_predicted: Mapping[str, str] = field(default_factory=dict[str, str])  # arm -> reason
    note: str = ""  # limitation of the prediction
    master_dtype: str = MASTER_DTYPE  # weights, gradients and AdamW moments

    def fits(self, prediction: PeakPrediction) -> str:
        """Return `yes`, `barely` (within the prediction error) or `no`; empty if the device is unknown."""
        if self.device_bytes is None:
            return ""
        memory_share = prediction.highest_peak[1] / self.device_bytes
        return "no" if memory_share > 1 else "barely" if memory_share > 1 - MAX_ERROR else "yes"

    def notes(self) -> list[str]:
        """Return the assumptions and limitations of the prediction."""
        assumption = f"Assumes {TRAINING_STATE} in {self.master_dtype}."
        if self.master_dtype != MASTER_DTYPE:
            assumption += f" abrun's own trainer keeps them in {MASTER_DTYPE}."
        error, shortfall = percent_text(MAX_ERROR), percent_text(MAX_UNDERESTIMATE)
        accuracy = f"Accuracy: within {error} of measured peaks; PPO's value update and expert models"
        limits = f"{accuracy} up to {shortfall} too low. Not included: {NOT_INCLUDED}."
        return [assumption, limits, *filter(None, [self.note])]

    def as_json(self) -> dict[str, Any]:
        cells = [
            {
                "arm": prediction.arm,
                **prediction.point.as_json(),
                "highest_phase": prediction.highest_peak[0],
                "highest_bytes": prediction.highest_peak[1],
                "by_phase": prediction.by_phase,
                "engine_bytes": prediction.engine_bytes,
                "fits": self.fits(prediction),
            }
            for prediction in self.peaks
        ]
        return {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "counter": "predicted peak_allocated_bytes",
            "device_bytes": self.device_bytes,
            "master_dtype": self.master_dtype,
            "not_in_it": NOT_INCLUDED,
            "cells": cells,
            "not_predicted": self.not_predicted,
        }


def predict_recipe(plan: SweepPlan, output: Path, *, device_bytes: int | None = None) -> SweepPrediction:
    """Predict the cells of `plan` and write prediction.json into `output`.

    Arms that cannot be predicted are skipped. Raises LaunchError if no arm can be predicted.
    """
    batches = plan.batches(on_this_machine=False)
    cells = [(batch, arm, config) for batch in batches for arm, config in batch[2].items()]
    trace_options = {"lengths": list(plan.lengths), "master_dtype": plan.master_dtype}
    jobs = [
        (output / "cells" / f"{job_index:03d}-{arm}", config, {**trace_options, "num_sequences": batch[1]})
        for job_index, (batch, arm, config) in enumerate(cells)
    ]
    errors: dict[int, LaunchError] = {}
    with folder_lock(output, COMMAND):
        traces = _run_traces(output / "cells", jobs, errors)
    reasons: dict[str, str] = {}
    for job_index, error in sorted(errors.items()):
        reasons.setdefault(cells[job_index][1], str(error))
    if len(errors) == len(jobs):
        arms_by_reason: dict[str, list[str]] = {}
        for arm, reason in reasons.items():
            arms_by_reason.setdefault(reason, []).append(f"arms.{arm}")
        raise LaunchError(
            "; ".join(f"{', '.join(arms)}: {reason}" for reason, arms in arms_by_reason.items())
        )
    peaks = [
        make_prediction(arm, config, row, device_bytes, swept=batch[0].swept)
        for batch in batches
        for length_index in range(len(plan.lengths))
        for (cell_batch, arm, config), rows in zip(cells, traces, strict=True)
        if cell_batch is batch
        for row in rows[length_index : length_index + 1]
    ]
    has_cpu_arm = any(not config.cluster.gpus_per_node for *_, config in cells)
    prediction = SweepPrediction(
        name=plan.name,
        peaks=peaks,
        device_bytes=device_bytes,
        not_predicted=reasons,
        note=" ".join(filter(None, [plan.note(), CPU_RANKS_NOTE if has_cpu_arm else ""])),
        master_dtype=plan.master_dtype,
    )
    write_json(output / "prediction.json", prediction.as_json())
    return prediction


def predict_steps(configs: Mapping[str, OwnRunConfig], device_bytes: int) -> list[PeakPrediction]:
    """Predict a step of each arm's run, with the largest micro-batch to expect.

    Takes up to a minute, unless the same was predicted before. Raises LaunchError if an arm cannot be
    predicted.
    """
    for config in configs.values():
        check_predictable(config)
    with ProbePool() as pool:
        lengths = pool.answer_all([ask_longest(arm, config) for arm, config in configs.items()])
        probes = [
            ask_step(arm, config, longest)
            for (arm, config), longest in zip(configs.items(), lengths, strict=True)
        ]
        return [
            make_prediction(probe.arm, probe.config, row, device_bytes)
            for probe, row in zip(probes, pool.answer_all(probes), strict=True)
        ]


def ask_step(arm: str, config: OwnRunConfig, longest: Answer) -> Probe:
    """Return the probe for a run's predicted peaks; `longest` answers `ask_longest`."""
    num_sequences, length = largest_microbatch(config, longest["longest"], longest["max_positions"])
    return ask_predicted(arm, config, length, num_sequences)


def _run_traces(
    folder: Path,
    jobs: Sequence[tuple[Path, OwnRunConfig, Mapping[str, Any]]],
    errors: dict[int, LaunchError],
) -> list[list[Row]]:
    """Run the jobs in parallel, with about two cores each, and return the rows of each job.

    `errors` collects errors by job index.
    """
    is_cancelled = threading.Event()

    def run_job(job_index: int) -> list[Row]:
        directory, config, job = jobs[job_index]
        try:
            check_predictable(config, job["master_dtype"])
            return processes.do_job(directory, config, job, is_cancelled.is_set)
        except LaunchError as error:
            errors[job_index] = error
            return []

    num_threads = max((os.cpu_count() or 1) // 2, 1) + 1
    with TracingProcesses(folder) as processes, ThreadPoolExecutor(max_workers=num_threads) as pool:
        try:
            return list(pool.map(run_job, range(len(jobs))))
        except BaseException:
            is_cancelled.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def check_predictable(config: OwnRunConfig, master_dtype: str = MASTER_DTYPE) -> None:
    """Raise LaunchError if an arm cannot be predicted."""
    if config.policy.backend.type != "dtensor":
        raise LaunchError(
            f"policy.backend.type: got {config.policy.backend.type!r}, whose memory cannot be predicted; use "
            "type: dtensor, or measure it on GPUs without --predict"
        )
    if master_dtype not in (MASTER_DTYPE, config.policy.dtype):
        raise LaunchError(
            f"--master-dtype: got {master_dtype} with policy.dtype {config.policy.dtype}; add --set "
            f"policy.dtype={master_dtype}"
        )


def describe_predicted_memory(
    recipe: ExperimentDeclaration, device_bytes: int, *, excluded_arms: Collection[str] = ()
) -> list[str]:
    """Return a line for each arm but `excluded_arms`, with the predicted peak and the device memory.

    Arms without a prediction have a line too, since a missing line would look as if they fitted.
    """
    configs: dict[str, OwnRunConfig] = {}
    lines = []
    for arm in (arm for arm in recipe.arms if arm not in excluded_arms):
        config = recipe.run_config(arm)
        reason = _explain_no_prediction(config)
        if isinstance(config, OwnRunConfig) and reason is None:
            configs[arm] = config
        else:
            lines.append(f"arms.{arm}: no memory prediction: {reason}")
    try:
        predictions = predict_steps(configs, device_bytes) if configs else []
    except ProbeRefused as error:
        # Such as a hub model without a network; a dry run still shows its plan
        return [*lines, f"no memory prediction on this machine: {error}"]
    runs_per_gpu = next((config.cluster.runs_per_gpu for config in configs.values()), 1)
    share_bytes = share_of_device(device_bytes, runs_per_gpu)
    share_text = f", of which a run may use {share_bytes / GIB:.1f} GiB" * (runs_per_gpu > 1)
    for prediction in predictions:
        phase, peak = prediction.highest_peak
        size = f"{prediction.point.num_sequences} x {prediction.point.length:,} tokens"
        verdict_text = "; does not fit" * (peak > share_bytes)
        lines.append(
            f"arms.{prediction.arm}: predicted peak {peak / GIB:.1f} GiB in {phase}, with micro-batches of "
            f"{size}; device memory {device_bytes / GIB:.1f} GiB{share_text}{verdict_text}"
        )
    return lines


def _explain_no_prediction(config: OwnRunConfig | CommandRunConfig) -> str | None:
    """Return the reason why an arm's peak cannot be predicted, or None."""
    if not isinstance(config, OwnRunConfig):
        return "trainer.type is command"
    if config.policy.backend.type != "dtensor":
        return f"policy.backend.type is {config.policy.backend.type}"
    if not config.cluster.gpus_per_node:
        return "it trains on CPU cores (cluster.gpus_per_node: 0)"
    return None


def resolve_device_memory(size: str | None) -> int | None:
    """Return the bytes of device memory for a size such as `141GiB` or a GPU name.

    None stands for this machine's smallest GPU, and is returned if there is none. Raises RecipeError for an
    invalid size.
    """
    if size is None:
        return _query_smallest_gpu()
    card_mib = DEVICE_MEMORY_MIB.get(size.lower())
    if card_mib is not None:
        return card_mib * 2**20
    parsed = re.fullmatch(r"([0-9]{1,5}(\.[0-9]{1,3})?)\s*(GiB|GB)?", size)
    if parsed is None or not float(parsed[1]):
        raise RecipeError(
            f"--device-memory: got {size!r}; allowed: a size such as 80GiB, or one of "
            f"{listed([*DEVICE_MEMORY_MIB])}"
        )
    return int(float(parsed[1]) * (10**9 if parsed[3] == "GB" else GIB))


def _query_smallest_gpu() -> int | None:
    sizes = [int(size) for size in query_gpus("memory.total") if size.isdigit()]
    return min(sizes) * 2**20 if sizes else None


def query_gpus(fields: str) -> list[str]:
    """Return nvidia-smi's line for each GPU of this machine; empty without one."""
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in output.splitlines() if line.strip()]


def make_prediction(
    arm: str,
    config: OwnRunConfig,
    row: Answer,
    device_bytes: int | None,
    *,
    swept: tuple[tuple[str, Any], ...] = (),
) -> PeakPrediction:
    """Return the prediction in a row of `abrun.tools.predict.trace`."""
    memory_share, engine_bytes, vllm = config.rollout.gpu_memory_utilization, None, row["vllm"]
    if config.samples_completions and vllm and device_bytes:
        if memory_share or vllm["cache"] is None or vllm["cache"] > MAX_SMALL_CACHE_SHARE * device_bytes:
            engine_bytes = int((memory_share or COLOCATED_MEMORY_SHARE) * device_bytes)
        else:
            engine_bytes = vllm["weights"] + vllm["cache"]
    return PeakPrediction(
        arm=arm,
        point=Point(length=row["length"], num_sequences=row["num_sequences"], swept=swept),
        by_phase=row["by_phase"],
        engine_bytes=engine_bytes,
        decoding_bytes=row.get("decoding", 0),
        max_underestimate=MAX_UNDERESTIMATE
        if row["experts"] or isinstance(config.algorithm, Ppo)
        else MAX_ERROR,
    )
