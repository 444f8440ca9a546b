"""Losses as pure functions on per-token tensors.

Letters: B sequences, S positions; entry t belongs to token t. `trainer_logprobs` are the current policy's
(with gradient), `old_logprobs` the policy's at the start of the step, `reference_logprobs` the frozen
reference's. What a masked position holds (even NaN) reaches neither a loss nor a gradient. Where a shape is
[...], it is [B, S] or [n], any n of those tokens: the loss of a token depends on that token alone. Only
`gspo_loss` needs whole sequences.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

LossReduction = Literal["token_mean", "sequence_mean", "sequence_sum_constant", "document_sum"]
GradDivisor = float | Literal["documents", "documents_squared"]
KlEstimator = Literal["k1", "k2", "k3", "k3+"]
MAX_LOG_RATIO = 80  # exp(89) is infinite in float32, and infinity times the 0 of a bound is NaN
MAX_KL_LOG_RATIO, MAX_KL = 20, 10


def clamp(values: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    """Limit values to [low, high], with gradient 1 at the bounds themselves and 0 beyond them.

    torch.clamp's gradient at a bound is 1 before torch 2.14 and 0 from there on; a ratio of 1 is at one
    where the clip range is 0.
    """
    within = (values >= low) & (values <= high)
    limited = values.detach().clamp(low, high)  # pyright: ignore[reportCallIssue, reportArgumentType]
    return torch.where(within, values, limited)


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
class TokenLosses:
    """What an objective computes of tokens [...]; a subclass adds what the objective's metrics report."""

    shares: Tensor  # [...] of the global loss that is minimised, 0 where masked


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Per-token loss and what the metrics report about it, without gradient; all [...]."""

    loss: Tensor
    log_ratio: Tensor  # log rho: c - p of the token, or of its sequence's mean (GSPO)
    ratio: Tensor  # rho
    clipped_ratio: Tensor  # rho within the clip bounds; rho itself where the loss has none
    clipped: Tensor  # bool: the loss stands at a bound, and has no gradient through rho
    ratio_of_sequence: bool = False  # rho is that of the token's whole sequence (GSPO)


def clipped_policy_loss(
    trainer_logprobs: Tensor,  # [...] c
    old_logprobs: Tensor,  # [...] p
    advantages: Tensor,  # [...] A
    token_mask: Tensor,  # [...] bool
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate (arXiv:1707.06347, equation 7) with separate bounds (DAPO, arXiv:2503.14476).

    l_t = max(-A rho, -A clamp(rho, 1 - clip_low, 1 + clip_high)), rho = exp(c - p). With `dual_clip`
    (arXiv:1912.09729) no token of A < 0 costs more than -A dual_clip. Masked tokens give 0.
    """
    log_ratio = torch.where(token_mask, trainer_logprobs - old_logprobs, 0.0)
    advantages = torch.where(token_mask, advantages, 0.0)
    return _clipped(log_ratio, advantages, clip_low, clip_high, dual_clip)


def gspo_loss(
    trainer_logprobs: Tensor,  # [B, S] c
    old_logprobs: Tensor,  # [B, S] p
    advantages: Tensor,  # [B, S] A
    token_mask: Tensor,  # [B, S] bool
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """The clipped surrogate of a sequence's own ratio, at each of its tokens (GSPO, arXiv:2507.18071).

    rho_i = exp(mean over the completion tokens of sequence i of c - p), with gradient through the mean. So
    each row is a whole sequence. The paper's objective is this under `sequence_mean`. Masked tokens give 0.
    """
    assert trainer_logprobs.dim() == 2, f"whole sequences [B, S] are needed, got {trainer_logprobs.shape}"
    log_ratio = torch.where(token_mask, trainer_logprobs - old_logprobs, 0.0)
    lengths = token_mask.sum(dim=1, keepdim=True).clamp(min=1)
    log_ratio = torch.where(token_mask, log_ratio.sum(dim=1, keepdim=True) / lengths, 0.0)
    advantages = torch.where(token_mask, advantages, 0.0)
    loss = _clipped(log_ratio, advantages, clip_low, clip_high, dual_clip)
    return replace(loss, ratio_of_sequence=True)


def reinforce_loss(
    trainer_logprobs: Tensor,  # [...] c
    old_logprobs: Tensor,  # [...] p, for the reported ratio alone
    advantages: Tensor,  # [...] A
    token_mask: Tensor,  # [...] bool
) -> PolicyLoss:
    """l_t = -A c (Williams 1992; RLOO, arXiv:2402.14740, by its advantages). Masked tokens give 0.

    Nothing corrects for a policy that has moved since the rollouts.
    """
    trainer_logprobs = torch.where(token_mask, trainer_logprobs, 0.0)
    log_ratio = torch.where(token_mask, trainer_logprobs - old_logprobs, 0.0).detach()
    ratio = log_ratio.exp()
    return PolicyLoss(
        loss=-torch.where(token_mask, advantages, 0.0) * trainer_logprobs,
        log_ratio=log_ratio,
        ratio=ratio,
        clipped_ratio=ratio,
        clipped=torch.zeros_like(ratio, dtype=torch.bool),
    )


def cispo_loss(
    trainer_logprobs: Tensor,  # [...] c
    old_logprobs: Tensor,  # [...] p
    advantages: Tensor,  # [...] A
    token_mask: Tensor,  # [...] bool
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """l_t = -A stop_gradient(clamp(rho, 1 - clip_low, 1 + clip_high)) c (CISPO, arXiv:2506.13585).

    The bound limits a token's weight and never takes its gradient away; clip_low 1 leaves only the upper one.
    Masked tokens give 0.
    """
    unweighted = reinforce_loss(trainer_logprobs, old_logprobs, advantages, token_mask)
    clipped_ratio = unweighted.ratio.clamp(1 - clip_low, 1 + clip_high)
    return PolicyLoss(
        loss=unweighted.loss * clipped_ratio,
        log_ratio=unweighted.log_ratio,
        ratio=unweighted.ratio,
        clipped_ratio=clipped_ratio,
        clipped=clipped_ratio != unweighted.ratio,
    )


def _clipped(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> PolicyLoss:
    """The clipped surrogate of any ratio; masked tokens come with log-ratio and advantage 0."""
    ratio = clamp(log_ratio, -math.inf, MAX_LOG_RATIO).exp()
    clipped_ratio = clamp(ratio, 1 - clip_low, 1 + clip_high)
    free, bounded = -advantages * ratio, -advantages * clipped_ratio
    loss, clipped = torch.maximum(free, bounded), bounded > free
    if dual_clip is not None:
        most = torch.where(advantages < 0, -advantages * dual_clip, math.inf)
        loss, clipped = torch.minimum(loss, most), clipped | (loss > most)
    return PolicyLoss(
        loss=loss,
        log_ratio=log_ratio.detach(),
        ratio=ratio.detach(),
        clipped_ratio=clipped_ratio.detach(),
        clipped=clipped.detach(),
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
    divergence", 2020); the result is clamped to +-10. k3+ has k3's value and k2's gradient (straight-through,
    as verl's kl_penalty, core_algos.py).

    As a loss on tokens of the policy, the expected gradient of k2 and k3+ is that of KL(policy || reference),
    of k3 that of KL(reference || policy), and of k1 zero.
    """
    log_ratio = torch.where(token_mask, reference_logprobs - trainer_logprobs, 0.0)
    log_ratio = clamp(log_ratio, -MAX_KL_LOG_RATIO, MAX_KL_LOG_RATIO)
    if estimator == "k1":
        penalty = -log_ratio
    elif estimator == "k3":
        penalty = k3(log_ratio)
    else:
        penalty = log_ratio.square() / 2
    penalty = clamp(penalty, -MAX_KL, MAX_KL)
    if estimator == "k3+":
        penalty = k3(log_ratio).detach().clamp(-MAX_KL, MAX_KL) + (penalty - penalty.detach())
    return penalty


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
    arXiv:2503.20783). document_sum: 1 / num_sequences, the sum over tokens over the number of documents, of
    which a row holds one (Fast-LLM's normalize_by_documents). float64, so that a sum over a global batch
    keeps its digits.
    """
    counted = token_mask.double()
    if loss_reduction == "sequence_mean":
        counted = counted / token_mask.sum(dim=1, keepdim=True).clamp(min=1)
    return counted / _divisor(loss_reduction, num_tokens, num_sequences, max_completion_tokens)


def gradient_factor(
    grad_divisor: GradDivisor | None,
    *,
    loss_reduction: LossReduction,
    num_tokens: float,
    num_sequences: float,
    max_completion_tokens: int,
) -> float:
    """What the global loss is multiplied by for its gradient, so that `grad_divisor` divides it instead.

    A reduction is a sum over its divisor: over tokens, by num_tokens (token_mean), num_sequences
    (document_sum) or num_sequences * max_completion_tokens (sequence_sum_constant); over sequences' means, by
    num_sequences (sequence_mean). The gradient is that of the sum over `grad_divisor`: a number, or the count
    of documents of the global batch that one optimizer step sees, or the square of that (DeepSpeed averages
    a second time: loss over M, gradient over M^2). None: the loss's own, 1.
    """
    if grad_divisor is None:
        return 1.0
    rules = {"documents": num_sequences, "documents_squared": num_sequences**2}
    divisor = rules[grad_divisor] if isinstance(grad_divisor, str) else grad_divisor
    return _divisor(loss_reduction, num_tokens, num_sequences, max_completion_tokens) / divisor


def _divisor(
    loss_reduction: LossReduction, num_tokens: float, num_sequences: float, max_completion_tokens: int
) -> float:
    if loss_reduction == "token_mean":
        return num_tokens
    if loss_reduction == "sequence_sum_constant":
        return num_sequences * max_completion_tokens
    return num_sequences


def weighted(losses: Tensor, weights: Tensor) -> Tensor:  # [...], [...] -> [...] float64
    """Each token's share of the global loss: known from that token alone, in whichever shape tokens come."""
    return torch.where(weights > 0, losses, 0.0) * weights
