"""Losses as pure functions on per-token tensors.

Letters: B sequences, S positions; entry t belongs to token t. `trainer_logprobs` are the current policy's
(with gradient), `old_logprobs` the policy's at the start of the step, `reference_logprobs` the frozen
reference's. What a masked position holds (even NaN) reaches neither a loss nor a gradient. A token's loss
depends on that token alone: where a shape is [...], it is [B, S] or [n], any n of those tokens.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LossReduction = Literal["token_mean", "sequence_mean", "sequence_sum_constant"]
KlEstimator = Literal["k1", "k2", "k3"]


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:  # [B, S], [B, S] bool -> []
    """Sum over the counted tokens."""
    return torch.where(mask, values, 0.0).sum()


def masked_mean(values: Tensor, mask: Tensor, denominator: float | Tensor) -> Tensor:
    """This microbatch's share of a mean over the global batch.

    `denominator` is the count over all microbatches of all ranks, so the shares add up to the global mean
    however the batch is cut. A mean over the microbatch itself would weight short microbatches' tokens more.
    """
    return masked_sum(values, mask) / denominator


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Per-token loss and what the metrics report about it; all [...]."""

    loss: Tensor
    ratio: Tensor  # exp(c - p), no gradient
    clipped_ratio: Tensor  # clamp(ratio, 1 - clip_low, 1 + clip_high), no gradient
    clipped: Tensor  # bool: the clipped branch is active


def clipped_policy_loss(
    trainer_logprobs: Tensor,  # [...] c
    old_logprobs: Tensor,  # [...] p
    advantages: Tensor,  # [...] A
    token_mask: Tensor,  # [...] bool
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """PPO's clipped surrogate (arXiv:1707.06347, equation 7) with separate bounds (DAPO, arXiv:2503.14476).

    l_t = max(-A rho, -A clamp(rho, 1 - clip_low, 1 + clip_high)), rho = exp(c - p). Masked tokens give 0.
    """
    log_ratio = torch.where(token_mask, trainer_logprobs - old_logprobs, 0.0)
    advantages = torch.where(token_mask, advantages, 0.0)
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    free, bounded = -advantages * ratio, -advantages * clipped_ratio
    return PolicyLoss(
        loss=torch.maximum(free, bounded),
        ratio=ratio.detach(),
        clipped_ratio=clipped_ratio.detach(),
        clipped=(bounded > free).detach(),
    )


def kl_penalty(
    trainer_logprobs: Tensor,  # [...] c
    reference_logprobs: Tensor,  # [...] r
    token_mask: Tensor,  # [...] bool
    *,
    estimator: KlEstimator,
) -> Tensor:
    """Per-token estimate [...] of KL(policy || reference); masked tokens give 0.

    With x = r - c clamped to +-20: k1 = -x, k2 = x^2 / 2, k3 = exp(x) - 1 - x (Schulman, "Approximating KL
    divergence", 2020); the result is clamped to +-10.
    """
    log_ratio = torch.where(token_mask, reference_logprobs - trainer_logprobs, 0.0).clamp(-20, 20)
    if estimator == "k1":
        penalty = -log_ratio
    elif estimator == "k2":
        penalty = log_ratio.square() / 2
    else:
        penalty = k3(log_ratio)
    return penalty.clamp(-10, 10)


def k3(x: Tensor) -> Tensor:
    """exp(x) - 1 - x, at least 0."""
    return torch.expm1(x) - x


def loss_weights(
    token_mask: Tensor,  # [B, S] bool
    *,
    loss_reduction: LossReduction,
    num_tokens: float,
    num_sequences: float,
    max_completion_tokens: int,
) -> Tensor:
    """What each token counts [B, S] in the global loss, the sum of `weighted` losses; masked tokens count 0.

    `num_tokens` and `num_sequences` count the global batch. token_mean: 1 / num_tokens (DAPO). sequence_mean:
    1 / (its sequence's tokens * num_sequences), the mean over sequences of their token means (GRPO,
    arXiv:2402.03300). sequence_sum_constant: 1 / (num_sequences * max_completion_tokens) (Dr.GRPO,
    arXiv:2503.20783). float64, so that a sum over a global batch keeps its digits.
    """
    counted = token_mask.double()
    if loss_reduction == "token_mean":
        return counted / num_tokens
    if loss_reduction == "sequence_mean":
        return counted / token_mask.sum(dim=1, keepdim=True).clamp(min=1) / num_sequences
    return counted / (num_sequences * max_completion_tokens)


def weighted(losses: Tensor, weights: Tensor) -> Tensor:  # [...], [...] -> [...] float64
    """Each token's share of the global loss: known from that token alone, in whichever shape tokens come."""
    return torch.where(weights > 0, losses, 0.0) * weights
