"""CSV files that hold several runs, or a part of one: long tables, and what wandb and TensorBoard export.

A long table has a column that names the arm, the run or the seed, and perhaps one that names the metric of a
`value`. wandb exports a chart: the x-axis, then `<run> - <metric>` for every run, with its smallest and
largest value in each of the chart's buckets. TensorBoard exports one metric: `Wall time,Step,Value`, the run
and the metric in the file's name. (Both read from what their pages download.)
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from abrun.logs.log import EMPTY, Log, printable
from abrun.logs.naming import LARGEST_SEED
from abrun.logs.rows import Cells
from abrun.logs.tables import (
    TORN,
    Line,
    csv_lines,
    csv_log,
    csv_rows,
    json_rows,
    long_columns,
    rows_log,
    wide_rows,
)
from abrun.runs.layout import RunName

ARM_COLUMNS = ("arm", "variant", "group", "condition", "treatment", "config", "method", "experiment", "algo")
RUN_COLUMNS = ("run", "run_name", "run_id", "name", "trial", "exp_name")
SEED_COLUMNS = ("seed", "random_seed", "rng_seed")
NAMES_A_SEED = r".*(^|[/_\-. ])(seed|s)[-_= ]?\d{1,10}"
MOST_RUNS = 1000
BOUNDS = ("__MIN", "__MAX")
CHART = re.compile(r"(?P<run>.+?) - (?P<metric>[^ ].*)"), re.compile(r"(?P<run>.+) - (?P<metric>[^ ].*)")
TENSORBOARD = ("Wall time", "Step", "Value")
DOWNLOAD = re.compile(r"(?:run-)?(?P<run>.+?)-tag-(?P<tag>.+)")


def read_csv(path: Path, name: str, step_column: str | None, *, one_run: bool) -> list[Log]:
    """The runs of a CSV file: of most files one, which is called `name`; of all with `one_run`."""
    lines, torn = csv_lines(path)
    if not lines:
        return [Log(name=name, place=printable(str(path)), metrics={}, notes=(TORN if torn else EMPTY,))]
    header = [cell.strip() for cell in lines[0][1]]
    if one_run:
        logs = [replace(csv_log(path, lines, step_column), name=name)]
    elif tuple(header) == TENSORBOARD:
        logs = [_tensorboard_download(path, name, lines)]
    elif (charted := _charted(header)) and step_column is None:
        logs = _chart_runs(path, header, lines, charted)
    else:
        columns, rows = csv_rows(path, lines)
        logs = _long_runs(path, name, rows, columns, step_column, fewest=1) or [
            replace(rows_log(path, rows, step_column, columns), name=name)
        ]
    return [replace(log, notes=(*log.notes, TORN)) if torn else log for log in logs]


def read_json(path: Path, name: str, step_column: str | None, *, one_run: bool) -> list[Log]:
    """The runs of a file of JSON lines, or of one list of objects: of most files one, called `name`.

    Several where every row names an arm, a run or a seed, and not all the same, unless it is `one_run`.
    """
    rows, notes = json_rows(path)
    logs = [] if one_run else _long_runs(path, name, rows, (), step_column, fewest=2)
    if not logs:
        logs = [replace(rows_log(path, wide_rows(rows, step_column), step_column), name=name)]
    return [replace(log, notes=(*log.notes, *notes)) for log in logs]


# --- exports ---


def _charted(header: Sequence[str]) -> dict[int, tuple[str, str]]:
    """Column -> run and metric, of a chart that wandb exported; empty: it is none."""
    columns = {index: name for index, name in enumerate(header) if not name.endswith(BOUNDS)}
    ways = []
    for pattern in CHART:  # a name of a run, or of a metric, may itself hold " - "
        found = {index: pattern.fullmatch(name) for index, name in columns.items()}
        ways.append({index: (match["run"], match["metric"]) for index, match in found.items() if match})
    charted = min(ways, key=lambda way: len({metric for _, metric in way.values()}))
    return charted if len(charted) == len(columns) - 1 > 0 else {}


def _chart_runs(
    path: Path, header: list[str], lines: list[Line], charted: Mapping[int, tuple[str, str]]
) -> list[Log]:
    if any(len(cells) != len(header) for _, cells in lines):
        return [csv_log(path, lines)]  # which refuses the line
    axis = next(i for i, name in enumerate(header) if i not in charted and not name.endswith(BOUNDS))
    said = "a chart that wandb exported: its buckets, not every step"
    logs = []
    for run in dict.fromkeys(run for run, _ in charted.values()):
        columns = {index: metric for index, (of, metric) in charted.items() if of == run}
        rows = [
            (number, [cells[axis], *(cells[index] for index in columns)])
            for number, cells in lines[1:]
            if any(cells[index] for index in columns)
        ]
        log = csv_log(path, [(1, ["step", *columns.values()]), *rows], "step")
        logs.append(replace(log, name=run, part=True, guesses=(said,)))
    return logs


def _tensorboard_download(path: Path, name: str, lines: list[Line]) -> Log:
    found = DOWNLOAD.fullmatch(path.stem)
    run, tag = (found["run"], found["tag"]) if found else (path.parent.name, path.stem)
    folder = name.rsplit("/", 1)[0] + "/" if "/" in name else ""
    log = csv_log(path, [(1, ["Wall time", "Step", tag]), *lines[1:]], "Step")
    return replace(log, name=folder + run, part=True, guesses=("metrics named after TensorBoard's files",))


def joined(logs: Sequence[Log]) -> list[Log]:
    """The runs whose metrics lie in several files, each as one."""
    runs: dict[object, Log] = {}
    for index, log in enumerate(logs):
        key = log.name if log.part else index
        if key in runs:
            first = runs[key]
            notes = dict.fromkeys((*first.notes, *log.notes))
            log = replace(
                first,
                metrics={**first.metrics, **log.metrics},
                notes=tuple(notes),
                unread={**log.unread, **first.unread},
                dropped={**log.dropped, **first.dropped},
            )
        runs[key] = log
    return list(runs.values())


# --- long tables ---


def _key_columns(header: Sequence[str], rows: Sequence[tuple[int, Cells]]) -> dict[str, str]:
    """The columns that say whose a row is, by kind: `arm`, `run`, `seed`, `metric`; empty: none does.

    A `name` beside a `value` is the metric's, unless it names runs by their seeds.
    """
    columns = {name.strip().lower(): name for name in reversed(header)}
    kinds = {"arm": ARM_COLUMNS, "run": RUN_COLUMNS, "seed": SEED_COLUMNS}
    found = {
        kind: next(columns[name] for name in names if name in columns)
        for kind, names in kinds.items()
        if any(name in columns for name in names)
    }
    metric, _ = long_columns([(0, dict.fromkeys(header, ""))])
    names = {str(row.get(metric, "")).strip() for _, row in rows}
    if metric and not (
        found.get("run") == metric and all(re.fullmatch(NAMES_A_SEED, name) for name in names)
    ):
        found = {kind: column for kind, column in found.items() if column != metric} | {"metric": metric}
    return found


def _long_runs(
    path: Path,
    name: str,
    rows: Sequence[tuple[int, Cells]],
    columns: Sequence[str],
    step_column: str | None,
    *,
    fewest: int,
) -> list[Log]:
    """A run for every distinct value of the key columns; empty where there are none, or fewer than `fewest`.

    `columns`: all that the file names, if it does.
    """
    keys = _key_columns(columns or [*rows[0][1]], rows) if rows else {}
    whose = {kind: column for kind, column in keys.items() if kind != "metric"}
    runs: dict[tuple[str, ...], list[tuple[int, Cells]]] = {}
    for number, row in rows if keys else ():
        cells = (row.get(column, "") for column in whose.values())
        values = tuple(cell.strip() if isinstance(cell, str) else f"{cell:.15g}" for cell in cells)
        others = {column: cell for column, cell in row.items() if column not in whose.values()}
        runs.setdefault(values, []).append((number, others))
    if not fewest <= len(runs) <= min(MOST_RUNS, (len(rows) + 1) // 2) or not all(map(all, runs)):
        return []
    left = [] if "metric" in keys else [column for column in columns if column not in whose.values()]
    named = ", ".join(whose.values())
    said = f"a long table: its runs from the columns {named}" if named else "a long table: a metric a name"
    logs = []
    for values, of in runs.items():
        log = rows_log(path, wide_rows(of, step_column), step_column, left)
        guess = said if len(runs) > 1 or "metric" in keys else ""
        logs.append(_named(log, name, dict(zip(whose, values, strict=True)), guess))
    return logs


def _named(log: Log, name: str, values: Mapping[str, str], said: str) -> Log:
    seed = values.get("seed", "")
    number = int(seed) if re.fullmatch(r"\d{1,10}(\.0*)?", seed) and float(seed) < LARGEST_SEED else None
    arm = values.get("arm")
    whose = [text for kind, text in values.items() if kind != "seed"]
    identity = RunName(arm=arm, seed=number) if arm and number is not None and "run" not in values else None
    called = "/".join([*(whose or [name]), *([f"seed-{number}"] if number is not None else [])])
    guesses = (said,) if said else ()
    return replace(log, name=called, job_type=arm, identity=identity, guesses=guesses)
