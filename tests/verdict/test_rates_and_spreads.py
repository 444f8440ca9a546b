"""Claims on the rate of divergence and on the spread over seeds, and margins chosen after looking."""

import math

import numpy as np
import pytest

from abrun.errors import RecipeError
from abrun.messages import sentence
from abrun.messages.codes import Code
from abrun.recipe.claims import Claim, claim_option, describe_claim, parse_claim
from abrun.report.planning import PowerPlan
from abrun.report.write import claim_columns
from abrun.stats.rates import rate_interval
from abrun.verdict.decide import judge
from abrun.verdict.limits import judge_limit
from abrun.verdict.outcomes import after_looking_reason, outcome_reason
from abrun.verdict.results import ErrorRates
from abrun.verdict.seed_noise import describe_one_arm
from abrun.verdict.verdict_file import read_verdict_file
from tests.reasons import codes_of, reason_of
from tests.verdict.recorded import experiment_of, run_of, sides_of
from tests.verdict.simulate import edit_rows, fail

REWARD = "train/reward"
RATE = parse_claim("rate of divergence: <5%")
NAN = float("nan")


@pytest.mark.parametrize(
    ("text", "option", "meaning"),
    [
        ("rate of divergence: <5%", "rate of divergence:all:<0.05", "below 5 %"),
        ("rate of divergence:all:<0.05", "rate of divergence:all:<0.05", "below 5 %"),
        (
            "rate of divergence: not_worse 10%",
            "rate of divergence:all:not_worse 0.1",
            "at most 10 points higher",
        ),
        ("rate of divergence: better 0", "rate of divergence:all:better 0.0", "lower"),
        ("a/b:last 20%:sd <1.5x", "a/b:last 20%:sd <1.5x", "sd below 1.5x the baseline's"),
        ("a/b:all:sd 2x", "a/b:all:sd <2x", "sd below 2x the baseline's"),
    ],
)
def test_rates_and_spreads_are_written_on_the_command_line(text, option, meaning):
    claim = parse_claim(text)
    assert (claim_option(claim), describe_claim(claim)) == (option, meaning)
    assert parse_claim(option) == claim == Claim.model_validate(claim.model_dump())


@pytest.mark.parametrize(
    "text",
    [
        *("rate of divergence:0.05", "rate of divergence:>5%", "rate of divergence:<0%", "memory:all:sd 2x"),
        *("rate of divergence:<100%", "rate of divergence:<2x", "rate of divergence:exact", "a:all:sd 2"),
        *("rate of divergence:not_worse 1 sigma", "a:all:sd <0x", "final_weights:all:sd 2x", "a:all:sd"),
    ],
)
def test_no_other_claim_is_made_of_them(text):
    with pytest.raises(RecipeError, match="allowed: "):
        parse_claim(text)
    with pytest.raises(RecipeError, match="where lower is; drop it"):
        parse_claim("rate of divergence:not_worse 5%, higher is better")


def arm(name, num_diverged, num):
    """Runs of an arm of which the first ones end with NaN."""
    rng = np.random.default_rng(num)
    return tuple(
        run_of({"train/loss": [*rng.random(6), *[NAN if seed < num_diverged else 0.1] * 2]}, name, seed)
        for seed in range(num)
    )


def judged_rate(claim, baseline, treatment):
    """The result and sentence of a claim on independent arms, each (diverged, all)."""
    arms = [arm(name, *counts) for name, counts in (("old", baseline), ("new", treatment))]
    (verdict,) = judge(experiment_of(*arms, paired=False, step_one=False), [parse_claim(claim)])
    (result,) = verdict.claims
    return verdict.verdict, result, sentence(outcome_reason(result, baseline_arm="old"))


@pytest.mark.parametrize(
    ("claim", "baseline", "treatment", "verdict", "words"),
    [
        ("<5%", (0, 3), (0, 59), "PASS", "below 5 % at 95 % confidence: 0 of 59 runs of new diverged"),
        ("<5%", (0, 3), (0, 58), "INCONCLUSIVE", "59 runs in all would show it if no other diverges"),
        ("<5%", (3, 3), (3, 3), "FAIL", "not below 5 %: 3 of 3 runs"),
        ("better 0", (1, 30), (2, 6), "INCONCLUSIVE", "2 of 6 runs of new diverged, 1 of 30 of old"),
        ("better 0", (1, 30), (4, 6), "FAIL", "not lower than old's"),
        ("better 0", (6, 6), (0, 6), "PASS", "lower than old's at 95 % confidence"),
        ("not_worse 20%", (0, 30), (0, 30), "PASS", "at most 20 points higher than old's"),
        ("not_worse 20%", (0, 5), (0, 5), "INCONCLUSIVE", "undecided whether at most 20 points higher"),
        ("not_worse 10%", (0, 10), (9, 10), "FAIL", "not at most 10 points higher"),
    ],
)
def test_a_rate_of_divergence_has_an_exact_test(claim, baseline, treatment, verdict, words):
    found, result, text = judged_rate(f"rate of divergence: {claim}", baseline, treatment)
    assert found == verdict and words in text, text
    if claim == "<5%":
        assert result.estimate.limited_interval == rate_interval(treatment[0], treatment[1], 0.05)
    elif (baseline, treatment) == ((1, 30), (2, 6)):  # the example that a t-test calls significant
        assert (
            "p = 0.066 if the rates were equal (Fisher)" in text and (result.estimate.p_beyond or 0) > 0.065
        )


def test_failed_runs_are_counted_instead_of_deciding_alone(simulated, judged):
    directory = simulated()
    for name, after_steps in (("baseline/seed-1", 3), ("treatment/seed-2", 0)):
        fail(directory / name, after_steps=after_steps)
    late = directory / "treatment/seed-3"
    edit_rows(late, lambda row: row.update({"train/loss": "NaN"}) if row["step"] > 9 else None)
    comparison = judged(directory, claims=[RATE])
    text = sentence(reason_of(comparison, Code.DIVERGENCE_RATE))
    assert comparison.verdict == "FAIL"
    assert comparison.content.claims[0].estimate.diverged == ((1, 5), (2, 5))
    assert "2 of 5 runs of the treatment diverged" in text and "90 % CI [7.64 %, 81.1 %]" in text
    assert read_verdict_file(directory / "report/verdict.json").claims == comparison.content.claims
    assert claim_columns(comparison.content)[3] == "rate [90 % CI]"
    against = judged(directory, claims=[parse_claim("rate of divergence: not_worse 5%")])
    assert claim_columns(against.content)[3] == "difference of rates [90 % CI]"
    both = judged(directory, claims=[RATE, Claim(metric=REWARD, margin=0.02)])
    assert both.verdict == "INCONCLUSIVE" and Code.CLAIM_NOT_TESTED in codes_of(both)
    assert judged(directory, claims=[Claim(metric=REWARD, margin=0.02)]).verdict == "INVALID"


def test_if_all_runs_fail_the_claim_is_broken_and_no_runs_show_nothing(simulated, judged):
    directory = simulated()
    for seed in range(5):
        fail(directory / f"treatment/seed-{seed}", after_steps=0)
    assert judged(directory, claims=[RATE]).verdict == "FAIL"
    crashed = [run_of({REWARD: [1.0]}, "new", seed, status="failed") for seed in range(3)]
    alone = describe_one_arm(experiment_of(tuple(crashed), claims=[RATE], paired=False))
    assert alone and (alone.verdict, alone.claims[0].estimate.diverged) == ("FAIL", ((0, 0), (3, 3)))
    no_runs = judge_limit("new", sides_of({}, {}), RATE, np.arange(0), ErrorRates())
    assert (no_runs.result, no_runs.problem) == ("not tested", Code.NONE_FINISHED(paired=True))
    running = run_of({"train/loss": [1.0]}, status="running")
    sides = sides_of({"train/loss": [[1.0]]}, {"train/loss": [[1.0]]})
    open_sides = type(sides)(baselines=sides.baselines, treatments=(running,), paired=True)
    problem = judge_limit("new", open_sides, RATE, np.arange(1), ErrorRates()).problem
    assert problem and problem.code == Code.PAIRS_LACKING


@pytest.mark.parametrize(
    ("sd", "num_pairs", "result"),
    [(1, 16, "holds"), (5, 16, "different"), (1, 5, "undecided"), (1, 4, "not tested")],
)
def test_a_spread_over_seeds_is_compared_with_the_baselines(sd, num_pairs, result):
    rng = np.random.default_rng(0)
    curves = {name: rng.standard_normal((num_pairs, 1)) + 0.01 * rng.random((num_pairs, 9)) for name in "ab"}
    arms = [
        tuple(run_of({REWARD: scale * curve}, name, seed) for seed, curve in enumerate(curves[name]))
        for name, scale in (("a", 1), ("b", sd))
    ]
    claim = parse_claim(f"{REWARD}:all:sd <2.5x")
    (verdict,) = judge(experiment_of(*arms, step_one=False), [claim])
    (found,) = verdict.claims
    assert found.result == result, found
    text = sentence(outcome_reason(found, baseline_arm="a"))
    assert ("needs at least 5 pairs" if result == "not tested" else "sd of b / a is ") in text
    independent = experiment_of(*arms, step_one=False, paired=False)
    (unpaired,) = judge(independent, [claim])[0].claims
    assert "Welch" not in sentence(outcome_reason(unpaired, baseline_arm="a"))
    constant = sides_of({REWARD: np.ones((6, 9))}, {REWARD: rng.random((6, 9))})
    assert judge_limit("b", constant, claim, np.arange(1, 10), ErrorRates()).result == "not tested"


def test_power_plans_a_rate_and_says_what_it_does_not_plan():
    claims = [RATE, *map(parse_claim, ("rate of divergence: better 0", f"{REWARD}:all:sd 2x"))]
    compare = experiment_of(arm("old", 0, 1), claims=claims).compare
    plan = PowerPlan(name="x", compare=compare, num_pairs=5)
    lines = [line for claim in plan.claims for line in plan._claim_lines(claim)]
    assert lines[0].endswith("below 5 %: 59 runs of a treatment show it if none diverges")
    assert all(line.endswith(": not planned") for line in lines[1:]) and plan.as_json() and plan.render()


@pytest.mark.parametrize(("claim", "kind"), [("0.05", "within"), ("not_worse 0.05", "not_worse")])
def test_a_post_hoc_verdict_names_margins_that_may_be_chosen_now(simulated, judged, claim, kind):
    directory = simulated(shift=-0.01)
    comparison = judged(directory, claims=[parse_claim(f"{REWARD}:last 20%:{claim}")])
    (margin,) = reason_of(comparison, Code.MARGINS_AFTER_LOOKING)["margins"]
    estimate = comparison.content.claims[0].estimate
    assert margin["kind"] == kind and margin["once"] == pytest.approx(estimate.certified_bound)
    assert margin["anytime"] == pytest.approx(-estimate.anytime_interval[0])
    assert margin["anytime"] > margin["once"]
    assert "read at any number of pairs" in sentence(reason_of(comparison, Code.MARGINS_AFTER_LOOKING))
    assert Code.MARGINS_AFTER_LOOKING not in codes_of(judged(directory))  # as it was declared


def test_too_few_pairs_equal_differences_and_independent_arms_have_no_such_margin(simulated, judged):
    claims = [parse_claim(f"{REWARD}:last 20%:0.05")]
    few = judged(simulated(seeds=[0, 1, 2]), claims=claims)
    assert few.content.claims[0].estimate.anytime_interval == (-math.inf, math.inf)
    assert "none if read again (that needs 4 pairs that vary)" in sentence(
        reason_of(few, Code.MARGINS_AFTER_LOOKING)
    )
    assert after_looking_reason(judged(simulated(), claims=claims, unpaired=True).content.claims) is None
