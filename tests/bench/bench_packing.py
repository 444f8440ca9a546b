"""What sequence packing saves: the same sequences padded and packed, time and peak memory of a training step.

    python tests/bench/bench_packing.py                    # one GPU, Qwen2.5-1.5B's architecture in bfloat16
    python tests/bench/bench_packing.py --device cpu       # the script's own logic, on a tiny model

Completions of real rollouts differ in length: here they are drawn from a log-normal distribution, and padded
rows are as long as the longest of their microbatch. All candidates get the same sequences and take turns;
the figures are medians over the rounds. "padded, 8 rows" holds at most as many tokens a microbatch as
"packed" does, so both fit the same memory.
"""

import argparse
import copy
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from abrun.backends.dtensor import DtensorBackend
from abrun.backends.ranks import make_ranks
from abrun.models import load_network
from abrun.recipe.policy import Model, Policy
from abrun.rl.batch import Sequences, collate, sequence_lengths
from abrun.train.sft import SupervisedObjective


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    preset: str
    num_sequences: int
    prompt_length: int
    median_length: int
    longest: int
    rounds: int


SHAPES = {
    "cuda": Shapes(
        preset="qwen2.5-1.5b", num_sequences=64, prompt_length=128, median_length=400, longest=4096, rounds=3
    ),
    "cpu": Shapes(
        preset="qwen2-tiny", num_sequences=16, prompt_length=8, median_length=40, longest=200, rounds=2
    ),
}


def some_sequences(shapes: Shapes) -> Sequences:
    generator = torch.Generator().manual_seed(0)
    lengths = shapes.median_length * torch.randn(shapes.num_sequences, generator=generator).exp()
    lengths = lengths.clamp(1, shapes.longest - shapes.prompt_length).long().tolist()

    def tokens(length: int) -> list[int]:
        return torch.randint(3, 90, (length,), generator=generator).tolist()

    prompts = [tokens(shapes.prompt_length) for _ in lengths]
    return collate(prompts, [tokens(length) for length in lengths], pad_id=0)


def step(backend: DtensorBackend, batch: Sequences) -> tuple[float, int]:
    """Seconds and peak bytes of one pass over the batch, forward and backward."""
    on_gpu = backend.ranks.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    backend.forward_backward(batch, SupervisedObjective(num_tokens=float(batch.token_mask.sum())))
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    for parameter in backend.module.parameters():
        parameter.grad = None
    return seconds, torch.cuda.max_memory_allocated() if on_gpu else 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=list(SHAPES), default="cuda")
    device = torch.device(parser.parse_args().device)
    shapes = SHAPES[device.type]
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", store=HashStore(), rank=0, world_size=1
    )
    batch = some_sequences(shapes).to(device)
    real = int(sequence_lengths(batch.token_mask).sum())
    budget = 8 * shapes.longest
    candidates: dict[str, dict[str, Any]] = {
        "padded, 1 row": {"micro_batch_size": 1},
        "padded, 8 rows": {"micro_batch_size": 8},
        "packed": {"packing": True, "micro_batch_tokens": budget},
    }
    impl = "triton" if device.type == "cuda" else "chunked"
    common = {"dtype": "bfloat16", "activation_checkpointing": True, "logprobs": {"impl": impl}}
    network = load_network(Model.model_validate({"preset": shapes.preset}), weights=None, seed=0)
    backends = {
        name: DtensorBackend(
            lambda: copy.deepcopy(network),
            Policy.model_validate(common | settings),
            make_ranks(device, {}),
        )
        for name, settings in candidates.items()
    }
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in candidates}
    for turn in range(shapes.rounds + 1):
        for name, backend in backends.items():
            measured = step(backend, batch)
            if turn:  # the first warms up
                found[name].append(measured)
    print(f"{shapes.num_sequences} sequences, {real} tokens, at most {budget} a microbatch; {shapes.preset}")
    reference = statistics.median(seconds for seconds, _ in found["padded, 8 rows"])
    for name, rows in found.items():
        seconds = statistics.median(row[0] for row in rows)
        peak_gib = max(row[1] for row in rows) / 2**30
        print(
            f"{name:16s} {seconds:8.3f} s  {real / seconds:10.0f} tokens/s  "
            f"{reference / seconds:5.2f} x padded, 8 rows  peak {peak_gib:6.2f} GiB (all models' weights in)"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
