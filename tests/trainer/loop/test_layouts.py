"""How a model and its sequences are spread over ranks is rounding, from prompts to metrics."""

from pathlib import Path

import pytest

from tests.trainer.loop.runs import train
from tests.trainer.loop.test_batch_cuts_of_a_run import assert_same_up_to_rounding
from tests.trainer.loop.test_ppo import PPO, SHARED
from tests.written_runs import run_config

LAYOUTS = {
    "context": (2, "{context_parallel: 2}"),
    "megatron context": (2, "{type: megatron, context_parallel: 2}"),
    "sequence": (2, "{tensor_parallel: 2, sequence_parallel: true}"),
    "tensor": (2, "{tensor_parallel: 2}"),
    "both": (4, "{tensor_parallel: 2, sequence_parallel: true, context_parallel: 2}"),
}
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


QUICK = {("context", "grpo")}
CASES = [
    pytest.param(layout, name, marks=() if (layout, name) in QUICK else pytest.mark.slow)
    for layout in LAYOUTS
    for name in ALGORITHMS
]


@pytest.mark.parametrize(("layout", "algorithm"), CASES)
def test_ranks_train_as_one(
    layout: str, algorithm: str, tmp_path: Path, warm_weights: Path, group: None
) -> None:
    packed = ("policy.packing=true", "policy.micro_batch_tokens=90")
    settings = ("steps=2", "task.max_operand=6", *packed, *ALGORITHMS[algorithm])
    one = train(tmp_path / "one", run_config(*settings), initial_weights=warm_weights)
    assert one[1]["train/grad_norm"] > 1e-3
    ranks, backend = LAYOUTS[layout]
    spread = run_config(*settings, f"cluster.cpu_ranks={ranks}", f"policy.backend={backend}")
    assert_same_up_to_rounding(train(tmp_path / "spread", spread, initial_weights=warm_weights), one)
