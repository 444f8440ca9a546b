"""Conversion of tables to series: choice of the step column and parsing of numbers."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from abrun.errors import StoreError
from abrun.logs.foreign.columns import Cell, Column, Rows, Table
from abrun.logs.foreign.values import (
    DECIMAL_COMMA,
    MAX_NAME_CHARACTERS,
    STEP_LIMIT,
    NumberFormat,
    shorten_cell,
    to_float,
)
from abrun.logs.log import Log, collect_series
from abrun.logs.step_parts import Processes, separate_rows
from abrun.logs.words import COLUMNS, find_columns
from abrun.runs.lines import CHECKSUM
from abrun.runs.redaction import list_names, printable
from abrun.stats.series import Array, Series, build_series

STEP_COLUMNS = tuple(COLUMNS["step"])
NON_METRIC_COLUMNS = {CHECKSUM, *COLUMNS["no_metric"]}
CONFIG = "config/"  # prefix of configuration keys, which Ray repeats in every row
UNNAMED = "Unnamed: "  # prefix of a column without a name, which counts rows and is not a metric
WORDS = {"NaN", "Infinity", "-Infinity", "nan", "inf", "-inf"}  # numbers that JSON can only hold as text
MAX_METRICS = 100_000
MAX_ROW_CHARACTERS = 1 << 25  # of the names in one row
# Text that was meant to be a number (with a unit, a total or a decimal comma), but not a date or a name.
NUMBER_LIKE = re.compile(r"[-+]?[\d.,' ]*\d(e[-+]?\d+)?(/\d+)?\s*[^\W\d_]{0,3}%?", re.IGNORECASE)
# Columns that may count steps under another name, such as `time/iterations` or `learner_steps`
COUNTER = re.compile(r"(.*[_/. ])?((time)?steps?|iterations?|updates?|episodes?|epochs?)", re.IGNORECASE)
SCORES_HINT = ", or give final scores one row per run, with columns 'arm' and 'seed'"
FIX_STEP = "write a whole number, or name another column with --step-column"

Numbers = tuple[Rows, Array]  # rows of a column, ascending, and their numbers
_NO_NUMBERS: Numbers = np.empty(0, np.int32), np.empty(0)


class NoStepError(StoreError):
    """Rows without a step column: next to logs, they are not a log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableMetrics:
    """Metrics of a table, and the values that were left out."""

    metrics: dict[str, Series] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)  # column -> its first non-number, and its position
    dropped: dict[str, tuple[int, ...]] = field(default_factory=dict)  # metric -> steps whose value is text
    config: dict[str, Any] = field(default_factory=dict)
    guesses: list[str] = field(default_factory=list)

    def as_log(self, *, notes: Sequence[str] = (), **fields: Any) -> Log:
        """Return the log of a run; `fields`: its name, place and any other fields of Log."""
        log_fields = {"config": self.config or None, "unread": self.unread, "dropped": self.dropped}
        log_fields |= {"guesses": tuple(self.guesses), **fields}
        return Log(metrics=self.metrics, notes=(*self.notes, *notes), **log_fields)

    def merge(self, table: "TableMetrics") -> "TableMetrics":
        """Merge with another table of the same run; this table wins if both hold a metric."""
        return TableMetrics(
            metrics=table.metrics | self.metrics,
            notes=self.notes + table.notes,
            unread=table.unread | self.unread,
            dropped=table.dropped | self.dropped,
            config=table.config | self.config,
            guesses=self.guesses + table.guesses,
        )


def flat_cells(row: Mapping[str, Any]) -> Iterator[tuple[str, float | str]]:
    """Yield names and values of a JSON row; nested names are joined by '/'. null is skipped.

    true, false and lists become texts, so that an error about such a metric names its line. A mapping with a
    `_type` is wandb media (a histogram, a table), not a metric, and a name beyond MAX_NAME_CHARACTERS none.
    """
    levels = [("", iter(row.items()))]  # no recursion: rows may be nested deeply
    num_characters = 0
    while levels:
        prefix, items = levels[-1]
        for key, value in items:
            if len(prefix) + len(key) > MAX_NAME_CHARACTERS:
                continue
            num_characters += len(prefix) + len(key)
            if num_characters > MAX_ROW_CHARACTERS:
                raise StoreError(
                    f"names of a row have more than {MAX_ROW_CHARACTERS} characters; log fewer metrics"
                )
            if isinstance(value, Mapping):
                if "_type" not in value:
                    levels.append((f"{prefix}{key}/", iter(value.items())))
                    break
            elif isinstance(value, bool | list):
                yield prefix + key, "[...]" if isinstance(value, list) else str(value).lower()
            elif isinstance(value, int | float):
                yield prefix + key, to_float(value)
            elif isinstance(value, str):
                yield prefix + key, float(value) if value in WORDS else shorten_cell(value)
        else:
            levels.pop()


def series_of_table(table: Table, step_column: str | None) -> TableMetrics:
    """Return the series in a table, whose rows are in the order they were written, and what was left out.

    Raises StoreError if no column holds the step, or if a step is not a whole number.
    """
    place, header = table.place, table.header
    numbers, texts = _parse_numbers(table, step_column)
    is_filled = np.zeros(len(table), bool)  # rows with a metric
    for name in numbers.keys() - NON_METRIC_COLUMNS:
        is_filled[numbers[name][0]] = True
    names = header or [name for name, (rows, _) in numbers.items() if is_filled[rows].any()]
    unread = _describe_texts(table, texts)
    if not names:
        return TableMetrics(unread=unread)
    check_number_of_metrics(len(names), place)
    usual = step_column if step_column is not None else _find_step_column(numbers, is_filled, names, texts)
    column = usual if usual is not None else _find_counter(numbers, is_filled)
    guesses = [] if column == usual else [f"no step has its usual name: read from {printable(column or '')}"]
    step_rows, step_values = numbers.get(column or "", _NO_NUMBERS)
    steps = np.full(len(table), np.nan)
    steps[step_rows] = step_values
    num_filled, num_without_step = int(is_filled.sum()), int((is_filled & np.isnan(steps)).sum())
    is_empty = num_filled > 0 and num_without_step == num_filled
    if column is None or column not in {*names, *texts} or is_empty:
        if column and column in unread:
            raise NoStepError(f"{unread[column]}; or name the step column with --step-column")
        problem = f"no step in column '{printable(column[:80])}'" if column else "no column has the step"
        raise NoStepError(
            f"{place}: {problem}; columns: {list_names([*names], 12)}; name the step column with "
            f"--step-column{'' if column else SCORES_HINT}"
        )
    _refuse_unreadable_steps(table, column, texts, is_filled)
    is_whole = (np.abs(step_values) < STEP_LIMIT) & (np.floor(step_values) == step_values)
    for index in np.flatnonzero(~is_whole & ~np.isnan(step_values))[:1]:
        row_place = f"{place}, {table.describe_row(int(step_rows[index]))}"
        check_step(float(step_values[index]), row_place, column)
    step_names = [name for name in table.columns if name == column or _is_step(name, step_column)]
    separated, processes, split_notes = separate_rows(table, step_names, steps)
    if separated is not table:
        table = separated
        numbers, texts = _parse_numbers(table, step_column)
        unread = _describe_texts(table, texts)
    metric_numbers = {
        name: column_numbers
        for name, column_numbers in numbers.items()
        if not (name == column or name in NON_METRIC_COLUMNS or name.startswith(UNNAMED))
        and not (name.startswith(CONFIG) and _constant_cell(table.columns[name]) is not None)
    }
    metrics, replaced_notes = collect_series(_build_metrics(metric_numbers, steps, is_filled, processes))
    notes = [*split_notes, *_text_notes(table, texts, metrics), *replaced_notes]
    if num_without_step:
        notes.append(f"{num_without_step} of {num_filled} rows without {column} were left out")
    return TableMetrics(
        metrics=metrics,
        notes=notes,
        unread=unread,
        dropped=_dropped_steps(numbers, texts, steps),
        config=constant_config(table),
        guesses=[*guesses, *([processes.guess] if processes else [])],
    )


def _build_metrics(
    numbers: Mapping[str, Numbers], steps: Array, is_filled: NDArray[np.bool_], processes: Processes | None
) -> dict[str, tuple[Series, int]]:
    """Return each metric's series, and how many points a later one replaced; `steps` [R]: of the rows."""
    is_used = is_filled & ~np.isnan(steps)
    all_steps = steps.astype(np.int64) if is_used.all() else None
    built: dict[str, tuple[Series, int]] = {}
    for name, (rows, values) in numbers.items():
        if processes is not None:
            used = is_used[rows]
            built[name] = processes.average(rows[used], steps[rows[used]].astype(np.int64), values[used])
        elif all_steps is not None and len(rows) == len(steps):
            built[name] = build_series(all_steps, values)  # dense metrics share their steps
        elif (used := is_used[rows]).any():
            built[name] = build_series(steps[rows[used]].astype(np.int64), values[used])
    return built


def _describe_texts(table: Table, texts: Mapping[str, tuple[Rows, list[str]]]) -> dict[str, str]:
    return {
        name: describe_text_cell(table.place, table.describe_row(rows[0]), name, cell_texts[0])
        for name, (rows, cell_texts) in texts.items()
    }


# --- cells ---


def _is_step(name: str, step_column: str | None) -> bool:
    return name == step_column or name.lower() in STEP_COLUMNS or name in NON_METRIC_COLUMNS


def _parse_numbers(
    table: Table, step_column: str | None
) -> tuple[dict[str, Numbers], dict[str, tuple[Rows, list[str]]]]:
    """Return the numbers of each column, and by column the texts that are none, with their rows."""
    number_format = NumberFormat(text for column in table.columns.values() for text in column.texts)
    numbers: dict[str, Numbers] = {}
    texts: dict[str, tuple[Rows, list[str]]] = {}
    for name, column in table.columns.items():
        if column.all_texts is None:
            numbers[name] = column.rows, column.values
            continue
        cell_texts, is_unread, values = column.texts, column.is_text, column.values.copy()
        parse: Callable[[str], float] = number_format.parse_number
        if name == step_column or name.lower() in STEP_COLUMNS:
            has_plain = column.has_plain or any(text.strip().isdigit() for text in cell_texts)
            parse = partial(number_format.parse_step, has_plain_steps=has_plain)
        parsed = {text: _parse_or_none(parse, text) for text in {*cell_texts}}
        values[is_unread] = [parsed[text] for text in cell_texts]  # None becomes NaN
        is_unread[is_unread] = [parsed[text] is None for text in cell_texts]
        if unread_texts := [text for text in cell_texts if parsed[text] is None]:
            texts[name] = column.rows[is_unread], unread_texts
        if not is_unread.all():
            numbers[name] = column.rows[~is_unread], values[~is_unread]
    return dict(sorted(numbers.items(), key=lambda item: item[1][0][0])), texts


def _parse_or_none(parse: Callable[[str], float], text: str) -> float | None:
    try:
        return parse(text)
    except ValueError:
        return None


def _refuse_unreadable_steps(
    table: Table, column: str, texts: Mapping[str, tuple[Rows, list[str]]], is_filled: NDArray[np.bool_]
) -> None:
    """Raise StoreError for a row whose step is text: it would vanish. Rows without values are ignored."""
    if column not in texts:
        return
    has_value = is_filled.copy()
    for name, other_column in table.columns.items():
        if name != column and other_column.all_texts is not None:
            has_digits = [re.search(r"\d", text) is not None for text in other_column.texts]
            has_value[other_column.rows[other_column.is_text][has_digits]] = True
    for index, text in zip(*texts[column], strict=True):
        if has_value[index]:
            raise StoreError(
                f"{table.place}, {table.describe_row(index)}, column {printable(column[:80])}: "
                f"got '{printable(text[:40])}' as the step; {FIX_STEP}"
            )


def _text_notes(
    table: Table, texts: Mapping[str, tuple[Rows, list[str]]], metrics: Mapping[str, Series]
) -> Iterator[str]:
    for name, (rows, cell_texts) in texts.items():
        first_text, plural = cell_texts[0], "s" * (len(cell_texts) > 1)
        if name in NON_METRIC_COLUMNS or not (name in metrics or NUMBER_LIKE.fullmatch(first_text.strip())):
            continue
        note = f"{printable(name[:80])}: {len(cell_texts)} value{plural} left out (not a number)"
        yield f"{note}, the first '{printable(first_text[:40])}' in {table.describe_row(rows[0])}"


def _dropped_steps(
    numbers: Mapping[str, Numbers],
    texts: Mapping[str, tuple[Rows, list[str]]],
    steps: Array,  # [R]
) -> dict[str, tuple[int, ...]]:
    """Return, by metric, the steps whose last value is text."""
    dropped: dict[str, tuple[int, ...]] = {}
    for name, (text_rows, _) in texts.items():
        last_text_row = {int(steps[row]): row for row in text_rows if not np.isnan(steps[row])}
        rows = numbers.get(name, _NO_NUMBERS)[0]
        for row in rows[rows > text_rows[0]]:
            if not np.isnan(steps[row]) and last_text_row.get(int(steps[row]), row) < row:
                del last_text_row[int(steps[row])]
        if last_text_row:
            dropped[name] = tuple(sorted(last_text_row))
    return dropped


def constant_config(table: Table) -> dict[str, Any]:
    """Return the values that every row repeats under `config/`, by dotted key."""
    cells = {
        name: _constant_cell(column) for name, column in table.columns.items() if name.startswith(CONFIG)
    }
    return {
        name.removeprefix(CONFIG).replace("/", "."): _parse_config_value(cell)
        for name, cell in cells.items()
        if cell is not None
    }


def _constant_cell(column: Column) -> Cell | None:
    distinct = {*column.values[~column.is_text].tolist(), *column.texts}
    return distinct.pop() if len(distinct) == 1 else None


def _parse_config_value(cell: Cell) -> Any:
    try:
        number = float(cell)
    except ValueError:
        return cell
    return int(number) if number % 1 == 0 and abs(number) < STEP_LIMIT else number


def describe_text_cell(place: str, row_place: str, column: str, text: str) -> str:
    """Return a sentence on a text in the place of a number: its position and the fix."""
    comma = " (a decimal comma?)" if DECIMAL_COMMA.fullmatch(text.strip()) else ""
    return (
        f"{place}, {row_place}, column {printable(column[:80])}: got '{printable(text[:40])}'{comma}; "
        "write a number with a decimal point, or nan for a missing value"
    )


# --- steps ---


def _find_step_column(
    numbers: Mapping[str, Numbers],
    is_filled: NDArray[np.bool_],
    names: Sequence[str],
    texts: Mapping[str, object],
) -> str | None:
    """Return the first of STEP_COLUMNS that most rows have, as a number or else as text.

    A counter that restarts with each epoch is skipped if another one does not.
    """
    columns = find_columns([*names, *texts], STEP_COLUMNS)
    values: dict[str, Array] = {}
    for name in columns:
        rows, column_values = numbers.get(name, _NO_NUMBERS)
        values[name] = column_values[is_filled[rows]]
    max_rows = max(map(len, values.values()), default=0)
    fullest = [name for name in columns if len(values[name]) == max_rows]
    num_steps = {name: len(np.unique(values[name])) for name in fullest}
    max_steps = max((num for name, num in num_steps.items() if name != "_step"), default=0)

    def is_epoch_counter(name: str) -> bool:
        num_decreases = (values[name][1:] < values[name][:-1]).sum()
        return name != "_step" and num_decreases > 1 and 2 * num_steps[name] <= max_steps

    return next((name for name in fullest if not is_epoch_counter(name)), None)


def _find_counter(numbers: Mapping[str, Numbers], is_filled: NDArray[np.bool_]) -> str | None:
    """Return the first column that is called like a counter and counts up with every row."""
    for name, (rows, values) in numbers.items():
        is_whole = (values % 1 == 0).all() and len(rows) == is_filled.sum() > 1
        if COUNTER.fullmatch(name) and is_whole and (np.diff(values) > 0).all():
            return name
    return None


def check_number_of_metrics(number: int, place: str) -> None:
    """Raise StoreError if a run has more than MAX_METRICS metrics."""
    if number > MAX_METRICS:
        raise StoreError(f"{place}: got {number} metrics; allowed: at most {MAX_METRICS} a run")


def check_step(step: float, place: str, column: str) -> int:
    """Return a step as an int. Raises StoreError unless it is a whole number below 2^53."""
    if step % 1 or abs(step) >= STEP_LIMIT:
        raise StoreError(
            f"{place}: {printable(column[:80])}: got {step:g} as the step; expected a whole number below "
            "2^53: fix the row, or name another column with --step-column"
        )
    return int(step)
