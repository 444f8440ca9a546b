"""Budgets on a GPU, in bfloat16. They are printed.

pytest -m gpu -s tests/tools/logprob_diff/test_mismatch_gpu.py
"""

import importlib.util
from pathlib import Path

import pytest

from tests.tools.logprob_diff.runs import assert_rounding_explains, budget_of, moved, row

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
WITH_VLLM = importlib.util.find_spec("vllm") is not None


def test_of_the_torch_engine(tmp_path: Path) -> None:
    budget = budget_of(tmp_path, "policy.dtype=bfloat16", "cluster.gpus_per_node=1")
    assert_rounding_explains(
        budget, least=0
    )  # so small a model decodes to the bit what it computes in one pass
    assert 1 < moved(budget, "float32") < 1.05
    for key in ("logprobs_chunked", "logprobs_triton", "packed", "engine_torch"):
        assert moved(budget, key) < 1.05


@pytest.mark.skipif(not WITH_VLLM, reason="needs abrun[vllm]")
@pytest.mark.parametrize("invariant", ["false", "true"])
def test_of_vllm(tmp_path: Path, invariant: str) -> None:
    asked = ("rollout.engine=vllm", "rollout.gpu_memory_utilization=0.2", "cluster.gpus_per_node=1")
    switch = f"rollout.batch_invariant={invariant}"
    budget = budget_of(tmp_path, "policy.dtype=bfloat16", *asked, switch)
    assert_rounding_explains(budget)
    own, other = ("engine_vllm", "engine_vllm_invariant")[:: -1 if invariant == "true" else 1]
    assert (row(budget, own).kind, row(budget, other).kind) == ("control", "engine")
    assert moved(budget, other) < 1.05
