"""Shipped references, one for each set of claimed metrics, against their runs, as they are and moved."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from abrun.recipe.reading import nested
from tests.golden.case import add_case, compare_in_short
from tests.verdict.simulate import write, write_rows

Commands = Iterator[Sequence[str]]
ROOT = Path(__file__).parents[3]
NAMES = (
    "dpo-fused",
    "fp32-head",
    "grpo-fused",
    "grpo-fused-recorded",
    "ppo-word-problems",
    "sft-fused-float32",
)
REFERENCES = {f"smollm2-{name}": ROOT / f"docs/evidence/smollm2-{name}/reference.json" for name in NAMES}
REFERENCES["quickstart"] = ROOT / "recipes/regression/quickstart.json"


def _write_runs(reference: dict[str, Any], folder: Path, change: Callable[[str, int, float], float]) -> None:
    """The frozen runs as run directories, with each value changed."""
    for run in reference["runs"]:
        suffix = f"-aa{run['rerun']}" if run["rerun"] else ""
        directory = folder / f"baseline/seed-{run['seed']}{suffix}"
        identity = {"experiment": folder.name, "arm": "baseline", "seed": run["seed"], "rerun": run["rerun"]}
        config = nested({**reference["config"], **run["config"]})
        write(directory / "config.json", {"schema_version": 1, **identity, "config": config})
        write(directory / "environment.json", {**reference["environment"], **run["environment"]})
        write(directory / "attempts/0001.json", {"status": "finished", "started_s": 0.0, "exit_code": 0})
        write(directory / "result.json", {"steps": reference["config"]["steps"]})
        rows: dict[int, dict[str, Any]] = {}
        for metric, series in run["metrics"].items():
            for step, value in zip(series["steps"], series["values"], strict=True):
                row = rows.setdefault(step, {"step": step, "attempt": 1, "time_s": float(step)})
                row[metric] = change(metric, step, value) if isinstance(value, int | float) else value
        write_rows(directory, [rows[step] for step in sorted(rows)])


def _moved(metric: str, step: int, value: float) -> float:
    return (
        value + (0.3 * abs(value) + 0.01) * (step > 1) if metric in ("train/reward", "train/loss") else value
    )


def _shipped(path: Path) -> Callable[[Path], Commands]:
    def build(folder: Path) -> Commands:
        shutil.copy(path, folder / "reference.json")
        reference = json.loads(path.read_text())
        _write_runs(reference, folder / "same", lambda metric, step, value: value)
        _write_runs(reference, folder / "moved", _moved)
        yield compare_in_short("same", "--reference", "reference.json")
        yield ["compare", "moved", "--reference", "reference.json"]

    return build


for _name, _path in REFERENCES.items():
    add_case(f"shipped-{_name}", _shipped(_path))
