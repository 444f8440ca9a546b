"""Where a step's memory goes on GPUs, how long a sequence fits, and what was predicted: one table.

    python tests/bench/bench_memory.py --gpus 2                  # all parts, on two GPUs of one host
    python tests/bench/bench_memory.py --only longest 1.5b,      # these parts: one GPU is enough
    python tests/bench/bench_memory.py --gpus 2 --seconds 400    # no cell begins later than that
    python tests/bench/bench_memory.py --predict-only            # on any machine
    python tests/bench/bench_memory.py --device cpu              # the script's own logic, on a tiny model

Cells are those of `abrun memory-profile`: processes of their own, one cell after the other, a step
of two microbatches of one sequence, after one that made the optimizer's state. Random weights, bfloat16
products, float32 masters and AdamW, GRPO without a reference. Predictions run on the CPU beside them. A line
says what a cell gave as soon as it is there; table.md and peaks.json in --output have all so far.

    longest   the longest sequence that trains, Qwen2.5-1.5B's shape, full recompute, looked for up to 163,840
    1.5b      that shape at 8,192 tokens: four log-prob paths; no, selective (compiled) and full recompute
    vllm      that shape beside a colocated vLLM that sleeps while it trains, and without one
    8b        Qwen3-8B's shape over two GPUs
    head      a vocabulary of 131,072 over two GPUs by tensor parallelism, two sequences of 32,768 tokens, 8
              of 8B's layers; predicted for all of its layers on four GPUs
    context   GPUs of 24 GiB: what two train with context parallelism, and what with data parallelism
    paths     `longest` of the paths that it leaves out
"""

import argparse
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from abrun.experiment.probe import probe_alone
from abrun.memory.cells import Cell, Longest, Point
from abrun.memory.profile import MODULE, Bench
from abrun.memory.search import SPARE, search
from abrun.recipe.run import OwnRunConfig

GIB = 2**30
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
WIDE: dict[str, Any] = {**LARGE, "shape": {"vocab_size": 131_072}}
WIDE_8: dict[str, Any] = {**LARGE, "shape": {"vocab_size": 131_072, "num_hidden_layers": 8}}
TENSOR: dict[str, Any] = {"type": "dtensor", "sequence_parallel": True}
CARD_GIB = 24  # of the smaller GPUs that `context` stands for


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A cell, or with several `lengths` the search for the longest, which begins with them."""

    part: str
    path: str
    lengths: tuple[int, ...]
    recompute: str = "full"
    model: dict[str, Any] = field(default_factory=lambda: SMALL)
    sequences: int = 1
    gpus: int = 1
    backend: dict[str, Any] = field(default_factory=dict)
    engine: str | None = None  # that samples, before the step
    budget_gib: float | None = None
    measured: bool = True

    @property
    def name(self) -> str:
        layout = [f"{key.split('_')[0]} {size}" for key, size in self.backend.items() if type(size) is int]
        return ", ".join([self.part, self.path, self.recompute, *layout, *filter(None, [self.engine])])

    @property
    def folder(self) -> str:
        return self.name.replace(", ", "-").replace(" ", "-")

    def config(self, device: str) -> OwnRunConfig:
        on_gpu = device == "cuda"
        policy = {"micro_batch_size": self.sequences, "logprobs": PATHS[self.path]}
        policy |= {**RECOMPUTE[self.recompute], "dtype": "bfloat16" if on_gpu else "float32"}
        policy |= {"backend": self.backend} if self.backend else {}
        rollout: dict[str, Any] = {"max_new_tokens": 64}
        if self.engine == "vllm":
            rollout |= {"engine": "vllm", "gpu_memory_utilization": 0.3}
        return OwnRunConfig.model_validate(
            {
                "algorithm": {"type": "grpo", "prompts_per_step": 2 * self.gpus, "group_size": 4},
                "model": self.model if on_gpu else {"preset": "qwen2-wide-vocab"},
                "policy": policy,
                "rollout": rollout,
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
        Case(part="vllm", path="triton", lengths=(8192,), engine=engine) for engine in ("vllm", "torch")
    ]
    found += [
        Case(part="8b", path=path, recompute=again, model=LARGE, gpus=2, lengths=(4096,))
        for again in RECOMPUTE
        for path in PATHS
    ]
    wide: dict[str, Any] = {"part": "head", "lengths": (32_768,), "sequences": 2}
    for path in PATHS:
        halves, quarters = TENSOR | {"tensor_parallel": 2}, TENSOR | {"tensor_parallel": 4}
        found.append(Case(path=path, model=WIDE_8, gpus=2, backend=halves, **wide))
        found.append(Case(path=path, model=WIDE, gpus=4, backend=quarters, measured=False, **wide))
    for size in (2, 1):
        cut = {"type": "dtensor", "context_parallel": size}
        capped: dict[str, Any] = {"model": LONG, "gpus": 2, "backend": cut, "budget_gib": CARD_GIB}
        found.append(Case(part="context", path="triton", lengths=(65_536,), **capped))
    found += [Case(part="paths", path=path, model=LONG, lengths=start) for path in ("one pass", "chunked")]
    return found


def small(case: Case) -> Case | None:
    """The same on CPU cores, where there is one; None where there is none."""
    if case.path not in ("dense", "chunked") or case.recompute == "selective" or case.engine == "vllm":
        return None
    if "tensor_parallel" in case.backend or not case.measured:
        return None
    lengths = (64, 256) if len(case.lengths) > 1 else (128,)
    budget = 0.25 if len(case.lengths) > 1 else None
    return replace(case, lengths=lengths, budget_gib=budget, sequences=1)


class Run:
    """Measures and predicts cases; prints each as it is there, and writes all so far."""

    def __init__(self, output: Path, device: str, deadline_s: float) -> None:
        self._output, self._device = output, device
        self._started, self._deadline_s = time.monotonic(), deadline_s
        self.bench = Bench("bench-memory", output, lambda line: None)
        self._lines: dict[tuple[str, int], str] = {}
        self._longest: list[tuple[str, Longest, Callable[[], int | None]]] = []
        self._lock = threading.Lock()
        self.left_out: list[str] = []

    def predicted(self, case: Case) -> dict[int, int]:
        """The highest peak by length; of a search beyond what is measured, too."""
        lengths, on_gpu = list(case.lengths), self._device == "cuda"
        if len(lengths) > 1 and on_gpu:
            lengths += BEYOND
            case = replace(case, model={**SMALL, "shape": {"max_position_embeddings": BEYOND[-1]}})
        config = case.config(self._device)
        job = {"lengths": lengths, "num_sequences": case.sequences}
        folder = self._output / "predicted" / case.folder
        rows = probe_alone("abrun.memory.trace", folder, config, job)
        return {row["length"]: max(sum(kinds.values()) for kinds in row["by_phase"].values()) for row in rows}

    def do(self, case: Case, prediction: Future[dict[int, int]]) -> None:
        try:
            if not case.measured:
                for length in (*case.lengths, *(BEYOND if len(case.lengths) > 1 else ())):
                    self._say(case, length, None, prediction)
                return
            if time.monotonic() - self._started > self._deadline_s:
                self.left_out.append(case.name)
                return
            cells = [self._cell(case, length, prediction) for length in case.lengths]
            if len(cells) > 1:
                self._search(case, cells, prediction)
        except Exception as error:  # one case does not end the others
            self.left_out.append(f"{case.name}: {error}")
            print(f"{case.name}: {error}", *self._logged(f"cells/*-{case.folder}"), sep="\n   ", flush=True)

    def _logged(self, folder: str) -> list[str]:
        """The last lines that a cell or a prediction has printed."""
        logs = sorted(self._output.glob(f"{folder}/output.log"))
        return logs[-1].read_text(errors="replace").strip().splitlines()[-3:] if logs else []

    def _cell(self, case: Case, length: int, prediction: Future[dict[int, int]]) -> Cell:
        job = {
            "length": length,
            "num_sequences": case.sequences,
            "rollouts": case.engine is not None,
            "budget_bytes": None if case.budget_gib is None else int(case.budget_gib * GIB),
        }
        point = Point(length=length, num_sequences=case.sequences, swept=(("case", case.name),))
        cell = self.bench.measure(MODULE, case.folder, point, case.config(self._device), job)
        self._say(case, length, cell, prediction)
        return cell

    def _search(self, case: Case, cells: list[Cell], prediction: Future[dict[int, int]]) -> None:
        most = MOST if self._device == "cuda" else 4096
        tried: Callable[[int], Cell] = lambda size: self._cell(case, size, prediction)  # noqa: E731
        found = search(cells, "length", tried, most=most)
        capacity = cells[0].total_bytes

        def expected() -> int | None:
            return crossing(prediction.result(), capacity) if came(prediction) else None

        with self._lock:
            self._longest.append((case.name, found, expected))
            self.write()
        print(self.longest()[-1], flush=True)

    def _say(self, case: Case, length: int, cell: Cell | None, prediction: Future[dict[int, int]]) -> None:
        """A row of the table now, and again once the prediction is there."""

        def row(_: object = None) -> None:
            found = None if cell is None else max(trained(cell).values(), default=0)
            expected = at(prediction.result(), length) if came(prediction) else None
            ended = cell.out_of_memory if cell else None
            error = f"{expected / found - 1:+.1%}" if found and expected and not ended else "-"
            notes = [f"out of memory in {ended}"] if ended else []
            if cell and case.engine:
                notes += [f"device in use, {doing}: {gib(used)}" for doing, used in cell.device_used.items()]
            if prediction.done() and prediction.exception():
                notes.append(f"no prediction: {' '.join(self._logged(f'predicted/{case.folder}'))}")
            place = [case.name, f"{case.sequences} x {length:,}", str(case.gpus)]
            line = f"| {' | '.join([*place, gib(found), gib(expected), error, '; '.join(notes)])} |"
            with self._lock:
                self._lines[case.name, length] = line
                self.write()
            print(f"{time.monotonic() - self._started:4.0f} s {line}", flush=True)

        if cell and not prediction.done():
            row()
        prediction.add_done_callback(row)

    def table(self) -> str:
        heads = ["case", "tokens", "GPUs", "measured GiB", "predicted GiB", "error", ""]
        lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *self._lines.values(), ""]
        return "\n".join(lines + self.longest())

    def longest(self) -> list[str]:
        base = next((found.fits for name, found, _ in self._longest if "dense" in name), None)
        lines = []
        for name, found, expected in self._longest:
            said = [f"{found.fits or 0:,} tokens train"]
            said.append(f"{found.fails:,} do not" if found.fails else "more were not tried")
            said += [f"predicted: {expected():,}"] if expected() else []
            said += [f"{found.fits / base:.2f} x dense"] if found.fits and base else []
            lines.append(f"{name}: {', '.join(said)}")
        return lines

    def write(self) -> None:
        self._output.mkdir(parents=True, exist_ok=True)
        (self._output / "table.md").write_text(self.table() + "\n")


def came(prediction: Future[dict[int, int]]) -> bool:
    return prediction.done() and prediction.exception() is None


def trained(cell: Cell) -> dict[str, int]:
    """Peaks of the phases that are predicted."""
    return {phase: peak for phase, peak in cell.by_phase.items() if phase != "generation"}


def at(peaks: dict[int, int], length: int) -> int | None:
    """What is predicted there, or lies on the line between two that are."""
    for low, high in itertools.pairwise(sorted(peaks)):
        if low <= length <= high:
            return peaks[low] + (length - low) * (peaks[high] - peaks[low]) // (high - low)
    return peaks.get(length)


def crossing(peaks: dict[int, int], capacity: int | None) -> int | None:
    """Where the peaks reach what a search fills at first, on straight lines between them."""
    if capacity is None:
        return None
    sizes = sorted(peaks)
    for low, high in itertools.pairwise(sizes):
        if peaks[low] <= SPARE * capacity < peaks[high]:
            return low + int((SPARE * capacity - peaks[low]) * (high - low) / (peaks[high] - peaks[low]))
    return None


def gib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / GIB:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="*", help="cases whose names begin so")
    parser.add_argument("--gpus", type=int, default=1, help="parts that take more are left out")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no cell begins")
    parser.add_argument("--predict-only", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("runs/bench-memory"))
    asked = parser.parse_args()
    chosen = [case for case in cases() if not asked.only or case.name.startswith(tuple(asked.only))]
    if asked.device == "cpu":
        chosen = [one for case in chosen if (one := small(case))]
    else:
        chosen = [
            case for case in chosen if case.gpus <= asked.gpus or not case.measured or asked.predict_only
        ]
    if asked.predict_only:
        chosen = [replace(case, measured=False) for case in chosen]
    run = Run(asked.output, asked.device, asked.seconds)
    with ThreadPoolExecutor(max_workers=max((os.cpu_count() or 1) // 3, 1)) as beside:
        predictions = [beside.submit(run.predicted, case) for case in chosen]
        try:
            for case, prediction in zip(chosen, predictions, strict=True):
                run.do(case, prediction)
        except KeyboardInterrupt:
            run.left_out.append("what was under way")
            beside.shutdown(wait=False, cancel_futures=True)
    print(run.table())
    print(f"left out: {'; '.join(run.left_out) or 'none'}; {time.monotonic() - run._started:.0f} s")
    return len(run.left_out)


if __name__ == "__main__":
    sys.exit(main())
