"""Which next steps are suggested when: the rules, by their codes."""

from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest

from abrun.messages import MESSAGES
from abrun.messages.message import value_names
from abrun.report import next_step
from abrun.report.facts import NextStepFacts
from abrun.report.next_step import NextStepRule, matching_rules

RULES = {
    name: rules
    for name, rules in vars(next_step).items()
    if isinstance(rules, tuple) and isinstance(rules[0], NextStepRule)
}
CONTENT = {
    "post_hoc": False,
    "claims": ["claim"],
}
OTHERS = {"launched": False}
REFERENCE = {"regression": True}
UNCLAIMED = {"content.claims": []}
DESCRIBED = {"evidence.description": [{"num_runs": (1, 1)}]}
SEVERAL = {"evidence.description": [{"num_runs": (2, 1)}]}
UNDECIDED = {"undecided_claims": ["claim"]}
DECIDABLE = {**UNDECIDED, "num_pairs_that_decide": 9}
UNTESTABLE = {"has_untestable_claims": True}
OTHER = {"replacement_claims": ["claim"]}
LOOK = {"waiting_arms": {"arm"}}
OPEN_STEP = {"arms_with_open_checks": {"arm"}}
NO_SHARED_STEP = "a run"
NOT_RECORDED = {"is_claim_unrecorded": True}


def facts(verdict, known) -> Any:
    """Facts of a launched and claimed experiment of which nothing else is known but `known`."""
    content = CONTENT | {"verdict": verdict}
    experiment = {
        "can_inject": False,
        "versions_follow_arms": False,
        "compare": SimpleNamespace(step_one=True),
        "runs": {},
    }
    values = dict.fromkeys(name for name in dir(NextStepFacts) if not name.startswith("_"))
    values |= {"launched": True, "paired": True, "failed_guards": [], "unfinished_runs": [], "seeds_left": []}
    values |= {"waiting_arms": set(), "arms_with_open_checks": set()}
    evidence: dict[str, list[Any]] = {}
    for name, value in known.items():
        holder, _, key = name.rpartition(".")
        holders = {"content": content, "experiment": experiment, "evidence": evidence, "": values}
        holders[holder][key] = value
    content["select"] = lambda kind: evidence.get(kind, [])
    records = {"content": SimpleNamespace(**content), "experiment": SimpleNamespace(**experiment)}
    return SimpleNamespace(**values | records)


CASES = {
    "MATCH": ({}, "FREEZE_RUNS"),
    "MATCH, unpaired": ({"paired": False}, ""),
    "MATCH, declared and unpaired": ({"paired": False, "is_declared": True}, "FREEZE_RUNS"),
    "MATCH, post hoc": ({"content.post_hoc": True}, "TEST_ON_FRESH_SEEDS FREEZE_RUNS"),
    "MATCH, post hoc, can inject": (
        {"content.post_hoc": True, "experiment.can_inject": True},
        "TEST_ON_FRESH_SEEDS FREEZE_RUNS",
    ),
    "MATCH, can inject": ({"experiment.can_inject": True}, "INJECT_FAULTS FREEZE_RUNS"),
    "MATCH, with a reference": (REFERENCE, "LAUNCH_NEXT_CHANGE"),
    "MATCH, of others, with a reference": (OTHERS | REFERENCE, "COMPARE_NEXT_CHANGE"),
    "MISMATCH": ({}, "CONFIRM_ON_FRESH_SEEDS"),
    "MISMATCH, failed runs": (
        {"failed_guards": [{"guard": "finished"}]},
        "READ_ENDINGS CONFIRM_ON_FRESH_SEEDS",
    ),
    "MISMATCH, engines and completions": (
        {"has_engine_mismatch": True, "has_initial_weights": True, "has_completions": True},
        "FIND_MISMATCH READ_COMPLETIONS CONFIRM_ON_FRESH_SEEDS",
    ),
    "MISMATCH, at step one": (
        {"failed_checks": ["check"], "can_trace": True, "has_completions": True},
        "FIND_TENSOR READ_COMPLETIONS CONFIRM_ON_FRESH_SEEDS",
    ),
    "MISMATCH, at step one, of a command": (
        {"failed_checks": ["check"], "can_trace": False},
        "CONFIRM_ON_FRESH_SEEDS",
    ),
    "MISMATCH, with a reference": (
        REFERENCE | {"has_completions": True},
        "CONFIRM_ON_FRESH_SEEDS",
    ),
    "MISMATCH, of others, at step one": (
        OTHERS | {"failed_checks": ["check"]},
        "SKIP_STEP_ONE CONFIRM_ON_FRESH_SEEDS",
    ),
    "MISMATCH, of others, at a claim, too": (
        OTHERS | {"failed_checks": ["check"], "failed_claims": ["claim"]},
        "CONFIRM_ON_FRESH_SEEDS",
    ),
    "INCONCLUSIVE": ({}, "TELL_FROM_CHANCE"),
    "INCONCLUSIVE, one run each": (DESCRIBED | DECIDABLE, "TRAIN_THREE_SEEDS"),
    "INCONCLUSIVE, a look to come": (LOOK | UNTESTABLE, "FINISH_INTERIM_PAIRS"),
    "INCONCLUSIVE, a look that step one leaves open": (
        LOOK | OPEN_STEP | {"is_float32_conclusive": True},
        "RUN_IN_FLOAT32 DECLARE_ROUNDING",
    ),
    "INCONCLUSIVE, step one and a claim": (OPEN_STEP | DECIDABLE, "DECLARE_ROUNDING TRAIN_MORE_PAIRS"),
    "INCONCLUSIVE, no number of pairs": (UNDECIDED, "PLAN_WIDER_MARGIN"),
    "INCONCLUSIVE, untestable": (UNTESTABLE | OTHER, "TRAIN_LONGER CLAIM_WHAT_SHOWS"),
    "INCONCLUSIVE, untestable and undecided": (
        UNTESTABLE | OTHER | DECIDABLE,
        "TRAIN_LONGER TRAIN_MORE_PAIRS",
    ),
    "INCONCLUSIVE, unclaimed, nothing shown": (UNCLAIMED | {"nothing_shown": "flat"}, "TRAIN_LONGER"),
    "INCONCLUSIVE, unclaimed, nothing claimable": (UNCLAIMED, "DECLARE_METRIC"),
    "INCONCLUSIVE, unclaimed": (
        UNCLAIMED | {"claimable": "reward", "is_claim_decidable": True, "has_several_runs": True},
        "DECLARE_MARGIN PLAN_SEEDS",
    ),
    "INCONCLUSIVE, with a reference, unclaimed": (
        REFERENCE | UNCLAIMED | OPEN_STEP,
        "REPEAT_IN_FLOAT32 CLAIM_AGAINST_REFERENCE",
    ),
    "INCONCLUSIVE, with a reference": (REFERENCE, "NARROW_INTERVAL"),
    "INCONCLUSIVE, with a reference, untestable": (REFERENCE | UNTESTABLE, "MEND_REASONS"),
    "INCONCLUSIVE, with a reference, a seed left": (REFERENCE | {"seeds_left": [3]}, "OTHER_SEED_TOO"),
    "INCONCLUSIVE, with a reference, seeds left": (
        REFERENCE | UNTESTABLE | {"seeds_left": [3, 4]},
        "OTHER_SEEDS_ALONE",
    ),
    "INCONCLUSIVE, of others, one run each": (
        OTHERS | UNCLAIMED | DESCRIBED | OPEN_STEP | {"claimable": "reward"},
        "REPEAT_IN_FLOAT32 CLAIM_ALIKE TRAIN_TWO_EACH",
    ),
    "INCONCLUSIVE, of others, nothing claimable": (OTHERS | UNCLAIMED | SEVERAL, "LOG_OR_TRAIN_LONGER"),
    "INCONCLUSIVE, of others, one run each and a look": (OTHERS | DESCRIBED | LOOK, "TRAIN_FOR_INTERIM"),
    "INCONCLUSIVE, of others, one run beside several": (
        OTHERS | UNCLAIMED | SEVERAL | {"evidence.new run": ["a run"]},
        "TRAIN_MORE_OF_NEW",
    ),
    "INCONCLUSIVE, of others, a claim on one run beside several": (
        OTHERS | {"evidence.new run": ["a run"]},
        "TRAIN_MORE_OF_NEW",
    ),
    "INCONCLUSIVE, one arm": (
        {"evidence.seed noise": [{"gap": 0.1, "levels": "abc"}]},
        "COMPARE_CHANGE",
    ),
    "INCONCLUSIVE, one arm with an open level": (
        {"evidence.seed noise": [{"gap": 0.1, "levels": "abc"}], "is_level_open": True},
        "TRAIN_MORE_OF_ARM",
    ),
    "INCONCLUSIVE, one run": ({"evidence.seed noise": [{"gap": None}]}, "TRAIN_MORE_OF_ARM"),
    "INVALID, one arm": ({"evidence.seed noise": [{"gap": 0.1, "levels": "abc"}]}, "MEND_REASONS"),
    "INCONCLUSIVE, of others, no shared metric": (
        OTHERS | UNCLAIMED | OPEN_STEP,
        "REPEAT_IN_FLOAT32 NAME_METRICS",
    ),
    "INCONCLUSIVE, of others, no shared metric, and a look": (
        OTHERS | UNCLAIMED | LOOK,
        "TRAIN_FOR_INTERIM",
    ),
    "INCONCLUSIVE, of others, unreadable values": (
        OTHERS | UNCLAIMED | {"experiment.runs": {"run": SimpleNamespace(unread={"reward": "line 3"})}},
        "MEND_REASONS",
    ),
    "INCONCLUSIVE, of others, at step one": (
        OTHERS | OPEN_STEP,
        "REPEAT_IN_FLOAT32 FRESH_SEEDS_DECIDE",
    ),
    "INCONCLUSIVE, of others, untestable": (
        OTHERS | UNTESTABLE | OTHER | DECIDABLE,
        "CLAIM_WHAT_SHOWS MEND_REASONS",
    ),
    "INCONCLUSIVE, of others, a look to come": (OTHERS | LOOK | UNDECIDED, "TRAIN_FOR_INTERIM"),
    "INCONCLUSIVE, of others, beyond the margin": (
        OTHERS | UNDECIDED | {"is_beyond_margin": True},
        "CONFIRM_DIFFERENCE",
    ),
    "INCONCLUSIVE, of others, few pairs decide": (
        OTHERS | UNDECIDED | {"num_pairs_that_decide": 3},
        "TRAIN_MORE_PAIRS",
    ),
    "INCONCLUSIVE, of others": (OTHERS | DECIDABLE, "TRAIN_MORE_PAIRS"),
    "INCONCLUSIVE, of others, unpaired": (OTHERS | DECIDABLE | {"paired": False}, "TRAIN_MORE_PAIRS"),
    "INVALID": ({}, "MEND_RECIPE"),
    "INVALID, runs failed": (
        {"unfinished_runs": [SimpleNamespace(status="failed")]} | NOT_RECORDED,
        "READ_FIRST_LOG RESUME_RUNS",
    ),
    "INVALID, runs missing": ({"unfinished_runs": [SimpleNamespace(status="missing")]}, "RESUME_RUNS"),
    "INVALID, runs copied or exchanged": ({"has_misplaced_runs": True}, "MEND_REASONS"),
    "INVALID, another alias": (
        NOT_RECORDED | OTHER | {"suggested_aliases": {"train/reward": "reward"}},
        "READ_BY_OTHER_NAME MEND_RECIPE",
    ),
    "INVALID, a claim not recorded": (NOT_RECORDED | OTHER, "CLAIM_WHAT_SHOWS MEND_RECIPE"),
    "INVALID, of others, seeds that both have": (
        OTHERS | {"can_unpair": True, "shared_seeds": [1]},
        "COMPARE_SHARED_SEEDS MEND_REASONS",
    ),
    "INVALID, of others, no shared seed": (OTHERS | {"can_unpair": True}, "UNPAIR MEND_REASONS"),
    "INVALID, of others, versions follow the arms": (
        OTHERS | {"experiment.versions_follow_arms": True},
        "CALL_VERSIONS_TREATMENT MEND_REASONS",
    ),
    "INVALID, of others, no shared step": (
        OTHERS | {"experiment.runs": {"run": NO_SHARED_STEP}},
        "NAME_STEP_COLUMN MEND_REASONS",
    ),
}


@pytest.fixture
def functions(monkeypatch) -> None:
    """What the rules ask of runs is written into the experiment of a case."""
    monkeypatch.setattr(next_step, "versions_follow_arms", lambda experiment: experiment.versions_follow_arms)
    monkeypatch.setattr(next_step, "no_shared_step_reason", lambda runs: runs == [NO_SHARED_STEP])


def suggested_in(case: str) -> list[NextStepRule]:
    return [*matching_rules(facts(case.partition(",")[0], CASES[case][0]))]


@pytest.mark.parametrize("case", CASES)
def test_a_situation_gets_its_steps_in_this_order(case, functions) -> None:
    assert [rule.text.name for rule in suggested_in(case)] == CASES[case][1].split()


def test_every_rule_is_reached(functions) -> None:
    reached = {id(rule) for case in CASES for rule in suggested_in(case)}
    assert len(RULES) == 12
    assert [
        f"{name}: {rule.text.name}" for name in RULES for rule in RULES[name] if id(rule) not in reached
    ] == []


def test_sentences_take_their_values_from_facts() -> None:
    taken = {name for rule in chain(*RULES.values()) for name in value_names(MESSAGES[rule.text])}
    assert taken and taken <= {*dir(NextStepFacts)}
