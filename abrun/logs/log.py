"""One run as some framework logged it: what every reader of this package returns."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from abrun.errors import StoreError
from abrun.reasons import Reason
from abrun.redaction import display_safe, display_safe_tree, printable
from abrun.runs.access import unreadable_error
from abrun.runs.layout import RunName
from abrun.stats.series import Series

LogStatus = Literal["finished", "failed", "running", "unreadable", "unknown"]
EMPTY = "nothing is recorded in it yet"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recording:
    """What any source says of a run."""

    place: str  # where it was read, for people
    metrics: Mapping[str, Series]
    failure: str = ""  # how it ended, where it failed; why it cannot be read
    config: Mapping[str, Any] | None = None  # resolved, dotted keys; None: the source does not say
    environment: Mapping[str, Any] | None = None  # versions, devices, prompts, hosts, as far as it says
    code: tuple[str, ...] = ()  # commit and changes that its attempts ran, in order; empty: not known
    unread: Mapping[str, str] = field(default_factory=dict)  # column -> its first text, where, and what to do
    dropped: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # metric -> steps with text in it

    def recording(self) -> dict[str, Any]:
        """Return these fields of a run by name."""
        return {known.name: getattr(self, known.name) for known in fields(Recording)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Log(Recording):
    """One run as some framework logged it."""

    name: str  # what naming rules match: the path relative to its source, or wandb's run name
    status: LogStatus = "unknown"  # unknown: the source does not say whether it finished
    group: str | None = None  # wandb's
    job_type: str | None = None  # wandb's
    run_id: str | None = None  # wandb's: a resumed run is several files of one id
    identity: RunName | None = None  # as its own files state it: a run directory of abrun
    guesses: tuple[str, ...] = ()  # what its file was taken for, where it does not say
    left_out: tuple[Reason, ...] = ()  # each start of the run that does not count
    part: bool = False  # of a run that several files of a folder hold, by its name
    notes: tuple[str, ...] = ()  # what reading it had to decide: a torn line left out, a step recorded twice


def cleaned(log: Log) -> Log:
    """A log whose names came from files, made safe to print."""
    return replace(
        log,
        name=printable(log.name),
        place=printable(log.place),
        failure=display_safe(log.failure),
        config=log.config and display_safe_tree(log.config),
        environment=log.environment and display_safe_tree(log.environment),
        metrics={display_safe(name): series for name, series in log.metrics.items()},
        code=tuple(map(display_safe, log.code)),
        job_type=printable(log.job_type) if log.job_type else None,
        group=printable(log.group) if log.group else None,
        guesses=tuple(printable(guess) for guess in log.guesses),
        notes=tuple(printable(note) for note in log.notes),
        unread={display_safe(name): display_safe(where) for name, where in log.unread.items()},
        dropped={display_safe(name): steps for name, steps in log.dropped.items()},
    )


def left_out(num_replaced: int) -> list[str]:
    """The note on points that a later one replaced."""
    if not num_replaced:
        return []
    points, were = ("point", "was") if num_replaced == 1 else ("points", "were")
    return [f"{num_replaced} {points} {were} recorded again at the same step; the last counts"]


def listed(names: list[str], most: int = 5) -> str:
    """Some names for an error message, in quotes and on one line."""
    shown = ", ".join(f"'{printable(name[:80])}'" for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns an operating-system error about `path` into one StoreError line."""
    try:
        yield
    except PermissionError:
        raise unreadable_error(path) from None
    except OSError as error:
        raise StoreError(f"{printable(str(path))}: cannot be read: {error.strerror or error}") from None


def needs_package(path: Path | str, package: str, to_install: str) -> StoreError:
    return StoreError(
        f"{printable(str(path))}: reading it needs the package {package}, which is not installed; "
        f"run: pip install {to_install}"
    )
