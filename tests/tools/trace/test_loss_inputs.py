"""Losses of all captures are evaluated on the baseline's inputs."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from abrun.recipe.implementations import ENGINES
from abrun.runs.captures import read_capture
from abrun.tools.trace.command import read_replicas
from abrun.tools.trace.judge import judge_trace
from abrun.tools.trace.observe import LossInputs
from tests.tools.trace.captured import capture, config, run_as_rank

NAME = "lm_head.logprobs"


def test_rows_of_any_rank_replace_those_of_a_micro_batch(tmp_path: Path) -> None:
    tokens = {0: [torch.tensor([[2, 0], [2, 1]]), torch.tensor([[0, 0], [0, 1], [0, 2]])]}
    values = {(0, NAME): [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0], [5.0]])]}
    ranks: Any = SimpleNamespace(all_gather_world=lambda local: [local, {(0, 5, NAME): torch.ones(4)}])
    LossInputs.gather(tokens, values, ranks).write(tmp_path)
    inputs = LossInputs.read(tmp_path)
    own = torch.full((4, 3), 7.0)
    replaced = inputs.replace_rows(own, 0, NAME, [0, 1, 2, 5], None)
    expected = [[3.0, 4.0, 5.0], [7.0] * 3, [1.0, 2.0, 7.0], [7.0] * 3]  # row 5 is longer than the batch
    assert replaced.tolist() == expected and own.eq(7).all()
    assert inputs.replace_rows(own, 1, NAME, [0], None).eq(7).all()  # of another optimizer step
    moved = inputs.replace_rows(own, 0, NAME, [0], (3, 1))[0]
    assert ((moved - replaced[0]).abs() == torch.tensor([2.0, 4.0, 4.0]) * 2.0**-23).all()


def test_a_faulty_correction_is_named_although_replicas_have_other_logprobs(tmp_path: Path) -> None:
    correction = {"type": "sequence_mask", "low": 0.9, "high": 1.15}
    base = config(
        {
            "algorithm": {"importance_correction": correction, "minibatches_per_step": 2, "group_size": 4},
            "policy": {"dtype": "bfloat16"},
        }
    )
    capture(tmp_path, base, "baseline", records=True, replicas=2, run_rank=run_with_mismatch)
    faulty = base.model_dump() | {"injected_fault": {"name": "sequence_weight_sum"}}
    capture(tmp_path, config(base=faulty), "treatment")
    baseline, treatment = (read_capture(tmp_path / arm) for arm in ("baseline", "treatment"))
    result = judge_trace(baseline, treatment, read_replicas(tmp_path))
    assert result.first is not None and result.first.module == "batch.importance_weights", result.first
    for replica in read_replicas(tmp_path):
        assert replica["activation:batch.importance_weights"].largest < 1e-5
        assert replica["activation:lm_head.logprobs"].largest > 1e-3  # what their own weights would differ by


def run_with_mismatch(rank: int, world_size: int, job: Mapping[str, Any]) -> None:
    """Run with importance weights of 1.1, of which the rounding of bfloat16 changes a hundredth."""
    ENGINES["torch"] = "tests.tools.logprob_diff.injected:Lower"
    run_as_rank(rank, world_size, job)
