"""The benchmark of log-probs: other projects' kernels get and return what ours do, or are missing by name."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bench import bench_logprobs
from tests.bench.bench_logprobs import Bench, Shape

LIGER_HOPPER = "liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90"
CPU = Bench(device=torch.device("cpu"), rounds=1, only=[], settings={})


class DenseFunction:
    """Stand-in for Liger's LigerFusedScaledCrossEntropySM90Function, with its arguments and dtypes."""

    @staticmethod
    def apply(
        _input: Tensor,  # [N, H]
        weight: Tensor,  # [V, H]
        target: Tensor,  # [N]
        temperature: float = 1.0,
        ignore_index: int = -100,
        m_tiles_per_cluster: int = 1,
        return_entropy: bool = False,
    ) -> tuple[Tensor, Tensor]:  # [N] float32, [N] bfloat16
        assert _input.dtype == weight.dtype == torch.bfloat16 and target.dtype == torch.int64
        assert (m_tiles_per_cluster, return_entropy) == (1, True)
        logits = (_input.float() @ weight.float().T) / temperature
        losses = torch.nn.functional.cross_entropy(
            logits, target, reduction="none", ignore_index=ignore_index
        )
        logprobs = logits.log_softmax(1)
        return losses, -(logprobs.exp() * logprobs).sum(1).bfloat16()


def load_on(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LIGER_SCALED_CE_SM90_VALIDATE_TARGETS", "1")  # so that the change is undone
    monkeypatch.delenv("LIGER_SCALED_CE_SM90_VALIDATE_TARGETS")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    return bench_logprobs.load_liger_hopper()


def test_ligers_hopper_kernels_are_measured_on_the_same_log_probs_entropies_and_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = LIGER_HOPPER.split(".")
    for end in range(1, len(parts) + 1):
        module: Any = ModuleType(".".join(parts[:end]))
        module.LigerFusedScaledCrossEntropySM90Function = DenseFunction
        monkeypatch.setitem(sys.modules, module.__name__, module)
    candidate = load_on((9, 0), monkeypatch)
    problem, weight = bench_logprobs.draw_problem(CPU, Shape(48, 32, 320), torch.bfloat16)
    row = bench_logprobs.prepare(CPU, candidate, problem, bench_logprobs.solve(problem, weight))
    assert row.step.failure is None and row.forward is not None and row.forward.failure is None
    assert row.errors["logprob"] < 1e-5
    # The entropy is rounded to bfloat16: its values, between 4 and 8, are 2 ** -5 apart
    assert 1e-3 < row.errors["entropy"] <= 2**-6
    assert row.errors["d_hidden"] < 5e-3 and row.errors["d_weight"] < 5e-3


def test_kernels_that_are_missing_are_a_line_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ImportError, match=r"needs a Hopper GPU, compute capability 9.0; got 8.0$"):
        load_on((8, 0), monkeypatch)
    bench_logprobs.load_peers(CPU)
    lines = capsys.readouterr().out.splitlines()
    assert "not measured: liger_hopper: needs a GPU" in lines


def test_the_table_of_a_cpu_has_a_row_for_each_implementation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--device", "cpu", "--shapes", "48,32,320", "--rounds", "1", "--only", "chunked,gather"]
    monkeypatch.setattr(sys, "argv", [Path(bench_logprobs.__file__).name, *arguments])
    bench_logprobs.main()
    out = capsys.readouterr().out
    names = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("| ")]
    assert names[2:] == ["chunked", "one-pass chunked", "log_softmax and gather (no entropy)"]
