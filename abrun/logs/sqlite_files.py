"""Reader for SQLite files of experiment trackers: trackio, and MLflow's database.

trackio has a file per project. Its table `metrics` has a row of JSON per call of `trackio.log`, and `configs`
one per run (gradio-app/trackio, `trackio/sqlite_storage.py` of 0.43; older files have no `run_id`).
"""

import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from abrun.errors import StoreError
from abrun.logs.log import Log, printable
from abrun.logs.mlflow_files import read_database
from abrun.logs.rows import build_series, flat_cells, parse_json
from abrun.recipe.reading import dotted
from abrun.regular_files import exists, open_regular

MAGIC = b"SQLite format 3\x00"
SUFFIXES = (".db", ".sqlite", ".sqlite3")
TABLES = {"mlflow": {"experiments", "runs", "metrics", "params", "tags"}, "trackio": {"metrics", "configs"}}
# Of the table `metrics`
COLUMNS = {"mlflow": {"run_uuid", "key"}, "trackio": {"run_name", "step", "metrics"}}


def find_sqlite_format(path: Path) -> Literal["mlflow", "trackio"] | None:
    """Return the tracker that wrote a SQLite file; None for any other file."""
    if path.suffix.lower() not in SUFFIXES:
        return None
    try:
        with open_regular(path) as file:
            if file.read(len(MAGIC)) != MAGIC:
                return None
        with _connect(path) as database:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
            columns = {row[1] for row in database.execute("PRAGMA table_info(metrics)")}
    except (OSError, StoreError, ValueError, sqlite3.Error):  # ValueError: the text of an error is not UTF-8
        return None
    for tracker in ("mlflow", "trackio"):
        if tables >= TABLES[tracker] and columns >= COLUMNS[tracker]:
            return tracker
    return None


def read_sqlite_file(path: Path, tracker: str, step_column: str | None = None) -> list[Log]:
    """Return the runs in a tracker's SQLite file. Raises StoreError."""
    place = printable(str(path))
    try:
        with _connect(path) as database:
            if tracker == "mlflow":
                return read_database(database, place)
            return _read_trackio(database, path, step_column)
    except (sqlite3.Error, OverflowError, TypeError, ValueError) as error:  # columns may hold any type
        problem = printable(str(error))
        raise StoreError(f"{place}: SQLite cannot read it ({problem}); copy it again") from None


@contextmanager
def _connect(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a SQLite file without write access; a tracker may still write it.

    Without a write-ahead log next to it nobody does, and SQLite must not create one.
    """
    is_written = exists(path.with_name(f"{path.name}-wal"))
    options = "mode=ro" if is_written else "mode=ro&immutable=1"
    with closing(sqlite3.connect(f"file:{quote(str(path.resolve()))}?{options}", uri=True)) as database:
        database.execute("PRAGMA trusted_schema = OFF")
        database.text_factory = lambda text: text.decode(errors="replace")
        yield database


def _read_trackio(database: sqlite3.Connection, path: Path, step_column: str | None) -> list[Log]:
    has_ids = "run_id" in {row[1] for row in database.execute("PRAGMA table_info(metrics)")}
    key = "run_id" if has_ids else "run_name"
    names: dict[str, str] = {}
    rows: dict[str, list[dict[str, float | str]]] = defaultdict(list)
    for run, name, step, content in database.execute(
        f"SELECT {key}, run_name, step, metrics FROM metrics ORDER BY id"
    ):
        names[run] = name
        rows[run].append({"_step": float(step), **dict(flat_cells(_parse_object(content, path)))})
    configs: dict[str, dict[str, Any]] = {}
    for run, name, content in database.execute(f"SELECT {key}, run_name, config FROM configs ORDER BY id"):
        names.setdefault(run, name)
        configs[run] = _parse_object(content, path)
    logs = []
    for run, name in names.items():
        config = configs.get(run, {})
        place = f"{printable(str(path))}, run {printable(name)}"
        group = config.get("_Group")
        log = build_series(rows[run], place, step_column).as_log(
            name=f"{path.stem}/{name}",
            place=printable(str(path)),
            config=dotted({key: value for key, value in config.items() if not key.startswith("_")}) or None,
            group=str(group) if group else None,
            run_id=run,
        )
        logs.append(log)
    return logs


def _parse_object(content: str | bytes, path: Path) -> dict[str, Any]:
    value = parse_json(content)
    if not isinstance(value, dict):
        excerpt = printable(str(content)[:40])
        raise StoreError(
            f"{printable(str(path))}: got '{excerpt}' as a row of trackio; expected a JSON object"
        )
    return value
