"""A run with a mixture of experts: its experts over ranks, its routes replayed, its routers balanced."""

from pathlib import Path

import pytest

from tests.trainer.loop.runs import metrics_by_step, run_to_end, train_here
from tests.trainer.loop.test_batch_cuts_of_a_run import assert_same_up_to_rounding
from tests.written_runs import make_run, run_config

MIXTURE = (
    "steps=3",
    "model.preset=qwen3-moe-tiny",
    "algorithm.kl_coefficient=0.1",
    "algorithm.entropy_coefficient=0.05",
    "algorithm.minibatches_per_step=2",
    "policy.logprobs.impl=chunked",
    "policy.router_aux_loss_coefficient=0.01",
)
SPREAD = ("cluster.cpu_ranks=2", "policy.backend.expert_parallel=2", "policy.micro_batch_size=3")


@pytest.mark.slow
@pytest.mark.parametrize("replayed", [True, False])
def test_experts_over_two_ranks_are_rounding(replayed: bool, tmp_path: Path, group: None) -> None:
    """Rollouts, a reference, two updates a step on recorded routes, a balanced router, an export."""
    mixture = (*MIXTURE, f"policy.replay_routing={str(replayed).lower()}", "policy.packing=true")
    whole = train_here(make_run(tmp_path / "whole", run_config(*mixture)))
    assert whole[1]["train/grad_norm"] > 1e-3
    assert whole[1]["train/moe/max_load"] > 1 and whole[1]["train/moe/aux_loss"] > 2  # 2: in balance
    assert 0 < whole[1]["train/moe/routing_entropy"] < 2.08  # of 8 experts: ln 8
    spread = make_run(tmp_path / "spread", run_config(*mixture, *SPREAD, "checkpoint.final_weights=true"))
    run_to_end(spread, ranks=2)
    assert_same_up_to_rounding(metrics_by_step(spread), whole)
    weights = tmp_path / "spread" / "checkpoints" / "final"
    assert train_here(make_run(tmp_path / "on", run_config(*mixture), initial_weights=weights))


@pytest.mark.slow
def test_a_value_model_with_experts_of_its_own_is_spread_too(tmp_path: Path, group: None) -> None:
    ppo = (*MIXTURE, "algorithm={type: ppo, prompts_per_step: 4, group_size: 8, value_backbone: own}")
    whole = train_here(make_run(tmp_path / "whole", run_config(*ppo)))
    spread = make_run(tmp_path / "spread", run_config(*ppo, *SPREAD))
    run_to_end(spread, ranks=2)
    assert_same_up_to_rounding(metrics_by_step(spread), whole)
