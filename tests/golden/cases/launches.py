"""What is printed before, while and after runs are started: dry runs, refusals, and one small launch."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.golden.case import case, compare_in_short
from tests.verdict.simulate import RECIPE, write_experiment

Commands = Iterator[Sequence[str]]
TRAINER = """\
import json, os, random, sys
steps, seed, rate = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
noise = random.Random(seed)
os.makedirs(os.path.join(sys.argv[4], "logs"), exist_ok=True)
with open(os.path.join(sys.argv[4], "logs", "trainer.jsonl"), "w") as log:
    for step in range(1, steps + 1):
        reward = 0.1 + (1 - 0.9 ** (step - 1)) * 0.5 + 0.05 * noise.random() + rate * (step > 1)
        log.write(json.dumps({"step": step, "score": reward, "loss": 1 - reward}) + "\\n")
"""
COMMAND_RECIPE: dict[str, Any] = {
    "name": "command",
    "trainer": {
        "type": "command",
        "argv": ["{python}", "{script}", "{steps}", "{seed}", "{learning_rate}", "{run_dir}"],
        "parameters": {"script": "trainer.py", "learning_rate": 0.0},
        "metrics": {"format": "jsonl", "path": "{run_dir}/logs/trainer.jsonl"},
        "aliases": {"train/reward": "score", "train/loss": "loss"},
    },
    "steps": 10,
    "arms": {"baseline": {}, "treatment": {"trainer.parameters.learning_rate": 0.001}},
    "seeds": [0, 1],
    "compare": {"claims": [{"metric": "train/reward", "window": "last 40%", "margin": 0.05}]},
}


@case
def launch_of_commands(folder: Path) -> Commands:
    (folder / "trainer.py").write_text(TRAINER)
    (folder / "recipe.yaml").write_text(json.dumps(COMMAND_RECIPE))
    yield ["launch", "recipe.yaml", "--dry-run"]
    yield ["launch", "recipe.yaml", "--no-compare", "--jobs", "1"]
    yield ["status", "command"]
    yield compare_in_short("command")
    yield ["launch", "recipe.yaml"]
    yield ["logs", "command/baseline/seed-0"]


@case
def dry_runs_of_shipped_recipes(folder: Path) -> Commands:
    for name in (
        "quickstart",
        "quickstart-faults",
        "ppo-fused-logprobs",
        "sft-fused-logprobs",
        "quickstart-regression",
    ):
        yield ["launch", name, "--dry-run"]
    yield ["launch", "quickstart", "--dry-run", "--json"]
    yield ["launch", "quickstart", "--dry-run", "--seeds", "0-2", "--until-decided", "--max-seeds", "8"]


@case
def launch_refusals(folder: Path) -> Commands:
    (folder / "recipe.yaml").write_text(json.dumps(RECIPE))
    write_experiment(folder / "runs/simulated", seeds=[0, 1])
    yield ["launch", "nowhere.yaml"]
    yield ["launch", "quickstrat"]
    yield ["launch", "recipe.yaml", "--set", "stepss=3"]
    yield ["launch", "recipe.yaml", "--set", "steps=0"]
    yield ["launch", "recipe.yaml", "--set", "compare.claims.0.metric=train/rewrad"]
    yield ["launch", "recipe.yaml", "--set", "seeds=[]"]
    yield ["launch", "recipe.yaml", "--seeds", "4-2"]
    yield ["launch", "recipe.yaml", "--json"]
    yield ["launch", "recipe.yaml", "--max-seeds", "8"]
    yield ["launch", "recipe.yaml", "--until-decided", "--no-compare"]
    yield ["launch", "recipe.yaml", "--resume", "--dry-run"]
