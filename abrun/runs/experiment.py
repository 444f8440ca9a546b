"""An experiment's directory: its plan, its declared comparison and the state of its runs."""

import contextlib
import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from abrun.errors import StoreError
from abrun.runs import files
from abrun.runs.layout import EXPERIMENT, NAME_PATTERN, REPORT, RESULT, VERDICT, RunName
from abrun.runs.migrations import migrate, migrate_dotted
from abrun.runs.records import SCHEMA_VERSION, refuse_other_schema
from abrun.runs.rundir import RunDir
from abrun.runs.schemas import Count, ExitCode, Items, checked
from abrun.runs.state import RunState, read_state

REFERENCE = "reference.json"
WARM_STARTS = "warm-starts"
# Seeds of recipes are below 2**31, so that no run shares a random stream with the warm start.
WARM_START = RunName(arm="warm-start", seed=2**31)
MAX_LISTED = 8  # experiments in a message
RECIPE_SUFFIX = ".yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredRun:
    arm: Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]  # it names a folder
    seed: Annotated[Count, Field(lt=2**31)]
    rerun: Annotated[Count, Field(lt=2**31)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredClaims:
    interim: Items[Count] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredMirror:
    project: str | None = None
    entity: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredRecipe:
    """The recipe fields that are read even if another version of abrun wrote the recipe."""

    steps: Count | None = None
    arms: Mapping[str, dict[str, Any] | None] = field(default_factory=dict)
    compare: _StoredClaims = field(default_factory=_StoredClaims)
    policy: dict[str, Any] | None = None
    wandb: _StoredMirror | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decision:
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredExperiment:
    """The fields of `experiment.json`."""

    experiment: str = ""
    recipe: _StoredRecipe = field(default_factory=_StoredRecipe)
    runs: Items[_StoredRun] = ()
    treatment_diff: Mapping[str, Mapping[str, tuple[Any, Any]]] = field(default_factory=dict)
    decided: Mapping[str, _Decision] = field(default_factory=dict)  # by dotted key
    compare_sha256: str = ""
    launched_pairs: Count = 0


def is_experiment(directory: Path) -> bool:
    with files.wrap_read_errors(directory / EXPERIMENT):
        return files.is_file(directory / EXPERIMENT)


def inaccessible_folders(runs_dir: Path) -> list[files.UnreadableError]:
    """Return an error for each folder in `runs_dir` that this user may not enter."""
    errors: list[files.UnreadableError] = []
    files.require_access(runs_dir)
    for folder in sorted(path for path in runs_dir.iterdir() if files.is_directory(path)):
        try:
            files.require_access(folder)
        except files.UnreadableError as error:
            errors.append(error)
    return errors


def list_experiments(runs_dir: Path) -> list[Path]:
    """Return the directories of all experiments, sorted by name."""
    return sorted(path.parent for path in runs_dir.glob(f"*/{EXPERIMENT}"))


def open_experiment(experiment_dir: Path) -> dict[str, Any]:
    """Return the content of `experiment.json` with today's keys. Raises StoreError if it is malformed."""
    if not is_experiment(experiment_dir):
        if os.path.lexists(experiment_dir / EXPERIMENT):
            raise StoreError(f"{experiment_dir / EXPERIMENT}: not a file; restore it")
        raise StoreError(f"{experiment_dir}: no experiment here; {suggest_experiments(experiment_dir)}")
    experiment = files.read_json(experiment_dir / EXPERIMENT)
    refuse_other_schema({"schema_version": None, **experiment}, experiment_dir / EXPERIMENT)
    convert = {"recipe": migrate, "decided": migrate_dotted}
    experiment |= {key: convert[key](value) for key, value in experiment.items() if key in convert}
    if isinstance(diff := experiment.get("treatment_diff"), dict):
        experiment["treatment_diff"] = {arm: migrate_dotted(keys) for arm, keys in diff.items()}
    checked(_StoredExperiment, experiment, experiment_dir / EXPERIMENT)
    return experiment


def write_experiment(experiment_dir: Path, content: Mapping[str, Any]) -> None:
    """Write `experiment.json`, adding the schema version to `content`."""
    files.write_json(experiment_dir / EXPERIMENT, {"schema_version": SCHEMA_VERSION, **content})


def write_diff(experiment_dir: Path, changes: str, diff: str) -> str:
    """Store a diff of uncommitted changes under its hash prefix, once, and return the file's name."""
    path = experiment_dir / f"git-{changes}.diff"
    if not files.is_file(path):
        files.write_file(path, diff.encode())
    return path.name


def find_experiment(experiment: str, runs_dir: Path) -> Path:
    """Return the directory of an experiment given as a name under `runs_dir`, or as a path.

    It need not exist: `open_experiment` raises an error with the closest name.
    """
    dir_by_name, path = runs_dir / experiment, Path(experiment)
    if path.name in ("", ".."):  # its name is part of commands to type next
        return Path(os.path.realpath(path))
    existing_dir = next((directory for directory in (dir_by_name, path) if is_experiment(directory)), None)
    return existing_dir or (path if len(path.parts) > 1 else dir_by_name)


def find_run(run: str, runs_dir: Path) -> Path:
    """Return the directory of a run given as EXPERIMENT/ARM/seed-N under `runs_dir`, or as a path.

    It need not exist. Raises StoreError if it does not, and a similar path does.
    """
    dir_by_name, path = runs_dir / run, Path(run)
    if files.is_directory(dir_by_name) or files.is_directory(path):
        return dir_by_name if files.is_directory(dir_by_name) else path
    if closest := suggest_path(dir_by_name) or suggest_path(path):
        hint = f"did you mean {closest}?"
        raise StoreError(f"{run}: no such run; {hint}")
    return path


def suggest_path(path: Path, accepts: Callable[[Path], bool] = files.is_directory) -> Path | None:
    """Return the existing path whose parts are closest to those of a missing one; None if none is close.

    `accepts`: whether a path may be suggested.
    """
    closest = Path(path.anchor)
    for number, part in enumerate(path.parts[len(closest.parts) :], len(closest.parts) + 1):
        is_last, folder = number == len(path.parts), closest
        closest = folder / part
        if files.exists(closest) and not is_last:
            continue
        names: dict[str, str] = {}  # by what is compared: the ending of recipes makes all of them similar
        with contextlib.suppress(OSError):
            entries = [entry for entry in folder.iterdir() if not is_last or accepts(entry)]
            names = {entry.name.removesuffix(RECIPE_SUFFIX): entry.name for entry in entries}
        matches = difflib.get_close_matches(part.removesuffix(RECIPE_SUFFIX), names, n=1)
        if not matches:
            return None
        closest = folder / names[matches[0]]
    return closest


def suggest_experiments(experiment_dir: Path) -> str:
    """Return what to do where there is no experiment: the closest one, all, or launch one."""
    closest = suggest_path(experiment_dir, is_experiment)
    if closest is not None:
        return f"did you mean {closest}?"
    names = [path.name for path in list_experiments(experiment_dir.parent)]
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"available: {', '.join(names[:MAX_LISTED])}{more}" if names else "none are there yet"


def planned_runs(experiment_dir: Path) -> list[RunName]:
    """Return the planned runs of an experiment in launch order. Raises StoreError."""
    runs = open_experiment(experiment_dir).get("runs")
    if runs is None:
        raise StoreError(f"{experiment_dir / EXPERIMENT}: runs: missing; restore the file, or launch again")
    return [RunName(arm=run["arm"], seed=run["seed"], rerun=run.get("rerun", 0)) for run in runs]


def run_dir(experiment_dir: Path, name: RunName) -> Path:
    return experiment_dir / str(name)


def warm_start_dir(experiment_dir: Path, key: str) -> Path:
    return experiment_dir.parent / WARM_STARTS / key


def read_run_state(experiment_dir: Path, name: RunName) -> RunState:
    """Return the state of one run.

    A run with damaged files is `failed`, with the damage as its reason. A run whose files this user may not
    read is `unreadable`. If the run's directory is gone, the number of steps comes from the recipe.
    """
    state = _read_state(RunDir(run_dir(experiment_dir, name)), name)
    if state.num_steps:
        return state
    recipe = open_experiment(experiment_dir).get("recipe", {})
    steps = (recipe.get("arms", {}).get(name.arm) or {}).get("steps", recipe.get("steps"))
    return replace(state, num_steps=steps if type(steps) is int else 0)


def read_warm_starts(experiment_dir: Path, names: Sequence[RunName]) -> list[tuple[RunState, list[RunName]]]:
    """Return the states of the supervised warm-start runs, each with the runs that start from its weights."""
    run_names: dict[Path, list[RunName]] = {}
    for name in names:
        run = RunDir(run_dir(experiment_dir, name))
        # The state of the run itself reports such an error.
        with contextlib.suppress(StoreError), files.wrap_read_errors(run.path):
            weights = run.initial_weights
            if weights:  # .../warm-starts/<hash>/checkpoints/final
                run_names.setdefault(Path(os.path.normpath(weights)).parent.parent, []).append(name)
    return [
        (_read_state(RunDir(directory), WARM_START), dependents)
        for directory, dependents in run_names.items()
    ]


def _read_state(run: RunDir, name: RunName) -> RunState:
    try:
        with files.wrap_read_errors(run.path):
            if os.path.isfile(run.path):
                raise StoreError(f"{run.path}: is a file, but has to be a folder; move it away")
            return read_state(run, name)
    except StoreError as error:
        status = "unreadable" if isinstance(error, files.UnreadableError) else "failed"
        return RunState(name=name, directory=run.path, status=status, reason=error.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredVerdict:
    """The fields of verdict.json that are the same in every schema version."""

    verdict: Literal["MATCH", "PASS", "MISMATCH", "FAIL", "INCONCLUSIVE", "INVALID", "DESCRIPTION"]
    exit_code: ExitCode


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedVerdict:
    """The verdict of a report, its exit code, and when it was written (seconds since 1970)."""

    verdict: str
    exit_code: int
    written_s: float

    def is_older_than(self, states: Sequence[RunState]) -> bool:
        """Return True if a run started or finished after the report was written.

        A copy of the experiment has new times of files, and another host may have another clock: a run has
        finished later only if both say so.
        """
        for state in states:
            finished_s = _modified_s(state.directory / RESULT)
            if state.ended_s is not None:
                finished_s = min(finished_s, state.ended_s)
            if max(state.started_s or 0.0, finished_s) > self.written_s:
                return True
        return False


def read_reported_verdict(experiment_dir: Path) -> ReportedVerdict | None:
    """Return the verdict of the report in an experiment's directory; None if there is no report.

    Raises StoreError if the file is damaged.
    """
    path = experiment_dir / REPORT / VERDICT
    if not files.is_file(path):
        return None
    stored = files.read_as(_StoredVerdict, path)
    is_description = stored.verdict == "INCONCLUSIVE" and stored.exit_code == 0  # until version 6
    return ReportedVerdict(
        verdict="DESCRIPTION" if is_description else stored.verdict,
        exit_code=stored.exit_code,
        written_s=_modified_s(path),
    )


def _modified_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
