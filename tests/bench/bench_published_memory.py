"""Predicted peaks beside memory figures that others have published, as a Markdown table; no GPU is needed.

    python -m tests.bench.bench_published_memory                   # all cases: some minutes of CPU
    python -m tests.bench.bench_published_memory --only torchtitan "trl 3456"

A case is traced as `abrun memory-profile --predict` traces it: the trainer's own step on a device without
memory of its own. Models are written as config.json into a temporary folder: shapes alone count. States are
weights, gradients and AdamW's moments, in float32 or bfloat16. Figures are GiB; published GB are converted.
"""

import json
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from abrun.recipe.run import OwnRunConfig
from abrun.tools.predict.fake_device import LOGPROBS, fake_gpu
from abrun.tools.predict.probes import TracingProcesses
from abrun.trainer.kernels import linear_logprobs
from tests.bench.common import make_parser

GIB, GB = 2**30, 10**9
LOCK = threading.Lock()  # of the process, which is one fake device at a time
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151_936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 262_144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}


def qwen3(hidden: int, layers: int, heads: int, inner: int, *, tied: bool) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**QWEN3, **sizes, "intermediate_size": inner, "tie_word_embeddings": tied}


MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": qwen3(1024, 28, 16, 3072, tied=True),
    "Qwen3-1.7B": qwen3(2048, 28, 16, 6144, tied=True),
    "Qwen3-4B": qwen3(2560, 36, 32, 9728, tied=True),
    "Qwen3-8B": qwen3(4096, 36, 32, 12_288, tied=False),
    "Llama-3.1-8B": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14_336,
        "max_position_embeddings": 131_072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
}
SFT: dict[str, Any] = {"type": "sft", "batch_size": 8}
GRPO: dict[str, Any] = {"type": "grpo", "prompts_per_step": 8, "group_size": 4}
Peaks = dict[str, dict[str, int]]  # bytes by kind, at the peak of each phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One prediction of a training step."""

    model: str
    length: int
    sequences: int = 1
    gpus: int = 1
    algorithm: dict[str, Any] = field(default_factory=lambda: SFT)
    impl: str = "logits"
    recompute: str = "full"
    compiled: bool = False
    states: str = "float32"

    def peaks(self, folder: Path) -> Peaks:
        directory = folder / "models" / self.model
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(MODELS[self.model]))
        policy = {
            "dtype": "bfloat16",
            "logprobs": {"impl": self.impl},
            "activation_checkpointing": self.recompute,
            "compile": self.compiled,
        }
        config = OwnRunConfig.model_validate(
            {
                "algorithm": self.algorithm,
                "model": {"path": str(directory)},
                "policy": policy,
                "task": {"type": "arithmetic"},
                "steps": 1,
                "cluster": {"gpus_per_node": self.gpus},
            }
        )
        job = {"lengths": [self.length], "num_sequences": self.sequences, "master_dtype": self.states}
        with TracingProcesses(folder) as processes:
            (row,) = processes.do_job(Path(tempfile.mkdtemp(dir=folder)), config, job)
        return row["by_phase"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadAlone:
    """One prediction of forward and backward through the LM head and its log-probs, in bfloat16."""

    tokens: int
    hidden: int
    vocab: int
    impl: str = "logits"

    def peaks(self, folder: Path) -> Peaks:
        del folder
        with LOCK, fake_gpu(1) as allocations:
            with allocations.counting_as("inputs"):
                sizes = {"hidden": (self.tokens, self.hidden), "weight": (self.vocab, self.hidden)}
                hidden, weight = (
                    torch.randn(size, dtype=torch.bfloat16, requires_grad=True) for size in sizes.values()
                )
                target = torch.randint(self.vocab, (self.tokens,))
            allocations.reset_peak()
            with allocations.counting_as(LOGPROBS):
                logprobs, _ = linear_logprobs(hidden, weight, target, impl=self.impl)
                (-logprobs.sum()).backward()
            allocations.resolve_replacement()
            return {"backward": dict(allocations.peak_by_kind)}


def highest(peaks: Peaks) -> int:
    return max(sum(kinds.values()) for kinds in peaks.values())


def saved(peaks: Peaks) -> int:
    """Activations at the highest peak."""
    return max(peaks.values(), key=lambda kinds: sum(kinds.values()))["activations"]


def between_steps(peaks: Peaks) -> int:
    """Weights and moments, which live between steps."""
    return peaks["optimizer"]["weights"] + peaks["optimizer"]["optimizer state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A published figure, and what is predicted for its setting."""

    source: str
    setting: str
    published: str
    bytes: float | None = None  # of the published figure
    device_bytes: float | None = None  # where it is published what fits
    predictions: dict[str, Step | HeadAlone]  # by what it is called in the table
    figure: Callable[[Sequence[Peaks]], int] | None = None  # of all of them; None: the highest peak of each
    unmatched: str


def cases() -> list[Case]:
    llama: dict[str, Any] = {"model": "Llama-3.1-8B", "gpus": 8, "compiled": True}
    small: dict[str, Any] = {"length": 3072, "sequences": 4, "algorithm": GRPO}
    long: dict[str, Any] = {"model": "Qwen3-4B", "states": "bfloat16"}
    zero3: dict[str, Any] = {"model": "Qwen3-0.6B", "length": 20_480, "gpus": 8, "algorithm": GRPO}
    head: dict[str, Any] = {"tokens": 16 * 2048, "hidden": 2560, "vocab": 151_936}
    found = [
        Case(
            source="torchtitan benchmarks/llama3_h100_202412, table 1 (2024-12)",
            setting="Llama 3.1 8B, FSDP 8, 2 x 8,192 tokens, selective recompute, compiled",
            published="77.0 GiB",
            bytes=77.0 * GIB,
            predictions={
                "dense, abrun's selective": Step(**llama, length=8192, sequences=2, recompute="selective"),
                "dense, no recompute": Step(**llama, length=8192, sequences=2, recompute="none"),
            },
            unmatched="reserved instead of allocated memory; torchtitan's selective saves other operators",
        ),
        Case(
            source="torchtitan, the same, table 2",
            setting="Llama 3.1 8B, FSDP 8, 1 x 32,768 tokens, full recompute, compiled",
            published="83.9 GiB",
            bytes=83.9 * GIB,
            predictions={"dense": Step(**llama, length=32_768)},
            unmatched="reserved instead of allocated memory; float8 linear layers; compiled loss",
        ),
        Case(
            source="transformers PR 48444 (2026-09-01)",
            setting="Qwen3-8B, 131,072 tokens, full recompute: saved layer inputs alone",
            published="36 GB, by arithmetic that gives GiB",
            bytes=36 * GIB,
            predictions={
                "chunked, activations at the peak": Step(model="Qwen3-8B", length=131_072, impl="chunked")
            },
            figure=lambda peaks: saved(peaks[0]),
            unmatched="confirmed there on an H100 with smaller shapes alone",
        ),
        Case(
            source="TRL docs long_context_training.md (2026-09)",
            setting="Qwen3-4B, one 80 GB GPU, bfloat16 states: model and optimizer",
            published="22 GB",
            bytes=22 * GB,
            predictions={"weights and moments": Step(**long, length=2048)},
            figure=lambda peaks: between_steps(peaks[0]),
            unmatched="none",
        ),
        Case(
            source="TRL docs, the same",
            setting="Qwen3-4B, one 80 GB GPU, bfloat16 states, full recompute: longest sequence",
            published="32k dense fits; 128k chunked fits",
            device_bytes=80 * GB,
            predictions={
                "dense, 32,768": Step(**long, length=32_768),
                "chunked, 131,072": Step(**long, length=131_072, impl="chunked"),
            },
            unmatched="CUDA context; dtype of the logits in TRL's dense loss",
        ),
        Case(
            source="trl 4585 (2025-11-27)",
            setting="GRPO, Qwen3-0.6B, 8 A10 of 24 GB, ZeRO-3, 20,480 tokens",
            published="out of memory in the second backward pass",
            device_bytes=24 * GB,
            predictions={"dense": Step(**zero3), "chunked": Step(**zero3, impl="chunked")},
            unmatched="colocated vLLM; FSDP for ZeRO-3",
        ),
        Case(
            source="open-r1 615 (2025-04-18)",
            setting="head, 16 x 2,048 tokens, vocabulary 151,936: what a fused loss saves",
            published="46 GB",
            bytes=46 * GB,
            predictions={"dense": HeadAlone(**head), "chunked": HeadAlone(**head, impl="chunked")},
            figure=lambda peaks: highest(peaks[0]) - highest(peaks[1]),
            unmatched="dtype of the logits and hidden size are not stated (2,560 assumed)",
        ),
        Case(
            source="TRL PR 6858 (2026-08-21)",
            setting="head alone, 16,384 tokens, vocabulary 248,320, hidden size 2,048, H100",
            published="47.6 GB",
            bytes=47.6 * GB,
            predictions={"dense": HeadAlone(tokens=16_384, hidden=2048, vocab=248_320)},
            unmatched="none",
        ),
    ]
    for model, published in (("Qwen3-0.6B", 48.1), ("Qwen3-1.7B", 76.3)):
        found.insert(
            -3,
            Case(
                source="trl 3456 (2025-05-23)",
                setting=f"GRPO, {model}, 4 x 3,072 tokens, A100",
                published=f"{published} GB",
                bytes=published * GB,
                predictions={
                    "dense, full recompute": Step(model=model, **small),
                    "dense, no recompute": Step(model=model, recompute="none", **small),
                    "the same, bfloat16 states": Step(
                        model=model, recompute="none", states="bfloat16", **small
                    ),
                },
                unmatched="nvidia-smi; recompute, precision and generation are not stated",
            ),
        )
    return found


def row(case: Case, peaks: Sequence[Peaks]) -> str:
    if case.figure is not None:
        figures = {" less ".join(case.predictions): case.figure(peaks)}
    else:
        figures = dict(zip(case.predictions, map(highest, peaks), strict=True))
    published, ratio = case.published, "-"
    if case.bytes is not None:
        published += f" = {case.bytes / GIB:.1f}"
        ratio = "; ".join(f"{figure / case.bytes:.2f}" for figure in figures.values())
    if case.device_bytes is not None:
        room = f" of {case.device_bytes / GIB:.1f}"
        ratio = "; ".join("fits" if one <= case.device_bytes else "does not" for one in figures.values())
    else:
        room = ""
    predicted = "; ".join(f"{label}: {figure / GIB:.1f}{room}" for label, figure in figures.items())
    cells = [case.source, case.setting, published, predicted, ratio, case.unmatched]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="*", default=[""], help="cases with one of these in their source")
    parser.add_argument("--jobs", type=int, default=2, help="predictions at once")
    arguments = parser.parse_args()
    chosen = [case for case in cases() if any(part in case.source for part in arguments.only)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        running = [
            [pool.submit(each.peaks, Path(folder)) for each in case.predictions.values()] for case in chosen
        ]
        print("| source | setting | published, GiB | predicted, GiB | ratio | could not be matched |")
        print("|---|---|---|---|---|---|")
        for case, futures in zip(chosen, running, strict=True):
            print(row(case, [future.result() for future in futures]), flush=True)


if __name__ == "__main__":
    main()
