"""CSV files with several runs, or a part of one: long tables, and exports of wandb and TensorBoard.

A long table has a column that names the arm, the run or the seed, and possibly one that names the metric of a
`value`. wandb exports a chart: the x-axis, then `<run> - <metric>` for every run, with the minimum and
maximum in each of the chart's buckets. TensorBoard exports one metric as `Wall time,Step,Value`, with run and
metric in the file name. (Both formats are those of the pages' download buttons.)
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from abrun.logs.key_columns import find_key_columns, key_text, name_log
from abrun.logs.log import NOTHING_RECORDED, Log, printable
from abrun.logs.rows import Cells
from abrun.logs.scores import read_scores
from abrun.logs.tables import (
    TORN_NOTE,
    CsvLine,
    leave_out_columns,
    log_from_csv_lines,
    log_from_parquet_rows,
    log_from_rows,
    parse_csv_lines,
    read_csv_lines,
    read_json_rows,
    read_parquet_rows,
    widen_rows,
)

MAX_RUNS = 1000
UNENDED_NOTE = "its last line has no line end; it was read as a whole row"
BOUNDS = ("__MIN", "__MAX")
CHART = re.compile(r"(?P<run>.+?) - (?P<metric>[^ ].*)"), re.compile(r"(?P<run>.+) - (?P<metric>[^ ].*)")
TENSORBOARD = ("Wall time", "Step", "Value")
DOWNLOAD = re.compile(r"(?:run-)?(?P<run>.+?)-tag-(?P<tag>.+)")


def read_csv(path: Path, name: str, step_column: str | None, *, one_run: bool) -> list[Log]:
    """Return the runs of a CSV file. Most files hold one, named `name`; with `one_run` all do."""
    lines, unended, torn = read_csv_lines(path)
    if not lines:
        note = TORN_NOTE if torn else NOTHING_RECORDED
        return [Log(name=name, place=printable(str(path)), metrics={}, notes=(note,))]
    header = [cell.strip() for cell in lines[0][1]]
    if one_run:
        logs = [replace(log_from_csv_lines(path, lines, step_column), name=name)]
    elif tuple(header) == TENSORBOARD:
        logs = [_read_tensorboard_download(path, name, lines)]
    elif (chart_columns := _parse_chart_columns(header)) and step_column is None:
        logs = _read_chart(path, header, lines, chart_columns)
    else:
        columns, rows, ambiguous = parse_csv_lines(path, lines, step_column)
        logs = _read_csv_scores(path, name, lines, unended) if step_column is None else []
        torn = torn and not logs
        logs = logs or _read_long_table(path, name, rows, columns, step_column, min_runs=1)
        logs = logs or [replace(log_from_rows(path, rows, step_column, columns), name=name)]
        logs = [leave_out_columns(log, ambiguous) for log in logs]
    return [replace(log, notes=(*log.notes, TORN_NOTE)) if torn else log for log in logs]


def _read_csv_scores(path: Path, name: str, lines: list[CsvLine], unended: list[CsvLine]) -> list[Log]:
    """Return the runs of a CSV file if it is a table of scores; nobody is still writing its last line."""
    is_whole = bool(unended) and len(unended[0][1]) == len(lines[0][1])
    columns, rows, _ = parse_csv_lines(path, [*lines, *unended] if is_whole else lines)
    logs = read_scores(path, name, rows, columns)
    notes = [UNENDED_NOTE if is_whole else TORN_NOTE] * bool(unended)
    return [replace(log, notes=(*log.notes, *notes)) for log in logs]


def read_parquet(path: Path, name: str, step_column: str | None, *, one_run: bool) -> list[Log]:
    """Return the runs of a Parquet file; several if its rows name different arms, runs or seeds."""
    rows, columns, notes = read_parquet_rows(path)
    numbered = list(enumerate(rows, 1))
    logs = [] if one_run or step_column is not None else read_scores(path, name, numbered, columns)
    if not logs and not one_run:
        logs = _read_long_table(path, name, numbered, columns, step_column, min_runs=2)
    return logs or [replace(log_from_parquet_rows(path, rows, columns, notes, step_column), name=name)]


def read_json(path: Path, name: str, step_column: str | None, *, one_run: bool) -> list[Log]:
    """Return the runs of a file of JSON lines, or of one list of objects. Most files hold one, named `name`.

    A file holds several if its rows name different arms, runs or seeds, unless `one_run` is set.
    """
    rows, notes = read_json_rows(path)
    logs = [] if one_run or step_column is not None else read_scores(path, name, rows)
    if not logs and not one_run:
        logs = _read_long_table(path, name, rows, (), step_column, min_runs=2)
    if not logs:
        logs = [replace(log_from_rows(path, widen_rows(rows, step_column), step_column), name=name)]
    return [replace(log, notes=(*log.notes, *notes)) for log in logs]


# --- exports ---


def _parse_chart_columns(header: Sequence[str]) -> dict[int, tuple[str, str]]:
    """Return run and metric of each column of an exported wandb chart; empty if it is not a chart."""
    columns = {index: name for index, name in enumerate(header) if not name.endswith(BOUNDS)}
    candidates = []
    for pattern in CHART:  # the name of a run or metric may itself contain " - "
        matches = {index: pattern.fullmatch(name) for index, name in columns.items()}
        candidates.append({index: (m["run"], m["metric"]) for index, m in matches.items() if m})
    chart_columns = min(candidates, key=lambda candidate: len({metric for _, metric in candidate.values()}))
    return chart_columns if len(chart_columns) == len(columns) - 1 > 0 else {}


def _read_chart(
    path: Path, header: list[str], lines: list[CsvLine], chart_columns: Mapping[int, tuple[str, str]]
) -> list[Log]:
    if any(len(cells) != len(header) for _, cells in lines):
        return [log_from_csv_lines(path, lines)]  # raises for the line of another length
    axis = next(i for i, name in enumerate(header) if i not in chart_columns and not name.endswith(BOUNDS))
    guess = "an exported wandb chart: values of its buckets, not of every step"
    logs = []
    for run in dict.fromkeys(run for run, _ in chart_columns.values()):
        columns = {
            index: metric for index, (column_run, metric) in chart_columns.items() if column_run == run
        }
        rows = [
            (number, [cells[axis], *(cells[index] for index in columns)])
            for number, cells in lines[1:]
            if any(cells[index] for index in columns)
        ]
        log = log_from_csv_lines(path, [(1, ["step", *columns.values()]), *rows], "step")
        logs.append(replace(log, name=run, is_part=True, guesses=(guess,)))
    return logs


def _read_tensorboard_download(path: Path, name: str, lines: list[CsvLine]) -> Log:
    match = DOWNLOAD.fullmatch(path.stem)
    run, tag = (match["run"], match["tag"]) if match else (path.parent.name, path.stem)
    folder = name.rsplit("/", 1)[0] + "/" if "/" in name else ""
    log = log_from_csv_lines(path, [(1, ["Wall time", "Step", tag]), *lines[1:]], "Step")
    return replace(log, name=folder + run, is_part=True, guesses=("metric names from TensorBoard's files",))


def merge_parts(logs: Sequence[Log]) -> list[Log]:
    """Merge the runs whose metrics lie in several files."""
    runs: dict[object, Log] = {}
    for index, log in enumerate(logs):
        key = log.name if log.is_part else index
        if key in runs:
            merged = runs[key]
            notes = dict.fromkeys((*merged.notes, *log.notes))
            log = replace(
                merged,
                metrics={**merged.metrics, **log.metrics},
                notes=tuple(notes),
                unread={**log.unread, **merged.unread},
                dropped={**log.dropped, **merged.dropped},
            )
        runs[key] = log
    return list(runs.values())


# --- long tables ---


def _read_long_table(
    path: Path,
    name: str,
    rows: Sequence[tuple[int, Cells]],
    columns: Sequence[str],
    step_column: str | None,
    *,
    min_runs: int,
) -> list[Log]:
    """Return one run per distinct value of the key columns; empty if there are fewer than `min_runs`.

    `columns`: all column names of the file, if it has a header.
    """
    keys = find_key_columns(columns or [*rows[0][1]], rows) if rows else {}
    identity_columns = {kind: column for kind, column in keys.items() if kind != "metric"}
    key_names = [*identity_columns.values()]
    runs: dict[tuple[str, ...], list[tuple[int, Cells]]] = {}
    for number, row in rows if keys else ():
        values = tuple(key_text(row.get(column, "")) for column in key_names)
        other_cells = {column: cell for column, cell in row.items() if column not in key_names}
        runs.setdefault(values, []).append((number, other_cells))
    if not min_runs <= len(runs) <= min(MAX_RUNS, (len(rows) + 1) // 2) or not all(map(all, runs)):
        return []
    metric_columns = [] if "metric" in keys else [column for column in columns if column not in key_names]
    origin = f"runs from columns {', '.join(key_names)}" if key_names else "one metric per name"
    logs = []
    for values, run_rows in runs.items():
        log = log_from_rows(path, widen_rows(run_rows, step_column), step_column, metric_columns)
        guess = f"a long table: {origin}" if len(runs) > 1 or "metric" in keys else ""
        logs.append(name_log(log, name, dict(zip(identity_columns, values, strict=True)), guess))
    return logs
