"""Readers of experiment trackers whose local stores hold many runs: MLflow, trackio and SwanLab.

Each is registered in pyproject.toml as another package's would be.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from abrun.logs.log import Log
from abrun.logs.mlflow_files import PARENT, drop_parents, is_run_folder, read_run_folder
from abrun.logs.sqlite_files import find_sqlite_format, read_sqlite_file
from abrun.logs.swanlab_files import SUFFIX, read_swanlab_file


class Mlflow:
    """MLflow's file store, a folder a run, and its database."""

    def claims(self, path: Path, names: Collection[str]) -> bool:
        return is_run_folder(names) or (not names and find_sqlite_format(path) == "mlflow")

    def read(self, path: Path, name: str, step_column: str | None) -> list[Log]:
        if find_sqlite_format(path) == "mlflow":
            return read_sqlite_file(path, "mlflow", step_column)
        log = read_run_folder(path)
        return [log] if log else []


class Trackio:
    """trackio's database of a project."""

    def claims(self, path: Path, names: Collection[str]) -> bool:
        return not names and find_sqlite_format(path) == "trackio"

    def read(self, path: Path, name: str, step_column: str | None) -> list[Log]:
        return read_sqlite_file(path, "trackio", step_column)


class SwanLab:
    """SwanLab's backup file of a run."""

    def claims(self, path: Path, names: Collection[str]) -> bool:
        return not names and path.suffix == SUFFIX

    def read(self, path: Path, name: str, step_column: str | None) -> list[Log]:
        return [read_swanlab_file(path, name)]


mlflow, trackio, swanlab = Mlflow(), Trackio(), SwanLab()


def complete_tracker_logs(logs: Sequence[Log]) -> list[Log]:
    """Return a source's logs with short names, and as final scores if no metric has a second value.

    Trackers name a run `<project>/<run>`; a project that all runs share is dropped.
    """
    logs = [_without_parent(log) for log in drop_parents(logs)]
    projects = {log.name.partition("/")[0] for log in logs}
    if len(projects) == 1 and all("/" in log.name for log in logs):
        logs = [replace(log, name=log.name.partition("/")[2]) for log in logs]
    lengths = {len(series) for log in logs for series in log.metrics.values()}
    if lengths != {1} or len(logs) < 2:
        return list(logs)
    guess = "one value of each metric: final scores, so windows and step one do not apply"
    return [replace(log, axis="final", guesses=(*log.guesses, guess)) for log in logs]


def _without_parent(log: Log) -> Log:
    """Return the log without the id of MLflow's parent run, which is no setting."""
    if PARENT not in (log.config or {}):
        return log
    return replace(log, config={key: value for key, value in (log.config or {}).items() if key != PARENT})
