"""How long a run takes from its start to the end of its first step: a process of its own, and a copy.

    python -m tests.bench.bench_starts                  # one GPU, Qwen2.5-1.5B's architecture, bfloat16
    python -m tests.bench.bench_starts --device cpu     # the script's own logic, on a tiny model

Three launches as `abrun launch` makes them, one run after the other: `first`, an eager and a compiled run
(compilers' and kernels' caches are empty, on a new machine), `again` the same, and `copies`, three of each,
which all but the first ones begin as copies of a process that has done their imports. A run is two steps of
SFT on 124 packed sequences of 524 tokens, random weights in a folder. Seconds of each run: from the moment
when the launcher starts its first process until its first step is in its metrics.
"""

import json
import random
import tempfile
from pathlib import Path
from typing import Any

from abrun.experiment.options import LaunchOptions
from abrun.experiment.plan import make_plan
from abrun.launch import supervisor
from abrun.launch.engine import make_engine
from abrun.processes import ForkedChild
from abrun.processes.fork_server import ForkServer
from abrun.recipe.experiment import parse_stored_recipe
from abrun.runs.rundir import RunDir
from tests.bench.common import PrintedLines, make_model, make_parser

SEEDS = {"first": [0], "again": [0], "copies": [0, 1, 2]}
SHAPES = {"cuda": ("qwen2.5-1.5b", 151_936, 124, 520, 16_244), "cpu": ("qwen2-tiny-128", 128, 8, 28, 128)}


def recipe_of(device: str, work: Path, name: str, seeds: list[int]) -> Any:
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
            "seeds": seeds,
            "compare": {"claims": []},
        },
        "bench_starts",
    )


def main() -> None:
    parser = make_parser(__doc__, devices=list(SHAPES))
    parser.add_argument("--only", nargs="*", choices=list(SEEDS), default=list(SEEDS))
    asked = parser.parse_args()
    preset, vocab_size, batch_size, length, _ = SHAPES[asked.device]
    copies, fork = set[int](), ForkServer.fork

    def noted(*order: Any) -> ForkedChild | None:
        copy = fork(*order)
        copies.update([copy.pid] if copy else [])
        return copy

    ForkServer.fork = noted  # pyright: ignore[reportAttributeAccessIssue]
    with tempfile.TemporaryDirectory() as folder:
        work, draws = Path(folder), random.Random(0)
        make_model(preset, work / "model", asked.device, vocab_size=vocab_size)
        # A token each; transformers cuts longer numbers into their digits
        rows = [
            {"prompt": "1 2 3 4", "completion": " ".join(draws.choices("0123456789", k=length))}
            for _ in range(4 * batch_size)
        ]
        (work / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for name in asked.only:
            plan = make_plan(recipe_of(asked.device, work, name, SEEDS[name]))
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
                how = "a copy" if launched.pid in copies else "a process of its own"
                seconds = first["time_s"] - launched.started_s
                print(f"{name} {planned.name}: {how}, first step ended after {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
