"""Losses as pure functions on per-token tensors.

Dimensions: B sequences, S positions; entry t belongs to token t. `trainer_logprobs` come from the current
policy, with gradient, `old_logprobs` from the policy at the start of the step, `reference_logprobs` from the
frozen reference. Formulas call the first two c and p, the advantages A, and rho = exp(c - p). Values at
masked positions, even NaN, affect neither loss nor gradient. The shape [...] stands for [B, S], or [n] for
any n tokens, because the loss of a token depends on that token alone. Only `gspo_loss` needs whole sequences.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

LossReduction = Literal["token_mean", "sequence_mean", "sequence_sum_constant", "document_sum"]
GradDivisor = float | Literal["documents", "documents_squared"]
KlEstimator = Literal["k1", "k2", "k3", "k3+"]
MAX_LOG_RATIO = 80  # exp(89) is infinite in float32, and infinity times a zero gradient at a bound is NaN
MAX_KL_LOG_RATIO, MAX_KL = 20, 10


def clamp(values: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    """Limit values to [low, high], with gradient 1 at the bounds and 0 beyond them.

    The gradient of torch.clamp at a bound is 1 before torch 2.14 and 0 since. This matters for a ratio of
    exactly 1 with a clip range of 0.
    """
    within = (values >= low) & (values <= high)
    limited = values.detach().clamp(low, high)  # pyright: ignore[reportCallIssue, reportArgumentType]
    return torch.where(within, values, limited)


def masked_mean(values: Tensor, mask: Tensor, denominator: float | Tensor) -> Tensor:
    """Return the contribution of this microbatch to a mean over the global batch.

    `denominator` is the count over all microbatches of all ranks, so the contributions add up to the global
    mean for any split of the batch. A mean per microbatch would give tokens of short microbatches more
    weight.
    """
    return torch.where(mask, values, 0.0).sum() / denominator


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """Per-token losses [...] of an objective; a subclass adds the values for its metrics."""

    shares: Tensor  # [...]: contribution of each token to the global loss; 0 if masked


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Per-token loss and, without gradient, the values for its metrics; all [...]."""

    loss: Tensor
    log_ratio: Tensor  # log rho: c - p of the token, or its mean over the sequence (GSPO)
    ratio: Tensor  # rho
    clipped_ratio: Tensor  # rho clamped to the clip bounds; rho itself for a loss without bounds
    clipped: Tensor  # bool: the loss is at a bound and has no gradient through rho
    ratio_of_sequence: bool = False  # all tokens of a sequence share one rho (GSPO)


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
    """Return PPO's clipped surrogate (arXiv:1707.06347, eq. 7) with separate bounds (DAPO, arXiv:2503.14476).

    l_t = max(-A rho, -A clamp(rho, 1 - clip_low, 1 + clip_high)), rho = exp(c - p). `dual_clip`
    (arXiv:1912.09729) limits the loss of tokens with A < 0 to -A dual_clip. Masked tokens give 0.
    """
    log_ratio = torch.where(token_mask, trainer_logprobs - old_logprobs, 0.0)
    advantages = torch.where(token_mask, advantages, 0.0)
    return _clipped_surrogate(log_ratio, advantages, clip_low, clip_high, dual_clip)


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
    """Return the clipped surrogate of the sequence-level ratio at each token (GSPO, arXiv:2507.18071).

    rho_i = exp(mean over the completion tokens of sequence i of c - p), with gradient through the mean. Each
    row must be a whole sequence. With `sequence_mean` this is the objective of the paper. Masked tokens
    give 0.
    """
    assert trainer_logprobs.dim() == 2, f"whole sequences [B, S] are needed, got {trainer_logprobs.shape}"
    log_ratio = torch.where(token_mask, trainer_logprobs - old_logprobs, 0.0)
    lengths = token_mask.sum(dim=1, keepdim=True).clamp(min=1)
    log_ratio = torch.where(token_mask, log_ratio.sum(dim=1, keepdim=True) / lengths, 0.0)
    advantages = torch.where(token_mask, advantages, 0.0)
    loss = _clipped_surrogate(log_ratio, advantages, clip_low, clip_high, dual_clip)
    return replace(loss, ratio_of_sequence=True)


def reinforce_loss(
    trainer_logprobs: Tensor,  # [...] c
    old_logprobs: Tensor,  # [...] p, only for the reported ratio
    advantages: Tensor,  # [...] A
    token_mask: Tensor,  # [...] bool
) -> PolicyLoss:
    """Return l_t = -A c (Williams 1992; with RLOO advantages, arXiv:2402.14740). Masked tokens give 0.

    It has no correction for a policy that has changed since the rollouts.
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
    """Return l_t = -A stop_gradient(clamp(rho, 1 - clip_low, 1 + clip_high)) c (CISPO, arXiv:2506.13585).

    The bounds limit the weight of a token but never remove its gradient. clip_low: 1 disables the lower
    bound. Masked tokens give 0.
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


def _clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> PolicyLoss:
    """Return the clipped surrogate of a log-ratio [...]; masked tokens need log-ratio and advantage 0."""
    ratio = clamp(log_ratio, -math.inf, MAX_LOG_RATIO).exp()
    clipped_ratio = clamp(ratio, 1 - clip_low, 1 + clip_high)

    # The larger loss: a bound takes away the gradient of a ratio that has gone far enough, and no other.
    unbounded, bounded = -advantages * ratio, -advantages * clipped_ratio
    loss, clipped = torch.maximum(unbounded, bounded), bounded > unbounded
    if dual_clip is not None:  # for A < 0 the loss would grow with rho without end
        max_loss = torch.where(advantages < 0, -advantages * dual_clip, math.inf)
        loss, clipped = torch.minimum(loss, max_loss), clipped | (loss > max_loss)
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
    """Return per-token estimates [...] of KL(policy || reference); masked tokens give 0.

    With x = r - c clamped to +-20: k1 = -x, k2 = x^2 / 2, k3 = exp(x) - 1 - x (Schulman, "Approximating KL
    divergence", 2020). The result is clamped to +-10. k3+ has the value of k3 and the gradient of k2
    (straight-through, as in verl's kl_penalty, core_algos.py).

    As a loss on tokens sampled from the policy, k2 and k3+ have the expected gradient of
    KL(policy || reference), k3 that of KL(reference || policy), and k1 zero.
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
    if estimator == "k3+":  # the value of k3, the gradient of k2
        penalty = k3(log_ratio).detach().clamp(-MAX_KL, MAX_KL) + (penalty - penalty.detach())
    return penalty


def k3(x: Tensor) -> Tensor:
    """Return exp(x) - 1 - x, which is at least 0."""
    return torch.expm1(x) - x


def loss_weights(
    token_mask: Tensor,  # [B, S] bool
    *,
    loss_reduction: LossReduction,
    num_tokens: float,
    num_sequences: float,
    max_completion_tokens: int,
) -> Tensor:
    """Return the weight [B, S] of each token in the global loss, the sum of `weighted_losses`; 0 if masked.

    `num_tokens` and `num_sequences` count the global batch. The weights are:

    - token_mean: 1 / num_tokens (DAPO)
    - sequence_mean: 1 / (tokens of the sequence * num_sequences), the mean over sequences of their token
      means (GRPO, arXiv:2402.03300)
    - sequence_sum_constant: 1 / (num_sequences * max_completion_tokens) (Dr.GRPO, arXiv:2503.20783)
    - document_sum: 1 / num_sequences, the sum over tokens divided by the number of documents, one per row
      (Fast-LLM's normalize_by_documents)

    They are float64, so that a sum over a global batch keeps its precision.
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
    """Return the factor that scales the gradient of the global loss, to divide it by `grad_divisor` instead.

    Each reduction is a sum and a divisor: a sum over tokens divided by num_tokens (token_mean), num_sequences
    (document_sum) or num_sequences * max_completion_tokens (sequence_sum_constant), or a sum over sequence
    means divided by num_sequences (sequence_mean). `grad_divisor` replaces the divisor for the gradient. It
    is a number, the number of documents in the global batch of one optimizer step, or the square of that
    (DeepSpeed averages twice: loss over M, gradient over M^2). None keeps the divisor of the loss: factor 1.
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


def weighted_losses(losses: Tensor, weights: Tensor) -> Tensor:  # [...], [...] -> [...] float64
    """Return the contribution of each token to the global loss."""
    return torch.where(weights > 0, losses, 0.0) * weights


# Per-token importance weights that correct for the train-inference mismatch.
# Dimensions: B sequences, S positions. Log-probs: p old, g inference (see `losses`). The weights multiply
# a policy loss and have no gradient.

Correction = Literal["truncated", "icepop", "sequence_mask"]


def importance_weights(
    old_logprobs: Tensor,  # [B, S] p; with one_pass [N], for every correction except sequence_mask
    inference_logprobs: Tensor,  # g, same shape
    token_mask: Tensor,  # bool, same shape
    *,
    correction: Correction,
    low: float,
    high: float,
) -> Tensor:
    """Return weights in the shape of `old_logprobs`, from w = exp(p - g); masked tokens give 0.

    truncated: w clamped to [low, high] (TIS, Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training"). icepop: w inside the bounds, 0 outside (IcePop, arXiv:2510.18855).
    sequence_mask: w, but 0 on all tokens of a sequence if the geometric mean of its w is outside the bounds.
    """
    log_weight = torch.where(token_mask, old_logprobs - inference_logprobs, 0.0)
    weight = log_weight.exp()
    if correction == "truncated":
        weight = weight.clamp(low, high)
    elif correction == "icepop":
        weight = torch.where((weight >= low) & (weight <= high), weight, 0.0)
    else:
        lengths = token_mask.sum(dim=1, keepdim=True).clamp(min=1)
        mean = (log_weight.sum(dim=1, keepdim=True) / lengths).exp()
        weight = torch.where((mean >= low) & (mean <= high), weight, 0.0)
    return torch.where(token_mask, weight, 0.0)


# Direct preference optimisation (DPO). Dimensions: P pairs, B = 2P sequences. Row 2i is the chosen completion
# of pair i, row 2i + 1 the rejected one.


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLoss:
    """The loss of each pair and, without gradient, the values for its metrics; all [P] float64."""

    loss: Tensor
    chosen_rewards: Tensor  # beta (c - r), reduced over the completion
    rejected_rewards: Tensor
    chosen_logprobs: Tensor  # c, reduced over the completion
    rejected_logprobs: Tensor

    @property
    def margins(self) -> Tensor:
        """Chosen minus rejected reward."""
        return self.chosen_rewards - self.rejected_rewards


def dpo_loss(
    trainer_logprobs: Tensor,  # [B, S] c
    reference_logprobs: Tensor,  # [B, S] r
    token_mask: Tensor,  # [B, S] bool
    *,
    beta: float,
    logprob_reduction: Literal["sum", "mean"],
) -> PreferenceLoss:
    """Return -log sigmoid(beta ((c_w - r_w) - (c_l - r_l))), w chosen, l rejected (arXiv:2305.18290, eq. 7).

    c and r are sums over the tokens of the completion, or means (length-normalised, as in Tulu 3,
    arXiv:2411.15124). The sums are float64, because a margin is a small difference of large sums. Masked
    tokens are ignored.
    """
    num_tokens = token_mask.sum(dim=1).clamp(min=1) if logprob_reduction == "mean" else 1

    def reduced(values: Tensor) -> Tensor:  # [B, S] -> [B]
        return torch.where(token_mask, values, 0.0).double().sum(dim=1) / num_tokens

    rewards = beta * reduced(trainer_logprobs - reference_logprobs)
    logprobs = reduced(trainer_logprobs.detach())
    return PreferenceLoss(
        loss=-logsigmoid(rewards[::2] - rewards[1::2]),
        chosen_rewards=rewards[::2].detach(),
        rejected_rewards=rewards[1::2].detach(),
        chosen_logprobs=logprobs[::2],
        rejected_logprobs=logprobs[1::2],
    )


def spread_over_tokens(
    pair_losses: Tensor, token_mask: Tensor
) -> Tensor:  # [P], [B, S] bool -> [B, S] float64
    """Divide the loss of each pair equally among its tokens."""
    shares = token_mask.double().reshape(len(pair_losses), -1)
    shares = shares / shares.sum(dim=1, keepdim=True).clamp(min=1)
    return (pair_losses[:, None] * shares).reshape(token_mask.shape)
