"""Conversion of table rows to series: choice of the step column and parsing of numbers."""

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from abrun.errors import StoreError
from abrun.logs.cells import DECIMAL_COMMA, NumberFormat
from abrun.logs.foreign import STEP_LIMIT
from abrun.logs.foreign import parse_json as parse_json  # for readers that import it from here
from abrun.logs.log import Log, list_names, printable, replaced_notes
from abrun.runs.lines import CHECKSUM
from abrun.stats.series import Series, series_from_rows

# The first that every row has is used, in any letter case. A trainer's own step comes before wandb's `_step`,
# which counts calls of wandb.log; open-instruct's `global_step` counts episodes.
STEP_COLUMNS = (
    *("step", "training_step", "global_step", "train/global_step", "trainer/global_step"),
    *("training/global_step", "train/step", "current_steps", "global_step/max_steps", "_step"),
    *("iteration", "iter", "steps", "update", "training_iteration"),
)
# Columns of wandb and TensorBoard, counters, clock readings and abrun's checksums
NON_METRIC_COLUMNS = {CHECKSUM, "_step", "_runtime", "_timestamp", "Wall time"}
NON_METRIC_COLUMNS |= {"percentage", "elapsed_time", "remaining_time"}
SPLIT = r"[^\W\d_][\w\- ]{0,30}"  # the name of a data split, such as train or eval
MAX_SPLITS = 8
CONFIG = "config/"  # prefix of configuration keys, which Ray repeats in every row
UNNAMED = "Unnamed: "  # prefix of a column without a name, which counts rows and is not a metric
WORDS = {"NaN", "Infinity", "-Infinity", "nan", "inf", "-inf"}  # numbers that JSON can only hold as text
MAX_METRICS = 100_000
MAX_TEXT_CHARS = 400  # characters of a cell that are kept
# Text that was meant to be a number (with a unit, a total or a decimal comma), but not a date or a name.
NUMBER_LIKE = re.compile(r"[-+]?[\d.,' ]*\d(e[-+]?\d+)?(/\d+)?\s*[^\W\d_]{0,3}%?", re.IGNORECASE)
SCORES_HINT = ", or give final scores one row per run, with columns 'arm' and 'seed'"
FIX_STEP = "write a whole number, or name another column with --step-column"

Cells = Mapping[str, float | str]  # of one row: numbers, and texts that may be numbers


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

    def as_log(self, *, notes: Sequence[str] = (), **fields: Any) -> Log:
        """Return the log of a run; `fields`: its name, place and any other fields of Log."""
        log_fields = {"config": self.config or None, "unread": self.unread, "dropped": self.dropped, **fields}
        return Log(metrics=self.metrics, notes=(*self.notes, *notes), **log_fields)

    def merge(self, table: "TableMetrics") -> "TableMetrics":
        """Merge with another table of the same run; this table wins if both hold a metric."""
        return TableMetrics(
            metrics=table.metrics | self.metrics,
            notes=self.notes + table.notes,
            unread=table.unread | self.unread,
            dropped=table.dropped | self.dropped,
            config=table.config | self.config,
        )


def flat_cells(row: Mapping[str, Any]) -> Iterator[tuple[str, float | str]]:
    """Yield names and values of a JSON row; nested names are joined by '/'. null is skipped.

    true, false and lists become texts, so that an error about such a metric names its line. A mapping with a
    `_type` is wandb media (a histogram, a table), not a metric.
    """
    levels = [("", iter(row.items()))]  # no recursion: rows may be nested deeply
    while levels:
        prefix, items = levels[-1]
        for key, value in items:
            if isinstance(value, Mapping):
                if "_type" not in value:
                    levels.append((f"{prefix}{key}/", iter(value.items())))
                    break
            elif isinstance(value, bool | list):
                yield prefix + key, "[...]" if isinstance(value, list) else str(value).lower()
            elif isinstance(value, int | float):
                yield prefix + key, _to_float(value)
            elif isinstance(value, str):
                yield prefix + key, float(value) if value in WORDS else shorten_cell(value)
        else:
            levels.pop()


def shorten_cell(text: str) -> str:
    """Return at most MAX_TEXT_CHARS characters; a longer text ends in its hash, as prompts begin alike."""
    if len(text) <= MAX_TEXT_CHARS:
        return text
    return text[: MAX_TEXT_CHARS - 16] + hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


def _to_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number of more than 308 digits
        return float("inf") if value > 0 else float("-inf")


def build_series(
    cells: Sequence[Cells],
    place: str,
    step_column: str | None,
    columns: Sequence[str] = (),
    lines: Sequence[int] = (),
) -> TableMetrics:
    """Return the series in rows, which are in the order they were written, and the values left out.

    `columns`: all column names of the file; `lines`: each row's line number, for messages. Raises StoreError
    if no column holds the step, or if a step is not a whole number.
    """
    cells, split_notes = _split_metrics(cells, step_column)
    rows, texts = _parse_numbers(cells, step_column)
    places = [f"line {line}" for line in lines] or [f"row {number}" for number in range(1, len(rows) + 1)]
    unread = {
        name: describe_text_cell(place, places[cell_texts[0][0]], name, cell_texts[0][1])
        for name, cell_texts in texts.items()
    }
    filled_rows = [row for row in rows if not row.keys() <= NON_METRIC_COLUMNS]
    names = list(columns) or list(dict.fromkeys(name for row in filled_rows for name in row))
    if not names:
        return TableMetrics(unread=unread)
    check_number_of_metrics(len(names), place)
    column = step_column if step_column is not None else _find_step_column(filled_rows, names, texts)
    num_without_step = sum(math.isnan(row.get(column or "", math.nan)) for row in filled_rows)
    is_empty = filled_rows and num_without_step == len(filled_rows)
    if column is None or column not in {*names, *texts} or is_empty:
        if column and column in unread:
            raise NoStepError(f"{unread[column]}; or name the step column with --step-column")
        problem = f"no step in column '{printable(column[:80])}'" if column else "no column has the step"
        raise NoStepError(
            f"{place}: {problem}; columns: {list_names(names, 12)}; name the step column with --step-column"
            f"{'' if column else SCORES_HINT}"
        )
    row_places = [f"{place}, {row_place}" for row_place in places]
    _refuse_unreadable_steps(column, texts, cells, rows, row_places)
    steps = [
        None if math.isnan(row.get(column, math.nan)) else check_step(row[column], row_place, column)
        for row, row_place in zip(rows, row_places, strict=True)
    ]
    config = _constant_config(cells)
    excluded = {column, *NON_METRIC_COLUMNS, *config}
    metrics, replaced = series_from_rows(
        (step, {name: row[name] for name in row if name not in excluded and not name.startswith(UNNAMED)})
        for step, row in zip(steps, rows, strict=True)
        if step is not None and not row.keys() <= NON_METRIC_COLUMNS
    )
    notes = [*split_notes, *_text_notes(texts, metrics, places), *replaced_notes(replaced)]
    if num_without_step:
        notes.append(f"{num_without_step} of {len(filled_rows)} rows without {column} were left out")
    return TableMetrics(
        metrics=metrics,
        notes=notes,
        unread=unread,
        dropped=_dropped_steps(texts, steps, rows),
        config={name.removeprefix(CONFIG).replace("/", "."): value for name, value in config.items()},
    )


# --- cells ---


def _split_metrics(cells: Sequence[Cells], step_column: str | None) -> tuple[Sequence[Cells], list[str]]:
    """Prefix metrics with the word in a column such as `split`: train/reward and eval/reward.

    This is done only if rows of different words alternate and record the same metric at the same step, so
    that one would replace the other. Also return a note on it.
    """
    for column in [name for name, cell in (cells[0] if cells else {}).items() if isinstance(cell, str)]:
        words = [str(row.get(column, "")) for row in cells]
        if not (1 < len({*words}) <= MAX_SPLITS and all(re.fullmatch(SPLIT, word) for word in {*words})):
            continue
        num_blocks = 1 + sum(previous != next_word for previous, next_word in pairwise(words))
        row_steps = [
            tuple(cell for name, cell in row.items() if _is_step(name, step_column)) for row in cells
        ]
        first_words: dict[tuple[object, str], str] = {}
        if num_blocks > len({*words}) and any(
            first_words.setdefault((step, name), word) != word
            for row, step, word in zip(cells, row_steps, words, strict=True)
            for name in row
            if name != column and not _is_step(name, step_column)
        ):
            renamed = [
                {
                    name if _is_step(name, step_column) else f"{word}/{name}": cell
                    for name, cell in row.items()
                }
                for row, word in zip(cells, words, strict=True)
            ]
            split_names = list_names(sorted({*words}), MAX_SPLITS)
            note = f"metric names prefixed by column {printable(column[:80])}: {split_names}"
            return renamed, [note]
    return cells, []


def _is_step(name: str, step_column: str | None) -> bool:
    return name == step_column or name.lower() in STEP_COLUMNS or name in NON_METRIC_COLUMNS


def _parse_numbers(
    cells: Sequence[Cells], step_column: str | None
) -> tuple[list[dict[str, float]], dict[str, list[tuple[int, str]]]]:
    """Return rows of numbers and, by column, the texts that are not numbers with their row index."""
    number_format = NumberFormat(cell for row in cells for cell in row.values() if isinstance(cell, str))
    step_columns: dict[str, bool] = {}  # column that may be the step -> whether it has steps without a point
    for row in cells:
        for name, cell in row.items():
            if name == step_column or name.lower() in STEP_COLUMNS:
                is_plain = not isinstance(cell, str) or cell.strip().isdigit()
                step_columns[name] = step_columns.get(name, False) or is_plain
    rows: list[dict[str, float]] = []
    texts: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for index, row in enumerate(cells):
        numbers: dict[str, float] = {}
        for name, cell in row.items():
            if not isinstance(cell, str):
                numbers[name] = cell
            elif cell and not cell.isspace():
                try:
                    if name in step_columns:
                        numbers[name] = number_format.parse_step(cell, has_plain_steps=step_columns[name])
                    else:
                        numbers[name] = number_format.parse_number(cell)
                except ValueError:
                    texts[name].append((index, cell))
        rows.append(numbers)
    return rows, dict(texts)


def _refuse_unreadable_steps(
    column: str,
    texts: Mapping[str, list[tuple[int, str]]],
    cells: Sequence[Cells],
    rows: Sequence[Mapping[str, float]],
    places: Sequence[str],
) -> None:
    """Raise StoreError for a row whose step is text: it would vanish. Rows without values are ignored."""
    for index, text in texts.get(column, ()):
        other_cells = (cell for name, cell in cells[index].items() if name != column)
        has_digits = any(isinstance(cell, str) and re.search(r"\d", cell) for cell in other_cells)
        if has_digits or not rows[index].keys() <= NON_METRIC_COLUMNS:
            raise StoreError(
                f"{places[index]}, column {printable(column[:80])}: "
                f"got '{printable(text[:40])}' as the step; {FIX_STEP}"
            )


def _text_notes(
    texts: Mapping[str, list[tuple[int, str]]], metrics: Mapping[str, Series], places: Sequence[str]
) -> Iterator[str]:
    """Yield notes on columns whose texts were meant to be numbers."""
    for name, cell_texts in texts.items():
        (index, first_text), plural = cell_texts[0], "s" * (len(cell_texts) > 1)
        if name in NON_METRIC_COLUMNS or not (name in metrics or NUMBER_LIKE.fullmatch(first_text.strip())):
            continue
        note = f"{printable(name[:80])}: {len(cell_texts)} value{plural} left out (not a number)"
        yield f"{note}, the first '{printable(first_text[:40])}' in {places[index]}"


def _dropped_steps(
    texts: Mapping[str, list[tuple[int, str]]],
    steps: Sequence[int | None],
    rows: Sequence[Mapping[str, float]],
) -> dict[str, tuple[int, ...]]:
    """Return, by metric, the steps whose last value is text."""
    dropped: dict[str, tuple[int, ...]] = {}
    for name, cell_texts in texts.items():
        last_text_row = {step: index for index, _ in cell_texts if (step := steps[index]) is not None}
        written_later = {
            step
            for index, (step, row) in enumerate(zip(steps, rows, strict=True))
            if step in last_text_row and name in row and index > last_text_row[step]
        }
        if last_text_row.keys() - written_later:
            dropped[name] = tuple(sorted(last_text_row.keys() - written_later))
    return dropped


def _constant_config(cells: Sequence[Cells]) -> dict[str, Any]:
    """Return the values that every row repeats under `config/`."""
    values: dict[str, dict[float | str, None]] = defaultdict(dict)
    for row in cells:
        for name, cell in row.items():
            if name.startswith(CONFIG) and cell != "":
                values[name][cell] = None
    constant = {name: [*distinct] for name, distinct in values.items() if len(distinct) == 1}
    return {name: _parse_config_value(cell) for name, (cell,) in constant.items()}


def _parse_config_value(cell: float | str) -> Any:
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
    rows: Sequence[Mapping[str, float]], names: Sequence[str], texts: Mapping[str, object]
) -> str | None:
    """Return the first of STEP_COLUMNS that most rows have, as a number or else as text.

    A counter that restarts with each epoch is skipped if another one does not.
    """
    names_by_case = {name.lower(): name for name in reversed([*names, *texts])}
    names_by_case |= {name: name for name in (*texts, *names)}  # the exact spelling comes first
    columns = [names_by_case[column] for column in STEP_COLUMNS if column in names_by_case]
    num_rows = {name: sum(name in row for row in rows) for name in columns}
    max_rows = max(num_rows.values(), default=0)
    fullest = [name for name, count in num_rows.items() if count == max_rows]
    step_values = {name: [row[name] for row in rows if name in row] for name in fullest if name != "_step"}
    num_decreases = {name: sum(b < a for a, b in pairwise(steps)) for name, steps in step_values.items()}
    num_steps = {name: len({*steps}) for name, steps in step_values.items()}
    max_steps = max(num_steps.values(), default=0)
    epoch_counters = {
        name for name in step_values if num_decreases[name] > 1 and 2 * num_steps[name] <= max_steps
    }
    return next((name for name in fullest if name not in epoch_counters), None)


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
