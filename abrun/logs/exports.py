"""CSV files with several runs, or a part of one: long tables, and exports of wandb and TensorBoard.

A long table has a column that names the arm, the run or the seed, and possibly one that names the metric of a
`value`. wandb exports a chart: the x-axis, then `<run> - <metric>` for every run, with the minimum and
maximum in each of the chart's buckets. TensorBoard exports one metric as `Wall time,Step,Value`, with run and
metric in the file name. (Both formats are those of the pages' download buttons.) Aim's data frames are long:
`step`, `value`, `metric.name`, `metric.context.<key>`, `run.hash` and `run.<parameter>` (aimhubio/aim,
`aim/sdk/sequences/metric.py`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from abrun.errors import StoreError
from abrun.logs.csv_files import CsvTable, find_ambiguous_columns, leave_out_columns, read_csv_table
from abrun.logs.foreign.columns import ColumnBuilder, Table
from abrun.logs.log import NOTHING_RECORDED, Log
from abrun.logs.rows import CONFIG, constant_config
from abrun.logs.scores import read_scores
from abrun.logs.tables import (
    TORN_NOTE,
    find_key_columns,
    group_rows,
    key_text,
    log_from_table,
    name_log,
    read_json_table,
    read_parquet_table,
    widen_table,
)
from abrun.runs.redaction import printable

MAX_RUNS = 1000
UNENDED_NOTE = "its last line has no line end; it was read as a whole row"
BOUNDS = ("__MIN", "__MAX")
CHART = re.compile(r"(?P<run>.+?) - (?P<metric>[^ ].*)"), re.compile(r"(?P<run>.+) - (?P<metric>[^ ].*)")
TENSORBOARD = ("Wall time", "Step", "Value")
DOWNLOAD = re.compile(r"(?:run-)?(?P<run>.+?)-tag-(?P<tag>.+)")


def read_csv(path: Path, name: str, step_column: str | None, *, one_run: bool) -> list[Log]:
    """Return the runs of a CSV file. Most files hold one, named `name`; with `one_run` all do."""
    content = read_csv_table(path, step_column)
    if not content.header:
        note = TORN_NOTE if content.torn else NOTHING_RECORDED
        return [Log(name=name, place=printable(str(path)), metrics={}, notes=(note,))]
    if not one_run and tuple(content.header) == TENSORBOARD:
        logs = [_read_tensorboard_download(path, name, content)]
    elif not one_run and step_column is None and (chart_columns := _parse_chart_columns(content.header)):
        logs = _read_chart(path, content, chart_columns)
    else:
        table, ambiguous = content.run_table(path, step_column)
        table = _rename_aim_columns(table)
        if not one_run and step_column is None and (logs := read_scores(path, name, table)):
            # Nobody is still writing the last line of a table of scores.
            note = UNENDED_NOTE if content.has_unended_row else TORN_NOTE
            return [_with_notes(leave_out_columns(log, ambiguous), [note] * content.unended) for log in logs]
        table = content.complete(table)
        logs = [] if one_run else _read_long_table(path, name, table, step_column, min_runs=1)
        logs = logs or [replace(log_from_table(path, table, step_column), name=name)]
        logs = [leave_out_columns(log, ambiguous) for log in logs]
    return [_with_notes(log, [TORN_NOTE] * content.torn) for log in logs]


def read_parquet(path: Path, name: str, step_column: str | None, *, one_run: bool) -> list[Log]:
    """Return the runs of a Parquet file; several if its rows name different arms, runs or seeds."""
    table, notes = read_parquet_table(path)
    if notes:
        return [Log(name=name, place=table.place, metrics={}, notes=tuple(notes))]
    return _read_table(path, name, table, step_column, one_run=one_run)


def read_json(path: Path, name: str, step_column: str | None, *, one_run: bool) -> list[Log]:
    """Return the runs of a file of JSON lines, or of one list of objects. Most files hold one, named `name`.

    A file holds several if its rows name different arms, runs or seeds, unless `one_run` is set.
    """
    table, notes = read_json_table(path)
    logs = _read_table(path, name, table, step_column, one_run=one_run)
    return [_with_notes(log, notes) for log in logs]


def _read_table(path: Path, name: str, table: Table, step_column: str | None, *, one_run: bool) -> list[Log]:
    table = _rename_aim_columns(table)
    logs = [] if one_run or step_column is not None else read_scores(path, name, table)
    if not logs and not one_run:
        logs = _read_long_table(path, name, table, step_column, min_runs=1 if table.header else 2)
    if not logs:
        wide = table if table.header else widen_table(table, step_column)
        logs = [replace(log_from_table(path, wide, step_column), name=name)]
    return logs


def _with_notes(log: Log, notes: Sequence[str]) -> Log:
    return replace(log, notes=(*log.notes, *notes))


# --- exports ---


def _parse_chart_columns(header: Sequence[str]) -> dict[int, tuple[str, str]]:
    """Return run and metric of each column; empty if it is not an exported wandb chart."""
    columns = {index: name for index, name in enumerate(header) if not name.endswith(BOUNDS)}
    candidates = []
    for pattern in CHART:  # the name of a run or metric may itself contain " - "
        matches = {index: pattern.fullmatch(name) for index, name in columns.items()}
        candidates.append({index: (m["run"], m["metric"]) for index, m in matches.items() if m})
    chart_columns = min(candidates, key=lambda candidate: len({metric for _, metric in candidate.values()}))
    return chart_columns if len(chart_columns) == len(columns) - 1 > 0 else {}


def _read_chart(path: Path, content: CsvTable, chart_columns: Mapping[int, tuple[str, str]]) -> list[Log]:
    header = content.header
    axis = next(i for i, name in enumerate(header) if i not in chart_columns and not name.endswith(BOUNDS))
    guess = "an exported wandb chart: values of its buckets, not of every step"
    logs = []
    runs: dict[str, dict[int, str]] = {}
    for index, (run, metric) in chart_columns.items():
        runs.setdefault(run, {axis: "step"})[index] = metric
    if len(runs) > MAX_RUNS:
        raise StoreError(f"{printable(str(path))}: got {len(runs)} runs; allowed: at most {MAX_RUNS} a file")
    for run, names in runs.items():
        ambiguous = find_ambiguous_columns(path, [*names.values()], "step")
        table = content.table_of({index: name for index, name in names.items() if name not in ambiguous})
        table = content.complete(table)
        has_value = np.zeros(len(table), bool)
        for name, column in table.columns.items():
            if name != "step":
                has_value[column.rows] = True
        log = leave_out_columns(log_from_table(path, table.select(has_value), "step"), ambiguous)
        logs.append(replace(log, name=run, is_part=True, guesses=(guess,)))
    return logs


def _read_tensorboard_download(path: Path, name: str, content: CsvTable) -> Log:
    match = DOWNLOAD.fullmatch(path.stem)
    run, tag = (match["run"], match["tag"]) if match else (path.parent.name, path.stem)
    folder = name.rsplit("/", 1)[0] + "/" if "/" in name else ""
    table = content.complete(content.table_of({0: "Wall time", 1: "Step", 2: tag}))
    log = log_from_table(path, table, "Step")
    return replace(log, name=folder + run, is_part=True, guesses=("metric names from TensorBoard's files",))


def _rename_aim_columns(table: Table) -> Table:
    """Return a data frame of Aim with the columns of a long table; any other table unchanged.

    A run's parameters become its configuration, a metric's context a prefix: `train/loss`.
    """
    if not table.columns.keys() >= {"metric.name", "value"}:
        return table
    contexts = [name for name in table.columns if name.startswith("metric.context.")]
    labels = ColumnBuilder()
    for row, parts in enumerate(zip(*map(table.cells, (*contexts, "metric.name")), strict=True)):
        labels.add_text(row, "/".join(filter(None, map(key_text, parts))))
    parameters = {
        f"{CONFIG}{name.removeprefix('run.')}": column
        for name, column in table.columns.items()
        if name.startswith("run.") and name != "run.hash"
    }
    names = {"step": "step", "value": "value", "run.hash": "run"}
    columns = {new: table.columns[name] for name, new in names.items() if name in table.columns}
    columns |= {"metric": labels.build(), **parameters}
    return replace(table, columns=columns, header=[*columns])


# --- long tables ---


def _read_long_table(
    path: Path, name: str, table: Table, step_column: str | None, *, min_runs: int
) -> list[Log]:
    """Return one run per distinct value of the key columns; empty if there are fewer than `min_runs`."""
    if not len(table):
        return []
    keys = find_key_columns(table, table.header or [*table.row(0)])
    identity_columns = {kind: column for kind, column in keys.items() if kind != "metric"}
    key_names = [*identity_columns.values()]
    max_runs = min(MAX_RUNS, (len(table) + 1) // 2)
    if not keys:
        return []
    runs, groups = group_rows(table, key_names, max_runs)
    if not min_runs <= len(runs) <= max_runs or not all(map(all, runs)):
        return []
    origin = f"runs from columns {', '.join(key_names)}" if key_names else "one metric per name"
    guess = f"a long table: {origin}" if len(runs) > 1 or "metric" in keys else ""
    logs = []
    for values, run_table in zip(runs, table.without(key_names).split(groups, len(runs)), strict=True):
        log = log_from_table(path, widen_table(run_table, step_column), step_column)
        log = replace(log, config=log.config or constant_config(run_table) or None)
        logs.append(name_log(log, name, dict(zip(identity_columns, values, strict=True)), guess))
    return logs
