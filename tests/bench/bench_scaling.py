"""Weak scaling of a training step over the GPUs of one host: one table, by algorithm, layout and GPUs.

    python -m tests.bench.bench_scaling                       # all GPUs of this host, Qwen2.5-1.5B
    python -m tests.bench.bench_scaling --preset qwen3-8b     # recomputes its activations
    python -m tests.bench.bench_scaling --algorithm sft --limit 240 --output scaling.json
    python -m tests.bench.bench_scaling --only "CP 2" --gpus 8      # this layout and its one-GPU baseline
    python -m tests.bench.bench_scaling --predict-only --gpus 8 --memory h100    # on any machine
    python -m tests.bench.bench_scaling --device cpu --gpus 2       # the script's own logic, on a tiny model

Each candidate is `python -m abrun.trainer` on one set of ranks: random weights in bfloat16 products with
float32 masters, packed, Triton log-probs in one pass, nothing compiled. Every GPU has the same work whatever
the layout: 96 sequences of 512 tokens (SFT), or 8 prompts of 128 tokens with 8 completions of 64 tokens from
the torch engine (GRPO), in micro-batches of so many tokens a GPU. Seconds are those of the median of three
steps after two; one more tells how long a GPU runs kernels. Tokens/s are those of training, without
generation. Their ratio is to one GPU with the same algorithm and backend, or, where its step does not fit, to
the fewest GPUs measured. The peak is the highest of all ranks; the prediction is that of `abrun launch
--dry-run`, which has none for megatron.

Candidates on one GPU run side by side. A row is printed when it is known, the whole table at the end.
"""

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from abrun.errors import AbrunError
from abrun.launch.memory.cells import GIB
from abrun.recipe.policy import ARCHITECTURES
from abrun.recipe.run import OwnRunConfig
from abrun.tools.predict.peaks import predict_steps, query_gpus, resolve_device_memory
from tests.bench.bench_step import SHAPES, Bench, Shapes
from tests.bench.common import heading, make_model, make_parser, markdown_row

TENSOR, CONTEXT = {"tensor_parallel": 2, "sequence_parallel": True}, {"context_parallel": 2}
MEGATRON = {"type": "megatron"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "FSDP2": {"type": "dtensor"},
    "megatron": MEGATRON,  # data parallel, distributed optimizer
    "TP 2": {"type": "dtensor", **TENSOR},
    "CP 2": {"type": "dtensor", **CONTEXT},
    "megatron TP 2": {**MEGATRON, **TENSOR},
    "megatron CP 2": {**MEGATRON, **CONTEXT},
}
LEFT_OUT = ("megatron CP 2",)  # unless named
MICRO_BATCH_TOKENS = 12_288  # a GPU
LARGE_MICRO_BATCH_TOKENS = 8_192
LARGE = ("qwen3-8b",)  # too large for a step without recomputation
COMPLETION_TOKENS = {"cuda": 64, "cpu": 16}
ALGORITHMS = ("sft", "grpo")
PARTS = ("generation", "log-probs", "forward", "optimizer")  # seconds of their own; the rest is `else`
HEADER = (
    *("algorithm", "layout", "GPUs", "tokens/s a GPU", "of one GPU", "s a step"),
    *("generation", "log-probs", "forward, backward", "optimizer", "else", "busy"),
    *("peak GiB", "predicted GiB", "error", "took s", ""),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One algorithm with one layout on a number of GPUs."""

    algorithm: str
    layout: str
    gpus: int

    @property
    def backend(self) -> dict[str, Any]:
        return LAYOUTS[self.layout]

    @property
    def replica(self) -> int:
        """GPUs that share a sequence or a weight matrix."""
        return self.backend.get("tensor_parallel", 1) * self.backend.get("context_parallel", 1)

    @property
    def name(self) -> str:
        return f"{self.algorithm}-{self.layout}-{self.gpus}".replace(" ", "-")

    @property
    def family(self) -> tuple[str, str]:
        """Candidates whose tokens/s are compared."""
        return self.algorithm, self.backend["type"]


@dataclass(slots=True, kw_only=True)
class Row:
    """What became of a candidate."""

    candidate: Candidate
    figures: dict[str, Any] | None = None  # as printed by step_abrun
    predicted_bytes: int | None = None
    note: str = ""
    took_s: float = 0.0

    @property
    def training_s(self) -> float:
        assert self.figures is not None
        return self.figures["step"] - self.figures["parts"].get("generation", 0.0)

    @property
    def rate(self) -> float:
        """Tokens a second and GPU, without generation."""
        assert self.figures is not None
        return self.figures["tokens"] / self.candidate.gpus / self.training_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Common to all candidates."""

    device: str
    preset: str
    shapes: Shapes
    work: Path
    overrides: Sequence[str] = ()

    def bench(self, candidate: Candidate, *, limit_s: float, env: Mapping[str, str]) -> Bench:
        """Return the candidate's bench, whose folder has its texts."""
        work = self.work / candidate.name
        work.mkdir(exist_ok=True)
        bench = Bench(
            algorithm=candidate.algorithm,
            device=self.device,
            gpus=candidate.gpus,
            shapes=self.shapes,
            overrides=[*self._overrides(candidate), *self.overrides],
            limit_s=limit_s,
            work=work,
            env=env,
        )
        bench.write_texts("one")
        return bench

    def _overrides(self, candidate: Candidate) -> list[str]:
        on_gpu, large = self.device == "cuda", self.preset in LARGE
        tokens = (LARGE_MICRO_BATCH_TOKENS if large else MICRO_BATCH_TOKENS) if on_gpu else 64
        return [
            f"model.path={json.dumps(str(self.work / 'model'))}",
            f"policy.backend={json.dumps(candidate.backend)}",
            "policy.compile=false",
            "policy.share_prompts=false",
            f"policy.activation_checkpointing={'full' if large else 'none'}",
            f"policy.micro_batch_tokens={tokens * candidate.replica}",
            "rollout.engine=torch",
        ]

    def predict(self, candidate: Candidate, device_bytes: int) -> int:
        """Return the highest predicted peak. Raises AbrunError if there is no prediction."""
        tree = self.bench(candidate, limit_s=0, env={}).tree("all on")
        tree["model"] = {"preset": self.preset, "shape": {"vocab_size": self.shapes.vocab_size}}
        config = OwnRunConfig.model_validate(tree)
        return predict_steps({candidate.name: config}, device_bytes)[0].training_bytes


def make_candidates(algorithms: Iterable[str], layouts: Iterable[str], gpus: int) -> list[Candidate]:
    """Return the candidates in launch order, each layout from its fewest GPUs on."""
    candidates = [
        Candidate(algorithm=algorithm, layout=layout, gpus=count)
        for algorithm in algorithms
        for count in (1, 2, 4, 8)
        for layout in layouts
        if count <= gpus
    ]
    return [candidate for candidate in candidates if candidate.gpus % candidate.replica == 0]


def with_baselines(layouts: Sequence[str]) -> list[str]:
    """Return the layouts with the data-parallel one of each of their backends."""
    types = {LAYOUTS[layout]["type"] for layout in layouts}
    baselines = {"dtensor": "FSDP2", "megatron": "megatron"}
    chosen = {*layouts, *(baselines[backend] for backend in types)}
    return [layout for layout in LAYOUTS if layout in chosen]


@dataclass(slots=True)
class GpuPool:
    """GPUs of this host that no candidate uses; candidates on several GPUs run alone."""

    total: int
    _free: list[int] = field(init=False)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self._free = list(range(self.total))

    def take(self, count: int) -> list[int]:
        with self._changed:
            needed = count if count == 1 else self.total
            self._changed.wait_for(lambda: len(self._free) >= needed)
            taken, self._free = self._free[:count], self._free[count:]
            return taken

    def put_back(self, gpus: Sequence[int]) -> None:
        with self._changed:
            self._free = sorted([*self._free, *gpus])
            self._changed.notify_all()


def measure(settings: Settings, candidate: Candidate, gpus: Sequence[int], limit_s: float) -> Row:
    """Run a candidate on these GPUs; an error becomes its note."""
    row, began_s = Row(candidate=candidate), time.monotonic()
    env = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if settings.device == "cuda" else {}
    try:
        row.figures = settings.bench(candidate, limit_s=limit_s, env=env).of_abrun("all on")
        row.note = row.figures["note"]
    except (RuntimeError, ValueError, AbrunError) as error:  # the others go on
        row.note = " ".join(str(error).split())
    row.took_s = time.monotonic() - began_s
    return row


def find_baseline(row: Row, rows: Iterable[Row]) -> Row | None:
    """Return the measured row of the same algorithm and backend with the fewest GPUs, in launch order."""
    family = [other for other in rows if other.figures and other.candidate.family == row.candidate.family]
    return min(family, key=lambda other: other.candidate.gpus, default=None)


def as_json(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    """Return a row's figures; None where there is none."""
    candidate, figures = row.candidate, row.figures
    record: dict[str, Any] = {
        "algorithm": candidate.algorithm,
        "layout": candidate.layout,
        "gpus": candidate.gpus,
        "predicted_bytes": row.predicted_bytes,
        "took_s": round(row.took_s, 1),
        "note": row.note,
    }
    if figures is None:
        return record
    baseline = find_baseline(row, rows) or row
    parts = {name: figures["parts"].get(name, 0.0) for name in PARTS}
    return record | {
        "tokens_per_s_per_gpu": row.rate,
        "ratio": row.rate / baseline.rate,
        "ratio_to_gpus": baseline.candidate.gpus,
        "step_s": figures["step"],
        "parts_s": parts | {"else": figures["step"] - sum(parts.values())},
        "busy_share": sum(figures["busy"].values()) / sum(figures["last"].values())
        if figures["busy"]
        else None,
        "peak_bytes": figures["peak"] or None,
    }


def markdown(record: Mapping[str, Any]) -> str:
    peak, predicted = record.get("peak_bytes"), record["predicted_bytes"]
    sizes = [
        f"{peak / GIB:.1f}" if peak else "-",
        f"{predicted / GIB:.1f}" if predicted else "-",
        f"{predicted / peak - 1:+.1%}" if peak and predicted else "-",
    ]
    place = [record["algorithm"], record["layout"], record["gpus"]]
    end = [*sizes, f"{record['took_s']:.0f}", record["note"]]
    if "step_s" not in record:
        return markdown_row(*place, *["-"] * (len(HEADER) - len(place) - len(end)), *end)
    base = record["ratio_to_gpus"]
    busy = record["busy_share"]
    return markdown_row(
        *place,
        f"{record['tokens_per_s_per_gpu']:,.0f}",
        f"{record['ratio']:.3f}" + (f" (of {base} GPUs)" if base > 1 else ""),
        f"{record['step_s']:.3f}",
        *(f"{seconds:.3f}" for seconds in record["parts_s"].values()),
        "-" if busy is None else f"{busy:.2f}",
        *end,
    )


class Predictions:
    """Predictions of all candidates, made on CPU cores while the GPUs measure."""

    def __init__(self, settings: Settings, candidates: Sequence[Candidate], device_bytes: int | None) -> None:
        self._pool = ThreadPoolExecutor(max_workers=max((os.cpu_count() or 1) // 4, 1))
        self._futures: dict[Candidate, Future[int]] = {}
        if device_bytes is not None:
            self._futures = {
                candidate: self._pool.submit(settings.predict, candidate, device_bytes)
                for candidate in candidates
            }

    def add_to(self, row: Row, *, wait_s: float = 0.0) -> None:
        """Write the prediction, or why there is none, into a row, if it is known by then."""
        future = self._futures.get(row.candidate)
        if future is None or row.predicted_bytes is not None:
            return
        wait([future], timeout=wait_s)
        if not future.done():
            return
        error = future.exception()
        if isinstance(error, AbrunError) and "whose memory cannot be predicted" in str(error):
            return
        if isinstance(error, AbrunError):
            reason = f"no prediction: {' '.join(str(error).split())}"
            row.note = row.note if reason in row.note else "; ".join(filter(None, [row.note, reason]))
        elif error is not None:
            raise error
        else:
            row.predicted_bytes = future.result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def measure_all(
    settings: Settings,
    candidates: Sequence[Candidate],
    predictions: Predictions,
    gpus: int,
    deadline_s: float,
) -> list[Row]:
    """Measure the candidates in order until the deadline, and print each row when it is known."""
    rows: list[Row] = []
    pool, printing = GpuPool(gpus), threading.Lock()

    def finish(candidate: Candidate, taken: Sequence[int]) -> None:
        row = measure(settings, candidate, taken, deadline_s - time.monotonic())
        pool.put_back(taken)
        with printing:
            rows.append(row)
            predictions.add_to(row)
            print(markdown(as_json(row, rows)), flush=True)

    print(heading(*HEADER), flush=True)
    with ThreadPoolExecutor(max_workers=gpus) as threads:
        for candidate in candidates:
            taken = pool.take(candidate.gpus)
            shortest_s = min((row.took_s for row in rows if row.figures), default=0.0)
            if deadline_s - time.monotonic() < shortest_s:
                pool.put_back(taken)
                rows.append(Row(candidate=candidate, note="not begun: --limit"))
                continue
            threads.submit(finish, candidate, taken)
    return [row for candidate in candidates for row in rows if row.candidate == candidate]


def main() -> int:
    parser = make_parser(__doc__, devices=list(SHAPES))
    parser.add_argument("--algorithm", nargs="*", choices=ALGORITHMS, default=ALGORITHMS)
    parser.add_argument("--only", nargs="*", choices=list(LAYOUTS), help="these layouts and their baselines")
    parser.add_argument("--gpus", type=int, help="use so many [default: those of this host; CPU: 2]")
    parser.add_argument("--preset", choices=list(ARCHITECTURES), help="another architecture")
    parser.add_argument("--set", action="append", default=[], help="key=value for all candidates")
    parser.add_argument("--limit", type=float, default=3600, help="seconds of all candidates together")
    parser.add_argument("--predict-only", action="store_true", help="predicted peaks alone, on any machine")
    parser.add_argument("--memory", help="of a GPU to predict for, such as 80GiB or h200")
    parser.add_argument("--output", type=Path, help="JSON file of the rows")
    asked = parser.parse_args()
    deadline_s = time.monotonic() + asked.limit
    on_gpu = asked.device == "cuda"
    cards = query_gpus("name,driver_version,memory.total") if on_gpu else []
    host_gpus = len(cards) if on_gpu else 2
    gpus = asked.gpus or host_gpus
    if on_gpu and not asked.predict_only:
        gpus = min(gpus, host_gpus)
    if gpus < 1:
        parser.error("no GPU to use; add --device cpu, or --predict-only --gpus N --memory SIZE")
    shapes = replace(SHAPES[asked.device], completion_tokens=COMPLETION_TOKENS[asked.device])
    shapes = replace(shapes, preset=asked.preset or shapes.preset)
    layouts = with_baselines(asked.only or [layout for layout in LAYOUTS if layout not in LEFT_OUT])
    candidates = make_candidates(asked.algorithm, layouts, gpus)
    left_out = [count for count in (1, 2, 4, 8) if count > gpus]
    try:
        device_bytes = resolve_device_memory(asked.memory) if on_gpu else None
    except AbrunError as error:
        parser.error(f"--memory: {error}")
    if asked.predict_only and device_bytes is None:
        parser.error("--predict-only has no device to predict for; add --memory SIZE, without --device cpu")
    with tempfile.TemporaryDirectory() as work:
        settings = Settings(
            device=asked.device, preset=shapes.preset, shapes=shapes, work=Path(work), overrides=asked.set
        )
        print(f"{shapes.preset}, {asked.device} x {gpus}: {'; '.join(cards) or asked.memory or ''}")
        print(f"GPUs left out, this host has fewer: {', '.join(map(str, left_out)) or 'none'}\n", flush=True)
        predictions = Predictions(settings, candidates, device_bytes)
        if asked.predict_only:
            rows = [Row(candidate=candidate) for candidate in candidates]
        else:
            make_model(shapes.preset, Path(work) / "model", asked.device, vocab_size=shapes.vocab_size)
            rows = measure_all(settings, candidates, predictions, gpus, deadline_s)
        for row in rows:
            predictions.add_to(row, wait_s=max(deadline_s - time.monotonic(), 0.0))
        records = [as_json(row, rows) for row in rows]
        print("\n".join(["", heading(*HEADER), *map(markdown, records)]), flush=True)
        if asked.output:
            table = {"cards": cards, "preset": shapes.preset, "rows": records}
            asked.output.write_text(json.dumps(table, indent=1))
        predictions.close()
    return sum(row.figures is None for row in rows) if not asked.predict_only else 0


if __name__ == "__main__":
    sys.exit(main())
