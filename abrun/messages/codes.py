"""Reason codes of verdicts, and of refusals that something decides by or a file stores.

`abrun.messages` turns a reason into a sentence. Programs decide by `reason.code` and `reason.values`, never
by a sentence. Codes are a public interface, for example in `verdict.json`: wordings may change, but a code
keeps its meaning. docs/reference/codes.md lists all codes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum, auto
from pathlib import Path
from typing import Any

from abrun.messages.message import Message, render


@dataclass(frozen=True, slots=True)
class Reason:
    """Code with the values for its sentence: numbers, texts and reasons, also in lists and mappings."""

    code: "Code"
    values: Mapping[str, Any] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.code, repr(sorted(self.values.items()))))

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def __str__(self) -> str:
        """Return the reason as one sentence without a full stop; reasons among its values too."""
        return render(MESSAGES[self.code], self.values)

    def walk(self) -> "Iterator[Reason]":
        """Yield this reason, then, depth first, every reason among its values or in a list among them."""
        yield self
        for value in self.values.values():
            for entry in value if isinstance(value, list) else [value]:
                if isinstance(entry, Reason):
                    yield from entry.walk()

    def map_texts(self, change: Callable[[str], str]) -> "Reason":
        """Return a copy of the reason with `change` applied to every text in its values, at any depth."""
        return Reason(self.code, {name: _map_texts(value, change) for name, value in self.values.items()})


def in_words(text: str) -> Reason:
    """Return a reason that is its sentence: nothing decides by it."""
    return Code.FOREIGN_TEXT(text=text)


MESSAGES: dict["Code", Message] = {}  # filled by `abrun.messages` from its tables


class Code(StrEnum):
    """All codes, grouped by subject. Calling a code makes a reason: `Code.UNPAIRED_SEEDS(seeds=[3])`."""

    def __call__(self, /, **values: Any) -> Reason:
        return Reason(self, {name: _to_plain(value) for name, value in values.items()})

    # Verdicts
    NO_CLAIM, NOTHING_CLAIMED, OF_ARM, MORE_FAULTS, GUARD_FAILS = auto(), auto(), auto(), auto(), auto()
    GUARD_OPEN, ONE_RUN_EACH, POST_HOC, PROMPTS_AS_UNITS = auto(), auto(), auto(), auto()
    MARGINS_AFTER_LOOKING = auto()

    # Validity: problems that rule out a verdict
    NO_SHARED_SEED, UNPAIRED_SEEDS, BASELINE_FAILED, RERUN_FAILED = auto(), auto(), auto(), auto()
    UNPAIRED_BASELINE_FAILED, RUN_UNREADABLE, RUN_NOT_FINISHED = auto(), auto(), auto()
    RUNS_EXCHANGED, RUN_COPIED, CONFIG_MISSING, CONFIG_NOT_AS_DECLARED = auto(), auto(), auto(), auto()
    CONFIG_DIFFERS, CONFIG_MIXED, ENVIRONMENT_MISSING = auto(), auto(), auto()
    ENVIRONMENT_DIFFERS, NO_SHARED_STEP, STEPS_MISSING, FEW_SHARED_STEPS = auto(), auto(), auto(), auto()
    REFERENCE_STEPS_DIFFER, TEXT_VALUES, METRIC_MISSING = auto(), auto(), auto()
    PEAK_MEMORY_MISSING, BASELINE_NOT_FINITE = auto(), auto()

    # Step one
    FIRST_STEP_MISSING, FIRST_STEP_NOT_PAIRED, FIRST_STEP_OFF = auto(), auto(), auto()
    FIRST_STEP_OTHER_REFERENCE, FIRST_STEP_OTHER_VERSIONS = auto(), auto()
    FIRST_STEP_COUNTED_ANEW, FIRST_STEP_NOT_SHARED, FIRST_STEPS_DIFFER = auto(), auto(), auto()
    FIRST_STEP_LATE, FIRST_STEP_NOT_FINITE, FIRST_STEP_NOT_RECORDED = auto(), auto(), auto()
    PROMPTS_NOT_KNOWN, FIRST_STEP_OF_SCORES, STEP_ONE_DIFFERS = auto(), auto(), auto()
    STEP_ONE_OPEN, METRIC_REDEFINED = auto(), auto()

    # Guards
    RUNS_FINISHED, NO_BASELINE_FINISHED, NO_RUN_ENDED, ENDINGS_NOT_KNOWN = auto(), auto(), auto(), auto()
    RUN_FAILED, NOTHING_RECORDED, FINITE, NOT_FINITE = auto(), auto(), auto(), auto()
    STAYS_NOT_FINITE, NOT_FINITE_IN_WINDOW, NOT_FINITE_MORE_OFTEN = auto(), auto(), auto()
    FIRST_OF_SEVERAL, TOKEN_ERROR_NOT_RECORDED, TOKEN_ERROR_KEPT = auto(), auto(), auto()
    TOKEN_ERROR_EXCEEDED, RATIO_NOT_RECORDED, RATIO_KEPT, RATIO_EXCEEDED = auto(), auto(), auto(), auto()

    # Claims
    CLAIM_EQUIVALENT, CLAIM_DIFFERS, CLAIM_DETECTED, CLAIM_UNDECIDED = auto(), auto(), auto(), auto()
    CLAIM_NOT_TESTED, CLAIM_TOO_FEW_PAIRS, CLAIM_TOO_FEW_RUNS = auto(), auto(), auto()
    LIMIT_HOLDS, LIMIT_BROKEN, LIMIT_UNDECIDED, EXACT_HOLDS = auto(), auto(), auto(), auto()
    EXACT_BROKEN, WEIGHTS_DIFFER, VALUES_DIFFER, WEIGHTS_UNKNOWN = auto(), auto(), auto(), auto()
    STEPS_DIFFER, PAIRS_LACKING, NONE_FINISHED, PAIRS_ALONE = auto(), auto(), auto(), auto()
    VALUES_UNFIT, OUTSIDE_DOMAIN, CLAIM_OUTSIDE_DOMAIN = auto(), auto(), auto()
    YARDSTICK_NOT_POSITIVE, BASELINE_WITHOUT_SPREAD, FOLLOWS_FROM_CONFIG = auto(), auto(), auto()
    NOTHING_LEARNED, ADVANTAGES_ZERO, NEVER_MOVED, CUT_SHORT = auto(), auto(), auto(), auto()
    ARMS_IDENTICAL, DEAD_SEEDS, CLIMB_NOT_SHOWN, NOTHING_CLIMBED = auto(), auto(), auto(), auto()
    ONE_RUN_AS_TWO_SEEDS, SKEWED, SEEDS_NOT_CLIMBED, BOUND_OF_ZERO = auto(), auto(), auto(), auto()
    MARGIN_WIDER_THAN_LEVEL, MARGIN_WIDE_OF_CLIMB, RUNNING_BEST = auto(), auto(), auto()
    TINY_DIFFERENCES, CHANGES_SHARED, EXACT_OUTCOMES = auto(), auto(), auto()
    OUTCOMES_NEED_NUMBER, SECOND_ARM_NEEDED, WIDE_STEPS = auto(), auto(), auto()
    TOO_FEW_FOR_MISMATCH, RUNNING_MEAN, COLLAPSED, STEPS_APART = auto(), auto(), auto(), auto()
    LARGEST_STEP, OUTCOMES_HAVE_NO_GAP, DIFFERS_EARLIER = auto(), auto(), auto()
    TIMES_OF_SHARED_GPUS, FIXED_BY_RECORDING, ONLY_SOME_SAMPLE = auto(), auto(), auto()
    CLAIM_PASSES, CLAIM_FAILS, CLAIM_OPEN, TOO_FEW_FOR_BETTER = auto(), auto(), auto(), auto()
    LEVEL_CHANGED, RATIO_AT_EACH_STEP, DIVERGENCE_RATE, SPREAD_NOT_SHOWN = auto(), auto(), auto(), auto()
    NOISE_BORROWED, NOISE_UNLIKE, NOISE_NOT_WRITTEN, SEEDS_WITHOUT_PAIR = auto(), auto(), auto(), auto()

    # Evidence beside the claims: untested properties, excluded runs, injected faults, descriptions
    STEP_ONE_NOT_SETTLED, STEP_ONE_NOT_READ, RUNS_DO_NOT_SAY, OTHER_CODE = auto(), auto(), auto(), auto()
    COMPLETIONS_SAMPLED_ANEW, TOKEN_ERROR_NOT_MEASURED, NOT_PAIRED = auto(), auto(), auto()
    REFERENCE_SEEDS_UNUSED, ULP_RUN_NOT_FINISHED, NO_RERUNS = auto(), auto(), auto()
    LEARNING_NOT_RECORDED, RARE_FAILURES, NO_MARGIN, LEARNING_NOT_CHECKED = auto(), auto(), auto(), auto()
    NO_FAULT_INJECTED, METRICS_WITHOUT_CLAIM, OTHER_CONDITIONS, EXCLUDED = auto(), auto(), auto(), auto()
    SEEDS_LEFT_OUT, START_LEFT_OUT, RERUNS_LEFT_OUT, PROMPTS_NOT_SHARED = auto(), auto(), auto(), auto()
    OTHER_SCORES, COUNTER_RESTARTED, FOUND_BY_STEP_ONE, FOUND_BY_GUARD = auto(), auto(), auto(), auto()
    LIMITED_METRIC, MOVED_METRIC, FAULT_MISSED = auto(), auto(), auto()
    FINAL_WEIGHTS_NOT_RECORDED, NO_SKETCHES_IN_COMMON, WEIGHTS_DID_NOT_MOVE = auto(), auto(), auto()
    DESCRIBED, OTHER_METRICS, NO_SHARED_METRIC, MARGIN_OFFERED = auto(), auto(), auto(), auto()
    TRACE_AGREES, TRACE_DIFFERS, TRACE_OF_OTHER_VALUES, TRACE_UNREADABLE = auto(), auto(), auto(), auto()

    # Seed noise: one arm alone, and one run beside several
    SEED_NOISE, NORMAL_GAP, PAIRS_SHOW, LEVEL_ALONE, TWO_GROUPS = auto(), auto(), auto(), auto(), auto()
    NEW_RUN, NEW_RUN_ELSEWHERE, NOTHING_TO_COMPARE, ONE_RUN_ALONE = auto(), auto(), auto(), auto()
    RUNS_ALIKE, NO_RUN_IN_WINDOW, NO_METRIC_TO_DESCRIBE = auto(), auto(), auto()
    UNFINISHED_LEFT_OUT, LEFT_OUT_UNRECORDED, LEFT_OUT_SHORT = auto(), auto(), auto()
    LEFT_OUT_NOT_FINITE, FEW_STEPS_IN_COMMON, NEW_RUN_RANGE = auto(), auto(), auto()
    METRICS_WITHOUT_LEVEL, LEFT_OUT_OF_METRICS, SEEDS_NOT_SHARED = auto(), auto(), auto()
    FAR_APART = auto()

    # Notes
    NOTE_OF_RUNS, DECIDED_AT_LAUNCH, CODE_DIFFERS, PRECISION_DIFFERS = auto(), auto(), auto(), auto()
    GPUS_SHARED, ON_RECORDED_ROLLOUTS, SAMPLER_NOT_TESTED = auto(), auto(), auto()
    ROLLOUTS_DIFFER, COUNTERS_DIFFER, GRIDS_DIFFER, SEED_NOT_KNOWN = auto(), auto(), auto(), auto()
    NOTHING_DECLARED, COMPARISON_CHANGED, PAIRS_ADDED, CLAIMS_CHANGED = auto(), auto(), auto(), auto()
    PAIRING_CHANGED, STEP_ONE_DROPPED, BASELINE_CHANGED, SEEDS_FROM = auto(), auto(), auto(), auto()
    ARMS_FROM_NAMES, NOTHING_SAYS_SEEDS, LOG_READ_AS, ARMS_SHARE_NO_SEED = auto(), auto(), auto(), auto()
    SOURCES_ARE_ARMS, BASELINE_GUESSED = auto(), auto()

    # Endings of runs and of their processes
    FOREIGN_TEXT, EXIT_CODE, KILLED, OUT_OF_MEMORY_KILLED = auto(), auto(), auto(), auto()
    SEE_LOG, SEVERAL_ERRORS, RANK_FAILED, EXCEPTION, RANKS_LOST = auto(), auto(), auto(), auto(), auto()
    RANKS_NOT_FOUND, COLLECTIVE_TIMED_OUT, MEMORY_RAN_OUT, NODE_LOST = auto(), auto(), auto(), auto()
    TIME_LIMIT_REACHED, START_LIMIT_REACHED, STALL_LIMIT_REACHED = auto(), auto(), auto()
    RANKS_SILENT, NODES_SILENT, NODE_FAILED = auto(), auto(), auto()
    NO_NEW_STEP, NO_SIGN_OF_LIFE, STOPPED_BY_SIGNAL, ALIAS_NOT_LOGGED = auto(), auto(), auto(), auto()

    # Gate: what an answer does not cover
    GATE_AGE, GATE_ENVIRONMENT, GATE_OLD_RUNS = auto(), auto(), auto()

    # Refusals: launching
    PROBE_FAILED = auto()

    # Refusals: recipes
    PROBLEMS_UNREADABLE = auto()

    # Refusals: run directories and logs
    STEPS_SENT, MIRROR_NOT_BEGUN = auto(), auto()


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, Reason):
        return value.map_texts(change)
    if isinstance(value, Mapping):
        return {key: _map_texts(entry, change) for key, entry in value.items()}
    if isinstance(value, list):
        return [_map_texts(entry, change) for entry in value]
    return change(value) if isinstance(value, str) else value


def _to_plain(value: Any) -> Any:
    """Return a value in types that JSON can hold, or a Reason. Raises TypeError for any other type."""
    if hasattr(value, "item"):  # a NumPy number; checked first, because some are also floats
        return value.item()
    if value is None or isinstance(value, str | bool | int | float | Reason):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _to_plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(entry) for entry in value]
    raise TypeError(f"a reason cannot carry {value!r}, a {type(value).__name__}")
