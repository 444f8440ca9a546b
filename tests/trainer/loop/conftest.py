import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.trainer.loop.runs import Rows, group, run_to_end, train
from tests.written_runs import make_run, run_config

__all__ = ["group"]


@pytest.fixture(scope="module", autouse=True)
def garbage_of_runs() -> Iterator[None]:
    """Collect the models of a file's runs, which `train_here` hides from Python's own collections."""
    yield
    gc.collect()


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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, warm_weights: Path) -> Callable[..., Rows]:
    """Train from the warm weights with these overrides, once a file; return the metrics by step."""
    rows: dict[tuple[str, ...], Rows] = {}

    def run(*overrides: str) -> Rows:
        if overrides not in rows:
            directory = tmp_path_factory.mktemp("trained")
            rows[overrides] = train(directory, run_config(*overrides), initial_weights=warm_weights)
        return rows[overrides]

    return run
