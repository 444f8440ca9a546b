"""Follows a foreign trainer's metrics, in its own format and names, and turns them into rows of a run."""

import difflib
import math
import os
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from abrun.errors import AbrunError, StoreError
from abrun.logs import read_log
from abrun.logs.aliases import FRAMEWORKS, rename_metrics
from abrun.reasons import Code, Reason
from abrun.recipe.command import MetricsLog
from abrun.regular_files import is_file
from abrun.runs.lines import NON_METRIC_KEYS
from abrun.runs.records import TextValues
from abrun.runs.rundir import RunDir

Row = dict[str, float]

MIN_PAUSE_S = 1.0
# By this many logged steps, a trainer has logged every training metric at least once.
ALIAS_CHECK_STEPS = 20
VALIDATION_NAMES = r"val|eval|test|held"
MAX_NAMED = 12
# Share of time spent on reading: a log that takes long to read is read less often.
MAX_READING_SHARE = 0.05


class MetricsFollower:
    """Rereads a growing log whenever its files have changed, and returns new or changed steps.

    Steps that the run directory already has, from this attempt or an earlier one, are not returned again: a
    trainer that resumes from a checkpoint appends to its log, one that starts over may repeat it.
    """

    def __init__(self, log: MetricsLog, path: Path, aliases: str | Mapping[str, str], run: RunDir) -> None:
        self._log = log
        self._path = path
        self._run = run
        self._declared_aliases: Mapping[str, str] = {} if isinstance(aliases, str) else aliases
        self._aliases = FRAMEWORKS[aliases] if isinstance(aliases, str) else aliases
        self._written: dict[int, Row] = {}
        self._last_fingerprint: object = None
        self._next_read_s = 0.0
        self._max_step = 0  # highest step seen in the log so far
        self.problem: Reason | None = None  # why the last read failed
        self.notes: tuple[str, ...] = ()  # choices made while reading
        self.never_logged: list[str] = []  # metrics of declared aliases that the log lacks
        self.text_values: dict[str, TextValues] = {}  # by metric
        self._logged: list[str] = []

    def mark_written(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Mark rows of the run directory as written, so that they are not returned again."""
        for row in rows:
            values = {key: value for key, value in row.items() if key not in NON_METRIC_KEYS}
            self._written.setdefault(row["step"], {}).update(values)

    @property
    def rows(self) -> Mapping[int, Row]:
        """Rows of the run directory by step, written by this attempt or earlier ones."""
        return self._written

    @property
    def has_metrics(self) -> bool:
        """Return True if any metrics have been read."""
        return bool(self._written)

    @property
    def last_step(self) -> int:
        return max(self._written, default=0)

    @property
    def mistaken_alias(self) -> Reason | None:
        """Return the first alias whose metric should have been logged by now, or None.

        Metrics of validation may come later and are not checked.
        """
        if len(self._written) < ALIAS_CHECK_STEPS:
            return None
        for ours, theirs in self._declared_aliases.items():
            is_rare = re.search(VALIDATION_NAMES, f"{ours} {theirs}", re.IGNORECASE)
            if theirs in self.never_logged and not is_rare:
                close = difflib.get_close_matches(theirs, self._logged, 1)
                return Code.ALIAS_NOT_LOGGED(
                    name=ours,
                    metric=theirs,
                    num_steps=ALIAS_CHECK_STEPS,
                    logged=self._logged[:MAX_NAMED],
                    num_more=max(0, len(self._logged) - MAX_NAMED),
                    close=close[0] if close else None,
                )
        return None

    def new_rows(self, *, has_ended: bool = False) -> list[tuple[int, Row]]:
        """Return complete steps that are new or have new values, in order.

        A step is complete once a later one exists or the command has ended.
        """
        now = time.monotonic()
        if now < self._next_read_s and not has_ended:
            return []
        fingerprint = _fingerprint_files(self._path)
        if fingerprint == self._last_fingerprint and not has_ended:
            return []
        self._last_fingerprint = fingerprint
        try:
            # The recipe's path does not name a run file, but a link may lead to one.
            if self._run.is_run_file(self._path):
                target = os.path.realpath(self._path)
                raise StoreError(Code.METRICS_LEAD_TO_RUN_FILE(path=self._path, target=target))
            rows = self._read()
        except AbrunError as error:  # perhaps a half-written file that the next read finds complete
            self.problem = error.reason
            return []
        last_step = max(rows, default=0)
        self._max_step = max(last_step, self._max_step)
        self.problem = None
        if last_step < self._max_step:
            self.problem = Code.METRICS_LOST_ROWS(path=self._path, step=self._max_step)
        read_time_s = time.monotonic() - now
        self._next_read_s = now + max(MIN_PAUSE_S, read_time_s / MAX_READING_SHARE)
        changed_rows = [
            (step, rows[step])
            for step in sorted(rows)
            if (step < last_step or has_ended) and not _is_written(rows[step], self._written.get(step, {}))
        ]
        for step, row in changed_rows:
            self._written[step] = row
        return changed_rows

    def _read(self) -> dict[int, Row]:
        log = read_log(self._path, self._log.format, step_column=self._log.step_column)
        self.notes = tuple(log.notes)
        self.text_values = {
            name: TextValues(at=log.unread[theirs], steps=log.dropped[theirs])
            for name, theirs in _map_names(log.dropped, self._aliases).items()
            if theirs in log.unread and name not in NON_METRIC_KEYS
        }
        self._logged = sorted(log.metrics)
        self.never_logged = sorted(set(self._declared_aliases.values()) - set(log.metrics))
        rows: dict[int, Row] = {}
        for name, series in rename_metrics(log.metrics, self._aliases).items():
            if name in NON_METRIC_KEYS:
                continue
            for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
                rows.setdefault(step, {})[name] = value
        return rows


def _map_names(columns: Iterable[str], aliases: Mapping[str, str]) -> dict[str, str]:
    """Map each column's name in the run directory to the column."""
    return {column: column for column in columns if column not in aliases.values()} | {
        ours: theirs for ours, theirs in aliases.items() if theirs in columns
    }


def _is_written(row: Row, written: Row) -> bool:
    """Return True if all values of a row are already written. NaN equals NaN."""
    return all(
        name in written and (value == written[name] or (math.isnan(value) and math.isnan(written[name])))
        for name, value in row.items()
    )


def _fingerprint_files(path: Path) -> object:
    """Return a value that changes whenever a file of the log changes."""
    files_below = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    files = [path] if is_file(path) else sorted(files_below)
    states = []
    for file in files:
        try:
            state = file.stat()
        except OSError:  # just removed
            continue
        states.append((file, state.st_size, state.st_mtime_ns))
    return states
