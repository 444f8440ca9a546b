"""One-sided claims from recorded runs: PASS, FAIL, the direction of a difference, and several claims."""

import json

import numpy as np
import pytest

from abrun.errors import ComparisonError
from abrun.logs.recorded.reference import load_reference
from abrun.logs.recorded.stored import load_experiment
from abrun.messages import sentence
from abrun.messages.codes import Code
from abrun.recipe.claims import Claim, parse_claim
from abrun.report.comparing import freeze_arm
from abrun.report.context import verdict_qualifiers
from abrun.stats.equivalence import holm
from abrun.stats.one_sided import (
    improvement_test,
    one_sided_pairs_needed,
    one_sided_power,
    simulate_one_sided_decisions,
)
from abrun.stats.sigma_margin import VarianceModel, simulate_sigma_improvements
from abrun.verdict.verdict_file import read_verdict_file

REWARD, LOSS = "train/reward", "train/grad_norm"


@pytest.mark.parametrize(
    ("shift", "claim", "verdict", "code", "text"),
    [
        (0.0, "not_worse 0.02", "PASS", Code.CLAIM_PASSES, "the treatment is at most 0.02 lower"),
        (-0.3, "not_worse 0.02", "FAIL", Code.CLAIM_FAILS, "more than 0.02 lower than the baseline"),
        (0.3, "not_worse 0.02", "PASS", Code.CLAIM_PASSES, "higher (better) in 5 of 5 seeds"),
        (-0.012, "not_worse 0.02", "PASS", Code.CLAIM_PASSES, "lower (worse) in 5 of 5 seeds"),
        (0.3, "better 0.02", "PASS", Code.CLAIM_PASSES, "more than 0.02 higher than the baseline"),
        (0.3, "better 0", "PASS", Code.CLAIM_PASSES, "the treatment is higher than the baseline"),
        (0.0, "better 0.02", "FAIL", Code.CLAIM_FAILS, "not more than 0.02 higher"),
        (0.3, "not_worse 0.02, lower is better", "FAIL", Code.CLAIM_FAILS, "more than 0.02 higher"),
        (-0.3, "better 0.02, lower is better", "PASS", Code.CLAIM_PASSES, "lower (better) in 5 of 5"),
        (0.0, "not_worse 5% of climb", "PASS", Code.CLAIM_PASSES, "5 % of the baseline's climb lower"),
        (0.3, "better 2 sigma", "PASS", Code.CLAIM_PASSES, "more than 2 sigma of the baseline higher"),
        (0.3, "within 0.02", "MISMATCH", Code.CLAIM_DIFFERS, "higher than the baseline"),
    ],
)
def test_the_headline_says_what_was_claimed(simulated, judged, shift, claim, verdict, code, text):
    directory = simulated(shift=shift)
    comparison = judged(directory, claims=[parse_claim(f"{REWARD}:last 20%:{claim}")])
    assert comparison.verdict == verdict
    reason = next(reason for reason in comparison.arms[0].reasons if reason.code == code)
    assert text in sentence(reason)
    stored = read_verdict_file(directory / "report" / "verdict.json")
    assert (stored.verdict, stored.claims) == (verdict, comparison.content.claims)
    assert comparison.exit_code == {"PASS": 0, "FAIL": 3, "MISMATCH": 3, "INCONCLUSIVE": 4}[verdict]


def test_what_passes_is_half_of_the_interval(simulated, judged):
    """Schuirmann: the lower end of the 90 % interval is the bound of the one-sided test at 5 %."""
    directory = simulated(shift=-0.01)
    (found,) = judged(directory, claims=[Claim(metric=REWARD, not_worse=0.02)]).content.claims
    low = found.estimate.interval[0]
    assert found.estimate.certified_bound == pytest.approx(-low)
    for margin, result in ((-low * 1.0001, "holds"), (-low * 0.9999, "undecided")):
        (again,) = judged(directory, claims=[Claim(metric=REWARD, not_worse=margin)]).content.claims
        assert again.result == result


def test_too_few_pairs_leave_a_claim_open_and_say_how_many_it_needs(simulated, judged):
    comparison = judged(simulated(noise=0.05), claims=[Claim(metric=REWARD, not_worse=0.02)])
    (found,) = comparison.content.claims
    text = sentence(comparison.arms[0].reasons[0])
    assert comparison.verdict == "INCONCLUSIVE" and "undecided whether the treatment is at most" in text
    assert found.power.pairs_needed is not None and found.power.pairs_needed > 5
    assert f"pairs needed for 80 %: {found.power.pairs_needed}" in text
    assert found.power.pairs_needed_range[0] < found.power.pairs_needed < found.power.pairs_needed_range[1]


def test_a_claim_of_a_level_says_so_and_names_the_loss(simulated, judged):
    comparison = judged(simulated(shift=-0.3), claims=[parse_claim(f"{REWARD}:last 20%:>0.1")])
    text = sentence(comparison.arms[0].reasons[0])
    assert comparison.verdict == "PASS" and "level above 0.1" in text and "lower than the baseline" in text


def test_two_pairs_show_no_gain(simulated, judged):
    directory = simulated(shift=0.3, seeds=[0, 1])
    comparison = judged(directory, claims=[Claim(metric=REWARD, better=0.02)])
    assert comparison.verdict == "INCONCLUSIVE"
    (found,) = comparison.content.claims
    assert Code.TOO_FEW_FOR_BETTER(paired=True, needed=3) in found.warnings
    assert (found.power.power_now, found.power.pairs_needed) == (0.0, 3)


def test_runs_that_learn_nothing_pass_no_claim_of_being_not_worse(simulated, judged):
    comparison = judged(simulated(), claims=[Claim(metric=REWARD, not_worse=30.0)])
    assert comparison.verdict == "INCONCLUSIVE"
    assert comparison.content.claims[0].problem.code == Code.CLIMB_NOT_SHOWN


def test_a_claim_without_a_direction_is_refused(simulated, judged):
    with pytest.raises(ComparisonError, match="whether higher is better is unknown"):
        judged(simulated(), claims=[parse_claim(f"{LOSS}:last 20%:not_worse 0.1")])


def test_the_loss_of_a_policy_gradient_has_no_better_direction(simulated, judged):
    """Rewards are recorded, so a lower loss is no gain; whoever wants it says that it is."""
    directory = simulated()
    with pytest.raises(ComparisonError, match="does not measure learning; claim a reward"):
        judged(directory, claims=[parse_claim("train/loss:last 20%:not_worse 0.1")])
    claim = parse_claim("train/loss:last 20%:not_worse 0.1, lower is better")
    assert judged(directory, claims=[claim]).verdict == "PASS"


def test_a_mixed_comparison_is_a_match_only_if_all_claims_hold(simulated, judged):
    claims = [Claim(metric=REWARD, margin=0.02), Claim(metric=REWARD, better=0.01)]
    assert judged(simulated(), claims=claims[:1]).verdict == "MATCH"
    assert judged(simulated(), claims=claims).verdict == "MISMATCH"


def with_level(directory, **level):
    """Declare another alpha, or how many claims must hold, in an experiment's record."""
    path = directory / "experiment.json"
    content = json.loads(path.read_text())
    content["recipe"]["compare"].update(level)
    path.write_text(json.dumps(content))
    return directory


def test_one_of_several_claims_suffices_with_holms_correction(simulated, judged):
    claims = [Claim(metric=REWARD, better=margin) for margin in (0.3, 0.0, 5.0)]
    directory = simulated(shift=0.2)
    assert judged(directory, claims=claims).verdict == "FAIL"
    comparison = judged(with_level(directory, require="any"), claims=claims)
    estimates = [claim.estimate for claim in comparison.content.claims]
    assert comparison.verdict == "PASS"
    corrected = holm([estimate.p_equivalence for estimate in estimates])
    assert [estimate.p_equivalence_holm for estimate in estimates] == corrected
    assert comparison.arms[0].reasons[0].code == Code.CLAIM_PASSES
    assert "although a claim is broken" in verdict_qualifiers(comparison.content)  # better by 5 is
    claims = [Claim(metric=REWARD, better=margin) for margin in (4.0, 5.0)]
    assert judged(directory, claims=claims).verdict == "FAIL"


def test_a_claim_at_the_edge_is_lost_to_the_correction(simulated, judged):
    directory = simulated()
    (edge,) = judged(directory, claims=[Claim(metric=REWARD, not_worse=0.02)]).content.claims
    bound = edge.estimate.certified_bound
    claims = [Claim(metric=REWARD, not_worse=bound * 1.001), Claim(metric=REWARD, better=1.0)]
    comparison = judged(with_level(directory, require="any"), claims=claims)
    assert comparison.content.claims[0].estimate.p_equivalence < 0.05
    assert comparison.verdict == "INCONCLUSIVE"


def test_alpha_is_a_setting(simulated, judged):
    directory = simulated()
    claims = [Claim(metric=REWARD, not_worse=0.02)]
    (at_five,) = judged(directory, claims=claims).content.claims
    (at_one,) = judged(with_level(directory, alpha=0.01), claims=claims).content.claims
    assert (at_five.claim.alpha, at_one.claim.alpha) == (0.05, 0.01)
    assert at_one.claim.alpha_difference == pytest.approx(0.008)  # guards keep a fifth
    assert at_one.estimate.certified_bound > at_five.estimate.certified_bound
    assert "98 % CI" in sentence(judged(directory, claims=claims).arms[0].reasons[0])


def test_interim_analyses_judge_one_sided_claims_at_their_levels(simulated, judged):
    claim = {"metric": REWARD, "better": 0.05}
    directory = simulated(shift=0.3, seeds=[*range(8)], compare={"claims": [claim], "interim": [4, 8]})
    comparison = judged(directory)
    first, last = comparison.arms[0].interim_analyses
    assert (first.verdict, last.verdict, first.alpha < 0.05) == ("PASS", None, True)


def test_a_reference_keeps_one_sided_claims(simulated, judged, tmp_path):
    claims = [{"metric": REWARD, "not_worse": "2 sigma"}, {"metric": REWARD, "better": 0.1}]
    freeze_arm(
        load_experiment(simulated(compare={"claims": claims})), "baseline", tmp_path / "reference.json"
    )
    kept = load_reference(tmp_path / "reference.json").compare.claims
    assert [claim.kind for claim in kept] == ["not_worse", "better"]
    assert isinstance(kept[0].not_worse, float)


# --- the tests themselves, against plain formulas ---


def test_the_bound_is_students():
    baseline, treatment = np.array([1.0, 2.0, 4.0, 3.0]), np.array([1.5, 2.1, 4.9, 3.2])
    found = improvement_test(baseline, treatment, -0.1, sign=1)
    differences = treatment - baseline
    error = differences.std(ddof=1) / 2
    assert found.bound == pytest.approx(differences.mean() - 2.353363 * error, abs=1e-6)
    assert found.p_above + found.p_below == pytest.approx(1)
    opposite = improvement_test(baseline, treatment, -0.1, sign=-1)
    assert opposite.bound == pytest.approx(-differences.mean() - 2.353363 * error, abs=1e-6)


@pytest.mark.parametrize(("excess", "pairs"), [(0.0, 4), (1.0, 3), (1.5, 5), (3.0, 8)])
def test_the_power_is_that_of_simulated_experiments(excess, pairs):
    simulated = simulate_one_sided_decisions(excess, 1.0, [pairs], [0.05], [0.05]).matches.mean()
    assert one_sided_power(excess, 1 / np.sqrt(pairs), pairs - 1) == pytest.approx(simulated, abs=0.016)


def test_the_sample_size_has_the_power():
    needed = one_sided_pairs_needed(1.0, 1.0)
    assert needed is not None
    powers = [one_sided_power(1.0, 1 / np.sqrt(pairs), pairs - 1) for pairs in (needed - 1, needed)]
    assert powers[0] < 0.8 <= powers[1]
    assert one_sided_pairs_needed(0.0, 1.0) is None


@pytest.mark.parametrize("sigmas", [-1.5, 1.5])
def test_margins_in_sigmas_keep_their_level_at_each_number_of_pairs(sigmas):
    model = VarianceModel(correlation=0.5)
    decided = simulate_sigma_improvements(
        sigmas, [3, 5, 10], model, [0.05] * 3, [0.05] * 3, improvement=sigmas
    )
    assert decided.matches.mean(axis=1).max() < 0.058 and decided.mismatches.mean(axis=1).max() < 0.058
