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
    OF_ARM = auto()
    MORE_FAULTS = auto()
    GUARD_FAILS = auto()
    GUARD_OPEN = auto()
    ONE_RUN_EACH = auto()
    POST_HOC = auto()

    # Validity: why no verdict can be given
    NO_SHARED_SEED = auto()
    UNPAIRED_SEEDS = auto()
    BASELINE_FAILED = auto()
    RERUN_FAILED = auto()
    UNPAIRED_BASELINE_FAILED = auto()
    RUN_UNREADABLE = auto()
    RUN_NOT_FINISHED = auto()
    RUNS_EXCHANGED = auto()
    RUN_COPIED = auto()
    CONFIG_MISSING = auto()
    CONFIG_NOT_AS_DECLARED = auto()
    CONFIG_DIFFERS = auto()
    CONFIG_MIXED = auto()
    ENVIRONMENT_MISSING = auto()
    ENVIRONMENT_DIFFERS = auto()
    NO_SHARED_STEP = auto()
    STEPS_MISSING = auto()
    FEW_SHARED_STEPS = auto()
    REFERENCE_STEPS_DIFFER = auto()
    TEXT_VALUES = auto()
    METRIC_MISSING = auto()
    PEAK_MEMORY_MISSING = auto()
    BASELINE_NOT_FINITE = auto()

    # First step
    FIRST_STEP_MISSING = auto()
    FIRST_STEP_NOT_PAIRED = auto()
    FIRST_STEP_OFF = auto()
    FIRST_STEP_OTHER_REFERENCE = auto()
    FIRST_STEP_OTHER_VERSIONS = auto()
    FIRST_STEP_COUNTED_ANEW = auto()
    FIRST_STEP_NOT_SHARED = auto()
    FIRST_STEPS_DIFFER = auto()
    FIRST_STEP_LATE = auto()
    FIRST_STEP_NOT_FINITE = auto()
    FIRST_STEP_NOT_RECORDED = auto()
    PROMPTS_NOT_KNOWN = auto()
    STEP_ONE_DIFFERS = auto()
    STEP_ONE_OPEN = auto()

    # Guards
    RUNS_FINISHED = auto()
    NO_BASELINE_FINISHED = auto()
    NO_RUN_ENDED = auto()
    ENDINGS_NOT_KNOWN = auto()
    RUN_FAILED = auto()
    NOTHING_RECORDED = auto()
    FINITE = auto()
    NOT_FINITE = auto()
    STAYS_NOT_FINITE = auto()
    NOT_FINITE_IN_WINDOW = auto()
    NOT_FINITE_MORE_OFTEN = auto()
    FIRST_OF_SEVERAL = auto()
    TOKEN_ERROR_NOT_RECORDED = auto()
    TOKEN_ERROR_KEPT = auto()
    TOKEN_ERROR_EXCEEDED = auto()
    RATIO_NOT_RECORDED = auto()
    RATIO_KEPT = auto()
    RATIO_EXCEEDED = auto()

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
    STEP_ONE_NOT_SETTLED = auto()
    STEP_ONE_NOT_READ = auto()
    RUNS_DO_NOT_SAY = auto()
    OTHER_CODE = auto()
    TOKEN_ERROR_NOT_MEASURED = auto()
    NOT_PAIRED = auto()
    REFERENCE_SEEDS_UNUSED = auto()
    ULP_RUN_NOT_FINISHED = auto()
    NO_RERUNS = auto()
    LEARNING_NOT_RECORDED = auto()
    RARE_FAILURES = auto()
    NO_MARGIN = auto()
    LEARNING_NOT_CHECKED = auto()
    NO_FAULT_PLANTED = auto()
    METRICS_WITHOUT_CLAIM = auto()
    OTHER_CONDITIONS = auto()
    EXCLUDED = auto()
    SEEDS_LEFT_OUT = auto()
    START_LEFT_OUT = auto()
    COUNTER_RESTARTED = auto()
    FOUND_BY_STEP_ONE = auto()
    FOUND_BY_GUARD = auto()
    LIMITED_METRIC = auto()
    MOVED_METRIC = auto()
    FAULT_MISSED = auto()
    FINAL_WEIGHTS_NOT_RECORDED = auto()
    NO_SKETCHES_IN_COMMON = auto()
    WEIGHTS_DID_NOT_MOVE = auto()
    DESCRIBED = auto()
    OTHER_METRICS = auto()
    NO_SHARED_METRIC = auto()
    MARGIN_OFFERED = auto()

    # Notes
    NOTE_OF_RUNS = auto()
    DECIDED_AT_LAUNCH = auto()
    CODE_CHANGED = auto()
    ARMS_OF_OTHER_CODE = auto()
    RUNS_OF_OTHER_CODE = auto()
    OTHER_MACHINES = auto()
    HOURS_APART = auto()
    PRECISION_DIFFERS = auto()
    COUNTERS_DIFFER = auto()
    GRIDS_DIFFER = auto()
    LEDGER_EMPTY = auto()
    LEDGER = auto()
    SEED_NOT_KNOWN = auto()
    PROMPTS_OF_RUNS_DIFFER = auto()
    VALIDATION_NOT_FINITE = auto()
    VALIDATION_UNREADABLE = auto()
    NOTHING_DECLARED = auto()
    COMPARISON_CHANGED = auto()
    PAIRS_ADDED = auto()
    CLAIMS_CHANGED = auto()
    PAIRING_CHANGED = auto()
    STEP_ONE_DROPPED = auto()
    READ_SEVERAL_TIMES = auto()
    SEVERAL_COMPARISONS = auto()
    SEEDS_FROM = auto()
    ARMS_FROM_NAMES = auto()
    NOTHING_SAYS_SEEDS = auto()
    LOG_READ_AS = auto()
    ARMS_SHARE_NO_SEED = auto()
    SOURCES_ARE_ARMS = auto()
    BASELINE_GUESSED = auto()

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
    CLAIM_TWICE = auto()
    CLAIM_ON_TEXT = auto()
    CLAIM_NOT_RECORDED = auto()
    OPTION_FOR_EXPERIMENT = auto()
    ALL_EXCLUDED = auto()
    EXCLUDES_NOTHING = auto()
    SEEDS_NOT_RECORDED = auto()
    LOOKS_REFUSED = auto()
    LOOKS_AT_REFERENCE = auto()
    LOOKS_UNPAIRED = auto()
    LOOKS_TOO_LATE = auto()
    LOOKS_TOO_EARLY = auto()
    ONLY_PLANTED_FAULTS = auto()
    ONE_ARM = auto()
    REPORT_IS_LINK = auto()
    UNKNOWN_FORMAT = auto()
    NO_FIGURES = auto()
    UNKNOWN_ARM = auto()
    ARM_NOT_NAMED = auto()
    ARM_WITHOUT_REFERENCE = auto()
    MORE_THAN_SEEDS_DIFFERS = auto()
    SOURCE_OF_ONE_ARM = auto()
    ARM_NAMED_TWICE = auto()
    SOURCES_OF_ONE_NAME = auto()
    ONE_ARM_OF_RUNS = auto()
    UNKNOWN_BASELINE = auto()
    RUN_IN_TWO_SOURCES = auto()
    RUN_GIVEN_TWICE = auto()
    SOURCE_OF_SEVERAL_ARMS = auto()
    SOURCE_OF_ARMS_AND_SEEDS = auto()
    ARM_WITHOUT_NUMBERS = auto()
    NO_NUMBERS = auto()
    NOTHING_NUMERIC = auto()
    RERUN_OF_TREATMENT = auto()
    VERSIONS_DIFFER_OF_REFERENCE = auto()
    REFERENCE_NEEDS_ARM = auto()
    REFERENCE_NEEDS_SEEDS = auto()
    REFERENCE_NEEDS_WHOLE_RUNS = auto()
    REFERENCE_NOT_WRITTEN = auto()
    OUTPUT_NOT_A_REFERENCE = auto()
    OUTPUT_HAS_LEDGER = auto()
    NO_REFERENCE_FILE = auto()
    EXPERIMENT_AS_REFERENCE = auto()
    OTHER_REFERENCE_VERSION = auto()
    NOT_A_REFERENCE = auto()
    BUDGET_REFUSED = auto()
    NO_LEDGER = auto()
    LEDGER_HAS_RUNS = auto()
    LEDGER_OF_POST_HOC = auto()
    NO_TREATMENT_DECLARED = auto()
    LEDGER_TAKES_MATCHES = auto()
    LEDGER_OF_OTHER_CLAIM = auto()
    BASELINE_WITHOUT_CONFIG = auto()
    BASELINE_NOT_THE_LINK = auto()
    LEDGER_NOT_READ = auto()
    LEDGER_LINK_EDITED = auto()
    LEDGER_ENTRY_EDITED = auto()
    EMPTY_WINDOW = auto()
    METRIC_OUTSIDE_DOMAIN = auto()
    SIGMA_UNKNOWN = auto()
    NO_SPREAD = auto()

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
