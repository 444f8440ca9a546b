"""Advantages from rewards."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from abrun.trainer.rl.losses import clamp, masked_mean, weighted_losses
from abrun.trainer.rl.metrics import MetricParts

Baseline = Literal["group_mean", "leave_one_out", "batch_mean", "none"]
NormalizeOver = Literal["group", "batch", "leave_one_out"]
STD_EPSILON = 1e-6


def group_advantages(
    rewards: Tensor,  # [P * G]: the G completions of a prompt are adjacent
    group_size: int,
    *,
    baseline: Baseline,
    normalize: bool,
    normalize_over: NormalizeOver = "group",
    batch_rewards: Tensor | None = None,  # [N] of the global batch; None: `rewards` are all of it
) -> Tensor:
    """Return advantages [P * G]: A = R - b, divided by (std + 1e-6) if `normalize` (sample std, n - 1).

    The baseline b is the mean of the group (GRPO, arXiv:2402.03300; Dr.GRPO, arXiv:2503.20783, without std),
    the mean of the other completions of the group (RLOO, arXiv:2402.14740), the mean of the global batch, or
    0. The std is over the group, the global batch, or the other completions of the group (leave_one_out, as
    NeMo-RL's calculate_baseline_and_std_per_prompt).

    If all rewards of the group (for batch_mean: of the batch) are equal, or all rewards that a std of the
    group or batch is over, A is exactly 0, independent of rounding. With normalize_over leave_one_out, if
    only the rewards of the other completions are equal, A is R - b without division, as in NeMo-RL. The
    arithmetic is float64, which can hold the square of any float32; the result has the dtype of the rewards.
    For per-token rewards (REINFORCE++) see `values.reward_to_go_advantages`.
    """
    grouped = rewards.double().view(-1, group_size)
    batch = rewards.double() if batch_rewards is None else batch_rewards.double()
    mean = grouped.mean(dim=1, keepdim=True)
    if baseline == "group_mean":
        advantages = grouped - mean
    elif baseline == "leave_one_out":
        advantages = (grouped - mean) * (group_size / (group_size - 1))
    elif baseline == "batch_mean":
        advantages = grouped - batch.mean()
    else:
        advantages = grouped.clone()

    # Equal rewards are found by comparison, because their mean may differ from them by rounding.
    is_constant_group = _all_equal(grouped)
    is_constant_batch = _all_equal(batch[None])
    has_no_signal = torch.zeros_like(is_constant_group)
    if normalize and normalize_over == "leave_one_out":
        std = _leave_one_out_std(grouped)
        advantages = torch.where(std > 0, advantages / (std + STD_EPSILON), advantages)
    elif normalize:
        values, is_constant = (
            (grouped, is_constant_group) if normalize_over == "group" else (batch[None], is_constant_batch)
        )
        std = torch.where(is_constant, 0.0, values.std(dim=1, keepdim=True)) if values.shape[1] > 1 else 0.0
        advantages = advantages / (std + STD_EPSILON)
        has_no_signal = has_no_signal | is_constant

    if baseline in ("group_mean", "leave_one_out"):
        has_no_signal = has_no_signal | is_constant_group
    elif baseline == "batch_mean":
        has_no_signal = has_no_signal | is_constant_batch
    return torch.where(has_no_signal, 0.0, advantages).flatten().to(rewards.dtype)


def overlong_penalties(
    lengths: Tensor,  # [B] completion tokens, the end token included
    *,
    max_new_tokens: int,
    buffer: int,
    factor: float,
) -> Tensor:
    """Return penalties [B] to subtract from rewards: factor * max(0, L - (max_new_tokens - buffer)) / buffer.

    This is DAPO's soft overlong punishment (arXiv:2503.14476, equation 13), as in verl's DAPORewardManager
    and NeMo-RL's apply_reward_shaping: 0 up to max_new_tokens - buffer, then linear up to `factor` at
    max_new_tokens. L counts all generated tokens, including those of completions masked by
    overlong_filtering. The result is float64.
    """
    excess = lengths.double() - (max_new_tokens - buffer)
    return factor * excess.clamp(min=0) / buffer


def _leave_one_out_std(rewards: Tensor) -> Tensor:  # [P, G] float64 -> [P, G]
    """Return, for each completion, the sample std of the others in its group; exactly 0 if they are equal."""
    group_size = rewards.shape[1]
    other_rewards = rewards.expand(group_size, *rewards.shape).movedim(0, 1)  # [P, G, G]
    diagonal = torch.eye(group_size, dtype=torch.bool, device=rewards.device)
    other_rewards = other_rewards[:, ~diagonal].view(-1, group_size, group_size - 1)
    return torch.where(
        _all_equal(other_rewards.flatten(0, 1)).view(rewards.shape), 0.0, other_rewards.std(dim=2)
    )


def _all_equal(rewards: Tensor) -> Tensor:  # [P, G] -> [P, 1] bool
    return (rewards == rewards[:, :1]).all(dim=1, keepdim=True)


# Value side of PPO: token rewards, GAE advantages, whitening, value loss and critic metrics.
#
# The advantages of REINFORCE++ are here too: they are GAE advantages with all values 0.
#
# Dimensions: B sequences, S positions; entry t belongs to token t, and its value is the one computed
# before token t (`shift_right`). Rows are whole sequences; packed streams are unpacked first. The token
# mask may have holes inside a completion, such as the output of a tool. Masked tokens are not steps of the
# policy: the step after a completion token is the next completion token. Values at masked positions, NaN
# included, affect no other position.

# Ranks.all_reduce_sum_data: sums each argument over the global batch
AllReduceSum = Callable[..., list[float]]
MIN_VARIANCE = 1e-8


def shift_right(values: Tensor) -> Tensor:  # [B, S] -> [B, S]
    """Return v'[:, t] = v[:, t - 1], with 0 at the first position.

    The output of a value model at position t has seen token t. As the baseline of that token it would cancel
    the effect of the token, so each step uses the value of the previous position, in training and inference.
    """
    return torch.nn.functional.pad(values[:, :-1], (1, 0))


def token_rewards(
    rewards: Tensor,  # [B], one for each sequence
    token_mask: Tensor,  # [B, S] bool
    penalties: Tensor | None = None,  # [B, S], one for each token; None: no penalties
) -> Tensor:
    """Return token rewards [B, S]: minus the penalty, plus the sequence reward at the last completion token.

    Masked tokens give 0.
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
    """Return advantages and returns [B, S] by GAE (arXiv:1506.02438, equation 16); masked tokens give 0.

    Over the completion tokens of a row: delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lambda
    A_{t+1}, returns = A + V. After the last token V and A are 0. This holds for truncated completions too: as
    in other frameworks, they are not bootstrapped.
    """
    rewards, values = (torch.where(token_mask, tensor, 0.0).double() for tensor in (token_rewards, values))
    delta = rewards + gamma * _next_token_values(values, token_mask) - values
    delta = torch.where(token_mask, delta, 0.0)
    # Masked tokens have decay 1, so that they pass on the advantage of the next completion token.
    decay = torch.ones_like(values).masked_fill(token_mask, gamma * gae_lambda)
    advantages = torch.where(token_mask, _reverse_scan(delta, decay), 0.0)
    return advantages.to(token_rewards.dtype), (advantages + values).to(token_rewards.dtype)


def _next_token_values(values: Tensor, token_mask: Tensor) -> Tensor:  # [B, S] -> [B, S]
    """Return the value of the next completion token after each position; 0 if there is none."""
    num_positions = values.shape[1]
    position = torch.arange(num_positions, device=values.device).expand(values.shape)
    completion_position = torch.where(token_mask, position, num_positions)
    next_position = completion_position.flip(1).cummin(dim=1).values.flip(1)
    padded = torch.nn.functional.pad(values, (0, 1))
    return padded.gather(1, torch.nn.functional.pad(next_position[:, 1:], (0, 1), value=num_positions))


def _reverse_scan(terms: Tensor, decay: Tensor) -> Tensor:  # [B, S], [B, S] -> [B, S]
    """Return x_t = terms_t + decay_t x_{t+1} by a parallel scan of log2 S rounds.

    Source: Hillis and Steele 1986, "Data parallel algorithms", for linear recurrences. The order of additions
    in x_t depends only on the terms from t on, not on the position t.
    """
    reach = 1
    while reach < terms.shape[1]:
        later_terms, later_decay = (
            torch.nn.functional.pad(tensor[:, reach:], (0, reach)) for tensor in (terms, decay)
        )
        terms, decay, reach = terms + decay * later_terms, decay * later_decay, 2 * reach
    return terms


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStatistics:
    """Mean and variance over the completion tokens of the global batch; NaN if all were filtered."""

    mean: float
    variance: float  # with n - 1; 0 for a single token

    @property
    def std(self) -> float:
        return math.sqrt(self.variance)


def token_statistics(
    values: Tensor,  # [B, S] of this rank
    token_mask: Tensor,  # [B, S] bool, of this rank
    all_reduce_sum: AllReduceSum,
) -> TokenStatistics:
    """Return mean and variance over all ranks, for any split of the batch. Collective by `all_reduce_sum`.

    Two passes in float64: the squares are of deviations from the mean, because a difference of raw sums would
    lose precision for a large mean. The mean of the deviations corrects the rounding of the first pass: equal
    values then give exactly their value as the mean and exactly 0 as the variance.
    """
    counted = torch.where(token_mask, values, 0.0).double()
    count, value_sum = all_reduce_sum(float(token_mask.sum()), float(counted.sum()))
    if not count:
        return TokenStatistics(mean=math.nan, variance=math.nan)
    approximate_mean = value_sum / count
    deviations = torch.where(token_mask, counted - approximate_mean, 0.0)
    deviation_sum, square_sum = all_reduce_sum(float(deviations.sum()), float(deviations.square().sum()))
    return TokenStatistics(
        mean=approximate_mean + deviation_sum / count,
        variance=max(square_sum - deviation_sum**2 / count, 0.0) / max(count - 1, 1),
    )


def whiten(
    advantages: Tensor,  # [B, S]
    token_mask: Tensor,  # [B, S] bool
    *,
    mean: float,
    std: float | None,  # None: no division
) -> Tensor:
    """Return (A - mean) / (std + 1e-6) [B, S], with statistics of the global batch; masked tokens give 0.

    A std of 0 means that all advantages are equal and carry no signal: the result is then exactly 0.
    """
    centred = advantages.double() - mean
    if std is not None:
        centred = centred / (std + STD_EPSILON) if std > 0 else torch.zeros_like(centred)
    return torch.where(token_mask, centred, 0.0).to(advantages.dtype)


def reward_to_go_advantages(
    rewards: Tensor,  # [B], one for each sequence
    token_mask: Tensor,  # [B, S] bool
    penalties: Tensor,  # [B, S], one for each token
    *,
    baseline: Literal["batch_mean", "none"],
    normalize: bool,
    all_reduce_sum: AllReduceSum,
) -> Tensor:
    """Return A_t = R - sum of penalties from token t on [B, S] (REINFORCE++, arXiv:2501.03262).

    `batch_mean` subtracts the mean and `normalize` divides by (std + 1e-6), both over the completion tokens
    of the global batch, std with n - 1. Masked tokens give 0. Collective by `all_reduce_sum`.
    """
    per_token = token_rewards(rewards, token_mask, penalties)
    to_go, _ = generalized_advantages(
        per_token, torch.zeros_like(per_token), token_mask, gamma=1.0, gae_lambda=1.0
    )
    statistics = token_statistics(to_go, token_mask, all_reduce_sum)
    return whiten(
        to_go,
        token_mask,
        mean=statistics.mean if baseline == "batch_mean" else 0.0,
        std=statistics.std if normalize else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """Per-token value loss, and whether it was clipped; both [...]."""

    loss: Tensor
    clipped: Tensor  # bool: the error of the clipped value is larger, so it is the loss


def value_loss(
    values: Tensor,  # [...] v, with gradient; computed before each token
    old_values: Tensor,  # [...] at the start of the step
    returns: Tensor,  # [...] R
    token_mask: Tensor,  # [...] bool
    *,
    clip_range: float | None,  # None: the plain squared error
) -> ValueLoss:
    """Return l_t = 0.5 max((v - R)^2, (clamp(v, v_old - clip_range, v_old + clip_range) - R)^2).

    Value clipping is in the public PPO code, not in its paper (arXiv:2005.12729, section 3). Shapes [...] are
    [B, S], or [n] for any n tokens. Masked tokens give 0.
    """
    values, old_values, returns = (
        torch.where(token_mask, tensor, 0.0) for tensor in (values, old_values, returns)
    )
    error = (values - returns).square()
    if clip_range is None:
        return ValueLoss(loss=0.5 * error, clipped=torch.zeros_like(token_mask))
    bounded = clamp(values, old_values - clip_range, old_values + clip_range)
    bounded_error = (bounded - returns).square()
    return ValueLoss(loss=0.5 * torch.maximum(error, bounded_error), clipped=bounded_error > error)


def value_loss_metrics(
    losses: ValueLoss,  # [B, S]
    token_mask: Tensor,  # [B, S] bool
    loss_weights: Tensor,  # [B, S] float64: weight of each token in the loss of its update
    *,
    num_tokens: float,
    num_updates: int,
) -> MetricParts:
    """Return the contribution of a microbatch to `train/critic/{loss,clip_fraction}`.

    The loss follows the loss_reduction of the recipe and is averaged over updates, as `train/loss`.
    clip_fraction is a mean over the tokens in the global batches of all updates.
    """
    sums = {
        "train/critic/loss": weighted_losses(losses.loss.detach(), loss_weights).sum() / num_updates,
        "train/critic/clip_fraction": masked_mean(losses.clipped.double(), token_mask, num_tokens),
    }
    return MetricParts(sums=sums, maxima={}, minima={})


def value_statistics(
    old_values: Tensor,  # [B, S], the values behind the advantages
    returns: Tensor,  # [B, S]
    token_mask: Tensor,  # [B, S] bool
    all_reduce_sum: AllReduceSum,
) -> dict[str, float]:
    """Return `train/critic/{values_mean,returns_mean,explained_var}` of the step. Collective.

    explained_var = 1 - Var(returns - values) / max(Var(returns), 1e-8): 1 for a perfect critic, 0 for a
    constant one.
    """
    values_statistics = token_statistics(old_values, token_mask, all_reduce_sum)
    returns_statistics = token_statistics(returns, token_mask, all_reduce_sum)
    error_statistics = token_statistics(returns.double() - old_values.double(), token_mask, all_reduce_sum)
    return {
        "train/critic/values_mean": values_statistics.mean,
        "train/critic/returns_mean": returns_statistics.mean,
        "train/critic/explained_var": 1
        - error_statistics.variance / max(returns_statistics.variance, MIN_VARIANCE),
    }
