"""Readers for tables of JSON lines and Parquet, and for the trainer_state.json of transformers."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from abrun.errors import StoreError
from abrun.logs.foreign.columns import (
    NO_CELLS,
    PLAIN_TYPES,
    Cell,
    Column,
    ColumnBuilder,
    Table,
    TableBuilder,
    table_of,
)
from abrun.logs.foreign.files import TextFile, open_file
from abrun.logs.foreign.values import parse_json, shorten_cell
from abrun.logs.golden_values import SERIES, series_table
from abrun.logs.log import NOTHING_RECORDED, Log, missing_package_error
from abrun.logs.naming import SEED_LIMIT, strip_suffix
from abrun.logs.rows import STEP_COLUMNS, check_number_of_metrics, flat_cells, series_of_table
from abrun.logs.words import COLUMNS, find_columns
from abrun.runs.layout import RunName
from abrun.runs.lines import LineParser, damaged_line_error
from abrun.runs.redaction import list_names, printable

TORN_NOTE = "its last line is torn, or still being written, and was left out"
NO_FOOTER_NOTE = "it has no footer (it is torn, or still being written) and cannot be read"
PARQUET_MAGIC = b"PAR1"
PARQUET_END = 8  # bytes: the length of the footer, and PARQUET_MAGIC
MAX_FOOTER_BYTES = 2**26
MAX_PARQUET_BYTES = 2**28
MAX_VALUES = 2**24  # maximum number of values in a Parquet file
ARM_COLUMNS, RUN_COLUMNS, SEED_COLUMNS = COLUMNS["arm"], COLUMNS["run"], COLUMNS["seed"]
METRIC_COLUMNS, VALUE_COLUMNS, MODEL_COLUMNS = COLUMNS["metric"], COLUMNS["value"], COLUMNS["model"]
BENCHMARK_COLUMNS, PROMPT_COLUMNS = COLUMNS["benchmark"], COLUMNS["prompt"]
# A row's identity is its text: a run may be named 007, and a prompt's number have twenty digits.
KEY_COLUMNS = {*ARM_COLUMNS, *RUN_COLUMNS, *SEED_COLUMNS, *METRIC_COLUMNS, "run.hash"}
KEY_COLUMNS |= {*MODEL_COLUMNS, *BENCHMARK_COLUMNS, *PROMPT_COLUMNS}
SEED_NAME = r".*(^|[/_\-. ])(seed|s)[-_= ]?\d{1,10}"


def log_from_table(path: Path, table: Table, step_column: str | None) -> Log:
    """Return the run in a table with a column per metric."""
    return series_of_table(table, step_column).as_log(name=path.name, place=table.place)


def check_unique_columns(path: Path, names: Sequence[str]) -> None:
    for problem in duplicate_columns(path, names).values():
        raise StoreError(problem)


def duplicate_columns(path: Path, names: Sequence[str]) -> dict[str, str]:
    duplicates = sorted(name for name, count in Counter(names).items() if name and count > 1)
    problem = f"{path_text(path)}: duplicate column '{{}}'; rename one of them"
    return {name: problem.format(printable(name[:80])) for name in duplicates}


# --- columns that name the arm, the run, the seed or the metric of a row ---


def find_key_columns(
    table: Table, names: Sequence[str], arm_columns: Sequence[str] = ARM_COLUMNS
) -> dict[str, str]:
    """Return the columns that identify a row's run or metric, by kind: `arm`, `run`, `seed`, `metric`.

    A `name` column next to `value` names metrics, unless all its values name seeds.
    """
    kinds = {"arm": arm_columns, "run": RUN_COLUMNS, "seed": SEED_COLUMNS}
    key_columns = {
        kind: columns[0] for kind, words in kinds.items() if (columns := find_columns(names, words))
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
    if seed and re.sub(r"\D", "", values.get("run", "")) == seed:  # the run repeats the seed
        values = {kind: text for kind, text in values.items() if kind != "run"}
    number = int(float(seed)) if re.fullmatch(r"\d{1,10}(\.0*)?", seed) and float(seed) < SEED_LIMIT else None
    arm = values.get("arm")
    arm_and_run = [text for kind, text in values.items() if kind != "seed"]
    identity = RunName(arm=arm, seed=number) if arm and number is not None and "run" not in values else None
    seed_names = [f"seed-{number}"] if number is not None else []
    run_name = "/".join([*(arm_and_run or [strip_suffix(name) if seed_names else name]), *seed_names])
    guesses = (*([guess] if guess else []), *log.guesses)
    return replace(log, name=run_name, job_type=arm, identity=identity, guesses=guesses)


# --- JSON ---


def read_json_table(path: Path) -> tuple[Table, list[str]]:
    """Return the flat rows of JSON lines or of a list, and notes on a torn end.

    Nested names are joined by '/'; NaN and Infinity may be bare or quoted.
    """
    file, notes = TextFile(path), list[str]()
    lines = _filled_lines(file)
    first_lines = [*islice(lines, 2)]
    if not first_lines:
        notes.append(NOTHING_RECORDED)
    start = first_lines[0][1].strip() if first_lines else b""
    is_indented = start.startswith(b"{") and not start.endswith(b"}")
    may_be_series = is_indented or (len(first_lines) == 1 and SERIES.match(start) is not None)
    if may_be_series and (table := _parse_document(path, is_indented=is_indented)):
        return table, []
    if start.startswith(b"["):
        rows = enumerate(_parse_list(path, TextFile(path).content()), 1)
    else:
        rows = _parse_objects(path, chain(first_lines, lines), notes)
    builder = TableBuilder(path_text(path))
    for number, row in rows:
        if isinstance(row.get("log_history"), list):  # ms-swift's last row repeats the history
            continue
        if row.keys() == {"step", "data"} and isinstance(row["data"], dict):  # verl's file logger
            row = {"step": row["step"], **row["data"]}
        is_flat = PLAIN_TYPES.issuperset(map(type, row.values()))
        builder.add(number, row if is_flat else dict(flat_cells(row)))
    return builder.build(), notes or [TORN_NOTE] * file.torn


def read_objects(path: Path, notes: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects in a file of JSON lines with their line numbers; a torn end becomes a note."""
    return _parse_objects(path, _filled_lines(TextFile(path)), notes)


def _filled_lines(file: TextFile) -> Iterator[tuple[int, bytes]]:
    return ((number, line) for number, line in enumerate(file.lines(), 1) if line and not line.isspace())


def _parse_objects(
    path: Path, lines: Iterator[tuple[int, bytes]], notes: list[str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    parser = LineParser()
    for number, line in lines:
        if not parser.is_intact(line):
            raise damaged_line_error(path_text(path), f"line {number}", line)
        row = parse_json(line)
        if isinstance(row, dict):
            yield number, row
        elif line.lstrip().startswith(b"{") and next(lines, None) is None:
            notes.append(TORN_NOTE)  # the last line
        else:
            excerpt = printable(line[:40].decode(errors="replace"))
            raise StoreError(
                f"{path_text(path)}, line {number}: got '{excerpt}'; expected a JSON object: "
                "remove the line or write the file again"
            )


def _parse_document(path: Path, *, is_indented: bool) -> Table | None:
    """Return the series in one object; None if the file holds none. An indented object is no line of rows."""
    document = parse_json(TextFile(path).content(), path_text(path))
    if not isinstance(document, dict):
        return None
    if (table := series_table(document, path_text(path))) or not is_indented:
        return table
    raise StoreError(
        f"{path_text(path)}: one JSON object with {list_names([*document], 3)}; expected metrics by step, "
        "{metric: {step: value}}, a list of objects, or an object per line: write one of these"
    )


def _parse_list(path: Path, content: bytes) -> list[dict[str, Any]]:
    rows = parse_json(content, path_text(path))
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        excerpt = printable(content[:40].decode(errors="replace"))
        raise StoreError(
            f"{path_text(path)}, line 1: got '{excerpt}'; expected a JSON object in every line, or one list "
            "of objects: write the file again"
        )
    return rows


def widen_table(table: Table, step_column: str | None) -> Table:
    """Convert long rows, `{"step": 1, "name": "loss", "value": 0.5}`, to rows with a column per metric.

    The keys may be nested, like fms-hf-tuning's `data/step` and `data/value`. Other rows stay unchanged.
    """
    metric, value = find_long_columns(table)
    if not metric:
        return table
    metrics, values = (table.columns.get(name, NO_CELLS) for name in (metric, value))
    has_name, has_value = np.zeros((2, len(table)), bool)
    has_name[metrics.rows[metrics.is_text]] = has_value[values.rows] = True
    is_long = has_name & has_value | bool(
        table.header
    )  # a row of a CSV file has all cells, if only empty ones
    columns: dict[str, Column] = {}

    def add(name: str, column: Column) -> None:
        if len(column):
            columns[name] = columns[name].merge(column) if name in columns else column

    for name, column in table.columns.items():
        add(name, column.take(~is_long[column.rows]))
        long_name = name if _is_step(name, step_column) else name.rpartition("/")[2]
        if _is_step(long_name, step_column):
            add(long_name, column.take(is_long[column.rows]))
    names = {"": 0}
    groups = np.zeros(len(table), np.int64)
    groups[metrics.rows[metrics.is_text]] = [
        names.setdefault(text.strip(), len(names)) for text in metrics.texts
    ]
    check_number_of_metrics(len(names), table.place)
    columns_by_metric = values.take(is_long[values.rows]).split(groups)
    for name, number in names.items():
        if number in columns_by_metric:
            add(name, columns_by_metric[number])
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
    names_by_last_part = {name.rpartition("/")[2].lower(): name for name in names}
    return next((names_by_last_part[word] for word in words if word in names_by_last_part), None)


def read_trainer_state(path: Path, step_column: str | None = None) -> Log:
    """Read the trainer_state.json of transformers (and TRL), with the metric names of its other loggers."""
    state = parse_json(TextFile(path).content(), path_text(path))
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list) or not all(isinstance(row, dict) for row in history):
        raise StoreError(
            f"{path_text(path)}: expected a trainer_state.json of transformers with a log_history"
        )
    table = table_of((dict(flat_cells(row)) for row in history), path_text(path))
    return log_from_table(path, table.rename(name_as_logged), step_column)


def read_results(files: Sequence[Path], name: str) -> Log:
    """Read the `*_results.json` in which transformers' Trainer saves its last metrics, as final scores."""
    results: dict[str, float | str] = {}
    for path in sorted(files):  # all_results.json first, which holds the others
        content = parse_json(TextFile(path).content(), path_text(path))
        if not isinstance(content, dict):
            raise StoreError(f"{path_text(path)}: expected an object with metrics, as transformers writes it")
        results = {**dict(flat_cells(content)), **results}
    renamed = {name_as_logged(key.removeprefix("train_")): cell for key, cell in results.items()}
    log = log_from_table(files[0], table_of([{"step": 0.0, **renamed}], path_text(files[0])), "step")
    guess = "metrics that transformers' Trainer saved at its end, without a step"
    return replace(log, name=name, axis="final", guesses=(guess,))


def name_as_logged(name: str) -> str:
    """Rename a metric like transformers' `rewrite_logs`: eval_x to eval/x, test_x to test/x, x to train/x."""
    if name == "step":
        return name
    is_evaluated = name.startswith(("eval_", "test_", "predict_"))
    return name.replace("_", "/", 1) if is_evaluated else f"train/{name}"


# --- Parquet ---


def read_parquet_table(path: Path) -> tuple[Table, list[str]]:
    """Return the content of a Parquet file, and notes on a torn or empty one.

    A null is not recorded (pandas writes NaN as null).
    """
    empty = Table(place=path_text(path), columns={}, lines=[], line_word="row")
    with open_file(path) as file:
        magic = file.read(len(PARQUET_MAGIC))
        size = file.seek(0, 2)
        file.seek(max(0, size - PARQUET_END))
        end = file.read()
        if not size:
            return empty, [NOTHING_RECORDED]
        if magic == PARQUET_MAGIC and (not end.endswith(PARQUET_MAGIC) or size < 12):
            return empty, [NO_FOOTER_NOTE]
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            raise missing_package_error(path, "pyarrow", "'abrun[parquet]'") from None
        if magic == PARQUET_MAGIC and int.from_bytes(end[:4], "little") > MAX_FOOTER_BYTES:
            raise StoreError(
                f"{path_text(path)}: its footer has over {MAX_FOOTER_BYTES} bytes; keep numbers alone"
            )
        try:
            schema = pq.read_schema(file)
            is_number = pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean
            numeric = [column.name for column in schema if any(test(column.type) for test in is_number)]
            texts = [column.name for column in schema if column.type in (pa.string(), pa.large_string())]
            check_unique_columns(path, schema.names)
            # A text that repeats is kept once.
            content = pq.ParquetFile(file, page_checksum_verification=True, read_dictionary=texts)
            _check_parquet_size(path, content.metadata, {*numeric, *texts})
            table = content.read(columns=numeric + texts)
            columns = {
                name: _parquet_column(column, is_text=name in texts)
                for name, column in zip(table.column_names, table.columns, strict=True)
            }
        except StoreError:
            raise
        except Exception as error:  # from Arrow or the system: invalid text, out of memory
            raise StoreError(f"{path_text(path)}: not valid Parquet: {error_text(error)}") from None
    filled = {name: column for name, column in columns.items() if len(column)}
    lines = np.arange(1, table.num_rows + 1)
    return replace(empty, columns=filled, lines=lines, header=schema.names), []


def _check_parquet_size(path: Path, metadata: Any, names: set[str]) -> None:
    """Raise StoreError if the columns to read are too large; a tiny file can claim a huge table."""
    num_values = metadata.num_rows * len(names)
    if num_values > MAX_VALUES:
        raise StoreError(f"{path_text(path)}: claims {num_values} values; allowed: at most {MAX_VALUES}")
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    chunks = (group.column(index) for group in groups for index in range(group.num_columns))
    if (
        sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema in names)
        > MAX_PARQUET_BYTES
    ):
        raise StoreError(
            f"{path_text(path)}: unpacks to more than {MAX_PARQUET_BYTES} bytes; keep numbers alone"
        )


def _parquet_column(column: Any, *, is_text: bool) -> Column:  # a ChunkedArray of text or numbers
    import pyarrow as pa

    rows = np.flatnonzero(column.is_valid().to_numpy()).astype(np.int32)
    column = column.drop_null()
    if not is_text:
        return Column(rows, column.cast(pa.float64(), safe=False).to_numpy().astype(np.float64))
    builder, num_rows = ColumnBuilder(), 0
    for chunk in column.chunks:
        distinct = [shorten_cell(text) for text in chunk.dictionary.to_pylist()]
        indices = chunk.indices.to_numpy()
        for row, index in zip(rows[num_rows:].tolist(), indices.tolist(), strict=False):
            if distinct[index].strip():
                builder.add_text(row, distinct[index])
        num_rows += len(indices)
    return builder.build()


def path_text(path: Path) -> str:
    return printable(str(path))


def error_text(error: Exception) -> str:
    return printable(" ".join(str(error).split())[:200])
