"""From rows of anything to series: which column is the step, which values are numbers."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from abrun.errors import StoreError
from abrun.logs.log import left_out, listed, printable
from abrun.series import Series, from_rows

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
)
# wandb's own columns, TensorBoard's, and those that count as steps do
NOT_METRICS = {"_step", "_runtime", "_timestamp", "Wall time", "percentage"}
UNNAMED = "Unnamed: "  # and its place: a column without a name, which counts rows; no metric
WORDS = {"NaN", "Infinity", "-Infinity", "nan", "inf", "-inf"}  # numbers that JSON can only hold as text
MOST_METRICS = 100_000
LARGEST_STEP = 2**53  # whole numbers above it are not exact as floats


class NoStep(StoreError):
    """Rows that no column numbers: beside logs, they are something else."""


def flat_numbers(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a row of JSON; nested names are joined by '/', what is no number is left out.

    A mapping with a `_type` is one of wandb's media (a histogram, a table), not metrics.
    """
    levels = [("", iter(row.items()))]  # no recursion: a row may be nested as deep as JSON's reader goes
    while levels:
        prefix, items = levels[-1]
        for key, value in items:
            if isinstance(value, Mapping):
                if "_type" not in value:
                    levels.append((f"{prefix}{key}/", iter(value.items())))
                    break
            elif isinstance(value, int | float) and not isinstance(value, bool):
                yield prefix + key, _as_float(value)
            elif isinstance(value, str) and value in WORDS:
                yield prefix + key, float(value)
        else:
            levels.pop()


def as_number(text: str) -> float:
    """The number that a text is. Raises ValueError for what only Python takes for one too, such as 1_000."""
    if "_" in text or not text.isascii():
        raise ValueError
    return float(text)


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number of more than 308 digits
        return float("inf") if value > 0 else float("-inf")


def series_of(
    rows: Sequence[Mapping[str, float]],
    place: str,
    step_column: str | None,
    columns: Sequence[str] = (),
    unread: Mapping[str, str] | None = None,
) -> tuple[dict[str, Series], list[str]]:
    """The series of rows of numbers in the order they were written, and notes on what was left out.

    `columns`: all that the file names, `unread`: where those hold text, for messages. Raises StoreError where
    no column is the step, or where a step is not a whole number.
    """
    filled = [row for row in rows if not row.keys() <= NOT_METRICS]
    names = list(columns) or list(dict.fromkeys(name for row in filled for name in row))
    if not names:
        return {}, []
    check_number_of_metrics(len(names), place)
    column = step_column if step_column is not None else _step_column(filled, names)
    lacking = sum(math.isnan(row.get(column or "", math.nan)) for row in filled)
    if column is None or column not in names or (filled and lacking == len(filled)):
        if column and unread and column in unread:
            raise NoStep(f"{unread[column]}; or name the column that has the step with --step-column")
        what = f"no step in column '{printable(column)}'" if column else "no column has the step"
        raise NoStep(
            f"{place}: {what}; found are {listed(names, 12)}; name the column that has it with --step-column"
        )
    dropped = {column, *NOT_METRICS}
    steps = (
        (
            check_step(row[column], f"{place}, row {number}", column),
            {name: row[name] for name in row if name not in dropped and not name.startswith(UNNAMED)},
        )
        for number, row in enumerate(rows, 1)
        if not row.keys() <= NOT_METRICS and not math.isnan(row.get(column, math.nan))
    )
    metrics, num_replaced = from_rows(steps)
    notes = left_out(num_replaced)
    if lacking:
        notes.append(f"{lacking} of {len(filled)} rows have no {column} and were left out")
    return metrics, notes


def _step_column(rows: Sequence[Mapping[str, float]], names: Sequence[str]) -> str | None:
    called = {name.lower(): name for name in reversed(names)}
    called |= {name: name for name in names}  # as it is written before any other case
    columns = [called[column] for column in STEP_COLUMNS if column in called]
    there = {name: sum(name in row for row in rows) for name in columns}
    most = max(there.values(), default=0)
    return next((name for name, count in there.items() if count == most), None)


def check_number_of_metrics(number: int, place: str) -> None:
    """Raises StoreError, one line, where there are more than anything here could show."""
    if number > MOST_METRICS:
        raise StoreError(f"{place}: got {number} metrics; allowed: at most {MOST_METRICS} a run")


def check_step(step: float, place: str, column: str) -> int:
    """A step as a whole number that is exact as a float. Raises StoreError, one line, for any other."""
    if step % 1 or abs(step) >= LARGEST_STEP:
        raise StoreError(
            f"{place}: {printable(column)}: got {step:g}; a step is a whole number below 2^53: "
            "mend the row, or name another column with --step-column"
        )
    return int(step)
