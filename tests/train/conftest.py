from pathlib import Path

import pytest

from tests.train.runs import group, make_run, run_config, run_to_end

__all__ = ["group"]


@pytest.fixture(scope="session")
def warm_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished supervised run on the quickstart's task: its directory."""
    config = run_config(
        "algorithm={type: sft, batch_size: 32}",
        "steps=45",
        "checkpoint={every: 45, final_weights: true}",
        "policy.optimizer.warmup_steps=0",
    )
    directory = make_run(tmp_path_factory.mktemp("warm-start"), config)
    run_to_end(directory)
    return directory


@pytest.fixture(scope="session")
def warm_weights(warm_start: Path) -> Path:
    """Weights that solve some of the task, so that rewards, advantages and gradients are not all zero."""
    return warm_start / "checkpoints" / "final"
