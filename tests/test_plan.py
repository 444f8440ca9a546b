"""Plans: which runs, in which order, what differs, and which share their initial weights."""

from pathlib import Path

import pytest

from abrun.plan import Plan, compare_hash, make_plan
from abrun.recipe import load_recipe

SMALL = Path(__file__).parent / "launch" / "small.yaml"
WARM = "warm_start={steps: 50}"


def plan_of(*overrides: str) -> Plan:
    return make_plan(load_recipe(SMALL, overrides))


def names(plan: Plan) -> list[str]:
    return [str(run.name) for run in plan.runs]


def test_runs_are_interleaved_by_pair() -> None:
    assert names(plan_of("seeds=[3, 1]", "arms.other.steps=9")) == [
        *("baseline/seed-3", "treatment/seed-3", "other/seed-3"),
        *("baseline/seed-1", "treatment/seed-1", "other/seed-1"),
    ]


def test_aa_reruns_go_round_the_seeds_behind_their_pair() -> None:
    assert names(plan_of("seeds=[0, 1]", "controls.aa_reruns=3")) == [
        *("baseline/seed-0", "treatment/seed-0", "baseline/seed-0-aa1", "baseline/seed-0-aa2"),
        *("baseline/seed-1", "treatment/seed-1", "baseline/seed-1-aa1"),
    ]


def test_the_treatment_diff_is_of_the_resolved_configurations() -> None:
    plan = plan_of("arms.treatment.policy.optimizer.learning_rate=1e-3", "arms.other.steps=9")
    # 1e-3 is the base's own value: said in the arm, but no difference
    assert plan.treatment_diff == {
        "treatment": {"policy.logprobs.impl": ("logits", "chunked")},
        "other": {"steps": (3, 9)},
    }


def test_arms_share_a_warm_start_unless_model_or_task_differ() -> None:
    plan = plan_of(WARM)
    (key,) = plan.warm_starts
    assert {run.warm_start for run in plan.runs} == {key}
    warm_start = plan.warm_starts[key]
    assert (warm_start.algorithm.type, warm_start.steps) == ("sft", 50)
    assert warm_start.policy.logprobs.impl == "logits" and warm_start.warm_start is None
    assert len(plan_of(WARM, "arms.other.task.max_operand=7").warm_starts) == 2
    assert plan_of(WARM, "arms.other.warm_start=null").runs[2].warm_start is None
    assert plan_of().warm_starts == {}


@pytest.mark.parametrize(
    "override", ["seeds=[5, 6]", "steps=9", "wandb={}", "compare.guards.step_time_ratio=2"]
)
def test_a_cached_warm_start_serves_whatever_does_not_reach_it(override: str) -> None:
    assert list(plan_of(WARM, override).warm_starts) == list(plan_of(WARM).warm_starts)


def test_a_warm_start_never_sees_what_its_runs_hold_out_however_often_they_validate() -> None:
    plans = [plan_of(WARM, f"validation={{every: {every}, num_prompts: 8}}") for every in (2, 3)]
    (warm_start,) = plans[0].warm_starts.values()
    assert warm_start.validation is not None
    assert (warm_start.validation.num_prompts, warm_start.validation.every) == (8, 50)
    assert list(plans[0].warm_starts) == list(plans[1].warm_starts) != list(plan_of(WARM).warm_starts)


@pytest.mark.parametrize("override", ["warm_start.steps=99", "policy.dtype=bfloat16", "task.max_operand=7"])
def test_a_warm_start_that_would_come_out_otherwise_has_another_key(override: str) -> None:
    assert list(plan_of(WARM, override).warm_starts) != list(plan_of(WARM).warm_starts)


def test_the_compare_hash_is_of_the_comparison_alone() -> None:
    assert compare_hash(plan_of("steps=9").recipe.compare) == compare_hash(plan_of().recipe.compare)
    other = plan_of("compare.primary=[{metric: train/reward, margin: 0.06}]")
    assert compare_hash(other.recipe.compare) != compare_hash(plan_of().recipe.compare)
