"""Readers for MLflow: folders of the file store (`mlruns/EXPERIMENT/RUN/`), and its SQLite database.

A run of the file store has a `meta.yaml` and a file per metric, parameter and tag. A metric has lines
`<milliseconds> <value> <step>`; a name with slashes is a path. The database has the tables `runs`, `metrics`,
`params` and `tags` (mlflow 3.17, `store/tracking/file_store.py` and `sqlalchemy_store.py`).
"""

import math
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from abrun.errors import StoreError
from abrun.logs.foreign.files import (
    find_companion,
    link_notes,
    open_file,
    path_kind,
    read_file,
    read_lines,
    walk,
)
from abrun.logs.foreign.sqlite import Database, holds_tables, open_sqlite
from abrun.logs.foreign.values import (
    MAX_CHARACTERS,
    MAX_NAME_CHARACTERS,
    STEP_LIMIT,
    Points,
    as_name,
    as_number,
    as_step,
    as_text,
    left_out_notes,
    parse_foreign_yaml,
)
from abrun.logs.log import Log, LogStatus, collect_points
from abrun.logs.rows import check_number_of_metrics
from abrun.logs.tables import ARM_COLUMNS
from abrun.logs.words import WORDS
from abrun.runs.files import UnreadableError
from abrun.runs.redaction import printable

META = "meta.yaml"
MAX_META_BYTES = 1 << 14
STATUSES: dict[object, LogStatus] = {1: "running", 2: "running", 3: "finished", 4: "failed", 5: "failed"}
STATUS_NAMES = {"RUNNING": 1, "SCHEDULED": 2, "FINISHED": 3, "FAILED": 4, "KILLED": 5}
ENDINGS = {4: "MLflow's status is FAILED", 5: "MLflow's status is KILLED"}
DELETED = "deleted"
RUN_NAME, PARENT, COMMIT = "mlflow.runName", "mlflow.parentRunId", "mlflow.source.git.commit"


def claims(path: Path, names: Collection[str]) -> bool:
    """Return True for a run's folder, whose entries have these names, and for a database."""
    return {META, "metrics", "tags"} <= {*names} or (
        not names and holds_tables(path, WORDS["sqlite"]["mlflow"])
    )


def read(path: Path, name: str, step_column: str | None) -> list[Log]:
    """Return the runs that were not deleted. Raises StoreError."""
    if path_kind(path) == "folder":
        return _read_run_folder(path)
    with open_sqlite(path) as database:
        return _read_database(database)


def _read_run_folder(folder: Path) -> list[Log]:
    meta = _read_meta(folder / META)
    if meta.get("lifecycle_stage") == DELETED:
        return []
    links: list[str] = []
    points = {name: _parse_points(path) for name, path in _files_below(folder, "metrics", links)}
    texts: dict[str, dict[str, str]] = {"params": {}, "tags": {}}
    for kind, texts_by_name in texts.items():
        for name, path in _files_below(folder, kind, links):
            with open_file(path) as file:
                texts_by_name[name] = (as_text(file.read(4 * MAX_CHARACTERS)) or "").strip()
    params, tags = texts.values()
    experiment_meta = find_companion(folder.parent, META)
    experiment = as_name(_read_meta(experiment_meta).get("name")) if experiment_meta else None
    status = meta.get("status")
    log = _make_log(
        place=printable(str(folder)),
        name=as_name(meta.get("run_name")) or tags.get(RUN_NAME) or folder.name,
        run_id=folder.name,
        experiment=experiment or folder.parent.name,
        status=status if isinstance(status, int) else None,
        points=points,
        params=params,
        tags=tags,
        notes=link_notes(printable(str(folder)), links),
    )
    return [log]


def _read_database(database: Database) -> list[Log]:
    experiments = dict(database.rows("SELECT experiment_id, CAST(name AS TEXT) FROM experiments"))
    points: dict[str, dict[str, Points]] = defaultdict(lambda: defaultdict(Points))
    left_out: Counter[str] = Counter()
    metric_rows = database.rows(
        "SELECT CAST(run_uuid AS TEXT), CAST(key AS TEXT), CASE WHEN is_nan THEN NULL ELSE value END, step "
        "FROM metrics ORDER BY timestamp, step"
    )
    for run, key, recorded, step in metric_rows:
        if type(recorded) is float and type(step) is int:  # as MLflow writes them
            value, step = recorded, step if -STEP_LIMIT < step < STEP_LIMIT else None
        else:
            value, step = math.nan if recorded is None else as_number(recorded), as_step(step)
        if not key or len(key) > MAX_NAME_CHARACTERS or value is None or step is None:
            left_out[run] += 1
        else:
            points[run][key].add(step, value)
    params, tags = (_read_texts(database, table) for table in ("params", "tags"))
    runs = database.rows(
        "SELECT CAST(run_uuid AS TEXT), CAST(name AS TEXT), CAST(status AS TEXT), experiment_id FROM runs "
        f"WHERE lifecycle_stage IS NOT '{DELETED}' ORDER BY start_time"
    )
    return [
        _make_log(
            place=database.place,
            name=as_name(name) or tags[run].get(RUN_NAME) or run,
            run_id=run,
            experiment=as_name(experiments.get(experiment_id)) or as_name(experiment_id) or "",
            status=STATUS_NAMES.get(status),
            points=points[run],
            params=params[run],
            tags=tags[run],
            notes=left_out_notes(left_out[run]),
        )
        for run, name, status, experiment_id in runs
        if run  # without an id it has no metrics
    ]


def drop_parents(logs: Sequence[Log]) -> list[Log]:
    """Return the logs without parent runs, which group nested runs and record no metric of their own.

    The id of a parent, which is no setting, is dropped.
    """
    configs = [{**(log.config or {})} for log in logs]
    parents = {config.pop(PARENT) for config in configs if PARENT in config}
    return [
        replace(log, config=config or None)
        for log, config in zip(logs, configs, strict=True)
        if log.metrics or log.run_id not in parents
    ]


def _read_texts(database: Database, table: str) -> dict[str, dict[str, str]]:
    texts: dict[str, dict[str, str]] = defaultdict(dict)
    columns = "CAST(run_uuid AS TEXT), CAST(key AS TEXT), CAST(value AS TEXT)"
    for run, key, value in database.rows(f"SELECT {columns} FROM {table}"):
        if name := as_name(key):
            texts[run][name] = as_text(value) or ""
    return texts


def _read_meta(path: Path) -> dict[str, Any]:
    place = printable(str(path))
    try:
        return parse_foreign_yaml(read_file(path, MAX_META_BYTES), META)
    except UnreadableError:
        raise
    except StoreError as error:
        problem = str(error).removeprefix(f"{place}: ")
        raise StoreError(
            f"{place}: not MLflow's meta.yaml; restore or remove the run's folder ({problem})"
        ) from None


def _files_below(run: Path, kind: str, links: list[str]) -> Iterator[tuple[str, Path]]:
    top = run / kind
    if top.is_symlink():
        links.append(kind)
        return
    for folder in walk(top) if path_kind(top) == "folder" else ():
        links += (link.relative_to(run).as_posix() for link in folder.outside)
        yield from ((path.relative_to(top).as_posix(), path) for path in folder.files)


def _parse_points(path: Path) -> Points:
    """Return the points in a metric's file; a torn last line, without a line end, is left out."""
    points = Points()
    for number, line in enumerate(read_lines(path), 1):
        words = line.split()
        try:
            if words:
                _, value = float(words[0]), float(words[1])
                step = int(words[2]) if len(words) > 2 else 0
                if not -STEP_LIMIT < step < STEP_LIMIT:
                    raise ValueError
                points.add(step, value)
        except (ValueError, IndexError):
            if not line.endswith(b"\n"):
                break
            excerpt = printable(line[:40].decode(errors="replace").rstrip())
            raise StoreError(
                f"{printable(str(path))}, line {number}: got '{excerpt}'; expected MLflow's "
                "'time value step': fix or remove the line"
            ) from None
    return points


def _make_log(
    *,
    place: str,
    name: str,
    run_id: str,
    experiment: str,
    status: object,
    points: Mapping[str, Points],
    params: Mapping[str, str],
    tags: Mapping[str, str],
    notes: Sequence[str],
) -> Log:
    check_number_of_metrics(len(points), place)
    numbered: list[str] = []
    for metric, recorded in points.items():
        if len(recorded.steps) > 1 and not any(recorded.steps):  # without a step, which MLflow stores as 0
            numbered.append(metric)
            recorded.steps = array("q", range(len(recorded.steps)))
    metrics, replaced_notes = collect_points(points)
    notes = [*replaced_notes, *notes]
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
    number = as_number(text)
    return text if number is None else int(text) if re.fullmatch(r"\s*[-+]?\d{1,999}\s*", text) else number
