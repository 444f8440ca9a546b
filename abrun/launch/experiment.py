"""An experiment's directory before its first process: new, or taken up again, never half-written.

Independent of the engine that runs it afterwards.
"""

import contextlib
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from abrun import store
from abrun.errors import LaunchError, RecipeError, StoreError
from abrun.launch.processes import works_in
from abrun.plan import Plan, RunName, compare_hash, config_diff
from abrun.recipe import NAME, Run, stored_run


def experiment_dir_of(plan: Plan, runs_dir: Path, name: str | None = None) -> Path:
    """Where an experiment lives. Raises LaunchError for a name that cannot be a folder there."""
    name = plan.recipe.name if name is None else name
    if not re.fullmatch(NAME, name) or name == store.WARM_STARTS:
        raise LaunchError(
            f"--name: got {name!r}; allowed: letters, digits, '.', '_' and '-', at most 100, "
            f"and not {store.WARM_STARTS!r}"
        )
    return Path(os.path.realpath(runs_dir)) / name


@contextlib.contextmanager
def owned_experiment(plan: Plan, experiment_dir: Path, *, resume: bool) -> Iterator[str | None]:
    """Own a plan's directory, with every run's `config.json` in it; yields a note on a dead launcher's lock.

    A new experiment that cannot be written whole leaves nothing behind. Raises LaunchError or StoreError
    where it exists already (or, to resume, does not), holds other configurations, or is somebody's at work.
    """
    if resume:
        store.open_experiment(experiment_dir)
    else:
        _check_new(experiment_dir)
    made = [path for path in (experiment_dir, *experiment_dir.parents) if not os.path.lexists(path)]
    try:
        with store.launcher_lock(experiment_dir) as note:
            if resume:
                _check_same(plan, experiment_dir)
                _write(plan, experiment_dir)
            else:
                _check_new(experiment_dir)  # again: a faster launcher may have made it meanwhile
                try:
                    _write(plan, experiment_dir)
                except StoreError:
                    shutil.rmtree(experiment_dir, ignore_errors=True)
                    raise
            yield note
    finally:
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()  # removes a folder that nothing came to lie in


def write_run(
    directory: Path, experiment: str, name: RunName, config: Run, warm_start: Path | None = None
) -> None:
    """Tell a trainer what to do: the `config.json` of its run directory."""
    final = warm_start and os.path.relpath(warm_start / "checkpoints" / "final", directory)
    store.write_json(
        directory / "config.json",
        {
            "schema_version": store.SCHEMA_VERSION,
            "experiment": experiment,
            "arm": name.arm,
            "seed": name.seed,
            "rerun": name.rerun,
            "initial_weights": final,
            "config": config.model_dump(mode="json"),
        },
    )


def warm_start_dir(experiment_dir: Path, key: str) -> Path:
    return experiment_dir.parent / store.WARM_STARTS / key


def worker_alive(directory: Path) -> int | None:
    """The id of a process of this host that still works in a run directory: an earlier launcher's."""
    attempts = _json(directory / "meta.json").get("attempts", [])
    if not attempts or attempts[-1].get("host") != socket.gethostname():
        return None
    pids = (attempts[-1].get("pid"), _json(directory / "heartbeat.json").get("pid"))
    return next((pid for pid in pids if isinstance(pid, int) and works_in(pid, directory)), None)


def _write(plan: Plan, experiment_dir: Path) -> None:
    path = experiment_dir / "experiment.json"
    reference = plan.recipe.compare.reference
    if (
        reference and not (experiment_dir / store.REFERENCE).is_file()
    ):  # a later change of the file is none here
        with store.explained(experiment_dir / store.REFERENCE):
            shutil.copyfile(Path(reference).expanduser(), experiment_dir / store.REFERENCE)
    declared = {"compare_sha256": compare_hash(plan.recipe.compare), "launched_pairs": len(plan.recipe.seeds)}
    declared |= {
        key: value for key, value in _json(path).items() if key in declared
    }  # the first launch's stay
    store.write_json(
        path,
        {
            "schema_version": store.SCHEMA_VERSION,
            "experiment": experiment_dir.name,
            "recipe": plan.recipe.model_dump(mode="json"),
            "runs": [
                {"arm": run.name.arm, "seed": run.name.seed, "rerun": run.name.rerun} for run in plan.runs
            ],
            "treatment_diff": plan.treatment_diff,
            **declared,
        },
    )
    for run in plan.runs:
        directory = store.run_dir(experiment_dir, run.name)
        if not (directory / "config.json").is_file():
            warm_start = warm_start_dir(experiment_dir, run.warm_start) if run.warm_start else None
            write_run(directory, experiment_dir.name, run.name, run.config, warm_start)


def _check_new(experiment_dir: Path) -> None:
    if (experiment_dir / "experiment.json").is_file():
        names = store.planned_runs(experiment_dir)
        finished = sum(store.run_state(experiment_dir, name).status == "finished" for name in names)
        raise LaunchError(
            f"{experiment_dir}: an experiment is here already, {finished} of {len(names)} runs finished; "
            "continue it with --resume, or give this one another --name"
        )
    if experiment_dir.is_dir() and any(path.name != store.LOCK for path in experiment_dir.iterdir()):
        raise LaunchError(f"{experiment_dir}: not empty, and no experiment of abrun; choose another --name")


def _check_same(plan: Plan, experiment_dir: Path) -> None:
    """Refuse to mix experiments: every run that is here must be planned, with the configuration it has."""
    planned = {run.name: run for run in plan.runs}
    for name in store.planned_runs(experiment_dir):
        directory = store.run_dir(experiment_dir, name)
        if name not in planned:
            raise LaunchError(
                f"{experiment_dir}: --resume: the recipe has no run {name}, which is here; "
                "runs can be added, not dropped: restore arms, seeds and aa_reruns, or choose another --name"
            )
        if not (directory / "config.json").is_file():
            continue
        difference = _difference(directory, planned[name].config)
        if difference:
            raise LaunchError(
                f"{directory}: --resume: the run directory of another experiment: {difference}; "
                "restore the recipe, or give this one another --name"
            )
        pid = worker_alive(directory)
        if pid is not None:
            raise LaunchError(
                f"{directory}: --resume: process {pid} of an earlier launcher still works here; "
                f"wait for it, or stop it with: kill {pid}"
            )


def _difference(directory: Path, config: Run) -> str | None:
    """The first value in which a run directory's configuration is not the planned one."""
    try:
        there = stored_run(store.read_json(directory / "config.json").get("config"))
    except RecipeError:
        return "its config.json does not hold a configuration of this abrun"
    differences = config_diff(there, config)
    for key, (has, wants) in differences.items():
        more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
        return f"{key} is {has!r} there and {wants!r} in the recipe{more}"
    return None


def _json(path: Path) -> dict[str, Any]:
    return store.read_json(path) if path.is_file() else {}
