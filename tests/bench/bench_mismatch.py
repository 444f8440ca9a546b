"""The mismatch budget of a small run in bfloat16, as `abrun logprob-diff` prints it.

    python -m tests.bench.bench_mismatch --model FOLDER -o OUT           # one GPU, with vLLM
    python -m tests.bench.bench_mismatch --device cpu -o OUT             # random weights, torch engine

The run is one that has not begun: its first update is made, and what its second step samples is scored. The
reward counts digits, so that any weights have gradients. OUT holds the run and its report.
"""

import argparse
import time
from pathlib import Path

import yaml

from abrun.recipe.run import OwnRunConfig
from abrun.report.present.terminal import terminal
from abrun.runs.launches import write_config
from abrun.runs.layout import RunName
from abrun.runs.rundir import RunDir
from abrun.tools.logprob_diff.command import measure_run
from abrun.tools.logprob_diff.report import summary
from tests.bench.common import make_parser

PRESET = "qwen2-tiny-128"
PROMPTS = ("What is {n} + {n}?", "Count from {n} up.", "Write a line about the number {n}.")


def digits(prompt: str, completion: str, answer: str) -> float:
    return float(sum(character.isdigit() for character in completion))


def main() -> None:
    parser = make_parser(__doc__, devices=("cuda", "cpu"))
    parser.add_argument("--engine", choices=("vllm", "torch"), help="default: vllm on a GPU, else torch")
    parser.add_argument("--model", help="a model's folder instead of the preset")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128, help="of a completion, at most")
    parser.add_argument("--set", action="append", default=[], help="one more change to score by")
    parser.add_argument("-o", "--output", type=Path, required=True)
    asked = parser.parse_args()
    asked.output.mkdir(parents=True, exist_ok=True)
    console = terminal()
    run = make_run(asked, {"path": asked.model} if asked.model else {"preset": PRESET})
    start = time.perf_counter()
    budget, _ = measure_run(str(run), asked.output, sets=asked.set, say=console.print)
    console.print(summary(budget))
    console.print(f"{time.perf_counter() - start:.0f} s")


def make_run(asked: argparse.Namespace, model: dict[str, str]) -> Path:
    problems = asked.output / "problems.jsonl"
    prompts = [PROMPTS[n % len(PROMPTS)].format(n=n) for n in range(64)]
    problems.write_text("".join(f'{{"prompt": "{prompt}", "answer": "0"}}\n' for prompt in prompts))
    on_gpu = asked.device == "cuda"
    config = yaml.safe_load(
        f"""
        algorithm: {{type: grpo, prompts_per_step: {asked.prompts}, group_size: {asked.group}}}
        policy:
          dtype: bfloat16
          micro_batch_size: 16
          optimizer: {{learning_rate: {"1.0e-3" if "preset" in model else "1.0e-6"}}}
        rollout:
          engine: {asked.engine or ("vllm" if on_gpu else "torch")}
          max_new_tokens: {asked.tokens}
          gpu_memory_utilization: {"0.3" if on_gpu and asked.engine != "torch" else "null"}
        task: {{type: jsonl, path: {problems.resolve()}, verifier: "{__spec__.name}:digits"}}
        steps: 2
        cluster: {{gpus_per_node: {int(on_gpu)}}}
        """
    )
    directory = asked.output / "run"
    write_config(
        RunDir(directory),
        "bench",
        RunName(arm="baseline", seed=0),
        OwnRunConfig.model_validate(config | {"model": model}).model_dump(mode="json"),
    )
    return directory


if __name__ == "__main__":
    main()
