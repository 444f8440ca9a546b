"""The policy losses on three tokens by hand, against plain loops and each other, by finite differences.

What they have in common with the clipped loss alone (reductions, KL) is in test_losses.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from abrun.trainer.rl.losses import (
    PolicyLoss,
    cispo_loss,
    clipped_policy_loss,
    gradient_factor,
    gspo_loss,
    loss_weights,
    reinforce_loss,
    weighted_losses,
)

GARBAGE = [math.nan, math.inf, -math.inf]
CLIP = {"clip_low": 0.2, "clip_high": 0.3}
# name -> (trainer log-probs, old log-probs, advantages, mask) -> the loss
LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], PolicyLoss]] = {
    "clipped": lambda *tensors: clipped_policy_loss(*tensors, **CLIP),
    "dual": lambda *tensors: clipped_policy_loss(*tensors, **CLIP, dual_clip=1.6),
    "gspo": lambda *tensors: gspo_loss(*tensors, clip_low=0.1, clip_high=0.1),
    "gspo dual": lambda *tensors: gspo_loss(*tensors, clip_low=0.1, clip_high=0.05, dual_clip=1.15),
    "reinforce": reinforce_loss,
    "cispo": lambda *tensors: cispo_loss(*tensors, **CLIP),
}
TOKEN_BY_TOKEN = [name for name in LOSSES if "gspo" not in name]


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def close(actual: Tensor, *expected: float) -> None:
    torch.testing.assert_close(actual, row(*expected), rtol=1e-12, atol=1e-14)


EVERY = torch.ones(1, 3, dtype=torch.bool)
OLD = row(0.2, 0.5, 0.4).log()  # probabilities of three tokens at the start of the step
NOW = row(0.3, 0.4, 0.4).log()  # and now: ratios 1.5, 0.8, 1


# --- by hand ---


def test_reinforce_by_hand() -> None:
    trainer = NOW.clone().requires_grad_()
    found = reinforce_loss(trainer, OLD, row(2.0, -1.0, 0.0), EVERY)
    close(found.loss, -2 * math.log(0.3), math.log(0.4), 0.0)
    close(torch.autograd.grad(found.loss.sum(), trainer)[0], -2.0, 1.0, 0.0)
    close(found.ratio, 1.5, 0.8, 1.0)
    close(found.clipped_ratio, 1.5, 0.8, 1.0)
    assert not found.clipped.any() and not found.ratio.requires_grad


def test_cispo_by_hand() -> None:
    trainer = NOW.clone().requires_grad_()
    found = cispo_loss(trainer, OLD, row(2.0, -1.0, 3.0), EVERY, clip_low=0.1, clip_high=0.3)
    # Weights 1.3 (of 1.5), 0.9 (of 0.8) and 1: clamped tokens keep a gradient.
    close(found.loss, -2 * 1.3 * math.log(0.3), 0.9 * math.log(0.4), -3 * math.log(0.4))
    close(torch.autograd.grad(found.loss.sum(), trainer)[0], -2.6, 0.9, -3.0)
    close(found.clipped_ratio, 1.3, 0.9, 1.0)
    assert found.clipped.tolist() == [[True, True, False]]


def test_gspo_by_hand() -> None:
    # log-ratios 0.3, 0 and -0.06: their mean is 0.08, whatever order they stand in.
    old = row(-1.0, -2.0, -3.0)
    trainer = row(-0.7, -2.0, -3.06).requires_grad_()
    ratio = math.exp(0.08)
    free = gspo_loss(trainer, old, row(3.0, 3.0, -6.0), EVERY, clip_low=0.1, clip_high=0.1)
    close(free.loss, -3 * ratio, -3 * ratio, 6 * ratio)
    close(free.ratio, ratio, ratio, ratio)
    # d rho / d c_t = rho / 3 for every token; the losses' slopes in rho add up to -3 - 3 + 6 = 0.
    torch.testing.assert_close(
        torch.autograd.grad(free.loss.sum(), trainer)[0], row(0.0, 0.0, 0.0), rtol=0, atol=1e-12
    )
    again = gspo_loss(trainer, old, row(3.0, 3.0, 3.0), EVERY, clip_low=0.1, clip_high=0.1)
    close(torch.autograd.grad(again.loss.sum(), trainer)[0], -3 * ratio, -3 * ratio, -3 * ratio)
    # Beyond its bound the whole sequence is clipped, where its advantage is positive.
    clipped = gspo_loss(trainer, old, row(3.0, 3.0, -6.0), EVERY, clip_low=0.1, clip_high=0.05)
    close(clipped.loss, -3.15, -3.15, 6 * ratio)
    assert clipped.clipped.tolist() == [[True, True, False]]


def test_gspo_needs_whole_sequences() -> None:
    with pytest.raises(AssertionError, match="whole sequences"):
        one = torch.zeros(5)
        gspo_loss(one, one, one, one == 0, clip_low=0.1, clip_high=0.1)


def test_dual_clip_by_hand() -> None:
    # Ratios 5, 2.9 and 0.5 under a bound of 3.
    trainer = row(5.0, 2.9, 0.5).log().requires_grad_()
    old = torch.zeros_like(trainer)
    bad = clipped_policy_loss(trainer, old, row(-2.0, -2.0, -2.0), EVERY, **CLIP, dual_clip=3.0)
    close(bad.loss, 6.0, 5.8, 1.6)  # of 10, 5.8 and, by the lower bound 0.8, 1.6
    close(torch.autograd.grad(bad.loss.sum(), trainer)[0], 0.0, 5.8, 0.0)
    assert bad.clipped.tolist() == [[True, False, True]]
    good = clipped_policy_loss(trainer, old, row(2.0, 2.0, 0.0), EVERY, **CLIP, dual_clip=3.0)
    close(good.loss, -2.6, -2.6, 0.0)  # inactive where A is not negative


# --- against plain loops ---


def loop_loss(name: str, trainer: list[float], old: list[float], advantages: list[float]) -> list[float]:
    """The losses of one sequence's completion tokens, in Python's own numbers."""
    low, high, most = {
        "clipped": (0.8, 1.3, math.inf),
        "dual": (0.8, 1.3, 1.6),
        "gspo": (0.9, 1.1, math.inf),
        "gspo dual": (0.9, 1.05, 1.15),
        "cispo": (0.8, 1.3, math.inf),
        "reinforce": (0.0, 0.0, 0.0),
    }[name]
    mean = sum(c - p for c, p in zip(trainer, old, strict=True)) / max(len(trainer), 1)
    losses = []
    for c, p, advantage in zip(trainer, old, advantages, strict=True):
        ratio = math.exp(mean if "gspo" in name else c - p)
        if name == "reinforce":
            losses.append(-advantage * c)
        elif name == "cispo":
            losses.append(-advantage * min(max(ratio, low), high) * c)
        elif advantage >= 0:
            losses.append(-advantage * min(ratio, high))
        else:
            losses.append(-advantage * min(max(ratio, low), most))
    return losses


def random_batch(num_sequences: int = 6, length: int = 7) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(17)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    old = -0.5 - normal(num_sequences, length).abs()
    drift = 0.3 * normal(num_sequences, length) + 0.2 * normal(num_sequences, 1)
    return {
        "trainer": old + drift,
        "old": old,
        "advantages": normal(num_sequences, 1).expand(num_sequences, length).clone(),
        "mask": torch.rand(num_sequences, length, generator=generator) > 0.3,
    }


def loss_of(name: str, batch: dict[str, Tensor], trainer: Tensor | None = None) -> PolicyLoss:
    trainer = batch["trainer"] if trainer is None else trainer
    return LOSSES[name](trainer, batch["old"], batch["advantages"], batch["mask"])


@pytest.mark.parametrize("name", LOSSES)
def test_agrees_with_plain_loops(name: str) -> None:
    batch = random_batch(30)
    found = loss_of(name, batch)
    for index, mask in enumerate(batch["mask"]):
        tensors = (batch[key][index][mask].tolist() for key in ("trainer", "old", "advantages"))
        assert found.loss[index][mask].tolist() == pytest.approx(loop_loss(name, *tensors), rel=1e-12)
    assert (found.loss[~batch["mask"]] == 0).all() and (found.ratio[~batch["mask"]] == 1).all()
    counted = found.clipped[batch["mask"]]
    assert name == "reinforce" or (counted.any() and not counted.all())


# --- gradients ---


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "cispo"])
def test_gradients_by_finite_differences(name: str) -> None:
    batch = random_batch(4, 4)
    trainer = batch["trainer"].requires_grad_()
    assert torch.autograd.gradcheck(lambda values: loss_of(name, batch, values).loss, trainer)


def test_cispo_has_the_gradient_of_a_reinforce_with_fixed_weights() -> None:
    """Not that of its own value, whose finite differences see the weight move."""
    batch = random_batch()
    trainer = batch["trainer"].requires_grad_()
    cispo = loss_of("cispo", batch)
    (gradient,) = torch.autograd.grad(cispo.loss.sum(), trainer)
    ratio = (batch["trainer"] - batch["old"]).exp().clamp(0.8, 1.3).detach()
    expected = torch.where(batch["mask"], -batch["advantages"] * ratio, 0.0)
    torch.testing.assert_close(gradient, expected, rtol=1e-13, atol=0)
    assert torch.autograd.gradcheck(
        lambda values: reinforce_loss(values, batch["old"], batch["advantages"] * ratio, batch["mask"]).loss,
        trainer,
    )


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_ratio_that_overflows_leaves_no_nan_in_the_gradient(name: str, dtype: torch.dtype) -> None:
    trainer = torch.tensor([[-1.0, -1.0]], dtype=dtype, requires_grad=True)
    old = torch.tensor([[-201.0, -201.0]], dtype=dtype)
    for advantages in ([[1.0, 1.0]], [[-1.0, -1.0]], [[0.0, 0.0]]):
        mask = torch.ones(1, 2, dtype=torch.bool)
        found = LOSSES[name](trainer, old, torch.tensor(advantages, dtype=dtype), mask)
        assert torch.autograd.grad(found.loss.sum(), trainer)[0].isfinite().all()


# --- identities ---


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_at_ratio_one_every_loss_has_the_policy_gradient(name: str, reduction: Any) -> None:
    """On policy: -A / (what the token counts). GSPO's tokens share it with their sequence: A is the same."""
    batch = random_batch()
    mask = batch["mask"]
    trainer = batch["trainer"].requires_grad_()
    weights = loss_weights(
        mask,
        loss_reduction=reduction,
        num_tokens=float(mask.sum()),
        num_sequences=6,
        max_completion_tokens=9,
    )
    found = LOSSES[name](trainer, trainer.detach(), batch["advantages"], mask)
    (gradient,) = torch.autograd.grad(weighted_losses(found.loss, weights).sum(), trainer)
    torch.testing.assert_close(gradient, -batch["advantages"] * weights, rtol=1e-12, atol=1e-15)
    assert (found.ratio == 1).all() and not found.clipped.any()


@pytest.mark.parametrize(("divisor", "value"), [(5.0, 5.0), ("documents", 6.0), ("documents_squared", 36.0)])
def test_a_gradient_divisor_stands_in_the_place_of_the_reductions_own(divisor: Any, value: Any) -> None:
    mask = random_batch()["mask"]
    num_tokens = float(mask.sum())
    token_sum, mean_sum = mask.double(), mask.double() / mask.sum(1, keepdim=True).clamp(min=1)
    cases: dict[Any, tuple[Any, float]] = {  # the sum that is divided, and its own divisor
        "token_mean": (token_sum, num_tokens),
        "sequence_mean": (mean_sum, 6.0),
        "document_sum": (token_sum, 6.0),
        "sequence_sum_constant": (token_sum, 6.0 * 9),
    }
    for reduction, (summed, own) in cases.items():
        counts: Any = {"num_tokens": num_tokens, "num_sequences": 6.0, "max_completion_tokens": 9}
        weights = loss_weights(mask, loss_reduction=reduction, **counts)
        factor = gradient_factor(divisor, loss_reduction=reduction, **counts)
        torch.testing.assert_close(weights, summed / own, rtol=1e-14, atol=0)
        torch.testing.assert_close(weights * factor, summed / value, rtol=1e-14, atol=0)


# --- masks and slices ---


@pytest.mark.parametrize("name", LOSSES)
def test_masked_garbage_does_not_leak(name: str) -> None:
    clean = random_batch()
    trainer = clean["trainer"].requires_grad_()
    loss = loss_of(name, clean, trainer).loss
    (gradient,) = torch.autograd.grad(loss.sum(), trainer)
    assert (gradient[~clean["mask"]] == 0).all()
    names = ("trainer", "old", "advantages")
    for garbage, filled in itertools.product(GARBAGE, [*({one} for one in names), set(names)]):
        dirty = {
            key: values.detach().masked_fill(~clean["mask"], garbage) if key in filled else values
            for key, values in clean.items()
        }
        trainer = dirty["trainer"].detach().requires_grad_()
        found = loss_of(name, dirty, trainer)
        assert torch.equal(found.loss, loss)
        assert torch.equal(torch.autograd.grad(found.loss.sum(), trainer)[0], gradient)
        for reported in (found.ratio, found.clipped_ratio, found.log_ratio):
            assert reported.isfinite().all()


@pytest.mark.parametrize("name", TOKEN_BY_TOKEN)
@pytest.mark.parametrize("cuts", [[1, 2, 3], [7, 20], [13]])
def test_any_slices_of_the_tokens_have_the_losses_of_the_whole(name: str, cuts: list[int]) -> None:
    """Bit by bit: a kernel may ask for the tokens in whichever pieces its memory allows."""
    batch = random_batch()
    whole = loss_of(name, batch).loss.flatten()
    flat = {key: values.flatten() for key, values in batch.items()}
    slices = [
        loss_of(name, {key: values[start:stop] for key, values in flat.items()}).loss
        for start, stop in itertools.pairwise([0, *cuts, 42])
    ]
    assert torch.equal(torch.cat(slices), whole)
