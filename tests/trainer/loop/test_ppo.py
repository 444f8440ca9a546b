"""PPO: divisors of gradients, rates of the critic, and runs that are resumed bit for bit."""

import signal
from pathlib import Path

import pytest

from tests.trainer.loop import runs
from tests.trainer.loop.runs import Trainer, run_to_end
from tests.written_runs import events, make_run, metric_values, run_config

PPO = (
    "algorithm={type: ppo, prompts_per_step: 24, minibatches_per_step: 2, epochs_per_step: 2, "
    "kl_coefficient: 0.1, kl_in: reward, entropy_coefficient: 0.02, dual_clip: 3.0, "
    "value_optimizer: {learning_rate: 1.0e-3}}"
)
SHARED = ("algorithm.value_backbone=shared", "algorithm.value_coefficient=0.2")


def train(directory: Path, weights: Path, *overrides: str) -> dict[int, dict[str, float]]:
    config = run_config("steps=3", "task.max_operand=6", PPO, *overrides)
    return runs.train(directory, config, initial_weights=weights)


@pytest.mark.parametrize("backbone", ["shared", "own"])
def test_a_grad_divisor_divides_the_gradient_norms(
    backbone: str, tmp_path: Path, warm_weights: Path, group: None
) -> None:
    """A divisor of 7 times the reduction's own count divides the norm by 7, of a shared value head too."""
    settings = ("steps=1", f"algorithm.value_backbone={backbone}", "algorithm.epochs_per_step=1")
    still = (
        "algorithm.prompts_per_step=8",
        "algorithm.group_size=4",
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
        "algorithm.group_size=2",
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
