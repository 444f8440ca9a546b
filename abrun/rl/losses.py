"""Losses as pure functions on per-token tensors.

Letters: B sequences, S positions; entry t belongs to token t. `trainer_logprobs` are the current policy's
(with gradient), `old_logprobs` the policy's at the start of the step, `reference_logprobs` the frozen
reference's. What a masked position holds (even NaN) reaches neither a loss nor a gradient.
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
    """Per-token loss and what the metrics report about it; all [B, S]."""

    loss: Tensor
    ratio: Tensor  # exp(c - p), no gradient
    clipped_ratio: Tensor  # clamp(ratio, 1 - clip_low, 1 + clip_high), no gradient
    clipped: Tensor  # bool: the clipped branch is active


def clipped_policy_loss(
    trainer_logprobs: Tensor,  # [B, S] c
    old_logprobs: Tensor,  # [B, S] p
    advantages: Tensor,  # [B, S] A
    token_mask: Tensor,  # [B, S] bool
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
    trainer_logprobs: Tensor,  # [B, S] c
    reference_logprobs: Tensor,  # [B, S] r
    token_mask: Tensor,  # [B, S] bool
    *,
    estimator: KlEstimator,
) -> Tensor:
    """Per-token estimate [B, S] of KL(policy || reference); masked tokens give 0.

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


def reduce_loss(
    per_token: Tensor,  # [B, S]
    token_mask: Tensor,  # [B, S] bool
    *,
    loss_reduction: LossReduction,
    num_tokens: float,
    num_sequences: float,
    max_completion_tokens: int,
) -> Tensor:
    """This microbatch's share of the global loss; `num_tokens` and `num_sequences` count the global batch.

    token_mean: sum / num_tokens (DAPO). sequence_mean: mean over sequences of their token means (GRPO,
    arXiv:2402.03300). sequence_sum_constant: sum / (num_sequences * max_completion_tokens) (Dr.GRPO,
    arXiv:2503.20783).
    """
    if loss_reduction == "token_mean":
        return masked_mean(per_token, token_mask, num_tokens)
    if loss_reduction == "sequence_mean":
        lengths = token_mask.sum(dim=1, keepdim=True).clamp(min=1)
        return masked_mean(per_token / lengths, token_mask, num_sequences)
    return masked_mean(per_token, token_mask, num_sequences * max_completion_tokens)
