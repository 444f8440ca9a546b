"""CSV files that hold several runs, or a part of one: long tables, and what wandb and TensorBoard export.

A long table has a column that names the arm, the run or the seed, and perhaps one that names the metric of a
`value`. wandb exports a chart: the x-axis, then `<run> - <metric>` for every run, with its smallest and
largest value in each of the chart's buckets. TensorBoard exports one metric: `Wall time,Step,Value`, the run
and the metric in the file's name. (Both read from what their pages download.)
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from abrun.layout import RunName
from abrun.logs.log import EMPTY, Log, printable
from abrun.logs.naming import LARGEST_SEED
from abrun.logs.rows import STEP_COLUMNS, Cells
from abrun.logs.tables import (
    METRIC_COLUMNS,
    TORN,
    VALUE_COLUMNS,
    Line,
    csv_lines,
    csv_log,
    json_log,
    json_rows,
    long_columns,
    rows_log,
)

ARM_COLUMNS = ("arm", "variant", "group", "condition", "treatment", "config", "method", "experiment", "algo")
RUN_COLUMNS = ("run", "run_name", "run_id", "name", "trial", "exp_name")
SEED_COLUMNS = ("seed", "random_seed", "rng_seed")
NAMES_A_SEED = r".*(^|[/_\-. ])(seed|s)[-_= ]?\d{1,10}"
MOST_RUNS = 1000
BOUNDS = ("__MIN", "__MAX")
CHART = re.compile(r"(?P<run>.+?) - (?P<metric>[^ ].*)"), re.compile(r"(?P<run>.+) - (?P<metric>[^ ].*)")
TENSORBOARD = ("Wall time", "Step", "Value")
DOWNLOAD = re.compile(r"(?:run-)?(?P<run>.+?)-tag-(?P<tag>.+)")


def read_csv_runs(path: Path, name: str, step_column: str | None = None) -> list[Log]:
    """The runs of a CSV file: of most files one, which is called `name`."""
    lines, torn = csv_lines(path)
    if not lines:
        return [Log(name=name, place=printable(str(path)), metrics={}, notes=(TORN if torn else EMPTY,))]
    header = [cell.strip() for cell in lines[0][1]]
    if tuple(header) == TENSORBOARD:
        logs = [_tensorboard_download(path, name, lines)]
    elif (charted := _charted(header)) and step_column is None:
        logs = _chart_runs(path, header, lines, charted)
    elif (keys := _key_columns(header, lines[1:])) and len(lines) > 1:
        logs = _long_runs(path, name, header, lines, keys, step_column)
    else:
        logs = [replace(csv_log(path, lines, step_column), name=name)]
    return [replace(log, notes=(*log.notes, TORN)) if torn else log for log in logs]


def read_json_runs(path: Path, name: str, step_column: str | None = None) -> list[Log]:
    """The runs of a JSON-lines file: of most files one, which is called `name`.

    Several where every row names an arm, a run or a seed, and not all the same.
    """
    rows, notes = json_rows(path)
    header = list(rows[0][1]) if rows else []
    metric, _ = long_columns(rows)
    keys = {
        kind: header[index] for kind, index in _key_columns(header, []).items() if header[index] != metric
    }
    runs: dict[tuple[str, ...], list[tuple[int, Cells]]] = {}
    for number, row in rows if keys else ():
        cells = (row.get(key, "") for key in keys.values())
        whose = tuple(cell.strip() if isinstance(cell, str) else f"{cell:.15g}" for cell in cells)
        others = {column: cell for column, cell in row.items() if column not in keys.values()}
        runs.setdefault(whose, []).append((number, others))
    if not 1 < len(runs) <= min(MOST_RUNS, len(rows) // 2) or not all(all(whose) for whose in runs):
        return [replace(json_log(path, rows, step_column, notes), name=name)]
    said = f"a long table: its runs from the columns {', '.join(keys.values())}"
    return [
        _named(json_log(path, of, step_column, notes), name, dict(zip(keys, whose, strict=True)), said)
        for whose, of in runs.items()
    ]


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


def _key_columns(header: Sequence[str], lines: Sequence[Line]) -> dict[str, int]:
    """The columns that say whose a row is: `arm`, `run`, `seed`, `metric` -> index; empty: none does.

    A `name` beside a `value` is the metric's, unless it names runs by their seeds.
    """
    lower = [name.lower() for name in header]
    kinds = {"arm": ARM_COLUMNS, "run": RUN_COLUMNS, "seed": SEED_COLUMNS}
    found = {
        kind: next(lower.index(name) for name in names if name in lower)
        for kind, names in kinds.items()
        if any(name in lower for name in names)
    }
    metric = next((lower.index(name) for name in METRIC_COLUMNS if name in lower), None)
    if metric is not None and any(name in lower for name in VALUE_COLUMNS):
        names = {cells[metric].strip() for _, cells in lines if len(cells) == len(header)}
        if (
            found.get("run") != metric
            or not names
            or not all(re.fullmatch(NAMES_A_SEED, name) for name in names)
        ):
            found["metric"] = metric
            found = {kind: index for kind, index in found.items() if kind == "metric" or index != metric}
    return found


def _long_runs(
    path: Path, name: str, header: list[str], lines: list[Line], keys: dict[str, int], step_column: str | None
) -> list[Log]:
    """A run for every distinct value of the columns `keys`; one alone where they do not vary."""
    whose = {kind: index for kind, index in keys.items() if kind != "metric"}
    rows: dict[tuple[str, ...], list[Line]] = {}
    for line in lines[1:]:
        if len(line[1]) != len(header):
            return [replace(csv_log(path, lines, step_column), name=name)]  # which says so
        rows.setdefault(tuple(line[1][index].strip() for index in whose.values()), []).append(line)
    if len(rows) > min(MOST_RUNS, len(lines) // 2) or not all(all(key) for key in rows):
        return [replace(csv_log(path, lines, step_column), name=name)]
    dropped = {*whose.values()}
    named = ", ".join(header[index] for index in whose.values())
    said = f"a long table: its runs from the columns {named}" if named else "a long table: a metric a name"
    logs = []
    for key, of in rows.items():
        if "metric" in keys:
            log = rows_log(path, _wide(header, of, keys["metric"], step_column), step_column)
        else:
            log = csv_log(path, _without(header, of, dropped), step_column)
        values = dict(zip(whose, key, strict=True))
        logs.append(_named(log, name, values, said if len(rows) > 1 or "metric" in keys else ""))
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


def _without(header: list[str], lines: Sequence[Line], dropped: set[int]) -> list[Line]:
    kept = [index for index in range(len(header)) if index not in dropped]
    return [(1, [header[i] for i in kept]), *((number, [cells[i] for i in kept]) for number, cells in lines)]


def _wide(
    header: list[str], lines: Sequence[Line], metric: int, step_column: str | None
) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows of a step and one metric, which the cell `metric` names."""
    lower = [name.lower() for name in header]
    value = next(lower.index(name) for name in VALUE_COLUMNS if name in lower)
    for number, cells in lines:
        steps = {
            name: cell
            for name, cell in zip(header, cells, strict=True)
            if name == step_column or name.lower() in STEP_COLUMNS
        }
        yield number, steps | {cells[metric].strip(): cells[value]}
