"""How long a run takes from its start to the end of its first step, without and with an engine.

    python -m tests.bench.bench_starts                  # one GPU, Qwen2.5-1.5B's architecture, bfloat16
    python -m tests.bench.bench_starts --only engines --num-runs 2    # needs vllm
    python -m tests.bench.bench_starts --device cpu     # the script's own logic, on a tiny model

Launches as `abrun launch` makes them, one run after the other, random weights in a folder.

- `first`, an eager and a compiled run (compilers' and kernels' caches are empty, on a new machine), and
  `again` the same. A run is two steps of SFT on 124 packed sequences of 524 tokens.
- `engines`: one experiment of --num-runs runs with empty caches. A run is four steps of compiled GRPO, 16
  prompts of 128 tokens with 8 completions of 512 each, sampled by vLLM (on a CPU by the torch engine).

Seconds of each run: from the moment when the launcher starts its first process until its first step is in its
metrics; of `engines` also its usual step and the whole run, to the end of its processes.
"""

import json
import math
import random
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from abrun.experiment.options import LaunchOptions
from abrun.experiment.plan import make_plan
from abrun.launch import supervisor
from abrun.launch.engine import make_engine
from abrun.recipe.experiment import parse_stored_recipe
from abrun.runs.rundir import RunDir
from tests.bench import bench_step
from tests.bench.common import PrintedLines, heading, make_model, make_parser, markdown_row
from tests.bench.launches import STEP_TIME, last_log_lines, launch, run_seconds

STARTS = ("first", "again")
ENGINES = "engines"
ENGINE_STEPS, ENGINE_PROMPTS = 4, {"cuda": 16, "cpu": 2}
SHAPES = {"cuda": ("qwen2.5-1.5b", 151_936, 124, 520, 16_244), "cpu": ("qwen2-tiny-128", 128, 8, 28, 128)}


def recipe_of(device: str, work: Path, name: str) -> Any:
    _, _, batch_size, _, micro_batch_tokens = SHAPES[device]
    return parse_stored_recipe(
        {
            "name": name,
            "algorithm": {"type": "sft", "batch_size": batch_size},
            "model": {"path": str(work / "model")},
            "policy": {
                "dtype": "bfloat16" if device == "cuda" else "float32",
                "packing": True,
                "micro_batch_tokens": micro_batch_tokens,
                "logprobs": {"impl": "triton" if device == "cuda" else "chunked"},
            },
            "task": {"type": "completions", "path": str(work / "data.jsonl")},
            "steps": 2,
            "checkpoint": {"every": 1000},
            "cluster": {"gpus_per_node": int(device == "cuda")},
            "arms": {"baseline": {}, "compiled": {"policy.compile": True}},
            "seeds": [0],
            "compare": {"claims": []},
        },
        "bench_starts",
    )


def measure_engines(device: str, work: Path, num_runs: int) -> None:
    """Launch the experiment; print a row for each run."""
    shapes = replace(bench_step.SHAPES[device], prompts=ENGINE_PROMPTS[device])
    bench = bench_step.Bench(
        algorithm="grpo", device=device, gpus=1, shapes=shapes, overrides=[], limit_s=0.0, work=work
    )
    bench.write_texts("one")
    recipe = {
        "name": ENGINES,
        **bench.tree("all on"),
        "steps": ENGINE_STEPS,
        "arms": {"baseline": {}, "treatment": {"policy.optimizer.learning_rate": 2e-6}},
        "seeds": [0],
        "controls": {"aa_reruns": num_runs - 2},
        "compare": {"claims": []},
    }
    (work / "recipe.yaml").write_text(json.dumps(recipe))
    folder = Path(tempfile.mkdtemp(dir=work))
    arguments = [str(work / "recipe.yaml"), "--no-compare", "--jobs", "1"]
    outcome = launch(arguments, work=folder)
    if not outcome.is_complete:
        raise SystemExit("\n".join([f"exit code {outcome.exit_code}:", *last_log_lines(folder)]))
    directory = folder / "runs" / ENGINES
    for run in run_seconds(directory):
        _, *step_seconds = RunDir(directory / run.name).metrics()[STEP_TIME].values
        seconds = (run.first_step_s or math.nan, statistics.median(step_seconds), run.whole_s)
        print(markdown_row(run.name, *(f"{value:.1f}" for value in seconds)), flush=True)


def main() -> None:
    parser = make_parser(__doc__, devices=list(SHAPES))
    parser.add_argument("--only", nargs="*", choices=[*STARTS, ENGINES], default=[*STARTS, ENGINES])
    parser.add_argument("--num-runs", type=int, default=3, help="of `engines`, from 2")
    asked = parser.parse_args()
    if asked.num_runs < 2:
        parser.error(f"--num-runs: got {asked.num_runs}; allowed: from 2")
    preset, vocab_size, batch_size, length, _ = SHAPES[asked.device]
    with tempfile.TemporaryDirectory() as folder:
        work, draws = Path(folder), random.Random(0)
        make_model(preset, work / "model", asked.device, vocab_size=vocab_size)
        # A token each; transformers cuts longer numbers into their digits
        rows = [
            {"prompt": "1 2 3 4", "completion": " ".join(draws.choices("0123456789", k=length))}
            for _ in range(4 * batch_size)
        ]
        (work / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for name in (name for name in asked.only if name != ENGINES):
            plan = make_plan(recipe_of(asked.device, work, name))
            supervisor.run_plan(
                plan,
                LaunchOptions(runs_dir=work / "runs"),
                engine=make_engine("local", 1),
                observer=PrintedLines(),
            )
            for planned in plan.runs:
                run = RunDir(work / "runs" / name / str(planned.name))
                (launched,) = run.launches()
                first = next(row for row in run.metrics_reader().read() if row["step"] == 1)
                seconds = first["time_s"] - launched.started_s
                print(f"{name} {planned.name}: first step ended after {seconds:.1f} s", flush=True)
        if ENGINES in asked.only:
            print(heading("run", "start to first step, s", "a later step, s", "run, s"))
            measure_engines(asked.device, work, asked.num_runs)


if __name__ == "__main__":
    main()
