"""memory-profile: peak memory by phase and arm over a sweep of sizes, on this machine's device.

Each cell of the sweep, an arm at one size, is measured by processes of its own, one cell after the other, so
that each has the device to itself and nothing of another is left. What is measured is written at once.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from abrun import store
from abrun.errors import LaunchError
from abrun.launch.probe import probe, rows_of
from abrun.launch.requirements import shape_of
from abrun.memory.cells import Cell, Longest, MemoryProfile, Point, cell_of
from abrun.memory.floor import floor_of
from abrun.memory.search import search
from abrun.memory.show import show, told
from abrun.memory.sweep import Head, Plan, Variant
from abrun.recipe import BASELINE, Dpo, OwnRunConfig

MODULE, HEADS = "abrun.memory.measure", "abrun.memory.heads"
Say = Callable[[str], None]


class Bench:
    """Where cells are measured: keeps them, says each as it is done, and writes peaks.json every time."""

    def __init__(self, name: str, output: Path, say: Say) -> None:
        self._name, self._output, self._say = name, output, say
        self._counter, self._cells, self._longest = "", list[Cell](), list[Longest]()

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
        directory = self._output / "cells" / f"{len(self._cells):03d}-{arm}"
        try:
            rows = probe(module, directory, config, job)
        except LaunchError:
            rows = rows_of(directory)
            if not any(row["out_of_memory"] for row in rows):
                raise
        cell, counter = cell_of(arm, point, rows)
        if module == MODULE:
            floor = floor_of(config, length=point.length, num_sequences=point.num_sequences)
            cell = replace(cell, floor=floor)
        self._counter = counter or self._counter
        self._cells.append(cell)
        self.write()
        self._say(left + told(cell, self.profile.unit))
        return cell

    def found(self, longest: Longest) -> None:
        self._longest.append(longest)
        self.write()

    @property
    def profile(self) -> MemoryProfile:
        return MemoryProfile(
            name=self._name, counter=self._counter, cells=list(self._cells), longest=list(self._longest)
        )

    def write(self) -> None:
        store.write_json(
            self._output / "peaks.json",
            {
                "schema_version": store.SCHEMA_VERSION,
                "name": self._name,
                "counter": self._counter,
                "cells": [cell.as_json() for cell in self._cells],
                "longest": [
                    {
                        "arm": one.arm,
                        "swept": dict(one.swept),
                        "what": one.what,
                        "fits": one.fits,
                        "fails": one.fails,
                        "failed_in": one.failed_in,
                    }
                    for one in self._longest
                ],
            },
        )


def measure_recipe(plan: Plan, output: Path, say: Say = lambda line: None) -> MemoryProfile:
    """Measure the cells of `plan`, and write peaks.json, pictures and memory.html into `output`.

    Raises LaunchError where an arm cannot be measured here; what was measured before that is kept.
    """
    of_variants = [(variant, variant.configs()) for variant in plan.variants]
    for _, configs in of_variants:
        plan.refuse_endless_search(configs[BASELINE])
    sizes = [plan.num_sequences(configs) for _, configs in of_variants]  # refused before anything is measured
    bench = Bench(plan.name, output, say)
    total = sum(
        len(configs) * len(sequences) * len(plan.lengths)
        for (_, configs), sequences in zip(of_variants, sizes, strict=True)
    )
    done = 0
    for (variant, configs), sequences in zip(of_variants, sizes, strict=True):
        for num_sequences in sequences:
            ended: set[str] = set()
            for length in plan.lengths:
                for arm, config in configs.items():
                    done += 1
                    if arm in ended:
                        say(f"[{done}/{total}] {arm}: left out, a shorter one ran out of memory")
                        continue
                    point = Point(length=length, num_sequences=num_sequences, swept=variant.swept)
                    left = f"[{done}/{total}] "
                    cell = bench.measure(MODULE, arm, point, config, _job(plan, point), left)
                    if cell.out_of_memory:
                        ended.add(arm)
        if plan.longest:
            _search(plan, variant, configs, bench)
    profile = bench.profile
    show(profile, output)
    return profile


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

    for number, (length, kernel) in enumerate(itertools.product(plan.lengths, kernels), 1):
        if kernel in ended:
            say(f"[{number}/{total}] {kernel}: left out, fewer tokens ran out of memory")
        elif measured(kernel, length, f"[{number}/{total}] ").out_of_memory:
            ended.add(kernel)
    if plan.longest:
        for kernel in kernels:
            mine = [cell for cell in bench.profile.cells if cell.arm == kernel]
            bench.found(
                search(mine, "length", lambda size, kernel=kernel: measured(kernel, size, "search: "))
            )
    show(bench.profile, output)
    return bench.profile


def _job(plan: Plan, point: Point) -> dict[str, Any]:
    return {
        "length": point.length,
        "num_sequences": point.num_sequences,
        "rollouts": plan.rollouts,
        "budget_bytes": plan.budget_bytes,
    }


def _search(plan: Plan, variant: Variant, configs: Mapping[str, OwnRunConfig], bench: Bench) -> None:
    """For each arm the largest size that trains; from what was measured already."""
    assert plan.longest
    for arm, config in configs.items():
        mine = [cell for cell in bench.profile.cells if (cell.arm, cell.point.swept) == (arm, variant.swept)]
        mine = _on_one_line(mine, plan.longest)

        def tried(
            size: int, arm: str = arm, config: OwnRunConfig = config, like: Point = mine[0].point
        ) -> Cell:
            assert plan.longest
            sizes = {"length": like.length, "num_sequences": like.num_sequences, plan.longest: size}
            point = Point(**sizes, swept=variant.swept)
            return bench.measure(MODULE, arm, point, config, _job(plan, point), "search: ")

        pairs = plan.longest == "num_sequences" and isinstance(config.algorithm, Dpo)
        positions = (
            shape_of(config.model).get("max_position_embeddings") if plan.longest == "length" else None
        )
        bench.found(search(mine, plan.longest, tried, unit=2 if pairs else 1, most=positions))


def _on_one_line(cells: Iterable[Cell], what: str) -> list[Cell]:
    """Those that differ in `what` alone: at the smallest of the other size."""
    other = "num_sequences" if what == "length" else "length"
    cells = list(cells)
    least = min(getattr(cell.point, other) for cell in cells)
    return [cell for cell in cells if getattr(cell.point, other) == least]
