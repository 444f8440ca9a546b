"""Reader for wandb's local files: `offline-run-*/run-*.wandb`, or `run-*` of an online run.

A .wandb file is a log in LevelDB's format: a header of 7 bytes, then blocks of 32 KiB with chunks of CRC (4
bytes), length (2), type (1) and a part of a protobuf Record. The wandb package is not needed.
"""

import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from abrun.errors import StoreError
from abrun.logs.foreign.columns import Table, TableBuilder
from abrun.logs.foreign.files import open_file, read_companion
from abrun.logs.foreign.values import (
    MAX_NAME_CHARACTERS,
    MAX_RECORD_BYTES,
    as_config,
    as_mapping,
    as_name,
    parse_json,
    parse_number,
)
from abrun.logs.log import NOTHING_RECORDED, Log
from abrun.logs.rows import NoStepError, TableMetrics, check_number_of_metrics, flat_cells, series_of_table
from abrun.logs.words import WORDS
from abrun.runs.redaction import printable

MAGIC = b":W&B\xe1\xbe"
FILE_HEADER, CHUNK_HEADER, BLOCK = 7, 7, 32768  # bytes
MAX_DEPTH = 50  # of nested keys in a configuration
MAX_STEP_METRICS = 64  # of a run, and patterns of metrics that have one
MAX_GPUS = 1024
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
NO_EXIT_NOTE = "it has no end record: it is still running, or was killed"


@dataclass(slots=True)
class RunContents:
    """Accumulated content of the records in a run's files."""

    rows: TableBuilder
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    run: Any = None  # the last RunRecord
    exit_code: int | None = None
    steps: dict[str, str] = field(default_factory=dict)  # metric or pattern -> its step metric
    notes: list[str] = field(default_factory=list)


def read_wandb_files(files: Sequence[Path], name: str, step_column: str | None = None) -> Log:
    """Return one run from its .wandb files in the order they were started (each resume starts another).

    The log is named `name` if the run has no display name.
    """
    place = printable(str(files[-1]))
    contents = RunContents(TableBuilder(place, "row"))
    for path in files:
        contents.exit_code = None
        _read_file(contents, path)
    recorded = _build_series(contents.rows.build(), contents.steps, step_column)
    run, code = contents.run, contents.exit_code
    status, end_notes = "failed" if code else "finished", list[str]()
    if run is None:
        status, end_notes = "unknown", [NOTHING_RECORDED]
    elif code is None:
        status, end_notes = "running", [NO_EXIT_NOTE]
    config = {key: value for key, value in contents.config.items() if key != "_wandb"}
    return recorded.as_log(
        name=(as_name(run.display_name) if run else None) or name,
        place=place,
        status=status,
        failure=f"exit code {code}" if code else "",
        config={**recorded.config, **as_config(config)} if run else None,
        environment=contents.environment or None,
        group=(as_name(run.run_group) if run else None) or None,
        job_type=(as_name(run.job_type) if run else None) or None,
        run_id=(as_name(run.run_id) if run else None) or None,
        notes=contents.notes + end_notes,
    )


def _build_series(table: Table, steps: Mapping[str, str], step_column: str | None) -> TableMetrics:
    """Return every metric over its step metric, if `define_metric` set one, else over the step column.

    `steps`: the step metric of each metric or pattern.
    """
    recorded, remaining = TableMetrics(), table
    step_metrics = dict.fromkeys(steps.values())
    patterns = {pattern: step for pattern, step in steps.items() if re.search(r"[*?\[]", pattern)}
    if max(len(step_metrics), len(patterns)) > MAX_STEP_METRICS:
        problem = f"define_metric has more than {MAX_STEP_METRICS} step metrics or patterns"
        raise StoreError(f"{table.place}: {problem}")
    step_of = {
        name: steps.get(name) or next((patterns[p] for p in patterns if fnmatchcase(name, p)), None)
        for name in table.columns
    }
    for step in step_metrics if step_column is None else ():
        names = [name for name in table.columns if name != step and step_of[name] == step]
        if step not in table.columns or not names:
            continue
        values = table.columns[step].values
        if len(values) > 1 and (values == values[0]).all():
            continue  # declared and never logged: wandb repeats its first value
        recorded = recorded.merge(series_of_table(_carry_forward(table, step, names), step))
        remaining = remaining.without([*names, step])
    if not recorded.metrics:
        return series_of_table(table, step_column)
    try:
        return recorded.merge(series_of_table(remaining, None))
    except NoStepError:
        return recorded


def _carry_forward(table: Table, step: str, names: Sequence[str]) -> Table:
    """Return the rows with metrics, each with the latest value of their step metric, as in wandb's charts."""
    steps = table.columns[step]
    rows = np.unique(np.concatenate([table.columns[name].rows for name in names]))
    rows = rows[rows >= steps.rows[0]]
    latest = steps.take(np.searchsorted(steps.rows, rows, side="right") - 1)
    columns = {step: replace(latest, rows=rows)}
    for name in names:
        column = table.columns[name]
        columns[name] = column.take(column.rows >= steps.rows[0])
    return replace(table, columns={name: column for name, column in columns.items() if len(column)})


def _read_file(contents: RunContents, path: Path) -> None:
    from abrun.logs.foreign.protobuf import parse_message

    place, end = printable(str(path)), FILE_HEADER
    with open_file(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        header = file.read(FILE_HEADER)
        if header[: len(MAGIC)] != MAGIC[: len(header)]:
            raise StoreError(f"{place}: not a wandb file; remove or rename it")
        for body, record_end in iterate_records(file, size):
            record = parse_message("Record", body)
            if record is None:
                break
            end = record_end
            match record.WhichOneof("record_type"):
                case "history":
                    check_number_of_metrics(len(record.history.item), place)
                    contents.rows.add(len(contents.rows.lines) + 1, _history_row(record.history))
                case "run":
                    contents.run = record.run
                    _update_config(contents.config, record.run.config)
                case "config":
                    _update_config(contents.config, record.config)
                case "environment":
                    _add_environment(contents.environment, record.environment)
                case "metric" if record.metric.step_metric:
                    name = record.metric.name or record.metric.glob_name
                    contents.steps[name] = record.metric.step_metric
                case "exit":
                    contents.exit_code = record.exit.exit_code
    contents.notes += torn_notes(end, size)
    metadata = read_companion(path.parent, "files", "wandb-metadata.json", notes=contents.notes)
    requirements = read_requirements(path.parent, contents.notes)
    # The metadata are written late, and never in some versions.
    known = as_mapping(parse_json(metadata or b""))
    contents.environment.update(parse_environment(known, requirements))


def iterate_records(file: BufferedReader, size: int) -> Iterator[tuple[bytes, int]]:
    """Yield the complete records in the first `size` bytes, up to a damaged one, and where each one ends."""
    position = file.seek(FILE_HEADER)
    chunks, num_bytes = list[bytes](), 0  # of the incomplete record
    while position + CHUNK_HEADER <= size:
        if BLOCK - position % BLOCK < CHUNK_HEADER:
            position = file.seek(position + BLOCK - position % BLOCK)  # padding at the end of a block
            continue
        header = file.read(CHUNK_HEADER)
        crc, length, kind = struct.unpack("<IHB", header)
        chunk = file.read(length)
        position += CHUNK_HEADER + length
        if position > size or zlib.crc32(chunk, zlib.crc32(header[-1:])) != crc:
            return
        if kind not in ((MIDDLE, LAST) if chunks else (FULL, FIRST)):
            return
        chunks.append(chunk)
        num_bytes += length
        if num_bytes > MAX_RECORD_BYTES:
            raise StoreError(
                f"{printable(file.name)}: a record of more than {MAX_RECORD_BYTES} bytes; log less at a time"
            )
        if kind in (FULL, LAST):
            yield b"".join(chunks), position
            chunks.clear()
            num_bytes = 0


def torn_notes(end: int, size: int) -> list[str]:
    """Return a note on the bytes after the last complete record, if any."""
    return [f"{size - end} bytes, from byte {end} on, are torn or damaged and were left out"] * (end < size)


def _history_row(history: Any) -> dict[str, float | str]:
    row: dict[str, float | str] = {}
    media: list[str] = []
    for item in history.item:
        name, text = item.key or "/".join(item.nested_key), _value_json(item)
        if len(name) > MAX_NAME_CHARACTERS:
            continue
        if name.endswith("/_type"):
            media.append(name.removesuffix("_type"))
            continue
        try:
            row[name] = parse_number(text)
        except ValueError:
            value = parse_json(text)
            if isinstance(value, dict | str):
                row.update(flat_cells({name: value}))
    if "_step" not in row and history.HasField("step"):
        row["_step"] = history.step.num
    if media:
        return {name: value for name, value in row.items() if not name.startswith(tuple(media))}
    return row


def _value_json(item: Any) -> str:
    """Return an item's value as JSON; clients from 0.31 on may write it as a number instead."""
    kind = item.WhichOneof("value")
    return str(getattr(item, kind)) if kind else item.value_json


def _update_config(config: dict[str, Any], change: Any) -> None:
    for item in change.update:
        *parents, leaf = item.nested_key or [item.key]
        if len(parents) > MAX_DEPTH:
            continue
        branch = config
        for parent in parents:
            child = branch.get(parent)
            branch[parent] = child if isinstance(child, dict) else {}
            branch = branch[parent]
        branch[leaf] = parse_json(item.value_json)
    for item in change.remove:
        config.pop(item.key or "".join(item.nested_key[:1]), None)


# --- environment ---


def _add_environment(environment: dict[str, Any], record: Any) -> None:
    gpus = [gpu.name for gpu in record.gpu_nvidia] or [record.gpu_type] * min(record.gpu_count, MAX_GPUS)
    devices = [{"name": name} for name in gpus if name]
    metadata = {"python": record.python, "host": record.host, "gpu_devices": devices}
    environment.update(parse_environment(metadata, ""))


def parse_environment(metadata: Mapping[str, Any], requirements: str) -> dict[str, Any]:
    """Return a run's environment from wandb-metadata.json and requirements.txt, without unknown keys."""
    environment: dict[str, Any] = {}
    if python := (as_name(metadata.get("python")) or "").split():
        environment["python"] = python[-1]  # "CPython 3.11.7", or without the first word
    if host := as_name(metadata.get("host")):
        environment["hosts"] = [host]
    gpus = metadata.get("gpu_nvidia") or metadata.get("gpu_devices")
    if isinstance(gpus, list) and gpus:
        environment["devices"] = [
            str(as_name(gpu.get("name"))) for gpu in gpus[:MAX_GPUS] if isinstance(gpu, dict)
        ]
    elif (gpu := as_name(metadata.get("gpu"))) and isinstance(count := metadata.get("gpu_count", 1), int):
        environment["devices"] = [gpu] * min(count, MAX_GPUS)
    pins = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)$", requirements, re.MULTILINE)
    versions = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins}
    if versions:
        environment["versions"] = {
            name: versions.get(name) for name in WORDS["wandb"]["packages"] if name in versions
        }
    return environment


def read_requirements(folder: Path, notes: list[str]) -> str:
    """Return a run's requirements.txt; empty if it is missing, or with a note unreadable."""
    return (read_companion(folder, "files", "requirements.txt", notes=notes) or b"").decode(errors="replace")
