"""memory-profile: peak memory by phase and arm over a sweep of sizes, on this machine's device.

Each cell of the sweep, an arm at one size, is measured by processes of its own, which have their devices to
themselves, so that nothing of another cell is in what they take. What is measured is written at once.
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from abrun.errors import LaunchError
from abrun.experiment.preflight.machine import this_machine
from abrun.experiment.preflight.model_files import shape_of
from abrun.experiment.probe import Place, probe, rows_of
from abrun.memory.cells import Cell, Longest, MemoryProfile, Point, cell_of
from abrun.memory.devices import Devices
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
    """Where cells are measured: keeps them, says each as it is done, and writes peaks.json every time.

    Several threads may measure cells at once.
    """

    def __init__(self, name: str, output: Path, say: Say, note: str = "") -> None:
        self._name, self._output, self._say, self._note = name, output, say, note
        self._counter, self._cells, self._longest = "", dict[int, Cell](), dict[int, Longest]()
        self._num_begun, self._lock = 0, threading.Lock()
        self.devices = Devices(this_machine().gpus)

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
        with self._lock:
            number, self._num_begun = self._num_begun, self._num_begun + 1
        directory = self._output / "cells" / f"{number:03d}-{arm}"
        with self.devices.place(config) as place:
            cell, counter = measured_cell(module, directory, arm, point, config, job, place)
        if module == MODULE:
            floor = floor_of(config, length=point.length, num_sequences=point.num_sequences)
            cell = replace(cell, floor=floor)
        with self._lock:
            self._counter = counter or self._counter
            self._cells[number] = cell
            self.write()
            self._say(left + told(cell, self.profile.unit))
        return cell

    def found(self, number: int, longest: Longest) -> None:
        """The answer of one of the searches, which are numbered."""
        with self._lock:
            self._longest[number] = longest
            self.write()

    @property
    def profile(self) -> MemoryProfile:
        return MemoryProfile(
            name=self._name,
            counter=self._counter,
            cells=[cell for _, cell in sorted(self._cells.items())],
            longest=[longest for _, longest in sorted(self._longest.items())],
            note=self._note,
        )

    def write(self) -> None:
        write_json(
            self._output / "peaks.json",
            {
                "schema_version": SCHEMA_VERSION,
                "name": self._name,
                "counter": self._counter,
                "cells": [cell.as_json() for cell in self.profile.cells],
                "longest": [
                    {
                        "arm": one.arm,
                        "swept": dict(one.swept),
                        "what": one.what,
                        "fits": one.fits,
                        "fails": one.fails,
                        "failed_in": one.failed_in,
                    }
                    for one in self.profile.longest
                ],
            },
        )


def measured_cell(
    module: str,
    directory: Path,
    arm: str,
    point: Point,
    config: OwnRunConfig,
    job: Mapping[str, Any],
    place: Place | None = None,
) -> tuple[Cell, str]:
    """A cell, and the counter of its peaks, by processes of its own; one that runs out of memory is one, too.

    Raises LaunchError where it cannot be measured.
    """
    try:
        rows = probe(module, directory, config, job, place)
    except LaunchError:
        rows = rows_of(directory)
        if not any(row["out_of_memory"] for row in rows):
            raise
    return cell_of(arm, point, rows)


def measure_recipe(plan: Plan, output: Path, say: Say = lambda line: None) -> MemoryProfile:
    """Measure the cells of `plan`, and write peaks.json, pictures and memory.html into `output`.

    Raises LaunchError where an arm cannot be measured here; what was measured before that is kept.
    """
    of_variants = [(variant, variant.configs()) for variant in plan.variants]
    for _, configs in of_variants:
        plan.refuse_endless_search(configs[BASELINE])
    sizes = [plan.num_sequences(configs) for _, configs in of_variants]  # refused before anything is measured
    bench = Bench(plan.name, output, say, plan.unseen())
    with folder_lock(output, COMMAND):
        _measure(plan, bench, of_variants, sizes, say)
        show(bench.profile, output)
    return bench.profile


def _measure(
    plan: Plan,
    bench: Bench,
    of_variants: Sequence[tuple[Variant, Mapping[str, OwnRunConfig]]],
    sizes: Sequence[Sequence[int]],  # of each variant, sequences of a microbatch
    say: Say,
) -> None:
    """The cells of the sweep, then the searches."""
    jobs: list[Callable[[], None]] = []

    def cell(number: int, arm: str, config: OwnRunConfig, point: Point, ended: set[str]) -> None:
        left = f"[{number}/{len(jobs)}] "
        if arm in ended:
            say(f"{left}{arm}: left out, a shorter one ran out of memory")
        elif bench.measure(MODULE, arm, point, config, _job(plan, point), left).out_of_memory:
            ended.add(arm)

    for (variant, configs), sequences in zip(of_variants, sizes, strict=True):
        for num_sequences in sequences:
            ended = set[str]()
            for length, (arm, config) in itertools.product(plan.lengths, configs.items()):
                point = Point(length=length, num_sequences=num_sequences, swept=variant.swept)
                jobs.append(partial(cell, len(jobs) + 1, arm, config, point, ended))
    all_configs = [config for _, configs in of_variants for config in configs.values()]
    bench.devices.each(all_configs, jobs)
    if plan.longest:
        searches = [
            (variant, arm, config) for variant, configs in of_variants for arm, config in configs.items()
        ]
        tasks = [partial(_search, plan, bench, number, *one) for number, one in enumerate(searches)]
        bench.devices.each(all_configs, tasks)


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

    def cell(number: int, length: int, kernel: str) -> None:
        left = f"[{number}/{total}] "
        if kernel in ended:
            say(f"{left}{kernel}: left out, fewer tokens ran out of memory")
        elif measured(kernel, length, left).out_of_memory:
            ended.add(kernel)

    def most(number: int, kernel: str) -> None:
        mine = [cell for cell in bench.profile.cells if cell.arm == kernel]
        found = search(mine, "length", lambda size: measured(kernel, size, "search: "))
        bench.found(number, found)

    sizes = enumerate(itertools.product(plan.lengths, kernels), 1)
    with folder_lock(output, COMMAND):
        bench.devices.each([config], [partial(cell, number, *size) for number, size in sizes])
        if plan.longest:
            bench.devices.each([config], [partial(most, *one) for one in enumerate(kernels)])
        show(bench.profile, output)
    return bench.profile


def _job(plan: Plan, point: Point) -> dict[str, Any]:
    return {
        "length": point.length,
        "num_sequences": point.num_sequences,
        "rollouts": plan.rollouts,
        "budget_bytes": plan.budget_bytes,
    }


def _search(plan: Plan, bench: Bench, number: int, variant: Variant, arm: str, config: OwnRunConfig) -> None:
    """For an arm the largest size that trains; from what was measured already."""
    assert plan.longest
    what = plan.longest
    mine = [cell for cell in bench.profile.cells if (cell.arm, cell.point.swept) == (arm, variant.swept)]
    mine = _on_one_line(mine, what)
    like = mine[0].point

    def tried(size: int) -> Cell:
        sizes = {"length": like.length, "num_sequences": like.num_sequences, what: size}
        point = Point(**sizes, swept=variant.swept)
        return bench.measure(MODULE, arm, point, config, _job(plan, point), "search: ")

    pairs = what == "num_sequences" and isinstance(config.algorithm, Dpo)
    positions = shape_of(config.model).get("max_position_embeddings") if what == "length" else None
    bench.found(number, search(mine, what, tried, unit=2 if pairs else 1, most=positions))


def _on_one_line(cells: Iterable[Cell], what: str) -> list[Cell]:
    """Those that differ in `what` alone: at the smallest of the other size."""
    other = "num_sequences" if what == "length" else "length"
    cells = list(cells)
    least = min(getattr(cell.point, other) for cell in cells)
    return [cell for cell in cells if getattr(cell.point, other) == least]
