"""Runs of abrun itself, wherever their directories were copied to."""

from pathlib import Path
from typing import Any

import orjson

from abrun import store
from abrun.errors import StoreError
from abrun.logs.log import Log, LogStatus, printable
from abrun.plan import RunName
from abrun.recipe import dotted


def is_run_dir(folder: Path) -> bool:
    """Whether a folder is a run directory of abrun: its config.json says whose."""
    return (folder / "metrics.jsonl").is_file() and _identity(folder) is not None


def read_run_dir(folder: Path, name: str) -> Log:
    identity = _identity(folder)
    assert identity is not None
    config = store.read_json(folder / "config.json")
    environment = folder / "environment.json"
    status, failure = _status(folder, identity)
    return Log(
        name=name,
        place=printable(str(folder)),
        metrics=store.read_metrics(folder),
        status=status,
        failure=failure,
        config=dotted({**config["config"], "initial_weights": config.get("initial_weights")}),
        environment=store.read_json(environment) if environment.is_file() else None,
        identity=identity,
    )


def _status(folder: Path, identity: RunName) -> tuple[LogStatus, str]:
    if (folder / "result.json").is_file():
        return "finished", ""
    experiment_dir = folder.resolve().parent.parent
    if store.run_dir(experiment_dir, identity) != folder.resolve():
        return "unknown", ""  # a copy under another name
    state = store.run_state(experiment_dir, identity)
    if state.status in ("failed", "interrupted"):
        return "failed", state.message or state.status
    return "running", ""


def _identity(folder: Path) -> RunName | None:
    try:
        config: Any = orjson.loads((folder / "config.json").read_bytes())
        arm, seed, rerun = config["arm"], config["seed"], config["rerun"]
        its_config = config["config"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not (
        isinstance(arm, str) and type(seed) is int and type(rerun) is int and isinstance(its_config, dict)
    ):
        raise StoreError(
            f"{printable(str(folder / 'config.json'))}: got arm {arm!r}, seed {seed!r}, rerun {rerun!r}; "
            "text and two whole numbers are expected: launch the run again"
        )
    return RunName(arm=printable(arm), seed=seed, rerun=rerun)
