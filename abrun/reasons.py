"""Reason codes: what a verdict, a check or a refusal says, as a code and values.

`abrun.messages` has the sentences. Code decides by `reason.code` and `reason.values`, never by a sentence.
Codes are part of the public contract (`verdict.json` carries them): a wording may change, a code keeps its
meaning. docs/codes.md lists all of them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum, auto
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Reason:
    """A code with the values of its sentence: numbers, text, lists and mappings of them, or reasons."""

    code: "Code"
    values: Mapping[str, Any] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.code, repr(sorted(self.values.items()))))

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def walk(self) -> "Iterator[Reason]":
        """Yield this reason and those among its values, each before its own."""
        yield self
        for value in self.values.values():
            for entry in value if isinstance(value, list) else [value]:
                if isinstance(entry, Reason):
                    yield from entry.walk()

    def map_texts(self, change: Callable[[str], str]) -> "Reason":
        """Return the reason with every text among its values changed."""
        return Reason(self.code, {name: _mapped(value, change) for name, value in self.values.items()})


class Code(StrEnum):
    """Every code, by the room that produces it. A call makes the reason: `Code.SEEDS_UNPAIRED(seeds=[3])`."""

    def __call__(self, /, **values: Any) -> Reason:
        return Reason(self, {name: _plain(value) for name, value in values.items()})

    # Verdict: what decides an arm
    NO_CLAIM = auto()
    NO_PRIMARY = auto()

    # Validity: why no verdict can be given

    # First step

    # Guards

    # Claims

    # Descriptions and not tested

    # Notes

    # Endings of runs and of their processes
    FOREIGN_TEXT = auto()
    EXIT_CODE = auto()
    KILLED = auto()
    OUT_OF_MEMORY_KILLED = auto()
    ENDED_WITHOUT_RESULT = auto()
    SEE_LOG = auto()
    SEVERAL_ERRORS = auto()
    RANK_FAILED = auto()
    EXCEPTION = auto()
    RANKS_LOST = auto()
    RANKS_NOT_FOUND = auto()
    COLLECTIVE_TIMED_OUT = auto()
    MEMORY_RAN_OUT = auto()
    NODE_LOST = auto()
    JOB_WAITS = auto()
    RUN_WAITS = auto()
    JOB_STATE = auto()
    JOB_BEGINS_OR_ENDS = auto()
    JOB_ENDED = auto()
    JOB_LEFT_NOTHING = auto()
    JOB_RUN_SILENT = auto()
    JOB_CANCELLED = auto()
    JOB_STOPPED = auto()
    JOB_NOT_IN_QUEUE = auto()
    JOB_UNKNOWN = auto()
    RESUMABLE = auto()
    RUN_REMOVED = auto()
    ATTEMPT_REMOVED = auto()
    ATTEMPT_FENCED = auto()
    LAUNCHED_BY_ANOTHER = auto()
    LAUNCHER_BEGINS = auto()
    FILE_LOCKED = auto()
    FOLDER_LOCKED = auto()
    LAUNCHER_FASTER = auto()
    LOCK_TAKEN_OVER = auto()
    TAKEN_OVER = auto()
    NO_TEMPORARY_FILES = auto()
    RANKS_NOT_STARTED = auto()
    TIME_LIMIT_REACHED = auto()
    STALL_LIMIT_REACHED = auto()
    RANKS_SILENT = auto()
    NODES_SILENT = auto()
    NO_NEW_STEP = auto()
    NO_SIGN_OF_LIFE = auto()
    STOPPED_BY_SIGNAL = auto()
    LAUNCHER_GONE = auto()
    PROCESS_GONE = auto()
    RECORD_DAMAGED = auto()
    NOT_STARTED = auto()
    WARM_START_FAILED = auto()
    FAILED_ALIKE = auto()
    RUN_DIRECTORY_GONE = auto()
    COMMAND_NOT_STARTED = auto()
    ALIAS_NOT_LOGGED = auto()
    NO_METRICS = auto()
    METRICS_UNREADABLE = auto()
    METRICS_LOST_ROWS = auto()
    METRICS_LEAD_TO_RUN_FILE = auto()

    # Preflight checks

    # Refusals: comparing

    # Refusals: launching

    # Refusals: recipes

    # Refusals: run directories and logs


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, Reason):
        return value.map_texts(change)
    if isinstance(value, Mapping):
        return {key: _mapped(entry, change) for key, entry in value.items()}
    if isinstance(value, list):
        return [_mapped(entry, change) for entry in value]
    return change(value) if isinstance(value, str) else value


def _plain(value: Any) -> Any:
    """Return a value as JSON and a process boundary can carry it. Raises TypeError for anything else."""
    if value is None or isinstance(value, str | bool | int | float | Reason):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if hasattr(value, "item"):  # a number of numpy's
        return value.item()
    raise TypeError(f"a reason cannot carry {value!r}, a {type(value).__name__}")
