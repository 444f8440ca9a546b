"""A shipped recipe's header names what its dry run lists as differences between the arms."""

from pathlib import Path

import pytest

from abrun.experiment.plan import make_plan
from abrun.recipe.experiment import BASELINE, load_recipe
from abrun.recipe.reading import dotted
from tests.recipe.test_shipped_recipes import RECIPES, named_differences

BY_NAME = {path.stem: path for path in RECIPES}


def planned_differences(path: Path, *overrides: str) -> dict[str, set[str]]:
    recipe = load_recipe(path, overrides)
    diff = make_plan(recipe).treatment_diff
    return {arm: set(diff[arm]) for arm in recipe.arms if arm != BASELINE}


@pytest.mark.parametrize(
    ("name", "override"),
    [
        ("quickstart", "arms.treatment.steps=59"),
        ("gspo-fused-logprobs", "arms.treatment.policy.logprobs={impl: chunked, chunk_size: null}"),
        ("smollm2-ppo-values", "arms.no-right-shift.steps=1"),
    ],
)
def test_a_header_that_is_not_true_any_more_is_found(name: str, override: str) -> None:
    assert named_differences(BY_NAME[name]) != planned_differences(BY_NAME[name], override)


# Of recipes after other projects: what all arms have as their sources do, and once had not
AS_THEIR_SOURCES = {
    "ppo-qwen2.5-1.5b-1n8g-megatron": {
        "policy.backend.tensor_parallel": 2,
        "policy.backend.sequence_parallel": True,
        "task.answer": "math_verify",
        "algorithm.value_backbone": "own",
    },
    "gspo-qwen2.5-7b-4n8g-fused-logprobs": {
        "algorithm.loss": "gspo",
        "algorithm.clip_low": 3e-4,
        "algorithm.clip_high": 4e-4,
        "algorithm.minibatches_per_step": 2,
        "algorithm.documents_per_step": 1024,
        "policy.optimizer.max_grad_norm": 0.3,
    },
    "grpo-qwen3-30b-a3b-2n8g-fused-logprobs": {
        "trainer.env.VLLM_USE_FLASHINFER_MOE_FP16": "0",
        "trainer.env.VLLM_USE_FLASHINFER_MOE_FP8": "0",
        "rollout.engine": "vllm",
    },
    "fp32-head": {"policy.dtype": "bfloat16", "policy.logprobs.logits_dtype": "float32"},
}


@pytest.mark.parametrize("name", AS_THEIR_SOURCES)
def test_all_arms_of_a_recipe_are_as_its_source(name: str) -> None:
    recipe = load_recipe(BY_NAME[name])
    for arm in recipe.arms:
        values = dotted(recipe.with_auto_values().run_config(arm).model_dump(mode="json"))
        expected = AS_THEIR_SOURCES[name]
        assert {key: values.get(key) for key in expected} == expected, arm


def test_the_ppo_twin_requires_what_its_source_accepts() -> None:
    recipe = load_recipe(BY_NAME["ppo-qwen2.5-1.5b-1n8g-megatron"])
    levels = {
        (claim.metric, str(claim.window)): claim.above for claim in recipe.compare.claims if claim.above
    }
    assert levels == {
        ("train/reward", "steps 40-40"): 0.75,
        ("validation/accuracy", "steps 40-40"): 0.65,
        ("train/reward", "steps 100-100"): 0.88,
        ("validation/accuracy", "steps 100-100"): 0.78,
    }


def test_a_recipe_whose_first_steps_cannot_agree_compares_none() -> None:
    assert not load_recipe(BY_NAME["ppo-qwen2.5-1.5b-1n8g-ablation"]).compare.step_one
