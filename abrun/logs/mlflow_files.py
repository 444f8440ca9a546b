"""Readers for MLflow: folders of the file store (`mlruns/EXPERIMENT/RUN/`), and its SQLite database.

A run of the file store has a `meta.yaml` and a file per metric, parameter and tag. A metric has lines
`<milliseconds> <value> <step>`; a name with slashes is a path. The database has the tables `runs`, `metrics`,
`params` and `tags` (mlflow 3.17, `store/tracking/file_store.py` and `sqlalchemy_store.py`).
"""

import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from abrun.errors import StoreError
from abrun.logs.key_columns import ARM_COLUMNS
from abrun.logs.log import Log, LogStatus, printable, replaced_notes, wrap_read_errors
from abrun.regular_files import is_directory, is_file, read_regular
from abrun.stats.series import Series, build_series, split_series

META = "meta.yaml"
STATUSES: dict[object, LogStatus] = {1: "running", 2: "running", 3: "finished", 4: "failed", 5: "failed"}
STATUS_NAMES = {"RUNNING": 1, "SCHEDULED": 2, "FINISHED": 3, "FAILED": 4, "KILLED": 5}
ENDINGS = {4: "MLflow's status is FAILED", 5: "MLflow's status is KILLED"}
DELETED = "deleted"
RUN_NAME, PARENT, COMMIT = "mlflow.runName", "mlflow.parentRunId", "mlflow.source.git.commit"
MAX_DEPTH = 20  # folders in the name of a metric

Point = tuple[float, float, int]  # time, value, step


def is_run_folder(folder: Path) -> bool:
    """Return True for the folder of one run in MLflow's file store."""
    return is_file(folder / META) and is_directory(folder / "metrics") and is_directory(folder / "tags")


def read_run_folder(folder: Path) -> Log | None:
    """Return the run in a folder of MLflow's file store; None if it was deleted."""
    meta = _read_meta(folder / META)
    if meta.get("lifecycle_stage") == DELETED:
        return None
    points = {name: list(_parse_points(path)) for name, path in _files_below(folder / "metrics")}
    params, tags = (dict(_read_texts(folder / kind)) for kind in ("params", "tags"))
    experiment_meta = folder.parent / META
    experiment = _read_meta(experiment_meta).get("name") if is_file(experiment_meta) else None
    return _make_log(
        place=printable(str(folder)),
        name=str(meta.get("run_name") or tags.get(RUN_NAME) or folder.name),
        run_id=folder.name,
        experiment=str(experiment or folder.parent.name),
        status=meta.get("status"),
        points=points,
        params=params,
        tags=tags,
    )


def read_database(database: sqlite3.Connection, place: str) -> list[Log]:
    """Return the runs in MLflow's SQLite database that were not deleted. Raises sqlite3.Error."""
    experiments = dict(database.execute("SELECT experiment_id, name FROM experiments"))
    points: dict[str, dict[str, list[Point]]] = defaultdict(lambda: defaultdict(list))
    metric_rows = database.execute(
        "SELECT run_uuid, key, timestamp, CASE WHEN is_nan THEN NULL ELSE value END, step FROM metrics "
        "ORDER BY timestamp, step"
    )
    for run, key, time, value, step in metric_rows:
        points[run][key].append((time, float("nan") if value is None else value, step))
    params, tags = (
        _group_texts(database.execute(f"SELECT run_uuid, key, value FROM {table}"))
        for table in ("params", "tags")
    )
    runs = database.execute(
        "SELECT run_uuid, name, status, experiment_id FROM runs WHERE lifecycle_stage != ? "
        "ORDER BY start_time",
        (DELETED,),
    )
    return [
        _make_log(
            place=place,
            name=name or tags[run].get(RUN_NAME) or run,
            run_id=run,
            experiment=str(experiments.get(experiment_id, experiment_id)),
            status=STATUS_NAMES.get(status),
            points=points[run],
            params=params[run],
            tags=tags[run],
        )
        for run, name, status, experiment_id in runs
    ]


def drop_parents(logs: Sequence[Log]) -> list[Log]:
    """Return the logs without parent runs, which group nested runs and record no metric of their own."""
    parents = {log.config[PARENT] for log in logs if log.config and PARENT in log.config}
    return [log for log in logs if log.metrics or log.run_id not in parents]


def _group_texts(rows: Iterable[tuple[str, str, str | None]]) -> dict[str, dict[str, str]]:
    texts: dict[str, dict[str, str]] = defaultdict(dict)
    for run, key, value in rows:
        texts[run][key] = value or ""
    return texts


def _read_meta(path: Path) -> dict[str, Any]:
    with wrap_read_errors(path):
        content = read_regular(path)
    try:
        meta = yaml.safe_load(content)
    except (yaml.YAMLError, UnicodeDecodeError):
        meta = None
    if not isinstance(meta, dict):
        raise StoreError(
            f"{printable(str(path))}: not MLflow's meta.yaml; restore or remove the run's folder"
        )
    return meta


def _files_below(folder: Path, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Path]]:
    """Yield the files in a folder of metrics, parameters or tags, with their names."""
    if not is_directory(folder) or depth > MAX_DEPTH:
        return
    with wrap_read_errors(folder):
        entries = sorted(folder.iterdir())
    for entry in entries:
        if is_file(entry):
            yield prefix + entry.name, entry
        else:
            yield from _files_below(entry, f"{prefix}{entry.name}/", depth + 1)


def _read_texts(folder: Path) -> Iterator[tuple[str, str]]:
    for name, path in _files_below(folder):
        with wrap_read_errors(path):
            yield name, read_regular(path).decode(errors="replace").strip()


def _parse_points(path: Path) -> Iterator[Point]:
    """Yield the points of a metric's file; a torn last line, without a line end, is left out."""
    with wrap_read_errors(path):
        lines = read_regular(path).split(b"\n")
    for number, line in enumerate(lines, 1):
        words = line.split()
        try:
            if line.strip():
                yield float(words[0]), float(words[1]), int(words[2]) if len(words) > 2 else 0
        except (ValueError, IndexError):
            if number == len(lines):
                return
            excerpt = printable(line[:40].decode(errors="replace"))
            raise StoreError(
                f"{printable(str(path))}, line {number}: got '{excerpt}'; expected MLflow's "
                "'time value step': fix or remove the line"
            ) from None


def _make_log(
    *,
    place: str,
    name: str,
    run_id: str,
    experiment: str,
    status: object,
    points: Mapping[str, Sequence[Point]],
    params: Mapping[str, str],
    tags: Mapping[str, str],
) -> Log:
    built: dict[str, tuple[Series, int]] = {}
    numbered: list[str] = []
    for metric, metric_points in points.items():
        steps = [step for _, _, step in metric_points]
        if len(steps) > 1 and not any(steps):  # logged without a step, which MLflow stores as 0
            numbered.append(metric)
            steps = list(range(len(steps)))
        built[metric] = build_series(steps, [value for _, value, _ in metric_points])
    metrics, replaced = split_series(built)
    notes = replaced_notes(replaced)
    if numbered:
        notes.append(f"logged without a step, so numbered from 0: {', '.join(numbered[:5])}")
    config = {key.replace("/", "."): _parse_text(value) for key, value in params.items()}
    config |= {PARENT: tags[PARENT]} if PARENT in tags else {}
    labels = {key.lower(): value for key, value in (*params.items(), *tags.items())}
    return Log(
        name=f"{experiment}/{name}".replace("\n", " "),
        place=place,
        metrics=metrics,
        status=STATUSES.get(status, "unknown"),
        failure=ENDINGS.get(status, "") if isinstance(status, int) else "",
        config=config or None,
        code=(tags[COMMIT],) if tags.get(COMMIT) else (),
        group=experiment,
        job_type=next((labels[column] for column in ARM_COLUMNS if labels.get(column)), None),
        run_id=run_id,
        notes=tuple(notes),
    )


def _parse_text(text: str) -> Any:
    """Return a parameter's value; MLflow stores Python's text of it."""
    words = {"True": True, "False": False, "None": None}
    if text in words:
        return words[text]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
