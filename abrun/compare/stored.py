"""An experiment of the run store, ready to compare."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from abrun.compare.experiment import Experiment, Run
from abrun.compare.reference import load_reference
from abrun.errors import RecipeError, StoreError
from abrun.logs.log import printable
from abrun.plan import RunName
from abrun.recipe import BASELINE, dotted, stored_recipe
from abrun.series import Series
from abrun.store import REFERENCE, open_experiment, read_json, read_metrics_of, run_dir, run_state


def load_experiment(experiment_dir: Path) -> Experiment:
    """Raises StoreError where a file is missing, corrupt or not abrun's."""
    path = experiment_dir / "experiment.json"
    content = open_experiment(experiment_dir)
    missing = [
        key
        for key in ("experiment", "recipe", "runs", "treatment_diff", "compare_sha256")
        if key not in content
    ]
    if missing:
        raise StoreError(f"{path}: {missing[0]}: missing; launch the recipe again under another --name")
    try:
        recipe = stored_recipe(content["recipe"])
    except RecipeError as error:
        raise StoreError(f"{path}: {error}; compare with the abrun that launched it") from None
    names = [RunName(**run) for run in content["runs"]]
    return Experiment(
        name=content["experiment"],
        arms=(BASELINE, *(arm for arm in recipe.arms if arm != BASELINE)),
        compare=recipe.compare,
        treatment_diff=content["treatment_diff"],
        launched_compare_sha256=content["compare_sha256"],
        launched_pairs=content.get("launched_pairs", len(recipe.seeds)),
        reference=load_reference(experiment_dir / REFERENCE) if recipe.compare.reference else None,
        runs={
            name: _load_run(experiment_dir, name, metrics)
            for name, metrics in zip(
                names, read_metrics_of([run_dir(experiment_dir, name) for name in names]), strict=True
            )
        },
    )


def _load_run(experiment_dir: Path, name: RunName, metrics: Mapping[str, Series]) -> Run:
    directory = run_dir(experiment_dir, name)
    state = run_state(experiment_dir, name)
    config = _json_or_none(directory / "config.json") or {}
    return Run(
        name=name,
        place=str(directory),
        status=state.status if directory.is_dir() else "missing",
        failure=_failure(directory, state.message) if state.status == "failed" else "",
        identity={key: config.get(key) for key in ("arm", "seed", "rerun")},
        config=dotted({**config.get("config", {}), "initial_weights": config.get("initial_weights")}),
        environment=_json_or_none(directory / "environment.json"),
        metrics={printable(metric): series for metric, series in metrics.items()},
    )


def _json_or_none(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.is_file() else None


def _failure(directory: Path, message: str | None) -> str:
    """How the last attempt ended, in a few words: `exit code 1: CUDA out of memory`."""
    attempts = (_json_or_none(directory / "meta.json") or {}).get("attempts") or [{}]
    last = attempts[-1]
    signal, code = last.get("signal"), last.get("exit_code")
    how = f"signal {signal}" if signal else f"exit code {code}" if code is not None else "no exit code"
    return f"{how}: {message}" if message else how
