"""From the metrics a foreign trainer writes, in its own format and names, to rows of the run store."""

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

FIRST_PAUSE_S = 1.0
ALIASES_BY = 20  # logged steps, by which every metric of training has been logged
OF_VALIDATIONS = r"val|eval|test|held"
MOST_NAMED = 12
READING_SHARE = 0.05  # of the time: a log that takes long to read is read less often


class Follower:
    """Reads a growing log again when its files have changed, and says which steps are new or different.

    What the run directory holds already, of this attempt or an earlier one, is not told again: a trainer that
    goes on from a checkpoint appends to its log, one that begins anew may repeat it.
    """

    def __init__(self, log: MetricsLog, path: Path, aliases: str | Mapping[str, str], run: RunDir) -> None:
        self._log = log
        self._path = path
        self._run = run
        self._given: Mapping[str, str] = {} if isinstance(aliases, str) else aliases
        self._aliases = FRAMEWORKS[aliases] if isinstance(aliases, str) else aliases
        self._written: dict[int, Row] = {}
        self._seen: object = None
        self._next_s = 0.0
        self._longest = 0  # the last step that the log has had while it was followed
        self.problem: Reason | None = None  # why the log could not be read the last time
        self.notes: tuple[str, ...] = ()  # what reading it had to decide
        self.never_logged: list[str] = []  # what an alias given by hand names, and the log does not have
        self.text_values: dict[str, TextValues] = {}  # metric -> its values that are text
        self._logged: list[str] = []

    def skip(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take rows of the run directory as told."""
        for row in rows:
            values = {key: value for key, value in row.items() if key not in NON_METRIC_KEYS}
            self._written.setdefault(row["step"], {}).update(values)

    @property
    def rows(self) -> Mapping[int, Row]:
        """The rows by step that the run directory was given, by this attempt and earlier ones."""
        return self._written

    @property
    def found(self) -> bool:
        """Whether there have been any metrics."""
        return bool(self._written)

    @property
    def last_step(self) -> int:
        return max(self._written, default=0)

    @property
    def mistaken_alias(self) -> Reason | None:
        """An alias whose metric the log lacks by now; those of validations may come later."""
        if len(self._written) < ALIASES_BY:
            return None
        for ours, theirs in self._given.items():
            is_rare = re.search(OF_VALIDATIONS, f"{ours} {theirs}", re.IGNORECASE)
            if theirs in self.never_logged and not is_rare:
                close = difflib.get_close_matches(theirs, self._logged, 1)
                return Code.ALIAS_NOT_LOGGED(
                    name=ours,
                    metric=theirs,
                    num_steps=ALIASES_BY,
                    logged=self._logged[:MOST_NAMED],
                    num_more=max(0, len(self._logged) - MOST_NAMED),
                    close=close[0] if close else None,
                )
        return None

    def new_rows(self, *, ended: bool = False) -> list[tuple[int, Row]]:
        """Steps that are complete and new, or that got other values, in order.

        A step is complete once a later one exists, or the command has ended.
        """
        now = time.monotonic()
        if now < self._next_s and not ended:
            return []
        files = _fingerprint(self._path)
        if files == self._seen and not ended:
            return []
        self._seen = files
        try:
            if self._run.is_run_file(self._path):  # a link may lead there; the recipe's path does not
                target = os.path.realpath(self._path)
                raise StoreError(Code.METRICS_LEAD_TO_RUN_FILE(path=self._path, target=target))
            rows = self._read()
        except AbrunError as error:  # half a file, perhaps, and whole the next time
            self.problem = error.reason
            return []
        last = max(rows, default=0)
        self._longest = max(last, self._longest)
        self.problem = None
        if last < self._longest:
            self.problem = Code.METRICS_LOST_ROWS(path=self._path, step=self._longest)
        taken_s = time.monotonic() - now
        self._next_s = now + max(FIRST_PAUSE_S, taken_s / READING_SHARE)
        fresh = [
            (step, rows[step])
            for step in sorted(rows)
            if (step < last or ended) and not _same(rows[step], self._written.get(step, {}))
        ]
        for step, row in fresh:
            self._written[step] = row
        return fresh

    def _read(self) -> dict[int, Row]:
        log = read_log(self._path, self._log.format, step_column=self._log.step_column)
        self.notes = tuple(log.notes)
        self.text_values = {
            name: TextValues(at=log.unread[theirs], steps=log.dropped[theirs])
            for name, theirs in _our_names(log.dropped, self._aliases).items()
            if theirs in log.unread and name not in NON_METRIC_KEYS
        }
        self._logged = sorted(log.metrics)
        self.never_logged = sorted(set(self._given.values()) - set(log.metrics))
        rows: dict[int, Row] = {}
        for name, series in rename_metrics(log.metrics, self._aliases).items():
            if name in NON_METRIC_KEYS:
                continue
            for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
                rows.setdefault(step, {})[name] = value
        return rows


def _our_names(columns: Iterable[str], aliases: Mapping[str, str]) -> dict[str, str]:
    """Map the name that each column gets in the run directory to the column."""
    return {column: column for column in columns if column not in aliases.values()} | {
        ours: theirs for ours, theirs in aliases.items() if theirs in columns
    }


def _same(row: Row, written: Row) -> bool:
    """Whether a row tells nothing that is not written; NaN is NaN."""
    return all(
        name in written and (value == written[name] or (math.isnan(value) and math.isnan(written[name])))
        for name, value in row.items()
    )


def _fingerprint(path: Path) -> object:
    """Changes whenever a file of the log does."""
    below = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    files = [path] if is_file(path) else sorted(below)
    found = []
    for file in files:
        try:
            state = file.stat()
        except OSError:  # removed meanwhile
            continue
        found.append((file, state.st_size, state.st_mtime_ns))
    return found
