"""Which next steps are suggested when, for what no golden report shows: rules by their openings."""

from types import SimpleNamespace
from typing import Any

import pytest

from abrun.messages.codes import Code
from abrun.report import next_step
from abrun.report.facts import Facts
from abrun.report.next_step import FIX, NextStep, suggest_steps

CLAIM = SimpleNamespace(claim=SimpleNamespace(unit="seed"), result="same")
CONTENT = {"post_hoc": False, "claims": [CLAIM], "paired": True}
OTHERS = {"launched": False}
REFERENCE = {"experiment.regression": True}
UNCLAIMED = {"content.claims": []}
CLAIMABLE = {"claimable": {"interval": (0, 1), "runs_needed": 9, "paired": True, "left_out": []}}
DESCRIBED = {"evidence.description": [{"num_runs": (1, 1)}]}
SEVERAL = {"evidence.description": [{"num_runs": (2, 1)}]}
UNDECIDED = {"undecided_claims": ["claim"], "pairs_that_decide": ("too many", None)}
DECIDABLE = {**UNDECIDED, "pairs_that_decide": ("9 pairs", 9)}
UNTESTABLE = {"has_untestable_claims": True}
OTHER = {"replacement_claims": ["claim"]}
LOOK = {"waiting_arms": {"arm"}}
OPEN_STEP = {"arms_with_open_checks": {"arm"}}
ONE_ARM = {"evidence.seed noise": [{"gap": 0.1, "levels": "abc"}]}
NO_SHARED_STEP = "a run"
NOT_RECORDED = {"is_claim_unrecorded": True}


def facts(verdict, known) -> Any:
    """Facts of a launched and claimed experiment of which nothing else is known but `known`."""
    content = CONTENT | {"verdict": verdict}
    experiment = {
        "can_inject": False,
        "regression": False,
        "directory": None,
        "versions_follow_arms": False,
        "compare": SimpleNamespace(step_one=True),
        "runs": {},
        "left_out": (),
    }
    values = dict.fromkeys(name for name in dir(Facts) if not name.startswith("_"))
    values |= {"launched": True, "failed_guards": [], "unfinished_runs": [], "reference_seeds": ({1}, {1})}
    values |= {"waiting_arms": set(), "arms_with_open_checks": set()}
    evidence: dict[str, list[Any]] = {}
    holders = {"content": content, "experiment": experiment, "evidence": evidence, "": values}
    for name, value in known.items():
        holder, _, key = name.rpartition(".")
        holders[holder][key] = value
    content["select"] = lambda kind: evidence.get(kind, [])
    records = {"content": SimpleNamespace(**content), "experiment": SimpleNamespace(**experiment)}
    return SimpleNamespace(**values | records)


CASES = {
    "MATCH, unpaired": ({"content.paired": False}, []),
    "MATCH, declared and unpaired": (
        {"content.paired": False, "is_declared": True},
        ["Compare later versions"],
    ),
    "MISMATCH, engines and completions": (
        {"has_engine_mismatch": True, "has_initial_weights": True, "has_completions": True},
        ["Find out why", "Compare completions", "Confirm it"],
    ),
    "MISMATCH, at step one": (
        {"failed_checks": ["check"], "can_trace": True, "has_completions": True},
        ["Find the first tensor", "Compare completions", "Confirm it"],
    ),
    "MISMATCH, at step one, of a command": ({"failed_checks": ["check"], "can_trace": False}, ["Confirm it"]),
    "MISMATCH, of others, at step one": (
        OTHERS | {"failed_checks": ["check"]},
        ["If the arms saw different prompts", "Confirm it"],
    ),
    "MISMATCH, of others, at a claim, too": (
        OTHERS | {"failed_checks": ["check"], "failed_claims": ["claim"]},
        ["Confirm it"],
    ),
    "MISMATCH, of others, another definition": (
        OTHERS | {"redefined_metrics": {"train/reward"}} | CLAIMABLE,
        ["Claim a metric that both arms define alike"],
    ),
    "INVALID, of others, a run lacks the metric": (
        OTHERS | {"excludable_runs": ["new/seed-2"]},
        ["Leave out the run that the"],
    ),
    "INCONCLUSIVE, one run each": (DESCRIBED | DECIDABLE, ["Three or more seeds can decide"]),
    "INCONCLUSIVE, a look that step one leaves open": (
        LOOK | OPEN_STEP | {"is_float32_conclusive": True},
        ["Train one step in float32, where rounding errors", "If it was rounding"],
    ),
    "INCONCLUSIVE, no number of pairs": (UNDECIDED, ["too many; plan with a wider margin"]),
    "INCONCLUSIVE, untestable and undecided": (
        UNTESTABLE | OTHER | DECIDABLE,
        ["These runs could not", "9 pairs"],
    ),
    "INCONCLUSIVE, unclaimed, nothing shown": (
        UNCLAIMED | {"nothing_shown": "flat"},
        ["These runs could not"],
    ),
    "INCONCLUSIVE, unclaimed, nothing claimable": (UNCLAIMED, ["Declare which metric has to agree"]),
    "INCONCLUSIVE, with a reference, unclaimed": (
        REFERENCE | UNCLAIMED | OPEN_STEP,
        ["Train one step in float32, where rounding cannot", "The reference has no claim"],
    ),
    "INCONCLUSIVE, with a reference, a seed left": (
        REFERENCE | {"reference_seeds": ({1, 3}, {1})},
        ["Train the remaining seeds of the reference, too"],
    ),
    "INCONCLUSIVE, of others, one run each": (
        OTHERS | UNCLAIMED | DESCRIBED | OPEN_STEP | CLAIMABLE,
        [
            "Train one step in float32, where rounding cannot",
            "Claim that they agree",
            "Train at least two more runs of each arm",
        ],
    ),
    "INCONCLUSIVE, of others, nothing claimable": (
        OTHERS | UNCLAIMED | SEVERAL,
        ["No claim could be tested"],
    ),
    "INCONCLUSIVE, of others, one run each and a look": (
        OTHERS | DESCRIBED | LOOK,
        ["reach the next analysis"],
    ),
    "INCONCLUSIVE, of others, one run beside several": (
        OTHERS | UNCLAIMED | SEVERAL | {"evidence.new run": ["a run"]},
        ["For a verdict, train at least two more runs"],
    ),
    "INCONCLUSIVE, of others, a claim on one run beside several": (
        OTHERS | {"evidence.new run": ["a run"]},
        ["For a verdict, train at least two more runs"],
    ),
    "INCONCLUSIVE, one arm with an open level": (
        ONE_ARM | {"content.claims": [SimpleNamespace(claim=CLAIM.claim, result="undecided")]},
        ["Train at least two more runs of this"],
    ),
    "INCONCLUSIVE, one run": (
        {"evidence.seed noise": [{"gap": None}]},
        ["Train at least two more runs of this"],
    ),
    "INVALID, one arm": (ONE_ARM, [FIX]),
    "INCONCLUSIVE, of others, no shared metric": (
        OTHERS | UNCLAIMED | OPEN_STEP,
        ["Train one step in float32, where rounding cannot", "Map metrics that mean the same"],
    ),
    "INCONCLUSIVE, of others, no shared metric, and a look": (
        OTHERS | UNCLAIMED | LOOK,
        ["reach the next analysis"],
    ),
    "INCONCLUSIVE, of others, unreadable values": (
        OTHERS | UNCLAIMED | {"experiment.runs": {"run": SimpleNamespace(unread={"reward": "line 3"})}},
        [FIX],
    ),
    "INCONCLUSIVE, of others, at step one": (
        OTHERS | OPEN_STEP,
        ["Train one step in float32, where rounding cannot", "Decide it with fresh seeds"],
    ),
    "INCONCLUSIVE, of others, untestable": (
        OTHERS | UNTESTABLE | OTHER | DECIDABLE,
        ["Claim what these runs can show", FIX],
    ),
    "INCONCLUSIVE, a spread of few pairs": (
        UNTESTABLE | OTHER | {"runs_of_a_spread": 5},
        ["Test the spread on fresh seeds: it needs at least 5 pairs"],
    ),
    "INCONCLUSIVE, of others, a spread of few pairs": (
        OTHERS | UNTESTABLE | OTHER | {"runs_of_a_spread": 5},
        ["Train more, for at least 5 pairs"],
    ),
    "INCONCLUSIVE, of others, beyond the margin": (
        OTHERS | UNDECIDED,
        ["too many; see whether fresh seeds show a mismatch"],
    ),
    "INCONCLUSIVE, of others, few pairs decide": (
        OTHERS | UNDECIDED | {"pairs_that_decide": ("3 pairs", 3)},
        ["3 pairs"],
    ),
    "INCONCLUSIVE, of others": (OTHERS | DECIDABLE, ["9 pairs"]),
    "INCONCLUSIVE, of others, unpaired": (OTHERS | DECIDABLE | {"content.paired": False}, ["9 pairs"]),
    "INVALID, another alias": (
        NOT_RECORDED | OTHER | {"suggested_aliases": {"train/reward": "reward"}},
        ["Compare the same runs under the metric name", "Fix what makes the comparison invalid ("],
    ),
    "INVALID, of others, seeds that both have": (
        OTHERS | {"can_unpair": True, "shared_seeds": [1]},
        ["Compare only the seeds that both arms have", FIX],
    ),
    "INVALID, of others, versions follow the arms": (
        OTHERS | {"experiment.versions_follow_arms": True},
        ["If you compare versions", FIX],
    ),
    "INVALID, of others, no shared step": (
        OTHERS | {"experiment.runs": {"run": NO_SHARED_STEP}},
        ["If another column has the steps", FIX],
    ),
}


@pytest.fixture
def functions(monkeypatch) -> None:
    """What the rules ask of runs is written into the facts of a case; long texts are left out."""
    left_out = """claim_options comparison_options experiment_argument folder_name relative_path with_claims
    build_claim stage_options save_reference measure_mismatch trace_arms show_completions resume_launch
    plan_command compare_with_aliases origin_of_margin sentence"""
    for name in left_out.split():
        monkeypatch.setattr(next_step, name, lambda *_: "")
    stubs = {
        "versions_follow_arms": lambda experiment: experiment.versions_follow_arms,
        "no_shared_step_reason": lambda runs: runs == [NO_SHARED_STEP],
        "pairs_that_decide": lambda facts: facts.pairs_that_decide,
        "on_fresh_seeds": lambda text, *_: NextStep(text, ""),
        "declare_tolerances": lambda facts: NextStep("If it was rounding", ""),
        "train_longer": lambda *_: NextStep("These runs could not", ""),
        "reach_next_analysis": lambda facts: NextStep("reach the next analysis", ""),
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(next_step, name, stub)


@pytest.mark.parametrize("case", CASES)
def test_a_situation_gets_its_steps_in_this_order(case, functions) -> None:
    known, openings = CASES[case]
    texts = [step.text for step in suggest_steps(facts(case.partition(",")[0], known))]
    assert len(texts) == len(openings)
    assert [text for text, opening in zip(texts, openings, strict=True) if not text.startswith(opening)] == []


def test_fresh_seeds_that_were_compared_alone_confirm() -> None:
    def compared(seeds: str, *left_out: int) -> Any:
        reasons = [Code.SEEDS_LEFT_OUT(seeds=list(left_out), broken=[])] * bool(left_out)
        runs = [SimpleNamespace(seed=int(seed)) for seed in seeds]
        return SimpleNamespace(directory=None, name="x", runs=runs, left_out=reasons)

    experiments = (compared("34", 1, 2), compared("12", 3, 4), compared("1234"))
    assert [next_step.is_confirmation(experiment) for experiment in experiments] == [True, False, False]
