"""Rows of metrics.jsonl as series, with a cache of the parsed numbers; rows of validation.jsonl."""

import contextlib
import hashlib
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from abrun.errors import StoreError
from abrun.redaction import shortened
from abrun.regular_files import open_regular, read_regular
from abrun.series import Array, Series, Steps, from_rows
from abrun.store.access import read_error
from abrun.store.files import write_file
from abrun.store.lines import LARGEST_STEP, NOT_METRICS, problem_of, read_lines
from abrun.store.records import LARGEST_ATTEMPT

CACHE_VERSION = 2
SEAL_BYTES = 32
NOT_FINITE = (b'"NaN"', b'"Infinity"', b'"-Infinity"')


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValidationRow:
    """What a run's policy made of the held-out prompts after some step."""

    prompts_sha256: str  # pairs two runs' prompts only where it is the same
    rewards: Array  # [P] in the prompts' order
    lengths: Array  # [P] tokens of the completions


def read_metrics(path: Path, cache: Path, *, finished: bool) -> dict[str, Series]:
    """The metrics of one run. Rows of one step and attempt add up; of several attempts the last one counts.

    Parsed numbers of a finished run are kept in `cache`, which may be deleted at any time, and counts only
    while it is what was written there for these very lines. Raises StoreError naming file and line where a
    row is corrupt.
    """
    try:
        metrics = _cached(cache, path) if finished else None
        if metrics is not None:
            return metrics
        content = read_regular(path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise read_error(path, error) from None
    # without the torn last line of a writer at work, or killed
    whole = content[: content.rfind(b"\n") + 1]
    metrics = _rows_of_numbers(whole) or _rows_of_anything(path)
    if finished:
        _write_cache(cache, hashlib.sha256(content).digest(), metrics)
    return metrics


def read_validation(path: Path) -> dict[int, ValidationRow]:
    """The validations of one run by step, ascending; of several attempts the last one counts.

    Raises StoreError naming file and line where a row is corrupt.
    """
    found: dict[int, tuple[int, ValidationRow]] = {}
    for number, row in enumerate(read_lines(path), 1):
        try:
            step, attempt = row["step"], row["attempt"]
            if type(step) is not int or type(attempt) is not int or attempt >= LARGEST_ATTEMPT:
                raise ValueError(
                    f"step {shortened(step)} and attempt {shortened(attempt)} are not whole numbers"
                )
            rewards, lengths = np.array(row["rewards"], np.float64), np.array(row["lengths"], np.float64)
            if rewards.ndim != 1 or rewards.shape != lengths.shape:
                raise ValueError("rewards and lengths are lists of one number a prompt")
            validation = ValidationRow(
                prompts_sha256=str(row["prompts_sha256"]), rewards=rewards, lengths=lengths
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise StoreError(
                f"{path}, line {number}: not a validation ({type(error).__name__}: {error}); "
                "remove the line or run again"
            ) from None
        if step not in found or attempt >= found[step][0]:
            found[step] = attempt, validation
    return {step: found[step][1] for step in sorted(found)}


def _rows_of_numbers(content: bytes) -> dict[str, Series] | None:
    """The usual file, quickly: every row has the same keys, holds numbers alone, and comes after the last."""
    lines = content.splitlines()
    try:
        names = list(orjson.loads(lines[0]))
        num_strings = content.count(b'"') // 2 - len(lines) * len(names)
        if num_strings != (sum(content.count(word) for word in NOT_FINITE) if num_strings else 0):
            return None
        if "step" not in names:
            return None
        values = np.fromiter(chain.from_iterable(_values_of(lines, names)), np.float64)
    except (ValueError, TypeError, IndexError):
        return None
    if np.isnan(values).any() and (not num_strings or b"null" in content):
        return None  # null is no value, and NaN is one: the two must not be mixed up
    values = values.reshape(len(lines), len(names)).T.copy()  # [M, S]
    recorded = values[names.index("step")]
    if not (np.abs(recorded) <= LARGEST_STEP).all():
        return None
    steps = recorded.astype(np.int64)
    if (recorded != steps).any() or (np.diff(steps) <= 0).any():
        return None
    return {
        name: Series(steps, row) for name, row in zip(names, values, strict=True) if name not in NOT_METRICS
    }


def _values_of(lines: Iterable[bytes], names: list[str]) -> Iterator[Iterable[Any]]:
    """Row by row, which is quicker than holding all; ValueError at other keys."""
    for line in lines:
        row = orjson.loads(line)
        if list(row) != names:
            raise ValueError("other keys")
        yield row.values()


def _rows_of_anything(path: Path) -> dict[str, Series]:
    rows: dict[int, dict[str, Any]] = {}
    attempts: dict[int, int] = {}
    for number, row in enumerate(read_lines(path), 1):
        wrong = problem_of(row)
        if wrong:
            raise StoreError(f"{path}, line {number}: {wrong}")
        step, attempt = row["step"], row.get("attempt", 1)
        metrics = {key: value for key, value in row.items() if key not in NOT_METRICS}
        if step not in rows or attempt > attempts[step]:
            rows[step], attempts[step] = metrics, attempt
        elif attempt == attempts[step]:
            rows[step].update(metrics)
    return from_rows(sorted(rows.items()))[0]


def _cached(cache: Path, path: Path) -> dict[str, Series] | None:
    """What was kept of the lines of `path`; None where it is not whole, or of other lines."""
    try:
        content = read_regular(cache)
    except OSError:
        return None
    with open_regular(path) as lines:
        key = hashlib.file_digest(lines, "sha256").digest()
    arrays, seal = memoryview(content)[:-SEAL_BYTES], content[-SEAL_BYTES:]
    if seal != _seal(arrays, key):
        return None
    try:
        with np.load(io.BytesIO(arrays), allow_pickle=False) as stored:
            grids = [stored[f"steps-{index}"] for index in range(int(stored["num_grids"]))]
            names = orjson.loads(stored["names"].tobytes())
            values, start, metrics = stored["values"], 0, {}
            for name, grid in zip(names, stored["grid_of"].tolist(), strict=True):
                end = start + len(grids[grid])
                metrics[name] = Series(grids[grid], values[start:end])
                start = end
            return metrics
    except Exception:  # numpy, zipfile and zlib raise anything: the JSON lines are the truth
        return None


def _write_cache(cache: Path, key: bytes, metrics: Mapping[str, Series]) -> None:
    grids: dict[bytes, tuple[int, Steps]] = {}
    grid_of = []
    for series in metrics.values():
        grid, _ = grids.setdefault(series.steps.tobytes(), (len(grids), series.steps))
        grid_of.append(grid)
    arrays = {
        "names": np.frombuffer(orjson.dumps(list(metrics)), np.uint8),  # which ends no name at a NUL
        "grid_of": np.array(grid_of, dtype=np.int64),
        "num_grids": np.array(len(grids)),
        "values": np.concatenate([np.empty(0), *(series.values for series in metrics.values())]),
        **{f"steps-{index}": steps for index, steps in grids.values()},
    }
    stored = io.BytesIO()
    np.savez(stored, **arrays)
    seal = _seal(stored.getbuffer(), key)
    with contextlib.suppress(StoreError):  # a full disk, somebody else's folder: the next reader parses again
        write_file(cache, stored.getvalue() + seal, durable=False)


def _seal(arrays: memoryview, key: bytes) -> bytes:
    """Stands behind the arrays, and changes with them, with the lines they were read from, and with us."""
    return hashlib.sha256(
        b"abrun metrics %d " % CACHE_VERSION + key + hashlib.sha256(arrays).digest()
    ).digest()
