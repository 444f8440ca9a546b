"""What to do after a verdict: rules of when to suggest what, with a command that works when pasted."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from abrun.compare.judge.verdict_file import VerdictFile
from abrun.compare.read.experiment import Experiment
from abrun.compare.show.commands import (
    FreshRuns,
    claiming,
    compared,
    compared_by_name,
    fresh_runs,
    frozen,
    in_float32,
    in_stages,
    listed,
    longer,
    other_seeds,
    planned,
    resumed,
)
from abrun.compare.show.facts import Facts
from abrun.compare.show.pasted import AGAIN, WITHOUT_CLAIMS, filled, name_of
from abrun.messages import sentence
from abrun.reasons import Code, Reason
from abrun.redaction import shown

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
    text: Code
    command: str | Callable[[Facts], str | FreshRuns]
    values: Callable[[Facts], Mapping[str, Any]] = lambda facts: {}  # of the text
    last: bool = False

    def step(self, facts: Facts) -> NextStep:
        reason = self.text(**self.values(facts))
        command = self.command if isinstance(self.command, str) else self.command(facts)
        if isinstance(command, FreshRuns):
            reason = command.with_origin(reason) if command.with_origin else reason
            command = command.command
        return NextStep(reason=reason, command=command)


def next_steps(experiment: Experiment, content: VerdictFile, typed: str | None = None) -> list[NextStep]:
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
    is_claimed = bool(facts.content.primaries)
    if facts.with_reference:
        return OPEN_WITH_REFERENCE
    if facts.launched:
        return OPEN if is_claimed else UNCLAIMED
    if facts.content.descriptions:
        return DESCRIBED_OF_OTHERS
    return OPEN_OF_OTHERS if is_claimed else UNCLAIMED_OF_OTHERS


def _always(facts: Facts) -> bool:
    return True


def _fresh(facts: Facts) -> FreshRuns:
    return fresh_runs(facts.experiment)


def _fresh_that_decide(facts: Facts) -> FreshRuns:
    return fresh_runs(facts.experiment, facts.num_that_decide)


def _needed(facts: Facts) -> Mapping[str, Any]:
    return {"needed": facts.pairs_that_decide[0]}


def _run(facts: Facts, arm: str | None = None) -> str:
    """Name the first run that fails, or that of another arm with its seed."""
    failing, seed = facts.first_run
    return f"{name_of(facts.experiment)}/{arm or shlex.quote(failing)}/seed-{seed}"


def _mismatch_measured(facts: Facts) -> str:
    step = facts.engines_deviating[0].step if facts.engines_deviating else None
    return f"abrun mismatch {_run(facts)}{'' if step is None else f' --step {step - 1}'}"  # its first update


def _completions_read(facts: Facts) -> str:
    step = f" --step {facts.deviating[0].step}" if facts.deviating else ""
    return f"abrun samples {_run(facts)} --against {_run(facts, facts.experiment.baseline)}{step}"


def _fresh_with_rounding(facts: Facts) -> FreshRuns:
    needed = max((one.power.pairs_needed or 0 for one in facts.undecided), default=0)
    return fresh_runs(facts.with_tolerances, needed or None)


def _fresh_with_prompts(facts: Facts) -> str:
    found = facts.prompt_limited[0]
    fresh = fresh_runs(facts.experiment, found.pairs_needed_with_twice)
    return f"{fresh.command} --set validation.num_prompts={2 * found.num_prompts}"


def _staged(facts: Facts) -> str:
    count = facts.num_that_decide
    return in_stages(_fresh_that_decide(facts), count) if facts.content.paired and count else ""


def _look_compared(facts: Facts) -> str:
    seeds, new = facts.look_seeds
    looks = listed(facts.experiment.compare.looks)
    return f"abrun compare RUNS --seeds {listed([*seeds, *new])} --looks {looks}"


def _with_other_claims(facts: Facts) -> str | FreshRuns:
    claimed = claiming(facts.experiment, facts.other_claims)
    return fresh_runs(claimed) if facts.launched else compared(claimed)


OTHER_CLAIMS = (
    Code.CLAIM_WHAT_SHOWS,
    _with_other_claims,
    lambda f: {
        "margin": None if f.kept_claims else f.margin,
        "fresh": f.launched,
    },
)
STEP_ONE_OPEN = Rule(lambda f: f.unsettled, Code.REPEAT_IN_FLOAT32, "abrun compare RUNS --no-step-one")
LOOK_TO_COME = Rule(
    lambda f: f.waiting,
    Code.TRAIN_FOR_LOOK,
    _look_compared,
    lambda f: {"seeds": f.look_seeds[1]},
    last=True,
)

MATCH = (
    Rule(lambda f: f.content.post_hoc, Code.TEST_ON_FRESH_SEEDS, _fresh, lambda f: {"launched": f.launched}),
    Rule(
        lambda f: not f.content.post_hoc and f.content.sensitivity is None and f.experiment.can_plant,
        Code.PLANT_FAULTS,
        "abrun sensitivity RECIPE",
    ),
    Rule(
        lambda f: f.with_reference and f.launched,
        Code.LAUNCH_NEXT_CHANGE,
        f"abrun launch RECIPE --name NEW --no-compare && {AGAIN}",
        last=True,
    ),
    Rule(lambda f: f.with_reference, Code.COMPARE_NEXT_CHANGE, AGAIN, last=True),
    Rule(lambda f: f.can_be_frozen, Code.FREEZE_RUNS, lambda f: frozen(f.experiment)),
)

MISMATCH = (
    Rule(
        lambda f: any(guard.guard == "finished" for guard in f.failing),
        Code.READ_ENDINGS,
        lambda f: f"abrun status {name_of(f.experiment)}",
    ),
    Rule(lambda f: f.engines_differ, Code.FIND_MISMATCH, _mismatch_measured),
    Rule(
        lambda f: not f.with_reference and f.both_kept_completions, Code.READ_COMPLETIONS, _completions_read
    ),
    Rule(_always, Code.CONFIRM_ON_FRESH_SEEDS, _fresh),
)
MISMATCH_OF_OTHERS = (
    Rule(
        lambda f: f.deviating and not (f.failing or f.differing),
        Code.SKIP_STEP_ONE,
        "abrun compare RUNS --no-step-one",
    ),
    Rule(_always, Code.CONFIRM_ON_FRESH_SEEDS, _fresh),
)

OPEN = (  # INCONCLUSIVE
    Rule(
        lambda f: f.content.descriptions,
        Code.TRAIN_THREE_SEEDS,
        lambda f: fresh_runs(f.experiment, 3),
        last=True,
    ),
    Rule(lambda f: f.waiting - f.unsettled, Code.FINISH_LOOK, lambda f: resumed(f.experiment), last=True),
    Rule(
        lambda f: f.untestable,
        Code.TRAIN_LONGER,
        lambda f: longer(f.experiment),
        lambda f: {"problem": None},
    ),
    Rule(lambda f: f.unsettled and f.float32_tells, Code.RUN_IN_FLOAT32, lambda f: in_float32(f.experiment)),
    Rule(
        lambda f: f.unsettled,
        Code.DECLARE_ROUNDING,
        _fresh_with_rounding,
        lambda f: {"untested": f.untested_metrics},
    ),
    Rule(
        lambda f: f.undecided and f.num_that_decide is None,
        Code.PLAN_WIDER_MARGIN,
        lambda f: planned(f.experiment),
        _needed,
    ),
    Rule(
        lambda f: f.undecided and f.num_that_decide is not None,
        Code.TRAIN_MORE_PAIRS,
        _fresh_that_decide,
        _needed,
    ),
    Rule(
        lambda f: f.undecided and f.prompt_limited and not f.beyond_margin,
        Code.DOUBLE_PROMPTS,
        _fresh_with_prompts,
        lambda f: {"num_pairs": f.prompt_limited[0].pairs_needed_with_twice},
    ),
    Rule(lambda f: not f.undecided and f.other_claims, *OTHER_CLAIMS),
    Rule(
        lambda f: not (f.undecided or f.untestable or f.unsettled),
        Code.TELL_FROM_CHANCE,
        _fresh,
    ),
)
UNCLAIMED = (  # launched, and nothing claimed: no number of seeds decides it
    Rule(
        lambda f: f.nothing_shown,
        Code.TRAIN_LONGER,
        lambda f: longer(f.experiment),
        lambda f: {"problem": f.nothing_shown},
        last=True,
    ),
    Rule(
        lambda f: not f.claimable,
        Code.DECLARE_METRIC,
        "abrun plan RECIPE --set 'compare.primary=[{metric: METRIC, margin: MARGIN}]'",
        last=True,
    ),
    Rule(
        lambda f: f.seeds_settle_claim,
        Code.DECLARE_MARGIN,
        lambda f: fresh_runs(f.with_claim, f.num_to_claim),
        lambda f: {"margin": f.margin, "needed": f.claim_needs},
    ),
    Rule(lambda f: f.several_runs, Code.PLAN_SEEDS, lambda f: planned(f.with_claim)),
)
OPEN_WITH_REFERENCE = (  # which pairs the seeds that it has, and no others
    STEP_ONE_OPEN,
    Rule(
        lambda f: not f.content.primaries,
        Code.CLAIM_AGAINST_REFERENCE,
        "abrun compare RUNS --primary METRIC:WINDOW:MARGIN",
        last=True,
    ),
    Rule(lambda f: not f.seeds_left and f.untestable, Code.MEND_REASONS, "abrun compare RUNS", last=True),
    Rule(lambda f: not f.seeds_left, Code.NARROW_INTERVAL, _fresh),
    Rule(
        lambda f: len(f.seeds_left) > 1,
        Code.OTHER_SEEDS_ALONE,
        lambda f: other_seeds(f.experiment, *f.reference_seeds),
        lambda f: {"seeds": f.seeds_left},
    ),
    Rule(
        lambda f: len(f.seeds_left) == 1,
        Code.OTHER_SEED_TOO,
        lambda f: other_seeds(f.experiment, *f.reference_seeds),
        lambda f: {"seeds": f.seeds_left},
    ),
)
DESCRIBED_OF_OTHERS = (
    STEP_ONE_OPEN,
    LOOK_TO_COME,
    Rule(
        lambda f: not f.content.primaries and f.claimable,
        Code.CLAIM_ALIKE,
        lambda f: compared(f.with_claim, paired=f.content.paired),
        lambda f: {"margin": f.margin},
    ),
    Rule(
        lambda f: not (f.content.primaries or f.claimable),
        Code.LOG_OR_TRAIN_LONGER,
        "abrun compare RUNS",
    ),
    Rule(
        lambda f: max(f.content.descriptions[0].num_runs) == 1,
        Code.TRAIN_TWO_EACH,
        "abrun compare RUNS",
        lambda f: {"paired": f.content.paired},
    ),
)
UNCLAIMED_OF_OTHERS = (
    STEP_ONE_OPEN,
    LOOK_TO_COME,
    Rule(
        lambda f: any(run.unread for run in f.experiment.runs.values()),
        Code.MEND_REASONS,
        "abrun compare RUNS",
        last=True,
    ),
    Rule(_always, Code.NAME_METRICS, "abrun compare RUNS --alias train/reward=NAME"),
)
OPEN_OF_OTHERS = (  # fresh runs are judged alone: a test that is repeated on the same runs errs more
    STEP_ONE_OPEN,
    Rule(lambda f: f.other_claims, *OTHER_CLAIMS),
    LOOK_TO_COME,
    Rule(lambda f: f.untestable, Code.MEND_REASONS, "abrun compare RUNS", last=True),
    Rule(lambda f: not f.undecided, Code.FRESH_SEEDS_DECIDE, _fresh, last=True),
    Rule(
        lambda f: f.num_that_decide is None,
        Code.SEE_OTHER_DIFFERENCES,
        f"abrun compare RUNS{WITHOUT_CLAIMS}",
        _needed,
    ),
    Rule(lambda f: f.beyond_margin, Code.CONFIRM_DIFFERENCE, _fresh),
    Rule(lambda f: f.num_that_decide is not None, Code.TRAIN_MORE_PAIRS, _fresh_that_decide, _needed),
    Rule(_staged, Code.TEST_IN_STAGES, _staged),
)

INVALID = (
    Rule(
        lambda f: f.begun,
        Code.READ_FIRST_LOG,
        lambda f: f"abrun logs {name_of(f.experiment)}/{f.begun[0].name}",
    ),
    Rule(lambda f: f.broken, Code.RESUME_RUNS, lambda f: resumed(f.experiment), last=True),
    Rule(  # a launch with the wrong alias would end its runs again
        lambda f: f.claim_not_recorded and f.better_aliases,
        Code.READ_BY_OTHER_NAME,
        lambda f: compared_by_name(f.experiment, f.better_aliases),
    ),
    Rule(lambda f: f.claim_not_recorded and not f.better_aliases and f.other_claims, *OTHER_CLAIMS),
    Rule(_always, Code.MEND_RECIPE, "abrun launch RECIPE --dry-run"),
)
INVALID_OF_OTHERS = (
    Rule(
        lambda f: f.versions_follow_arms,
        Code.CALL_VERSIONS_TREATMENT,
        "abrun compare RUNS --versions-differ",
    ),
    Rule(
        lambda f: f.can_unpair and f.shared_seeds,
        Code.COMPARE_SHARED_SEEDS,
        lambda f: f"abrun compare RUNS --seeds {listed(f.shared_seeds)}",
    ),
    Rule(lambda f: f.can_unpair and not f.shared_seeds, Code.UNPAIR, "abrun compare RUNS --unpaired"),
    Rule(
        lambda f: not f.can_unpair and f.no_shared_step,
        Code.NAME_STEP_COLUMN,
        "abrun compare RUNS --step-column NAME",
    ),
    Rule(
        lambda f: f.held_by_all[0],
        Code.CLAIM_SHARED_STEPS,
        lambda f: compared(claiming(f.experiment, f.held_by_all[0])),
    ),
    Rule(
        lambda f: len(f.held_by_all[1]) > 1,
        Code.COMPARE_WHOLE_SEEDS,
        lambda f: f"abrun compare RUNS --seeds {listed(f.held_by_all[1])}",
    ),
    Rule(_always, Code.MEND_REASONS, "abrun compare RUNS"),
)
