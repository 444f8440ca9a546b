"""memory-profile: peak memory by phase and arm over a sweep of sizes, on this machine's device.

Each cell of the sweep, an arm at one size, is measured by processes of its own, one cell after the other, so
that no other cell's memory is in its peaks. Results are written at once.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from abrun.errors import LaunchError
from abrun.experiment.preflight.model_files import model_shape
from abrun.experiment.probe import read_rows, run_probe
from abrun.memory.cells import Cell, MemoryProfile, Point, cell_of
from abrun.memory.search import search
from abrun.memory.show import progress_line
from abrun.memory.sweep import COMMAND, Plan, Variant
from abrun.recipe.algorithms import Dpo
from abrun.recipe.run import OwnRunConfig
from abrun.runs.files import write_json
from abrun.runs.lock import folder_lock
from abrun.runs.rundir import SCHEMA_VERSION

MODULE = "abrun.memory.measure"
Say = Callable[[str], None]


class Bench:
    """Measures the cells of a plan, reports each, and rewrites peaks.json after each."""

    def __init__(self, plan: Plan, output: Path, say: Say) -> None:
        self._plan, self._output, self._say = plan, output, say
        self.profile = MemoryProfile(name=plan.name, counter="", cells=[], longest=[], note=plan.note())

    def measure(self, arm: str, point: Point, config: OwnRunConfig, position: str = "") -> Cell:
        """Measure one cell in processes of its own. Raises LaunchError where it cannot be measured."""
        job = {
            "length": point.length,
            "num_sequences": point.num_sequences,
            "rollouts": self._plan.rollouts,
            "budget_bytes": self._plan.budget_bytes,
        }
        directory = self._output / "cells" / f"{len(self.profile.cells):03d}-{arm}"
        cell, counter = measured_cell(directory, arm, point, config, job)
        counter = counter or self.profile.counter
        self.profile = replace(self.profile, counter=counter, cells=[*self.profile.cells, cell])
        self._write()
        self._say(position + progress_line(cell, self.profile.unit))
        return cell

    def search(self, variant: Variant, arm: str, config: OwnRunConfig) -> None:
        """Search the largest size of an arm that trains, from the cells at the smallest of the other size."""
        size = self._plan.longest
        assert size
        other = "num_sequences" if size == "length" else "length"
        cells = [cell for cell in self.profile.cells if (cell.arm, cell.point.swept) == (arm, variant.swept)]
        least = min(getattr(cell.point, other) for cell in cells)
        cells = [cell for cell in cells if getattr(cell.point, other) == least]
        pairs = size == "num_sequences" and isinstance(config.algorithm, Dpo)
        longest = search(
            cells,
            size,
            lambda value: self.measure(arm, replace(cells[0].point, **{size: value}), config, "search: "),
            unit=2 if pairs else 1,
            most=model_shape(config.model).get("max_position_embeddings") if size == "length" else None,
        )
        self.profile = replace(self.profile, longest=[*self.profile.longest, longest])
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
                "longest": [asdict(longest) | {"swept": dict(longest.swept)} for longest in profile.longest],
            },
        )


def measured_cell(
    directory: Path, arm: str, point: Point, config: OwnRunConfig, job: Mapping[str, Any]
) -> tuple[Cell, str]:
    """Return a cell and the counter of its peaks; running out of memory is a result, too.

    Raises LaunchError where it cannot be measured.
    """
    try:
        rows = run_probe(MODULE, directory, config, job)
    except LaunchError:
        rows = read_rows(directory)
        if not any(row["out_of_memory"] for row in rows):
            raise
    return cell_of(arm, point, rows)


def measure_recipe(plan: Plan, output: Path, say: Say = lambda line: None) -> MemoryProfile:
    """Measure the cells of `plan`, then search; write peaks.json into `output`.

    Raises LaunchError where an arm cannot be measured here; cells measured before that are kept.
    """
    batches = plan.batches()
    bench = Bench(plan, output, say)
    total, number = len(plan.lengths) * sum(len(configs) for *_, configs in batches), 0
    with folder_lock(output, COMMAND):
        for variant, num_sequences, configs in batches:
            ended = set[str]()
            for length, (arm, config) in itertools.product(plan.lengths, configs.items()):
                number += 1
                position = f"[{number}/{total}] "
                if arm in ended:
                    say(f"{position}{arm}: left out, a shorter one ran out of memory")
                    continue
                point = Point(length=length, num_sequences=num_sequences, swept=variant.swept)
                if bench.measure(arm, point, config, position).out_of_memory:
                    ended.add(arm)
        for variant in plan.variants if plan.longest else ():
            for arm, config in variant.configs().items():
                bench.search(variant, arm, config)
    return bench.profile
