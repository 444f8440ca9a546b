"""Columns of a table that name the arm, the run, the seed or the metric of a row."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from abrun.logs.foreign.columns import Cell, Table
from abrun.logs.log import Log
from abrun.logs.naming import SEED_LIMIT, strip_suffix
from abrun.logs.tables import ARM_COLUMNS, RUN_COLUMNS, SEED_COLUMNS, find_long_names
from abrun.runs.layout import RunName

SEED_NAME = r".*(^|[/_\-. ])(seed|s)[-_= ]?\d{1,10}"


def find_key_columns(
    table: Table, names: Sequence[str], arm_columns: Sequence[str] = ARM_COLUMNS
) -> dict[str, str]:
    """Return the columns that identify a row's run or metric, by kind: `arm`, `run`, `seed`, `metric`.

    A `name` column next to `value` names metrics, unless all its values name seeds.
    """
    columns = {name.strip().lower(): name for name in reversed(names)}
    kinds = {"arm": arm_columns, "run": RUN_COLUMNS, "seed": SEED_COLUMNS}
    key_columns = {
        kind: next(columns[name] for name in kind_names if name in columns)
        for kind, kind_names in kinds.items()
        if any(name in columns for name in kind_names)
    }
    metric, _ = find_long_names(names)
    if metric and not (
        key_columns.get("run") == metric
        and all(re.fullmatch(SEED_NAME, str(cell).strip()) for cell in {*table.cells(metric)})
    ):
        key_columns = {kind: column for kind, column in key_columns.items() if column != metric}
        key_columns["metric"] = metric
    return key_columns


def group_rows(
    table: Table, columns: Sequence[str], max_groups: int | None = None
) -> tuple[list[tuple[str, ...]], NDArray[np.int64]]:
    """Return the distinct texts in some columns, and the number [R] of each row's texts among them.

    Without columns all rows are alike. Beyond `max_groups` both are empty.
    """
    numbers: dict[tuple[str, ...], int] = {}
    groups: dict[tuple[Cell, ...], int] = {}
    row_groups = np.zeros(len(table), np.int64)
    for row, cells in enumerate(zip(*map(table.cells, columns), strict=True)):
        group = groups.get(cells)
        if group is None:
            group = groups[cells] = numbers.setdefault(tuple(map(key_text, cells)), len(numbers))
            if max_groups is not None and group >= max_groups:
                return [], row_groups[:0]
        row_groups[row] = group
    return [*numbers] if columns or not len(table) else [()], row_groups


def key_text(cell: float | str) -> str:
    """Return the text of a cell that names an arm, a run, a seed or a prompt."""
    return cell.strip() if isinstance(cell, str) else f"{cell:.15g}"


def name_log(log: Log, name: str, values: Mapping[str, str], guess: str) -> Log:
    """Return the log of a run under the name that its key columns give; `name`: that of its file."""
    seed = values.get("seed", "")
    number = int(float(seed)) if re.fullmatch(r"\d{1,10}(\.0*)?", seed) and float(seed) < SEED_LIMIT else None
    arm = values.get("arm")
    arm_and_run = [text for kind, text in values.items() if kind != "seed"]
    identity = RunName(arm=arm, seed=number) if arm and number is not None and "run" not in values else None
    seed_names = [f"seed-{number}"] if number is not None else []
    run_name = "/".join([*(arm_and_run or [strip_suffix(name) if seed_names else name]), *seed_names])
    guesses = (guess,) if guess else ()
    return replace(log, name=run_name, job_type=arm, identity=identity, guesses=guesses)
