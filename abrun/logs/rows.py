"""From rows of anything to series: which column is the step, which values are numbers."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import orjson

from abrun.errors import StoreError
from abrun.logs.cells import DECIMAL_COMMA, NumberFormat
from abrun.logs.log import Log, left_out, listed, printable
from abrun.runs.lines import CHECKSUM
from abrun.stats.series import Series, series_from_rows

# In this order, the first that every row has, in any case. Trainers that log their own step come before
# wandb's `_step`, which counts calls of wandb.log; open-instruct's `global_step` counts episodes.
STEP_COLUMNS = (
    "step",
    "training_step",
    "global_step",
    "train/global_step",
    "trainer/global_step",
    "training/global_step",
    "train/step",
    "current_steps",
    "global_step/max_steps",
    "_step",
    "iteration",
    "iter",
    "steps",
    "update",
    "training_iteration",
)
# wandb's own columns, TensorBoard's, those that count as steps do, or are read off a clock, and our checksums
NOT_METRICS = {
    CHECKSUM,
    "_step",
    "_runtime",
    "_timestamp",
    "Wall time",
    "percentage",
    "elapsed_time",
    "remaining_time",
}
SPLIT = r"[^\W\d_][\w\- ]{0,30}"  # a word that says what a row was measured on
MOST_SPLITS = 8
CONFIG = "config/"  # before a key of the configuration, which Ray repeats in every row
UNNAMED = "Unnamed: "  # and its place: a column without a name, which counts rows; no metric
WORDS = {"NaN", "Infinity", "-Infinity", "nan", "inf", "-inf"}  # numbers that JSON can only hold as text
MOST_METRICS = 100_000
LARGEST_STEP = 2**53  # whole numbers above it are not exact as floats
LONGEST_TEXT = 400  # characters of a cell that are kept
# A number with a unit, of a total, or with a decimal comma: meant to be read. Not a date, a name.
ALMOST_A_NUMBER = re.compile(r"[-+]?[\d.,' ]*\d(e[-+]?\d+)?(/\d+)?\s*[^\W\d_]{0,3}%?", re.IGNORECASE)
MEND_STEP = "write a whole number, or name another column with --step-column"

Cells = Mapping[str, float | str]  # of one row: numbers, and texts that may be numbers


class NoStep(StoreError):
    """Rows that no column numbers: beside logs, they are something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Metrics of a table, and what was left out of it."""

    metrics: dict[str, Series] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)  # column -> its first text that is no number, where
    dropped: dict[str, tuple[int, ...]] = field(default_factory=dict)  # metric -> steps whose value is text
    config: dict[str, Any] = field(default_factory=dict)

    def as_log(self, *, notes: Sequence[str] = (), **fields: Any) -> Log:
        """Return the log of a run; `fields`: its name, its place and what else is known of it."""
        known = {"config": self.config or None, "unread": self.unread, "dropped": self.dropped, **fields}
        return Log(metrics=self.metrics, notes=(*self.notes, *notes), **known)

    def merged(self, other: "Recorded") -> "Recorded":
        """Add what another table of the same run holds; where both hold a metric, this one's counts."""
        return Recorded(
            metrics=other.metrics | self.metrics,
            notes=self.notes + other.notes,
            unread=other.unread | self.unread,
            dropped=other.dropped | self.dropped,
            config=other.config | self.config,
        )


def flat_cells(row: Mapping[str, Any]) -> Iterator[tuple[str, float | str]]:
    """The numbers and texts of a row of JSON; nested names are joined by '/'. null is not recorded.

    true, false and lists are texts, so that a metric of them is told with its line. A mapping with a
    `_type` is one of wandb's media (a histogram, a table), not metrics.
    """
    levels = [("", iter(row.items()))]  # no recursion: a row may be nested as deep as JSON's reader goes
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
                yield prefix + key, _as_float(value)
            elif isinstance(value, str):
                yield prefix + key, float(value) if value in WORDS else value[:LONGEST_TEXT]
        else:
            levels.pop()


def parse_json(text: bytes | str) -> Any:
    """Return what a text of JSON holds, None where it is none."""
    try:
        return orjson.loads(text)
    except ValueError:
        try:
            return json.loads(str(text, "utf-8") if isinstance(text, bytes) else text)  # knows NaN, Infinity
        except (ValueError, RecursionError):
            return None


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number of more than 308 digits
        return float("inf") if value > 0 else float("-inf")


def series_of(
    cells: Sequence[Cells],
    place: str,
    step_column: str | None,
    columns: Sequence[str] = (),
    lines: Sequence[int] = (),
) -> Recorded:
    """The series of rows in the order they were written, and what was left out.

    `columns`: all that the file names; `lines`: where each row stands in it, for messages. Raises StoreError
    where no column is the step, or where a step is not a whole number.
    """
    cells, splits = _by_split(cells, step_column)
    rows, texts = _numbers(cells, step_column)
    places = [f"line {line}" for line in lines] or [f"row {number}" for number in range(1, len(rows) + 1)]
    unread = {name: unread_cell(place, places[of[0][0]], name, of[0][1]) for name, of in texts.items()}
    filled = [row for row in rows if not row.keys() <= NOT_METRICS]
    names = list(columns) or list(dict.fromkeys(name for row in filled for name in row))
    if not names:
        return Recorded(unread=unread)
    check_number_of_metrics(len(names), place)
    column = step_column if step_column is not None else _step_column(filled, names, texts)
    lacking = sum(math.isnan(row.get(column or "", math.nan)) for row in filled)
    if column is None or column not in {*names, *texts} or (filled and lacking == len(filled)):
        if column and column in unread:
            raise NoStep(f"{unread[column]}; or name the column that has the step with --step-column")
        what = f"no step in column '{printable(column[:80])}'" if column else "no column has the step"
        raise NoStep(
            f"{place}: {what}; found are {listed(names, 12)}; name the column that has it with --step-column"
        )
    _refuse_unreadable_steps(column, texts, cells, rows, [f"{place}, {at}" for at in places])
    dropped = {column, *NOT_METRICS}
    steps = [
        None if math.isnan(row.get(column, math.nan)) else check_step(row[column], f"{place}, {at}", column)
        for row, at in zip(rows, places, strict=True)
    ]
    config = _configuration(cells)
    metrics, num_replaced = series_from_rows(
        (
            step,
            {
                name: row[name]
                for name in row
                if name not in dropped and name not in config and not name.startswith(UNNAMED)
            },
        )
        for step, row in zip(steps, rows, strict=True)
        if step is not None and not row.keys() <= NOT_METRICS
    )
    notes = [*splits, *_on_texts(texts, metrics, places), *left_out(num_replaced)]
    if lacking:
        notes.append(f"{lacking} of {len(filled)} rows have no {column} and were left out")
    return Recorded(
        metrics=metrics,
        notes=notes,
        unread=unread,
        dropped=_dropped(texts, steps, rows),
        config={name.removeprefix(CONFIG).replace("/", "."): value for name, value in config.items()},
    )


# --- cells ---


def _by_split(cells: Sequence[Cells], step_column: str | None) -> tuple[Sequence[Cells], list[str]]:
    """Rows whose metrics are named after a word in them, such as `split`: train/reward and eval/reward.

    Only where rows of different words alternate and record the same metric at the same step, so that the
    one would replace the other. Also a sentence that says so.
    """
    for column in [name for name, cell in (cells[0] if cells else {}).items() if isinstance(cell, str)]:
        words = [str(row.get(column, "")) for row in cells]
        if not (1 < len({*words}) <= MOST_SPLITS and all(re.fullmatch(SPLIT, word) for word in {*words})):
            continue
        num_blocks = 1 + sum(one != following for one, following in pairwise(words))
        step_of = [tuple(cell for name, cell in row.items() if _is_step(name, step_column)) for row in cells]
        held: dict[tuple[object, str], str] = {}
        if num_blocks > len({*words}) and any(
            held.setdefault((step, name), word) != word
            for row, step, word in zip(cells, step_of, words, strict=True)
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
            splits = listed(sorted({*words}), MOST_SPLITS)
            said = f"metrics named after column {printable(column[:80])}: {splits}"
            return renamed, [said]
    return cells, []


def _is_step(name: str, step_column: str | None) -> bool:
    return name == step_column or name.lower() in STEP_COLUMNS or name in NOT_METRICS


def _numbers(
    cells: Sequence[Cells], step_column: str | None
) -> tuple[list[dict[str, float]], dict[str, list[tuple[int, str]]]]:
    """Rows of numbers, and of each column the texts that are none, with the index of their row."""
    form = NumberFormat(cell for row in cells for cell in row.values() if isinstance(cell, str))
    of_steps: dict[str, bool] = {}  # column that may be the step -> whether it has steps without a point
    for row in cells:
        for name, cell in row.items():
            if name == step_column or name.lower() in STEP_COLUMNS:
                plain = not isinstance(cell, str) or cell.strip().isdigit()
                of_steps[name] = of_steps.get(name, False) or plain
    rows: list[dict[str, float]] = []
    texts: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for index, row in enumerate(cells):
        numbers: dict[str, float] = {}
        for name, cell in row.items():
            if not isinstance(cell, str):
                numbers[name] = cell
            elif cell and not cell.isspace():
                try:
                    numbers[name] = (
                        form.step(cell, has_plain_steps=of_steps[name])
                        if name in of_steps
                        else form.value(cell)
                    )
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
    """A row whose step is text would vanish. One without a digit elsewhere is no row of values."""
    for index, text in texts.get(column, ()):
        others = (cell for name, cell in cells[index].items() if name != column and isinstance(cell, str))
        if not rows[index].keys() <= NOT_METRICS or any(re.search(r"\d", cell) for cell in others):
            raise StoreError(
                f"{places[index]}, column {printable(column[:80])}: "
                f"got '{printable(text[:40])}' as the step; {MEND_STEP}"
            )


def _on_texts(
    texts: Mapping[str, list[tuple[int, str]]], metrics: Mapping[str, Series], places: Sequence[str]
) -> Iterator[str]:
    """Notes on the columns whose texts were meant to be numbers."""
    for name, of in texts.items():
        (index, first), s = of[0], "s" * (len(of) > 1)
        if name in NOT_METRICS or not (name in metrics or ALMOST_A_NUMBER.fullmatch(first.strip())):
            continue
        said = f"{printable(name[:80])}: {len(of)} value{s} left out as no number{s}"
        yield f"{said}, the first '{printable(first[:40])}' in {places[index]}"


def _dropped(
    texts: Mapping[str, list[tuple[int, str]]],
    steps: Sequence[int | None],
    rows: Sequence[Mapping[str, float]],
) -> dict[str, tuple[int, ...]]:
    """Metric -> the steps whose last value is text."""
    dropped: dict[str, tuple[int, ...]] = {}
    for name, of in texts.items():
        last = {step: index for index, _ in of if (step := steps[index]) is not None}
        written_later = {
            step
            for index, (step, row) in enumerate(zip(steps, rows, strict=True))
            if step in last and name in row and index > last[step]
        }
        if last.keys() - written_later:
            dropped[name] = tuple(sorted(last.keys() - written_later))
    return dropped


def _configuration(cells: Sequence[Cells]) -> dict[str, Any]:
    """Return the values that every row repeats under `config/`."""
    values: dict[str, dict[float | str, None]] = defaultdict(dict)
    for row in cells:
        for name, cell in row.items():
            if name.startswith(CONFIG) and cell != "":
                values[name][cell] = None
    return {name: _plain(next(iter(of))) for name, of in values.items() if len(of) == 1}


def _plain(cell: float | str) -> Any:
    try:
        number = float(cell)
    except ValueError:
        return cell
    return int(number) if number % 1 == 0 and abs(number) < LARGEST_STEP else number


def unread_cell(place: str, at: str, column: str, text: str) -> str:
    """Say where a text stands in the place of a number, and what to write there."""
    comma = " (a decimal comma?)" if DECIMAL_COMMA.fullmatch(text.strip()) else ""
    return (
        f"{place}, {at}, column {printable(column[:80])}: got '{printable(text[:40])}'{comma}; "
        "write a number with a decimal point, nan where there is none"
    )


# --- steps ---


def _step_column(
    rows: Sequence[Mapping[str, float]], names: Sequence[str], texts: Mapping[str, object]
) -> str | None:
    """The first of STEP_COLUMNS that most rows have as a number, or else as text.

    Not one that begins anew with each epoch, where another counts on.
    """
    called = {name.lower(): name for name in reversed([*names, *texts])}
    called |= {name: name for name in (*texts, *names)}  # as it is written before any other case
    columns = [called[column] for column in STEP_COLUMNS if column in called]
    there = {name: sum(name in row for row in rows) for name in columns}
    most = max(there.values(), default=0)
    fullest = [name for name, count in there.items() if count == most]
    counted = {name: [row[name] for row in rows if name in row] for name in fullest if name != "_step"}
    falls = {name: sum(b < a for a, b in pairwise(steps)) for name, steps in counted.items()}
    num_steps = {name: len({*steps}) for name, steps in counted.items()}
    best = max(num_steps.values(), default=0)
    of_epoch = {name for name in counted if falls[name] > 1 and 2 * num_steps[name] <= best}
    return next((name for name in fullest if name not in of_epoch), None)


def check_number_of_metrics(number: int, place: str) -> None:
    """Raises StoreError, one line, where there are more than anything here could show."""
    if number > MOST_METRICS:
        raise StoreError(f"{place}: got {number} metrics; allowed: at most {MOST_METRICS} a run")


def check_step(step: float, place: str, column: str) -> int:
    """A step as a whole number that is exact as a float. Raises StoreError, one line, for any other."""
    if step % 1 or abs(step) >= LARGEST_STEP:
        raise StoreError(
            f"{place}: {printable(column[:80])}: got {step:g}; a step is a whole number below 2^53: "
            "mend the row, or name another column with --step-column"
        )
    return int(step)
