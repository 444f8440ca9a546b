"""Readers of experiment trackers whose local stores hold many runs: MLflow, SwanLab and trackio.

Each is registered in pyproject.toml as another package's would be. trackio has a SQLite file per project. Its
table `metrics` has a row of JSON per call of `trackio.log`, and `configs` one per run (gradio-app/trackio,
`trackio/sqlite_storage.py` of 0.43; older files have no `run_id`).
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from abrun.errors import StoreError
from abrun.logs import mlflow_files as mlflow
from abrun.logs import swanlab_files as swanlab
from abrun.logs.foreign.columns import TableBuilder
from abrun.logs.foreign.sqlite import Database, holds_tables, open_sqlite
from abrun.logs.foreign.values import (
    MAX_NAME_CHARACTERS,
    as_config,
    as_name,
    as_step,
    left_out_notes,
    parse_json,
)
from abrun.logs.log import Log
from abrun.logs.rows import flat_cells, series_of_table
from abrun.logs.words import WORDS
from abrun.runs.redaction import printable

__all__ = ["complete_tracker_logs", "mlflow", "swanlab", "trackio"]


class Trackio:
    """trackio's database of a project."""

    def claims(self, path: Path, names: Collection[str]) -> bool:
        return not names and holds_tables(path, WORDS["sqlite"]["trackio"])

    def read(self, path: Path, name: str, step_column: str | None) -> list[Log]:
        with open_sqlite(path) as database:
            return _read_trackio(database, path, step_column)


trackio = Trackio()


def complete_tracker_logs(logs: Sequence[Log]) -> list[Log]:
    """Return a source's logs with short names, and as final scores if no metric has a second value.

    Trackers name a run `<project>/<run>`; a project that all runs share is dropped.
    """
    logs = mlflow.drop_parents(logs)
    projects = {log.name.partition("/")[0] for log in logs}
    if len(projects) == 1 and all("/" in log.name for log in logs):
        logs = [replace(log, name=log.name.partition("/")[2]) for log in logs]
    lengths = {len(series) for log in logs for series in log.metrics.values()}
    if lengths != {1} or len(logs) < 2:
        return list(logs)
    guess = "one value of each metric: final scores, so windows and step one do not apply"
    return [replace(log, axis="final", guesses=(*log.guesses, guess)) for log in logs]


def _read_trackio(database: Database, path: Path, step_column: str | None) -> list[Log]:
    key = "run_id" if "run_id" in database.columns("metrics") else "run_name"
    names: dict[str, str] = {}
    tables: dict[str, TableBuilder] = defaultdict(lambda: TableBuilder(database.place, "row"))
    configs: dict[str, dict[str, Any]] = {}
    left_out: Counter[str] = Counter()
    identity = f"CAST(coalesce({key}, run_name, '') AS TEXT), CAST(run_name AS TEXT)"
    for run, name, number, content in database.rows(
        f"SELECT {identity}, step, CAST(metrics AS TEXT) FROM metrics ORDER BY id"
    ):
        step = as_step(number)
        if not run or step is None or content is None:
            left_out[run] += 1
            continue
        names[run] = as_name(name) or names.get(run) or run[:MAX_NAME_CHARACTERS]
        cells = flat_cells(_parse_object(content, database.place))
        rows = tables[run]
        rows.add(len(rows.lines) + 1, {"_step": float(step), **dict(cells)})
    for run, name, content in database.rows(
        f"SELECT {identity}, CAST(config AS TEXT) FROM configs ORDER BY id"
    ):
        if run:
            names.setdefault(run, as_name(name) or run[:MAX_NAME_CHARACTERS])
            configs[run] = {} if content is None else _parse_object(content, database.place)
    logs = []
    for run, name in names.items():
        config = configs.get(run, {})
        table = replace(tables[run].build(), place=f"{database.place}, run {printable(name)}")
        log = series_of_table(table, step_column).as_log(
            name=f"{path.stem}/{name}",
            place=database.place,
            config=as_config({key: value for key, value in config.items() if not key.startswith("_")})
            or None,
            group=as_name(config.get("_Group")),
            run_id=run,
            notes=left_out_notes(left_out[run] + left_out[""]),
        )
        logs.append(log)
    return logs


def _parse_object(content: str, place: str) -> dict[str, Any]:
    value = parse_json(content)
    if not isinstance(value, dict):
        excerpt = printable(content[:40])
        raise StoreError(f"{place}: got '{excerpt}' as a row of trackio; expected a JSON object")
    return value
