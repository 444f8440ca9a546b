"""A shipped recipe's header is true of what it plans, and the check of it finds lies."""

from pathlib import Path

import pytest

from abrun.recipe.experiment import load_recipe
from tests.recipe.test_shipped_recipes import RECIPES, each_recipe
from tests.recipe_headers import header, header_problems

BY_NAME = {path.stem: path for path in RECIPES}


@each_recipe
def test_a_header_names_what_the_dry_run_lists_and_says_nothing_else_of_the_plan(path: Path) -> None:
    assert header_problems(header(path), load_recipe(path)) == []


@pytest.mark.parametrize(
    ("name", "override"),
    [
        (
            "ppo-qwen2.5-1.5b-1n8g-megatron",
            "policy.backend={tensor_parallel: 1}",
        ),
        ("ppo-qwen2.5-1.5b-1n8g-megatron", "policy.backend={tensor_parallel: 2}"),
        ("ppo-qwen2.5-1.5b-1n8g-megatron", "policy.backend={tensor_parallel: 4, sequence_parallel: true}"),
        ("ppo-qwen2.5-1.5b-1n8g-megatron", "task.answer=final_number"),
        ("ppo-qwen2.5-1.5b-1n8g-megatron", "model.system_prompt=null"),
        ("ppo-qwen2.5-1.5b-1n8g-megatron", "algorithm.minibatches_per_step=2"),
        ("ppo-qwen2.5-1.5b-1n8g-megatron", "algorithm.value_backbone=shared"),
        ("ppo-qwen2.5-1.5b-1n8g-ablation", "compare.step_one=true"),
        ("ppo-qwen2.5-1.5b-1n8g-ablation", "arms.bfloat16-value-head={policy.dtype: float32}"),
        ("gspo-qwen2.5-7b-4n8g-fused-logprobs", "algorithm.minibatches_per_step=1"),
        ("gspo-qwen2.5-7b-4n8g-fused-logprobs", "algorithm.loss=clipped"),
        ("gspo-qwen2.5-7b-4n8g-fused-logprobs", "algorithm.clip_low=0.3"),
        ("gspo-qwen2.5-7b-4n8g-fused-logprobs", "algorithm.documents_per_step=512"),
        ("gspo-qwen2.5-7b-4n8g-fused-logprobs", "algorithm.group_size=16"),
        ("gspo-qwen2.5-7b-4n8g-fused-logprobs", "policy.optimizer.max_grad_norm=1.0"),
        ("gspo-qwen2.5-7b-4n8g-fused-logprobs", "cluster.nodes=2"),
        ("gspo-fused-logprobs", "algorithm.minibatches_per_step=4"),
        ("grpo-qwen3-30b-a3b-2n8g-fused-logprobs", "trainer.env={VLLM_USE_FLASHINFER_MOE_FP16: '0'}"),
        ("grpo-qwen3-30b-a3b-2n8g-fused-logprobs", "policy.optimizer.learning_rate=1e-6"),
        ("grpo-qwen3-30b-a3b-2n8g-fused-logprobs", "rollout={engine: torch}"),
        ("grpo-qwen3-30b-a3b-2n8g-fused-logprobs", "seeds=[0, 1, 2]"),
        ("grpo-qwen3-30b-a3b-2n8g-fused-logprobs", "arms.treatment.policy.logprobs.impl=chunked"),
        ("grpo-qwen2.5-7b-1n8g-context-parallel", "arms.treatment.policy.backend.context_parallel=4"),
        ("fp32-head", "policy.dtype=float32"),
        ("fp32-head", "arms.baseline.policy.logprobs={impl: logits}"),
        ("cispo-fused-logprobs", "algorithm.loss=clipped"),
        ("quickstart", "warm_start=null"),
        ("quickstart", "arms.treatment.steps=59"),
        ("sft-fused-logprobs", "warm_start={steps: 3}"),
        ("pipeline-parallel", "model.shape.num_hidden_layers=2"),
        ("pipeline-parallel", "arms.baseline.policy.backend.tensor_parallel=2"),
        ("expert-parallel", "arms={baseline: {policy.backend.expert_parallel: 2}, treatment: {steps: 39}}"),
        ("smollm2-sft-fused", "arms.treatment.policy.logprobs.one_pass=false"),
        ("smollm2-grpo-fused", "compare.primary.1.margin=60%"),
        ("smollm2-levers", "arms.treatment.policy.compile=false"),
        ("trl", "arms.treatment.trainer.parameters.label=other"),
    ],
)
def test_a_header_that_is_not_true_any_more_is_found(name: str, override: str) -> None:
    recipe = load_recipe(BY_NAME[name], [override])
    assert header_problems(header(BY_NAME[name]), recipe) != []


@pytest.mark.parametrize(
    ("said", "instead"),
    [
        ("two updates a step", "four updates a step"),
        ("two updates a step", "two updates a step on 3 ranks"),
        ("two updates a step", "two updates a step, tensor-parallel"),
        ("two updates a step", "two updates a step, in bfloat16"),
        ("GSPO", "PPO"),
        ("ratios of whole sequences", "ratios of whole sequences with vLLM"),
        ("`policy.logprobs.chunk_size`", "`policy.logprobs.one_pass`"),
        ("The arms differ in", "The arms vary in"),
        (" and `policy.logprobs.chunk_size`", ""),
    ],
)
def test_a_claim_that_is_false_or_cannot_be_checked_is_refused(said: str, instead: str) -> None:
    text, recipe = header(BY_NAME["gspo-fused-logprobs"]), load_recipe(BY_NAME["gspo-fused-logprobs"])
    assert header_problems(text, recipe) == [] and said in text
    assert len(header_problems(text.replace(said, instead), recipe)) == 1


def test_a_key_of_one_arm_is_no_key_of_another() -> None:
    text, recipe = header(BY_NAME["smollm2-ppo-values"]), load_recipe(BY_NAME["smollm2-ppo-values"])
    swapped = text.replace("Arm no-right-shift", "Arm x").replace("Arm bfloat16", "Arm no-right-shift")
    assert header_problems(swapped, recipe) != []
