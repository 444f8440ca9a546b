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

from rich.text import Text

from abrun.errors import LaunchError, RecipeError
from abrun.experiment.probe import ProbeRefused, probe_alone
from abrun.memory.cells import Point
from abrun.memory.floor import floor_of
from abrun.memory.step import own_sequences
from abrun.memory.sweep import COMMAND, MASTER_DTYPE, Head, Plan, Variant
from abrun.present.tables import Cell, Table, columns
from abrun.processes import end_all, processes_of
from abrun.reasons import Code, Reason
from abrun.recipe.algorithms import Ppo
from abrun.recipe.command import CommandRunConfig
from abrun.recipe.experiment import Declared
from abrun.recipe.policy import BESIDE_THE_TRAINER, MOST_OF_A_CACHE
from abrun.recipe.run import OwnRunConfig
from abrun.runs.files import write_json
from abrun.runs.lock import folder_lock
from abrun.runs.rundir import SCHEMA_VERSION

GIB = 2**30
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
HEAD_ALONE = (
    "The head alone: log-probs without entropies, forward and backward, with hidden states, weight and their "
    "gradients in bfloat16."
)
NOT_OURS = f"abrun itself trains with {STATES} in {MASTER_DTYPE}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """One arm at one point: bytes at each phase's peak, by kind."""

    arm: str
    point: Point
    by_phase: dict[str, dict[str, int]]
    floor: dict[str, int] | None  # see abrun.memory.floor; None: the model's shapes are not known here
    engine_bytes: int | None  # what a rollout engine on the same device takes while it samples
    error_below: float = ERROR  # by how much it may be too low

    @property
    def highest(self) -> tuple[str, int]:
        """The phase with the highest peak, and the peak."""
        return max(
            ((phase, sum(kinds.values())) for phase, kinds in self.by_phase.items()), key=lambda p: p[1]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predicted sweep."""

    name: str
    peaks: list[Predicted]  # point by point, the baseline's first
    device_bytes: int | None  # of one device; None: not known
    not_predicted: Mapping[str, str] = field(default_factory=dict[str, str])  # arms that cannot be: why
    note: str = ""  # on what the figures are not
    master_dtype: str | None = MASTER_DTYPE  # of weights, gradients and moments; None: a head has none

    def fits(self, peaks: Predicted) -> str:
        """Whether a device has room for it, given the error of a prediction."""
        if self.device_bytes is None:
            return ""
        share = peaks.highest[1] / self.device_bytes
        return "no" if share > 1 else "barely" if share > 1 - ERROR else "yes"

    def table(self) -> Table:
        """For each length and arm its peak and floor, and for each phase its peak by kind."""
        kinds = list(dict.fromkeys(k for p in self.peaks for of in p.by_phase.values() for k in of))
        kinds = [kind for kind in kinds if self._largest(kind) > self._most / 100]
        unit, num_bytes = ("GiB", GIB) if self._most >= 4 * GIB else ("MiB", 2**20)
        room = "" if self.device_bytes is None else f" of {self.device_bytes / GIB:.1f} GiB a device"
        states = f"; states in {self.master_dtype}" if self.master_dtype else ""
        title = f"{self.name}: predicted peak_allocated_bytes, {unit}{room}{states}"
        numbers = ("peak", "floor", *(["fits"] if self.device_bytes else []))
        titles = columns("", *numbers, "made of", numeric=numbers, no_wrap=("", *numbers))
        rows: list[Sequence[Cell]] = []
        sections: list[int] = []
        blank = ["", ""] if self.device_bytes else [""]

        def shown(value: int | None) -> str:
            return "-" if value is None else f"{value / num_bytes:,.1f}"

        for peaks in self.peaks:
            floor = sum(peaks.floor.values()) if peaks.floor else None
            point = peaks.point
            swept = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in point.swept)
            size = f"{point.num_sequences} x {point.length:,} tokens, {peaks.arm}"
            fits = [self.fits(peaks)] if self.device_bytes else []
            sections.append(len(rows))
            first = (size, shown(peaks.highest[1]), shown(floor), *fits, swept)
            rows.append([Text(cell, style="bold") for cell in first])
            for phase, of_kind in peaks.by_phase.items():
                parts = ((kind, shown(of_kind.get(kind, 0))) for kind in kinds)
                made_of = ", ".join(f"{kind} {amount}" for kind, amount in parts if amount != "0.0")
                rows.append([f"  {phase}", shown(sum(of_kind.values())), *blank, made_of])
            if peaks.engine_bytes is not None:
                rows.append(["  vllm, while it samples", shown(peaks.engine_bytes)])
        return Table(titles, rows, title, sections)

    def notes(self) -> list[str]:
        """What the figures are, and what they are not."""
        assumed = f"Assumed: {STATES} in {self.master_dtype}."
        if self.master_dtype != MASTER_DTYPE:
            assumed += f" {NOT_OURS}."
        return [
            *([assumed] if self.master_dtype else []),
            f"Within {ERROR:.0%} of measured peaks, of PPO's value update and of experts up to "
            f"{ERROR_BELOW:.0%} too low. Not in it: {NOT_IN_IT}.",
            *filter(None, [self.note]),
        ]

    def content(self) -> dict[str, Any]:
        """What prediction.json says."""
        return {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "counter": "predicted peak_allocated_bytes",
            "device_bytes": self.device_bytes,
            "master_dtype": self.master_dtype,
            "not_in_it": NOT_IN_IT,
            "cells": [
                {
                    "arm": peaks.arm,
                    "length": peaks.point.length,
                    "num_sequences": peaks.point.num_sequences,
                    "swept": dict(peaks.point.swept),
                    "highest_phase": peaks.highest[0],
                    "highest_bytes": peaks.highest[1],
                    "by_phase": peaks.by_phase,
                    "floor": peaks.floor,
                    "engine_bytes": peaks.engine_bytes,
                    "fits": self.fits(peaks),
                }
                for peaks in self.peaks
            ],
            "not_predicted": self.not_predicted,
        }

    @property
    def _most(self) -> int:
        return max(peaks.highest[1] for peaks in self.peaks)

    def _largest(self, kind: str) -> int:
        return max(of.get(kind, 0) for peaks in self.peaks for of in peaks.by_phase.values())


def predict_recipe(plan: Plan, output: Path, *, device_bytes: int | None = None) -> Prediction:
    """Predict the cells of `plan`, and write prediction.json into `output`.

    An arm that cannot be predicted leaves the others theirs. Raises LaunchError where no arm can be.
    """
    jobs: list[tuple[Variant, int, str, OwnRunConfig]] = []
    for variant in plan.variants:
        configs = variant.configs(here=False)
        for num_sequences in plan.num_sequences(configs):
            jobs += [(variant, num_sequences, arm, config) for arm, config in configs.items()]

    directories = [output / "cells" / f"{number:03d}-{arm}" for number, (_, _, arm, _) in enumerate(jobs)]

    refused: dict[str, LaunchError] = {}

    def of_arm(number: int) -> list[Predicted]:
        variant, num_sequences, arm, config = jobs[number]
        try:
            return traced(number, variant, num_sequences, arm, config)
        except LaunchError as why:
            refused.setdefault(arm, why)
            return []

    def traced(
        number: int, variant: Variant, num_sequences: int, arm: str, config: OwnRunConfig
    ) -> list[Predicted]:
        job = _traced_job(plan, config, num_sequences)
        rows = probe_alone("abrun.memory.trace", directories[number], config, job)
        points = [
            Point(length=row["length"], num_sequences=num_sequences, swept=variant.swept) for row in rows
        ]
        return [
            _predicted(arm, config, point, row, device_bytes, plan.master_dtype)
            for point, row in zip(points, rows, strict=True)
        ]

    with folder_lock(output, COMMAND), _traces(directories) as several:
        found = [peaks for of in several.map(of_arm, range(len(jobs))) for peaks in of]
    in_order = dict.fromkeys(arm for _, _, arm, _ in jobs)
    not_predicted = {arm: str(refused[arm]) for arm in in_order if arm in refused}
    if not found:
        arms_of: dict[str, list[str]] = {}
        for arm, why in not_predicted.items():
            arms_of.setdefault(why, []).append(f"arms.{arm}")
        raise LaunchError("; ".join(f"{', '.join(arms)}: {why}" for why, arms in arms_of.items()))
    on_cores = any(not config.cluster.gpus_per_node for _, _, _, config in jobs)
    places = list(dict.fromkeys((peaks.point.swept, peaks.point.num_sequences) for peaks in found))
    found.sort(key=lambda one: (places.index((one.point.swept, one.point.num_sequences)), one.point.length))
    prediction = Prediction(
        name=plan.name,
        peaks=found,
        device_bytes=device_bytes,
        not_predicted=not_predicted,
        note=" ".join(filter(None, [plan.unseen(), ON_CORES if on_cores else ""])),
        master_dtype=plan.master_dtype,
    )
    write_json(output / "prediction.json", prediction.content())
    return prediction


def _traced_job(plan: Plan, config: OwnRunConfig, num_sequences: int) -> dict[str, Any]:
    """What abrun.memory.trace is told of an arm. Raises LaunchError if it cannot predict that."""
    if config.policy.backend.type != "dtensor":
        raise LaunchError(Code.BACKEND_NOT_PREDICTED(backend=config.policy.backend.type))
    if plan.master_dtype not in (MASTER_DTYPE, config.policy.dtype):
        raise LaunchError(
            Code.MASTER_DTYPE_DIFFERS(master_dtype=plan.master_dtype, dtype=config.policy.dtype)
        )
    sizes = {"lengths": list(plan.lengths), "num_sequences": num_sequences}
    return {**sizes, "master_dtype": plan.master_dtype}


def predict_head(head: Head, plan: Plan, output: Path, *, device_bytes: int | None = None) -> Prediction:
    """Predict the kernels of a log-prob head alone, and write prediction.json into `output`."""
    job = {
        "kernels": head.kernels(on_gpu=True),
        "hidden_size": head.hidden_size,
        "vocab_size": head.vocab_size,
        "lengths": list(plan.lengths),
    }
    with folder_lock(output, COMMAND):
        rows = probe_alone("abrun.memory.heads", output / "cells" / "predicted", head.config, job)
    peaks = [
        Predicted(
            arm=row["kernel"],
            point=Point(length=row["length"]),
            by_phase=row["by_phase"],
            floor=None,
            engine_bytes=None,
        )
        for row in rows
    ]
    prediction = Prediction(
        name=plan.name, peaks=peaks, device_bytes=device_bytes, note=HEAD_ALONE, master_dtype=None
    )
    write_json(output / "prediction.json", prediction.content())
    return prediction


def predict_steps(configs: Mapping[str, OwnRunConfig], device_bytes: int) -> list[Predicted]:
    """The step of each arm as its run has it, in up to a minute or two. Raises LaunchError.

    Its microbatches are as large as tasks or budgets make them (abrun.memory.trace).
    """
    found = []
    for arm, row in _trace_each(configs, {}).items():
        point = Point(length=row["length"], num_sequences=row["num_sequences"])
        found.append(_predicted(arm, configs[arm], point, row, device_bytes))
    return found


def longest_sequences(configs: Mapping[str, OwnRunConfig]) -> dict[str, int]:
    """Tokens of the longest sequence to expect of each arm, as far as its task tells. Raises LaunchError."""
    return {arm: row["longest"] for arm, row in _trace_each(configs, {"longest": True}).items()}


def _trace_each(configs: Mapping[str, OwnRunConfig], job: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the one row that abrun.memory.trace writes of each arm."""
    with scratch() as folder:

        def of_arm(arm: str) -> dict[str, Any]:
            (row,) = probe_alone("abrun.memory.trace", folder / arm, configs[arm], job)
            return row

        with _traces([folder / arm for arm in configs]) as several:
            return dict(zip(configs, several.map(of_arm, configs), strict=True))


@contextlib.contextmanager
def _traces(directories: Sequence[Path]) -> Iterator[ThreadPoolExecutor]:
    """Threads for as many traces as this machine has room for: one or two cores each.

    Where one fails, or somebody interrupts, the others are ended.
    """
    with ThreadPoolExecutor(max_workers=max((os.cpu_count() or 1) // 2, 1) + 1) as several:
        try:
            yield several
        except BaseException:
            several.shutdown(wait=False, cancel_futures=True)
            for directory in directories:
                end_all(partial(processes_of, directory))
            raise


def _names(directory: Path, value: object) -> bool:
    """Return whether a reason, or a value of one, names a folder."""
    if isinstance(value, Reason):
        return any(_names(directory, each) for each in value.values.values())
    return isinstance(value, str) and str(directory) in value


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder that goes away, unless an error names it."""
    directory = Path(tempfile.mkdtemp(prefix="abrun-memory-"))
    try:
        yield directory
    except BaseException as error:
        if not _names(directory, getattr(error, "reason", None)):
            shutil.rmtree(directory, ignore_errors=True)
        raise
    shutil.rmtree(directory, ignore_errors=True)


def fit_of(recipe: Declared, device_bytes: int, *, traced: bool, besides: Collection[str] = ()) -> list[str]:
    """A line for each arm, but `besides`, whose step does not fit a device by its floor, which takes no time;
    `traced`: for each its predicted peak, in up to a minute an arm, or why it has none, as silence would
    read as if it fitted."""
    configs: dict[str, OwnRunConfig] = {}
    lines = []
    for arm in (arm for arm in recipe.arms if arm not in besides):
        config = recipe.run_config(arm)
        why = _not_predicted(config)
        if isinstance(config, OwnRunConfig) and why is None:
            configs[arm] = config
        elif traced:
            lines.append(f"arms.{arm}: its peak is not predicted: {why}")

    def line(arm: str, num_sequences: int, length: int, what: str, peak: int) -> str:
        size, has = f"{num_sequences} x {length:,} tokens", f"{device_bytes / GIB:.1f} GiB"
        too_much = ": too much" * (peak > device_bytes)
        return f"arms.{arm}: a step with microbatches of {size} {what}, and a device has {has}{too_much}"

    if traced:
        try:
            found = predict_steps(configs, device_bytes) if configs else []
        except ProbeRefused as why:  # such as a hub's model without a network: a plan is a plan without it
            return [*lines, f"no peak is predicted, as what decides it is not known on this machine: {why}"]
        for one in found:
            phase, peak = one.highest
            what = f"is predicted to peak at {peak / GIB:.1f} GiB in {phase}"
            lines.append(line(one.arm, one.point.num_sequences, one.point.length, what, peak))
        return lines
    for arm, config in configs.items():
        num_sequences, length = own_sequences(config), _known_length(config)
        floor = floor_of(config, length=length, num_sequences=num_sequences) or {}
        if (peak := sum(floor.values())) > device_bytes:
            what = f"needs {peak / GIB:.1f} GiB at the least"
            lines.append(line(arm, num_sequences, length, what, peak))
    return lines


def _not_predicted(config: OwnRunConfig | CommandRunConfig) -> str | None:
    """Why an arm's peak is not told; None: it is."""
    if not isinstance(config, OwnRunConfig):
        return "another trainer's"
    if config.policy.backend.type != "dtensor":
        return f"policy.backend.type is {config.policy.backend.type}"
    if not config.cluster.gpus_per_node:
        return "it trains on CPU cores (cluster.gpus_per_node: 0)"
    return None


def _known_length(config: OwnRunConfig) -> int:
    """Tokens of a sequence at the least: what a task adds is not known without reading it."""
    if config.policy.micro_batch_tokens:
        return config.policy.micro_batch_tokens // own_sequences(config)
    return 1 if config.algorithm.type in ("sft", "dpo") else config.rollout.max_new_tokens


def device_memory(asked: str | None) -> int | None:
    """Bytes of a device: as asked (`141GiB`, or a card's name), or this machine's smallest; None: unknown."""
    if asked is None:
        return _smallest_here()
    card = CARDS.get(asked.lower())
    if card is not None:
        return card * 2**20
    size = re.fullmatch(r"([0-9]{1,5}(\.[0-9]{1,3})?)\s*(GiB|GB)?", asked)
    if size is None or not float(size[1]):
        raise RecipeError(Code.DEVICE_MEMORY_SYNTAX(got=asked, cards=[*CARDS]))
    return int(float(size[1]) * (10**9 if size[3] == "GB" else GIB))


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
    point: Point,
    row: dict[str, Any],
    device_bytes: int | None,
    master_dtype: str = MASTER_DTYPE,
) -> Predicted:
    share, engine_bytes, vllm = config.rollout.gpu_memory_utilization, None, row["vllm"]
    if config.samples and vllm and device_bytes:
        if share or vllm["cache"] is None or vllm["cache"] > MOST_OF_A_CACHE * device_bytes:
            engine_bytes = int((share or BESIDE_THE_TRAINER) * device_bytes)
        else:
            engine_bytes = vllm["weights"] + vllm["cache"]
    return Predicted(
        arm=arm,
        point=point,
        by_phase=row["by_phase"],
        floor=floor_of(
            config, length=point.length, num_sequences=point.num_sequences, master_dtype=master_dtype
        ),
        engine_bytes=engine_bytes,
        error_below=ERROR_BELOW if row["experts"] or isinstance(config.algorithm, Ppo) else ERROR,
    )
