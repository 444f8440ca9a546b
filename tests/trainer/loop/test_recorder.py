"""What environment.json says about precision."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from abrun.runs.rundir import RunDir
from abrun.runs.writer import begin_attempt
from abrun.trainer.backends.ranks import make_ranks
from abrun.trainer.loop.recorder import Recorder
from tests.written_runs import make_run, run_config


@pytest.mark.parametrize(
    ("logprobs", "projection", "logits"),
    [
        ("{impl: logits}", "bfloat16", "bfloat16"),
        ("{impl: chunked}", "bfloat16", "bfloat16"),
        ("{impl: triton, one_pass: true, logits_dtype: float32}", "bfloat16", "float32"),
        ("{impl: logits, head_dtype: float32}", "float32", "float32"),
        ("{impl: chunked, head_dtype: float32}", "float32", "float32"),
    ],
)
def test_precision_of_the_projection_and_of_its_logits(
    logprobs: str, projection: str, logits: str, tmp_path: Path, group: None
) -> None:
    recorded = precision(tmp_path, "policy.dtype=bfloat16", f"policy.logprobs={logprobs}")
    assert recorded == {
        "projection": projection,
        "logits": logits,
        "engine": projection,
        "float32_products": "ieee",
    }


def test_float32_products_are_as_torch_is_set_for_the_device(
    tmp_path: Path, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    before = torch.get_float32_matmul_precision()
    try:
        for setting, expected in (("highest", "ieee"), ("high", "tf32")):
            torch.set_float32_matmul_precision(setting)
            assert precision(tmp_path, device="cuda")["float32_products"] == expected
    finally:
        torch.set_float32_matmul_precision(before)


def precision(directory: Path, *overrides: str, device: str = "cpu") -> dict[str, Any]:
    config = run_config(*overrides)
    run = make_run(directory / "run", config)
    here = RunDir(run)
    ranks = replace(make_ranks(torch.device("cpu"), {}), device=torch.device(device))
    policy: Any = SimpleNamespace(ranks=ranks, gather_weights=lambda: iter([("weight", torch.ones(2, 3))]))
    Recorder(begin_attempt(here), config).environment(config, policy, [], None)
    return (here.environment() or {})["precision"]
