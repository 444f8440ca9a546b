"""Weak scaling of a training step over the GPUs of one host: one table, by algorithm, layout and GPUs.

    python -m tests.bench.bench_scaling --algorithm sft       # all GPUs of this host, Qwen2.5-1.5B
    python -m tests.bench.bench_scaling --only "CP 2" --gpus 8
    python -m tests.bench.bench_scaling --algorithm sft --sequences 1 --length 16384 \\
        --set policy.activation_checkpointing=full            # one long sequence a GPU
    python -m tests.bench.bench_scaling --device cpu          # the script's own logic, on a tiny model

Each candidate is `python -m abrun.trainer` on one set of ranks: random weights in bfloat16 products with
float32 masters, packed, Triton log-probs in one pass, nothing compiled or recomputed. Every GPU has the same
work whatever the layout: 96 sequences of 512 tokens (SFT), or 8 prompts of 128 tokens with 8 completions of
64 tokens from the torch engine (GRPO), in micro-batches of 12,288 tokens a GPU. Seconds are those of the
median of three steps after two; one more tells how long a GPU runs kernels. Tokens/s are those of training,
without generation. Their ratio is to the fewest GPUs measured with the same algorithm and backend. The peak
is the highest of all ranks; the prediction is that of `abrun launch --dry-run`, which has none for megatron.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from abrun.errors import AbrunError
from abrun.launch.memory.profile import GIB
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
MICRO_BATCH_TOKENS = {"cuda": 12_288, "cpu": 64}  # a GPU
COMPLETION_TOKENS = {"cuda": 64, "cpu": 16}
ALGORITHMS = ("sft", "grpo")
PARTS = ("generation", "log-probs", "forward", "optimizer")  # seconds of their own; the rest is `else`
HEADER = (
    *("algorithm", "layout", "GPUs", "tokens/s a GPU", "ratio", "s a step"),
    *("generation", "log-probs", "forward, backward", "optimizer", "else", "busy"),
    *("peak GiB", "predicted GiB", "error", ""),
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

    def bench(self, device: str, shapes: Shapes, model: Path, limit_s: float, sets: Sequence[str]) -> Bench:
        """Return its bench, in a folder that has its texts."""
        overrides = [
            f"model.path={json.dumps(str(model))}",
            f"policy.backend={json.dumps(self.backend)}",
            "policy.compile=false",
            "policy.share_prompts=false",
            f"policy.micro_batch_tokens={MICRO_BATCH_TOKENS[device] * self.replica}",
            "rollout.engine=torch",
            *sets,
        ]
        bench = Bench(
            algorithm=self.algorithm,
            device=device,
            gpus=self.gpus,
            shapes=shapes,
            overrides=overrides,
            limit_s=limit_s,
            work=Path(tempfile.mkdtemp(dir=model.parent)),
        )
        bench.write_texts("one")
        return bench

    def predict(self, bench: Bench, device_bytes: int) -> int:
        """Return the highest predicted peak. Raises AbrunError if there is no prediction."""
        tree = bench.tree("all on")
        tree["model"] = {"preset": bench.shapes.preset, "shape": {"vocab_size": bench.shapes.vocab_size}}
        config = OwnRunConfig.model_validate(tree)
        return predict_steps({self.layout: config}, device_bytes)[0].training_bytes


def training_pace(candidate: Candidate, figures: Mapping[str, Any]) -> float:
    """Return the tokens a second and GPU, without generation."""
    training_s = figures["step"] - figures["parts"].get("generation", 0.0)
    return figures["tokens"] / candidate.gpus / training_s


def row(candidate: Candidate, figures: Mapping[str, Any], baseline_pace: float, predicted: int | None) -> str:
    pace, peak, busy = training_pace(candidate, figures), figures["peak"], figures["busy"]
    parts = [figures["parts"].get(name, 0.0) for name in PARTS]
    return markdown_row(
        *(candidate.algorithm, candidate.layout, candidate.gpus),
        f"{pace:,.0f}",
        f"{pace / baseline_pace:.3f}",
        *(f"{seconds:.3f}" for seconds in (figures["step"], *parts, figures["step"] - sum(parts))),
        f"{sum(busy.values()) / sum(figures['last'].values()):.2f}" if busy else "-",
        f"{peak / GIB:.1f}" if peak else "-",
        f"{predicted / GIB:.1f}" if predicted else "-",
        f"{predicted / peak - 1:+.1%}" if peak and predicted else "-",
        figures["note"],
    )


def main() -> None:
    parser = make_parser(__doc__, devices=list(SHAPES))
    parser.add_argument("--algorithm", nargs="*", choices=ALGORITHMS, default=ALGORITHMS)
    parser.add_argument("--only", nargs="*", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--gpus", type=int, help="use so many [default: those of this host; CPU: 2]")
    parser.add_argument("--sequences", type=int, help="of SFT, a GPU")
    parser.add_argument("--length", type=int, help="of SFT's sequences, in tokens")
    parser.add_argument("--set", action="append", default=[], help="key=value for all candidates")
    parser.add_argument("--limit", type=float, default=600, help="seconds of a candidate")
    asked = parser.parse_args()
    cards = query_gpus("name,driver_version,memory.total") if asked.device == "cuda" else []
    gpus = asked.gpus or (len(cards) if asked.device == "cuda" else 2)
    device_bytes = resolve_device_memory(None) if asked.device == "cuda" else None
    given = {"sequences": asked.sequences, "length": asked.length}
    given["completion_tokens"] = COMPLETION_TOKENS[asked.device]
    shapes = replace(SHAPES[asked.device], **{key: value for key, value in given.items() if value})
    candidates = [
        Candidate(algorithm=algorithm, layout=layout, gpus=count)
        for algorithm in asked.algorithm
        for count in (1, 2, 4, 8)
        for layout in LAYOUTS
        if count <= gpus and layout in asked.only
    ]
    print(
        f"{shapes.preset}, {asked.device} x {gpus}: {'; '.join(cards)}",
        heading(*HEADER),
        sep="\n",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as work:
        model = Path(work) / "model"
        make_model(shapes.preset, model, asked.device, vocab_size=shapes.vocab_size)
        paces: dict[tuple[str, str], float] = {}  # of the fewest GPUs, by algorithm and backend
        for candidate in candidates:
            if candidate.gpus % candidate.replica:
                continue
            bench = candidate.bench(asked.device, shapes, model, asked.limit, asked.set)
            predicted = None
            try:
                if device_bytes and candidate.backend["type"] == "dtensor":
                    predicted = candidate.predict(bench, device_bytes)
                figures = bench.of_abrun("all on")
            except (RuntimeError, ValueError, AbrunError) as error:  # the others go on
                print(f"{candidate.algorithm}, {candidate.layout}, {candidate.gpus}: {error}", flush=True)
                continue
            pace = training_pace(candidate, figures)
            baseline_pace = paces.setdefault((candidate.algorithm, candidate.backend["type"]), pace)
            print(row(candidate, figures, baseline_pace, predicted), flush=True)


if __name__ == "__main__":
    main()
