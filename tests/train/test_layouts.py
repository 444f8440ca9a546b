"""How a model and its sequences are spread over two ranks is rounding, from prompts to metrics."""

from pathlib import Path

import pytest

from tests.train.runs import make_run, metrics_by_step, run_config, run_to_end, train_here
from tests.train.test_batch_cuts_of_a_run import assert_same_up_to_rounding
from tests.train.test_ppo import PPO, SHARED

LAYOUTS = {"context": "{context_parallel: 2}"}
ALGORITHMS = {
    "grpo": ("algorithm.kl_coefficient=0.1", "algorithm.entropy_coefficient=0.02"),
    "gspo": (
        "algorithm.loss=gspo",
        "algorithm.minibatches_per_step=2",
        "algorithm.loss_reduction=sequence_mean",
    ),
    "ppo": (PPO,),
    "ppo, shared": (PPO, *SHARED),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "algorithm",
    [*(name if name == "grpo" else pytest.param(name, marks=pytest.mark.slow) for name in ALGORITHMS)],
)
def test_two_ranks_train_as_one(
    layout: str, algorithm: str, tmp_path: Path, warm_weights: Path, group: None
) -> None:
    packed = ("policy.packing=true", "policy.micro_batch_tokens=90")
    settings = ("steps=3", "task.max_operand=6", *packed, *ALGORITHMS[algorithm])
    one = train_here(make_run(tmp_path / "one", run_config(*settings), initial_weights=warm_weights))
    assert one[1]["train/grad_norm"] > 1e-3
    spread = run_config(*settings, "cluster.cpu_ranks=2", f"policy.backend={LAYOUTS[layout]}")
    run = make_run(tmp_path / "two", spread, initial_weights=warm_weights)
    run_to_end(run, ranks=2)
    assert_same_up_to_rounding(metrics_by_step(run), one)
