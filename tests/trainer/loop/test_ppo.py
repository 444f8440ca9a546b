"""PPO: a step by its formulas; cuts, ranks, packing and paths change only rounding; resumed bit for bit."""

import math
import signal
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from abrun.recipe.algorithms import Ppo
from abrun.trainer.loop.grpo import PolicyObjective
from abrun.trainer.loop.ppo import PpoAlgorithm, PpoValueObjective
from abrun.trainer.loop.setup import make_setup
from abrun.trainer.rl.advantages import generalized_advantages, shift_right, token_rewards
from abrun.trainer.rl.batch import ActorCriticBatch, RolloutBatch, ScoredBatch
from tests.trainer.loop import runs
from tests.trainer.loop.runs import Trainer, run_to_end
from tests.trainer.loop.test_batch_cuts_of_a_run import assert_same_up_to_rounding
from tests.written_runs import events, make_run, metric_values, run_config

PPO = (
    "algorithm={type: ppo, prompts_per_step: 24, minibatches_per_step: 2, epochs_per_step: 2, "
    "kl_coefficient: 0.1, kl_in: reward, entropy_coefficient: 0.02, dual_clip: 3.0, "
    "value_optimizer: {learning_rate: 1.0e-3}}"
)
SHARED = ("algorithm.value_backbone=shared", "algorithm.value_coefficient=0.2")
CHUNKED = "policy.logprobs={impl: chunked, chunk_size: 40}"
ONE_PASS = "policy.logprobs={impl: chunked, one_pass: true}"
PACKED = ("policy.packing=true", "policy.share_prompts=true", "policy.micro_batch_tokens=60")


def train(directory: Path, weights: Path, *overrides: str) -> dict[int, dict[str, float]]:
    config = run_config("steps=3", "task.max_operand=6", PPO, *overrides)
    return runs.train(directory, config, initial_weights=weights)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), id="own", marks=pytest.mark.slow),
        pytest.param(SHARED, id="shared", marks=pytest.mark.slow),
        pytest.param(("algorithm.right_shift=false",), id="not-shifted", marks=pytest.mark.slow),
    ],
)
def test_cuts_packing_and_paths_change_only_rounding(
    overrides: tuple[str, ...], tmp_path: Path, warm_weights: Path, group: None
) -> None:
    whole = train(tmp_path / "whole", warm_weights, *overrides)
    first = whole[1]
    assert first["train/grad_norm"] > 1e-3 and first["train/critic/grad_norm"] > 1e-3
    assert first["train/advantages/mean"] == pytest.approx(0, abs=1e-6), "whitened"
    assert whole[3]["train/kl_penalty"] != 0 and whole[3]["train/critic/explained_var"] < 1
    others = {
        "cut": ("policy.micro_batch_size=5", CHUNKED),
        "packed": (*PACKED, ONE_PASS),
    }
    for name, settings in others.items():
        assert_same_up_to_rounding(train(tmp_path / name, warm_weights, *overrides, *settings), whole)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), SHARED], ids=["own", "shared"])
def test_two_ranks_change_only_rounding(
    overrides: tuple[str, ...], tmp_path: Path, warm_weights: Path, group: None
) -> None:
    one = train(tmp_path / "one", warm_weights, *overrides)
    assert_same_up_to_rounding(
        train(tmp_path / "two", warm_weights, *overrides, *PACKED, "cluster.cpu_ranks=2"), one
    )


def a_batch() -> RolloutBatch:
    generator = torch.Generator().manual_seed(5)
    mask = torch.zeros(4, 9, dtype=torch.bool)
    for row, (start, stop) in enumerate([(2, 5), (3, 9), (1, 2), (4, 8)]):
        mask[row, start:stop] = True
    return RolloutBatch(
        token_ids=torch.randint(3, 90, mask.shape, generator=generator),
        token_mask=mask,
        rewards=torch.tensor([1.0, 0.0, 1.0, 0.5]),
        inference_logprobs=torch.full(mask.shape, -1.0),
    )


@pytest.mark.parametrize("right_shift", [True, False])
def test_advantages_are_those_of_the_critic_s_values(right_shift: bool, group: None) -> None:
    config = run_config(
        "algorithm={type: ppo, prompts_per_step: 4, gamma: 0.9, gae_lambda: 0.8}",
        "algorithm.normalize_advantages=false",
        f"algorithm.right_shift={str(right_shift).lower()}",
    )
    setup = make_setup(config, 0, None, torch.device("cpu"))
    batch, critic = a_batch(), cast("Any", setup.value_model)
    scored = batch.with_fields(
        ScoredBatch,
        old_logprobs=batch.inference_logprobs,
        reference_logprobs=None,
        importance_weights=None,
        loss_weights=batch.token_mask.double(),
    )
    assert isinstance(config.algorithm, Ppo)
    found, metrics = PpoAlgorithm(setup, config.algorithm, critic).advantages(scored)
    with torch.no_grad():
        after = critic.head(critic._hidden_states(batch.token_ids, None)).float()
    values = shift_right(after) if right_shift else after
    rewards = token_rewards(batch.rewards, batch.token_mask)
    advantages, returns = generalized_advantages(rewards, values, batch.token_mask, gamma=0.9, gae_lambda=0.8)
    torch.testing.assert_close(found.advantages, advantages)
    torch.testing.assert_close(found.returns, returns)
    assert metrics["train/critic/values_mean"] == pytest.approx(
        float(values[batch.token_mask].mean()), rel=1e-5
    )
    # The last token of the first row: its reward, less the value that stands for it.
    value = after[0, 3] if right_shift else after[0, 4]
    assert float(found.advantages[0, 4]) == pytest.approx(1.0 - float(value), rel=1e-4)


def test_the_value_loss_of_a_batch_by_hand() -> None:
    mask = torch.tensor([[False, True, True]])
    unused = torch.full(mask.shape, math.nan)
    batch = ActorCriticBatch(
        token_ids=torch.zeros(1, 3, dtype=torch.int64),
        token_mask=mask,
        inference_logprobs=unused,
        old_logprobs=unused,
        reference_logprobs=None,
        importance_weights=None,
        advantages=unused,
        old_values=torch.tensor([[9.0, 0.0, 1.0]]),
        returns=torch.tensor([[math.nan, 1.0, 1.0]]),
        loss_weights=mask.double() / 2,
    )
    objective = PpoValueObjective(clip_range=0.5, num_tokens=2)
    values = torch.tensor([[math.nan, 0.8, 1.2]], requires_grad=True)
    # 0.8 is bounded to 0.5, whose error of 0.5 is the larger; 1.2 is within the bounds.
    losses = objective.losses(batch, values)
    assert losses.shares[0].tolist() == pytest.approx([0.0, 0.25 * 0.25, 0.25 * 0.04])
    losses.shares.sum().backward()
    assert values.grad is not None and values.grad[0].tolist() == pytest.approx([0.0, 0.0, 0.1])
    sums = objective.metrics(batch, values.detach(), losses).sums
    assert float(sums["train/critic/loss"]) == pytest.approx(0.0725)
    assert float(sums["train/critic/clip_fraction"]) == 0.5


def test_the_critic_s_loss_is_the_mean_of_its_updates_losses() -> None:
    """Two minibatches, of one and of three tokens, each with its own reduction, as train/loss has them."""
    parts, losses = [], []
    for mask, error in (([True, False, False], 2.0), ([True, True, True], 1.0)):
        token_mask = torch.tensor([mask])
        nothing = torch.zeros(1, 3)
        batch = ActorCriticBatch(
            token_ids=torch.zeros(1, 3, dtype=torch.int64),
            token_mask=token_mask,
            inference_logprobs=nothing,
            old_logprobs=nothing,
            reference_logprobs=None,
            importance_weights=None,
            advantages=nothing,
            old_values=nothing,
            returns=nothing,
            loss_weights=token_mask.double() / token_mask.sum(),
        )
        objective = PpoValueObjective(clip_range=None, num_tokens=4, num_updates=2)
        values = torch.full((1, 3), error)
        found = objective.losses(batch, values)
        losses.append(float(found.shares.sum()))
        parts.append(objective.metrics(batch, values, found))
    assert losses == [2.0, 0.5]
    found = sum(float(part.sums["train/critic/loss"]) for part in parts)
    assert found == pytest.approx(sum(losses) / 2)  # not (2.0 + 3 * 0.5) / 4, the mean over tokens


@pytest.mark.parametrize(("backbone", "factor"), [("shared", 0.25), ("own", 1.0)])
def test_a_grad_divisor_scales_the_whole_gradient_of_a_backbone(backbone: Any, factor: float) -> None:
    """Policy and value loss alike where they share it, so that value_coefficient keeps its meaning."""
    settings = Ppo(type="ppo", value_backbone=backbone)
    policy = PolicyObjective(
        settings=settings, num_tokens=8, num_sequences=2, num_updates=3, gradient_factor=0.25
    )
    of_values = PpoValueObjective.for_update(policy)
    assert (of_values.num_tokens, of_values.num_updates, of_values.gradient_factor) == (8, 3, factor)


@pytest.mark.parametrize("backbone", ["shared", "own"])
def test_a_grad_divisor_divides_the_gradient_norms(
    backbone: str, tmp_path: Path, warm_weights: Path, group: None
) -> None:
    """A divisor of 7 times the reduction's own count divides the norm by 7, of a shared value head too."""
    settings = ("steps=1", f"algorithm.value_backbone={backbone}", "algorithm.epochs_per_step=1")
    still = (
        "algorithm.prompts_per_step=8",
        "algorithm.minibatches_per_step=1",
        "policy.optimizer={learning_rate: 1.0e-30}",
        "algorithm.value_optimizer={learning_rate: 1.0e-30}",
    )
    plain = train(tmp_path / "plain", warm_weights, *settings, *still)[1]
    divisor = 7 * plain["train/global_valid_toks"]
    divided = train(
        tmp_path / "divided", warm_weights, *settings, *still, f"algorithm.grad_divisor={divisor}"
    )[1]
    assert divided["train/loss"] == plain["train/loss"]
    assert divided["train/critic/loss"] == plain["train/critic/loss"]
    assert divided["train/grad_norm"] == pytest.approx(plain["train/grad_norm"] / 7, rel=1e-4)
    of_values = 7 if backbone == "shared" else 1
    assert divided["train/critic/grad_norm"] == pytest.approx(
        plain["train/critic/grad_norm"] / of_values, rel=1e-4
    )


def test_the_critic_learns_before_the_policy_and_by_its_own_rate(
    tmp_path: Path, warm_weights: Path, group: None
) -> None:
    rows = train(
        tmp_path / "run",
        warm_weights,
        "algorithm.prompts_per_step=4",
        "algorithm.epochs_per_step=1",
        "algorithm.value_optimizer={learning_rate: 4.0e-3, warmup_steps: 2}",
        "policy.optimizer={learning_rate: 1.0e-3, warmup_steps: 4}",
    )
    assert [rows[step]["train/critic/lr"] for step in (1, 2, 3)] == pytest.approx([2e-3, 4e-3, 4e-3])
    assert [rows[step]["train/lr"] for step in (1, 2, 3)] == pytest.approx([2.5e-4, 5e-4, 7.5e-4])


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), SHARED], ids=["own", "shared"])
def test_killed_and_resumed_bit_for_bit(
    overrides: tuple[str, ...], tmp_path: Path, warm_weights: Path
) -> None:
    """The value model's weights and moments are in the checkpoint."""
    config = run_config("steps=8", PPO, *overrides)
    whole = make_run(tmp_path / "whole", config, initial_weights=warm_weights)
    run_to_end(whole)
    killed = make_run(tmp_path / "killed", config, initial_weights=warm_weights)
    trainer = Trainer(killed)
    trainer.wait_for_step(4)
    trainer.send(signal.SIGKILL)
    assert trainer.wait() == -signal.SIGKILL
    run_to_end(killed)
    assert events(killed).count("resumed") == 1
    assert metric_values(killed) == metric_values(whole)
