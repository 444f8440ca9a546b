"""Weak scaling of one long sequence a GPU, by backend and layout: tokens/s and peak memory.

Whole runs on short sequences: bench_scaling.

    python -m tests.bench.bench_layouts                    # 2 GPUs, Qwen2.5-1.5B's architecture in bfloat16
    python -m tests.bench.bench_layouts --device cpu       # the script's own logic, on a tiny model

Each GPU has one sequence of so many tokens, however a layout cuts them; a step is a forward and a backward
pass with the log-probs of all tokens, and an update. Medians over the rounds.
"""

import copy
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from abrun.recipe.implementations import BACKENDS
from abrun.recipe.policy import Model, Policy
from abrun.trainer.backends.dtensor import DtensorBackend
from abrun.trainer.backends.ranks import make_ranks
from abrun.trainer.loop.sft import SupervisedObjective
from abrun.trainer.models.weights import load_network
from abrun.trainer.rl.batch import Sequences
from tests.bench.common import make_parser

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dtensor": (1, {}),
    "dtensor, data 2": (2, {}),
    "dtensor, tensor 2, sequence": (2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "dtensor, context 2": (2, {"context_parallel": 2}),
    "megatron": (1, {"type": "megatron"}),
    "megatron, data 2": (2, {"type": "megatron"}),
    "megatron, tensor 2, sequence": (
        2,
        {"type": "megatron", "tensor_parallel": 2, "sequence_parallel": True},
    ),
}
PRESETS = {"cuda": "qwen2.5-1.5b", "cpu": "qwen2-tiny"}
LENGTHS = {"cuda": (4096, 16384), "cpu": (64,)}
IMPLS = {"cuda": ("logits", "triton"), "cpu": ("logits", "chunked")}
ROUNDS = {"cuda": 4, "cpu": 1}


def make_backend(network: Any, settings: dict[str, Any], impl: str, ranks: Any, dtype: str) -> Any:
    policy = Policy.model_validate(
        {
            "backend": settings,
            "dtype": dtype,
            "packing": True,
            "activation_checkpointing": True,
            "logprobs": {"impl": impl},
        }
    )
    assert policy.backend.type in BACKENDS
    if policy.backend.type == "dtensor":
        return DtensorBackend(lambda: copy.deepcopy(network), policy, ranks)
    from abrun.trainer.backends.megatron.backend import MegatronBackend

    return MegatronBackend(lambda: copy.deepcopy(network), policy, ranks)


def measure(device: torch.device, settings: dict[str, Any]) -> None:
    """One layout, on all ranks; rank 0 prints a row of JSON for each length and path."""
    shape = Policy.model_validate({"backend": settings}).backend.shape
    network: Any = load_network(Model.model_validate({"preset": PRESETS[device.type]}), weights=None, seed=0)
    on_gpu = device.type == "cuda"
    for length in LENGTHS[device.type]:
        for impl in IMPLS[device.type]:
            ranks = make_ranks(device, shape)
            backend = make_backend(network, settings, impl, ranks, "bfloat16" if on_gpu else "float32")
            rows = ranks.size // ranks.data.size()  # a sequence a GPU
            batch = some_sequences(rows, length, network.config.vocab_size, device)
            seconds = [step(backend, batch) for _ in range(ROUNDS[device.type] + 1)][1:]
            peak = torch.cuda.max_memory_allocated() if on_gpu else 0
            peak_gib = ranks.all_reduce_max_world([float(peak)])[0] / 2**30
            if ranks.is_first:
                print(
                    "ROW " + json.dumps([length, impl, length / statistics.median(seconds), peak_gib]),
                    flush=True,
                )
            del backend
            if on_gpu:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()


def some_sequences(count: int, length: int, vocab_size: int, device: torch.device) -> Sequences:
    draw = torch.Generator().manual_seed(0)
    token_ids = torch.randint(3, vocab_size, (count, length), generator=draw)
    mask = torch.ones(count, length, dtype=torch.bool)
    mask[:, 0] = False
    return Sequences(token_ids=token_ids.to(device), token_mask=mask.to(device))


def step(backend: Any, batch: Sequences) -> float:
    """Seconds."""
    on_gpu = backend.ranks.device.type == "cuda"
    torch.cuda.synchronize() if on_gpu else None
    start = time.perf_counter()
    num_tokens = backend.ranks.all_reduce_sum_data(float(batch.token_mask.sum()))[0]
    backend.forward_backward(batch, SupervisedObjective(num_tokens=num_tokens))
    backend.optimizer_step(1e-6)
    torch.cuda.synchronize() if on_gpu else None
    return time.perf_counter() - start


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--device", choices=list(PRESETS), default="cuda")
    parser.add_argument("--only", help="layouts whose name has this in it")
    asked = parser.parse_args()
    if "RANK" in os.environ:
        on_gpu = asked.device == "cuda"
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if on_gpu else "gloo")
        measure(device, LAYOUTS[asked.only or ""][1])
        dist.destroy_process_group()
        return
    print("layout                          tokens log-probs tokens/s/GPU peak GiB")
    for name, (gpus, _) in LAYOUTS.items():
        if not asked.only or asked.only in name:
            show(name, gpus, asked.device)


def show(name: str, gpus: int, device: str) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    command = [sys.executable, *torchrun, "-m", __spec__.name, "--device", device, "--only", name]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [json.loads(line[4:]) for line in ended.stdout.splitlines() if line.startswith("ROW ")]
    for length, impl, rate, peak_gib in rows:
        print(f"{name:30s} {length:7d} {impl:>9s} {rate:12.0f} {peak_gib:8.2f}", flush=True)
    if ended.returncode:
        print(f"{name}: {' '.join(ended.stderr.strip().splitlines()[-30:])}", flush=True)


if __name__ == "__main__":
    main()
