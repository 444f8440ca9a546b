"""PPO's value side against the formulas of TRL's PPO, on the same tensors, in float64.

TRL 1.12.0 is the last with a PPO trainer (trl/experimental/ppo/ppo_trainer.py); test_against_trl's 1.16 has
none. Its formulas stood inside `train()`, so that nothing could be called: they are written down here, from
reading them, as sums and not as the loop they were. So this needs no trl.

| what | TRL | abrun | agreement |
|---|---|---|---|
| alignment | values at context_length - 1 : -1 | right_shifted | exact |
| KL and score | -kl_coef kl, the score at the end | token_rewards | exact, for completions to the end (1) |
| GAE, returns | gamma, lam | generalized_advantages | 1e-12, for completions to the end (1) |
| whitening | masked_whiten | whitened, token_statistics | 1e-6 / std, relative, on one rank (2) (3) |
| value loss | cliprange_value | value_loss | 1e-12 with its gradient, on one microbatch (1) (4) |
| clip fraction | val/clipfrac | train/critic/clip_fraction | exact, on one microbatch (1) (4) |

Why definitions differ:
1. Where a completion ends before the longest of its batch, TRL has one step more: the score and a value stand
   one position after its last token, in GAE and in the value loss, and not in the policy loss. abrun's
   completions end with their last token, as verl's. With that position in the token mask they agree.
2. TRL divides by sqrt(variance + 1e-8), abrun by std + 1e-6 as all its advantages (definitions.md).
3. TRL whitens each rank's batch by itself; abrun over the global batch, so that ranks change nothing.
4. TRL divides by the microbatch's own tokens, so its loss changes with the cut; abrun's does not.
"""

import pytest
import torch
from torch import Tensor

from abrun.rl.values import (
    generalized_advantages,
    right_shifted,
    token_rewards,
    token_statistics,
    value_loss,
    value_loss_metrics,
    whitened,
)

PROMPT, LENGTH = 2, 6  # positions of the prompt, and of the longest completion
LENGTHS = torch.tensor([6, 6, 3, 1, 5])
POSITIONS = torch.arange(LENGTH)
KL_COEFFICIENT, CLIP = 0.05, 0.3


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SCORES = normal(5, seed=1)
TOKENS = LENGTHS[:, None] > POSITIONS  # abrun's token mask, and TRL's of the policy loss
TRL_MASK = LENGTHS[:, None] >= POSITIONS  # of its value side: one position more, where there is one
KL = normal(5, LENGTH, seed=2) * TOKENS
OUTPUTS = normal(5, PROMPT + LENGTH, seed=3)  # of the value model, at each position


def trl_rewards_and_values() -> tuple[Tensor, Tensor]:
    rewards = -KL_COEFFICIENT * KL
    rewards[torch.arange(5), LENGTHS.clamp(max=LENGTH - 1)] += SCORES
    return rewards, OUTPUTS[:, PROMPT - 1 : -1] * TRL_MASK


def trl_advantages(gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    rewards, values = trl_rewards_and_values()
    following = torch.cat([values[:, 1:], torch.zeros(5, 1, dtype=torch.float64)], dim=1)
    deltas = rewards + gamma * following - values
    ahead = POSITIONS[None] - POSITIONS[:, None]
    powers = torch.where(ahead >= 0, (gamma * lam) ** ahead.clamp(min=0).double(), 0.0)
    advantages = deltas @ powers.T
    return advantages, advantages + values


def trl_whitened(advantages: Tensor, mask: Tensor) -> Tensor:
    counted = advantages[mask]
    return torch.where(mask, (advantages - counted.mean()) / (counted.var() + 1e-8).sqrt(), 0.0)


def trl_value_loss(values: Tensor, old_values: Tensor, returns: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and clip fraction of the counted values of a microbatch."""
    clipped = torch.minimum(torch.maximum(values, old_values - CLIP), old_values + CLIP)
    errors = torch.stack([(values - returns) ** 2, (clipped - returns) ** 2])
    return 0.5 * errors.amax(dim=0).mean(), (errors[1] > errors[0]).double().mean()


def of_completion(mask: Tensor) -> Tensor:  # [5, LENGTH] -> [5, PROMPT + LENGTH]
    return torch.nn.functional.pad(mask, (PROMPT, 0))


def abrun_advantages(mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Of the completion's positions, where `mask` says which of them are steps."""
    whole = of_completion(mask)
    rewards = token_rewards(SCORES, whole, KL_COEFFICIENT * of_completion(KL))
    found = generalized_advantages(rewards, right_shifted(OUTPUTS), whole, gamma=gamma, gae_lambda=lam)
    return found[0][:, PROMPT:], found[1][:, PROMPT:]


def test_rewards_and_values_stand_where_they_do_there() -> None:
    rewards, values = trl_rewards_and_values()
    whole = of_completion(TRL_MASK)
    ours = token_rewards(SCORES, whole, KL_COEFFICIENT * of_completion(KL))
    assert torch.equal(ours[:, PROMPT:], rewards)
    assert torch.equal((right_shifted(OUTPUTS) * whole)[:, PROMPT:], values)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.7), (1.0, 1.0), (0.99, 0.0)])
def test_advantages_and_returns(gamma: float, lam: float) -> None:
    expected = trl_advantages(gamma, lam)
    for mask, rows in ((TRL_MASK, slice(None)), (TOKENS, LENGTHS == LENGTH)):
        for ours, theirs in zip(abrun_advantages(mask, gamma, lam), expected, strict=True):
            torch.testing.assert_close(
                ours[rows], torch.where(mask, theirs, 0.0)[rows], rtol=1e-12, atol=1e-14
            )
    shorter = ((abrun_advantages(TOKENS, gamma, lam)[0] - expected[0]) * TOKENS)[LENGTHS < LENGTH]
    if gamma == lam == 1:  # the sum of all that follows, wherever it stands
        torch.testing.assert_close(shorter, torch.zeros_like(shorter), rtol=0, atol=1e-14)
    else:
        assert shorter.abs().amax(dim=1).min() > 1e-3


def test_whitening_up_to_the_epsilon() -> None:
    advantages, _ = trl_advantages(1.0, 0.95)
    found = token_statistics(advantages, TOKENS, lambda *values: list(values))
    ours = whitened(advantages, TOKENS, mean=found.mean, std=found.std)
    assert 0.1 < found.std < 10
    theirs = trl_whitened(advantages, TOKENS)
    torch.testing.assert_close(ours, theirs, rtol=1.1e-6 / found.std, atol=0)
    assert not torch.allclose(ours, theirs, rtol=1e-7, atol=0)


def test_value_loss_gradient_and_clip_fraction() -> None:
    _, returns = trl_advantages(1.0, 0.95)
    old_values = right_shifted(OUTPUTS)[:, PROMPT:]
    values = (old_values + 0.4 * normal(5, LENGTH, seed=4)).requires_grad_()
    theirs, clip_fraction = trl_value_loss(values[TRL_MASK], old_values[TRL_MASK], returns[TRL_MASK])
    found = value_loss(values, old_values, returns, TRL_MASK, clip_range=CLIP)
    num_tokens = float(TRL_MASK.sum())
    weights = TRL_MASK.double() / num_tokens
    sums = value_loss_metrics(found, TRL_MASK, weights, num_tokens=num_tokens, num_updates=1).sums
    assert sums["train/critic/loss"].item() == pytest.approx(theirs.item(), rel=1e-12)
    assert sums["train/critic/clip_fraction"].item() == pytest.approx(clip_fraction.item(), rel=1e-15)
    assert 0.1 < clip_fraction < 0.9
    (ours,) = torch.autograd.grad(found.loss.sum() / TRL_MASK.sum(), values)
    torch.testing.assert_close(ours, torch.autograd.grad(theirs, values)[0], rtol=1e-12, atol=1e-15)
