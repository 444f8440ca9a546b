"""Where a step's memory goes on GPUs, how long a sequence fits, and what was predicted: one table.

    python -m tests.bench.bench_memory --gpus 2                  # all parts, on two GPUs of one host
    python -m tests.bench.bench_memory --only longest 1.5b,      # these parts: one GPU is enough
    python -m tests.bench.bench_memory --gpus 2 --seconds 400    # no cell begins later than that
    python -m tests.bench.bench_memory --predict-only            # on any machine
    python -m tests.bench.bench_memory --device cpu              # the script's own logic, on a tiny model

Cells are those of `abrun memory-profile`: processes of their own, one cell after the other, a step
of two microbatches of one sequence, after one that made the optimizer's state. Random weights, bfloat16
products, float32 masters and AdamW, GRPO without a reference. Predictions run on the CPU beside them. A line
reports each cell; the table with the predictions is printed at the end, also after Ctrl-C.

    longest   the longest sequence that trains, Qwen2.5-1.5B's shape, full recompute, looked for up to 163,840
    1.5b      that shape at 8,192 tokens: four log-prob paths; no, selective (compiled) and full recompute
    8b        Qwen3-8B's shape over two GPUs
"""

import itertools
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from abrun.launch.memory.profile import FIRST_FILL_SHARE, GIB, Cell, Point, SizeLimit, search_size_limit
from abrun.recipe.run import OwnRunConfig
from abrun.tools.predict.probes import TracingProcesses, measure_cell
from tests.bench.common import heading, make_parser, markdown_row

PATHS: dict[str, dict[str, Any]] = {
    "dense": {"impl": "logits"},
    "chunked": {"impl": "chunked"},
    "triton": {"impl": "triton"},
    "one pass": {"impl": "triton", "one_pass": True},
}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "full": {"activation_checkpointing": "full"},
    "none": {"activation_checkpointing": "none"},
    "selective": {"activation_checkpointing": "selective", "compile": True},
}
MOST = 163_840  # tokens; four times what 140 GiB can hold of dense logits
BEYOND = (65_536, MOST, 2 * MOST, 4 * MOST)  # predicted, so as to tell where memory ends
SMALL: dict[str, Any] = {"preset": "qwen2.5-1.5b"}
LONG: dict[str, Any] = {**SMALL, "shape": {"max_position_embeddings": MOST}}
LARGE: dict[str, Any] = {"preset": "qwen3-8b"}
CPU_BUDGET_BYTES = GIB // 4  # where the search for the longest sequence ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A cell, or with several `lengths` the search for the longest, which begins with them."""

    part: str
    path: str
    lengths: tuple[int, ...]
    recompute: str = "full"
    model: dict[str, Any] = field(default_factory=lambda: SMALL)
    gpus: int = 1
    measured: bool = True

    @property
    def name(self) -> str:
        return ", ".join([self.part, self.path, self.recompute])

    @property
    def folder(self) -> str:
        return self.name.replace(", ", "-").replace(" ", "-")

    def config(self, device: str) -> OwnRunConfig:
        on_gpu = device == "cuda"
        policy = {"micro_batch_size": 1, "logprobs": PATHS[self.path]}
        policy |= {**RECOMPUTE[self.recompute], "dtype": "bfloat16" if on_gpu else "float32"}
        return OwnRunConfig.model_validate(
            {
                "algorithm": {"type": "grpo", "prompts_per_step": 2 * self.gpus, "group_size": 4},
                "model": self.model if on_gpu else {"preset": "qwen2-wide-vocab"},
                "policy": policy,
                "rollout": {"max_new_tokens": 64},
                "task": {"type": "arithmetic"},
                "steps": 1,
                "cluster": {"gpus_per_node" if on_gpu else "cpu_ranks": self.gpus},
            }
        )


def cases() -> list[Case]:
    """In the order in which they are begun."""
    start = (16_384, 32_768)
    found = [Case(part="longest", path=path, model=LONG, lengths=start) for path in ("triton", "dense")]
    found += [
        Case(part="1.5b", path=path, recompute=again, lengths=(8192,))
        for again in RECOMPUTE
        for path in PATHS
    ]
    found += [
        Case(part="8b", path=path, recompute=again, model=LARGE, gpus=2, lengths=(4096,))
        for again in RECOMPUTE
        for path in PATHS
    ]
    return found


def small(case: Case) -> Case | None:
    """The same on CPU cores, where there is one; None where there is none."""
    if case.path not in ("dense", "chunked") or case.recompute == "selective":
        return None
    return replace(case, lengths=(64, 256) if len(case.lengths) > 1 else (128,))


Peaks = Mapping[int, int]  # highest by length


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A case with the cells that were measured of it, and the search that they began."""

    case: Case
    cells: Sequence[Cell] = ()
    longest: SizeLimit | None = None


def predicted(case: Case, device: str, output: Path) -> Peaks:
    """Predict the highest peaks by length; of a search beyond what is measured, too."""
    lengths = list(case.lengths)
    if len(lengths) > 1 and device == "cuda":
        lengths += BEYOND
        case = replace(case, model={**SMALL, "shape": {"max_position_embeddings": BEYOND[-1]}})
    job = {"lengths": lengths, "num_sequences": 1}
    folder = output / "predicted"
    with TracingProcesses(folder) as processes:
        rows = processes.do_job(folder / case.folder, case.config(device), job)
    return {row["length"]: max(sum(kinds.values()) for kinds in row["by_phase"].values()) for row in rows}


def measured(case: Case, device: str, output: Path) -> Result:
    """Measure a case, and search from its lengths if it has several."""
    cells: list[Cell] = []

    def measure(length: int) -> Cell:
        budget_bytes = CPU_BUDGET_BYTES if device == "cpu" and len(case.lengths) > 1 else None
        job = {"length": length, "num_sequences": 1, "rollouts": False, "budget_bytes": budget_bytes}
        point = Point(length=length, num_sequences=1)
        directory = output / "cells" / f"{case.folder}-{length}"
        cell, _ = measure_cell(directory, case.folder, point, case.config(device), job)
        cells.append(cell)
        print(row(case, length, cell, None), flush=True)
        return cell

    first = [measure(length) for length in case.lengths]
    longest = None
    if len(first) > 1:
        longest = search_size_limit(first, "length", measure, max_size=MOST if device == "cuda" else 4096)
    return Result(case=case, cells=cells, longest=longest)


def row(case: Case, length: int, cell: Cell | None, expected: int | None) -> str:
    peaks = [] if cell is None else [peak for phase, peak in cell.by_phase.items() if phase != "generation"]
    ended = cell.out_of_memory if cell else None
    error = f"{expected / max(peaks) - 1:+.1%}" if peaks and expected and not ended else "-"
    note = f"out of memory in {ended}" if ended else ""
    peak = gib(max(peaks, default=None))
    return markdown_row(case.name, f"{length:,}", case.gpus, peak, gib(expected), error, note)


def table(results: Sequence[Result], predictions: Mapping[str, Future[Peaks]]) -> str:
    """Return a row for each length, and a line for each search."""
    lines = [heading("case", "tokens", "GPUs", "measured GiB", "predicted GiB", "error", "")]
    searches = []
    for result in results:
        case, prediction = result.case, predictions[result.case.name]
        peaks = {} if prediction.cancelled() or prediction.exception() else prediction.result()
        cells = {cell.point.length: cell for cell in result.cells}
        lines += [row(case, length, cells.get(length), at(peaks, length)) for length in cells or peaks]
        if longest := result.longest:
            failing = f"{longest.fails:,} do not" if longest.fails else "more were not tried"
            expected = crossing(peaks, result.cells[0].total_bytes)
            searches.append(f"{case.name}: {longest.fits or 0:,} tokens train, {failing}")
            searches[-1] += f", predicted: {expected:,}" if expected else ""
    return "\n".join([*lines, "", *searches])


def at(peaks: Peaks, length: int) -> int | None:
    """Return the peak predicted there, or on the line between two that are."""
    for low, high in itertools.pairwise(sorted(peaks)):
        if low <= length <= high:
            return peaks[low] + (length - low) * (peaks[high] - peaks[low]) // (high - low)
    return peaks.get(length)


def crossing(peaks: Peaks, capacity: int | None) -> int | None:
    """Return the length at which the peaks reach what a search fills at first, on lines between them."""
    room = FIRST_FILL_SHARE * (capacity or 0)
    for low, high in itertools.pairwise(sorted(peaks)):
        if peaks[low] <= room < peaks[high]:
            return low + int((room - peaks[low]) * (high - low) / (peaks[high] - peaks[low]))
    return None


def gib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / GIB:.2f}"


def main() -> int:
    parser = make_parser(__doc__, devices=["cuda", "cpu"])
    parser.add_argument("--only", nargs="*", help="cases whose names begin so")
    parser.add_argument("--gpus", type=int, default=1, help="parts that take more are left out")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no case begins")
    parser.add_argument("--predict-only", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("runs/bench-memory"))
    asked = parser.parse_args()
    chosen = [case for case in cases() if not asked.only or case.name.startswith(tuple(asked.only))]
    if asked.device == "cpu":
        chosen = [cpu_case for case in chosen if (cpu_case := small(case))]
    if asked.predict_only:
        chosen = [replace(case, measured=False) for case in chosen]
    chosen = [case for case in chosen if case.gpus <= asked.gpus or not case.measured]
    results, left_out, began_s = [], [], time.monotonic()
    with ThreadPoolExecutor(max_workers=max((os.cpu_count() or 1) // 3, 1)) as pool:
        predictions = {case.name: pool.submit(predicted, case, asked.device, asked.output) for case in chosen}
        for case in chosen:
            if not case.measured:
                results.append(Result(case=case))
            elif time.monotonic() - began_s > asked.seconds:
                left_out.append(case.name)
            else:
                try:
                    results.append(measured(case, asked.device, asked.output))
                except Exception as error:  # a case that fails does not end the others
                    left_out.append(f"{case.name}: {error}")
                except KeyboardInterrupt:
                    pool.shutdown(wait=False, cancel_futures=True)
                    left_out.append(case.name)
                    break
    print(table(results, predictions))
    print(f"left out: {'; '.join(left_out) or 'none'}; {time.monotonic() - began_s:.0f} s")
    return len(left_out)


if __name__ == "__main__":
    sys.exit(main())
