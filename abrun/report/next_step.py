"""What to do after a verdict: rules of when to suggest what, with a command that works when pasted."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from abrun.messages import MESSAGES, sentence
from abrun.messages.message import value_names
from abrun.reasons import Code, Reason
from abrun.recorded.experiment import RecordedExperiment, no_shared_step_reason
from abrun.redaction import shown
from abrun.report import commands
from abrun.report.commands import FreshRuns
from abrun.report.facts import Facts
from abrun.report.pasted import AGAIN, filled
from abrun.verdict.machines import versions_follow_arms
from abrun.verdict.verdict_file import VerdictFile

MOST_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStep:
    """RUNS in a command stands for what was compared, where it is not known; NEW for what is yet to come."""

    reason: Reason
    command: str

    @property
    def text(self) -> str:
        return sentence(self.reason)

    def as_json(self) -> dict[str, str]:
        return {"text": self.text, "command": self.command}


@dataclass(frozen=True, slots=True)
class Rule:
    """A step, and when it is suggested. After one that is `last`, none of the rules below it counts."""

    when: Callable[[Facts], Any]
    text: Code  # which takes its values from the facts, by their names
    command: str | Callable[[Facts], str | FreshRuns]
    last: bool = False

    def step(self, facts: Facts) -> NextStep:
        values = value_names(MESSAGES[self.text])
        reason = self.text(**{name: getattr(facts, name) for name in values})
        command = self.command if isinstance(self.command, str) else self.command(facts)
        if isinstance(command, FreshRuns):
            reason = command.with_origin(reason) if command.with_origin else reason
            command = command.command
        return NextStep(reason=reason, command=command)


def next_steps(
    experiment: RecordedExperiment, content: VerdictFile, typed: str | None = None
) -> list[NextStep]:
    """The most useful first; at least one. `typed`: the command line that asked for the comparison."""
    facts, words = Facts(experiment, content), shlex.split(typed or "")
    steps = [rule.step(facts) for rule in islice(suggested(facts), MOST_STEPS)]
    return [
        NextStep(reason=step.reason, command=shown(filled(step.command, experiment, words))) for step in steps
    ]


def suggested(facts: Facts) -> Iterator[Rule]:
    """Yield the rules that hold, in their order."""
    for rule in rules_for(facts):
        if rule.when(facts):
            yield rule
            if rule.last:
                return


def rules_for(facts: Facts) -> Sequence[Rule]:
    """Return the rules of a verdict, which depend on who made the runs and on whether anything is claimed."""
    match facts.content.verdict:
        case "MATCH":
            return MATCH
        case "MISMATCH":
            return MISMATCH if facts.launched else MISMATCH_OF_OTHERS
        case "INVALID":
            return INVALID if facts.launched else INVALID_OF_OTHERS
    is_claimed = bool(facts.content.claims)
    if facts.regression:
        return OPEN_WITH_REFERENCE
    if facts.launched:
        return OPEN if is_claimed else UNCLAIMED
    if facts.content.descriptions:
        return DESCRIBED_OF_OTHERS
    return OPEN_OF_OTHERS if is_claimed else UNCLAIMED_OF_OTHERS


COMPARE = "abrun compare RUNS"
STEP_ONE_OPEN = Rule(lambda f: f.unsettled, Code.REPEAT_IN_FLOAT32, f"{COMPARE} --no-step-one")
INTERIM_TO_COME = Rule(lambda f: f.waiting, Code.TRAIN_FOR_INTERIM, commands.at_next_analysis, last=True)
CONFIRM = Rule(lambda f: True, Code.CONFIRM_ON_FRESH_SEEDS, commands.fresh)
CANNOT_SHOW = Rule(lambda f: f.untestable, Code.MEND_REASONS, COMPARE, last=True)
OTHER_CLAIMS = Rule(
    lambda f: f.other_claims and not (f.launched and f.undecided),
    Code.CLAIM_WHAT_SHOWS,
    commands.with_other_claims,
)

MATCH = (
    Rule(lambda f: f.content.post_hoc, Code.TEST_ON_FRESH_SEEDS, commands.fresh),
    Rule(
        lambda f: not f.content.post_hoc and f.content.sensitivity is None and f.experiment.can_inject,
        Code.INJECT_FAULTS,
        "abrun sensitivity RECIPE",
    ),
    Rule(
        lambda f: f.regression and f.launched,
        Code.LAUNCH_NEXT_CHANGE,
        f"abrun launch RECIPE --name NEW --no-compare && {AGAIN}",
        last=True,
    ),
    Rule(lambda f: f.regression, Code.COMPARE_NEXT_CHANGE, AGAIN, last=True),
    Rule(  # a reference takes claims alone: later runs are compared seed by seed, their first step too
        lambda f: f.declared or (f.paired and f.experiment.compare.step_one),
        Code.FREEZE_RUNS,
        commands.frozen,
    ),
)

MISMATCH = (
    Rule(lambda f: any(one.guard == "finished" for one in f.failing), Code.READ_ENDINGS, commands.status),
    Rule(lambda f: f.engines_differ, Code.FIND_MISMATCH, commands.mismatch),
    Rule(lambda f: not f.regression and f.both_kept_completions, Code.READ_COMPLETIONS, commands.samples),
    CONFIRM,
)
MISMATCH_OF_OTHERS = (
    Rule(
        lambda f: f.deviating and not (f.failing or f.differing),
        Code.SKIP_STEP_ONE,
        f"{COMPARE} --no-step-one",
    ),
    CONFIRM,
)

OPEN = (  # of INCONCLUSIVE
    Rule(lambda f: f.content.descriptions, Code.TRAIN_THREE_SEEDS, commands.three_seeds, last=True),
    Rule(lambda f: f.waiting - f.unsettled, Code.FINISH_INTERIM_PAIRS, commands.resumed, last=True),
    Rule(lambda f: f.untestable, Code.TRAIN_LONGER, commands.longer),
    Rule(lambda f: f.unsettled and f.float32_tells, Code.RUN_IN_FLOAT32, commands.in_float32),
    Rule(lambda f: f.unsettled, Code.DECLARE_ROUNDING, commands.fresh_with_rounding),
    Rule(
        lambda f: f.undecided and f.num_that_decide is None,
        Code.PLAN_WIDER_MARGIN,
        commands.plan_of_same,
    ),
    Rule(
        lambda f: f.undecided and f.num_that_decide is not None,
        Code.TRAIN_MORE_PAIRS,
        commands.fresh_that_decide,
    ),
    OTHER_CLAIMS,
    Rule(lambda f: not (f.undecided or f.untestable or f.unsettled), Code.TELL_FROM_CHANCE, commands.fresh),
)
UNCLAIMED = (  # which no number of seeds decides
    Rule(lambda f: f.nothing_shown, Code.TRAIN_LONGER, commands.longer, last=True),
    Rule(
        lambda f: not f.claimable,
        Code.DECLARE_METRIC,
        "abrun plan RECIPE --set 'compare.claims=[{metric: METRIC, margin: MARGIN}]'",
        last=True,
    ),
    Rule(lambda f: f.seeds_settle_claim, Code.DECLARE_MARGIN, commands.fresh_with_claim),
    Rule(lambda f: f.several_runs, Code.PLAN_SEEDS, commands.plan_of_claim),
)
OPEN_WITH_REFERENCE = (  # which pairs the seeds that it has, and no others
    STEP_ONE_OPEN,
    Rule(
        lambda f: not f.content.claims,
        Code.CLAIM_AGAINST_REFERENCE,
        f"{COMPARE} --claim METRIC:WINDOW:MARGIN",
        last=True,
    ),
    Rule(lambda f: len(f.seeds_left) > 1, Code.OTHER_SEEDS_ALONE, commands.with_other_seeds, last=True),
    Rule(lambda f: f.seeds_left, Code.OTHER_SEED_TOO, commands.with_other_seeds, last=True),
    CANNOT_SHOW,
    Rule(lambda f: True, Code.NARROW_INTERVAL, commands.fresh),
)
DESCRIBED_OF_OTHERS = (
    STEP_ONE_OPEN,
    INTERIM_TO_COME,
    Rule(lambda f: not f.content.claims and f.claimable, Code.CLAIM_ALIKE, commands.with_claim),
    Rule(lambda f: not (f.content.claims or f.claimable), Code.LOG_OR_TRAIN_LONGER, COMPARE),
    Rule(lambda f: max(f.content.descriptions[0].num_runs) == 1, Code.TRAIN_TWO_EACH, COMPARE),
)
UNCLAIMED_OF_OTHERS = (
    STEP_ONE_OPEN,
    INTERIM_TO_COME,
    Rule(
        lambda f: any(run.unread for run in f.experiment.runs.values()),
        Code.MEND_REASONS,
        COMPARE,
        last=True,
    ),
    Rule(lambda f: True, Code.NAME_METRICS, f"{COMPARE} --alias train/reward=NAME"),
)
OPEN_OF_OTHERS = (  # fresh runs are judged alone: a test that is repeated on the same runs errs more
    STEP_ONE_OPEN,
    OTHER_CLAIMS,
    INTERIM_TO_COME,
    CANNOT_SHOW,
    Rule(lambda f: not f.undecided, Code.FRESH_SEEDS_DECIDE, commands.fresh, last=True),
    Rule(lambda f: f.num_that_decide is None, Code.CONFIRM_DIFFERENCE, commands.fresh),
    Rule(lambda f: f.num_that_decide is not None, Code.TRAIN_MORE_PAIRS, commands.fresh_that_decide),
)

INVALID = (
    Rule(lambda f: any(run.status != "missing" for run in f.broken), Code.READ_FIRST_LOG, commands.first_log),
    Rule(lambda f: f.broken, Code.RESUME_RUNS, commands.resumed, last=True),
    # A launch with the wrong alias would end its runs again
    Rule(
        lambda f: f.claim_not_recorded and f.better_aliases, Code.READ_BY_OTHER_NAME, commands.by_other_names
    ),
    Rule(
        lambda f: f.claim_not_recorded and not f.better_aliases and f.other_claims,
        Code.CLAIM_WHAT_SHOWS,
        commands.with_other_claims,
    ),
    Rule(lambda f: True, Code.MEND_RECIPE, "abrun launch RECIPE --dry-run"),
)
INVALID_OF_OTHERS = (
    Rule(
        lambda f: versions_follow_arms(f.experiment),
        Code.CALL_VERSIONS_TREATMENT,
        f"{COMPARE} --versions-differ",
    ),
    Rule(
        lambda f: f.can_unpair and f.shared_seeds,
        Code.COMPARE_SHARED_SEEDS,
        lambda f: f"{COMPARE} --seeds {commands.listed(f.shared_seeds)}",
    ),
    Rule(lambda f: f.can_unpair and not f.shared_seeds, Code.UNPAIR, f"{COMPARE} --unpaired"),
    Rule(
        lambda f: not f.can_unpair and no_shared_step_reason([*f.experiment.runs.values()]),
        Code.NAME_STEP_COLUMN,
        f"{COMPARE} --step-column NAME",
    ),
    Rule(lambda f: True, Code.MEND_REASONS, COMPARE),
)
