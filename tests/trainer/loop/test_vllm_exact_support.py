"""Runs with filters whose trainer scores the sets of tokens that vLLM kept.

vLLM's own kernels run in Triton's interpreter, a tenth of a second a token.
"""

from pathlib import Path

import pytest

from tests.trainer.loop.runs import Trainer, metrics_by_step
from tests.trainer.loop.test_batch_cuts_of_a_run import assert_same_up_to_rounding
from tests.trainer.loop.test_implementations import verifier
from tests.trainer.loop.test_vllm import assert_resumes
from tests.trainer.rollout.vllm_sampling import PRESET
from tests.trainer.triton_interpreted import environment, needs_interpreter
from tests.written_runs import make_run, run_config

FILTERED = "rollout={engine: vllm, max_new_tokens: 6, temperature: 1.3, top_k: 40, top_p: 0.9}"
SMALL = "algorithm={type: grpo, prompts_per_step: 2, group_size: 4}"


def started(directory: Path, ranks: int = 1) -> Trainer:
    folder = directory.parent / "triton"
    return Trainer(directory, ranks=ranks, env=environment(folder), path=folder, fresh=True)


def settings(folder: Path, *overrides: str) -> tuple[str, ...]:
    return f"model.preset={PRESET}", FILTERED, SMALL, "task=" + verifier(folder), *overrides


def trained(directory: Path, *overrides: str, ranks: int = 1) -> dict[int, dict[str, float]]:
    make_run(directory, run_config(*settings(directory.parent, *overrides)))
    trainer = started(directory, ranks)
    assert trainer.wait(500) == 0, trainer.stderr
    return metrics_by_step(directory)


@needs_interpreter
@pytest.mark.parametrize(
    ("spread", "ranks"),
    [
        (("cluster.cpu_ranks=2", "rollout.tensor_parallel=2"), 2),
        (("rollout.devices=1", "rollout.exact_support=true"), 1),
    ],
    ids=["shared engine", "own engine"],
)
def test_each_layout_scores_the_sets_that_were_drawn_from(
    spread: tuple[str, ...], ranks: int, tmp_path: Path
) -> None:
    steps = ("steps=3", "validation={every: 3, num_prompts: 2}")
    whole = trained(tmp_path / "whole", *steps)
    assert whole[2]["train/grad_norm"] > 0
    rows = trained(tmp_path / "spread", *steps, *spread, ranks=ranks)
    assert rows.pop(0).keys() == whole.pop(0).keys()  # validation before the first step
    assert all(abs(row["train/token_mult_prob_error"] - 1) <= 1e-5 for row in rows.values())
    assert_same_up_to_rounding(rows, whole)


@needs_interpreter
def test_killed_and_resumed_it_scores_the_same_sets(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", "steps=3", "checkpoint.every=1")
    config = run_config(*settings(tmp_path, "steps=3", "checkpoint.every=1"))
    assert_resumes(make_run(tmp_path / "killed", config), whole, started)
