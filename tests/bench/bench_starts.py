"""How long a run takes from its start to the end of its first step: a process of its own, and a copy.

    python tests/bench/bench_starts.py                  # one GPU, Qwen2.5-1.5B's architecture, bfloat16
    python tests/bench/bench_starts.py --device cpu     # the script's own logic, on a tiny model

A launch of `abrun launch`'s own trains eight runs of two steps one after the other, four eager and four
compiled (SFT on packed sequences of 524 tokens, 124 a step; random weights in a folder); before it, another
one of two steps of each fills the caches of compilers and kernels. Seconds: from the moment the launcher
starts a run's first process until its first step is in its metrics, of each run.
"""

import argparse
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from random_model import make_model  # pyright: ignore[reportMissingImports]

from abrun.launch import supervisor
from abrun.plan import make_plan
from abrun.processes.forks import Copy, ForkServer
from abrun.recipe import stored_recipe
from abrun.store import RunDir

SHAPES = {"cuda": ("qwen2.5-1.5b", 151_936, 124, 520, 16_244), "cpu": ("qwen2-tiny-128", 128, 8, 28, 128)}


def recipe_of(device: str, work: Path, name: str, seeds: list[int]) -> Any:
    _, _, batch_size, _, micro_batch_tokens = SHAPES[device]
    return stored_recipe(
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
            "compare": {"primary": []},
        },
        "bench_starts",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=list(SHAPES), default="cuda")
    asked = parser.parse_args()
    preset, vocab_size, batch_size, length, _ = SHAPES[asked.device]
    copies, fork = set[int](), ForkServer.fork

    def noted(*order: Any) -> Copy | None:
        copy = fork(*order)
        copies.update([copy.pid] if copy else [])
        return copy

    ForkServer.fork = noted
    with tempfile.TemporaryDirectory() as folder:
        work, draws = Path(folder), random.Random(0)
        make_model(preset, work / "model", asked.device, vocab_size=vocab_size)
        words = [str(number) for number in range(vocab_size - 3)]
        rows = [
            {"prompt": "1 2 3 4", "completion": " ".join(draws.choices(words, k=length))}
            for _ in range(4 * batch_size)
        ]
        (work / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for name, seeds in (("filled", [0]), ("measured", [0, 1, 2, 3])):
            plan = make_plan(recipe_of(asked.device, work, name, seeds))
            supervisor.launch(plan, work / "runs", observer=supervisor.Printed(), jobs=1)
        found: dict[tuple[str, str], list[float]] = {}
        for planned in plan.runs:
            run = RunDir(work / "runs" / "measured" / str(planned.name))
            (launched,) = run.launches()
            first = next(row for row in run.rows().read() if row["step"] == 1)
            how = "a copy" if launched.pid in copies else "a process of its own"
            print(
                f"{planned.name}: {how}, first step ended after {first['time_s'] - launched.started_s:.1f} s"
            )
            found.setdefault((planned.name.arm, how), []).append(first["time_s"] - launched.started_s)
        for (arm, how), seconds in found.items():
            print(f"{arm}, {how}: {statistics.median(seconds):.1f} s (median of {len(seconds)})")


if __name__ == "__main__":
    main()
