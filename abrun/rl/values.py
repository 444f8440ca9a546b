"""PPO's value side: rewards of tokens, advantages by GAE, whitening, the value loss, the critic's metrics.

REINFORCE++'s advantages are those without values, and stand here too.

Letters: B sequences, S positions; entry t belongs to token t, and the value that belongs to token t is the
one computed before it (`right_shifted`). Rows are whole sequences: what was packed into one stream is
unpacked before. The token mask may have holes inside a completion, as where a tool's output stands in it.
Such tokens are no steps of the policy: the step after a completion token is the next completion token, and
what a masked position holds, NaN included, reaches no other.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from abrun.rl.advantages import STD_EPSILON
from abrun.rl.losses import clamp, masked_mean, weighted
from abrun.rl.metrics import MetricParts

# Sums each of its floats over the global batch: Ranks.all_reduce_sum_data
AllReduceSum = Callable[..., list[float]]
LEAST_VARIANCE = 1e-8


def right_shifted(values: Tensor) -> Tensor:  # [B, S] -> [B, S]
    """v'[:, t] = v[:, t - 1], and 0 at the first position, which no token is before.

    A value model's output at position t has seen token t. As a baseline of that token it would take away what
    the token is worth, so the values of a step are those of the position before, in training as in inference.
    """
    return torch.nn.functional.pad(values[:, :-1], (1, 0))


def token_rewards(
    rewards: Tensor,  # [B], of whole sequences
    token_mask: Tensor,  # [B, S] bool
    penalties: Tensor | None = None,  # [B, S], of single tokens; None: there are none
) -> Tensor:
    """Rewards [B, S]: minus its penalty at each completion token, and the sequence's reward at its last one.

    Masked tokens give 0, so a row without completion tokens gets nothing.
    """
    is_last = token_mask & (token_mask.flip(1).cumsum(dim=1).flip(1) == 1)
    per_token = torch.where(is_last, rewards[:, None], 0.0)
    return per_token if penalties is None else per_token - torch.where(token_mask, penalties, 0.0)


def generalized_advantages(
    token_rewards: Tensor,  # [B, S] r
    values: Tensor,  # [B, S] V, computed before each token
    token_mask: Tensor,  # [B, S] bool
    *,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, S] by GAE (arXiv:1506.02438, equation 16); masked tokens give 0.

    Over the completion tokens of a row: delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lambda
    A_{t+1}, returns = A + V. After the last one V and A are 0: also after a completion that was truncated,
    whose reward is thus taken for all that it would ever get, as the other systems do.
    """
    rewards, values = (torch.where(token_mask, each, 0.0).double() for each in (token_rewards, values))
    delta = rewards + gamma * _of_next_token(values, token_mask) - values
    delta = torch.where(token_mask, delta, 0.0)
    decay = torch.ones_like(values).masked_fill(token_mask, gamma * gae_lambda)  # holes hand on what is after
    advantages = torch.where(token_mask, _summed_from_the_end(delta, decay), 0.0)
    return advantages.to(token_rewards.dtype), (advantages + values).to(token_rewards.dtype)


def _of_next_token(values: Tensor, token_mask: Tensor) -> Tensor:  # [B, S] -> [B, S]
    """The value of the next completion token after each position, 0 where there is none."""
    num_positions = values.shape[1]
    position = torch.arange(num_positions, device=values.device).expand(values.shape)
    own = torch.where(token_mask, position, num_positions)
    first_from = own.flip(1).cummin(dim=1).values.flip(1)
    padded = torch.nn.functional.pad(values, (0, 1))
    return padded.gather(1, torch.nn.functional.pad(first_from[:, 1:], (0, 1), value=num_positions))


def _summed_from_the_end(terms: Tensor, decay: Tensor) -> Tensor:  # [B, S], [B, S] -> [B, S]
    """x_t = terms_t + decay_t x_{t+1}: each round doubles the reach, so log2 S rounds and not S steps.

    (Hillis and Steele 1986, "Data parallel algorithms", for linear recurrences.) What x_t is made of depends
    on the terms from t on alone, not on where t stands.
    """
    reach = 1
    while reach < terms.shape[1]:
        later_terms, later_decay = (
            torch.nn.functional.pad(each[:, reach:], (0, reach)) for each in (terms, decay)
        )
        terms, decay, reach = terms + decay * later_terms, decay * later_decay, 2 * reach
    return terms


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStatistics:
    """Of the completion tokens of the global batch; NaN where it has none, as after filtering."""

    mean: float
    variance: float  # with n - 1; 0 of a single token

    @property
    def std(self) -> float:
        return math.sqrt(self.variance)


def token_statistics(
    values: Tensor,  # [B, S] of this rank
    token_mask: Tensor,  # [B, S] bool, of this rank
    all_reduce_sum: AllReduceSum,
) -> TokenStatistics:
    """Mean and variance over all ranks, however they share the batch. Collective, through `all_reduce_sum`.

    In float64, and the squares are of deviations from the mean, since a difference of raw sums would lose
    its digits where the mean is large. The deviations' own mean is what the first pass was off by its
    rounding: with it, equal values have themselves as mean and variance 0, to the bit.
    """
    counted = torch.where(token_mask, values, 0.0).double()
    count, value_sum = all_reduce_sum(float(token_mask.sum()), float(counted.sum()))
    if not count:
        return TokenStatistics(mean=math.nan, variance=math.nan)
    nearly = value_sum / count
    deviations = torch.where(token_mask, counted - nearly, 0.0)
    off, squares = all_reduce_sum(float(deviations.sum()), float(deviations.square().sum()))
    return TokenStatistics(
        mean=nearly + off / count, variance=max(squares - off**2 / count, 0.0) / max(count - 1, 1)
    )


def whitened(
    advantages: Tensor,  # [B, S]
    token_mask: Tensor,  # [B, S] bool
    *,
    mean: float,
    std: float | None,  # None: not divided by one
) -> Tensor:
    """(A - mean) / (std + 1e-6) [B, S], by statistics of the global batch; masked tokens give 0.

    Where std is 0 all tokens had the same advantage, which says nothing: they get exactly 0.
    """
    centred = advantages.double() - mean
    if std is not None:
        centred = centred / (std + STD_EPSILON) if std > 0 else torch.zeros_like(centred)
    return torch.where(token_mask, centred, 0.0).to(advantages.dtype)


def reward_to_go_advantages(
    rewards: Tensor,  # [B], of whole sequences
    token_mask: Tensor,  # [B, S] bool
    penalties: Tensor,  # [B, S], of single tokens
    *,
    baseline: Literal["batch_mean", "none"],
    normalize: bool,
    all_reduce_sum: AllReduceSum,
) -> Tensor:
    """A_t = R - the penalties of token t and all after it [B, S] (REINFORCE++, arXiv:2501.03262).

    Less their mean with `batch_mean`, and over (std + 1e-6) where `normalize`: both over the completion
    tokens of the global batch, std with n - 1. Masked tokens give 0. Collective, through `all_reduce_sum`.
    """
    of_tokens = token_rewards(rewards, token_mask, penalties)
    to_go, _ = generalized_advantages(
        of_tokens, torch.zeros_like(of_tokens), token_mask, gamma=1.0, gae_lambda=1.0
    )
    over_batch = token_statistics(to_go, token_mask, all_reduce_sum)
    return whitened(
        to_go,
        token_mask,
        mean=over_batch.mean if baseline == "batch_mean" else 0.0,
        std=over_batch.std if normalize else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """Per-token loss and what the metrics report about it; both [...]."""

    loss: Tensor
    clipped: Tensor  # bool: the clipped value's error is the larger, so that it is the loss


def value_loss(
    values: Tensor,  # [...] v, with gradient; computed before each token, as the others
    old_values: Tensor,  # [...] at the start of the step
    returns: Tensor,  # [...] R
    token_mask: Tensor,  # [...] bool
    *,
    clip_range: float | None,  # None: the plain squared error
) -> ValueLoss:
    """l_t = 0.5 max((v - R)^2, (clamp(v, v_old - clip_range, v_old + clip_range) - R)^2).

    The value clipping of PPO's public code, which its paper has not (arXiv:2005.12729, section 3). Shapes
    [...] are [B, S] or [n], any n of those tokens. Masked tokens give 0.
    """
    values, old_values, returns = (
        torch.where(token_mask, each, 0.0) for each in (values, old_values, returns)
    )
    error = (values - returns).square()
    if clip_range is None:
        return ValueLoss(loss=0.5 * error, clipped=torch.zeros_like(token_mask))
    bounded = clamp(values, old_values - clip_range, old_values + clip_range)
    bounded_error = (bounded - returns).square()
    return ValueLoss(loss=0.5 * torch.maximum(error, bounded_error), clipped=bounded_error > error)


def value_loss_metrics(
    found: ValueLoss,  # [B, S]
    token_mask: Tensor,  # [B, S] bool
    loss_weights: Tensor,  # [B, S] float64, of the token in the loss of its update
    *,
    num_tokens: float,
    num_updates: int,
) -> MetricParts:
    """A microbatch's share of `train/critic/{loss,clip_fraction}`.

    The loss is the one that is minimised, under the recipe's loss_reduction: the mean of the updates' own
    losses, as `train/loss`. clip_fraction is a mean over the tokens of all updates' global batches.
    """
    sums = {
        "train/critic/loss": weighted(found.loss.detach(), loss_weights).sum() / num_updates,
        "train/critic/clip_fraction": masked_mean(found.clipped.double(), token_mask, num_tokens),
    }
    return MetricParts(sums=sums, maxima={}, minima={})


def value_statistics(
    old_values: Tensor,  # [B, S], those that the advantages were taken of
    returns: Tensor,  # [B, S]
    token_mask: Tensor,  # [B, S] bool
    all_reduce_sum: AllReduceSum,
) -> dict[str, float]:
    """Return `train/critic/{values_mean,returns_mean,explained_var}` of the step. Collective.

    explained_var = 1 - Var(returns - values) / max(Var(returns), 1e-8): 1 of a perfect critic, 0 of one that
    is the same everywhere.
    """
    of_values = token_statistics(old_values, token_mask, all_reduce_sum)
    of_returns = token_statistics(returns, token_mask, all_reduce_sum)
    of_errors = token_statistics(returns.double() - old_values.double(), token_mask, all_reduce_sum)
    return {
        "train/critic/values_mean": of_values.mean,
        "train/critic/returns_mean": of_returns.mean,
        "train/critic/explained_var": 1 - of_errors.variance / max(of_returns.variance, LEAST_VARIANCE),
    }
