"""Reader for CSV files: with comments, repeated headers, a torn end, and any delimiter."""

import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

from abrun.errors import StoreError
from abrun.logs.foreign.columns import BLOCK_CELLS, Column, ColumnBuilder, Table, TableBuilder
from abrun.logs.foreign.files import MAX_LINE, TextFile
from abrun.logs.foreign.values import (
    DOT_GROUPED,
    MAX_NAME_CHARACTERS,
    as_number,
    is_number_with_comma,
    shorten_cell,
)
from abrun.logs.log import Log
from abrun.logs.naming import strip_suffix
from abrun.logs.rows import STEP_COLUMNS, UNNAMED, check_number_of_metrics
from abrun.logs.tables import (
    ARM_COLUMNS,
    KEY_COLUMNS,
    METRIC_COLUMNS,
    RUN_COLUMNS,
    SEED_COLUMNS,
    VALUE_COLUMNS,
    check_unique_columns,
    duplicate_columns,
    error_text,
    path_text,
)

MAX_CELL_CHARS = 2**24  # characters
WITH_MARK = re.compile(r"[^.,]*[.,].*", re.DOTALL)
DELIMITERS = (",", ";", "\t")
COMMENT = "#"
EXCEL_DELIMITER = re.compile(r"sep=([,;\t|])", re.IGNORECASE)  # in a line above the header


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvTable:
    """Content of a CSV file; without columns if it has no complete line."""

    header: Sequence[str]  # names by position, some of which may be the same
    columns: Sequence[Column]  # by position
    table: Table  # its rows, without columns
    torn: bool
    unended: bool  # the last line has no line end: it may still be being written
    has_unended_row: bool  # it has as many cells as the header, and is the table's last row

    def table_of(self, names: Mapping[int, str]) -> Table:
        """Return the columns at some positions, under other names."""
        columns = {name: self.columns[position] for position, name in names.items()}
        filled = {name: column for name, column in columns.items() if len(column)}
        return replace(self.table, columns=filled, header=[*columns])

    def complete(self, table: Table) -> Table:
        """Return the rows of lines that have an end."""
        return table.head(len(table) - 1) if self.has_unended_row else table

    def run_table(self, path: Path, step_column: str | None) -> tuple[Table, dict[str, str]]:
        """Return the columns, and the problems of metrics of which two columns have the name."""
        ambiguous = find_ambiguous_columns(path, self.header, step_column)
        names = {index: name for index, name in enumerate(self.header) if name not in ambiguous}
        return self.table_of(names), ambiguous


def read_csv_table(path: Path, step_column: str | None, *, keeps_marks: bool = False) -> CsvTable:
    """Return the content of a CSV file. Empty cells are not recorded.

    `keeps_marks`: keep every cell with a point or a comma as text. This is needed only if some cell shows
    that commas are decimal marks, or group digits.
    """
    content = _CsvReader(path, step_column, keeps_marks).read()
    texts = chain.from_iterable(column.texts for column in content.columns)
    if keeps_marks or not any(map(is_number_with_comma, texts)):
        return content
    return read_csv_table(path, step_column, keeps_marks=True)


class _CsvReader:
    """Reader of a CSV file. A resumed writer may repeat the header, with other columns."""

    def __init__(self, path: Path, step_column: str | None, keeps_marks: bool) -> None:
        self.path, self.step_column, self.keeps_marks = path, step_column, keeps_marks
        self.builder = TableBuilder(path_text(path))
        self.first_header: list[str] = []
        self.header: list[str] = []
        self.columns: list[ColumnBuilder] = []
        self.positions: list[int] = []  # of the cells of a row, after the last header
        self.index_of: dict[str, int] = {}  # of the names, once a header is repeated
        self.num_characters = 0  # since the last row

    def read(self) -> CsvTable:
        file, place = TextFile(self.path), path_text(self.path)
        csv.field_size_limit(MAX_CELL_CHARS)
        lines, num_skipped, delimiter = _skip_comments(file.text_lines())
        reader = csv.reader(self._bounded(lines), strict=True, delimiter=delimiter)
        numbers, rows = list[int](), list[list[str]]()  # line numbers of the ends of rows, and their cells
        num_lines, torn, problem = num_skipped, False, ""
        while not torn:
            start = len(rows)
            width = len(self.positions) or BLOCK_CELLS
            try:
                for cells in islice(reader, max(1, BLOCK_CELLS // width)):
                    rows.append(cells)
                    self.num_characters = 0
                    if len(cells) > width:  # too long, or another header: no more rows of that length
                        break
            except csv.Error as error:
                torn, problem = True, error_text(error)
            if len(rows) == start and not torn:
                break
            numbers += _number_lines(rows[start:], num_lines, num_skipped + reader.line_num)
            num_lines = numbers[-1] if numbers else num_lines
            # An open quote at the end of the file is a torn line, or starts far above and swallowed the rest.
            is_last_line = num_skipped + reader.line_num == num_lines + 1
            if torn and not ("unexpected end of data" in problem and is_last_line):
                raise StoreError(f"{place}, line {num_lines + 1}: not valid CSV: {problem}")
            self._add(numbers[:-1], rows[:-1])  # the last line waits: it may have no end
            numbers, rows = numbers[-1:], rows[-1:]
        is_unended = bool(rows and rows[0]) and not (torn or file.ended)
        if not is_unended:
            self._add(numbers, rows)
        is_whole = is_unended and bool(self.header) and len(rows[0]) == len(self.positions)
        if is_whole:
            self._add(numbers, rows)
        return CsvTable(
            header=self.header,
            columns=[column.build() for column in self.columns],
            table=self.builder.build(),
            torn=torn or file.torn or is_unended,
            unended=is_unended,
            has_unended_row=is_whole,
        )

    def _bounded(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield the lines. Raises StoreError if quoted line ends make a row longer than a line may be."""
        for line in lines:
            self.num_characters += len(line)
            if self.num_characters > MAX_LINE:
                raise StoreError(f"{path_text(self.path)}: a row is longer than {MAX_LINE} characters")
            yield line

    def _add(self, numbers: Sequence[int], rows: Sequence[list[str]]) -> None:
        if not all(rows):  # blank lines
            numbers = [number for number, cells in zip(numbers, rows, strict=True) if cells]
            rows = [cells for cells in rows if cells]
        if rows and not self.header:
            check_number_of_metrics(len(rows[0]), path_text(self.path))
            is_headless = len(rows[0]) == 2 and None not in map(as_number, rows[0])
            self.first_header = ["step", strip_suffix(self.path.name)] if is_headless else rows[0]
            self.header = _name_columns(self.first_header)
            self.columns = [ColumnBuilder() for _ in self.header]
            self.positions = [*range(len(self.header))]
            if not is_headless:
                numbers, rows = numbers[1:], rows[1:]
        has_no_name = ({*self.first_header, *self.header} - {""}).isdisjoint
        headers = [index for index, cells in enumerate(rows) if not has_no_name(cells)]
        start = 0
        for index in headers:
            if _is_header(rows[index], self.first_header):
                self._add_rows(numbers[start:index], rows[start:index])
                self._repeat_header(rows[index])
                start = index + 1
        self._add_rows(numbers[start:], rows[start:])

    def _repeat_header(self, cells: Sequence[str]) -> None:
        names = _name_columns([name.removeprefix(COMMENT) for name in cells])
        if not self.index_of:
            check_unique_columns(self.path, self.header)
            self.index_of = {name: index for index, name in enumerate(self.header)}
        check_unique_columns(self.path, names)
        positions = self.index_of
        for name in names:
            if name not in positions:
                positions[name] = len(self.header)
                self.header.append(name)
                self.columns.append(ColumnBuilder())
        check_number_of_metrics(len(self.header), path_text(self.path))
        self.positions = [positions[name] for name in names]

    def _add_rows(self, numbers: Sequence[int], rows: Sequence[list[str]]) -> None:
        width = len(self.positions)
        if {*map(len, rows)} - {width}:
            numbered = [
                (number, cells)
                for number, cells in zip(numbers, rows, strict=True)
                if not (cells[0].startswith(COMMENT) and len(cells) != width)
            ]
            for number, cells in numbered:
                if len(cells) != width:
                    raise StoreError(
                        f"{path_text(self.path)}, line {number}: got {len(cells)} cells; the header has "
                        f"{width}: fix the line or write the file again"
                    )
            numbers, rows = [number for number, _ in numbered], [cells for _, cells in numbered]
        first_row = self.builder.add_lines(numbers)
        for position, cells in zip(self.positions, zip(*rows, strict=True), strict=bool(rows)):
            name, column = self.header[position], self.columns[position]
            if name.lower() in KEY_COLUMNS:
                self.builder.add_texts(column, first_row, cells)
            elif self.keeps_marks:
                self.builder.add_cells(column, first_row, cells, ".,", WITH_MARK)
            elif name == self.step_column or name.lower() in STEP_COLUMNS:
                self.builder.add_cells(column, first_row, cells, ".", DOT_GROUPED)
            else:
                self.builder.add_cells(column, first_row, cells)


def leave_out_columns(log: Log, ambiguous: Mapping[str, str]) -> Log:
    """Return a log with a note on each column that was left out; a claim on one is refused."""
    notes = [f"not read: {problem}" for problem in ambiguous.values()]
    return replace(log, unread={**log.unread, **ambiguous}, notes=(*log.notes, *notes))


def _name_columns(names: Sequence[str]) -> list[str]:
    """Return names without spaces; pandas reads a data frame's index, which has no name, under this one."""
    stripped = (name.strip() for name in names)
    return [
        (name if len(name) <= MAX_NAME_CHARACTERS else shorten_cell(name)) or f"{UNNAMED}{place}"
        for place, name in enumerate(stripped)
    ]


def _is_header(cells: Sequence[str], header: Sequence[str]) -> bool:
    """Return True for a line that repeats at least half of the column names and holds no number."""
    names = [name.removeprefix(COMMENT).strip() for name in cells]
    common = {name for name in names if name} & {name.strip() for name in header}
    has_number = any(re.match(r"[-+.]?\d", name) for name in names)
    return cells == header or (2 * len(common) >= len(header) and not has_number)


def _number_lines(rows: Sequence[Sequence[str]], num_lines: int, num_read: int) -> Iterable[int]:
    """Return the number of the line at which each row ends; `num_lines` precede them."""
    if num_lines + len(rows) == num_read:
        return range(num_lines + 1, num_read + 1)
    numbers = []
    for cells in rows:  # a quoted cell may hold line ends
        joined = "".join(cells)
        num_lines += 1 + joined.count("\n") + joined.count("\r") - joined.count("\r\n")
        numbers.append(num_lines)
    return numbers


def _skip_comments(lines: Iterator[str]) -> tuple[Iterator[str], int, str]:
    """Return the lines from the header on, the number of lines above it, and the delimiter.

    The header may itself begin with `#` if the line below has as many cells.
    """
    num_skipped, last_comment, delimiter = 0, "", ""
    for first_line in lines:
        line = first_line.strip("\r\n")
        excel = EXCEL_DELIMITER.fullmatch(line)
        if not (line.startswith(COMMENT) or excel or (num_skipped and not line.strip())):
            break
        num_skipped, last_comment = num_skipped + 1, line if line.strip() else last_comment
        delimiter = excel[1] if excel else delimiter
    else:
        first_line = ""
    second_line = next(lines, "")
    if not delimiter:  # equally frequent in the header and below it, else most frequent in the header
        counts = {mark: first_line.count(mark) for mark in DELIMITERS}
        delimiter = max(counts, key=lambda mark: (0 < counts[mark] == second_line.count(mark), counts[mark]))
    start = [line for line in (first_line, second_line) if line]
    header = last_comment.removeprefix(COMMENT).strip()
    num_cells = len(first_line.split(delimiter))
    if header and num_cells == len(header.split(delimiter)) and not re.search(r"[^\W\d_]{4}", first_line):
        return chain([f"{header}\n", *start], lines), num_skipped - 1, delimiter
    return chain(start, lines), num_skipped, delimiter


def find_ambiguous_columns(path: Path, names: Sequence[str], step_column: str | None) -> dict[str, str]:
    """Return the metrics that two columns are named after, each with its problem.

    Raises StoreError for a table without a step, where any column may name the runs, and for a column that
    gives the step, the arm, the run, the seed or the metric.
    """
    duplicates = duplicate_columns(path, names)
    step_columns = STEP_COLUMNS if step_column is None else (step_column,)
    needed = {*step_columns, *ARM_COLUMNS, *RUN_COLUMNS, *SEED_COLUMNS, *METRIC_COLUMNS, *VALUE_COLUMNS}
    has_step = any(name == step_column or name.lower() in step_columns for name in names)
    for name, problem in duplicates.items():
        if not has_step or name == step_column or name.lower() in needed:
            raise StoreError(problem)
    return duplicates
