"""Declared interim verdicts: which pairs they read, at which level; the first that decides stands."""

import shutil

import numpy as np
import pytest
from pydantic import ValidationError
from scipy import special

from abrun.api.launching import interim_state
from abrun.logs.recorded.experiment import RecordedExperiment
from abrun.messages.codes import Code
from abrun.recipe.claims import Claim, Compare
from abrun.verdict.decide import planned_analyses
from tests.verdict.simulate import edit, edit_rows, fail

LOOKS = {"claims": [{"metric": "train/reward", "margin": 0.02}], "interim": [3, 5]}


def unfinished(experiment_dir, *seeds):
    for seed in seeds:
        for arm in ("baseline", "treatment"):
            (experiment_dir / f"{arm}/seed-{seed}/result.json").unlink()
            edit(
                experiment_dir / f"{arm}/seed-{seed}/attempts/0001.json",
                lambda content: content.update(status="pending"),
            )


def to_come(experiment_dir, *seeds):
    """Planned, and never begun."""
    for seed in seeds:
        for run in experiment_dir.glob(f"*/seed-{seed}"):
            shutil.rmtree(run / "attempts")
            for name in ("environment.json", "metrics.jsonl", "result.json"):
                (run / name).unlink()


def test_pairs_to_come_do_not_hide_what_differs_at_step_one(simulated, judged):
    experiment_dir = simulated(compare=LOOKS)
    for seed in range(3):
        edit_rows(experiment_dir / f"treatment/seed-{seed}", lambda row: row.update({"train/grad_norm": 9.0}))
    to_come(experiment_dir, 3, 4)
    content = judged(experiment_dir).content
    assert content.verdict == "MISMATCH" and content.reasons[0].code is Code.STEP_ONE_DIFFERS
    assert content.reasons[0]["metric"] == "train/grad_norm"


def test_a_crash_after_the_match_still_counts(simulated, judged):
    experiment_dir = simulated(compare=LOOKS)
    fail(experiment_dir / "treatment/seed-4", after_steps=20)
    content = judged(experiment_dir).content
    assert content.verdict == "MISMATCH" and content.reasons[0]["guard"] == "finished"


def test_more_pairs_settle_what_step_one_leaves_open_in_no_arm(simulated, judged, snapshot):
    """A launch in stages goes on for the arm whose claim they can decide, and for no other."""
    arms = {arm: {"policy.logprobs.impl": impl} for arm, impl in (("near", "chunked"), ("far", "triton"))}
    shift = {"near": 0.0, "far": 0.018}
    experiment_dir = simulated(
        arms={"baseline": {}, **arms}, policy={"dtype": "bfloat16"}, compare=LOOKS, shift=shift
    )
    to_come(experiment_dir, 3, 4)
    for raised, state in (("near", "open"), ("far", "step one")):
        for seed in range(3):
            edit_rows(
                experiment_dir / f"{raised}/seed-{seed}",
                lambda row: row.update({"train/token_mult_prob_error": 1.04}),
            )
        found = judged(experiment_dir)
        assert found.verdict == "INCONCLUSIVE" and interim_state(experiment_dir, 3) == state
        assert ("let its pairs finish" in found.next_steps[0].text) == (state == "open")
    assert found.next_steps[0].text.startswith("Train one step in float32, ")


@pytest.mark.parametrize("interim", [[5], [1, 5], [5, 5], [5, 3]])
def test_interim_counts_go_up_from_two(simulated, interim, snapshot):
    with pytest.raises(ValidationError) as refused:
        simulated(compare={**LOOKS, "interim": interim})
    (problem,) = refused.value.errors()
    assert problem["loc"] == ("compare", "interim")
    snapshot(problem["msg"])


def test_a_missing_pair_does_not_let_a_later_one_take_its_place(simulated, judged):
    experiment_dir = simulated(compare=LOOKS)
    shutil.rmtree(experiment_dir / "treatment/seed-1")
    content = judged(experiment_dir).content
    assert content.verdict == "INVALID"
    assert content.reasons[0] == Code.RUN_NOT_FINISHED(run="treatment/seed-1", status="missing")


def test_rising_looks_are_declared_and_judged_at_their_levels(simulated, judged):
    rising = judged(simulated(compare={**LOOKS, "alpha_spending": "rising"}))
    equal = judged(simulated(compare=LOOKS))
    first, last = rising.content.arms["treatment"].interim_analyses
    assert first.alpha == pytest.approx(0.6 * last.alpha)
    assert first.alpha_difference == pytest.approx(0.6 * last.alpha_difference)
    assert first.alpha < equal.content.arms["treatment"].interim_analyses[0].alpha < last.alpha < 0.05
    assert rising.content.claims[0].claim.alpha == first.alpha and not rising.content.post_hoc


def test_pairs_after_the_look_that_decided_are_not_said_to_be_unfinished(simulated, judged):
    experiment_dir = simulated(compare=LOOKS)
    assert judged(experiment_dir).content.num_pairs == 3
    assert "**pairs**: 3 compared, of 5 planned;" in (experiment_dir / "report/report.md").read_text()


@pytest.mark.parametrize("num_claims", [2, 5])
def test_looks_at_claims_of_which_one_suffices_keep_the_level(num_claims):
    """All claims at the edge of their margins; Holm's first step compares the smallest p-value."""
    counts, num_experiments = [4, 8, 12], 100_000
    claims = [Claim(metric=f"metric-{number}", margin=0.1) for number in range(num_claims)]
    compare = Compare(claims=claims, interim=counts, require="any")
    experiment = RecordedExperiment(name="any", arms=("old", "new"), compare=compare, runs={})
    values = np.random.default_rng(num_claims).standard_normal((num_experiments, num_claims, counts[-1]))
    has_passed = np.zeros(num_experiments, bool)
    for analysis in planned_analyses(experiment, num_claims):
        seen = values[..., : analysis.num_pairs]
        t = seen.mean(axis=-1) / (seen.std(axis=-1, ddof=1) / np.sqrt(analysis.num_pairs))
        p_values = special.stdtr(analysis.num_pairs - 1, -t)
        has_passed |= num_claims * p_values.min(axis=1) < analysis.alpha
    assert has_passed.mean() < 0.052
