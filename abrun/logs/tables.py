"""Readers for tables: CSV, JSON lines, Parquet, and the trainer_state.json of transformers."""

import codecs
import csv
import io
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from abrun.errors import StoreError
from abrun.logs.log import NOTHING_RECORDED, Log, missing_package_error, printable, wrap_read_errors
from abrun.logs.rows import (
    STEP_COLUMNS,
    UNNAMED,
    Cells,
    TableMetrics,
    build_series,
    flat_cells,
    parse_json,
    shorten_cell,
)
from abrun.regular_files import open_regular, read_regular
from abrun.runs.lines import LineParser, damaged_line_error

GZIP = b"\x1f\x8b"
MAX_UNPACKED_BYTES = 2**30  # bytes
UTF_16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
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
DELIMITERS = (",", ";", "\t")
COMMENT = "#"
EXCEL_DELIMITER = re.compile(r"sep=([,;\t|])", re.IGNORECASE)  # in a line above the header

CsvLine = tuple[int, list[str]]  # line number of its end, and its cells


# --- CSV ---


def log_from_csv_lines(path: Path, lines: list[CsvLine], step_column: str | None = None) -> Log:
    """Return the run in a CSV file's complete lines, header first. Empty cells are not recorded."""
    header, rows, ambiguous = parse_csv_lines(path, lines, step_column)
    return leave_out_columns(log_from_rows(path, rows, step_column, header), ambiguous)


def parse_csv_lines(
    path: Path, lines: Sequence[CsvLine], step_column: str | None = None
) -> tuple[list[str], list[tuple[int, Cells]], dict[str, str]]:
    """Return the columns and the rows of a CSV file's complete lines, header first.

    Metrics of which two columns have the name are not among them; they come last, each with its problem.
    """
    # The index of a data frame has no name in a CSV file; pandas uses this name when reading it.
    header = [name.strip() or f"{UNNAMED}{place}" for place, name in enumerate(lines[0][1])]
    ambiguous = _find_ambiguous_columns(path, header, step_column)
    rows = [(number, cells) for number, cells in lines[1:] if not _is_comment(cells, header)]
    for number, cells in rows:
        _check_length(path, number, cells, header)
    columns = [name for name in header if name not in ambiguous]
    numbered_cells: list[tuple[int, Cells]] = []
    for number, cells in rows:
        row = dict(zip(header, cells, strict=True))
        numbered_cells.append((number, {name: row[name] for name in columns} if ambiguous else row))
    return columns, numbered_cells, ambiguous


def leave_out_columns(log: Log, ambiguous: Mapping[str, str]) -> Log:
    """Return a log with a note on each column that was left out; a claim on one is refused."""
    notes = [f"not read: {problem}" for problem in ambiguous.values()]
    return replace(log, unread={**log.unread, **ambiguous}, notes=(*log.notes, *notes))


def log_from_rows(
    path: Path, rows: Iterable[tuple[int, Cells]], step_column: str | None, columns: Sequence[str] = ()
) -> Log:
    """Return the run in a file's rows, each given with its line number."""
    lines, cells = [], []
    for line, row in rows:
        lines.append(line)
        cells.append(row)
    return _make_log(path, build_series(cells, _path_text(path), step_column, columns, lines))


def read_csv_lines(path: Path) -> tuple[list[CsvLine], list[CsvLine], bool]:
    """Return the complete lines with their line numbers, a last line without a line end, and True if torn.

    The last line may still be being written, so it is kept apart.
    """
    content, torn = _read_content(path)
    csv.field_size_limit(MAX_CELL_CHARS)
    text, num_skipped, delimiter = _skip_comments(_decode(path, content))
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=delimiter)
    lines: list[CsvLine] = []
    last_line = 0
    try:
        for cells in reader:
            last_line = reader.line_num
            if cells:
                lines.append((num_skipped + last_line, cells))
    except csv.Error as error:
        # An open quote at the end of the file is a torn line, or starts far above and swallowed the rest.
        if "unexpected end of data" in str(error) and reader.line_num == last_line + 1:
            return lines, [], True
        raise StoreError(
            f"{_path_text(path)}, line {num_skipped + last_line + 1}: not valid CSV: {_error_text(error)}"
        ) from None
    unended: list[CsvLine] = []
    if lines and not content.endswith((b"\n", b"\r")):
        lines, unended, torn = lines[:-1], lines[-1:], True
    return _merge_headers(path, lines), unended, torn


def _merge_headers(path: Path, lines: list[CsvLine]) -> list[CsvLine]:
    """Merge later headers, which a resumed writer may repeat with other columns, into the first."""
    first_header = lines[0][1] if lines else []
    header_indices = {i for i, (_, cells) in enumerate(lines) if i and _is_header(cells, first_header)}
    if not header_indices:
        return lines
    header, rows = [name.strip() for name in first_header], []
    _check_unique_columns(path, header)
    columns = dict.fromkeys(header)
    for index, (number, cells) in enumerate(lines[1:], 1):
        if index in header_indices:
            header = [name.removeprefix(COMMENT).strip() for name in cells]
            _check_unique_columns(path, header)
            columns |= dict.fromkeys(header)
        elif not _is_comment(cells, header):
            _check_length(path, number, cells, header)
            rows.append((number, dict(zip(header, cells, strict=True))))
    return [(lines[0][0], [*columns]), *((n, [row.get(name, "") for name in columns]) for n, row in rows)]


def _is_header(cells: Sequence[str], header: Sequence[str]) -> bool:
    """Return True for a line that repeats at least half of the column names and holds no number."""
    names = [name.removeprefix(COMMENT).strip() for name in cells]
    common = {name for name in names if name} & {name.strip() for name in header}
    has_number = any(re.match(r"[-+.]?\d", name) for name in names)
    return cells == header or (2 * len(common) >= len(header) and not has_number)


def _check_length(path: Path, number: int, cells: Sequence[str], header: Sequence[str]) -> None:
    if len(cells) != len(header):
        raise StoreError(
            f"{_path_text(path)}, line {number}: got {len(cells)} cells; the header has {len(header)}: "
            "fix the line or write the file again"
        )


def _skip_comments(text: str) -> tuple[str, int, str]:
    """Return the text from the header on, the number of lines above it, and the delimiter.

    The header may itself begin with `#` if the line below has as many cells.
    """
    num_skipped, last_comment, delimiter = 0, "", ""
    while text:
        line, _, rest = text.partition("\n")
        excel = EXCEL_DELIMITER.fullmatch(line.strip("\r"))
        if not (line.startswith(COMMENT) or excel or (num_skipped and not line.strip())):
            break
        text, num_skipped, last_comment = rest, num_skipped + 1, line if line.strip() else last_comment
        delimiter = excel[1] if excel else delimiter
    first_line, second_line = [*text.split("\n", 2), ""][:2]
    if not delimiter:  # equally frequent in the header and below it, else most frequent in the header
        counts = {mark: first_line.count(mark) for mark in DELIMITERS}
        delimiter = max(counts, key=lambda mark: (0 < counts[mark] == second_line.count(mark), counts[mark]))
    cells = first_line.split(delimiter)
    header = last_comment.removeprefix(COMMENT).strip()
    if header and len(cells) == len(header.split(delimiter)) and not re.search(r"[^\W\d_]{4}", first_line):
        return f"{header}\n{text}", num_skipped - 1, delimiter
    return text, num_skipped, delimiter


def _is_comment(cells: Sequence[str], header: Sequence[str]) -> bool:
    return cells[0].startswith(COMMENT) and len(cells) != len(header)


def _find_ambiguous_columns(path: Path, names: Sequence[str], step_column: str | None) -> dict[str, str]:
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
    problem = f"{_path_text(path)}: duplicate column '{{}}'; rename one of them"
    return {name: problem.format(printable(name[:80])) for name in duplicates}


# --- JSON ---


def read_json_rows(path: Path) -> tuple[list[tuple[int, Cells]], list[str]]:
    """Return the flat rows of JSON lines or of a list with their line numbers, and notes on a torn end.

    Nested names are joined by '/'; NaN and Infinity may be bare or quoted.
    """
    content, torn = _read_content(path)
    if content.lstrip().startswith(b"["):
        numbered, notes = list(enumerate(_parse_list(path, content), 1)), []
    else:
        numbered, notes = _parse_objects(path, content.split(b"\n"))
    rows: list[tuple[int, Cells]] = [
        (number, dict(flat_cells(_unwrap_envelope(row)))) for number, row in numbered if not _is_summary(row)
    ]
    return rows, notes or [TORN_NOTE] * torn


def _parse_objects(path: Path, lines: Sequence[bytes]) -> tuple[list[tuple[int, dict[str, Any]]], list[str]]:
    last_index = max((index for index, line in enumerate(lines) if line.strip()), default=-1)
    rows, parser = [], LineParser()
    notes = [] if last_index >= 0 else [NOTHING_RECORDED]
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        if not parser.is_intact(line):
            raise damaged_line_error(_path_text(path), f"line {index + 1}", line)
        row = _parse_object(line)
        if row is not None:
            rows.append((index + 1, row))
        elif index == last_index and line.lstrip().startswith(b"{"):
            notes.append(TORN_NOTE)
        else:
            excerpt = printable(line[:40].decode(errors="replace"))
            raise StoreError(
                f"{_path_text(path)}, line {index + 1}: got '{excerpt}'; expected a JSON object: "
                "remove the line or write the file again"
            )
    return rows, notes


def _parse_list(path: Path, content: bytes) -> list[dict[str, Any]]:
    rows = parse_json(content)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        excerpt = printable(content[:40].decode(errors="replace"))
        raise StoreError(
            f"{_path_text(path)}, line 1: got '{excerpt}'; expected a JSON object in every line, or one list "
            "of objects: write the file again"
        )
    return rows


def _is_summary(row: Mapping[str, Any]) -> bool:
    """Return True for ms-swift's last row, which repeats the history and lists checkpoints."""
    return isinstance(row.get("log_history"), list)


def widen_rows(rows: Sequence[tuple[int, Cells]], step_column: str | None) -> Iterator[tuple[int, Cells]]:
    """Convert long rows, `{"step": 1, "name": "loss", "value": 0.5}`, to rows with a column per metric.

    The keys may be nested, like fms-hf-tuning's `data/step` and `data/value`. Other rows stay unchanged.
    """
    metric, value = find_long_columns(rows)

    def is_step(name: str) -> bool:
        return name == step_column or name.lower() in STEP_COLUMNS

    for number, row in rows:
        if not isinstance(row.get(metric), str) or value not in row:
            yield number, row
            continue
        cells = {name if is_step(name) else name.rpartition("/")[2]: cell for name, cell in row.items()}
        steps = {name: cell for name, cell in cells.items() if is_step(name)}
        yield number, steps | {str(row[metric]).strip(): row[value]}


def find_long_columns(rows: Sequence[tuple[int, Cells]]) -> tuple[str, str]:
    """Return the columns that hold a metric's name and its value; empty strings if no row has both."""
    keys = (
        (_find_by_last_part(row, METRIC_COLUMNS), _find_by_last_part(row, VALUE_COLUMNS)) for _, row in rows
    )
    return next(((metric, value) for metric, value in keys if metric and value), ("", ""))


def _find_by_last_part(names: Iterable[str], words: Sequence[str]) -> str | None:
    """Return the column whose last path part is the first of `words` that occurs."""
    names_by_last_part = {name.rpartition("/")[2].lower(): name for name in names}
    return next((names_by_last_part[word] for word in words if word in names_by_last_part), None)


def _parse_object(text: bytes) -> dict[str, Any] | None:
    row = parse_json(text)
    return row if isinstance(row, dict) else None


def _unwrap_envelope(row: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics in a row of verl's file logger, `{"step": 1, "data": {metrics}}`."""
    data = row.get("data")
    return {"step": row["step"], **data} if row.keys() == {"step", "data"} and isinstance(data, dict) else row


def read_trainer_state(path: Path, step_column: str | None = None) -> Log:
    """Read the trainer_state.json of transformers (and TRL), with the metric names of its other loggers."""
    state = _parse_object(_read_content(path)[0])
    history = state.get("log_history") if state else None
    if not isinstance(history, list) or not all(isinstance(row, dict) for row in history):
        raise StoreError(
            f"{_path_text(path)}: expected a trainer_state.json of transformers with a log_history"
        )
    rows = [dict(_rename_as_logged(dict(flat_cells(row)))) for row in history]
    return _make_log(path, build_series(rows, _path_text(path), step_column))


def _rename_as_logged(row: Cells) -> Iterator[tuple[str, float | str]]:
    """Rename metrics like transformers' `rewrite_logs`: eval_x to eval/x, test_x to test/x, x to train/x."""
    for name, value in row.items():
        if name == "step":
            yield name, value
        elif name.startswith(("eval_", "test_")):
            yield name.replace("_", "/", 1), value
        else:
            yield f"train/{name}", value


# --- Parquet ---


def read_parquet_rows(path: Path) -> tuple[list[dict[str, float | str]], list[str], list[str]]:
    """Return the rows and columns of a Parquet file, and notes on a torn or empty one.

    A null is not recorded (pandas writes NaN as null).
    """
    with wrap_read_errors(path), open_regular(path) as file:
        magic = file.read(len(PARQUET_MAGIC))
        size = file.seek(0, 2)
        file.seek(max(0, size - len(PARQUET_MAGIC)))
        end = file.read()
    if not size:
        return [], [], [NOTHING_RECORDED]
    if magic == PARQUET_MAGIC and (end != PARQUET_MAGIC or size < 12):
        return [], [], [NO_FOOTER_NOTE]
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
                    f"{_path_text(path)}: claims {num_values} values; allowed: at most {MAX_VALUES}"
                )
            table = file.read(columns=numeric + texts).combine_chunks()
            columns = [
                [text and shorten_cell(text) for text in column.to_pylist()]
                if column.type in text_types
                else column.cast(pa.float64(), safe=False).to_pylist()
                for column in table.columns
            ]
    except StoreError:
        raise
    except Exception as error:  # from Arrow or the system: invalid text, out of memory
        raise StoreError(f"{_path_text(path)}: not valid Parquet: {_error_text(error)}") from None
    rows: list[dict[str, float | str]] = [{} for _ in range(table.num_rows)]
    for name, values in zip(table.column_names, columns, strict=True):
        for row, value in zip(rows, values, strict=True):
            if value is not None:
                row[name] = value
    return rows, schema.names, []


def log_from_parquet_rows(
    path: Path, rows: Sequence[Cells], columns: Sequence[str], notes: Sequence[str], step_column: str | None
) -> Log:
    """Return the run in the rows of a Parquet file with one column per metric."""
    metrics = TableMetrics() if notes else build_series(rows, _path_text(path), step_column, columns)
    return _make_log(path, metrics, notes)


# --- files ---


def _read_content(path: Path) -> tuple[bytes, bool]:
    """Return a file's bytes, decompressed and as UTF-8 without byte order mark, and True if its end is torn.

    Raises StoreError.
    """
    with wrap_read_errors(path):
        content = read_regular(path)
    torn = False
    if content.startswith(GZIP):
        content, torn = _decompress(path, content)
    encoding = UTF_16.get(content[:2])
    if encoding:
        text, read = codecs.getincrementaldecoder(encoding)("replace").decode(content[2:]), len(content)
        return text.encode(errors="replace"), torn or read % 2 == 1
    return content.removeprefix(codecs.BOM_UTF8), torn


def _decompress(path: Path, content: bytes) -> tuple[bytes, bool]:
    """Return the concatenated content of all gzip members, and True if the last one is torn."""
    chunks: list[bytes] = []
    size = 0
    while content.startswith(GZIP):
        member = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        try:
            chunks.append(member.decompress(content, MAX_UNPACKED_BYTES - size + 1))
        except zlib.error as error:
            raise StoreError(
                f"{_path_text(path)}: damaged gzip file ({error}); write the file again"
            ) from None
        size += len(chunks[-1])
        if size > MAX_UNPACKED_BYTES:
            raise StoreError(
                f"{_path_text(path)}: unpacks to more than {MAX_UNPACKED_BYTES} bytes; log less often"
            )
        if not member.eof:
            return b"".join(chunks), True
        content = member.unused_data
    return b"".join(chunks), False


def _decode(path: Path, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":  # torn inside a character
            return content[: error.start].decode()
        raise StoreError(
            f"{_path_text(path)}: byte {error.start} is not UTF-8; expected a CSV file: save it as UTF-8"
        ) from None


def _make_log(path: Path, metrics: TableMetrics, notes: Sequence[str] = ()) -> Log:
    return metrics.as_log(name=path.name, place=_path_text(path), notes=notes)


def _path_text(path: Path) -> str:
    return printable(str(path))


def _error_text(error: Exception) -> str:
    return printable(" ".join(str(error).split())[:200])
