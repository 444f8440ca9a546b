"""Predicted peaks of a training step beside measured ones, cell by cell, each in processes of its own.

    python tests/bench/bench_predict.py                    # one GPU: shapes, log-prob paths, recomputation
    python tests/bench/bench_predict.py --only 1.5b none   # the cells whose names have all of these
    python tests/bench/bench_predict.py --predict-only     # on any machine

A cell is a step of two microbatches of one packed sequence each, after one that made the optimizer's state,
with random weights; its peak is the allocator's over the second step. The 8B shape is Qwen3-8B's with 8 of
its 36 layers, whose optimizer state one GPU holds. Predictions run on the CPU beside the measurements.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from abrun.recipe import OwnRunConfig

GIB = 2**30
IMPLS: dict[str, dict[str, Any]] = {
    "dense": {"impl": "logits"},
    "chunked": {"impl": "chunked"},
    "triton": {"impl": "triton"},
    "one pass": {"impl": "triton", "one_pass": True},
}
RECOMPUTATION = {
    "none": {"activation_checkpointing": "none"},
    "selective": {"activation_checkpointing": "selective", "compile": True},
    "full": {"activation_checkpointing": "full"},
}
TOKENS = 8192


def cells() -> dict[str, dict[str, Any]]:
    eight = {"preset": "qwen3-8b", "shape": {"num_hidden_layers": 8}}
    models = {"1.5b": {"preset": "qwen2.5-1.5b"}, "8b": eight}
    return {
        f"{shape}, {impl}, {again}": {
            "algorithm": {"type": "sft", "batch_size": 2},
            "model": model,
            "task": {"type": "arithmetic"},
            "steps": 2,
            "cluster": {"gpus_per_node": 1},
            "policy": {
                "dtype": "bfloat16",
                "packing": True,
                "micro_batch_tokens": TOKENS,
                "logprobs": logprobs,
                **recomputed,
            },
        }
        for shape, model in models.items()
        for impl, logprobs in IMPLS.items()
        for again, recomputed in RECOMPUTATION.items()
    }


def predicted(config: OwnRunConfig) -> float:
    from abrun.memory.trace import trace

    (row,) = trace(config, [TOKENS], 1)
    return max(sum(kinds.values()) for kinds in row["by_phase"].values())


def measured(config: OwnRunConfig) -> float:
    import torch
    import torch.distributed as dist
    from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
    from transformers import AutoModelForCausalLM

    from abrun.backends.dtensor import DtensorBackend
    from abrun.backends.ranks import make_ranks
    from abrun.models.checks import silence
    from abrun.models.presets import preset_config
    from abrun.rl.batch import Sequences
    from abrun.train.sft import SupervisedObjective

    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    shape = preset_config(config.model)

    def load() -> Any:
        with device:
            network = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
        silence(network)
        return network

    backend = DtensorBackend(load, config.policy, make_ranks(device, {}))
    mask = torch.ones(2, TOKENS, dtype=torch.bool, device=device)
    mask[:, 0] = False
    token_ids = torch.randint(3, 90, mask.shape, device=device)
    batch = Sequences(token_ids=token_ids, token_mask=mask)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        backend.forward_backward(batch, SupervisedObjective(num_tokens=float(mask.sum())))
        backend.optimizer_step(1e-6)
    return torch.cuda.max_memory_allocated()


def in_process(kind: str, config: dict[str, Any]) -> float | None:
    ended = subprocess.run(
        [sys.executable, __file__, "--one", json.dumps([kind, config])],
        capture_output=True,
        text=True,
        check=False,
    )
    found = [line[4:] for line in ended.stdout.splitlines() if line.startswith("ROW ")]
    if not found:
        print("   " + " ".join(ended.stderr.strip().splitlines()[-2:])[:300], flush=True)
        return None
    return float(found[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--predict-only", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        kind, config = json.loads(asked.one)
        run = {"predicted": predicted, "measured": measured}[kind]
        print(f"ROW {run(OwnRunConfig.model_validate(config))}")
        return
    print(f"2 microbatches of {TOKENS} tokens      predicted  measured  ratio")
    chosen = {name: cell for name, cell in cells().items() if all(part in name for part in asked.only)}
    beside = ThreadPoolExecutor(max_workers=max((os.cpu_count() or 1) // 2, 1))
    predictions = {name: beside.submit(in_process, "predicted", cell) for name, cell in chosen.items()}
    for name, config in chosen.items():
        found = None if asked.predict_only else in_process("measured", config)
        expected = predictions[name].result()
        columns = ["     -" if value is None else f"{value / GIB:6.2f}" for value in (expected, found)]
        ratio = f"{expected / found:.3f}" if expected and found else "-"
        print(f"{name:32s} {columns[0]:>10s} {columns[1]:>9s}  {ratio}", flush=True)


if __name__ == "__main__":
    main()
