"""Per-token importance weights that correct for the train-inference mismatch.

Dimensions: B sequences, S positions. Log-probs: p old, g inference (see `losses`). The weights multiply a
policy loss and have no gradient.
"""

from typing import Literal

import torch
from torch import Tensor

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
