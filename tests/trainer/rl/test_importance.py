"""Importance weights on three tokens by hand, against plain loops, and with garbage under the mask."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from abrun.trainer.rl.losses import importance_weights

CORRECTIONS: list[Any] = ["truncated", "icepop", "sequence_mask"]


def weights(
    ratios: list[list[float]], mask: list[list[bool]], correction: Any, low: float, high: float
) -> list[Any]:
    """Where the engine gave every token the probability 1/10, and the trainer `ratios` times that."""
    engine = torch.full((len(ratios), len(ratios[0])), 0.1, dtype=torch.float64).log()
    trainer = engine + torch.tensor(ratios, dtype=torch.float64).log()
    return importance_weights(
        trainer, engine, torch.tensor(mask), correction=correction, low=low, high=high
    ).tolist()


def test_three_tokens_by_hand() -> None:
    ratios, mask = [[0.25, 1.5, 4.0]], [[True] * 3]
    assert weights(ratios, mask, "truncated", 0.5, 2.0)[0] == pytest.approx([0.5, 1.5, 2.0])
    assert weights(ratios, mask, "truncated", 0.0, 2.0)[0] == pytest.approx([0.25, 1.5, 2.0])
    assert weights(ratios, mask, "icepop", 0.5, 2.0)[0] == pytest.approx([0.0, 1.5, 0.0])
    # The geometric mean is 1.5 ** (1/3) = 1.1447: all of the sequence, untruncated, or nothing.
    assert weights(ratios, mask, "sequence_mask", 0.9, 1.15)[0] == pytest.approx([0.25, 1.5, 4.0])
    assert weights(ratios, mask, "sequence_mask", 0.9, 1.14)[0] == [0.0, 0.0, 0.0]
    assert weights(ratios, mask, "sequence_mask", 1.15, 9.0)[0] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_agrees_with_plain_loops(correction: Any) -> None:
    draw = torch.Generator().manual_seed(2)
    old = torch.randn(20, 5, generator=draw, dtype=torch.float64)
    inference = old + 0.4 * torch.randn(20, 5, generator=draw, dtype=torch.float64)
    mask = torch.rand(20, 5, generator=draw) > 0.3
    found = importance_weights(old, inference, mask, correction=correction, low=0.8, high=1.2)
    for index in range(20):
        logs = [(old[index, t] - inference[index, t]).item() for t in range(5) if mask[index, t]]
        mean = math.exp(sum(logs) / len(logs)) if logs else 1.0
        expected = []
        for ratio in map(math.exp, logs):
            if correction == "truncated":
                expected.append(min(max(ratio, 0.8), 1.2))
            elif correction == "icepop":
                expected.append(ratio if 0.8 <= ratio <= 1.2 else 0.0)
            else:
                expected.append(ratio if 0.8 <= mean <= 1.2 else 0.0)
        assert found[index][mask[index]].tolist() == pytest.approx(expected, rel=1e-12)
    dropped = (found[mask] == 0).double().mean().item()
    assert dropped == 0 if correction == "truncated" else 0.1 < dropped < 0.9


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_masked_garbage_does_not_leak(correction: Any, garbage: float) -> None:
    mask = torch.tensor([[False, True, True]])

    def of(fill: float) -> Tensor:
        old = torch.tensor([[fill, -1.0, -2.0]])
        inference = torch.tensor([[fill, -1.1, -1.8]])
        return importance_weights(old, inference, mask, correction=correction, low=0.5, high=2.0)

    assert torch.equal(of(garbage), of(0.0)) and of(garbage).isfinite().all()
