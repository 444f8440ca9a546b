"""Where a step's memory goes on a GPU, and how long a sequence fits: dense, chunked, Triton, one pass.

    python tests/bench/bench_memory.py                        # everything below, one GPU
    python tests/bench/bench_memory.py --only 1.5b,           # the parts whose names begin so: minutes each
    python tests/bench/bench_memory.py --gpus 2 --only 8b     # an 8B model over two GPUs of one host
    python tests/bench/bench_memory.py --device cpu           # the script's own logic, on a tiny model

Each part is one `abrun memory-profile` over the arms `logits`, `chunked`, `triton` and `one-pass` (Triton's),
which writes its table, pictures and page into a folder of --output. Random weights, bfloat16 products,
float32 masters and AdamW, GRPO without a reference, one sequence a microbatch, two microbatches an update.

    1.5b, ...     Qwen2.5-1.5B's shape at 16,384 tokens, without, with selective and with full recompute
    1.5b-longest  the longest sequence that trains, full recompute, for each arm (positions are no limit)
    1.5b-vllm     the same shape beside a colocated vLLM that sleeps while it trains, and without it
    8b            Qwen3-8B's shape at 2,048 tokens, full recompute
    8b-longest    the longest sequence that trains, of the dense and the Triton arm
    head          the log-prob head alone: hidden size 4,096, vocabulary 151,936
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

ARMS: dict[str, dict[str, Any]] = {
    "baseline": {"policy.logprobs.impl": "logits"},
    "chunked": {"policy.logprobs.impl": "chunked"},
    "triton": {"policy.logprobs.impl": "triton"},
    "one-pass": {"policy.logprobs.impl": "triton", "policy.logprobs.one_pass": True},
}
FULL = {"activation_checkpointing": "full"}
SELECTIVE = {"activation_checkpointing": "selective", "compile": True}
LONG = {"max_position_embeddings": 2**21}
VLLM = {"engine": "vllm", "gpu_memory_utilization": 0.3, "max_new_tokens": 64}
# name -> (preset, policy, further keys of the recipe, arms, options)
PARTS: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[str], list[str]]] = {
    "1.5b, no recompute": ("qwen2.5-1.5b", {}, {}, list(ARMS), ["--lengths", "16384"]),
    "1.5b, selective": ("qwen2.5-1.5b", SELECTIVE, {}, ["baseline", "triton"], ["--lengths", "16384"]),
    "1.5b, full": ("qwen2.5-1.5b", FULL, {}, list(ARMS), ["--lengths", "16384"]),
    "1.5b-longest": (
        "qwen2.5-1.5b",
        FULL,
        {"model.shape": LONG},
        ["baseline", "triton", "one-pass"],
        ["--lengths", "8192,16384", "--max-seq-len"],
    ),
    "1.5b-vllm, with": (
        "qwen2.5-1.5b",
        FULL,
        {"rollout": VLLM},
        ["baseline", "triton"],
        ["--lengths", "16384", "--rollouts"],
    ),
    "1.5b-vllm, without": ("qwen2.5-1.5b", FULL, {}, ["baseline", "triton"], ["--lengths", "16384"]),
    "8b": ("qwen3-8b", FULL, {}, list(ARMS), ["--lengths", "2048"]),
    "8b-longest": (
        "qwen3-8b",
        FULL,
        {"model.shape": LONG},
        ["baseline", "triton"],
        ["--lengths", "1024,2048", "--max-seq-len"],
    ),
}
HEAD = "head"


def recipe_of(name: str, device: str, gpus: int) -> dict[str, Any]:
    preset, policy, more, arms, _ = PARTS[name]
    on_gpu = device == "cuda"
    policy = {"micro_batch_size": 1, "dtype": "bfloat16" if on_gpu else "float32", **policy}
    if not on_gpu:
        preset, more = "qwen2-wide-vocab", {key: value for key, value in more.items() if key != "rollout"}
        arms = [arm for arm in arms if arm in ("baseline", "chunked")] + ["chunked"]
        policy = {key: value for key, value in policy.items() if key not in SELECTIVE}
    return {
        "name": f"memory-{name.replace(', ', '-').replace(' ', '-')}",
        "algorithm": {"type": "grpo", "prompts_per_step": 2 * gpus, "group_size": 4},
        "model": {"preset": preset, **({"shape": more["model.shape"]} if "model.shape" in more else {})},
        "policy": policy,
        "rollout": more.get("rollout", {"max_new_tokens": 64}),
        "task": {"type": "arithmetic"},
        "steps": 1,
        "arms": {arm: ARMS[arm] for arm in arms},
        "seeds": [0, 1],
        "compare": {"primary": [{"metric": "train/reward", "window": "all", "margin": 0.1}]},
        "cluster": {"gpus_per_node": gpus} if on_gpu else {},
    }


def profile(name: str, device: str, gpus: int, output: Path) -> int:
    command = [sys.executable, "-m", "abrun", "memory-profile"]
    folder = output / name.replace(", ", "-").replace(" ", "-")
    if name == HEAD:
        sizes = ["4096", "151936", "8192,32768"] if device == "cuda" else ["64", "8192", "128,512"]
        for option, size in zip(("--hidden", "--vocab", "--tokens"), sizes, strict=True):
            command += [option, size]
        return subprocess.run([*command, "--output", str(folder)], check=False).returncode
    options = list(PARTS[name][4])
    if device == "cpu":
        options[1] = "64,256"
        options += ["--budget-gib", "0.25"] if "--max-seq-len" in options else []
    if "--rollouts" not in options:
        options.append("--no-rollouts")
    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe_of(name, device, gpus)))
        ended = subprocess.run([*command, str(path), *options, "--output", str(folder)], check=False)
    return ended.returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="*", help="parts whose names begin so")
    parser.add_argument("--gpus", type=int, default=1, help="of one host, over which FSDP spreads the model")
    parser.add_argument("--output", type=Path, default=Path("runs/bench-memory"))
    asked = parser.parse_args()
    failed = []
    for name in [*PARTS, HEAD]:
        if asked.only and not any(name.startswith(one) for one in asked.only):
            continue
        started = time.monotonic()
        print(f"== {name}", flush=True)
        if profile(name, asked.device, asked.gpus, asked.output):
            failed.append(name)
        print(f"== {name}: {time.monotonic() - started:.0f} s\n", flush=True)
    print(f"failed: {', '.join(failed) or 'none'}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
