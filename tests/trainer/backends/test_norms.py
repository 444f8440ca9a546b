"""The global gradient norm on the CPU, against a sum of squares in float64."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from abrun.trainer.backends.dtensor import fsdp
from abrun.trainer.backends.megatron.cpu import emulate_cuda

SHAPES = ((1_500_000,), (700, 3000), (), (0, 7), (64, 128))


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def norm_of(tensors: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float((tensor.double() ** 2).sum()) for tensor in tensors))


@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_norm_and_clipped_gradients_are_those_of_float64(max_norm: float) -> None:
    expected = norm_of(gradients())
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    for parameter, gradient in zip(parameters, gradients(), strict=True):
        parameter.grad = gradient
    assert float(fsdp.clip_gradients(parameters, max_norm)) == pytest.approx(expected, rel=1e-12)
    clipped = norm_of([parameter.grad for parameter in parameters if parameter.grad is not None])
    assert clipped == pytest.approx(min(expected, max_norm), rel=1e-6)


def test_megatrons_norm_on_the_cpu_is_that_of_float64(group: None) -> None:
    optimizer: Any = pytest.importorskip("megatron.core.optimizer.optimizer")
    with emulate_cuda(torch.device("cpu")):
        for grads in (gradients(), []):
            assert optimizer.get_grad_norm_fp32(grads) == pytest.approx(norm_of(grads), rel=1e-12)
