"""An experiment's directory: what was planned and declared, and what its runs are doing."""

import contextlib
import multiprocessing
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from abrun import layout
from abrun.errors import StoreError
from abrun.layout import EXPERIMENT, NAME, RunName
from abrun.redaction import shortened
from abrun.store.files import read_json, readable, write_file, write_json
from abrun.store.records import SCHEMA_VERSION, RunState, refuse_other_schema
from abrun.store.rundir import RunDir

if TYPE_CHECKING:
    from abrun.series import Series

REFERENCE = "reference.json"
WARM_STARTS = "warm-starts"
WORTH_A_PROCESS = 1 << 26  # bytes of JSON lines that are quicker read by several processes


def is_experiment(directory: Path) -> bool:
    return (directory / EXPERIMENT).is_file()


def experiments_in(runs_dir: Path) -> list[Path]:
    """The directories of all experiments, by name."""
    return sorted(path.parent for path in runs_dir.glob(f"*/{EXPERIMENT}"))


def open_experiment(experiment_dir: Path) -> dict[str, Any]:
    """`experiment.json` of an experiment directory. Raises StoreError where there is none."""
    if not is_experiment(experiment_dir):
        if os.path.lexists(experiment_dir / EXPERIMENT):
            raise StoreError(f"{experiment_dir / EXPERIMENT}: not a file: restore it")
        there = [path.name for path in experiments_in(experiment_dir.parent)]
        known = f"there are: {', '.join(there)}" if there else "launch a recipe first"
        raise StoreError(f"{experiment_dir}: no experiment here; {known}")
    experiment = read_json(experiment_dir / EXPERIMENT)
    refuse_other_schema({"schema_version": None, **experiment}, experiment_dir / EXPERIMENT)
    for key, (fits, expected) in FORMS.items():
        if key in experiment and not fits(experiment[key]):
            raise StoreError(
                f"{experiment_dir / EXPERIMENT}: {key}: got {shortened(experiment[key])}; {expected} is "
                "expected: restore the file, or launch the recipe under another --name"
            )
    return experiment


def _is_run(value: Any) -> bool:
    if not isinstance(value, dict) or not {"arm", "seed"} <= value.keys() <= {"arm", "seed", "rerun"}:
        return False
    numbers = value["seed"], value.get("rerun", 0)
    arm = isinstance(value["arm"], str) and re.fullmatch(NAME, value["arm"])
    return bool(arm) and all(type(number) is int and 0 <= number < 2**31 for number in numbers)


def _is_diff(value: Any) -> bool:
    """arm -> dotted key -> [the baseline's value, the arm's]"""
    return isinstance(value, dict) and all(
        isinstance(changes, dict)
        and all(isinstance(pair, list) and len(pair) == 2 for pair in changes.values())
        for changes in value.values()
    )


def _is_decided(value: Any) -> bool:
    """dotted key -> what was decided of it, with the reason"""
    return isinstance(value, dict) and all(
        isinstance(one, dict) and isinstance(one.get("why"), str) for one in value.values()
    )


FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "experiment": (lambda value: isinstance(value, str), "text"),
    "recipe": (lambda value: isinstance(value, dict), "a mapping"),
    "runs": (
        lambda value: isinstance(value, list) and all(map(_is_run, value)),
        "a list of arm, seed, rerun",
    ),
    "treatment_diff": (_is_diff, "pairs of values by arm and key"),
    "decided": (_is_decided, "a mapping by key, each with why"),
    "compare_sha256": (lambda value: isinstance(value, str), "text"),
    "launched_pairs": (lambda value: type(value) is int and value >= 0, "a whole number"),
}


def write_experiment(experiment_dir: Path, content: Mapping[str, Any]) -> None:
    """Write what `open_experiment` reads, all but the version of its form."""
    write_json(experiment_dir / EXPERIMENT, {"schema_version": SCHEMA_VERSION, **content})


def write_diff(experiment_dir: Path, changes: str, diff: str) -> str:
    """Keep uncommitted changes of code, once, under the start of their hash; return the file's name."""
    path = experiment_dir / f"git-{changes}.diff"
    if not path.is_file():
        write_file(path, diff.encode())
    return path.name


def find_experiment(experiment: str, runs_dir: Path) -> Path:
    """The directory of an experiment given as a path or as a name; whether there is one, others find out."""
    named, path = runs_dir / experiment, Path(experiment)
    here = next((each for each in (named, path) if is_experiment(each)), None)
    return here or (path if "/" in experiment else named)


def planned_runs(experiment_dir: Path) -> list[RunName]:
    """The runs of an experiment, in launch order."""
    runs = open_experiment(experiment_dir).get("runs")
    if runs is None:
        raise StoreError(f"{experiment_dir / EXPERIMENT}: runs: missing; restore the file, or launch again")
    return [RunName(**run) for run in runs]


def run_dir(experiment_dir: Path, name: RunName) -> Path:
    return experiment_dir / str(name)


def run_state(experiment_dir: Path, name: RunName) -> RunState:
    """What one run is doing; one whose files cannot be read has failed, and its message says why.

    Of one whose directory was removed, the steps are the recipe's.
    """
    state = _state(RunDir(run_dir(experiment_dir, name)), name)
    return state if state.num_steps else replace(state, num_steps=_steps_in_recipe(experiment_dir, name.arm))


def _steps_in_recipe(experiment_dir: Path, arm: str) -> int:
    recipe = open_experiment(experiment_dir).get("recipe")
    arms = recipe.get("arms") if isinstance(recipe, dict) else None
    change = arms.get(arm) if isinstance(arms, dict) else None
    for tree in (change, recipe):
        steps = tree.get("steps") if isinstance(tree, dict) else None
        if type(steps) is int:
            return steps
    return 0


def warm_start_states(experiment_dir: Path, names: Sequence[RunName]) -> list[RunState]:
    """What the supervised runs behind the initial weights of an experiment's runs are doing."""
    directories: dict[Path, None] = {}
    for name in names:
        run = RunDir(run_dir(experiment_dir, name))
        with contextlib.suppress(StoreError), readable(run.path):  # its state says that
            weights = run.initial_weights
            if weights:  # .../warm-starts/<hash>/checkpoints/final
                directories[Path(os.path.normpath(weights)).parent.parent] = None
    return [_state(RunDir(directory), RunName(arm="warm-start", seed=0)) for directory in directories]


def _state(run: RunDir, name: RunName) -> RunState:
    try:
        with readable(run.path):
            if os.path.isfile(run.path):
                raise StoreError(f"{run.path}: a file is where a folder has to be: move it away")
            return run.state(name)
    except StoreError as error:
        return RunState(
            name=name,
            directory=run.path,
            status="failed",
            step=0,
            num_steps=0,
            started_s=None,
            message=str(error),
            ending=None,
        )


def metrics_of(runs: Sequence[RunDir]) -> "list[dict[str, Series] | StoreError]":
    """The metrics of many runs, or why one's cannot be read.

    On all cores where files are large and this process has no threads.
    """
    num_bytes = sum(map(_bytes_to_parse, runs))
    if num_bytes <= WORTH_A_PROCESS or not can_fork():
        return [_metrics_or_error(run) for run in runs]
    with multiprocessing.get_context("fork").Pool(min(len(runs), os.cpu_count() or 1)) as pool:
        return pool.map(_metrics_or_error, runs, chunksize=1)


def _bytes_to_parse(run: RunDir) -> int:
    try:
        cached = (run.path / layout.METRICS_CACHE).is_file()
    except OSError:
        return 0
    return 0 if cached else run.num_metric_bytes


def _metrics_or_error(run: RunDir) -> "dict[str, Series] | StoreError":
    try:
        with readable(run.path):
            return run.metrics()
    except StoreError as error:
        return error


def can_fork() -> bool:
    """Whether a copy of this process can do some of its work: not where threads may hold locks."""
    return threading.active_count() == 1 and "fork" in multiprocessing.get_all_start_methods()
