"""A whole training step on one GPU, generation included: abrun's two engines, and TRL with vLLM and Liger.

    python tests/bench/bench_step.py                    # one GPU; needs vllm, trl and liger-kernel
    python tests/bench/bench_step.py --only abrun-vllm --set policy.share_prompts=false
    python tests/bench/bench_step.py --only abrun-vllm --algorithm ppo    # with a value model of its own
    python tests/bench/bench_step.py --chart runs/step  # step.png and step.svg: where the steps go
    python tests/bench/bench_step.py --device cpu       # the script's own logic, on a tiny model

All train one folder of random weights (Qwen2.5-1.5B's architecture) by GRPO in bfloat16 on the same prompts:
64 completions of 512 tokens a step, 32 sequences a microbatch, no KL penalty; abrun compiled and with each
prompt once for its eight completions, TRL with its own default, activation checkpointing. Random weights end
a completion about never, so that all have their full length. A candidate is a process of its own; the figures
are medians of its steps after the first two, which compile and capture graphs.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from charts import chart  # pyright: ignore[reportMissingImports]
from random_model import make_model  # pyright: ignore[reportMissingImports]

STEPS, WARM_UP = 5, 2
TOTAL = "total_step_time"
PHASES = (  # none is a part of another
    "generation",
    "engine_sleep",
    "weight_sync",
    "reward",
    "logprobs",
    "values",
    "forward_backward",
    "optimizer",
    "value_forward_backward",
    "value_optimizer",
)
CANDIDATES = ("abrun-torch", "abrun-vllm", "trl-vllm", "trl-transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    preset: str
    vocab_size: int
    prompts: int
    group: int
    prompt_words: int
    completion_tokens: int
    micro_batch: int


SHAPES = {
    "cuda": Shapes(
        preset="qwen2.5-1.5b",
        vocab_size=151_936,
        prompts=8,
        group=8,
        prompt_words=128,
        completion_tokens=512,
        micro_batch=32,
    ),
    "cpu": Shapes(
        preset="qwen2-tiny-128",
        vocab_size=128,
        prompts=2,
        group=4,
        prompt_words=8,
        completion_tokens=16,
        micro_batch=4,
    ),
}


def prompts(shapes: Shapes) -> list[str]:
    return [
        " ".join(str((17 * row + 5 * word) % 100) for word in range(shapes.prompt_words))
        for row in range(STEPS * shapes.prompts)
    ]


def run_abrun(
    engine: str, algorithm: str, shapes: Shapes, device: str, work: Path, overrides: list[str]
) -> list[dict[str, float]]:
    """Seconds of each step, whole and by phase."""
    from abrun import store
    from abrun.layout import RunName
    from abrun.recipe import OwnRunConfig, overridden

    data = work / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": one, "answer": "7"}) + "\n" for one in prompts(shapes)))
    tree: dict[str, Any] = {
        "algorithm": {"type": algorithm, "prompts_per_step": shapes.prompts, "group_size": shapes.group},
        "model": {"path": str(work / "model")},
        "policy": {
            "dtype": "bfloat16" if device == "cuda" else "float32",
            "compile": device == "cuda",
            "packing": True,
            "share_prompts": True,
            "backend": {"type": "dtensor", "keep_gathered": True},
            "micro_batch_tokens": shapes.micro_batch * (shapes.prompt_words + shapes.completion_tokens),
            "logprobs": {"impl": "triton" if device == "cuda" else "chunked", "one_pass": True},
            "optimizer": {"learning_rate": 1e-6, "warmup_steps": 0},
        },
        "rollout": {"engine": engine, "max_new_tokens": shapes.completion_tokens},
        "task": {"type": "jsonl", "path": str(data)},
        "steps": STEPS,
        "checkpoint": {"every": 10 * STEPS},
        "cluster": {"gpus_per_node": int(device == "cuda")},
    }
    for override in overrides:
        tree = overridden(tree, override)
    config = OwnRunConfig.model_validate(tree)
    run = store.RunDir(work / f"abrun-{engine}")
    name = RunName(arm="baseline", seed=0)
    run.write_record(
        store.RunRecord(
            experiment="x", name=name, initial_weights=None, config=config.model_dump(mode="json")
        )
    )
    finish([sys.executable, "-m", "abrun.train", str(run.path)])
    metrics = run.metrics()
    found = {name: metrics.get(f"timing/train/{name}_s") for name in (TOTAL, *PHASES)}
    return [
        {name: float(one.values[step]) for name, one in found.items() if one is not None}
        for step in range(STEPS)
    ]


def run_trl(with_vllm: bool, shapes: Shapes, device: str, work: Path) -> list[dict[str, float]]:
    """Seconds of each step, in a process of its own."""
    asked = {"work": str(work), "device": device, "with_vllm": with_vllm, "shapes": asdict(shapes)}
    return finish([sys.executable, __file__, "--trl", json.dumps(asked)])


def train_trl(work: str, device: str, with_vllm: bool, shapes: Shapes) -> None:
    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore[reportMissingImports]
    from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

    on_gpu = device == "cuda"
    rows: list[dict[str, float]] = []

    def now() -> float:
        torch.cuda.synchronize() if on_gpu else None
        return time.perf_counter()

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            rows.append({TOTAL: -now()})

        def on_step_end(self, *_: Any, **__: Any) -> None:
            rows[-1][TOTAL] += now()

    def timed(owner: Any, method: str, phase: str) -> None:
        inner = getattr(owner, method)

        def run(*args: Any, **settings: Any) -> Any:
            start = now()
            found = inner(*args, **settings)
            rows[-1][phase] = rows[-1].get(phase, 0.0) + now() - start
            return found

        setattr(owner, method, run)

    sequences = shapes.prompts * shapes.group
    settings: dict[str, Any] = {
        "output_dir": f"{work}/trl",
        "max_steps": STEPS,
        "learning_rate": 1e-6,
        "beta": 0.0,
        "per_device_train_batch_size": shapes.micro_batch,
        "gradient_accumulation_steps": sequences // shapes.micro_batch,
        "num_generations": shapes.group,
        "max_completion_length": shapes.completion_tokens,
        "gradient_checkpointing": True,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "use_liger_kernel": on_gpu,
        "model_init_kwargs": {"dtype": "bfloat16" if on_gpu else "float32"},
        "use_vllm": with_vllm,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    if with_vllm:
        longest = shapes.prompt_words + shapes.completion_tokens
        settings |= {
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": 0.6,
            "vllm_max_model_length": longest,
        }
        settings |= {"vllm_enable_sleep_mode": on_gpu}
    trainer = GRPOTrainer(
        model=f"{work}/model",
        reward_funcs=lambda completions, **_: [float(len(text) % 2) for text in completions],
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts(shapes)]),
        args=GRPOConfig(**settings),
        callbacks=[Clock()],
    )
    if with_vllm:
        timed(trainer.vllm_generation, "generate", "generation")
        timed(trainer.vllm_generation, "sync_weights", "weight_sync")
    trainer.train()
    print("ROWS " + json.dumps(rows), flush=True)
    os._exit(0)  # vLLM's engine may hold on to the process


def finish(command: list[str]) -> list[dict[str, float]]:
    """Runs a command; returns the rows it printed. Raises RuntimeError with its last lines."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [line[5:] for line in ended.stdout.splitlines() if line.startswith("ROWS ")]
    if ended.returncode:
        raise RuntimeError("\n".join(ended.stderr.strip().splitlines()[-20:]))
    return json.loads(rows[-1]) if rows else []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=list(SHAPES), default="cuda")
    parser.add_argument("--only", nargs="*", choices=CANDIDATES, default=CANDIDATES)
    parser.add_argument("--algorithm", choices=("grpo", "ppo"), default="grpo", help="of abrun's candidates")
    parser.add_argument("--prompt-words", type=int, help="a token each; else 128")
    parser.add_argument("--chart", type=Path, help="without its ending")
    parser.add_argument("--set", action="append", default=[], help="key=value for abrun's candidates")
    parser.add_argument("--trl", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.trl:
        given = json.loads(asked.trl)
        train_trl(**given | {"shapes": Shapes(**given["shapes"])})
        return
    shapes, medians, parts = SHAPES[asked.device], {}, {}
    if asked.prompt_words:
        shapes = replace(shapes, prompt_words=asked.prompt_words)
    print(f"{shapes.prompts * shapes.group} x {shapes.completion_tokens} tokens, {shapes.preset}")
    with tempfile.TemporaryDirectory() as folder:
        make_model(shapes.preset, Path(folder) / "model", asked.device, vocab_size=shapes.vocab_size)
        for name in asked.only:
            trainer, engine = name.split("-")
            if trainer == "trl" and not importlib.util.find_spec("trl"):
                print(f"{name}: not measured, trl is not installed")
                continue
            try:
                if trainer == "abrun":
                    more = asked.device, Path(folder), asked.set
                    rows = run_abrun(engine, asked.algorithm, shapes, *more)
                else:
                    rows = run_trl(engine == "vllm", shapes, asked.device, Path(folder))
            except RuntimeError as error:
                print(f"{name}: failed\n{error}", flush=True)
                continue
            found = {key: statistics.median(row.get(key, 0.0) for row in rows[WARM_UP:]) for key in rows[-1]}
            medians[name] = found.pop(TOTAL)
            parts[name] = found | {"all else": medians[name] - sum(found.values())}
            phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in parts[name].items())
            besides = medians[name] - found.get("generation", 0.0) - found.get("engine_sleep", 0.0)
            print(
                f"{name:18s} {medians[name]:8.2f} s a step, {besides:.2f} s without generation  {phases}",
                flush=True,
            )
    if asked.chart:
        chart(parts, asked.chart, "s a step")
    for name, seconds in medians.items() if len(medians) > 1 else ():
        ratios = ", ".join(
            f"{other / seconds:.2f} x {theirs}" for theirs, other in medians.items() if theirs != name
        )
        print(f"{name:18s} is as fast as {ratios}")


if __name__ == "__main__":
    main()
