"""A policy whose weights are no numbers any more ends its run in a line, and not in a fault of a device."""

from pathlib import Path

import pytest
import torch

from abrun.errors import LaunchError
from abrun.recipe.policy import Filters
from abrun.trainer.rl.sampling import sample
from tests.snapshot import Snapshot
from tests.trainer.loop.runs import train_here
from tests.trainer.loop.test_implementations import verifier
from tests.written_runs import make_run, run_config


def test_of_no_distribution_the_log_prob_says_so() -> None:
    uniform = torch.tensor([0.0, 0.999], dtype=torch.float64)
    for size in (1, 50, 1024, 1500):
        for filters in (Filters(), Filters(min_p=0.1, top_k=3, top_p=0.5)):
            logits = torch.randn(2, size, generator=torch.Generator().manual_seed(0))
            whole = sample(logits, uniform, filters)
            logits[1] = float("nan")
            token, logprob = sample(logits, uniform, filters)
            assert (token[0], logprob[0]) == (whole[0][0], whole[1][0])
            assert 0 <= int(token[1]) < size and logprob[1].isnan()


def test_a_diverged_policy_is_one_line(tmp_path: Path, group: None, snapshot: Snapshot) -> None:
    overrides = ("policy.optimizer={learning_rate: 1.0e+30, warmup_steps: 0}", "task=" + verifier(tmp_path))
    run = make_run(tmp_path / "run", run_config(*overrides, "algorithm.group_size=2"))
    with pytest.raises(LaunchError) as refusal:
        train_here(run)
    snapshot(refusal.value)
