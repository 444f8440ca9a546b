"""memory-profile: peak memory by phase and arm over a sweep of sizes, on this machine's device.

Each cell of the sweep, an arm at one size, is measured by processes of its own, one cell after the other, so
that nothing of another cell is in what they take. What is measured is written at once.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from abrun.errors import LaunchError
from abrun.experiment.preflight.requirements import shape_of
from abrun.experiment.probe import probe, rows_of
from abrun.memory.cells import Cell, MemoryProfile, Point, cell_of
from abrun.memory.floor import floor_of
from abrun.memory.search import search
from abrun.memory.show import show, told
from abrun.memory.sweep import COMMAND, Head, Plan, Variant
from abrun.recipe.algorithms import Dpo
from abrun.recipe.experiment import BASELINE
from abrun.recipe.run import OwnRunConfig
from abrun.runs.files import write_json
from abrun.runs.lock import folder_lock
from abrun.runs.rundir import SCHEMA_VERSION

MODULE, HEADS = "abrun.memory.measure", "abrun.memory.heads"
Say = Callable[[str], None]


class Bench:
    """Measure cells; keep them, say each as it is done, and write peaks.json every time."""

    def __init__(self, name: str, output: Path, say: Say, note: str = "") -> None:
        self._output, self._say = output, say
        self.profile = MemoryProfile(name=name, counter="", cells=[], longest=[], note=note)

    def measure(
        self,
        module: str,
        arm: str,
        point: Point,
        config: OwnRunConfig,
        job: Mapping[str, Any],
        left: str = "",
    ) -> Cell:
        """One cell, in processes of its own. Raises LaunchError, one line, where it cannot be measured."""
        directory = self._output / "cells" / f"{len(self.profile.cells):03d}-{arm}"
        cell, counter = measured_cell(module, directory, arm, point, config, job)
        if module == MODULE:
            floor = floor_of(config, length=point.length, num_sequences=point.num_sequences)
            cell = replace(cell, floor=floor)
        self.profile = replace(
            self.profile, counter=counter or self.profile.counter, cells=[*self.profile.cells, cell]
        )
        self._write()
        self._say(left + told(cell, self.profile.unit))
        return cell

    def search(
        self,
        measured: Sequence[Cell],
        what: str,
        tried: Callable[[int], Cell],
        *,
        unit: int = 1,
        most: int | None = None,
    ) -> None:
        """Look for the largest size that trains; see abrun.memory.search."""
        longest = search(measured, what, tried, unit=unit, most=most)
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
    module: str,
    directory: Path,
    arm: str,
    point: Point,
    config: OwnRunConfig,
    job: Mapping[str, Any],
) -> tuple[Cell, str]:
    """A cell, and the counter of its peaks, by processes of its own; one that runs out of memory is one, too.

    Raises LaunchError where it cannot be measured.
    """
    try:
        rows = probe(module, directory, config, job)
    except LaunchError:
        rows = rows_of(directory)
        if not any(row["out_of_memory"] for row in rows):
            raise
    return cell_of(arm, point, rows)


def measure_recipe(plan: Plan, output: Path, say: Say = lambda line: None) -> MemoryProfile:
    """Measure the cells of `plan`, then search; write peaks.json, memory.png and memory.svg into `output`.

    Raises LaunchError where an arm cannot be measured here; what was measured before that is kept.
    """
    of_variants = [(variant, variant.configs()) for variant in plan.variants]
    for _, configs in of_variants:
        plan.refuse_endless_search(configs[BASELINE])
    sizes = [plan.num_sequences(configs) for _, configs in of_variants]  # refused before anything is measured
    bench = Bench(plan.name, output, say, plan.unseen())
    total = sum(len(numbers) * len(configs) for numbers, (_, configs) in zip(sizes, of_variants, strict=True))
    total, number = total * len(plan.lengths), 0
    with folder_lock(output, COMMAND):
        for (variant, configs), numbers in zip(of_variants, sizes, strict=True):
            for num_sequences in numbers:
                ended = set[str]()
                for length, (arm, config) in itertools.product(plan.lengths, configs.items()):
                    number += 1
                    left = f"[{number}/{total}] "
                    if arm in ended:
                        say(f"{left}{arm}: left out, a shorter one ran out of memory")
                        continue
                    point = Point(length=length, num_sequences=num_sequences, swept=variant.swept)
                    cell = bench.measure(MODULE, arm, point, config, _job(plan, point), left)
                    ended |= {arm} if cell.out_of_memory else set()
        for variant, configs in of_variants if plan.longest else ():
            for arm, config in configs.items():
                _search(plan, bench, variant, arm, config)
        show(bench.profile, output)
    return bench.profile


def measure_head(head: Head, plan: Plan, output: Path, say: Say = lambda line: None) -> MemoryProfile:
    """The same of a log-prob head alone, its kernels in the place of arms."""
    config, bench = head.config, Bench(plan.name, output, say)
    plan.refuse_endless_search(config)
    kernels = head.kernels(on_gpu=config.cluster.gpus_per_node > 0)
    total, ended = len(kernels) * len(plan.lengths), set[str]()

    def measured(kernel: str, length: int, left: str) -> Cell:
        sizes = {"hidden_size": head.hidden_size, "vocab_size": head.vocab_size, "length": length}
        job = {**kernels[kernel], **sizes, "budget_bytes": plan.budget_bytes}
        return bench.measure(HEADS, kernel, Point(length=length), config, job, left)

    with folder_lock(output, COMMAND):
        for number, (length, kernel) in enumerate(itertools.product(plan.lengths, kernels), 1):
            left = f"[{number}/{total}] "
            if kernel in ended:
                say(f"{left}{kernel}: left out, fewer tokens ran out of memory")
            elif measured(kernel, length, left).out_of_memory:
                ended.add(kernel)
        for kernel in kernels if plan.longest else ():
            own_cells = [cell for cell in bench.profile.cells if cell.arm == kernel]
            bench.search(own_cells, "length", lambda size, kernel=kernel: measured(kernel, size, "search: "))
        show(bench.profile, output)
    return bench.profile


def _job(plan: Plan, point: Point) -> dict[str, Any]:
    return {
        "length": point.length,
        "num_sequences": point.num_sequences,
        "rollouts": plan.rollouts,
        "budget_bytes": plan.budget_bytes,
    }


def _search(plan: Plan, bench: Bench, variant: Variant, arm: str, config: OwnRunConfig) -> None:
    """Search the largest size of an arm that trains, on from the cells at the smallest of the other size."""
    what = plan.longest
    assert what
    other = "num_sequences" if what == "length" else "length"
    cells = [cell for cell in bench.profile.cells if (cell.arm, cell.point.swept) == (arm, variant.swept)]
    least = min(getattr(cell.point, other) for cell in cells)
    cells = [cell for cell in cells if getattr(cell.point, other) == least]

    def tried(size: int) -> Cell:
        point = replace(cells[0].point, **{what: size})
        return bench.measure(MODULE, arm, point, config, _job(plan, point), "search: ")

    pairs = what == "num_sequences" and isinstance(config.algorithm, Dpo)
    positions = shape_of(config.model).get("max_position_embeddings") if what == "length" else None
    bench.search(cells, what, tried, unit=2 if pairs else 1, most=positions)
