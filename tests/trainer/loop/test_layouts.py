"""How a model and its sequences are spread over ranks is rounding, from prompts to metrics."""

from pathlib import Path

import pytest

from tests.trainer.loop.runs import train
from tests.trainer.loop.test_batch_cuts_of_a_run import assert_same_up_to_rounding
from tests.trainer.loop.test_implementations import verifier
from tests.trainer.loop.test_ppo import PPO, SHARED
from tests.written_runs import run_config

LAYOUTS = {
    "data": (2, "{}"),
    "context": (2, "{context_parallel: 2}"),
    "megatron context": (2, "{type: megatron, context_parallel: 2}"),
    "sequence": (2, "{tensor_parallel: 2, sequence_parallel: true}"),
    "tensor": (2, "{tensor_parallel: 2}"),
    "both": (4, "{tensor_parallel: 2, sequence_parallel: true, context_parallel: 2}"),
    "megatron sequence": (2, "{type: megatron, tensor_parallel: 2, sequence_parallel: true}"),
    "megatron pipeline": (2, "{type: megatron, pipeline_parallel: 2}"),
    "experts": (2, "{expert_parallel: 2}"),
    "megatron experts": (2, "{type: megatron, expert_parallel: 2}"),
}
MIXTURE = ("model.preset=qwen3-moe-tiny", "policy.router_aux_loss_coefficient=0.01")
MODELS = {  # of layouts that the quickstart's own model does not fit
    "megatron pipeline": ("model.preset=qwen2-wide-vocab",),  # with an even number of layers
    "experts": MIXTURE,
    "megatron experts": (*MIXTURE, "policy.replay_routing=true"),
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
    if layout != "megatron pipeline" or name.startswith("ppo")  # no completion of its model has a reward
]


@pytest.mark.parametrize(("layout", "algorithm"), CASES)
def test_ranks_train_as_one(
    layout: str, algorithm: str, tmp_path: Path, warm_weights: Path, group: None
) -> None:
    packed = ("policy.packing=true", "policy.micro_batch_tokens=90")
    settings = ("steps=2", "task.max_operand=6", *packed, *ALGORITHMS[algorithm])
    weights: Path | None = warm_weights
    if layout in MODELS:
        settings, weights = (*settings, *MODELS[layout], "task=" + verifier(tmp_path)), None
    one = train(tmp_path / "one", run_config(*settings), initial_weights=weights)
    assert one[1]["train/grad_norm"] > 1e-3
    assert "experts" not in layout or one[1]["train/moe/max_load"] > 1
    ranks, backend = LAYOUTS[layout]
    spread = run_config(*settings, f"cluster.cpu_ranks={ranks}", f"policy.backend={backend}")
    assert_same_up_to_rounding(train(tmp_path / "spread", spread, initial_weights=weights), one)
