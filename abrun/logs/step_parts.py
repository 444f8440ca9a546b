"""Rows of one step that a column tells apart: splits of the data, or processes of the run.

Such rows do not replace each other. The word of a split becomes a prefix of the metric's name, values of
several processes are averaged, and any other column is refused by its name.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from abrun.errors import StoreError
from abrun.logs.foreign.columns import Cell, Column, Rows, Table
from abrun.runs.redaction import list_names, printable
from abrun.stats.series import Array, Series, build_series

SPLIT = r"[^\W\d_][\w\- ]{0,30}"  # the name of a data split, such as train or eval
MAX_SPLITS = 8
MIN_FILLED = 3 / 4  # share of the steps and values of a column that have a row
# Words for a process of a run, in columns (`dp_rank`) and in names of files and folders (`rank_3`)
PROCESS = r"((global|local|world|node|data|dp|tp|pp|cp|ep|mpi|torch|env)[-_]?)*"
PROCESS += r"(rank|worker|proc|process|pid|device|gpu|node|host|hostname|replica|shard|actor|pod|ps)"
_PROCESS_COLUMN = re.compile(rf"(.*[/.])?{PROCESS}([-_]?(id|idx|index|num|number|name))?", re.IGNORECASE)
_START_COLUMN = re.compile(
    r"(.*[/._])?(attempt|restart|retry|start)s?([-_]?(id|idx|index|num|count))?", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """Column whose cells say which process wrote a row."""

    column: str
    row_numbers: NDArray[np.int64]  # [R]
    values: list[str]  # a few

    @property
    def guess(self) -> str:
        column, values = printable(self.column[:80]), list_names(self.values, 4)
        return f"mean over the processes of column {column} at each step: {values}"

    def average(self, rows: Rows, steps: NDArray[np.int64], values: Array) -> tuple[Series, int]:
        """Return the mean over processes at each step, and how many points a later one replaced.

        `rows` [N]: of the table; `steps`, `values` [N]: theirs. A process's last row of a step counts.
        """
        processes = self.row_numbers[rows]
        built = [
            build_series(steps[processes == process], values[processes == process])
            for process in np.unique(processes)
        ]
        mean = average_series([series for series, _ in built])
        return mean, sum(replaced for _, replaced in built)


def average_series(series: Sequence[Series]) -> Series:
    """Return the mean, at each step, of those series that have it."""
    all_steps = np.concatenate([log.steps for log in series])
    all_values = np.concatenate([log.values for log in series])
    steps, places = np.unique(all_steps, return_inverse=True)
    means = np.bincount(places, all_values) / np.bincount(places)
    return Series(steps, means, max(log.recounted for log in series))


def separate_rows(
    table: Table, step_names: Sequence[str], steps: Array
) -> tuple[Table, Processes | None, list[str]]:
    """Return the table with split words as prefixes, the column of processes if one counts, and notes.

    `step_names`: the columns that are no metrics. `steps` [R]: NaN for a row without one. A text column such
    as `split` counts only if rows of different words alternate. Of the starts of a run the last counts.
    Raises StoreError for a column of any other meaning of which each step has all values once.
    """
    names = [name for name in table.columns if name not in step_names]
    repeated = [name for name in names if _is_repeated(steps[table.columns[name].rows])]
    if not repeated:
        return table, None, []
    metrics = [table.columns[name].rows for name in repeated]
    for name in filter(_PROCESS_COLUMN.fullmatch, names):
        numbers = _number_cells(table.cells(name))
        if _tell_apart(metrics, steps, numbers):
            processes = Processes(column=name, row_numbers=numbers, values=_describe_values(table, name))
            return table.without([name]), processes, []
    full = [name for name in names if len(table.columns[name].rows) == len(table)]
    for name in full:
        words = _split_words(table, name)
        if words and _tell_apart(metrics, steps, _number_cells(table.cells(name))):
            return _prefix_metrics(table, name, words, step_names)
    if any(map(_START_COLUMN.fullmatch, full)):
        return table, None, []
    for name in full:
        if {*repeated} - {name} and _is_grid(table.columns[name], steps):
            raise StoreError(
                f"{table.place}: rows of one step differ in column '{printable(name[:80])}' "
                f"({list_names(_describe_values(table, name), 4)}); write one row a step, or a file for each "
                "value; or call the column 'arm' to compare its values, or 'rank' to compare their mean"
            )
    return table, None, []


def _is_repeated(steps: Array) -> bool:
    return not (np.diff(steps) > 0).all() and len(np.unique(steps[~np.isnan(steps)])) < len(steps)


def _number_cells(cells: Sequence[Cell]) -> NDArray[np.int64]:
    """Return for each row [R] the number of its cell among all that are distinct."""
    numbers: dict[Cell, int] = {}
    return np.array([numbers.setdefault(cell, len(numbers)) for cell in cells], np.int64)


def _tell_apart(rows_of_metrics: Sequence[Rows], steps: Array, numbers: NDArray[np.int64]) -> bool:
    """Return True if some metric's rows of one step have different numbers."""
    if not numbers.any():
        return False
    for rows in rows_of_metrics:
        used = rows[~np.isnan(steps[rows])]
        if len({*zip(steps[used].tolist(), numbers[used].tolist(), strict=True)}) > len(
            np.unique(steps[used])
        ):
            return True
    return False


def _is_grid(column: Column, steps: Array) -> bool:
    """Return True if each of several steps has each of a few texts or numbers once; a few may be missing.

    Neither a metric nor rows that were written again look like that.
    """
    is_used = ~np.isnan(steps)
    num_rows, num_steps = int(is_used.sum()), len(np.unique(steps[is_used]))
    parts = _number_cells(column.cells(len(steps)))[is_used]
    pairs = {*zip(steps[is_used].tolist(), parts.tolist(), strict=True)}
    num_cells = num_steps * len(np.unique(parts))
    return num_steps > 1 and len(pairs) == num_rows >= MIN_FILLED * num_cells


def _describe_values(table: Table, name: str) -> list[str]:
    cells = [cell for cell in dict.fromkeys(table.cells(name)) if cell is not None]
    return [cell if isinstance(cell, str) else f"{cell:g}" for cell in cells]


def _split_words(table: Table, name: str) -> list[str]:
    """Return the distinct words of a column that alternates between a few; else an empty list."""
    column = table.columns[name]
    if not column.is_text.all():
        return []
    words = sorted({*column.texts})
    num_blocks = 1 + sum(previous != word for previous, word in pairwise(column.texts))
    is_split = 1 < len(words) <= MAX_SPLITS and all(re.fullmatch(SPLIT, word) for word in words)
    return words if is_split and num_blocks > len(words) else []


def _prefix_metrics(
    table: Table, split_column: str, words: list[str], step_names: Sequence[str]
) -> tuple[Table, None, list[str]]:
    parts = np.array([words.index(word) for word in table.columns[split_column].texts])
    renamed: dict[str, Column] = {name: table.columns[name] for name in table.columns if name in step_names}
    for name, column in table.columns.items():
        if name not in step_names:
            columns_by_part = column.split(parts)
            renamed |= {f"{words[part]}/{name}": column for part, column in columns_by_part.items()}
    note = f"metric names prefixed by column {printable(split_column[:80])}: {list_names(words, MAX_SPLITS)}"
    return replace(table, columns=renamed), None, [note]
