"""An arm of a launched experiment as the baseline: the same numbers the other way round, and post hoc."""

import numpy as np
import pytest

from abrun.errors import ComparisonError
from abrun.logs.recorded.sources import ReadingOptions
from abrun.messages import sentence
from abrun.messages.codes import Code
from abrun.report.comparing import compare_sources

ARMS = {
    "baseline": {},
    "treatment": {"policy.logprobs.impl": "chunked", "policy.logprobs.chunk_size": 32},
    "engine": {"policy.logprobs.impl": "chunked"},
}


@pytest.fixture
def three_arms(simulated):
    return simulated(shift={"treatment": 0.2, "engine": 0.201}, arms=ARMS, controls={"aa_reruns": 2})


def compare(experiment_dir, baseline=None, **options):
    return compare_sources([str(experiment_dir)], ReadingOptions(baseline=baseline), **options)


def differences(comparison):
    return {claim.arm: np.array(claim.estimate.differences) for claim in comparison.content.claims}


def test_arms_are_compared_with_the_chosen_one_over_the_same_pairs(three_arms):
    declared, chosen = compare(three_arms), compare(three_arms, "engine")
    before, after = differences(declared), differences(chosen)
    assert [*after] == ["baseline", "treatment"]
    assert after["baseline"] == pytest.approx(-before["engine"])
    assert after["treatment"] == pytest.approx(before["treatment"] - before["engine"])
    assert [arm.verdict for arm in chosen.arms] == ["MISMATCH", "MATCH"]
    assert chosen.content.baseline == "engine"


def test_another_baseline_is_post_hoc_and_without_controls(three_arms):
    assert not compare(three_arms).content.post_hoc
    content = compare(three_arms, "engine").content
    (note,) = [reason for reason in content.reasons if reason.code is Code.POST_HOC]
    assert "engine was chosen as the baseline after the launch, which declared baseline" in sentence(note)
    assert {row["noise_floor"] for row in content.select("divergence")} == {"unknown"}
    treatments = {arm: content.arms[arm].treatment_diff for arm in content.arms}
    assert treatments == {
        "baseline": {"policy.logprobs.impl": ["chunked", "logits"]},
        "treatment": {"policy.logprobs.chunk_size": [None, 32]},
    }


def test_the_launched_baseline_is_the_declared_comparison(three_arms):
    assert compare(three_arms, "baseline").as_json() == compare(three_arms).as_json()


def test_the_declared_report_is_kept(three_arms):
    compare(three_arms, output=three_arms / "report", formats=("json",))
    with pytest.raises(ComparisonError, match="declared at launch"):
        compare(three_arms, "engine", output=three_arms / "report", formats=("json",))


def test_an_unknown_arm_is_refused(three_arms):
    with pytest.raises(
        ComparisonError, match="--baseline: got 'nobody'; allowed: baseline, treatment, engine"
    ):
        compare(three_arms, "nobody")


def test_fresh_seeds_are_compared_with_the_chosen_baseline(three_arms):
    commands = [step.command for step in compare(three_arms, "engine").next_steps]
    assert any(command.endswith("-fresh --baseline engine") for command in commands)
