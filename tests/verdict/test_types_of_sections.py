"""Arms that give a section another type: the change of type explains the keys that only one type has."""

import pytest

from tests.verdict.simulate import edit

MEGATRON, TWO_RANKS = {"policy.backend.type": "megatron"}, {"cpu_ranks": 2}


@pytest.mark.parametrize(
    ("treatment", "num_keys"),
    [
        (MEGATRON, 1),
        ({**MEGATRON, "policy.backend.pipeline_parallel": 2}, 2),
        ({"algorithm.type": "ppo"}, 1),
        ({"task.type": "word_problems"}, 1),
    ],
)
def test_the_keys_that_only_one_type_has_are_explained(simulated, judged, treatment, num_keys):
    experiment_dir = simulated(arms={"baseline": {}, "treatment": treatment}, cluster=TWO_RANKS)
    comparison = judged(experiment_dir)
    assert comparison.verdict == "MATCH"
    assert len(comparison.arms[0].treatment_diff) == num_keys


def test_a_key_of_the_other_type_that_is_not_at_its_default_is_not(simulated, judged):
    experiment_dir = simulated(arms={"baseline": {}, "treatment": MEGATRON})
    edit(
        experiment_dir / "treatment/seed-1/config.json",
        lambda content: content["config"]["policy"]["backend"].update(pipeline_parallel=2),
    )
    assert judged(experiment_dir).verdict == "INVALID"
    assert "pipeline_parallel is 2" in (experiment_dir / "report/report.md").read_text()


@pytest.mark.parametrize(
    ("treatment", "change"),
    [
        ({**MEGATRON, "policy.backend.pipeline_parallel": 2}, {"pipeline_parallel": 1}),
        (MEGATRON, {"tensor_parallel": 2}),  # a key of both types
    ],
)
def test_a_change_of_type_explains_neither_declared_keys_nor_those_of_both(
    simulated, judged, treatment, change
):
    experiment_dir = simulated(arms={"baseline": {}, "treatment": treatment}, cluster=TWO_RANKS)

    edit(
        experiment_dir / "treatment/seed-1/config.json",
        lambda content: content["config"]["policy"]["backend"].update(change),
    )
    assert judged(experiment_dir).verdict == "INVALID"
