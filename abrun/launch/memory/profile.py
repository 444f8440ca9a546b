"""Measured memory peaks by phase and arm over a sweep of sizes, on this machine's devices.

Each cell (an arm at one size) is measured in separate processes, one cell at a time, so that its peaks
contain no memory of other cells. Results are written after each cell.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from abrun.errors import LaunchError
from abrun.experiment.preflight.model_files import model_shape
from abrun.experiment.probe import is_never_cancelled, read_rows, run_probe
from abrun.launch.memory.cells import Cell, MemoryProfile, Point, SizeLimit, merge_rank_rows
from abrun.launch.memory.show import format_progress
from abrun.launch.memory.sweep import COMMAND, SweepPlan, Variant
from abrun.recipe.algorithms import Dpo
from abrun.recipe.run import OwnRunConfig
from abrun.runs.files import write_json
from abrun.runs.lock import folder_lock
from abrun.runs.rundir import SCHEMA_VERSION

MEASURE = "abrun.trainer.memory.measure"

ReportLine = Callable[[str], None]


class SweepRunner:
    """Runner that measures cells one by one, reports each, and updates peaks.json."""

    def __init__(self, plan: SweepPlan, output: Path, report_line: ReportLine) -> None:
        self._plan, self._output, self._report_line = plan, output, report_line
        self.profile = MemoryProfile(name=plan.name, counter="", cells=[], size_limits=[], note=plan.note())

    def measure(self, arm: str, point: Point, config: OwnRunConfig, position: str = "") -> Cell:
        """Measure one cell in separate processes. Raises LaunchError if it cannot be measured."""
        job = {
            "length": point.length,
            "num_sequences": point.num_sequences,
            "rollouts": self._plan.rollouts,
            "budget_bytes": self._plan.budget_bytes,
        }
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
        needs_pairs = searched_size == "num_sequences" and isinstance(config.algorithm, Dpo)
        size_limit = search_size_limit(
            cells,
            searched_size,
            lambda size: self.measure(
                arm, replace(cells[0].point, **{searched_size: size}), config, "search: "
            ),
            unit=2 if needs_pairs else 1,
            max_size=model_shape(config.model).get("max_position_embeddings")
            if searched_size == "length"
            else None,
        )
        self.profile = replace(self.profile, size_limits=[*self.profile.size_limits, size_limit])
        self._write()

    def _write(self) -> None:
        profile = self.profile
        write_json(
            self._output / "peaks.json",
            {
                "schema_version": SCHEMA_VERSION,
                "name": profile.name,
                "counter": profile.counter,
                "cells": [cell.as_json() for cell in profile.cells],
                "longest": [asdict(limit) | {"swept": dict(limit.swept)} for limit in profile.size_limits],
            },
        )


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
            size = (
                _extrapolate_size([(size, cells[size]) for size in fitting_sizes[-2:]], memory_share) or size
            )
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
    sizes = [
        larger_size
        + int((target_bytes - peak) * (larger_size - smaller_size) / (peak - smaller_cell.by_phase[phase]))
        for phase, peak in larger_cell.by_phase.items()
        if peak > smaller_cell.by_phase.get(phase, peak)
    ]
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
