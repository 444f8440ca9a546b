"""Readers for tables: CSV, JSON lines, Parquet, and the trainer_state.json of transformers.

A file becomes columns block by block; none is ever whole in memory as rows.
"""

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from abrun.errors import StoreError
from abrun.logs.cells import DOT_GROUPED, is_number_with_comma, shorten_cell
from abrun.logs.columns import BLOCK_CELLS, PLAIN_TYPES, Column, ColumnBuilder, Table, TableBuilder, table_of
from abrun.logs.log import NOTHING_RECORDED, Log, missing_package_error, printable, wrap_read_errors
from abrun.logs.rows import (
    STEP_COLUMNS,
    UNNAMED,
    flat_cells,
    parse_json,
    series_of_table,
)
from abrun.logs.texts import TextFile
from abrun.regular_files import open_regular
from abrun.runs.lines import LineParser, damaged_line_error

TORN_NOTE = "its last line is torn, or still being written, and was left out"
NO_FOOTER_NOTE = "it has no footer (it is torn, or still being written) and cannot be read"
PARQUET_MAGIC = b"PAR1"
MAX_CELL_CHARS = 2**24  # characters
MAX_VALUES = 2**24  # maximum number of values in a Parquet file
# Columns of a long table: the run of a row, and the name and the value of its metric
ARM_COLUMNS = ("arm", "variant", "group", "condition", "treatment", "config", "method", "experiment", "algo")
RUN_COLUMNS = ("run", "run_name", "run_id", "name", "trial", "exp_name")
SEED_COLUMNS = ("seed", "random_seed", "rng_seed")
METRIC_COLUMNS = ("metric", "variable", "tag", "key", "name")
VALUE_COLUMNS = ("value", "val")
WITH_MARK = re.compile(r".*[.,].*")
DELIMITERS = (",", ";", "\t")
COMMENT = "#"
EXCEL_DELIMITER = re.compile(r"sep=([,;\t|])", re.IGNORECASE)  # in a line above the header

# A row's identity is its text: a run may be named 007, and a prompt's number have twenty digits.
KEY_COLUMNS = {*ARM_COLUMNS, *RUN_COLUMNS, *SEED_COLUMNS, *METRIC_COLUMNS}
MODEL_COLUMNS = ("model", "model_name", "checkpoint")  # settings, in a table with steps
BENCHMARK_COLUMNS = ("benchmark", "task", "dataset", "eval", "evaluation")
PROMPT_COLUMNS = (
    *("prompt", "prompt_id", "prompt_idx", "doc_id", "question", "question_id", "problem", "problem_id"),
    *("example", "example_id", "item", "item_id", "instance", "instance_id", "task_id"),
)
KEY_COLUMNS |= {*MODEL_COLUMNS, *BENCHMARK_COLUMNS, *PROMPT_COLUMNS}


# --- CSV ---


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

    def read(self) -> CsvTable:
        file, place = TextFile(self.path), path_text(self.path)
        csv.field_size_limit(MAX_CELL_CHARS)
        lines, num_skipped, delimiter = _skip_comments(file.text_lines())
        reader = csv.reader(lines, strict=True, delimiter=delimiter)
        numbers, rows = list[int](), list[list[str]]()  # line numbers of the ends of rows, and their cells
        num_lines, torn, problem = num_skipped, False, ""
        while not torn:
            start = len(rows)
            try:
                rows.extend(islice(reader, max(1, BLOCK_CELLS // (len(self.header) or BLOCK_CELLS))))
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

    def _add(self, numbers: Sequence[int], rows: Sequence[list[str]]) -> None:
        if not all(rows):  # blank lines
            numbers = [number for number, cells in zip(numbers, rows, strict=True) if cells]
            rows = [cells for cells in rows if cells]
        if rows and not self.header:
            self.first_header = rows[0]
            # The index of a data frame has no name in a CSV file; pandas uses this name when reading it.
            self.header = [name.strip() or f"{UNNAMED}{place}" for place, name in enumerate(rows[0])]
            self.columns = [ColumnBuilder() for _ in self.header]
            self.positions = [*range(len(self.header))]
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
        names = [name.removeprefix(COMMENT).strip() for name in cells]
        _check_unique_columns(self.path, self.header)
        _check_unique_columns(self.path, names)
        for name in names:
            if name not in self.header:
                self.header.append(name)
                self.columns.append(ColumnBuilder())
        self.positions = [self.header.index(name) for name in names]

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


def log_from_table(path: Path, table: Table, step_column: str | None) -> Log:
    """Return the run in a table with a column per metric."""
    return series_of_table(table, step_column).as_log(name=path.name, place=table.place)


def leave_out_columns(log: Log, ambiguous: Mapping[str, str]) -> Log:
    """Return a log with a note on each column that was left out; a claim on one is refused."""
    notes = [f"not read: {problem}" for problem in ambiguous.values()]
    return replace(log, unread={**log.unread, **ambiguous}, notes=(*log.notes, *notes))


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
    duplicates = _duplicate_columns(path, names)
    step_columns = STEP_COLUMNS if step_column is None else (step_column,)
    needed = {*step_columns, *ARM_COLUMNS, *RUN_COLUMNS, *SEED_COLUMNS, *METRIC_COLUMNS, *VALUE_COLUMNS}
    has_step = any(name == step_column or name.lower() in step_columns for name in names)
    for name, problem in duplicates.items():
        if not has_step or name == step_column or name.lower() in needed:
            raise StoreError(problem)
    return duplicates


def _check_unique_columns(path: Path, names: Sequence[str]) -> None:
    for problem in _duplicate_columns(path, names).values():
        raise StoreError(problem)


def _duplicate_columns(path: Path, names: Sequence[str]) -> dict[str, str]:
    duplicates = sorted(name for name, count in Counter(names).items() if name and count > 1)
    problem = f"{path_text(path)}: duplicate column '{{}}'; rename one of them"
    return {name: problem.format(printable(name[:80])) for name in duplicates}


# --- JSON ---


def read_json_table(path: Path) -> tuple[Table, list[str]]:
    """Return the flat rows of JSON lines or of a list, and notes on a torn end.

    Nested names are joined by '/'; NaN and Infinity may be bare or quoted.
    """
    file, notes = TextFile(path), list[str]()
    lines = enumerate(file.lines(), 1)
    first = next(((number, line) for number, line in lines if line.strip()), None)
    if first is None:
        notes.append(NOTHING_RECORDED)
    if first is not None and first[1].lstrip().startswith(b"["):
        rows = enumerate(_parse_list(path, TextFile(path).content()), 1)
    else:
        rows = _parse_objects(path, chain([first] if first else [], lines), notes)
    builder = TableBuilder(path_text(path))
    for number, row in rows:
        if not _is_summary(row):
            row = _unwrap_envelope(row)
            is_flat = PLAIN_TYPES.issuperset(map(type, row.values()))
            builder.add(number, row if is_flat else dict(flat_cells(row)))
    return builder.build(), notes or [TORN_NOTE] * file.torn


def _parse_objects(
    path: Path, lines: Iterator[tuple[int, bytes]], notes: list[str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    parser = LineParser()
    for number, line in lines:
        if not line or line.isspace():
            continue
        if not parser.is_intact(line):
            raise damaged_line_error(path_text(path), f"line {number}", line)
        row = parse_json(line)
        if isinstance(row, dict):
            yield number, row
        elif line.lstrip().startswith(b"{") and not any(line.strip() for _, line in lines):
            notes.append(TORN_NOTE)  # the last line
        else:
            excerpt = printable(line[:40].decode(errors="replace"))
            raise StoreError(
                f"{path_text(path)}, line {number}: got '{excerpt}'; expected a JSON object: "
                "remove the line or write the file again"
            )


def _parse_list(path: Path, content: bytes) -> list[dict[str, Any]]:
    rows = parse_json(content)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        excerpt = printable(content[:40].decode(errors="replace"))
        raise StoreError(
            f"{path_text(path)}, line 1: got '{excerpt}'; expected a JSON object in every line, or one list "
            "of objects: write the file again"
        )
    return rows


def _is_summary(row: Mapping[str, Any]) -> bool:
    """Return True for ms-swift's last row, which repeats the history and lists checkpoints."""
    return isinstance(row.get("log_history"), list)


def widen_table(table: Table, step_column: str | None) -> Table:
    """Convert long rows, `{"step": 1, "name": "loss", "value": 0.5}`, to rows with a column per metric.

    The keys may be nested, like fms-hf-tuning's `data/step` and `data/value`. Other rows stay unchanged.
    """
    metric, value = find_long_columns(table)
    if not metric:
        return table
    metrics, values = table.columns[metric], table.columns[value]
    has_name, has_value = np.zeros((2, len(table)), bool)
    has_name[metrics.rows[metrics.is_text]] = has_value[values.rows] = True
    is_long = has_name & has_value
    columns: dict[str, Column] = {}

    def add(name: str, column: Column) -> None:
        if len(column):
            columns[name] = columns[name].merge(column) if name in columns else column

    for name, column in table.columns.items():
        add(name, column.take(~is_long[column.rows]))
        long_name = name if _is_step(name, step_column) else name.rpartition("/")[2]
        if _is_step(long_name, step_column):
            add(long_name, column.take(is_long[column.rows]))
    names: dict[str, int] = {}
    groups = np.zeros(len(table), np.int64)
    groups[metrics.rows[metrics.is_text]] = [
        names.setdefault(text.strip(), len(names)) for text in metrics.texts
    ]
    parts = values.take(is_long[values.rows]).split(groups)
    for name, number in names.items():
        if number in parts:
            add(name, parts[number])
    return replace(table, columns=columns, header=())


def _is_step(name: str, step_column: str | None) -> bool:
    return name == step_column or name.lower() in STEP_COLUMNS


def find_long_columns(table: Table) -> tuple[str, str]:
    """Return the columns that hold a metric's name and its value; empty strings if no row has both."""
    if table.header:
        return find_long_names(table.header)
    has_cells = np.zeros((2, len(table)), bool)
    for index, words in enumerate((METRIC_COLUMNS, VALUE_COLUMNS)):
        for name, column in table.columns.items():
            if name.rpartition("/")[2].lower() in words:
                has_cells[index, column.rows] = True
    rows = np.flatnonzero(has_cells.all(0))
    return find_long_names(table.row(int(rows[0]))) if len(rows) else ("", "")


def find_long_names(names: Iterable[str]) -> tuple[str, str]:
    """Return the names of a long row's metric and value; empty strings if one is missing."""
    metric, value = (_find_by_last_part(names, words) for words in (METRIC_COLUMNS, VALUE_COLUMNS))
    return (metric, value) if metric and value else ("", "")


def _find_by_last_part(names: Iterable[str], words: Sequence[str]) -> str | None:
    """Return the column whose last path part is the first of `words` that occurs."""
    names_by_last_part = {name.rpartition("/")[2].lower(): name for name in names}
    return next((names_by_last_part[word] for word in words if word in names_by_last_part), None)


def _unwrap_envelope(row: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics in a row of verl's file logger, `{"step": 1, "data": {metrics}}`."""
    data = row.get("data")
    return {"step": row["step"], **data} if row.keys() == {"step", "data"} and isinstance(data, dict) else row


def read_trainer_state(path: Path, step_column: str | None = None) -> Log:
    """Read the trainer_state.json of transformers (and TRL), with the metric names of its other loggers."""
    state = parse_json(TextFile(path).content())
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list) or not all(isinstance(row, dict) for row in history):
        raise StoreError(
            f"{path_text(path)}: expected a trainer_state.json of transformers with a log_history"
        )
    table = table_of((dict(flat_cells(row)) for row in history), path_text(path))
    return log_from_table(path, table.rename(_name_as_logged), step_column)


def _name_as_logged(name: str) -> str:
    """Rename a metric like transformers' `rewrite_logs`: eval_x to eval/x, test_x to test/x, x to train/x."""
    if name == "step":
        return name
    return name.replace("_", "/", 1) if name.startswith(("eval_", "test_")) else f"train/{name}"


# --- Parquet ---


def read_parquet_table(path: Path) -> tuple[Table, list[str]]:
    """Return the content of a Parquet file, and notes on a torn or empty one.

    A null is not recorded (pandas writes NaN as null).
    """
    with wrap_read_errors(path), open_regular(path) as file:
        magic = file.read(len(PARQUET_MAGIC))
        size = file.seek(0, 2)
        file.seek(max(0, size - len(PARQUET_MAGIC)))
        end = file.read()
    empty = Table(place=path_text(path), columns={}, lines=[], line_word="row")
    if not size:
        return empty, [NOTHING_RECORDED]
    if magic == PARQUET_MAGIC and (end != PARQUET_MAGIC or size < 12):
        return empty, [NO_FOOTER_NOTE]
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise missing_package_error(path, "pyarrow", "'abrun[parquet]'") from None
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            schema = file.schema_arrow
            is_number = pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean
            numeric = [column.name for column in schema if any(test(column.type) for test in is_number)]
            text_types = (pa.string(), pa.large_string())
            texts = [column.name for column in schema if column.type in text_types]
            _check_unique_columns(path, schema.names)
            num_values = file.metadata.num_rows * len(numeric + texts)
            if num_values > MAX_VALUES:  # a tiny file can claim this many by repeating a value
                raise StoreError(
                    f"{path_text(path)}: claims {num_values} values; allowed: at most {MAX_VALUES}"
                )
            table = file.read(columns=numeric + texts).combine_chunks()
            columns = {
                name: _parquet_column(column, is_text=column.type in text_types)
                for name, column in zip(table.column_names, table.columns, strict=True)
            }
    except StoreError:
        raise
    except Exception as error:  # from Arrow or the system: invalid text, out of memory
        raise StoreError(f"{path_text(path)}: not valid Parquet: {error_text(error)}") from None
    filled = {name: column for name, column in columns.items() if len(column)}
    lines = np.arange(1, table.num_rows + 1)
    return replace(empty, columns=filled, lines=lines, header=schema.names), []


def _parquet_column(column: Any, *, is_text: bool) -> Column:  # a ChunkedArray of text or numbers
    import pyarrow as pa

    rows = np.flatnonzero(column.is_valid().to_numpy()).astype(np.int32)
    column = column.drop_null()
    if not is_text:
        return Column(rows, column.cast(pa.float64(), safe=False).to_numpy().astype(np.float64))
    builder = ColumnBuilder()
    for row, text in zip(rows.tolist(), column.to_pylist(), strict=True):
        if text.strip():
            builder.add_text(row, shorten_cell(text))
    return builder.build()


def path_text(path: Path) -> str:
    return printable(str(path))


def error_text(error: Exception) -> str:
    return printable(" ".join(str(error).split())[:200])
