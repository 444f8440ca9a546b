"""linear_policy_loss: the loss, and the gradients that it computes in its forward pass."""

import pytest
import torch
from torch import Tensor

from abrun.trainer.kernels import linear_logprobs, linear_policy_loss
from abrun.trainer.rl.losses import clipped_policy_loss, kl_penalty
from tests.snapshot import Snapshot
from tests.trainer.kernels.test_linear_logprobs import (
    IGNORE,
    IMPLS,
    TILED,
    make_problem,
)


@pytest.mark.parametrize("impl", IMPLS)
def test_is_the_loss_of_the_two_pass_route(impl: str) -> None:
    """GRPO's clipped loss with a KL penalty and an entropy bonus, by the same functions, slice by slice."""
    problem = make_problem(60, 151)
    old, reference, advantages = torch.randn(3, 60, generator=torch.Generator().manual_seed(1))
    old, reference = old - 5, reference - 5
    mask = problem.target != IGNORE

    def token_loss(logprobs: Tensor, entropies: Tensor | None, tokens: slice) -> Tensor:
        assert entropies is not None
        seen = mask[tokens]
        policy = clipped_policy_loss(
            logprobs, old[tokens], advantages[tokens], seen, clip_low=0.2, clip_high=0.28
        )
        penalty = kl_penalty(logprobs, reference[tokens], seen, estimator="k3")
        return policy.loss + 0.1 * penalty - 0.01 * entropies

    def leaves() -> list[Tensor]:
        return [values.clone().requires_grad_() for values in (problem.hidden, problem.weight)]

    two_pass = leaves()
    hidden, weight = two_pass
    logprobs, entropies = linear_logprobs(hidden, weight, problem.target, impl="logits", entropy=True)
    whole = token_loss(logprobs, entropies, slice(None)).sum()
    (3 * whole).backward()
    one_pass = leaves()
    hidden, weight = one_pass
    loss, *results = linear_policy_loss(
        hidden, weight, problem.target, token_loss, impl=impl, entropy=True, memory_budget_bytes=30 * 2**10
    )
    (3 * loss).backward()
    torch.testing.assert_close(loss, whole)
    for one, two in zip(results, (logprobs, entropies), strict=True):
        assert one is not None and two is not None and not one.requires_grad
        torch.testing.assert_close(one, two.detach())
    for one, two in zip(one_pass, two_pass, strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_without_gradients(impl: str) -> None:
    problem = make_problem(7, 151)
    hidden = problem.hidden.clone().requires_grad_()
    with torch.no_grad():
        loss, logprobs, _ = linear_policy_loss(
            hidden, problem.weight, problem.target, lambda lp, _, t: -lp, impl=impl
        )
    assert not loss.requires_grad
    torch.testing.assert_close(loss, -logprobs.sum())
    loss, _, _ = linear_policy_loss(
        hidden, problem.weight, problem.target, lambda lp, _, t: lp.detach(), impl=impl
    )
    if impl != "logits":  # plain autograd has no graph there
        (d_hidden,) = torch.autograd.grad(loss, hidden)
        assert (d_hidden == 0).all()


@pytest.mark.parametrize("impl", TILED)
def test_gradients_are_handed_out_once(impl: str, snapshot: Snapshot) -> None:
    problem = make_problem(7, 151)
    hidden = problem.hidden.clone().requires_grad_()
    loss, _, _ = linear_policy_loss(hidden, problem.weight, problem.target, lambda lp, _, t: -lp, impl=impl)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError) as refusal:
        loss.backward()
    snapshot(refusal.value)


@pytest.mark.parametrize("impl", TILED)
def test_refuses_a_loss_that_is_not_per_token(impl: str, snapshot: Snapshot) -> None:
    problem = make_problem(7, 151)
    hidden = problem.hidden.clone().requires_grad_()
    with pytest.raises(ValueError) as refusal:
        linear_policy_loss(hidden, problem.weight, problem.target, lambda lp, _, t: -lp.mean(), impl=impl)
    snapshot(refusal.value)
