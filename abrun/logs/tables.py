"""Runs in tables: CSV, JSON lines, Parquet, and the trainer_state.json of transformers."""

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from abrun.errors import StoreError
from abrun.logs.log import EMPTY, Log, needs_package, printable, readable
from abrun.logs.rows import UNNAMED, as_number, flat_numbers, series_of
from abrun.regular_files import open_regular, read_regular

TORN = "its last line is torn, or still being written, and was left out"
NO_FOOTER = "it has no footer (it is torn, or still being written): nothing of it can be read"
# What is one with a unit, or a decimal comma: a column of it was meant to be read. Not a date, a name.
ALMOST_A_NUMBER = re.compile(r"[-+]?[\d.,' ]*\d(e[-+]?\d+)?\s*[^\W\d_]{0,3}%?", re.IGNORECASE)
DECIMAL_COMMA = r"[-+]?\d*,\d+(e[-+]?\d+)?"
PARQUET_MAGIC = b"PAR1"
LARGEST_CELL = 2**24  # characters
MOST_VALUES = 2**24  # of a Parquet file

Row = dict[str, float]
Line = tuple[int, list[str]]  # the number that it ends at, and its cells


# --- CSV ---


def read_csv(path: Path, step_column: str | None = None) -> Log:
    """A CSV file: a header, then a line a step. An empty cell is not recorded; `nan` and `inf` are."""
    lines, torn = csv_lines(path)
    if not lines:
        return _log(path, {}, [TORN if torn else EMPTY])
    log = csv_log(path, lines, step_column)
    return replace(log, notes=(*log.notes, TORN)) if torn else log


def csv_log(path: Path, lines: list[Line], step_column: str | None = None) -> Log:
    """The run of a CSV file's whole lines, the header first."""
    # The index of a data frame has no name in its CSV; read again, pandas calls it so.
    header = [name.strip() or f"{UNNAMED}{place}" for place, name in enumerate(lines[0][1])]
    _refuse_columns_twice(path, header)
    rows, texts = _numbers(path, header, lines[1:])
    unread = {name: _unread(path, name, *of[0]) for name, of in texts.items()}
    metrics, notes = series_of(rows, _shown(path), step_column, header, unread)
    for name, of in texts.items():
        (number, first), s = of[0], "s" * (len(of) > 1)
        if name in metrics or ALMOST_A_NUMBER.fullmatch(first.strip()):
            said = f"{printable(name)}: {len(of)} value{s} left out as no number{s}"
            notes.append(f"{said}, the first '{printable(first[:40])}' in line {number}")
    return _log(path, metrics, notes, unread)


def csv_lines(path: Path) -> tuple[list[Line], bool]:
    """The whole lines with the numbers they end at, and whether a torn one was left out behind them."""
    content = _content(path)
    csv.field_size_limit(LARGEST_CELL)
    text = _text(path, content)
    head = text.partition("\n")[0]
    between = next((mark for mark in (",", ";", "\t") if mark in head), ",")
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=between)
    lines: list[Line] = []
    ended = 0
    try:
        for cells in reader:
            ended = reader.line_num
            if cells:
                lines.append((ended, cells))
    except csv.Error as error:
        # A quote that is open at the end is a torn line, or one far above that takes all below for its text.
        if "unexpected end of data" in str(error) and reader.line_num == ended + 1:
            return lines, True
        raise StoreError(f"{_shown(path)}, line {ended + 1}: not readable as CSV: {error}") from None
    torn = bool(lines) and not content.endswith((b"\n", b"\r"))
    return lines[:-1] if torn else lines, torn


def _refuse_columns_twice(path: Path, names: Sequence[str]) -> None:
    twice = sorted(name for name, count in Counter(names).items() if name and count > 1)
    if twice:
        raise StoreError(
            f"{_shown(path)}: the column '{printable(twice[0][:80])}' is there twice; rename one of them"
        )


def _numbers(
    path: Path, header: list[str], lines: list[Line]
) -> tuple[list[Row], dict[str, list[tuple[int, str]]]]:
    """Rows of numbers, and of each column the filled cells that are none, with their lines."""
    rows: list[Row] = []
    texts: dict[str, list[tuple[int, str]]] = {}
    for number, cells in lines:
        if len(cells) != len(header):
            raise StoreError(
                f"{_shown(path)}, line {number}: got {len(cells)} cells; the header names {len(header)}: "
                "mend the line or write the file again"
            )
        row: Row = {}
        for name, cell in zip(header, cells, strict=True):
            if not cell or not name:
                continue
            try:
                row[name] = as_number(cell)
            except ValueError:
                if cell.strip() and cell.strip() != name:  # a resumed writer may write the header again
                    texts.setdefault(name, []).append((number, cell))
        rows.append(row)
    return rows, texts


# --- JSON ---


def read_jsonl(path: Path, step_column: str | None = None) -> Log:
    """A JSON-lines file: an object a line, nested names joined by '/', bare or quoted NaN and Infinity."""
    lines = _content(path).split(b"\n")
    last = max((index for index, line in enumerate(lines) if line.strip()), default=-1)
    rows: list[Row] = []
    unread: dict[str, str] = {}
    notes = [] if last >= 0 else [EMPTY]
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        row = _object(line)
        if row is not None:
            row = _without_envelope(row)
            rows.append(dict(flat_numbers(row)))
            for name, value in row.items():
                if isinstance(value, str) and name not in rows[-1]:
                    unread.setdefault(name, _unread(path, name, index + 1, value))
        elif index == last and line.lstrip().startswith(b"{"):
            notes.append(TORN)
        else:
            shown = printable(line[:40].decode(errors="replace"))
            raise StoreError(
                f"{_shown(path)}, line {index + 1}: got '{shown}'; a JSON object is expected: "
                "remove the line or write the file again"
            )
    metrics, more = series_of(rows, _shown(path), step_column, unread=unread)
    return _log(path, metrics, notes + more, unread)


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        row = orjson.loads(line)
    except ValueError:
        try:
            row = json.loads(line.decode())  # which knows NaN and Infinity
        except (ValueError, RecursionError):
            return None
    return row if isinstance(row, dict) else None


def _without_envelope(row: dict[str, Any]) -> dict[str, Any]:
    """verl's file logger writes `{"step": 1, "data": {metrics}}`."""
    data = row.get("data")
    return {"step": row["step"], **data} if row.keys() == {"step", "data"} and isinstance(data, dict) else row


def read_trainer_state(path: Path, step_column: str | None = None) -> Log:
    """transformers' (so TRL's) trainer_state.json, its metrics named as its other loggers name them."""
    state = _object(_content(path))
    history = state.get("log_history") if state else None
    if not isinstance(history, list) or not all(isinstance(row, dict) for row in history):
        raise StoreError(
            f"{_shown(path)}: no log_history of rows; a trainer_state.json of transformers is expected"
        )
    rows = [dict(_as_logged(dict(flat_numbers(row)))) for row in history]
    return _log(path, *series_of(rows, _shown(path), step_column))


def _as_logged(row: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """`rewrite_logs` of transformers: eval_x is eval/x, test_x is test/x, anything else train/x."""
    for name, value in row.items():
        if name == "step":
            yield name, value
        elif name.startswith(("eval_", "test_")):
            yield name.replace("_", "/", 1), value
        else:
            yield f"train/{name}", value


# --- Parquet ---


def read_parquet(path: Path, step_column: str | None = None) -> Log:
    """A Parquet file: a column a metric. A null is not recorded (pandas writes NaN as null)."""
    with readable(path), open_regular(path) as file:
        magic = file.read(len(PARQUET_MAGIC))
        size = file.seek(0, 2)
        file.seek(max(0, size - len(PARQUET_MAGIC)))
        end = file.read()
    if not size:
        return _log(path, {}, [EMPTY])
    if magic == PARQUET_MAGIC and (end != PARQUET_MAGIC or size < 12):
        return _log(path, {}, [NO_FOOTER])
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise needs_package(path, "pyarrow", "'abrun[parquet]'") from None
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            schema = file.schema_arrow
            numeric = [
                column.name
                for column in schema
                if pa.types.is_integer(column.type)
                or pa.types.is_floating(column.type)
                or pa.types.is_decimal(column.type)
            ]
            _refuse_columns_twice(path, schema.names)
            num_values = file.metadata.num_rows * len(numeric)
            if num_values > MOST_VALUES:  # which a few bytes can claim, by repeating one
                raise StoreError(f"{_shown(path)}: claims {num_values} numbers; allowed: {MOST_VALUES}")
            table = file.read(columns=numeric).combine_chunks()
            columns = [column.cast(pa.float64(), safe=False).to_pylist() for column in table.columns]
    except StoreError:
        raise
    except Exception as error:  # Arrow's, the system's, of text that is none, or for want of memory
        raise StoreError(f"{_shown(path)}: not readable as Parquet: {_one_line(error)}") from None
    rows: list[Row] = [{} for _ in range(table.num_rows)]
    for name, values in zip(table.column_names, columns, strict=True):
        for row, value in zip(rows, values, strict=True):
            if value is not None:
                row[name] = value
    return _log(path, *series_of(rows, _shown(path), step_column, schema.names))


# --- files ---


def _content(path: Path) -> bytes:
    with readable(path):
        return read_regular(path)


def _text(path: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":  # torn inside a character
            return content[: error.start].decode("utf-8-sig")
        raise StoreError(
            f"{_shown(path)}: byte {error.start} is not UTF-8 text; a CSV file is expected"
        ) from None


def _log(
    path: Path, metrics: Mapping[str, Any], notes: list[str], unread: Mapping[str, str] | None = None
) -> Log:
    return Log(name=path.name, place=_shown(path), metrics=metrics, notes=tuple(notes), unread=unread or {})


def _unread(path: Path, column: str, line: int, text: str) -> str:
    """Where a text stands in the place of a number, and what to write there."""
    comma = " (a decimal comma?)" if re.fullmatch(DECIMAL_COMMA, text.strip()) else ""
    return (
        f"{_shown(path)}, line {line}, column {printable(column)}: got '{printable(text[:40])}'{comma}; "
        "write a number with a decimal point, nan where there is none"
    )


def _shown(path: Path) -> str:
    return printable(str(path))


def _one_line(error: Exception) -> str:
    return printable(" ".join(str(error).split())[:200])
