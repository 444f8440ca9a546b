"""Rows of metrics.jsonl as series; rows of validation.jsonl; sketches of the weights."""

import contextlib
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from abrun.errors import StoreError
from abrun.runs.files import read_regular, wrap_read_errors
from abrun.runs.lines import LineReader, row_problem, step_problem
from abrun.runs.records import MAX_ATTEMPT
from abrun.runs.redaction import shortened
from abrun.stats.series import Array, Series, Steps

MAX_SKETCH_BYTES = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValidationRow:
    """Rewards and completion lengths of a run's policy on the held-out prompts after a step."""

    prompts_sha256: str  # prompts of two runs can be paired only if their hashes are equal
    rewards: Array  # [P], in the order of the prompts
    lengths: Array  # [P], completion lengths in tokens


def read_metrics(path: Path, *, finished: bool) -> dict[str, Series]:
    """Return the metrics of a metrics.jsonl by name.

    Rows of one step and attempt are merged; the last attempt wins. A torn last line is skipped unless the run
    is `finished`. Raises StoreError, naming file and line, for a damaged row.
    """
    tables: dict[tuple[str, ...], _MetricTable] = {}
    for number, row in _numbered_rows(path, finished=finished):
        problem = _add_row(tables, number, row)
        if problem:
            raise StoreError(f"{path}, line {number}: {problem}")
    return _build_series(list(tables.values()))


def read_validation(path: Path, *, finished: bool) -> dict[int, ValidationRow]:
    """Return the validations of one run by step, ascending; the last attempt wins.

    Raises StoreError, naming file and line, for a damaged row.
    """
    validations: dict[int, tuple[int, ValidationRow]] = {}
    for number, row in _numbered_rows(path, finished=finished):
        try:
            step, attempt = row["step"], row["attempt"]
            if type(step) is not int or type(attempt) is not int or attempt >= MAX_ATTEMPT:
                got = f"step {shortened(step)} and attempt {shortened(attempt)}"
                raise ValueError(f"{got} are not whole numbers")
            rewards, lengths = np.array(row["rewards"], np.float64), np.array(row["lengths"], np.float64)
            if rewards.ndim != 1 or rewards.shape != lengths.shape:
                raise ValueError("rewards and lengths must be lists with one number per prompt")
            prompts_sha256 = str(row["prompts_sha256"])
            validation = ValidationRow(prompts_sha256=prompts_sha256, rewards=rewards, lengths=lengths)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise StoreError(
                f"{path}, line {number}: not a validation record ({type(error).__name__}: {error}); remove "
                "the line, or run again"
            ) from None
        if step not in validations or attempt >= validations[step][0]:
            validations[step] = attempt, validation
    return {step: validations[step][1] for step in sorted(validations)}


def read_sketch(path: Path) -> dict[str, Array]:
    """Return the float64 sketches in a file by tensor; none if it is missing or cannot be read."""
    from safetensors import SafetensorError, numpy

    try:
        sketch = numpy.load(read_regular(path, MAX_SKETCH_BYTES, os.O_NOFOLLOW))
    except (OSError, ValueError, KeyError, SafetensorError):
        return {}
    return {name: values for name, values in sketch.items() if values.dtype == "float64"}


def _numbered_rows(path: Path, *, finished: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line number and row of every line of a file. Raises StoreError for a damaged line."""
    with wrap_read_errors(path), contextlib.suppress(FileNotFoundError):
        for line in LineReader(path).lines(ended=finished):
            yield line.number, line.checked(path)


@dataclass(slots=True)
class _MetricTable:
    """The rows of a file that hold the same metrics, in the order in which they were written."""

    names: tuple[str, ...]
    lines: "array[int]" = field(default_factory=lambda: array("q"))
    steps: "array[int]" = field(default_factory=lambda: array("q"))
    attempts: "array[int]" = field(default_factory=lambda: array("q"))
    values: "array[float]" = field(default_factory=lambda: array("d"))  # row after row

    def column(self, name: str) -> Array:
        """Return the values of a metric as a view."""
        rows = np.asarray(self.values, np.float64).reshape(len(self.steps), len(self.names))
        return rows[:, self.names.index(name)]


def _add_row(tables: dict[tuple[str, ...], _MetricTable], number: int, row: dict[str, Any]) -> str | None:
    """Add a row to the table of its metrics; return the problem if the row is invalid."""
    step, attempt, time_s = row.pop("step", None), row.pop("attempt", 1), row.pop("time_s", None)
    if problem := step_problem(step, attempt):
        return problem
    names = tuple(row)
    table = tables.get(names) or _MetricTable(names)
    num_values = len(table.values)
    try:
        table.values.extend(row.values())
    except TypeError:  # null, which counts as not recorded, or text
        del table.values[num_values:]
        recorded = {"step": step, "attempt": attempt, "time_s": time_s}
        recorded |= {name: value for name, value in row.items() if value is not None}
        return row_problem(recorded) or _add_row(tables, number, recorded)
    table.lines.append(number)
    table.steps.append(step)
    table.attempts.append(attempt)
    tables[names] = table
    return None


def _build_series(tables: Sequence[_MetricTable]) -> dict[str, Series]:
    """Return every metric in the tables; metrics of the same tables share their steps."""
    table_indices: dict[str, list[int]] = {}
    for index, table in enumerate(tables):
        for name in table.names:
            table_indices.setdefault(name, []).append(index)
    names_by_tables: dict[tuple[int, ...], list[str]] = {}
    for name, indices in table_indices.items():
        names_by_tables.setdefault(tuple(indices), []).append(name)
    is_newest = _newest_attempt_rows(tables)
    series: dict[str, Series] = {}
    for indices, names in names_by_tables.items():
        selected_tables = [(tables[index], is_newest[index]) for index in indices]
        steps = np.concatenate([np.asarray(table.steps, np.int64)[rows] for table, rows in selected_tables])
        lines = np.concatenate([np.asarray(table.lines, np.int64)[rows] for table, rows in selected_tables])
        last_rows = _last_line_of_each_step(steps, lines)
        steps = steps[last_rows]
        for name in names if len(steps) else ():
            values = np.concatenate([table.column(name)[rows] for table, rows in selected_tables])
            series[name] = Series(steps, values[last_rows])
    return series


def _newest_attempt_rows(tables: Sequence[_MetricTable]) -> list[NDArray[np.bool_] | slice]:
    """Return a mask per table of the rows from the newest attempt that recorded their step."""
    attempts = [np.asarray(table.attempts, np.int64) for table in tables]
    if len({*(value for values in attempts for value in (values.min(), values.max()))}) < 2:
        return [slice(None)] * len(tables)
    steps = [np.asarray(table.steps, np.int64) for table in tables]
    distinct, step_indices = np.unique(np.concatenate(steps), return_inverse=True)
    newest = np.full(len(distinct), np.iinfo(np.int64).min)
    np.maximum.at(newest, step_indices, np.concatenate(attempts))
    ends = np.cumsum([len(values) for values in steps])[:-1]
    return [
        values == newest[where] for values, where in zip(attempts, np.split(step_indices, ends), strict=True)
    ]


def _last_line_of_each_step(steps: Steps, lines: NDArray[np.int64]) -> NDArray[np.int64] | slice:
    """Return the index of the last line of every step, by ascending step."""
    if (np.diff(steps) > 0).all():
        return slice(None)
    order = np.lexsort((lines, steps))
    return order[np.append(np.diff(steps[order]) > 0, True)]
