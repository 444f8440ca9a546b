"""Fleets on disk with a known truth: recipes as logs of runs, each with a frozen reference."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from abrun.logs.recorded.sources import ReadingOptions, open_sources
from abrun.recipe.claims import parse_claim
from abrun.report.comparing import freeze_arm

STEPS, MARGIN, SEED_SD = 20, 0.05, 0.008
SEEDS = (0, 1, 2, 3)


def write_runs(
    folder: Path,
    number: int,  # of the recipe and version: its random stream
    *,
    shift: float = 0.0,
    seeds: Iterable[int] = SEEDS,
    nan_seeds: Iterable[int] = (),  # runs whose loss becomes NaN
    sd: float = SEED_SD,
    num_steps: int = STEPS,
    num_monitors: int = 0,  # further metrics, of noise
) -> Path:
    """Write one log a seed; nothing treated has had an effect at the first step."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        rng = np.random.default_rng([number, seed])
        level = shift + sd * rng.standard_normal()
        steps = np.arange(num_steps)
        learned = 0.5 / (1 + np.exp(-(steps - num_steps / 4) / (num_steps / 8)))
        rewards = 0.2 + learned + (level + 0.005 * rng.standard_normal(num_steps)) * (steps > 0)
        monitors = rng.random((num_steps, num_monitors)).round(6).tolist()
        rows = [
            {
                "step": int(step) + 1,
                "train/reward": float(reward),
                "train/loss": "NaN" if seed in nan_seeds and step > num_steps / 2 else 0.1,
                **{f"monitor/{number}": value for number, value in enumerate(values)},
            }
            for step, reward, values in zip(steps, rewards, monitors, strict=True)
        ]
        (folder / f"seed-{seed}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write_reference(path: Path, number: int, runs: Path, **scenario) -> Path:
    """Write runs, and freeze them as a reference with one claim on the reward."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_runs(runs, number, **scenario)
    claims = [parse_claim(f"train/reward:last 20%:{MARGIN}")]
    experiment = open_sources([str(runs)], ReadingOptions(allows_one_arm=True), claims)
    freeze_arm(experiment, experiment.baseline, path)
    return path


def write_fleet(
    root: Path, shifts: Mapping[str, tuple[float, float]], nan: Mapping[str, Iterable[int]] | None = None
) -> None:
    """Write references, an earlier fleet and the present one, by recipe.

    `shifts`: of the reward in both fleets. `nan`: seeds that become NaN in the present one.
    """
    for number, (name, (shift_before, shift)) in enumerate(shifts.items()):
        write_reference(root / "references" / f"{name}.json", 3 * number, root / "old" / name)
        write_runs(root / "main" / name, 3 * number + 1, shift=shift_before)
        nan_seeds = (nan or {}).get(name, ())
        write_runs(root / "branch" / name, 3 * number + 2, shift=shift, nan_seeds=nan_seeds)
