from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from abrun.errors import LaunchError
from abrun.recipe.run import OwnRunConfig
from abrun.tools.logprob_diff.command import measure_run
from abrun.tools.logprob_diff.findings import Budget
from tests.trainer.loop.runs import single_rank
from tests.trainer.loop.test_implementations import verifier
from tests.written_runs import make_run, run_config

Measure = Callable[..., Budget]
# Logits and steps large enough that what is injected stands out
LEARNING = (
    "policy.optimizer={learning_rate: 2.0e-2, warmup_steps: 0}",
    "algorithm.prompts_per_step=12",
    "algorithm.group_size=2",
)


def scored_here(
    module: str, directory: Path, config: OwnRunConfig, job: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """`probe` without the seconds that a process of its own takes to import; the slow tests have those."""
    from abrun.experiment.probe import read_rows
    from abrun.tools.logprob_diff.measure import run_job

    assert module == "abrun.tools.logprob_diff.measure"
    if config.cluster.ranks > 1 or config.rollout.engine == "vllm":
        raise LaunchError("one rank here")
    directory.mkdir(parents=True)
    whole = job["scorings"]
    asked = {
        name: one
        for name, one in whole.items()
        if one["config"]["policy"]["logprobs"]["impl"] != "triton"  # seconds, in its interpreter
    }
    job = {"config": config.model_dump(mode="json"), **job, "scorings": asked}
    with single_rank():
        run_job(directory, job, torch.device("cpu"))
    left_out = [{"scoring": name, "reason": "slow here"} for name in whole.keys() - asked.keys()]
    return [*read_rows(directory), *left_out]


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measure:
    """The budget of a run with these overrides that has not begun, measured in this process."""
    monkeypatch.setattr("abrun.tools.logprob_diff.command.run_probe", scored_here)

    def measure(*overrides: str, **options: Any) -> Budget:
        config = run_config(*LEARNING, "task=" + verifier(tmp_path), *overrides)
        directory = make_run(tmp_path / "run", config)
        return measure_run(str(directory), tmp_path, **options)[0]

    return measure
