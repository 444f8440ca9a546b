"""Steps on the ranks of a layout are what `oracle` makes of them: metrics, gradient norms, weights, values.

Rows are of the awkward kind: short and long ones on different ranks, filtered ones, without a completion, the
padding token inside; several microbatches and several updates a step.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from abrun.recipe.merging import merge
from tests.spawn import run_ranks
from tests.trainer.backends.megatron_policies import network, weights_of
from tests.trainer.backends.oracle import Oracle, Row
from tests.trainer.backends.runs_of_rows import HEAD_SEED, config_of, steps_on_ranks

END = 5  # of a completion, and the padding token
OPTIMIZER = {"learning_rate": 0.01, "eps": 1e-2, "weight_decay": 0.3, "max_grad_norm": 0.5}
FALLING = {"schedule": "cosine", "min_learning_rate": 1e-4}
GRPO = {
    "type": "grpo",
    "prompts_per_step": 4,
    "group_size": 2,
    "minibatches_per_step": 2,
    "epochs_per_step": 2,
    "clip_low": 0.05,
    "clip_high": 0.07,
    "dual_clip": 3.0,
    "kl_coefficient": 0.1,
    "entropy_coefficient": 0.02,
    "importance_correction": {"type": "truncated", "low": 0.5, "high": 2.0},
    "metrics": "full",
}
GSPO = {**GRPO, "loss": "gspo", "loss_reduction": "sequence_mean", "kl_in": "reward", "clip_low": 0.01}
PPO = {
    **GRPO,
    "type": "ppo",
    "minibatches_per_step": 1,
    "gamma": 0.97,
    "value_clip_range": 0.05,
    "value_optimizer": {**OPTIMIZER, **FALLING},
}
SHARED = {**PPO, "value_backbone": "shared", "loss_reduction": "document_sum"}
BALANCED = {"router_aux_loss_coefficient": 0.5, "replay_routing": True}
ONE_PASS = {"impl": "chunked", "one_pass": True}
PACKED = {"packing": True, "micro_batch_tokens": 12}
PROMPTS = {**PACKED, "micro_batch_tokens": 24, "share_prompts": True}
SP = {"tensor_parallel": 2, "sequence_parallel": True}

CASES: dict[str, tuple[int, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "dtensor, context": (2, "qwen2", {"context_parallel": 2}, SHARED, PACKED),
    "megatron, experts": (2, "qwen3_moe", {"type": "megatron", "expert_parallel": 2}, GRPO, BALANCED),
    "dtensor, data": (2, "qwen3", {}, GSPO, {"micro_batch_size": 1}),
    "dtensor, prompts": (2, "qwen3_moe", {"expert_parallel": 2}, SHARED, {**PROMPTS, **BALANCED}),
    "megatron, context": (2, "qwen3", {"type": "megatron", "context_parallel": 2}, GSPO, PACKED),
    "dtensor, prompts cut": (2, "qwen2", SP, GSPO, {**PROMPTS, "activation_checkpointing": True}),
    "dtensor, sequence": (2, "llama", SP, PPO, {"logprobs": ONE_PASS}),
    "dtensor, experts": (2, "qwen3_moe", {"expert_parallel": 2, "context_parallel": 2}, GRPO, BALANCED),
    "megatron, stages": (2, "qwen2", {"type": "megatron", "pipeline_parallel": 2}, SHARED, PACKED),
    "megatron, sequence": (2, "qwen3", {"type": "megatron", **SP}, GRPO, {"logprobs": ONE_PASS}),
    "megatron, replicas": (2, "llama", {"type": "megatron"}, PPO, PACKED),
    "dtensor, three": (
        4,
        "qwen3_moe",
        {**SP, "expert_parallel": 2},
        SHARED,
        {**BALANCED, "activation_checkpointing": True},
    ),
    "megatron, three": (
        4,
        "qwen3_moe",
        {"type": "megatron", **SP, "expert_parallel": 2},
        GSPO,
        {**BALANCED, **PACKED},
    ),
}
QUICK = ("dtensor, prompts", "megatron, experts", "megatron, context")


def some_rows(draw: random.Random, number: int, vocabulary: int) -> list[Row]:
    rows, prompt = [], []
    for index in range(number):
        low, high = (1, 2) if index < number // 2 else (5, 11)  # the first rank's are short
        if index % 4 == 0:  # of a group and the next
            prompt = [draw.choice([END, draw.randrange(1, vocabulary)]) for _ in range(low + 1)]
        completion = [draw.randrange(1, vocabulary) for _ in range(draw.randint(low, high) - 1)] + [END]
        rows.append(
            Row(
                prompt=prompt,
                completion=completion if index != 3 else [],
                inference=[-draw.uniform(0.5, 4) for _ in completion] if index != 3 else [],
                reward=draw.choice([0.0, 1.0, 0.3]),
                merge_counts=index not in (1, number - 1),
                pad=END,
            )
        )
    return rows


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_layouts_train_as_the_oracle(name: str, tmp_path: Path) -> None:
    ranks, family, layout, algorithm, more = CASES[name]
    policy = merge({"backend": layout, "optimizer": OPTIMIZER}, more)
    assert_train_as_the_oracle(tmp_path, ranks, family, policy, algorithm, seed=name)


VALUES = {**PPO, "minibatches_per_step": 2}
ONE_PASS_PACKED = {"logprobs": ONE_PASS, "packing": True, "micro_batch_tokens": 40}
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # changes to the algorithm and the policy
    "tokens": ({"loss_reduction": "token_mean", "minibatches_per_step": 1, "epochs_per_step": 1}, {}),
    "sequences by a number": (
        {"loss_reduction": "sequence_mean", "grad_divisor": 7.5},
        {"micro_batch_size": 3},
    ),
    "sequences by documents": (
        {"loss_reduction": "sequence_mean", "grad_divisor": "documents", "minibatches_per_step": 1},
        {"packing": True, "micro_batch_tokens": 40},
    ),
    "a constant by documents": (
        {"loss_reduction": "sequence_sum_constant", "grad_divisor": "documents"},
        ONE_PASS_PACKED,
    ),
    "documents by their square": (
        {"loss_reduction": "document_sum", "grad_divisor": "documents_squared"},
        {"logprobs": ONE_PASS, "micro_batch_size": 3},
    ),
    "values": ({**VALUES, "right_shift": False}, {"micro_batch_size": 3}),
    "shared values": ({**VALUES, "value_backbone": "shared", "loss_reduction": "document_sum"}, PACKED),
}


@pytest.mark.parametrize("name", LOSSES)
def test_one_rank_trains_as_the_oracle(name: str, tmp_path: Path, group: None) -> None:
    """Each reduction, divisor, number of minibatches and cut; and a value model of its own or shared."""
    algorithm, policy = LOSSES[name]
    settings = GRPO | algorithm
    assert_train_as_the_oracle(tmp_path, 1, "llama", {"optimizer": OPTIMIZER} | policy, settings, seed=name)


def assert_train_as_the_oracle(
    folder: Path, ranks: int, family: str, policy: dict[str, Any], algorithm: dict[str, Any], seed: str
) -> None:
    draw = random.Random(seed)
    made = network(family, num_hidden_layers=2, vocab_size=67, pad_token_id=END)
    made.save_pretrained(folder)
    settings = {
        "policy": policy,
        "algorithm": algorithm,
        "rollout": {"temperature": 0.7, "max_new_tokens": 16},
    }
    steps = [some_rows(draw, 8, 67) for _ in range(2)]
    if ranks == 1:
        found = [steps_on_ranks(0, 1, folder, settings, steps, END)]
    else:
        found = run_ranks(steps_on_ranks, ranks, folder, settings, steps, END)
    start = weights_of(made)
    assert all(torch.equal(weight, start[key]) for key, weight in found[0]["initial"].items())
    oracle = Oracle(made, config_of(folder, ranks, settings, len(steps)), head_seed=HEAD_SEED)
    for step, rows in enumerate(steps):
        expected = oracle.step(rows)
        for of_rank in found:
            got = {key: of_rank["metrics"][step].get(key) for key in expected}
            assert got == pytest.approx(expected, rel=4e-3, abs=3e-5, nan_ok=True)
    for key, weight in weights_of(oracle.network).items():
        assert (found[0]["weights"][key] - weight).abs().max() < 2e-2 * OPTIMIZER["learning_rate"], key
    assert all(one["resumed"] for one in found)
    if algorithm["type"] == "ppo":
        by_share = {one["share"][0]: one["values"] for one in found}
        values = [row for share in sorted(by_share) for row in by_share[share]]
        for row, got in zip(steps[-1], values, strict=True):
            assert got == pytest.approx(oracle.valued(row, graph=False).tolist(), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(
    "algorithm",
    [
        PPO,
        GSPO,
        pytest.param(
            {**GRPO, "kl_in": "reward_to_go", "advantage_baseline": "batch_mean", "normalize_over": "batch"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["ppo", "kl in reward", "kl in reward_to_go"],
)
def test_a_step_whose_rows_are_all_filtered_trains_nothing(
    algorithm: dict[str, Any], tmp_path: Path, group: None
) -> None:
    made = network("qwen2", num_hidden_layers=2)
    made.save_pretrained(tmp_path)
    row = Row(prompt=[3, 4], completion=[6, END], inference=[-1.0, -2.0], merge_counts=False)
    settings = {"policy": {}, "algorithm": algorithm, "rollout": {"max_new_tokens": 2}}
    found = steps_on_ranks(0, 1, tmp_path, settings, [[row] * 8], 0)
    assert found["metrics"][0]["train/grad_norm"] == found["metrics"][0]["train/loss"] == 0
    start = weights_of(made)
    assert all(torch.equal(weight, start[key]) for key, weight in found["weights"].items())
