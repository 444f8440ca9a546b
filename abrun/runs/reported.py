"""The verdict in an experiment's report, as far as other commands show it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from abrun.runs.files import read_as
from abrun.runs.layout import REPORT, RESULT, VERDICT
from abrun.runs.records import RunState
from abrun.runs.regular_files import is_file
from abrun.runs.schemas import ExitCode


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredVerdict:
    """The fields of verdict.json that are the same in every schema version."""

    verdict: Literal["MATCH", "PASS", "MISMATCH", "FAIL", "INCONCLUSIVE", "INVALID"]
    exit_code: ExitCode


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedVerdict:
    """The verdict of a report, its exit code, and when it was written (seconds since 1970)."""

    verdict: str  # of verdict.json, or DESCRIPTION if there is no claim
    exit_code: int
    written_s: float

    def is_older_than(self, states: Sequence[RunState]) -> bool:
        """Return True if a run started or finished after the report was written.

        A copy of the experiment has new times of files, and another host may have another clock: a run has
        finished later only if both say so.
        """
        return any(max(state.started_s or 0.0, _finished_s(state)) > self.written_s for state in states)


def read_reported_verdict(experiment_dir: Path) -> ReportedVerdict | None:
    """Return the verdict of the report in an experiment's directory; None if there is no report.

    Raises StoreError if the file is damaged.
    """
    path = experiment_dir / REPORT / VERDICT
    if not is_file(path):
        return None
    stored = read_as(_StoredVerdict, path)
    is_description = stored.verdict == "INCONCLUSIVE" and stored.exit_code == 0
    return ReportedVerdict(
        verdict="DESCRIPTION" if is_description else stored.verdict,
        exit_code=stored.exit_code,
        written_s=_modified_s(path),
    )


def _finished_s(state: RunState) -> float:
    modified_s = _modified_s(state.directory / RESULT)
    return modified_s if state.ended_s is None else min(modified_s, state.ended_s)


def _modified_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
