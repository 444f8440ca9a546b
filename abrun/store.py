"""The run store: the only module that knows the layout of `runs/`.

    runs/<experiment>/experiment.json         resolved recipe, planned runs, hash of the compare block
    runs/<experiment>/launcher.lock           who launches it now
    runs/<experiment>/<arm>/seed-<k>[-aa<j>]/
        config.json       {experiment, arm, seed, rerun,             written by the launcher, once
                           initial_weights, config: resolved}
        meta.json         status, attempts, exit codes, git state    written by the launcher
        environment.json  versions, devices, prompt hash             written by the trainer, at every start
        heartbeat.json    step, time, pid                            written by the trainer, every step
        result.json       the run is finished                        written by the trainer, last
        metrics.jsonl     one line a step                            appended by the trainer
        events.jsonl      started, resumed, checkpoint, failed, ...  appended by the trainer
        stdout.log, checkpoints/
    runs/warm-starts/<hash>/                  a run directory too: supervised steps shared by all arms and seeds

One writer per file. Everything is a temporary file and a rename, or one append a line, so that a reader on any host
of a shared file system, at any moment, sees whole files and at most one torn last line.
"""

import contextlib
import json
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from abrun.errors import StoreError
from abrun.plan import RunName

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 1
WARM_STARTS = "warm-starts"
STALLED_AFTER_S = 600.0

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


def run_dir(experiment_dir: Path, name: RunName) -> Path:
    return experiment_dir / str(name)


# --- writing ---------------------------------------------------------------------------------------------------------


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file whole or not at all. Raises StoreError where the disk or the permissions do not allow it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("w", encoding="utf-8") as file:
                file.write(json.dumps(_encode(content), indent=1, allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise


class LineWriter:
    """Appends JSON lines, one `write()` each. Opening drops the torn last line of a writer that was killed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            os.ftruncate(self._file, _end_of_last_line(self._file))
            os.lseek(self._file, 0, os.SEEK_END)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row. A line that the disk cannot take whole is removed again before StoreError is raised."""
        line = (json.dumps(_encode(row), allow_nan=False) + "\n").encode()
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
        reason = error.strerror or str(error)
        raise StoreError(
            f"{path}: cannot be written: {reason}; free the space or choose another --runs-dir"
        ) from error


# --- reading ---------------------------------------------------------------------------------------------------------


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
    """The rows of a JSON-lines file, NaN and Inf restored. A torn last line is left out: its writer was killed.

    Raises StoreError naming file and line where any other line is corrupt.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from None
    *lines, torn = content.split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            shown = line[:40].decode(errors="replace")
            raise StoreError(
                f"{path}, line {number}: got {shown!r}; a JSON object is expected: remove the line or run again"
            )
        rows.append({key: _decode(value) for key, value in row.items()})
    return rows


def read_metrics(directory: Path) -> "pd.DataFrame":
    """The metrics of one run: index `step`, a column a key; the last attempt wins where a step was run twice."""
    import pandas as pd

    path = directory / "metrics.jsonl"
    rows: dict[int, dict[str, Any]] = {}
    for number, row in enumerate(read_lines(path), 1):
        step, attempt = row.get("step"), row.get("attempt", 1)
        if not isinstance(step, int) or not isinstance(attempt, int):
            raise StoreError(
                f"{path}, line {number}: got step {step!r}, attempt {attempt!r}; both are whole numbers"
            )
        if step not in rows or attempt >= rows[step].get("attempt", 1):
            rows[step] = row
    frame = pd.DataFrame.from_records([rows[step] for step in sorted(rows)])
    return frame.set_index("step") if len(frame) else pd.DataFrame(index=pd.Index([], name="step"))


def open_experiment(experiment_dir: Path) -> dict[str, Any]:
    """`experiment.json` of an experiment directory. Raises StoreError where there is none."""
    if not (experiment_dir / "experiment.json").is_file():
        there = sorted(p.parent.name for p in experiment_dir.parent.glob("*/experiment.json"))
        known = f"there are: {', '.join(there)}" if there else "launch a recipe first"
        raise StoreError(f"{experiment_dir}: no experiment here; {known}")
    experiment = read_json(experiment_dir / "experiment.json")
    if experiment.get("schema_version") != SCHEMA_VERSION:
        raise StoreError(
            f"{experiment_dir / 'experiment.json'}: schema_version: got {experiment.get('schema_version')!r}; "
            f"this abrun reads {SCHEMA_VERSION}"
        )
    return experiment


def planned_runs(experiment_dir: Path) -> list[RunName]:
    """The runs of an experiment, in launch order."""
    return [RunName(**run) for run in open_experiment(experiment_dir)["runs"]]


def run_state(experiment_dir: Path, name: RunName) -> RunState:
    """What one run is doing. Done means `result.json`; running with a stale heartbeat means stalled."""
    directory = run_dir(experiment_dir, name)
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
    """The attempt that owns a run directory: the fence that a process of an older attempt must not write past."""
    return len(_read_or_empty(directory / "meta.json").get("attempts", [])) or 1


# --- one launcher at a time ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def launcher_lock(experiment_dir: Path) -> Iterator[str | None]:
    """Own an experiment while launching it; yields a note where a dead launcher's lock was taken over.

    Raises StoreError naming the owner where another launcher is alive, or lives on another host and may be.
    """
    path = experiment_dir / "launcher.lock"
    note = None
    with explained(path):
        experiment_dir.mkdir(parents=True, exist_ok=True)
    mine = {"pid": os.getpid(), "host": socket.gethostname(), "started_s": time.time()}
    while True:
        try:
            with explained(path):
                file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
                os.write(file, json.dumps(mine).encode())
                os.close(file)
            break
        except StoreError as error:
            if not isinstance(error.__cause__, FileExistsError):
                raise
        owner = _read_or_empty(path)
        if _may_be_alive(owner):
            raise StoreError(
                f"{path}: process {owner.get('pid', '?')} on host {owner.get('host', '?')} launches this experiment; "
                "wait for it or stop it, and delete this file only if that process is gone"
            )
        note = f"took over the lock of process {owner.get('pid', '?')}, which is gone"
        path.unlink(missing_ok=True)
    try:
        yield note
    finally:
        path.unlink(missing_ok=True)


def _may_be_alive(owner: Mapping[str, Any]) -> bool:
    pid = owner.get("pid")
    if not isinstance(pid, int) or owner.get("host") != socket.gethostname():
        return bool(owner)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


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


def _encode(value: Any) -> Any:
    """JSON has no NaN and Inf: they are kept as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    return value


def _decode(value: Any) -> Any:
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value
