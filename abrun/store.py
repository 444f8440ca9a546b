"""The run store: the only module that knows the layout of `runs/`.

    runs/<experiment>/experiment.json         resolved recipe, planned runs, hash of the compare block
    runs/<experiment>/reference.json          a copy of the frozen ensemble that the recipe names, if any
    runs/<experiment>/launcher.lock           who launches it now
    runs/<experiment>/<arm>/seed-<k>[-aa<j>]/
        config.json       {experiment, arm, seed, rerun,             written by the launcher, once
                           initial_weights, config: resolved}
        meta.json         status, attempts, exit codes, git state    written by the launcher
        environment.json  versions, devices, precision, prompt hash  written by the trainer, at every start
        heartbeat.json    step, time, pid                            written by the trainer, every step
        result.json       the run is finished                        written by the trainer, last
        metrics.jsonl     one line a step                            appended by the trainer
        events.jsonl      started, resumed, checkpoint, failed, ...  appended by the trainer
        validation.jsonl  one line a validation, prompt by prompt    appended by the trainer
        metrics.npz       a cache of metrics.jsonl                   written by whoever compares
        stdout.log, checkpoints/
    runs/warm-starts/<hash>/                  a run directory too: steps shared by all arms and seeds

One writer per file. Everything is a temporary file and a rename, or one append a line, so that a reader on
any host of a shared file system, at any moment, sees whole files and at most one torn last line.
"""

import contextlib
import fcntl
import json
import math
import multiprocessing
import os
import socket
import threading
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson

from abrun.errors import StoreError
from abrun.plan import RunName
from abrun.series import Array, Series, Steps, from_rows

SCHEMA_VERSION = 1
WARM_STARTS = "warm-starts"
LOCK = "launcher.lock"
REFERENCE = "reference.json"
STALLED_AFTER_S = 600.0
METRICS_CACHE = "metrics.npz"
VALIDATION = "validation.jsonl"
CACHE_VERSION = 1
NOT_METRICS = ("step", "attempt", "time_s")
NOT_FINITE = (b'"NaN"', b'"Infinity"', b'"-Infinity"')
WORTH_A_PROCESS = 1 << 26  # bytes of JSON lines that are quicker read by several processes

Status = Literal["pending", "running", "stalled", "finished", "failed", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """What a run is doing, read from its directory."""

    name: RunName
    directory: Path
    status: Status
    step: int
    num_steps: int
    message: str | None  # why it failed, where that is known


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValidationRow:
    """What a run's policy made of the held-out prompts after some step."""

    prompts_sha256: str  # pairs two runs' prompts only where it is the same
    rewards: Array  # [P] in the prompts' order
    lengths: Array  # [P] tokens of the completions


def run_dir(experiment_dir: Path, name: RunName) -> Path:
    return experiment_dir / str(name)


# --- writing ---


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file whole or not at all. Raises StoreError where disk or permissions do not allow it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("w", encoding="utf-8") as file:
                file.write(json.dumps(encode(content), indent=1, allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise


class LineWriter:
    """Appends JSON lines, one `write()` each. Opening drops the torn last line of a killed writer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            os.ftruncate(self._file, _end_of_last_line(self._file))
            os.lseek(self._file, 0, os.SEEK_END)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row. A line that the disk cannot take whole is removed before StoreError is raised."""
        line = (json.dumps(encode(row), allow_nan=False) + "\n").encode()
        start = os.lseek(self._file, 0, os.SEEK_END)
        with explained(self.path):
            if os.write(self._file, line) < len(line):
                os.ftruncate(self._file, start)
                raise OSError("no space for the whole line")

    def close(self) -> None:
        os.close(self._file)


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns an operating-system error about `path` into one StoreError line."""
    try:
        yield
    except OSError as error:
        in_the_way = isinstance(error, FileExistsError | NotADirectoryError)
        reason = "a file is where a folder has to be" if in_the_way else error.strerror or str(error)
        raise StoreError(
            f"{path}: cannot be written: {reason}; free the space or choose another --runs-dir"
        ) from error


# --- reading ---


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of the store. Raises StoreError where it is missing or not a JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StoreError(f"{path}: no such file; is this a run directory of abrun?") from None
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(content, dict):
        raise StoreError(f"{path}: got {type(content).__name__}; a JSON object is expected")
    return content


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All rows of a JSON-lines file; see LineReader."""
    return LineReader(path).read()


class LineReader:
    """Follows a JSON-lines file: each `read()` returns the rows appended since, NaN and Inf restored.

    A torn last line (of a writer at work, or killed) is left for later. Raises StoreError naming file and
    line where any other line is corrupt.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._num_lines = 0

    def read(self) -> list[dict[str, Any]]:
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be read: {error.strerror}") from None
        *lines, torn = content.split(b"\n")
        rows = [self._parse(line, number) for number, line in enumerate(lines, self._num_lines + 1)]
        self._offset += len(content) - len(torn)
        self._num_lines += len(lines)
        return rows

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            row = orjson.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            shown = line[:40].decode(errors="replace")
            raise StoreError(
                f"{self.path}, line {number}: got {shown!r}; a JSON object is expected: "
                "remove the line or run again"
            )
        return {key: decode(value) for key, value in row.items()}


def read_metrics(directory: Path) -> dict[str, Series]:
    """The metrics of one run. Rows of one step and attempt add up; of several attempts the last one counts.

    Parsed numbers of a finished run are kept in a cache beside the file, which may be deleted at any time.
    Raises StoreError naming file and line where a row is corrupt.
    """
    path, cache = directory / "metrics.jsonl", directory / METRICS_CACHE
    key = _cache_key(path)
    if key is None:
        return {}
    metrics = _cached(cache, key)
    if metrics is None:
        metrics = _parsed(path)
        if (directory / "result.json").is_file():
            _write_cache(cache, key, metrics)
    return metrics


def read_validation(directory: Path) -> dict[int, ValidationRow]:
    """The validations of one run by step, ascending; of several attempts the last one counts.

    Raises StoreError naming file and line where a row is corrupt.
    """
    path = directory / VALIDATION
    found: dict[int, tuple[int, ValidationRow]] = {}
    for number, row in enumerate(read_lines(path), 1):
        try:
            step, attempt = int(row["step"]), int(row["attempt"])
            rewards, lengths = np.array(row["rewards"], np.float64), np.array(row["lengths"], np.float64)
            if rewards.ndim != 1 or rewards.shape != lengths.shape:
                raise ValueError("rewards and lengths are lists of one number a prompt")
            validation = ValidationRow(
                prompts_sha256=str(row["prompts_sha256"]), rewards=rewards, lengths=lengths
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(
                f"{path}, line {number}: not a validation ({type(error).__name__}: {error}); "
                "remove the line or run again"
            ) from None
        if step not in found or attempt >= found[step][0]:
            found[step] = attempt, validation
    return {step: found[step][1] for step in sorted(found)}


def read_metrics_of(directories: Sequence[Path]) -> list[dict[str, Series]]:
    """`read_metrics` of many runs, on all cores where files are large and this process has no threads."""
    uncached = [one / "metrics.jsonl" for one in directories if not (one / METRICS_CACHE).is_file()]
    large = sum(path.stat().st_size for path in uncached if path.is_file()) > WORTH_A_PROCESS
    if not large or not can_fork():
        return [read_metrics(one) for one in directories]
    with multiprocessing.get_context("fork").Pool(min(len(directories), os.cpu_count() or 1)) as pool:
        return pool.map(read_metrics, directories, chunksize=1)


def can_fork() -> bool:
    """Whether a copy of this process can do some of its work: not where threads may hold locks."""
    return threading.active_count() == 1 and "fork" in multiprocessing.get_all_start_methods()


def _cache_key(path: Path) -> list[int] | None:
    """Changes with the file; None where there is none."""
    try:
        state = path.stat()
    except FileNotFoundError:
        return None
    return [CACHE_VERSION, state.st_size, state.st_mtime_ns]


def _parsed(path: Path) -> dict[str, Series]:
    content = path.read_bytes()
    content = content[: content.rfind(b"\n") + 1]  # without the torn last line of a writer at work, or killed
    return _rows_of_numbers(content) or _rows_of_anything(path)


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
    steps = values[names.index("step")].astype(np.int64)
    if (values[names.index("step")] != steps).any() or (np.diff(steps) <= 0).any():
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
        step, attempt = row.get("step"), row.get("attempt", 1)
        if type(step) is not int or type(attempt) is not int:
            raise StoreError(
                f"{path}, line {number}: got step {step!r}, attempt {attempt!r}; both are whole numbers"
            )
        metrics = {key: value for key, value in row.items() if key not in NOT_METRICS}
        wrong = [key for key, value in metrics.items() if not isinstance(value, int | float | None)]
        if wrong:
            raise StoreError(
                f"{path}, line {number}: {wrong[0]}: got {metrics[wrong[0]]!r}; a number is expected: "
                "mend the trainer that wrote it and run again"
            )
        if step not in rows or attempt > attempts[step]:
            rows[step], attempts[step] = metrics, attempt
        elif attempt == attempts[step]:
            rows[step].update(metrics)
    return from_rows(sorted(rows.items()))[0]


def _cached(cache: Path, key: list[int]) -> dict[str, Series] | None:
    try:
        with np.load(cache, allow_pickle=False) as stored:
            if stored["key"].tolist() != key:
                return None
            grids = [stored[f"steps-{index}"] for index in range(int(stored["num_grids"]))]
            owners = zip(stored["names"].tolist(), stored["grid_of"].tolist(), strict=True)
            values, start, metrics = stored["values"], 0, {}
            for name, grid in owners:
                end = start + len(grids[grid])
                metrics[name] = Series(grids[grid], values[start:end])
                start = end
            return metrics
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None  # none there, another version's, or torn: the JSON lines are the truth


def _write_cache(cache: Path, key: list[int], metrics: Mapping[str, Series]) -> None:
    grids: dict[bytes, tuple[int, Steps]] = {}
    grid_of = []
    for series in metrics.values():
        grid, _ = grids.setdefault(series.steps.tobytes(), (len(grids), series.steps))
        grid_of.append(grid)
    content = {
        "key": np.array(key),
        "names": np.array(list(metrics), dtype=str),
        "grid_of": np.array(grid_of, dtype=np.int64),
        "num_grids": np.array(len(grids)),
        "values": np.concatenate([np.empty(0), *(series.values for series in metrics.values())]),
        **{f"steps-{index}": steps for index, steps in grids.values()},
    }
    partial = cache.with_name(f".{cache.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            np.savez(file, **content)
        partial.replace(cache)
    except OSError:  # a full disk or somebody else's folder: the next reader parses again
        partial.unlink(missing_ok=True)


def open_experiment(experiment_dir: Path) -> dict[str, Any]:
    """`experiment.json` of an experiment directory. Raises StoreError where there is none."""
    if not (experiment_dir / "experiment.json").is_file():
        there = sorted(p.parent.name for p in experiment_dir.parent.glob("*/experiment.json"))
        known = f"there are: {', '.join(there)}" if there else "launch a recipe first"
        raise StoreError(f"{experiment_dir}: no experiment here; {known}")
    experiment = read_json(experiment_dir / "experiment.json")
    if experiment.get("schema_version") != SCHEMA_VERSION:
        raise StoreError(
            f"{experiment_dir / 'experiment.json'}: schema_version: "
            f"got {experiment.get('schema_version')!r}; this abrun reads {SCHEMA_VERSION}"
        )
    return experiment


def find_experiment(experiment: str, runs_dir: Path) -> Path:
    """The directory of an experiment given as a path or as a name; whether there is one, others find out."""
    named, path = runs_dir / experiment, Path(experiment)
    here = next((each for each in (named, path) if (each / "experiment.json").is_file()), None)
    return here or (path if "/" in experiment else named)


def planned_runs(experiment_dir: Path) -> list[RunName]:
    """The runs of an experiment, in launch order."""
    return [RunName(**run) for run in open_experiment(experiment_dir)["runs"]]


def run_state(experiment_dir: Path, name: RunName) -> RunState:
    """What one run is doing. Done means `result.json`; running with a stale heartbeat means stalled."""
    return _state_of(run_dir(experiment_dir, name), name)


def warm_start_states(experiment_dir: Path) -> list[RunState]:
    """What the supervised runs behind an experiment's initial weights are doing."""
    directories: dict[Path, None] = {}
    for name in planned_runs(experiment_dir):
        directory = run_dir(experiment_dir, name)
        initial_weights = _read_or_empty(directory / "config.json").get("initial_weights")
        if initial_weights:  # .../warm-starts/<hash>/checkpoints/final
            directories[Path(os.path.normpath(directory / initial_weights)).parent.parent] = None
    return [_state_of(directory, RunName(arm="warm-start", seed=0)) for directory in directories]


def _state_of(directory: Path, name: RunName) -> RunState:
    num_steps = _read_or_empty(directory / "config.json").get("config", {}).get("steps", 0)
    heartbeat = _read_or_empty(directory / "heartbeat.json")
    meta = _read_or_empty(directory / "meta.json")
    status: Status = meta.get("status", "pending")
    if (directory / "result.json").is_file():
        status = "finished"
    elif status == "running":
        started = meta["attempts"][-1]["started_s"] if meta.get("attempts") else 0.0
        if time.time() - max(started, heartbeat.get("time_s", 0.0)) > STALLED_AFTER_S:
            status = "stalled"
    message = meta.get("message") if status in ("failed", "interrupted") else None
    return RunState(
        name=name,
        directory=directory,
        status=status,
        step=heartbeat.get("step", 0),
        num_steps=num_steps,
        message=message,
    )


def current_attempt(directory: Path) -> int:
    """The attempt that owns a run directory: a fence that processes of older attempts must not write past."""
    return len(_read_or_empty(directory / "meta.json").get("attempts", [])) or 1


# --- one launcher at a time ---


class Locked(StoreError):
    """Another launcher owns the directory."""


@contextlib.contextmanager
def launcher_lock(directory: Path) -> Iterator[str | None]:
    """Own an experiment (or a warm start) while launching it; yields a note on a lock that a dead one left.

    Alive is who holds the kernel's lock on the file, which no dead process does: a reused process id or an
    empty file cannot mislead. What the file says is for people, and for other hosts, where the kernel's lock
    may not reach. Raises Locked naming the owner where it is alive, or lives on another host and may be.
    """
    path = directory / LOCK
    with explained(path):
        directory.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        owner = _lock_owner(os.pread(file, 4096, 0))
        if _is_held(file, owner):
            raise Locked(
                f"{path}: {_describe(owner)} launches this experiment; wait for it or stop it, "
                "and delete this file only if that process is gone"
            )
        mine = {"pid": os.getpid(), "host": socket.gethostname(), "started_s": time.time()}
        with explained(path):
            os.ftruncate(file, 0)
            try:
                os.pwrite(file, json.dumps(mine).encode(), 0)
            except OSError:
                path.unlink()  # a full disk: leave no empty file behind
                raise
        try:
            yield f"took over the lock of {_describe(owner)}, which is gone" if owner else None
        finally:
            with contextlib.suppress(OSError):
                os.ftruncate(file, 0)  # not unlinked: a waiting launcher may have it open
    finally:
        os.close(file)


def launcher_of(directory: Path) -> str | None:
    """Who launches an experiment now, for people; None where nobody does."""
    try:
        owner = _lock_owner((directory / LOCK).read_bytes())
    except OSError:
        return None
    alive = owner.get("host") != socket.gethostname() or _exists(owner.get("pid"))
    return _describe(owner) if owner and alive else None


def _lock_owner(content: bytes) -> dict[str, Any]:
    try:
        owner = json.loads(content)
    except ValueError:
        return {}  # nobody, or a writer that died before its first byte
    return owner if isinstance(owner, dict) else {}


def _is_held(file: int, owner: Mapping[str, Any]) -> bool:
    """Whether somebody else owns the lock; where nobody does, the caller now holds the kernel's lock."""
    elsewhere = owner.get("host", socket.gethostname()) != socket.gethostname()
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks: go by the process
        return elsewhere or _exists(owner.get("pid"))
    return elsewhere


def _exists(pid: Any) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, TypeError):
        return False
    except PermissionError:
        return True
    return True


def _describe(owner: Mapping[str, Any]) -> str:
    return f"process {owner['pid']} on host {owner.get('host')}" if "pid" in owner else "another process"


def _read_or_empty(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _end_of_last_line(file: int) -> int:
    """Where the last whole line of a file ends."""
    end = os.lseek(file, 0, os.SEEK_END)
    while end > 0:
        start = max(0, end - 65536)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def encode(value: Any) -> Any:
    """JSON has no NaN and Inf: they are kept as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    return value


def decode(value: Any) -> Any:
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value
