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
    OF_ARM = auto()
    MORE_FAULTS = auto()
    GRIDS_APART = auto()
    FIRST_STEP_MISSING = auto()
    GUARD_FAILS = auto()
    GUARD_OPEN = auto()
    ONE_RUN_EACH = auto()
    POST_HOC = auto()
    UNCODED = auto()

    # Validity: why no verdict can be given

    # First step
    STEP_ONE_DIFFERS = auto()
    STEP_ONE_OPEN = auto()

    # Guards

    # Claims
    CLAIM_EQUIVALENT = auto()
    CLAIM_DIFFERS = auto()
    CLAIM_DETECTED = auto()
    CLAIM_UNDECIDED = auto()
    CLAIM_NOT_TESTED = auto()
    CLAIM_TOO_FEW_PAIRS = auto()
    CLAIM_TOO_FEW_RUNS = auto()
    LIMIT_HOLDS = auto()
    LIMIT_BROKEN = auto()
    LIMIT_UNDECIDED = auto()
    EXACT_HOLDS = auto()
    EXACT_BROKEN = auto()
    WEIGHTS_DIFFER = auto()
    VALUES_DIFFER = auto()
    WEIGHTS_UNKNOWN = auto()
    STEPS_DIFFER = auto()
    PAIRS_LACKING = auto()
    NONE_FINISHED = auto()
    PAIRS_ALONE = auto()
    VALUES_UNFIT = auto()
    OUTSIDE_DOMAIN = auto()
    CLAIM_OUTSIDE_DOMAIN = auto()
    YARDSTICK_NOT_POSITIVE = auto()
    BASELINE_WITHOUT_SPREAD = auto()
    FOLLOWS_FROM_CONFIG = auto()
    NOTHING_LEARNED = auto()
    ADVANTAGES_ZERO = auto()
    NEVER_MOVED = auto()
    CUT_SHORT = auto()
    ARMS_IDENTICAL = auto()
    DEAD_SEEDS = auto()
    CLIMB_NOT_SHOWN = auto()
    NOTHING_CLIMBED = auto()
    ONE_RUN_AS_TWO_SEEDS = auto()
    SKEWED = auto()
    SEEDS_NOT_CLIMBED = auto()
    BOUND_OF_ZERO = auto()
    MARGIN_WIDER_THAN_LEVEL = auto()
    WIDE_STEPS = auto()
    TOO_FEW_FOR_MISMATCH = auto()
    RUNNING_MEAN = auto()
    COLLAPSED = auto()
    DIFFERS_EARLIER = auto()

    # Descriptions and not tested
    DESCRIBED = auto()
    OTHER_METRICS = auto()
    NO_SHARED_METRIC = auto()
    MARGIN_OFFERED = auto()

    # Notes

    # Endings of runs and of their processes

    # Preflight checks

    # Refusals: comparing
    EMPTY_WINDOW = auto()
    METRIC_OUTSIDE_DOMAIN = auto()
    SIGMA_UNKNOWN = auto()
    NO_SPREAD = auto()

    # Refusals: launching

    # Refusals: recipes

    # Refusals: run directories and logs


def _plain(value: Any) -> Any:
    """Return a value as JSON and a process boundary can carry it. Raises TypeError for anything else."""
    if hasattr(value, "item"):  # a number of numpy's, some of which are floats as well
        return value.item()
    if value is None or isinstance(value, str | bool | int | float | Reason):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    raise TypeError(f"a reason cannot carry {value!r}, a {type(value).__name__}")
