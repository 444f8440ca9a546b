"""Measured memory peaks by phase and arm over a sweep of sizes, on this machine's devices.

Each cell (an arm at one size) is measured in separate processes, one cell at a time, so that its peaks
contain no memory of other cells. Results are written after each cell.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from abrun.errors import LaunchError, RecipeError
from abrun.experiment.preflight.model_files import model_shape
from abrun.experiment.probe import is_never_cancelled, read_rows, require_devices, run_probe
from abrun.recipe.algorithms import Dpo
from abrun.recipe.experiment import BASELINE, ExperimentDeclaration, load_recipe
from abrun.recipe.reading import parse_yaml
from abrun.recipe.run import OwnRunConfig, unsupported_settings
from abrun.runs.files import write_json
from abrun.runs.lock import folder_lock
from abrun.runs.metric_names import PEAK_MEMORY, is_peak_memory
from abrun.runs.records import SCHEMA_VERSION

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One combination of sizes in a sweep; every arm is measured or predicted at it."""

    length: int  # tokens per sequence
    num_sequences: int = 1  # per micro-batch and rank
    swept: tuple[tuple[str, Any], ...] = ()  # (recipe key, value) of --sweep

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "swept": dict(self.swept)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Measured memory of one arm at one point; each value is the maximum over ranks.

    `out_of_memory` is the phase in which memory ran out, or None. The peaks are then those reached before.
    """

    arm: str
    point: Point
    by_phase: dict[str, int]  # peak bytes, by `MemoryProfile.counter`
    held: dict[str, int] = field(default_factory=dict)  # bytes that stay allocated between steps
    reserved_bytes: int | None = None  # peak; this and the next three: CUDA only
    inactive_bytes: int | None = None  # unused parts of split blocks after the step
    allocator_retries: int | None = None
    device_used_bytes: dict[str, int] = field(default_factory=dict)  # all processes; "sampling", "training"
    total_bytes: int | None = None  # of the device
    out_of_memory: str | None = None
    peak: dict[str, Any] | None = None  # from abrun.trainer.memory.measure.summarize_peak

    @property
    def highest_peak(self) -> tuple[str, int]:
        """Phase with the highest peak, and its bytes, even if the step ran out of memory."""
        before_the_step = self.out_of_memory or "weights", sum(self.held.values())
        return max(self.by_phase.items(), key=lambda item: item[1], default=before_the_step)

    @property
    def fitting_peak(self) -> tuple[str, int] | None:
        """Phase with the highest peak, and its bytes; None if the step ran out of memory."""
        return self.highest_peak if self.out_of_memory is None else None

    def as_json(self) -> dict[str, Any]:
        phase, num_bytes = self.highest_peak
        fields = {**asdict(self), "highest_phase": phase, "highest_bytes": num_bytes}
        del fields["point"]
        return fields | self.point.as_json()


def merge_rank_rows(arm: str, point: Point, rows: Sequence[Mapping[str, Any]]) -> tuple[Cell, str]:
    """Merge the rows of all ranks into a cell; also return its counter (from PEAK_MEMORY, or empty)."""
    metrics = _merge_maxima(row["metrics"] for row in rows)
    counter = next((name for name in PEAK_MEMORY if any(key.endswith(f"/{name}") for key in metrics)), "")
    reserved_bytes = [value for key, value in metrics.items() if key.endswith("/peak_reserved_bytes")]
    peaks = [row["peak"] for row in rows if row["peak"]]
    cell = Cell(
        arm=arm,
        point=point,
        by_phase={key.split("/")[1]: value for key, value in metrics.items() if is_peak_memory(key)},
        held=_merge_maxima(row["held"] for row in rows),
        reserved_bytes=max(reserved_bytes, default=None),
        inactive_bytes=metrics.get("memory/inactive_bytes"),
        allocator_retries=metrics.get("memory/allocator_retries"),
        device_used_bytes=_merge_maxima(row["device_used"] for row in rows),
        total_bytes=rows[0]["total_bytes"],
        out_of_memory=next((row["out_of_memory"] for row in rows if row["out_of_memory"]), None),
        peak=max(peaks, key=lambda peak: peak["peak_bytes"], default=None),
    )
    return cell, counter


def _merge_maxima(rows: Iterable[Mapping[str, float]]) -> dict[str, int]:
    merged: dict[str, int] = {}
    for row in rows:
        for key, value in row.items():
            merged[key] = max(merged.get(key, 0), int(value))
    return merged


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeLimit:
    """Largest size that fits an arm, and the smallest tried size that does not."""

    arm: str
    swept: tuple[tuple[str, Any], ...]
    what: str  # length or num_sequences
    fits: int | None  # None: no tried size fits
    fails: int | None  # None: the model's maximum fits
    failed_in: str | None  # phase that ran out of memory


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """Measured cells of a sweep, with the size limits of its arms."""

    name: str
    counter: str  # peak_allocated_bytes (CUDA) or peak_live_tensor_bytes (CPU)
    cells: list[Cell]  # ordered by point, the baseline first
    size_limits: list[SizeLimit] = field(default_factory=list)
    note: str = ""  # limitation of the measurements

    def ratio(self, cell: Cell) -> float | None:
        """Return the ratio of a cell's highest peak to that of the first arm at the same point.

        None if either ran out of memory, or if the first arm has no cell there.
        """
        peaks = {(other.arm, other.point): other.fitting_peak for other in reversed(self.cells)}
        baseline_peak = peaks.get((self.arms[0], cell.point))
        return cell.fitting_peak[1] / baseline_peak[1] if baseline_peak and cell.fitting_peak else None

    @property
    def arms(self) -> list[str]:
        """Arms in order of measurement, the baseline first."""
        return sorted(dict.fromkeys(cell.arm for cell in self.cells), key=lambda arm: arm != BASELINE)

    @property
    def sorted_cells(self) -> list[Cell]:
        """Cells sorted by size, then by arm."""
        swept_values, arms = list(dict.fromkeys(cell.point.swept for cell in self.cells)), self.arms

        def sort_key(cell: Cell) -> tuple[int, ...]:
            point = cell.point
            return swept_values.index(point.swept), point.num_sequences, point.length, arms.index(cell.arm)

        return sorted(self.cells, key=sort_key)

    @property
    def unit(self) -> tuple[str, int]:
        return choose_unit(cell.highest_peak[1] for cell in self.cells)


def choose_unit(peaks: Iterable[int]) -> tuple[str, int]:
    """Return the unit for a table of peaks and its bytes: GiB from 4 GiB on, else MiB."""
    return ("GiB", GIB) if max(peaks, default=0) >= 4 * GIB else ("MiB", 2**20)


# --- what is measured ---

COMMAND = "abrun memory-profile"
MASTER_DTYPE = "float32"  # weights, gradients and AdamW moments in abrun's trainer
SHARED_PROMPTS_NOTE = (
    "policy.share_prompts: has no effect here, because the random sequences share no prompt; in a run, "
    "micro-batches fill the same token budget, but there are fewer of them"
)
DEFAULT_LENGTHS = (128, 256, 512, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A recipe with one value for each swept key."""

    recipe: ExperimentDeclaration
    swept: tuple[tuple[str, Any], ...] = ()

    def configs(self, *, on_this_machine: bool = True) -> dict[str, OwnRunConfig]:
        """Return the run configuration of each arm, the baseline first.

        Raises LaunchError if an arm cannot be measured; with `on_this_machine`, also if this machine cannot
        run it.
        """
        configs: dict[str, OwnRunConfig] = {}
        for arm in sorted(self.recipe.arms, key=lambda arm: arm != BASELINE):
            config = self.recipe.run_config(arm)
            if not isinstance(config, OwnRunConfig):
                raise LaunchError(
                    f"{self.recipe.name}: arms.{arm}: trainer.type: got 'command', but memory-profile only "
                    "runs steps of abrun's own trainer; measure a foreign one with its own tools"
                )
            for problem in unsupported_settings(config):
                raise LaunchError(f"{self.recipe.name}: arms.{arm}: {problem}")
            configs[arm] = config
        for config in configs.values() if on_this_machine else ():
            require_devices(config)
        return configs


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """Cells to measure or predict, and options."""

    name: str
    variants: Sequence[Variant]
    lengths: Sequence[int] = DEFAULT_LENGTHS  # ascending; tokens of prompt and completion
    sequences: Sequence[int] = ()  # ascending, per micro-batch; default: the baseline's, or 1 (dpo: 2)
    rollouts: bool = True  # sample once if the recipe has rollouts
    budget_bytes: int | None = None  # limit of device memory
    searched_size: Literal["length", "num_sequences"] | None = None  # search its maximum
    master_dtype: str = MASTER_DTYPE  # only for predictions

    def batches(self, *, on_this_machine: bool = True) -> list[tuple[Variant, int, dict[str, OwnRunConfig]]]:
        """Return (variant, sequences per micro-batch, configuration by arm) for each combination.

        Raises LaunchError if an arm cannot be measured or a micro-batch would split a preference pair; with
        `on_this_machine`, also for a search on CPU cores without a memory budget.
        """
        batches = []
        for variant in self.variants:
            configs = variant.configs(on_this_machine=on_this_machine)
            baseline = configs[variant.recipe.baseline]
            has_no_limit = self.searched_size and self.budget_bytes is None
            if on_this_machine and has_no_limit and not baseline.cluster.gpus_per_node:
                raise LaunchError(
                    "--budget-gib: missing; a search on CPU cores needs a limit, because the machine would "
                    "run out of memory"
                )
            divisor = 2 if any(isinstance(config.algorithm, Dpo) for config in configs.values()) else 1
            for num_sequences in self.sequences or (baseline.policy.micro_batch_size or divisor,):
                if num_sequences % divisor:
                    raise LaunchError(
                        f"--sequences: got {num_sequences} with algorithm.type 'dpo', which keeps pairs "
                        "together; use an even number"
                    )
                batches.append((variant, num_sequences, configs))
        return batches

    def note(self) -> str:
        """Return a note if the recipe shares prompts, which random sequences do not show; else empty."""
        configs = (
            config for variant in self.variants for config in variant.configs(on_this_machine=False).values()
        )
        return SHARED_PROMPTS_NOTE if any(config.policy.share_prompts for config in configs) else ""


def expand_sweep(path: Path, overrides: Sequence[str], sweeps: Sequence[str]) -> list[Variant]:
    """Return a variant for every combination of the `KEY=V1,V2,...` sweeps. Raises RecipeError."""
    base = load_recipe(path, overrides)
    values_by_key: dict[str, list[Any]] = {}
    for option in sweeps:
        key, equals, text = option.partition("=")
        values = parse_yaml(f"[{text}]", f"--sweep {key}") if equals and text.strip() else []
        if not (key and isinstance(values, list) and values):
            raise RecipeError(
                f"--sweep: got {option!r}; allowed: KEY=VALUE,VALUE with a dotted key, such as "
                "policy.backend.tensor_parallel=1,2"
            )
        if key in values_by_key:
            raise RecipeError(f"--sweep: got {key} twice; give all its values at once, such as {key}=A,B")
        for arm, arm_settings in base.arms.items():
            for arm_key in arm_settings:
                if f"{key}.".startswith(f"{arm_key}.") or f"{arm_key}.".startswith(f"{key}."):
                    raise RecipeError(
                        f"--sweep: got {key}, but arms.{arm} sets its own {arm_key}; sweep another key, or "
                        "drop the arm's with --set"
                    )
        values_by_key[key] = values
    variants = []
    for values in itertools.product(*values_by_key.values()):
        swept = tuple(zip(values_by_key, values, strict=True))
        recipe = load_recipe(path, [*overrides, *(f"{key}={json.dumps(value)}" for key, value in swept)])
        variants.append(Variant(recipe=recipe, swept=swept))
    return variants


# --- measuring ---

MEASURE = "abrun.trainer.memory.measure"

ReportLine = Callable[[str], None]


class SweepRunner:
    """Runner that measures cells one by one, reports each, and updates peaks.json."""

    def __init__(self, plan: SweepPlan, output: Path, report_line: ReportLine) -> None:
        self._plan, self._output, self._report_line = plan, output, report_line
        self.profile = MemoryProfile(name=plan.name, counter="", cells=[], size_limits=[], note=plan.note())

    def measure(self, arm: str, point: Point, config: OwnRunConfig, position: str = "") -> Cell:
        """Measure one cell in separate processes. Raises LaunchError if it cannot be measured."""
        job = {"length": point.length, "num_sequences": point.num_sequences}
        job |= {"rollouts": self._plan.rollouts, "budget_bytes": self._plan.budget_bytes}
        directory = self._output / "cells" / f"{len(self.profile.cells):03d}-{arm}"
        cell, counter = measure_cell(directory, arm, point, config, job)
        counter = counter or self.profile.counter
        self.profile = replace(self.profile, counter=counter, cells=[*self.profile.cells, cell])
        self._write()
        self._report_line(position + format_progress(cell, self.profile.unit))
        return cell

    def search_arm(self, variant: Variant, arm: str, config: OwnRunConfig) -> None:
        """Search for an arm's size limit, from its cells with the smallest value of the other size."""
        searched_size = self._plan.searched_size
        assert searched_size
        fixed_size = "num_sequences" if searched_size == "length" else "length"
        cells = [cell for cell in self.profile.cells if (cell.arm, cell.point.swept) == (arm, variant.swept)]
        smallest_fixed_size = min(getattr(cell.point, fixed_size) for cell in cells)
        cells = [cell for cell in cells if getattr(cell.point, fixed_size) == smallest_fixed_size]
        unit, max_size = 1, None
        if searched_size == "length":
            max_size = model_shape(config.model).get("max_position_embeddings")
        elif isinstance(config.algorithm, Dpo):
            unit = 2

        def measure_size(size: int) -> Cell:
            point = replace(cells[0].point, **{searched_size: size})
            return self.measure(arm, point, config, "search: ")

        size_limit = search_size_limit(cells, searched_size, measure_size, unit=unit, max_size=max_size)
        self.profile = replace(self.profile, size_limits=[*self.profile.size_limits, size_limit])
        self._write()

    def _write(self) -> None:
        profile = self.profile
        content = {
            "schema_version": SCHEMA_VERSION,
            "name": profile.name,
            "counter": profile.counter,
            "cells": [cell.as_json() for cell in profile.cells],
            "longest": [asdict(limit) | {"swept": dict(limit.swept)} for limit in profile.size_limits],
        }
        write_json(self._output / "peaks.json", content)


def measure_recipe(
    plan: SweepPlan, output: Path, report_line: ReportLine = lambda line: None
) -> MemoryProfile:
    """Measure the cells of `plan`, search for size limits if requested, and write peaks.json into `output`.

    Raises LaunchError if an arm cannot be measured on this machine; earlier cells stay in peaks.json.
    """
    batches = plan.batches()
    runner = SweepRunner(plan, output, report_line)
    num_cells, cell_number = len(plan.lengths) * sum(len(configs) for *_, configs in batches), 0
    with folder_lock(output, COMMAND):
        for variant, num_sequences, configs in batches:
            oom_arms = set[str]()
            for length, (arm, config) in itertools.product(plan.lengths, configs.items()):
                cell_number += 1
                position = f"[{cell_number}/{num_cells}] "
                if arm in oom_arms:
                    report_line(f"{position}{arm}: skipped: a shorter length ran out of memory")
                    continue
                point = Point(length=length, num_sequences=num_sequences, swept=variant.swept)
                if runner.measure(arm, point, config, position).out_of_memory:
                    oom_arms.add(arm)
        for variant in plan.variants if plan.searched_size else ():
            for arm, config in variant.configs().items():
                runner.search_arm(variant, arm, config)
    return runner.profile


RESOLUTION = 32  # the search stops within 1/32 of the limit
MIN_TOKENS = 16  # if a sequence this short does not fit, none does
FIRST_FILL_SHARE = 0.97  # share of the memory that the first extrapolated size should fill


def search_size_limit(
    measured: Sequence[Cell],
    size_name: str,
    measure_size: Callable[[int], Cell],
    *,
    unit: int = 1,
    max_size: int | None = None,
) -> SizeLimit:
    """Return the largest size that fits: a multiple of `unit` up to `max_size`.

    `size_name` is length or num_sequences. `measured` are cells that differ only in this size;
    `measure_size` measures another one. The peak of each phase is nearly linear in the size, so the next size
    is extrapolated from two cells. After two misses in the same direction the search doubles or bisects.
    """
    cells = {getattr(cell.point, size_name): cell for cell in measured}
    misses = 0
    while True:
        fitting_sizes = sorted(size for size, cell in cells.items() if not cell.out_of_memory)
        largest_fitting = fitting_sizes[-1] if fitting_sizes else 0
        smallest_failing = min((size for size, cell in cells.items() if cell.out_of_memory), default=None)
        gap = max(unit, largest_fitting // RESOLUTION)
        min_size = MIN_TOKENS if size_name == "length" else unit
        is_known = smallest_failing is not None and (
            smallest_failing - largest_fitting <= gap
            or (not largest_fitting and smallest_failing <= min_size)
        )
        if is_known or (max_size is not None and largest_fitting >= max_size):
            return SizeLimit(
                arm=measured[0].arm,
                swept=measured[0].point.swept,
                what=size_name,
                fits=largest_fitting or None,
                fails=smallest_failing,
                failed_in=cells[smallest_failing].out_of_memory if smallest_failing else None,
            )
        size = 2 * largest_fitting if smallest_failing is None else (largest_fitting + smallest_failing) // 2
        if misses < 2:
            memory_share = 1.0 if misses else FIRST_FILL_SHARE
            fitting_cells = [(size, cells[size]) for size in fitting_sizes[-2:]]
            size = _extrapolate_size(fitting_cells, memory_share) or size
        if smallest_failing is None:
            size = max(size, largest_fitting + gap)
        elif smallest_failing - largest_fitting < 2 * max(gap, smallest_failing // RESOLUTION):
            size = (largest_fitting + smallest_failing) // 2
        else:
            size = min(max(size, largest_fitting + gap), smallest_failing - smallest_failing // RESOLUTION)
        step = unit * 2 ** int(math.log2(gap // unit))  # tries round numbers, no finer than the resolution
        size = size // step * step if size // step * step > largest_fitting else size // unit * unit
        size = min(size, max_size or size)
        cell = cells[size] = measure_size(size)
        misses = misses + 1 if bool(cell.out_of_memory) == (smallest_failing is not None) else 0


def _extrapolate_size(fitting_cells: Sequence[tuple[int, Cell]], memory_share: float) -> int | None:
    """Return the smallest size at which a phase fills this share of the device; None if no phase grows.

    Phases are extrapolated separately: short sequences peak in the optimizer, whose memory does not grow.
    """
    if len(fitting_cells) < 2 or fitting_cells[1][1].total_bytes is None:
        return None
    (smaller_size, smaller_cell), (larger_size, larger_cell) = fitting_cells
    target_bytes = memory_share * fitting_cells[1][1].total_bytes
    sizes = []
    for phase, peak in larger_cell.by_phase.items():
        growth = peak - smaller_cell.by_phase.get(phase, peak)
        if growth > 0:
            sizes.append(larger_size + int((target_bytes - peak) * (larger_size - smaller_size) / growth))
    return min(sizes, default=None)


def measure_cell(
    directory: Path,
    arm: str,
    point: Point,
    config: OwnRunConfig,
    job: Mapping[str, Any],
    is_cancelled: Callable[[], bool] = is_never_cancelled,
) -> tuple[Cell, str]:
    """Measure a cell and return it with the counter of its peaks. Out of memory is a valid result.

    Raises LaunchError if the cell cannot be measured.
    """
    try:
        rows = run_probe(MEASURE, directory, config, job, is_cancelled)
    except LaunchError:
        rows = read_rows(directory)
        if not any(row["out_of_memory"] for row in rows):
            raise
    return merge_rank_rows(arm, point, rows)


# --- one line for each cell ---


def format_progress(cell: Cell, unit: tuple[str, int]) -> str:
    """Return the progress line of a measured cell."""
    phase, num_bytes = cell.highest_peak
    failure = f"out of memory in {cell.out_of_memory}; peak before that: " if cell.out_of_memory else ""
    peak = f"{format_bytes(num_bytes, unit)} {unit[0]} in {phase}"
    return f"{cell.arm}, {describe_point(cell.point)}: {failure}{peak}"


def describe_point(point: Point) -> str:
    sequences = [f"{point.num_sequences} sequences"] if point.num_sequences > 1 else []
    swept = (f"{shorten_key(key)} {value}" for key, value in point.swept)
    return ", ".join([f"{point.length:,} tokens", *sequences, *swept])


def shorten_key(key: str) -> str:
    return key.rsplit(".", 1)[-1].replace("_", " ")


def format_bytes(num_bytes: int | None, unit: tuple[str, int]) -> str:
    return "-" if num_bytes is None else f"{num_bytes / unit[1]:,.1f}"
