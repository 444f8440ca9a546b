"""The next steps suggested after a verdict, as rules: a condition, a text and a command ready to paste."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from abrun.logs.recorded.experiment import RecordedExperiment, no_shared_step_reason
from abrun.messages import MESSAGES, sentence
from abrun.messages.codes import Code, Reason
from abrun.messages.message import value_names
from abrun.report import commands
from abrun.report.commands import COMPARE_WITH_REFERENCE, FreshRunsCommand, fill_placeholders
from abrun.report.facts import NextStepFacts
from abrun.runs.redaction import display_safe
from abrun.verdict.machines import versions_follow_arms
from abrun.verdict.verdict_file import VerdictFile

MAX_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStep:
    """A suggestion and its command. RUNS stands for unknown compared runs, NEW for runs to be made."""

    reason: Reason
    command: str

    @property
    def text(self) -> str:
        return sentence(self.reason)

    def as_json(self) -> dict[str, str]:
        return {"text": self.text, "command": self.command}


@dataclass(frozen=True, slots=True)
class NextStepRule:
    """A next step and the condition for suggesting it. A matching rule that `is_final` ends the search."""

    condition: Callable[[NextStepFacts], Any]
    text: Code  # its values are the facts of the same name
    command: str | Callable[[NextStepFacts], str | FreshRunsCommand]
    is_final: bool = False

    def make_step(self, facts: NextStepFacts) -> NextStep:
        values = value_names(MESSAGES[self.text])
        reason = self.text(**{name: getattr(facts, name) for name in values})
        command = self.command if isinstance(self.command, str) else self.command(facts)
        if isinstance(command, FreshRunsCommand):
            reason = command.add_origin(reason) if command.add_origin else reason
            command = command.command
        return NextStep(reason=reason, command=command)


def next_steps(
    experiment: RecordedExperiment, content: VerdictFile, typed: str | None = None
) -> list[NextStep]:
    """Return one or two next steps, the most useful first. `typed` is the command line of the comparison."""
    facts, words = NextStepFacts(experiment, content), shlex.split(typed or "")
    steps = [rule.make_step(facts) for rule in islice(matching_rules(facts), MAX_STEPS)]
    filled = [(step.reason, fill_placeholders(step.command, experiment, words)) for step in steps]
    return [
        NextStep(reason=reason, command=display_safe(commands.install_trainer(facts, command) + command))
        for reason, command in filled
    ]


def matching_rules(facts: NextStepFacts) -> Iterator[NextStepRule]:
    """Yield the rules whose conditions hold, in order, up to the first final one."""
    for rule in rules_for(facts):
        if rule.condition(facts):
            yield rule
            if rule.is_final:
                return


def rules_for(facts: NextStepFacts) -> Sequence[NextStepRule]:
    """Return the rules for this verdict: they depend on who made the runs and on whether there are claims."""
    if facts.content.select("seed noise"):
        return ONE_ARM
    if facts.has_prompts_as_units and facts.content.claims and facts.content.verdict != "INVALID":
        return (TRAIN_TWO_EACH,)
    match facts.content.verdict:
        case "MATCH" | "PASS":
            return MATCH
        case "MISMATCH" | "FAIL":
            return MISMATCH if facts.launched else MISMATCH_OF_OTHERS
        case "INVALID":
            return INVALID if facts.launched else INVALID_OF_OTHERS
    is_claimed = bool(facts.content.claims)
    if facts.regression:
        return OPEN_WITH_REFERENCE
    if facts.launched:
        return OPEN if is_claimed else UNCLAIMED
    if facts.content.select("description"):
        return DESCRIBED_OF_OTHERS
    return OPEN_OF_OTHERS if is_claimed else UNCLAIMED_OF_OTHERS


COMPARE = "abrun compare RUNS"
STEP_ONE_OPEN = NextStepRule(
    lambda f: f.arms_with_open_checks, Code.REPEAT_IN_FLOAT32, f"{COMPARE} --no-step-one"
)
INTERIM_TO_COME = NextStepRule(
    lambda f: f.waiting_arms, Code.TRAIN_FOR_INTERIM, commands.at_next_analysis, is_final=True
)
CONFIRM = NextStepRule(lambda f: True, Code.CONFIRM_ON_FRESH_SEEDS, commands.run_fresh_seeds)
CANNOT_SHOW = NextStepRule(lambda f: f.has_untestable_claims, Code.MEND_REASONS, COMPARE, is_final=True)
OTHER_CLAIMS = NextStepRule(
    lambda f: f.replacement_claims and not (f.launched and f.undecided_claims),
    Code.CLAIM_WHAT_SHOWS,
    commands.compare_with_other_claims,
)

MATCH = (
    NextStepRule(lambda f: f.content.post_hoc, Code.TEST_ON_FRESH_SEEDS, commands.run_fresh_seeds),
    NextStepRule(
        lambda f: (
            not f.content.post_hoc and not f.content.select("injected fault") and f.experiment.can_inject
        ),
        Code.INJECT_FAULTS,
        "abrun faults run RECIPE",
    ),
    NextStepRule(
        lambda f: f.regression and f.launched,
        Code.LAUNCH_NEXT_CHANGE,
        f"abrun launch RECIPE --name NEW --no-compare && {COMPARE_WITH_REFERENCE}",
        is_final=True,
    ),
    NextStepRule(lambda f: f.regression, Code.COMPARE_NEXT_CHANGE, COMPARE_WITH_REFERENCE, is_final=True),
    # A reference keeps only the claims. Later runs are compared with it seed by seed, step one included.
    NextStepRule(
        lambda f: f.is_declared or (f.paired and f.experiment.compare.step_one),
        Code.FREEZE_RUNS,
        commands.freeze_runs,
    ),
)

MISMATCH = (
    NextStepRule(
        lambda f: any(guard["guard"] == "finished" for guard in f.failed_guards),
        Code.READ_ENDINGS,
        commands.show_status,
    ),
    NextStepRule(
        lambda f: f.has_engine_mismatch and f.has_initial_weights,
        Code.FIND_MISMATCH,
        commands.measure_mismatch,
    ),
    NextStepRule(lambda f: f.failed_checks and f.can_trace, Code.FIND_TENSOR, commands.trace_arms),
    NextStepRule(
        lambda f: not f.regression and f.has_completions, Code.READ_COMPLETIONS, commands.show_samples
    ),
    CONFIRM,
)
MISMATCH_OF_OTHERS = (
    NextStepRule(
        lambda f: f.failed_checks and not (f.failed_guards or f.failed_claims),
        Code.SKIP_STEP_ONE,
        f"{COMPARE} --no-step-one",
    ),
    CONFIRM,
)

# The rules for INCONCLUSIVE.
OPEN = (
    NextStepRule(
        lambda f: f.content.select("description"),
        Code.TRAIN_THREE_SEEDS,
        commands.run_three_fresh_seeds,
        is_final=True,
    ),
    NextStepRule(
        lambda f: f.waiting_arms - f.arms_with_open_checks,
        Code.FINISH_INTERIM_PAIRS,
        commands.resume_launch,
        is_final=True,
    ),
    NextStepRule(lambda f: f.has_untestable_claims, Code.TRAIN_LONGER, commands.launch_longer),
    NextStepRule(
        lambda f: f.arms_with_open_checks and f.is_float32_conclusive,
        Code.RUN_IN_FLOAT32,
        commands.launch_in_float32,
    ),
    NextStepRule(
        lambda f: f.arms_with_open_checks, Code.DECLARE_ROUNDING, commands.run_fresh_seeds_with_tolerances
    ),
    NextStepRule(
        lambda f: f.undecided_claims and f.num_pairs_that_decide is None,
        Code.PLAN_WIDER_MARGIN,
        commands.plan_experiment,
    ),
    NextStepRule(
        lambda f: f.undecided_claims and f.num_pairs_that_decide is not None,
        Code.TRAIN_MORE_PAIRS,
        commands.run_enough_fresh_seeds,
    ),
    OTHER_CLAIMS,
    NextStepRule(
        lambda f: not (f.undecided_claims or f.has_untestable_claims or f.arms_with_open_checks),
        Code.TELL_FROM_CHANCE,
        commands.run_fresh_seeds,
    ),
)
# Without a claim, no number of seeds gives a verdict.
UNCLAIMED = (
    NextStepRule(lambda f: f.nothing_shown, Code.TRAIN_LONGER, commands.launch_longer, is_final=True),
    NextStepRule(
        lambda f: not f.claimable,
        Code.DECLARE_METRIC,
        "abrun power RECIPE --set 'compare.claims=[{metric: METRIC, margin: MARGIN}]'",
        is_final=True,
    ),
    NextStepRule(lambda f: f.is_claim_decidable, Code.DECLARE_MARGIN, commands.run_fresh_seeds_with_claim),
    NextStepRule(lambda f: f.has_several_runs, Code.PLAN_SEEDS, commands.plan_with_claim),
)
# A reference can only be paired with runs of its own seeds.
OPEN_WITH_REFERENCE = (
    STEP_ONE_OPEN,
    NextStepRule(
        lambda f: not f.content.claims,
        Code.CLAIM_AGAINST_REFERENCE,
        f"{COMPARE} --claim METRIC:WINDOW:MARGIN",
        is_final=True,
    ),
    NextStepRule(
        lambda f: len(f.seeds_left) > 1,
        Code.OTHER_SEEDS_ALONE,
        commands.compare_with_other_seeds,
        is_final=True,
    ),
    NextStepRule(
        lambda f: f.seeds_left, Code.OTHER_SEED_TOO, commands.compare_with_other_seeds, is_final=True
    ),
    CANNOT_SHOW,
    NextStepRule(lambda f: True, Code.NARROW_INTERVAL, commands.run_fresh_seeds),
)
TRAIN_TWO_EACH = NextStepRule(lambda f: True, Code.TRAIN_TWO_EACH, COMPARE)
DESCRIBED_OF_OTHERS = (
    STEP_ONE_OPEN,
    INTERIM_TO_COME,
    NextStepRule(lambda f: f.content.select("new run"), Code.TRAIN_MORE_OF_NEW, COMPARE, is_final=True),
    NextStepRule(
        lambda f: not f.content.claims and f.claimable, Code.CLAIM_ALIKE, commands.compare_with_claim
    ),
    NextStepRule(lambda f: not (f.content.claims or f.claimable), Code.LOG_OR_TRAIN_LONGER, COMPARE),
    replace(TRAIN_TWO_EACH, condition=lambda f: max(f.content.select("description")[0]["num_runs"]) == 1),
)
UNCLAIMED_OF_OTHERS = (
    STEP_ONE_OPEN,
    INTERIM_TO_COME,
    NextStepRule(
        lambda f: any(run.unread for run in f.experiment.runs.values()),
        Code.MEND_REASONS,
        COMPARE,
        is_final=True,
    ),
    NextStepRule(lambda f: True, Code.NAME_METRICS, f"{COMPARE} --alias train/reward=NAME"),
)
# Suggest fresh runs: repeating a test on the same runs inflates its error rate.
OPEN_OF_OTHERS = (
    STEP_ONE_OPEN,
    NextStepRule(lambda f: f.content.select("new run"), Code.TRAIN_MORE_OF_NEW, COMPARE, is_final=True),
    OTHER_CLAIMS,
    INTERIM_TO_COME,
    CANNOT_SHOW,
    NextStepRule(
        lambda f: not f.undecided_claims, Code.FRESH_SEEDS_DECIDE, commands.run_fresh_seeds, is_final=True
    ),
    NextStepRule(
        lambda f: f.num_pairs_that_decide is None, Code.CONFIRM_DIFFERENCE, commands.run_fresh_seeds
    ),
    NextStepRule(
        lambda f: f.num_pairs_that_decide is not None, Code.TRAIN_MORE_PAIRS, commands.run_enough_fresh_seeds
    ),
)

# One arm alone, described or with claims on its level.
ONE_ARM = (
    NextStepRule(lambda f: f.content.verdict == "INVALID", Code.MEND_REASONS, COMPARE, is_final=True),
    NextStepRule(
        lambda f: (
            f.is_level_open
            or all(
                noise["gap"] is None or len(noise["levels"]) < 3 for noise in f.content.select("seed noise")
            )
        ),
        Code.TRAIN_MORE_OF_ARM,
        COMPARE,
        is_final=True,
    ),
    NextStepRule(lambda f: True, Code.COMPARE_CHANGE, commands.compare_with_new_runs),
)

INVALID = (
    NextStepRule(
        lambda f: any(run.status != "missing" for run in f.unfinished_runs),
        Code.READ_FIRST_LOG,
        commands.show_first_log,
    ),
    NextStepRule(lambda f: f.unfinished_runs, Code.RESUME_RUNS, commands.resume_launch, is_final=True),
    # Launching again with the wrong alias would lose the metric again.
    NextStepRule(
        lambda f: f.is_claim_unrecorded and f.suggested_aliases,
        Code.READ_BY_OTHER_NAME,
        commands.compare_with_aliases,
    ),
    NextStepRule(
        lambda f: f.is_claim_unrecorded and not f.suggested_aliases and f.replacement_claims,
        Code.CLAIM_WHAT_SHOWS,
        commands.compare_with_other_claims,
    ),
    # No change of the recipe repairs directories that were swapped or copied.
    NextStepRule(lambda f: f.has_misplaced_runs, Code.MEND_REASONS, COMPARE, is_final=True),
    NextStepRule(lambda f: True, Code.MEND_RECIPE, "abrun launch RECIPE --dry-run"),
)
INVALID_OF_OTHERS = (
    NextStepRule(
        lambda f: versions_follow_arms(f.experiment),
        Code.CALL_VERSIONS_TREATMENT,
        f"{COMPARE} --versions-differ",
    ),
    NextStepRule(
        lambda f: f.can_unpair and f.shared_seeds,
        Code.COMPARE_SHARED_SEEDS,
        lambda f: f"{COMPARE} --seeds {commands.join_numbers(f.shared_seeds)}",
    ),
    NextStepRule(lambda f: f.can_unpair and not f.shared_seeds, Code.UNPAIR, f"{COMPARE} --unpaired"),
    NextStepRule(
        lambda f: not f.can_unpair and no_shared_step_reason([*f.experiment.runs.values()]),
        Code.NAME_STEP_COLUMN,
        f"{COMPARE} --step-column NAME",
    ),
    NextStepRule(lambda f: True, Code.MEND_REASONS, COMPARE),
)
