"""Experiments on disk with a known truth, written as the launcher and the trainer write them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from abrun.experiment.plan import PlannedRun, RunName, compare_hash, make_plan
from abrun.recipe.experiment import Recipe

RECIPE: dict[str, Any] = {
    "name": "simulated",
    "algorithm": {"type": "grpo"},
    "model": {"preset": "qwen2-tiny"},
    "task": {"type": "arithmetic"},
    "steps": 40,
    "arms": {"baseline": {}, "treatment": {"policy.logprobs.impl": "chunked"}},
    "seeds": [0, 1, 2, 3, 4],
    "controls": {"aa_reruns": 2},
    "compare": {"claims": [{"metric": "train/reward", "margin": 0.02}]},
}
ENVIRONMENT = {
    "versions": {"torch": "2.11.0", "transformers": "5.5.3"},
    "python": "3.11.9",
    "devices": ["NVIDIA H200"],
    "hosts": ["node-1"],
    "dtype": "float32",
}
Edit = Callable[[dict[str, Any]], None]


def write_experiment(
    experiment_dir: Path,
    *,
    shift: float | dict[str, float] = 0.0,  # added to the treatment's reward after step one; by arm
    noise: float = 0.004,  # sd over pairs of what the treatment adds to its baseline's window mean
    **recipe: Any,
) -> Path:
    """Write an experiment of which every run finished. Seeds and arms make the numbers; nothing else does."""
    plan = make_plan(Recipe.model_validate({**RECIPE, "name": experiment_dir.name, **recipe}))
    content = {
        "schema_version": 1,
        "experiment": experiment_dir.name,
        "recipe": plan.recipe.model_dump(mode="json"),
        "runs": [{"arm": r.name.arm, "seed": r.name.seed, "rerun": r.name.rerun} for r in plan.runs],
        "treatment_diff": plan.treatment_diff,
        "compare_sha256": compare_hash(plan.recipe.compare),
        "launched_pairs": len(plan.recipe.seeds),
    }
    write(experiment_dir / "experiment.json", content)
    for run in plan.runs:
        of_arm = shift.get(run.name.arm, 0.0) if isinstance(shift, dict) else shift
        _write_run(experiment_dir, run, of_arm if run.name.arm != "baseline" else 0.0, noise)
    return experiment_dir


def _write_run(experiment_dir: Path, run: PlannedRun, shift: float, noise: float) -> None:
    directory = experiment_dir / str(run.name)
    config = {"schema_version": 1, "experiment": experiment_dir.name, "initial_weights": None}
    config |= {"arm": run.name.arm, "seed": run.name.seed, "rerun": run.name.rerun}
    write(directory / "config.json", {**config, "config": run.config.model_dump(mode="json")})
    write(directory / "attempts/0001.json", {"status": "finished", "started_s": 0.0, "exit_code": 0})
    of_seed = {"prompts_sha256": f"{run.name.seed:064x}", "initial_weights_hash": f"{run.name.seed:016x}"}
    write(directory / "environment.json", {**ENVIRONMENT, **of_seed})
    write(directory / "result.json", {"steps": run.config.steps})
    rows = metric_rows(run.name, run.config.steps, shift, noise)
    write_rows(directory, rows)


def metric_rows(name: RunName, steps: int, shift: float, noise: float) -> list[dict[str, Any]]:
    """A learning curve that a seed shares between arms, and what this one run adds to it after step one."""
    shared = np.random.default_rng([1, name.seed])
    own = np.random.default_rng([2, name.seed, name.rerun, *name.arm.encode()])
    level, own_level = 0.03 * shared.standard_normal(), noise * own.standard_normal()
    wiggle, own_wiggle = shared.standard_normal((steps, 3)), own.standard_normal((steps, 3))
    fused = name.arm != "baseline"
    rows = []
    for i in range(steps):
        after = min(i / 10, 1.0)  # nothing treated has had an effect at step one
        learned = 0.5 / (1 + np.exp(-(i - steps / 4) / (steps / 8)))
        reward = 0.2 + learned + level + 0.01 * wiggle[i, 0] + after * (own_level + shift)
        norm = np.exp(-0.5 + 0.3 * wiggle[i, 1] + after * 0.1 * own_wiggle[i, 1])
        error = 1 + 0.008 * np.exp(0.3 * wiggle[i, 2] + after * 0.2 * own_wiggle[i, 2])
        rows.append(
            {
                "step": i + 1,
                "attempt": 1,
                "time_s": float(i),
                "train/reward": float(reward + after * 0.005 * own_wiggle[i, 0]),
                "train/loss": float(1e-3 * wiggle[i, 1] + (1e-7 * own_wiggle[0, 0] if fused else 0.0)),
                "train/grad_norm": float(norm),
                "train/entropy": float(1.5 - learned),
                "train/token_mult_prob_error": float(error),
                "timing/train/total_step_time_s": float((0.8 if fused else 1.0) * (1 + 0.05 * own.random())),
                "memory/logprobs/peak_allocated_bytes": (2 if fused else 6) * 2**30,
                "memory/forward_backward/peak_allocated_bytes": (5 if fused else 9) * 2**30
                + name.seed * 2**20,
            }
        )
    return rows


def write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def edit(path: Path, change: Edit) -> None:
    content = json.loads(path.read_text())
    change(content)
    write(path, content)


def write_rows(directory: Path, rows: list[dict[str, Any]]) -> None:
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def edit_rows(directory: Path, change: Edit) -> None:
    """Change every row of a run in place."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        change(row)
    write_rows(directory, rows)


OUT_OF_MEMORY = "CUDA out of memory"


def fail(directory: Path, *, after_steps: int, message: str = OUT_OF_MEMORY) -> None:
    """Make a finished run one that died after some steps."""
    lines = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    (directory / "metrics.jsonl").write_text("".join(lines[:after_steps]))
    (directory / "result.json").unlink()
    failed = {"status": "failed", "started_s": 0.0, "exit_code": 1, "message": message}
    write(directory / "attempts/0001.json", failed)
