"""Reason codes: what a verdict, a check or a refusal says, as a code and values.

`abrun.messages` has the sentences. Code decides by `reason.code` and `reason.values`, never by a sentence.
Codes are part of the public contract (`verdict.json` carries them): a wording may change, a code keeps its
meaning. docs/codes.md lists all of them.
"""

from collections.abc import Mapping
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

    # Preflight checks

    # Refusals: comparing

    # Refusals: launching

    # Refusals: recipes

    # Refusals: run directories and logs


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
