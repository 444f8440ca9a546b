"""The clipped loss, KL penalties and reductions by hand, with their gradients and with garbage masked."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from abrun.trainer.rl.losses import (
    PolicyLoss,
    clamp,
    clipped_policy_loss,
    kl_penalty,
    weighted_losses,
)

ALL = torch.ones(1, 3, dtype=torch.bool)
GARBAGE = [math.nan, math.inf, -math.inf]


def logs(*ratios: float) -> Tensor:  # [1, S] log-probs whose ratio to old log-probs of 0 is as given
    return torch.tensor([ratios], dtype=torch.float64).log()


def policy_loss(ratios: Tensor, advantages: list[float]) -> PolicyLoss:
    return clipped_policy_loss(
        ratios,
        torch.zeros_like(ratios),
        torch.tensor([advantages], dtype=torch.float64),
        torch.ones_like(ratios, dtype=torch.bool),
        clip_low=0.2,
        clip_high=0.3,
    )


def test_clipped_policy_loss_by_hand() -> None:
    better = policy_loss(logs(1.5, 1.1, 0.5), [2.0, 2.0, 2.0])
    torch.testing.assert_close(better.loss, torch.tensor([[-2.6, -2.2, -1.0]], dtype=torch.float64))
    assert better.clipped.tolist() == [[True, False, False]]  # a low ratio of a good token is not clipped
    worse = policy_loss(logs(1.5, 0.9, 0.5), [-2.0, -2.0, -2.0])
    torch.testing.assert_close(worse.loss, torch.tensor([[3.0, 1.8, 1.6]], dtype=torch.float64))
    assert worse.clipped.tolist() == [[False, False, True]]
    torch.testing.assert_close(worse.ratio, torch.tensor([[1.5, 0.9, 0.5]], dtype=torch.float64))
    torch.testing.assert_close(worse.clipped_ratio, torch.tensor([[1.3, 0.9, 0.8]], dtype=torch.float64))


def test_the_gradient_of_a_clamp_is_one_up_to_its_bounds() -> None:
    values = torch.tensor([0.4, 0.5, 1.0, 1.5, 1.6], requires_grad=True)
    limited = clamp(values, 0.5, 1.5)
    (gradient,) = torch.autograd.grad(limited.sum(), values)
    assert limited.tolist() == [0.5, 0.5, 1.0, 1.5, 1.5] and gradient.tolist() == [0, 1, 1, 1, 0]


def test_kl_penalty_by_hand() -> None:
    # The reference gives the tokens 2, 1 and 1/2 times the policy's probability.
    trainer, reference = torch.full((1, 3), -1.0), torch.tensor([[2.0, 1.0, 0.5]]).log() - 1.0
    log2 = math.log(2)
    mask = ALL
    cases: dict[Any, list[float]] = {
        "k1": [-log2, 0.0, log2],
        "k2": [log2**2 / 2, 0.0, log2**2 / 2],
        "k3": [2 - 1 - log2, 0.0, 0.5 - 1 + log2],
        "k3+": [2 - 1 - log2, 0.0, 0.5 - 1 + log2],
    }
    for estimator, penalties in cases.items():
        torch.testing.assert_close(
            kl_penalty(trainer, reference, mask, estimator=estimator), torch.tensor([penalties])
        )


def test_kl_penalty_is_clamped() -> None:
    trainer = torch.tensor([[-1.0, -40.0, -1.0, -1.0]], requires_grad=True)
    reference = torch.tensor([[-40.0, -1.0, -13.0, -4.0]])  # log-ratios -39, 39, -12, -3
    mask = torch.ones_like(reference, dtype=torch.bool)
    k3_of_three = math.exp(-3) - 1 + 3
    cases: list[tuple[Any, list[float], list[float]]] = [
        ("k1", [10.0, -10.0, 10.0, 3.0], [0.0, 0.0, 0.0, 1.0]),
        ("k2", [10.0, 10.0, 10.0, 4.5], [0.0, 0.0, 0.0, 3.0]),
        ("k3", [10.0, 10.0, 10.0, k3_of_three], [0.0, 0.0, 0.0, 1 - math.exp(-3)]),
        ("k3+", [10.0, 10.0, 10.0, k3_of_three], [0.0, 0.0, 0.0, 3.0]),
    ]
    for estimator, penalties, slopes in cases:
        penalty = kl_penalty(trainer, reference, mask, estimator=estimator)
        torch.testing.assert_close(penalty.detach(), torch.tensor([penalties]))
        torch.testing.assert_close(torch.autograd.grad(penalty.sum(), trainer)[0], torch.tensor([slopes]))


def exact_gradient(divergence: Any, logits: Tensor) -> Tensor:
    return torch.autograd.grad(divergence, logits, retain_graph=True)[0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3+"])
def test_which_divergence_an_estimator_descends(estimator: Any) -> None:
    """The expectation over a whole vocabulary of seven tokens, that of the policy's own draws."""
    draw = torch.Generator().manual_seed(7)
    logits = torch.randn(7, dtype=torch.float64, generator=draw, requires_grad=True)
    c, r = (
        logits.log_softmax(0),
        torch.randn(7, dtype=torch.float64, generator=draw).log_softmax(0),
    )
    mask = torch.ones(7, dtype=torch.bool)
    penalty = (c.detach().exp() * kl_penalty(c, r, mask, estimator=estimator)).sum()
    expected = {
        "k1": torch.zeros(7, dtype=torch.float64),
        "k2": exact_gradient((c.exp() * (c - r)).sum(), logits),
        "k3": exact_gradient((r.exp() * (r - c)).sum(), logits),
        "k3+": exact_gradient((c.exp() * (c - r)).sum(), logits),
    }
    torch.testing.assert_close(exact_gradient(penalty, logits), expected[estimator], rtol=1e-12, atol=1e-15)
    assert (expected["k2"] - expected["k3"]).norm() > 0.05


def test_kl_penalty_of_an_overflowing_ratio_has_a_gradient() -> None:
    """exp(200) is infinite in float32, and infinity times the 0 that a clamp passes back is NaN."""
    trainer = torch.tensor([[-201.0]], requires_grad=True)
    penalty = kl_penalty(trainer, torch.tensor([[-1.0]]), ALL[:, :1], estimator="k3")
    assert penalty.item() == 10.0
    assert torch.autograd.grad(penalty, trainer)[0].item() == 0.0


def test_k3_keeps_small_differences() -> None:
    difference = 1e-3
    trainer, reference = torch.tensor([[-1.0]]), torch.tensor([[-1.0 + difference]])
    exact = float(reference - trainer)
    exact = math.expm1(exact) - exact
    assert kl_penalty(trainer, reference, ALL[:, :1], estimator="k3").item() == pytest.approx(exact, rel=1e-3)


def test_a_token_without_weight_has_no_loss_and_no_gradient() -> None:
    for garbage in GARBAGE:
        losses = torch.tensor([2.0, garbage], requires_grad=True)
        shares = weighted_losses(losses, torch.tensor([0.25, 0.0], dtype=torch.float64))
        assert shares.tolist() == [0.5, 0.0]
        assert torch.autograd.grad(shares.sum(), losses)[0].tolist() == [0.25, 0.0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3+"])
def test_masked_garbage_reaches_no_kl_penalty(estimator: Any) -> None:
    mask = torch.tensor([[True, False, True]])
    found = []
    for garbage in (0.0, *GARBAGE):
        trainer = torch.tensor([[-1.0, garbage, -2.0]], requires_grad=True)
        penalty = kl_penalty(trainer, torch.tensor([[-1.5, garbage, -1.0]]), mask, estimator=estimator)
        (gradient,) = torch.autograd.grad(penalty.sum(), trainer)
        assert penalty[0, 1] == gradient[0, 1] == 0
        found.append((penalty.tolist(), gradient.tolist()))
    assert all(each == found[0] for each in found)
