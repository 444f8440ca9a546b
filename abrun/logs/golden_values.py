"""Series in one JSON object, as projects keep golden values: for each metric its values by step.

    {"train/loss": {"1": 0.5, "2": 0.25}}                                        NeMo-RL, json_dump_tb_logs.py
    {"lm loss": {"start_step": 0, "step_interval": 5, "values": [9.1, 8.7]}}     Megatron-LM, golden values
    {"lm loss": {"start_step": 1, "step_interval": 1, "values": {"1": 9.1}}}     the same, since 2025
    {"step": [1, 2], "loss": [0.5, 0.25]}                                        lists of equal length

The metrics may be in objects of their own, whose names become folders: `{"train": {"loss": {"1": 0.5}}}`.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from abrun.errors import StoreError
from abrun.logs.foreign.columns import Cell, Table, TableBuilder
from abrun.logs.foreign.values import MAX_NAME_CHARACTERS, as_step
from abrun.logs.rows import STEP_COLUMNS, check_number_of_metrics, flat_cells
from abrun.logs.words import find_columns
from abrun.runs.redaction import list_names

# Start of such a file
SERIES = re.compile(
    rb'(\xef\xbb\xbf)?\s*\{\s*"[^"]{1,200}"\s*:\s*'
    rb'(\[\s*[-\dN]|(\{\s*"[^"\d][^"]{0,200}"\s*:\s*){0,2}(\{\s*"\d+"\s*:\s*["\-\dN]|'
    rb'\{\s*"((start|end)_step"|(steps|values)"\s*:\s*\[)))'
)
MAX_FOLDERS = 3

Values = dict[int, Any]  # by step


def series_table(document: Mapping[str, Any], place: str) -> Table | None:
    """Return a row for each step; None if the object holds no series. Raises StoreError for lists alone."""
    series: dict[str, Values] = {}
    lists: dict[str, list[Any]] = {}
    for name, value in _walk(document, "", MAX_FOLDERS):
        if isinstance(value, list):
            lists[name] = value
        else:
            series[name] = value
    series |= _add_steps(lists, place, is_needed=len(lists) == len(document))
    if not series:
        return None
    check_number_of_metrics(len(series), place)
    rows: dict[int, dict[str, Cell]] = {}
    for name, values in series.items():
        for step, cell in values.items():
            rows.setdefault(step, {"step": float(step)}).update(flat_cells({name: cell}))
    builder = TableBuilder(place, "step")
    for step in sorted(rows):
        builder.add(step, rows[step])
    return builder.build()


def _walk(
    document: Mapping[str, Any], prefix: str, max_folders: int
) -> Iterator[tuple[str, Values | list[Any]]]:
    """Yield the name of each series, and its values by step, or a list without steps."""
    for key, value in document.items():
        name = f"{prefix}{key}"
        if len(name) > MAX_NAME_CHARACTERS:
            continue
        if (
            isinstance(value, list)
            and len(value) > 1
            and all(isinstance(item, int | float | None) for item in value)
        ):
            yield name, value
        elif isinstance(value, Mapping) and value:
            values, steps = value.get("values", value), value.get("steps")
            if isinstance(values, list) and isinstance(steps, list) and len(values) == len(steps):
                by_step = zip(map(as_step, steps), values, strict=True)
                yield name, {step: item for step, item in by_step if step is not None}
            elif isinstance(values, list):
                start, interval = as_step(value.get("start_step", 0)), as_step(value.get("step_interval", 1))
                if start is not None and interval:
                    yield name, {start + index * interval: item for index, item in enumerate(values)}
            elif isinstance(values, Mapping) and all(key.isdecimal() and len(key) < 16 for key in values):
                yield name, {int(step): item for step, item in values.items()}
            elif max_folders:
                yield from _walk(value, f"{name}/", max_folders - 1)


def _add_steps(lists: Mapping[str, list[Any]], place: str, *, is_needed: bool) -> dict[str, Values]:
    """Return lists of values by the steps that one of them holds."""
    steps = next((lists[name] for name in find_columns(lists, STEP_COLUMNS)), None)
    if steps is not None and None not in (whole_steps := [*map(as_step, steps)]):
        return {
            name: {step: value for step, value in zip(whole_steps, values, strict=True) if step is not None}
            for name, values in lists.items()
            if len(values) == len(steps) and values is not steps
        }
    if is_needed and lists:
        raise StoreError(
            f"{place}: lists of values without their steps: {list_names([*lists], 3)}; add a list 'step' of "
            "the same length, or write {metric: {step: value}}"
        )
    return {}
