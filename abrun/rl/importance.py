"""Correction of a rollout engine whose log-probs are not the trainer's: importance weights, by token.

Letters: B sequences, S positions; p old, g inference log-probs (see `losses`). The weights are constants:
they multiply a policy loss and have no gradient.
"""

from typing import Literal

import torch
from torch import Tensor

Correction = Literal["truncated", "icepop", "sequence_mask"]


def importance_weights(
    old_logprobs: Tensor,  # [B, S] p; with one_pass [N], for all corrections but sequence_mask
    inference_logprobs: Tensor,  # as old_logprobs: g
    token_mask: Tensor,  # as old_logprobs: bool
    *,
    correction: Correction,
    low: float,
    high: float,
) -> Tensor:
    """Return weights in the shape of `old_logprobs`, from w = exp(p - g); masked tokens give 0.

    truncated: w, moved to the nearer bound where it is outside (TIS, Yao et al. 2025, "Your efficient RL
    framework secretly brings you off-policy RL training"). icepop: w, and 0 where it is outside (IcePop,
    arXiv:2510.18855). sequence_mask: w, and 0 on all tokens of a sequence whose geometric mean of w is
    outside.
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
