"""Budgets of runs whose engine is vLLM, on CPU cores."""

from pathlib import Path

from tests.tools.logprob_diff.runs import assert_rounding_explains, budget_of, moved, row
from tests.trainer.rollout.vllm_sampling import PARITY, needs_vllm

pytestmark = needs_vllm


def test_in_float32_there_is_nothing_to_explain(tmp_path: Path) -> None:
    budget = budget_of(tmp_path, "rollout.engine=vllm")
    assert budget.error.value <= 1 + PARITY and budget.cause is None
    assert moved(budget, "engine_vllm") <= 1 + PARITY


def test_in_bfloat16_it_is_rounding(tmp_path: Path) -> None:
    budget = budget_of(tmp_path, "rollout.engine=vllm", "policy.dtype=bfloat16")
    assert_rounding_explains(budget)
    assert moved(budget, "again") == 1
    assert (row(budget, "engine_vllm").kind, row(budget, "engine_torch").kind) == ("control", "engine")
    assert "GPUs only" in str(row(budget, "engine_vllm_invariant").reason)
