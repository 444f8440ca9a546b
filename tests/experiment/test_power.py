"""Expected cost of interim analyses, against experiments that are judged one by one."""

import math

import numpy as np
import pytest

from abrun.experiment.power import (
    Designs,
    assumed_spread,
    compare_designs,
    design_reason,
    first_analysis,
    interim_counts,
    plan_claim_power,
    propose_designs,
)
from abrun.recipe.claims import Claim, Compare
from abrun.stats.equivalence import ALPHA, equivalence_test
from abrun.stats.sequential import interim_levels
from abrun.stats.sigma_margin import sigma_test

NUM_EXPERIMENTS = 700  # the standard error of an expected number of pairs is below 0.1


def claim_of(margin: float | str, *, correlation: float = 0.5) -> Claim:
    fields = {"metric": "train/reward", "margin": margin, "sigma": 1.0, "correlation": correlation}
    return Claim.model_validate(fields)


def designs_of(claims: list[Claim], interim: list[int], num_treatments: int = 1) -> Designs | None:
    compare = Compare(claims=claims, interim=interim)
    powers = [plan_claim_power(claim, compare, assumed_spread(claim, False)) for claim in claims]
    return compare_designs(compare, interim, powers, num_treatments)


def judge_one_by_one(
    margins: list[float | str], interim: list[int], num_treatments: int, share: float
) -> tuple[float, float]:
    """Return mean pairs and the share of matches of experiments whose tests are run after each stage."""
    rng = np.random.default_rng(5)
    spending = Compare(interim=interim).spending
    levels = interim_levels(interim, spending=spending)
    beyond_alpha = (ALPHA - Compare().guards.alpha) / len(margins) / num_treatments
    beyond = interim_levels(interim, beyond_alpha, spending)
    pairs, matches = [], []
    for _ in range(NUM_EXPERIMENTS):
        verdicts = ["open"] * num_treatments
        draws = rng.multivariate_normal(
            [0, 0], [[1, 0.5], [0.5, 1]], (num_treatments, len(margins), interim[-1])
        )
        count = 0
        for count, level, beyond_level in zip(interim, levels, beyond, strict=True):
            for arm in (arm for arm in range(num_treatments) if verdicts[arm] == "open"):
                results = []
                for index, margin in enumerate(margins):
                    baseline, treatment = draws[arm, index, :count].T
                    size = float(margin.split()[0]) if isinstance(margin, str) else margin
                    test = sigma_test if isinstance(margin, str) else equivalence_test
                    result = test(baseline, treatment + share * size, size, level)
                    results.append((result.equivalent, result.p_beyond < beyond_level and count >= 3))
                if any(is_beyond for _, is_beyond in results):
                    verdicts[arm] = "mismatch"
                elif all(is_equivalent for is_equivalent, _ in results):
                    verdicts[arm] = "match"
            if "open" not in verdicts:
                break
        pairs.append(count)
        matches.append(set(verdicts) == {"match"})
    return float(np.mean(pairs)), float(np.mean(matches))


@pytest.mark.parametrize(
    ("margins", "interim", "num_treatments"),
    [
        pytest.param([1.5], [3, 6, 12], 1, marks=pytest.mark.slow),
        (["1.5 sigma"], [4, 8, 12], 1),
        pytest.param([1.5, 2.0], [3, 5, 8], 2, marks=pytest.mark.slow),
        ([1.5, 2.0], [3, 5], 2),
        ([0.8], [2, 4], 1),
    ],
)
def test_the_expected_pairs_are_those_of_experiments_judged_one_by_one(margins, interim, num_treatments):
    designs = designs_of([claim_of(margin) for margin in margins], interim, num_treatments)
    assert designs
    for share, expected in ((0.0, designs.pairs_if_equal), (1.0, designs.pairs_at_margin)):
        pairs, matches = judge_one_by_one(margins, interim, num_treatments, share)
        assert expected == pytest.approx(pairs, abs=0.4)
        if share == 0:
            assert designs.power == pytest.approx(matches, abs=0.06)
        else:
            assert matches < 0.05 + 0.03


def test_a_single_analysis_needs_as_many_pairs_as_its_power_says():
    claims = [claim_of(1.2)]
    designs = designs_of(claims, [4, 8, 12])
    power = plan_claim_power(claims[0], Compare(claims=claims), assumed_spread(claims[0], False))
    assert designs and power
    count = math.ceil(designs.fixed_pairs)
    below, above = power.power(count - 1), power.power(count)
    assert below + (designs.fixed_pairs - count + 1) * (above - below) == pytest.approx(designs.power)
    assert 1 < designs.saved_pairs == designs.fixed_pairs - designs.pairs_if_equal


@pytest.mark.parametrize(("margin", "num_pairs"), [(2.0, 4), (1.5, 8), (1.0, 12), (0.5, 9)])
def test_a_proposal_keeps_the_power_that_was_planned(margin, num_pairs):
    """Interim analyses have lower levels, so that they may take more pairs at most, and fewer on average."""
    compare = Compare(claims=[claim_of(margin)])
    power = plan_claim_power(compare.claims[0], compare, assumed_spread(compare.claims[0], False))
    assert power
    designs = propose_designs(compare, num_pairs, [power], 1)
    if designs is None:
        assert margin == 0.5  # hardly ever decided
    else:
        assert designs.power >= power.power(num_pairs) - 0.005
        assert designs.interim[0] < num_pairs <= designs.interim[-1] <= num_pairs + 3


def test_the_cheaper_design_is_recommended():
    compare = Compare(claims=[claim_of(2.0)])
    designs = designs_of(compare.claims, [4, 6, 8])
    assert designs
    reason = design_reason(compare, [5, 6, 7, 8, 9, 10, 11, 12], designs)
    assert reason.startswith("Interim analyses are cheaper: ")
    assert reason.endswith("; launch with --seeds 5,6,7,8 --until-decided --max-seeds 8")
    declared = compare.model_copy(update={"interim": [4, 6, 8]})
    assert design_reason(declared, [], designs).endswith("; launch with --until-decided")
    hopeless = designs_of([claim_of(0.3)], [3, 4])  # hardly ever decided, so that the levels cost more
    assert hopeless and design_reason(compare, [], hopeless).startswith("One analysis is cheaper: ")


def test_claims_that_interim_analyses_cannot_plan_give_no_design():
    limit = Claim.model_validate({"metric": "train/reward", "above": 0.3})
    unknown = Claim.model_validate({"metric": "train/reward", "margin": 0.1})
    assert designs_of([claim_of(1.0), limit], [3, 6]) is None
    assert designs_of([unknown], [3, 6]) is None
    assert designs_of([claim_of(1.0)], [3, 6], num_treatments=0) is None
    assert propose_designs(Compare(), 3, [], 1) is None
    assert [first_analysis(count) for count in (2, 3, 4, 7, 12)] == [None, None, 3, 4, 6]
    assert interim_counts(3, 4) == [3, 4]
