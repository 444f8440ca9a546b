"""Reason codes, in which verdicts, checks and refusals are expressed: a code with its values.

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


MESSAGES: dict["Code", Message] = {}  # filled by `abrun.messages` from its tables


class Code(StrEnum):
    """All codes, grouped by subject. Calling a code makes a reason: `Code.UNPAIRED_SEEDS(seeds=[3])`."""

    def __call__(self, /, **values: Any) -> Reason:
        return Reason(self, {name: _to_plain(value) for name, value in values.items()})

    # Verdicts
    NO_CLAIM, NOTHING_CLAIMED, OF_ARM, MORE_FAULTS, GUARD_FAILS = auto(), auto(), auto(), auto(), auto()
    GUARD_OPEN, ONE_RUN_EACH, POST_HOC, PROMPTS_AS_UNITS = auto(), auto(), auto(), auto()

    # Validity: problems that rule out a verdict
    NO_SHARED_SEED, UNPAIRED_SEEDS, BASELINE_FAILED, RERUN_FAILED = auto(), auto(), auto(), auto()
    UNPAIRED_BASELINE_FAILED, RUN_UNREADABLE, RUN_NOT_FINISHED = auto(), auto(), auto()
    RUNS_EXCHANGED, RUN_COPIED, CONFIG_MISSING, CONFIG_NOT_AS_DECLARED = auto(), auto(), auto(), auto()
    CONFIG_DIFFERS, CONFIG_MIXED, ENVIRONMENT_MISSING, ENVIRONMENT_DIFFERS = auto(), auto(), auto(), auto()
    NO_SHARED_STEP, STEPS_MISSING, FEW_SHARED_STEPS, REFERENCE_STEPS_DIFFER = auto(), auto(), auto(), auto()
    TEXT_VALUES, METRIC_MISSING, PEAK_MEMORY_MISSING, BASELINE_NOT_FINITE = auto(), auto(), auto(), auto()

    # Step one
    FIRST_STEP_MISSING, FIRST_STEP_NOT_PAIRED, FIRST_STEP_OFF = auto(), auto(), auto()
    FIRST_STEP_OTHER_REFERENCE, FIRST_STEP_OTHER_VERSIONS, FIRST_STEP_COUNTED_ANEW = auto(), auto(), auto()
    FIRST_STEP_NOT_SHARED, FIRST_STEPS_DIFFER, FIRST_STEP_LATE = auto(), auto(), auto()
    FIRST_STEP_NOT_FINITE, FIRST_STEP_NOT_RECORDED, PROMPTS_NOT_KNOWN = auto(), auto(), auto()
    FIRST_STEP_OF_SCORES = auto()
    STEP_ONE_DIFFERS, STEP_ONE_OPEN, REWARD_REDEFINED = auto(), auto(), auto()

    # Guards
    RUNS_FINISHED, NO_BASELINE_FINISHED, NO_RUN_ENDED, ENDINGS_NOT_KNOWN = auto(), auto(), auto(), auto()
    RUN_FAILED, NOTHING_RECORDED, FINITE, NOT_FINITE = auto(), auto(), auto(), auto()
    STAYS_NOT_FINITE, NOT_FINITE_IN_WINDOW, NOT_FINITE_MORE_OFTEN = auto(), auto(), auto()
    FIRST_OF_SEVERAL, TOKEN_ERROR_NOT_RECORDED, TOKEN_ERROR_KEPT = auto(), auto(), auto()
    TOKEN_ERROR_EXCEEDED, RATIO_NOT_RECORDED, RATIO_KEPT, RATIO_EXCEEDED = auto(), auto(), auto(), auto()

    # Claims
    CLAIM_EQUIVALENT, CLAIM_DIFFERS, CLAIM_DETECTED, CLAIM_UNDECIDED = auto(), auto(), auto(), auto()
    CLAIM_NOT_TESTED, CLAIM_TOO_FEW_PAIRS, CLAIM_TOO_FEW_RUNS, LIMIT_HOLDS = auto(), auto(), auto(), auto()
    LIMIT_BROKEN, LIMIT_UNDECIDED, EXACT_HOLDS, EXACT_BROKEN = auto(), auto(), auto(), auto()
    WEIGHTS_DIFFER, VALUES_DIFFER, WEIGHTS_UNKNOWN, STEPS_DIFFER = auto(), auto(), auto(), auto()
    PAIRS_LACKING, NONE_FINISHED, PAIRS_ALONE, VALUES_UNFIT = auto(), auto(), auto(), auto()
    OUTSIDE_DOMAIN, CLAIM_OUTSIDE_DOMAIN, YARDSTICK_NOT_POSITIVE = auto(), auto(), auto()
    BASELINE_WITHOUT_SPREAD, FOLLOWS_FROM_CONFIG, NOTHING_LEARNED = auto(), auto(), auto()
    ADVANTAGES_ZERO, NEVER_MOVED, CUT_SHORT, ARMS_IDENTICAL = auto(), auto(), auto(), auto()
    DEAD_SEEDS, CLIMB_NOT_SHOWN, NOTHING_CLIMBED, ONE_RUN_AS_TWO_SEEDS = auto(), auto(), auto(), auto()
    SKEWED, SEEDS_NOT_CLIMBED, BOUND_OF_ZERO, MARGIN_WIDER_THAN_LEVEL = auto(), auto(), auto(), auto()
    RUNNING_BEST, TINY_DIFFERENCES, CHANGES_SHARED = auto(), auto(), auto()
    EXACT_OUTCOMES, OUTCOMES_NEED_NUMBER, SECOND_ARM_NEEDED = auto(), auto(), auto()
    WIDE_STEPS, TOO_FEW_FOR_MISMATCH, RUNNING_MEAN, COLLAPSED = auto(), auto(), auto(), auto()
    STEPS_APART, LARGEST_STEP, OUTCOMES_HAVE_NO_GAP = auto(), auto(), auto()
    DIFFERS_EARLIER, TIMES_OF_SHARED_GPUS = auto(), auto()
    FIXED_BY_RECORDING, ONLY_SOME_SAMPLE = auto(), auto()
    TARGET_MET_BEFORE_TRAINING, TIME_NOT_RECORDED, TARGET_NOT_REACHED = auto(), auto(), auto()
    TARGET_NEEDS_SAMPLE, TARGET_GRID_COARSE, TARGET_WITHOUT_STEPS = auto(), auto(), auto()
    TARGET_GRIDS_DIFFER, TARGET_SAMPLE_SIZE = auto(), auto()
    CLAIM_PASSES, CLAIM_FAILS, CLAIM_OPEN, TOO_FEW_FOR_BETTER = auto(), auto(), auto(), auto()
    DIRECTION_UNKNOWN, LEVEL_CHANGED, RATIO_AT_EACH_STEP, POLICY_LOSS = auto(), auto(), auto(), auto()

    # Evidence beside the claims: untested properties, excluded runs, injected faults, descriptions
    STEP_ONE_NOT_SETTLED, STEP_ONE_NOT_READ, RUNS_DO_NOT_SAY, OTHER_CODE = auto(), auto(), auto(), auto()
    COMPLETIONS_SAMPLED_ANEW = auto()
    TOKEN_ERROR_NOT_MEASURED, NOT_PAIRED, REFERENCE_SEEDS_UNUSED = auto(), auto(), auto()
    ULP_RUN_NOT_FINISHED, NO_RERUNS, LEARNING_NOT_RECORDED, RARE_FAILURES = auto(), auto(), auto(), auto()
    NO_MARGIN, LEARNING_NOT_CHECKED, NO_FAULT_INJECTED, METRICS_WITHOUT_CLAIM = auto(), auto(), auto(), auto()
    OTHER_CONDITIONS, EXCLUDED, SEEDS_LEFT_OUT, START_LEFT_OUT = auto(), auto(), auto(), auto()
    RERUNS_LEFT_OUT, PROMPTS_NOT_SHARED, OTHER_SCORES = auto(), auto(), auto()
    COUNTER_RESTARTED, FOUND_BY_STEP_ONE, FOUND_BY_GUARD, LIMITED_METRIC = auto(), auto(), auto(), auto()
    MOVED_METRIC, FAULT_MISSED, FINAL_WEIGHTS_NOT_RECORDED = auto(), auto(), auto()
    NO_SKETCHES_IN_COMMON, WEIGHTS_DID_NOT_MOVE, DESCRIBED, OTHER_METRICS = auto(), auto(), auto(), auto()
    NO_SHARED_METRIC, MARGIN_OFFERED = auto(), auto()
    TRACE_AGREES, TRACE_DIFFERS, TRACE_OF_OTHER_VALUES, TRACE_UNREADABLE = auto(), auto(), auto(), auto()

    # Seed noise: one arm alone, and one run beside several
    SEED_NOISE, NORMAL_GAP, PAIRS_SHOW, LEVEL_ALONE, TWO_GROUPS = auto(), auto(), auto(), auto(), auto()
    NEW_RUN, NEW_RUN_ELSEWHERE, NOTHING_TO_COMPARE, ONE_RUN_ALONE = auto(), auto(), auto(), auto()
    RUNS_ALIKE, NO_RUN_IN_WINDOW, NO_METRIC_TO_DESCRIBE, UNFINISHED_LEFT_OUT = auto(), auto(), auto(), auto()
    LEFT_OUT_UNRECORDED, LEFT_OUT_SHORT, LEFT_OUT_NOT_FINITE = auto(), auto(), auto()
    FEW_STEPS_IN_COMMON, NEW_RUN_RANGE, METRICS_WITHOUT_LEVEL = auto(), auto(), auto()

    # Notes
    NOTE_OF_RUNS, DECIDED_AT_LAUNCH, CODE_DIFFERS, PRECISION_DIFFERS = auto(), auto(), auto(), auto()
    GPUS_SHARED, ON_RECORDED_ROLLOUTS, SAMPLER_NOT_TESTED, ROLLOUTS_DIFFER = auto(), auto(), auto(), auto()
    COUNTERS_DIFFER, GRIDS_DIFFER, LEDGER_EMPTY, LEDGER = auto(), auto(), auto(), auto()
    SEED_NOT_KNOWN, NOTHING_DECLARED, COMPARISON_CHANGED, PAIRS_ADDED = auto(), auto(), auto(), auto()
    CLAIMS_CHANGED, PAIRING_CHANGED, STEP_ONE_DROPPED = auto(), auto(), auto()
    BASELINE_CHANGED = auto()
    SEEDS_FROM, ARMS_FROM_NAMES, NOTHING_SAYS_SEEDS = auto(), auto(), auto()
    LOG_READ_AS, ARMS_SHARE_NO_SEED, SOURCES_ARE_ARMS, BASELINE_GUESSED = auto(), auto(), auto(), auto()

    # Next steps after a verdict
    FRESH_REFERENCE, FRESH_FOLDERS, FRESH_SEEDS, MARGIN_EXCEEDED = auto(), auto(), auto(), auto()
    HALVE_INTERVAL, MORE_THAN_1000_PAIRS, PAIRS_DECIDE, MARGIN_SUGGESTED = auto(), auto(), auto(), auto()
    TEST_ON_FRESH_SEEDS, INJECT_FAULTS, LAUNCH_NEXT_CHANGE = auto(), auto(), auto()
    COMPARE_NEXT_CHANGE, FREEZE_RUNS, SKIP_STEP_ONE, READ_ENDINGS = auto(), auto(), auto(), auto()
    FIND_MISMATCH, READ_COMPLETIONS, CONFIRM_ON_FRESH_SEEDS, TRAIN_LONGER = auto(), auto(), auto(), auto()
    FIND_TENSOR = auto()
    DECLARE_METRIC, DECLARE_MARGIN, PLAN_SEEDS, TRAIN_THREE_SEEDS = auto(), auto(), auto(), auto()
    FINISH_INTERIM_PAIRS, RUN_IN_FLOAT32, DECLARE_ROUNDING, PLAN_WIDER_MARGIN = auto(), auto(), auto(), auto()
    TRAIN_MORE_PAIRS, CLAIM_WHAT_SHOWS, TELL_FROM_CHANCE = auto(), auto(), auto()
    REPEAT_IN_FLOAT32, TRAIN_FOR_INTERIM, CLAIM_ALIKE, LOG_OR_TRAIN_LONGER = auto(), auto(), auto(), auto()
    TRAIN_TWO_EACH, NAME_METRICS, FRESH_SEEDS_DECIDE = auto(), auto(), auto()
    TRAIN_MORE_OF_ARM, TRAIN_MORE_OF_NEW, COMPARE_CHANGE = auto(), auto(), auto()
    CONFIRM_DIFFERENCE, CLAIM_AGAINST_REFERENCE = auto(), auto()
    NARROW_INTERVAL, OTHER_SEEDS_ALONE, OTHER_SEED_TOO = auto(), auto(), auto()
    CALL_VERSIONS_TREATMENT, COMPARE_SHARED_SEEDS, UNPAIR, NAME_STEP_COLUMN = auto(), auto(), auto(), auto()
    MEND_REASONS, READ_FIRST_LOG = auto(), auto()
    RESUME_RUNS, READ_BY_OTHER_NAME, MEND_RECIPE = auto(), auto(), auto()

    # Endings of runs and of their processes
    FOREIGN_TEXT, EXIT_CODE, KILLED, OUT_OF_MEMORY_KILLED = auto(), auto(), auto(), auto()
    ENDED_WITHOUT_RESULT, SEE_LOG, SEVERAL_ERRORS, RANK_FAILED = auto(), auto(), auto(), auto()
    EXCEPTION, RANKS_LOST, RANKS_NOT_FOUND, COLLECTIVE_TIMED_OUT = auto(), auto(), auto(), auto()
    MEMORY_RAN_OUT, NODE_LOST, JOB_WAITS, RUN_WAITS, JOB_STATE = auto(), auto(), auto(), auto(), auto()
    SHARE_EMPTY, ENGINE_NOT_SHARED, MPS_NOT_STARTED, GPUS_NOT_SHARED = auto(), auto(), auto(), auto()
    JOB_BEGINS_OR_ENDS, JOB_ENDED, JOB_LEFT_NOTHING, JOB_RUN_SILENT = auto(), auto(), auto(), auto()
    JOB_CANCELLED, JOB_NOT_IN_QUEUE, RESUMABLE, RUN_REMOVED = auto(), auto(), auto(), auto()
    JOB_STOPPED, JOB_FORGOTTEN = auto(), auto()
    ATTEMPT_REMOVED, ATTEMPT_FENCED, LAUNCHED_BY_ANOTHER, FILE_LOCKED = auto(), auto(), auto(), auto()
    FOLDER_LOCKED, LOCK_TAKEN_OVER, TAKEN_OVER, NO_TEMPORARY_FILES = auto(), auto(), auto(), auto()
    RANKS_NOT_STARTED, TIME_LIMIT_REACHED, STALL_LIMIT_REACHED, RANKS_SILENT = auto(), auto(), auto(), auto()
    NODES_SILENT, NO_NEW_STEP, NO_SIGN_OF_LIFE, STOPPED_BY_SIGNAL = auto(), auto(), auto(), auto()
    LAUNCHER_GONE, PROCESS_GONE, NOT_STARTED = auto(), auto(), auto()
    WARM_START_FAILED, FAILED_ALIKE, RUN_DIRECTORY_GONE, COMMAND_NOT_STARTED = auto(), auto(), auto(), auto()
    ALIAS_NOT_LOGGED, NO_METRICS, METRICS_UNREADABLE, METRICS_LOST_ROWS = auto(), auto(), auto(), auto()
    METRICS_LEAD_TO_RUN_FILE = auto()

    # Preflight checks
    REASONING_GYM_MISSING, ARMS_CANNOT_RUN, NOT_BUILT = auto(), auto(), auto()
    ENGINE_DEVICES_NEED_ONE_NODE, COMMAND_NEEDS_ONE_NODE, TOO_FEW_GPUS = auto(), auto(), auto()
    TOO_FEW_CORES, TOO_MANY_JOBS, VARIABLE_UNSET, VERIFIER_NOT_FOUND = auto(), auto(), auto(), auto()
    PACKAGE_MISSING, PACKAGE_NOT_INSTALLED, SETTING_NEEDS_PACKAGE = auto(), auto(), auto()
    PACKAGE_WITHOUT_WHEEL, PACKAGE_VERSION_UNSUPPORTED, PACKAGE_OF_PACKAGE_MISSING = auto(), auto(), auto()
    VLLM_OF_OTHER_DEVICE, VERSION_UNTESTED, PACKAGE_BROKEN, IMPORT_TOO_SLOW = auto(), auto(), auto(), auto()
    EXACT_SUPPORT_UNAVAILABLE, VLLM_ABSENT, VLLM_WITHOUT_SAMPLING_MASKS = auto(), auto(), auto()
    VLLM_FINDS_NO_TRITON, TRITON_FOR_CPUS_MISSING, LIGER_NEEDS_GPU = auto(), auto(), auto()
    TRITON_NEEDS_GPU, NO_GPU, TORCH_WITHOUT_CUDA, TORCH_FINDS_NO_GPU = auto(), auto(), auto(), auto()
    SBATCH_MISSING, MODEL_FOLDER_DAMAGED, MODEL_NOT_ON_HUB, HUB_NAME_INVALID = auto(), auto(), auto(), auto()
    HUB_MODEL_GATED, HUB_MODEL_UNKNOWN, HUB_STATUS, HUB_OFFLINE = auto(), auto(), auto(), auto()
    HUB_UNREACHABLE, MODEL_CONFIG_INVALID, MODEL_FILE_UNREADABLE = auto(), auto(), auto()
    MODEL_FILE_NOT_JSON, MODEL_INDEX_INVALID, MODEL_TENSOR_MISSING = auto(), auto(), auto()
    MODEL_FILE_TRUNCATED, MODEL_FILE_HEADER_INVALID, MODEL_FILE_SIZE_WRONG = auto(), auto(), auto()
    MODEL_FAMILY_NOT_TRAINED, BACKEND_LACKS_FAMILY, BACKEND_NEEDS_FULL_ATTENTION = auto(), auto(), auto()
    STREAM_NEEDS_FULL_ATTENTION, FAMILY_WITHOUT_TENSOR_PARALLEL_PLAN = auto(), auto()
    FAMILY_ENCODER_DECODER, FAMILY_MULTIMODAL, FAMILY_HEAD_BIASED = auto(), auto(), auto()
    FAMILY_ROUTER_SAMPLES, FAMILY_SHARES_LAYERS, FAMILY_WITHOUT_CAUSAL_LM = auto(), auto(), auto()
    LAYERS_REFUSE_PACKING, LAYERS_NOT_FULL_ATTENTION = auto(), auto()
    SOME_LAYERS_PARTIAL, LAYERS_WINDOWED = auto(), auto()
    EXPERTS_STAY_WHOLE, MODEL_HAS_NO_EXPERTS, MODEL_CUT_UNEVENLY = auto(), auto(), auto()
    EXPERTS_CUT_UNEVENLY, WIDTH_CUT_UNEVENLY, HEADS_CUT_UNEVENLY = auto(), auto(), auto()
    START_NOT_A_CHECKPOINT, START_AFTER_LAST_STEP, CHECKPOINT_FILE_UNREADABLE = auto(), auto(), auto()
    START_DOES_NOT_FIT, CHECKPOINT_FILE_TRUNCATED, SAVE_TIME_TOO_LONG = auto(), auto(), auto()
    PYXIS_MISSING, ARMS_WITHOUT_EFFECT, COMMANDS_WITHOUT_SEED = auto(), auto(), auto()
    LOSS_NEVER_CLIPS, CLIPPING_WITHOUT_EFFECT, ARM_EQUALS_BASELINE = auto(), auto(), auto()

    # Refusals in general
    NOT_ALLOWED, OPTION_NEEDS, PATH_MISSING, OF_SUBJECT, UNREADABLE = auto(), auto(), auto(), auto(), auto()
    NOT_READABLE_AS, LOCKED, SETTING_REFUSED = auto(), auto(), auto()

    # Refusals: comparing
    CLAIM_TWICE, CLAIM_ON_TEXT, CLAIM_NOT_RECORDED, OPTION_FOR_EXPERIMENT = auto(), auto(), auto(), auto()
    ALL_EXCLUDED, EXCLUDES_NOTHING, SEEDS_NOT_RECORDED, INTERIM_REFUSED = auto(), auto(), auto(), auto()
    INTERIM_WITH_REFERENCE, INTERIM_UNPAIRED, INTERIM_TOO_LATE = auto(), auto(), auto()
    INTERIM_TOO_EARLY, ONLY_INJECTED_FAULTS = auto(), auto()
    REPORT_IS_LINK, NO_FIGURES, FORMATS_WITHOUT_FOLDER = auto(), auto(), auto()
    REPORT_OF_DECLARED, REPORT_OF_OTHER = auto(), auto()
    ARM_NOT_NAMED, ARM_WITHOUT_REFERENCE, MORE_THAN_SEEDS_DIFFERS = auto(), auto(), auto()
    ARM_NAMED_TWICE, SOURCES_OF_ONE_NAME, ONE_ARM_OF_RUNS = auto(), auto(), auto()
    RUN_IN_TWO_SOURCES, RUN_GIVEN_TWICE, SOURCE_OF_SEVERAL_ARMS = auto(), auto(), auto()
    SOURCE_OF_ARMS_AND_SEEDS, ARM_WITHOUT_NUMBERS, NO_NUMBERS = auto(), auto(), auto()
    NOTHING_NUMERIC, RERUN_WITHOUT_RUN, VERSIONS_DIFFER_OF_REFERENCE = auto(), auto(), auto()
    AXES_MIXED, NO_SHARED_PROMPT = auto(), auto()
    REFERENCE_NEEDS_ARM, REFERENCE_NEEDS_SEEDS, REFERENCE_NEEDS_WHOLE_RUNS = auto(), auto(), auto()
    REFERENCE_NOT_WRITTEN, OUTPUT_NOT_A_REFERENCE, OUTPUT_HAS_LEDGER = auto(), auto(), auto()
    NO_REFERENCE_FILE, EXPERIMENT_AS_REFERENCE, OTHER_REFERENCE_VERSION = auto(), auto(), auto()
    NOT_A_REFERENCE, BUDGET_REFUSED, NO_LEDGER, LEDGER_HAS_RUNS = auto(), auto(), auto(), auto()
    LEDGER_OF_POST_HOC, NO_TREATMENT_DECLARED, LEDGER_TAKES_MATCHES = auto(), auto(), auto()
    LEDGER_OF_OTHER_CLAIM, BASELINE_WITHOUT_CONFIG, BASELINE_NOT_THE_LINK = auto(), auto(), auto()
    LEDGER_NOT_READ, LEDGER_LINK_EDITED, LEDGER_ENTRY_EDITED, EMPTY_WINDOW = auto(), auto(), auto(), auto()
    METRIC_OUTSIDE_DOMAIN, SIGMA_UNKNOWN, NO_SPREAD = auto(), auto(), auto()

    # Gate: answers about a candidate, their caveats, and refusals
    GATE_BETTER, GATE_WORSE, GATE_ALIKE, GATE_OPEN, GATE_SEEDS_SPENT = auto(), auto(), auto(), auto(), auto()
    GATE_EVIDENCE, GATE_INCUMBENT, GATE_AGE = auto(), auto(), auto()
    GATE_ENVIRONMENT, GATE_ADD_TO_INCUMBENT = auto(), auto()
    GATE_STATE, GATE_LEDGER_MISSING, GATE_LEDGER_EXISTS, GATE_LEDGER_INVALID = auto(), auto(), auto(), auto()
    GATE_CLAIM_REFUSED, GATE_DIRECTION_UNKNOWN, GATE_WORTH_REFUSED = auto(), auto(), auto()
    GATE_INCUMBENT_REFUSED, GATE_SUPERSEDED, GATE_RUNS_CHANGED = auto(), auto(), auto()
    GATE_TOO_MANY_SEEDS, GATE_RUN_NOT_FINISHED, GATE_RUN_SHORT = auto(), auto(), auto()
    GATE_DIVERGED, GATE_INCUMBENT_DIVERGED, GATE_LINE_LOST, START_NEEDS = auto(), auto(), auto(), auto()
    GATE_FAILED, GATE_COPIES = auto(), auto()

    OTHER_VERDICT_SCHEMA, VERDICT_DAMAGED, OUTPUT_UNWRITABLE = auto(), auto(), auto()
    EXPERIMENT_BESIDE_SOURCES, EXPERIMENT_WITH_OPTION = auto(), auto()

    # Refusals: launching
    MAX_SEEDS_WITHOUT_STAGES, STAGES_NEED_LAUNCHER, STAGES_NEED_COMPARISON = auto(), auto(), auto()
    DETACH_NEEDS_QUEUE, JSON_WITHOUT_DRY_RUN = auto(), auto()
    JOBS_LEFT_IN_QUEUE, SYNC_NEEDS_PACKAGE, NOT_MEASURED_HERE = auto(), auto(), auto()
    PLAN_CANNOT_RUN, NODE_CANNOT_RUN, SLURM_REFUSES_JOB, LAUNCHED_ELSEWHERE = auto(), auto(), auto(), auto()
    LAUNCHER_UNREACHABLE, FAULTS_NEED_ABRUN_TRAINER, FAULT_NEEDS = auto(), auto(), auto()
    NO_FAULT_FITS, EXPERIMENT_NAME_INVALID = auto(), auto()
    EXPERIMENT_EXISTS, DIRECTORY_IN_USE, JOBS_QUEUED, RESUME_LACKS_RUN = auto(), auto(), auto(), auto()
    RESUME_OTHER_RECIPE, RESUME_OTHER_WARM_START = auto(), auto()
    NODE_WITHOUT_RUN, PROBE_FAILED = auto(), auto()
    PROCESSES_SURVIVE, RAY_SILENT, RAY_FAILED = auto(), auto(), auto()
    ROLLOUTS_MISSING, ROLLOUTS_DAMAGED, ROLLOUTS_UNFIT, RECORDING_FAILED = auto(), auto(), auto(), auto()
    ROLLOUTS_NOT_RECORDED, RECORDING_NOT_AWAITED = auto(), auto()
    DRIVER_WITHOUT_EXPERIMENT, DRIVER_WITHOUT_FOLDER, DRIVER_CANNOT_IMPORT_RAY = auto(), auto(), auto()
    REQUEUED_TOO_OFTEN, SLURM_COMMAND_FAILED, SLURM_COMMAND_MISSING = auto(), auto(), auto()
    SLURM_SILENT, SLURM_NOT_CONFIGURED, INTERIM_SAVES, INTERIM_COSTS_MORE = auto(), auto(), auto(), auto()
    STAGES_NEED_CLAIM = auto()
    STAGES_NEED_TREATMENT, MAX_SEEDS_WITH_INTERIM, MAX_SEEDS_TOO_FEW = auto(), auto(), auto()
    RESUME_OTHER_INTERIM, ARM_CHANGES_NOTHING, ARM_VALIDATION_DIFFERS = auto(), auto(), auto()
    TOLERANCE_WITHOUT_STEP_ONE, COMPARE_KEY_UNUSABLE, RECIPE_CLAIM_TWICE = auto(), auto(), auto()
    CLAIM_UNUSABLE, BISECT_ORDER_REVERSED, BISECT_SAME_COMMIT = auto(), auto(), auto()
    TOO_MANY_COMMITS, TOO_FEW_CANDIDATES, COMMIT_UNKNOWN = auto(), auto(), auto()
    BISECT_NEEDS_COMMAND, BISECT_NEEDS_CLAIM, BISECT_REFUSES_REFERENCE = auto(), auto(), auto()
    BISECT_NEEDS_PAIRS, BISECT_RUNS_HERE, BISECTION_OF_OTHER_NAME = auto(), auto(), auto()
    BISECTION_CHANGED, BISECT_NEEDS_CHECKOUT, PYTHON_NOT_FOUND = auto(), auto(), auto()
    DEVICE_MEMORY_WITHOUT_USE, AUTO_ASKED, AUTO_NEEDS_DEVICE_MEMORY = auto(), auto(), auto()
    AUTO_FITS_NOWHERE, AUTO_BACKEND_NOT_PREDICTED, AUTO_NOT_PREDICTED = auto(), auto(), auto()
    AUTO_NOT_MEASURED, RESUME_VALUE_NOT_AUTO, BACKEND_NOT_PREDICTED = auto(), auto(), auto()
    MASTER_DTYPE_DIFFERS, DEVICE_MEMORY_SYNTAX, MEASURES_ABRUN_TRAINER = auto(), auto(), auto()
    SEARCH_NEEDS_BUDGET = auto()
    SEQUENCES_ODD, SWEEP_KEY_TWICE, SWEEP_KEY_OF_ARM, LENGTHS_TOO_LONG = auto(), auto(), auto(), auto()
    NO_RUN, NO_RUN_STARTED, WEIGHTS_NOT_KNOWN, ALGORITHM_WITHOUT_ENGINE = auto(), auto(), auto(), auto()
    NO_CHECKPOINT, STEP_WITHOUT_CHECKPOINT, CHECKPOINT_OF_OTHER_RUN = auto(), auto(), auto()
    FIRST_WEIGHTS_GONE, SCORED_ON_ONE_RANK, SCORES_NOT_CHANGED = auto(), auto(), auto()

    # Refusals: recipes
    SECRET_IN_RECIPE, YAML_LINE_INVALID = auto(), auto()
    OVERRIDE_INDEX_NOT_ALLOWED, RECIPE_NOT_UTF8, DEFAULTS_CYCLE, WRITE_QUOTED = auto(), auto(), auto(), auto()
    WRITE_UNQUOTED, WRITE_INSTEAD, VALUE_NOT_ALLOWED, LENGTH_NOT_ALLOWED = auto(), auto(), auto(), auto()
    RULE_BROKEN, TYPE_UNKNOWN, TYPE_MISSING, VALUE_MISSING = auto(), auto(), auto(), auto()
    KEY_OF_OTHER_TYPE, KEY_UNKNOWN, KEY_RENAMED, TOO_FEW_PROBLEMS = auto(), auto(), auto(), auto()
    TOO_FEW_PROMPTS = auto()
    VALIDATION_TAKES_ALL, PROBLEMS_UNREADABLE, PROBLEM_TOO_DEEP = auto(), auto(), auto()
    PROBLEM_INVALID, PROBLEMS_EMPTY, REASONING_TASK_UNKNOWN = auto(), auto(), auto()
    REASONING_PARAMETERS_REFUSED, REASONING_SCORER_RUNS_CODE = auto(), auto()
    REASONING_TASK_NOT_REPEATABLE, REASONING_TASK_WITHOUT_ANSWER, VERIFIER_RAISED = auto(), auto(), auto()
    VERIFIER_RETURNED, VERIFIER_IMPORT_FAILED, VERIFIER_INVALID = auto(), auto(), auto()
    AUTO_NEEDS_LAUNCH, CONTROL_NEEDS_ABRUN_TRAINER, CONTROL_OF_FAULTY_BASELINE = auto(), auto(), auto()
    CONTROL_NEEDS, RECIPE_TOO_DEEP, CLAIM_LIMIT_SYNTAX, PROFILE_INVALID = auto(), auto(), auto(), auto()
    DEFAULTS_TOO_MANY_FILES, RECIPE_EMPTY, RECIPE_NOT_A_MAPPING = auto(), auto(), auto()
    DEFAULTS_INVALID, DEFAULTS_TOO_MANY, DEFAULTS_MISSING, RECIPE_UNREADABLE = auto(), auto(), auto(), auto()
    RECIPE_TOO_LARGE, OVERRIDE_WITHOUT_EFFECT, OVERRIDE_INDEX_OF_NO_LIST = auto(), auto(), auto()
    FOLDER_WITHOUT_RECIPE, SECRET_IN_ENV, SEEDS_BACKWARDS, SEEDS_TOO_MANY = auto(), auto(), auto(), auto()
    SEEDS_READ_AS_COUNT, MAX_SEEDS_BELOW_FIRST, UPLOAD_NEEDS_FILE = auto(), auto(), auto()
    SCHEMA_OF_ONE_RECIPE, PLAN_FROM_AND_ASSUMED, PLAN_NEEDS_RECIPE = auto(), auto(), auto()
    SEARCHES_TWO, OPTION_NOT_PREDICTED = auto(), auto()
    MASTER_DTYPE_UNKNOWN, OPTION_OF_OTHER_KIND, OPTIONS_NOT_ASKED = auto(), auto(), auto()
    STARTER_UNWRITABLE = auto()
    NO_FAULT_CAN_BE_INJECTED, FILE_EXISTS, RECIPE_NOT_FOUND = auto(), auto(), auto()
    RECIPE_WITHOUT_REFERENCE, NO_SUCH_RECIPE = auto(), auto()

    # Fleets
    FLEET_PROCESS_DIED = auto()
    FLEET_SUMMARY, FLEET_FOLDER_MISSING, FLEET_EMPTY = auto(), auto(), auto()
    FLEET_NOT_JUDGED, FLEET_WITHOUT_REFERENCE, FLEET_TWO_REFERENCES = auto(), auto(), auto()
    FLEET_WITHOUT_RUNS, FLEET_OPTION_REFUSED = auto(), auto()
    FLEET_NEEDS_SOURCE, FLEET_OUTPUT_HOLDS_RUNS, FLEET_FILE_REFUSED = auto(), auto(), auto()
    FLEET_ATTEMPT_FAILED, FLEET_DRIFT_USED_UP, FLEET_REFERENCE_BREAKS_LIMIT = auto(), auto(), auto()
    FLEET_REFERENCE_RED, FLEET_GONE_ON_RETRY, FLEET_GONE_ON_RERUN = auto(), auto(), auto()
    FLEET_DIFFERENCE, FLEET_IMPROVED, FLEET_ONE_RUN = auto(), auto(), auto()
    FLEET_REPAIRED, FLEET_RED_EARLIER, FLEET_RED_ON_RERUN = auto(), auto(), auto()
    FLEET_RERUN_OPEN, FLEET_RERUN_UNREADABLE, FLEET_FEW_FAILED = auto(), auto(), auto()
    FLEET_MAY_BE_CHANCE = auto()

    # Refusals: run directories and logs
    PERMISSION_DENIED, EXPERIMENT_FILE_NOT_A_FILE, EXPERIMENT_LACKS_RUNS = auto(), auto(), auto()
    FILE_IN_PLACE_OF_FOLDER, LINK_IN_PLACE_OF_FILE, JSON_NOT_AN_OBJECT = auto(), auto(), auto()
    JSON_TOO_DEEP, NOT_A_FILE, UNWRITABLE, LINE_INVALID = auto(), auto(), auto(), auto()
    METRICS_LINE_INVALID, VALIDATION_LINE_INVALID, SCHEMA_VERSION_UNKNOWN = auto(), auto(), auto()
    RUN_RECORD_INCOMPLETE, SAMPLES_LINE_INVALID, STATE_MISSING = auto(), auto(), auto()
    STATE_LACKS_RANKS, RECORD_FIELD_INVALID, RECORDS_LOST, RUN_IS_EXPERIMENT = auto(), auto(), auto(), auto()
    SYNC_NEEDS_SECTION, RUNS_NOT_SENT, STEPS_SENT, MIRROR_NOT_BEGUN = auto(), auto(), auto(), auto()
    MIRROR_STOPPED, MIRROR_NOT_ENDED, REPORT_SENT, WANDB_SWITCHED_OFF = auto(), auto(), auto(), auto()
    NO_RUN_OR_EXPERIMENT, RUNS_DIR_MISSING = auto(), auto()


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
