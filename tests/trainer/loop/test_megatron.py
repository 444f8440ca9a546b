"""Runs on the megatron backend over two ranks, from start to end: against one of dtensor, and resumed."""

import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from abrun.recipe.run import OwnRunConfig
from abrun.runs.rundir import RunDir
from tests.trainer.loop.runs import Trainer, metrics_by_step, run_to_end
from tests.trainer.loop.test_implementations import verifier
from tests.written_runs import make_run, metric_values, run_config

PPO = "algorithm={type: ppo, prompts_per_step: 8, value_optimizer: {learning_rate: 1.0e-3}}"
CUTS = {
    "tensor": "{type: megatron, tensor_parallel: 2, sequence_parallel: true}",
    "pipeline": "{type: megatron, pipeline_parallel: 2}",
    "experts": "{type: megatron, expert_parallel: 2}",
    "context": "{type: megatron, context_parallel: 2}",
}
MIXTURE = ("policy.router_aux_loss_coefficient=0.01", "policy.replay_routing=true")


def config_of(task: str, algorithm: str, *more: str) -> OwnRunConfig:
    return run_config("steps=4", "checkpoint={every: 2, final_weights: true}", task, algorithm, *more)


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
def test_two_ranks_take_the_steps_of_one_of_dtensor(cut: str, tmp_path: Path) -> None:
    """PPO with a value model of its own, what is sampled included; experts balanced, on recorded routes.

    To rounding, which AdamW makes steps of where a gradient is nearly 0.
    """
    task = f"task={verifier(tmp_path)}"
    model = "qwen3-moe-tiny" if cut == "experts" else "qwen2-wide-vocab"  # with an even number of layers
    model = f"model={{preset: {model}}}"
    more = MIXTURE if cut == "experts" else ()
    alone = make_run(tmp_path / "dtensor", config_of(task, PPO, model, *more))
    run_to_end(alone)
    spread = (f"policy.backend={CUTS[cut]}", "cluster.cpu_ranks=2")
    together = make_run(tmp_path / "megatron", config_of(task, PPO, model, *more, *spread))
    run_to_end(together, ranks=2)
    expected, found = metrics_by_step(alone), metrics_by_step(together)
    assert found.keys() == expected.keys() == {1, 2, 3, 4}
    for step, row in expected.items():
        for key, value in row.items():
            if not key.startswith(("timing/", "performance/", "memory/")):
                assert found[step][key] == pytest.approx(value, rel=1e-3, abs=1e-4), (step, key)
    assert all(row["train/grad_norm"] > 0 for row in expected.values())
    weights = [load_file(RunDir(run).final_weights / "model.safetensors") for run in (alone, together)]
    assert weights[0].keys() == weights[1].keys()
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("stopped_cut", ["tensor", "context"])
def test_two_ranks_that_were_stopped_go_on_to_the_bit(stopped_cut: str, tmp_path: Path) -> None:
    task, cut = f"task={verifier(tmp_path)}", f"policy.backend={CUTS[stopped_cut]}"
    config = config_of(task, PPO, cut, "cluster.cpu_ranks=2", "steps=6")
    whole, stopped = (make_run(tmp_path / name, config) for name in ("whole", "stopped"))
    run_to_end(whole, ranks=2)
    trainer = Trainer(stopped, ranks=2)
    trainer.wait_for_step(2)
    trainer.send(signal.SIGTERM)
    assert trainer.wait() == 3, trainer.stderr
    run_to_end(stopped, ranks=2)
    rows = [
        {key: values for key, values in metric_values(run).items() if not key.startswith("memory/")}
        for run in (whole, stopped)
    ]
    assert rows[0] == rows[1]
