"""One run as logged by some framework: the result of every reader in this package."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from abrun.errors import StoreError
from abrun.logs.foreign.values import Points
from abrun.messages.codes import Reason
from abrun.runs.files import UnreadableError
from abrun.runs.layout import RunName
from abrun.runs.metric_names import is_clock, is_counter
from abrun.runs.redaction import display_safe, display_safe_tree, printable
from abrun.stats.series import Series, build_series

# What the positions of a run's series are. A table of final scores has one value per metric, at step 0.
Axis = Literal["steps", "final", "prompts"]
LogStatus = Literal["finished", "failed", "running", "unreadable", "unknown"]
NOTHING_RECORDED = "nothing is recorded in it yet"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunRecording:
    """Content of a run that any kind of source can provide."""

    place: str  # the location it was read from, for messages
    metrics: Mapping[str, Series]
    standard_errors: Mapping[str, float] = field(default_factory=dict)  # metric -> of its only value
    axis: Axis = "steps"
    failure: str = ""  # how a failed run ended, or why it cannot be read
    forbidden: bool = False  # unreadable because permission is missing, not because of damage
    config: Mapping[str, Any] | None = None  # resolved, dotted keys; None: unknown
    environment: Mapping[str, Any] | None = None  # versions, devices, prompts, hosts, as far as known
    code: tuple[str, ...] = ()  # code versions of its attempts, in order; empty: unknown
    unread: Mapping[str, str] = field(default_factory=dict)  # column -> its first text, position and fix
    dropped: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # metric -> steps with a text value

    def recording_fields(self) -> dict[str, Any]:
        """Return these fields of a run by name."""
        return {field_.name: getattr(self, field_.name) for field_ in fields(RunRecording)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Log(RunRecording):
    """One run as logged by some framework."""

    name: str  # for naming rules: the path relative to its source, or wandb's run name
    status: LogStatus = "unknown"  # unknown: the source does not record whether it finished
    group: str | None = None  # wandb's
    job_type: str | None = None  # wandb's
    run_id: str | None = None  # wandb's: a resumed run has several files with the same id
    identity: RunName | None = None  # stated by its own files (a run directory of abrun)
    guesses: tuple[str, ...] = ()  # assumptions about its file format
    left_out: tuple[Reason, ...] = ()  # starts of the run that do not count
    is_part: bool = False  # one of several files of a run; files with the same name are merged
    notes: tuple[str, ...] = ()  # decisions while reading: a torn line skipped, a step recorded twice


def unreadable_log(name: str, path: Path, error: StoreError, identity: RunName | None = None) -> Log:
    """Return the log of a run whose files cannot be read."""
    return Log(
        name=name,
        place=printable(str(path)),
        metrics={},
        status="unreadable",
        failure=str(error),
        forbidden=isinstance(error, UnreadableError),
        identity=identity,
    )


def unite_logs(logs: Sequence[Log], **changes: Any) -> Log:
    """Return the first of a run's logs with the settings and notes of all; `changes`: its other fields.

    Of two settings the one in the earlier log counts.
    """
    merged: dict[str, Any] = {
        name: {key: value for log in reversed(logs) for key, value in (getattr(log, name) or {}).items()}
        for name in ("metrics", "standard_errors", "config", "unread", "dropped")
    }
    merged |= {
        name: tuple(dict.fromkeys(line for log in logs for line in getattr(log, name)))
        for name in ("guesses", "left_out", "notes")
    }
    return replace(logs[0], **{**merged, "config": merged["config"] or None, **changes})


def sanitize_log(log: Log) -> Log:
    """Return a log with all texts from files made safe to print."""
    return replace(
        log,
        **sanitize_recording(log.recording_fields()),
        name=printable(log.name),
        job_type=log.job_type and printable(log.job_type),
        group=log.group and printable(log.group),
        guesses=tuple(map(printable, log.guesses)),
        notes=tuple(map(printable, log.notes)),
    )


def sanitize_recording(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a RunRecording with all texts from files made safe to print."""
    return {
        **fields,
        "place": printable(fields["place"]),
        "failure": display_safe(fields["failure"]),
        "config": fields["config"] and display_safe_tree(fields["config"]),
        "environment": fields["environment"] and display_safe_tree(fields["environment"]),
        "metrics": {display_safe(name): series for name, series in fields["metrics"].items()},
        "code": tuple(map(display_safe, fields["code"])),
        "unread": {display_safe(name): display_safe(where) for name, where in fields["unread"].items()},
        "dropped": {display_safe(name): steps for name, steps in fields["dropped"].items()},
    }


def collect_points(points: Mapping[str, Points]) -> tuple[dict[str, Series], list[str]]:
    """Return the series of each metric's points, and a note as `collect_series` does."""
    return collect_series({name: build_series(p.steps, p.values) for name, p in points.items()})


def collect_series(built: Mapping[str, tuple[Series, int]]) -> tuple[dict[str, Series], list[str]]:
    """Return what `build_series` returned for each metric, and a note on points that later ones replaced.

    Clocks and counters go on from a row of training to a row of evaluation at the same step: no replacement.
    """
    num_replaced = sum(num for name, (_, num) in built.items() if not (is_clock(name) or is_counter(name)))
    points, verb = ("point", "was") if num_replaced == 1 else ("points", "were")
    note = f"{num_replaced} {points} {verb} recorded again at the same step; the last counts"
    return {name: series for name, (series, _) in built.items()}, [note] * bool(num_replaced)


def missing_package_error(path: Path | str, package: str, to_install: str) -> StoreError:
    return StoreError(
        f"{printable(str(path))}: reading it requires the package {package}; run: pip install {to_install}"
    )
