"""Tables in memory: each column holds its numbers in arrays, and its texts beside them.

Rows arrive in blocks, so that a file of millions of rows never exists as Python objects: a number takes 12
bytes here, and some 90 as a row of a dictionary.
"""

import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from abrun.errors import StoreError
from abrun.logs.foreign.values import parse_number, shorten_cell, to_float
from abrun.stats.series import Array

BLOCK_CELLS = 1 << 16  # that are converted together
MAX_CELLS = 2**26  # of a table: 0.8 GB
MAX_COLUMNS = 110_000  # a run may have 100,000 metrics
MAX_TEXTS = 2**23  # of a table, those that repeat in a column apart
MAX_SHARED = 10_000  # different texts of a column that are kept once, such as names of arms

Rows = NDArray[np.int32]
Cell = float | str
Cells = Mapping[str, Cell]  # of one row: numbers, and texts that may be numbers
PLAIN_TYPES = {int, float}
_FIRST_ROW = np.zeros(1, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """Cells of a column, in the order of their rows. Rows without a cell are left out."""

    rows: Rows  # [N] ascending
    values: Array  # [N] NaN for a text
    all_texts: NDArray[np.object_] | None = None  # [N] None for a number; without the array all are numbers
    has_plain: bool = True  # some number is written without a point

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def is_text(self) -> NDArray[np.bool_]:
        """Mask of the cells that are texts [N]."""
        return np.zeros(len(self), bool) if self.all_texts is None else self.all_texts != None  # noqa: E711

    @property
    def texts(self) -> list[str]:
        """The texts, in the order of their rows."""
        return [] if self.all_texts is None else self.all_texts[self.is_text].tolist()

    def cells(self, num_rows: int) -> list[Cell]:
        """Return the cell of every row; an empty text where there is none."""
        cells: list[Cell] = [""] * num_rows
        for row, value in zip(self.rows.tolist(), self.values.tolist(), strict=True):
            cells[row] = value
        for row, text in zip(self.rows[self.is_text].tolist(), self.texts, strict=True):
            cells[row] = text
        return cells

    def take(self, indices: Any) -> "Column":  # a mask [N], indices or a slice
        """Return some cells."""
        texts = None if self.all_texts is None else self.all_texts[indices]
        return replace(self, rows=self.rows[indices], values=self.values[indices], all_texts=texts)

    def split(self, groups: NDArray[np.int64]) -> dict[int, "Column"]:
        """Return the cells of each group that has some; `groups` has a number from 0 for each row."""
        cell_groups = groups[self.rows]
        order = np.argsort(cell_groups, kind="stable")
        present, starts = np.unique(cell_groups[order], return_index=True)
        return {
            int(group): self.take(indices)
            for group, indices in zip(present, np.split(order, starts[1:]), strict=False)
        }

    def merge(self, other: "Column") -> "Column":
        """Return the cells of both; where both have one, that of `other`."""
        remaining = self.take(~np.isin(self.rows, other.rows))
        return join_cells(
            [remaining.rows, other.rows],
            [remaining.values, other.values],
            [*np.flatnonzero(remaining.is_text), *(len(remaining) + np.flatnonzero(other.is_text))],
            [*remaining.texts, *other.texts],
            has_plain=self.has_plain or other.has_plain,
        )


NO_CELLS = Column(np.empty(0, np.int32), np.empty(0))


def join_cells(
    rows: Sequence[Rows], values: Sequence[Array], text_indices: Any, texts: Sequence[str], *, has_plain: bool
) -> Column:
    """Return the column of cells in any order; `text_indices`: which of them are the texts."""
    joined_rows, all_texts = np.concatenate(rows), None
    if len(texts):
        all_texts = np.full(len(joined_rows), None, object)
        all_texts[np.asarray(text_indices, np.int64)] = texts
    column = Column(joined_rows, np.concatenate(values), all_texts, has_plain)
    if len(column) > 1 and (np.diff(joined_rows) < 0).any():
        return column.take(np.argsort(joined_rows, kind="stable"))
    return column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """Rows of one file or one run, as columns in the order of their first cells."""

    place: str  # for messages
    columns: Mapping[str, Column]
    lines: Sequence[int] | NDArray[np.int64]  # [R] number of each row's line
    line_word: str = "line"  # "row" if the numbers are not those of lines
    header: Sequence[str] = ()  # names of all columns, if the file states them

    def __len__(self) -> int:
        return len(self.lines)

    def names(self) -> list[str]:
        return list(self.header or self.columns)

    def describe_row(self, row: int) -> str:
        return f"{self.line_word} {self.lines[row]}"

    def cells(self, name: str | None) -> list[Cell]:
        """Return the cell of every row in a column; empty texts for a column that does not exist."""
        column = self.columns.get(name) if name is not None else None
        return column.cells(len(self)) if column else [""] * len(self)

    def iterate(self) -> Iterator[tuple[int, dict[str, Cell]]]:
        """Yield each row's line number and cells."""
        num_rows = max(1, BLOCK_CELLS // (len(self.columns) or 1))
        for start in range(0, len(self), num_rows):
            lines = self.lines[start : start + num_rows]
            block: list[dict[str, Cell]] = [{} for _ in lines]
            for name, column in self.columns.items():
                start_index, end_index = np.searchsorted(column.rows, [start, start + len(block)])
                selected_cells = column.take(slice(start_index, end_index))
                for row, cell in enumerate(
                    replace(selected_cells, rows=selected_cells.rows - start).cells(len(block))
                ):
                    if cell != "":
                        block[row][name] = cell
            yield from zip(map(int, lines), block, strict=True)

    def row(self, index: int) -> dict[str, Cell]:
        """Return the cells of one row."""
        cells: dict[str, Cell] = {}
        for name, column in self.columns.items():
            start_index, end_index = np.searchsorted(column.rows, [index, index + 1])
            if start_index < end_index:
                cells[name] = replace(column.take(slice(start_index, end_index)), rows=_FIRST_ROW).cells(1)[0]
        return cells

    def head(self, num_rows: int) -> "Table":
        """Return the first rows."""
        return self.select(np.arange(len(self)) < num_rows)

    def select(self, is_selected: NDArray[np.bool_]) -> "Table":  # [R]
        """Return the selected rows."""
        new_rows = (np.cumsum(is_selected) - 1).astype(np.int32)
        columns: dict[str, Column] = {}
        for name, column in self.columns.items():
            selected_cells = column.take(is_selected[column.rows])
            if len(selected_cells):
                columns[name] = replace(selected_cells, rows=new_rows[selected_cells.rows])
        return replace(self, columns=columns, lines=np.asarray(self.lines)[is_selected])

    def split(self, groups: NDArray[np.int64], num_groups: int) -> list["Table"]:
        """Return a table for each of the first groups; `groups` [R] has a number from 0 for each row."""
        lines = np.asarray(self.lines)
        order = np.argsort(groups, kind="stable")
        counts = np.bincount(groups, minlength=num_groups)
        starts = np.cumsum(counts) - counts
        new_rows = np.empty(len(groups), np.int32)
        new_rows[order] = np.arange(len(groups)) - np.repeat(starts, counts)
        columns: list[dict[str, Column]] = [{} for _ in counts]
        for name, column in self.columns.items():
            for group, selected_cells in column.split(groups).items():
                columns[group][name] = replace(selected_cells, rows=new_rows[selected_cells.rows])
        return [
            replace(self, columns=columns[group], lines=lines[order[start : start + counts[group]]])
            for group, start in enumerate(starts[:num_groups])
        ]

    def rename(self, new_name: Callable[[str], str]) -> "Table":
        """Return the table with other names; of two columns that get one name, the last cells count."""
        columns: dict[str, Column] = {}
        for name, column in self.columns.items():
            renamed = new_name(name)
            columns[renamed] = columns[renamed].merge(column) if renamed in columns else column
        return replace(self, columns=columns, header=[new_name(name) for name in self.header])

    def without(self, names: Iterable[str]) -> "Table":
        """Return the table without some columns."""
        left_out = set(names)
        return replace(
            self,
            columns={name: column for name, column in self.columns.items() if name not in left_out},
            header=[name for name in self.header if name not in left_out],
        )


# --- building ---


@dataclass(slots=True, eq=False)
class ColumnBuilder:
    """Cells of a column, added in any order of rows."""

    rows: list[Rows] = field(default_factory=list)
    values: list[Array] = field(default_factory=list)
    text_rows: array = field(default_factory=lambda: array("i"))
    texts: list[str] = field(default_factory=list)
    shared: dict[str, str] = field(default_factory=dict)
    has_plain: bool = False

    def add_numbers(self, rows: Rows, values: Array) -> None:
        self.rows.append(rows)
        self.values.append(values)

    def add_text(self, row: int, text: str) -> bool:
        """Add a text; return True if it is kept once more, and not shared with an equal one."""
        shared_text = self.shared.get(text)
        is_new = shared_text is None
        if shared_text is None and len(self.shared) < MAX_SHARED:
            self.shared[text] = text
        self.text_rows.append(row)
        self.texts.append(text if shared_text is None else shared_text)
        return is_new

    def build(self) -> Column:
        num_numbers = sum(map(len, self.rows))
        column = join_cells(
            [*self.rows, np.array(self.text_rows, np.int32)],
            [*self.values, np.full(len(self.texts), np.nan)],
            range(num_numbers, num_numbers + len(self.texts)),
            self.texts,
            has_plain=self.has_plain,
        )
        self.rows, self.values, self.texts = [], [], []
        return column


class TableBuilder:
    """Builder of a table from rows. Raises StoreError for a table beyond MAX_CELLS or MAX_TEXTS."""

    def __init__(self, place: str, line_word: str = "line") -> None:
        self.place, self.line_word = place, line_word
        self.lines = array("q")
        self.columns: dict[str, ColumnBuilder] = {}
        self._block: list[Cells] = []
        self._num_cells = 0  # in the block
        self._total_cells = self._num_texts = 0

    def add(self, line: int, cells: Cells) -> None:
        """Add a row."""
        self.lines.append(line)
        self._block.append(cells)
        self._num_cells += len(cells) + 1
        if self._num_cells >= BLOCK_CELLS:
            self._add_block()

    def add_texts(self, column: ColumnBuilder, first_row: int, cells: Sequence[str]) -> None:
        """Add the cells of consecutive rows to a column, as texts."""
        filled = [(row, cell) for row, cell in enumerate(cells, first_row) if cell and not cell.isspace()]
        self._count(len(filled), sum(column.add_text(row, shorten_cell(cell)) for row, cell in filled))

    def add_cells(
        self,
        column: ColumnBuilder,
        first_row: int,
        cells: Sequence[str],
        marks: str = "",
        kept_texts: re.Pattern[str] | None = None,
    ) -> None:
        """Add the cells of consecutive rows to a column: as numbers, and as texts what is no plain number.

        Cells that match `kept_texts` stay texts; each has one of the `marks`.
        """
        joined = "".join(cells)
        if joined.isascii() and not any(mark in joined for mark in ("_", *marks)):
            try:
                values = np.fromiter(map(float, cells), np.float64, len(cells))
            except ValueError:
                pass  # some cell is empty, or a text
            else:
                column.add_numbers(np.arange(first_row, first_row + len(cells), dtype=np.int32), values)
                column.has_plain = column.has_plain or any(map(str.isdigit, cells))
                self._count(len(cells), 0)
                return
        rows, values, num_texts = array("i"), array("d"), 0
        for row, cell in enumerate(cells, first_row):
            if not cell or cell.isspace():
                continue
            try:
                if kept_texts and kept_texts.fullmatch(cell.strip()):
                    raise ValueError
                values.append(parse_number(cell.strip()))
                rows.append(row)
                column.has_plain = column.has_plain or cell.strip().isdigit()
            except ValueError:
                num_texts += column.add_text(row, shorten_cell(cell))
        column.add_numbers(np.array(rows, np.int32), np.array(values, np.float64))
        self._count(len(cells), num_texts)

    def add_lines(self, lines: Iterable[int]) -> int:
        """Add rows whose cells follow by `add_cells`; return the first one's number."""
        first_row = len(self.lines)
        self.lines.extend(lines)
        return first_row

    def build(self, header: Sequence[str] = ()) -> Table:
        self._add_block()
        columns = {name: column.build() for name, column in self.columns.items()}
        return Table(
            place=self.place,
            columns={name: column for name, column in columns.items() if len(column)},
            lines=np.frombuffer(self.lines, np.int64),
            line_word=self.line_word,
            header=header,
        )

    def _add_block(self) -> None:
        """Add the rows of a block, column by column. Rows with the same names are taken together."""
        first_row = len(self.lines) - len(self._block)
        groups: dict[tuple[str, ...], list[int]] = {}
        for index, cells in enumerate(self._block):
            groups.setdefault(tuple(cells), []).append(index)
        columns: dict[str, tuple[list[int], list[Cell]]] = defaultdict(lambda: ([], []))
        for names, indices in groups.items():
            for name in names:
                rows, cells = columns[name]
                rows += indices
                cells += [self._block[index][name] for index in indices]
        for name, (rows, cells) in columns.items():
            self._add_column(name, np.array(rows, np.int32) + np.int32(first_row), cells)
        self._block, self._num_cells = [], 0

    def _add_column(self, name: str, rows: Rows, cells: Sequence[Cell]) -> None:
        column = self.columns.get(name)
        if column is None:
            if len(self.columns) == MAX_COLUMNS:
                raise StoreError(f"{self.place}: more than {MAX_COLUMNS} metrics; log fewer, or split it")
            column = self.columns[name] = ColumnBuilder()
        if PLAIN_TYPES.issuperset(map(type, cells)):
            column.add_numbers(rows, _to_floats(cells))
            column.has_plain = True
            self._count(len(cells), 0)
            return
        num_texts, numbers = 0, []
        for index, cell in enumerate(cells):
            if not isinstance(cell, str):
                numbers.append(index)
            elif cell and not cell.isspace():
                num_texts += column.add_text(int(rows[index]), cell)
        column.add_numbers(rows[numbers], _to_floats([cells[index] for index in numbers]))
        column.has_plain = column.has_plain or bool(numbers)
        self._count(len(cells), num_texts)

    def _count(self, num_cells: int, num_texts: int) -> None:
        self._total_cells += num_cells
        self._num_texts += num_texts
        for number, limit, kind in (
            (self._total_cells, MAX_CELLS, "cells"),
            (self._num_texts, MAX_TEXTS, "different texts"),
        ):
            if number > limit:
                raise StoreError(f"{self.place}: more than {limit:,} {kind}; log less often, or split it")


def _to_floats(cells: Sequence[Cell]) -> Array:
    try:
        return np.array(cells, np.float64)
    except OverflowError:  # whole numbers of more than 308 digits
        return np.array([to_float(cell) for cell in cells if not isinstance(cell, str)], np.float64)


def table_of(rows: Iterable[Cells], place: str) -> Table:
    """Return a table of rows that have no line numbers."""
    builder = TableBuilder(place, "row")
    for number, row in enumerate(rows, 1):
        builder.add(number, row)
    return builder.build()
