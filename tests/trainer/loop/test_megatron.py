"""Runs on the megatron backend over two ranks, stopped and resumed."""

import signal
from pathlib import Path

import pytest

from tests.trainer.loop.runs import Trainer, run_to_end
from tests.trainer.loop.test_implementations import verifier
from tests.written_runs import make_run, metric_values, run_config

PPO = "algorithm={type: ppo, prompts_per_step: 8, value_optimizer: {learning_rate: 1.0e-3}}"
CUTS = {
    "tensor": "{type: megatron, tensor_parallel: 2, sequence_parallel: true}",
    "context": "{type: megatron, context_parallel: 2}",
}


@pytest.mark.slow
@pytest.mark.parametrize("stopped_cut", ["tensor", "context"])
def test_two_ranks_that_were_stopped_go_on_to_the_bit(stopped_cut: str, tmp_path: Path) -> None:
    task, cut = f"task={verifier(tmp_path)}", f"policy.backend={CUTS[stopped_cut]}"
    checkpoint = "checkpoint={every: 2, final_weights: true}"
    config = run_config("steps=6", checkpoint, task, PPO, cut, "cluster.cpu_ranks=2")
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
