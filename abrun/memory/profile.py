"""Measured memory peaks by phase and arm over a sweep of sizes, on this machine's devices.

Each cell (an arm at one size) is measured in separate processes, one cell at a time, so that its peaks
contain no memory of other cells. Results are written after each cell.
"""

import itertools
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from abrun.experiment.preflight.model_files import model_shape
from abrun.memory.cells import Cell, MemoryProfile, Point
from abrun.memory.probes import measure_cell
from abrun.memory.search import search_size_limit
from abrun.memory.show import format_progress
from abrun.memory.sweep import COMMAND, SweepPlan, Variant
from abrun.recipe.algorithms import Dpo
from abrun.recipe.run import OwnRunConfig
from abrun.runs.files import write_json
from abrun.runs.lock import folder_lock
from abrun.runs.rundir import SCHEMA_VERSION

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
