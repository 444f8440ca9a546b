"""An experiment of foreign arms that write their curves in milliseconds."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from abrun.recipe.implementations import LOCAL_LAUNCHERS
from abrun.report.comparing import compare_sources
from abrun.runs.experiment import planned_runs, read_run_state
from tests.launch.fakes import FORKING

# A curve that a seed shares between arms; `own` is the sd of what each run adds, `shift` the treatment's.
# Of the seeds in `fails` the treatment exits with 1, until the file beside it says that it is mended.
# `apart`: the baseline's distance of trainer and engine, of which the treatment's is nine times; where it is
# given, the lengths of prompts show that both arms saw the same.
ARM = """
import json, os, random, sys
seed, last, shift, own, apart = int(sys.argv[1]), int(sys.argv[2]), *map(float, sys.argv[3:6])
fails, path = sys.argv[6:]
if shift and str(seed) in fails.split("+") and not os.path.exists(os.environ["MENDED"]):
    sys.exit(1)
shared, alone = random.Random(seed), random.Random(f"{seed} {shift}")
level, added = shared.gauss(0, 0.03), shift + alone.gauss(0, own)
with open(path, "w") as file:
    for step in range(1, last + 1):
        reward = 0.1 + 0.08 * step + level + shared.gauss(0, 0.001) + (added if step > 1 else 0.0)
        row = {"step": step, "train/reward": reward}
        if apart:
            row |= {"train/mean_prompt_length": 10 + seed, "train/gen_kl_error": apart * (9 if shift else 1)}
        file.write(json.dumps(row) + chr(10))
"""
RECIPE = """
name: NAME
trainer:
  type: command
  argv: ["{python}", SCRIPT, "{seed}", "{last}", "{shift}", "{own}", "{apart}", "{fails}", "{run_dir}/m"]
  parameters: {last: 10, shift: 0.0, own: 0.004, apart: 0.0, fails: none}
  metrics: {format: jsonl, path: "{run_dir}/m"}
steps: 10
arms:
  baseline: {}
  treatment: {trainer.parameters.shift: 0.0001}
seeds: SEEDS
compare:
  claims: [{metric: train/reward, margin: 0.02}]
"""


def begin_in(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, seeds: list[int]) -> None:
    """Go to a folder with the recipe, NAME.yaml, whose launches fork and write verdict.json alone."""
    monkeypatch.chdir(folder)
    monkeypatch.setitem(LOCAL_LAUNCHERS, "local", FORKING)
    monkeypatch.setenv("MENDED", str(folder / "mended"))
    in_json = functools.partial(compare_sources, formats=["json"])  # figures take seconds
    monkeypatch.setattr("abrun.report.comparing.compare_sources", in_json)
    (folder / "arm.py").write_text(ARM)
    recipe = RECIPE.replace("SCRIPT", str(folder / "arm.py")).replace("NAME", name)
    (folder / f"{name}.yaml").write_text(recipe.replace("SEEDS", str(seeds)))


def begun(name: str) -> set[int]:
    """The seeds of which a run was begun."""
    experiment_dir = Path("runs") / name
    states = [read_run_state(experiment_dir, run) for run in planned_runs(experiment_dir)]
    return {state.name.seed for state in states if state.status != "pending"}


def verdict_of(name: str) -> dict[str, Any]:
    return json.loads(Path("runs", name, "report/verdict.json").read_text())
