"""Sampling from logits, and the log-probs that match a filtered sampler."""

import torch
from torch import Tensor


def keep_top_p(logits: Tensor, top_p: float) -> Tensor:  # [..., V]
    """-inf outside the nucleus: the fewest most likely tokens whose probabilities reach `top_p`
    (arXiv:1904.09751)."""
    ordered, index = logits.sort(dim=-1, descending=True)
    before = ordered.softmax(dim=-1).cumsum(dim=-1) - ordered.softmax(dim=-1)
    dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, index, before >= top_p)
    return logits.masked_fill(dropped, float("-inf"))


def sample(
    logits: Tensor,  # [B, V], already divided by the temperature
    uniform: Tensor,  # [B] float64 in [0, 1)
    top_p: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Token [B] and its log-prob [B], by inverting the cumulative distribution at `uniform`.

    One number a token, given by the caller, makes a sample depend on its own stream alone: not on the batch
    it is in, nor on the rank.
    """
    logits = logits.float()
    if top_p < 1:
        logits = keep_top_p(logits, top_p)
    logprobs = logits.log_softmax(dim=-1)
    cumulative = logprobs.exp().double().cumsum(dim=-1)
    token = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)
    # Rounding of the product may point past the last token that has any probability.
    last = logprobs.shape[-1] - 1 - (logprobs > float("-inf")).flip(-1).int().argmax(dim=-1, keepdim=True)
    token = torch.minimum(token, last)
    return token[:, 0], logprobs.gather(-1, token)[:, 0]


def most_likely(logits: Tensor) -> tuple[Tensor, Tensor]:  # [B, V]
    """Token [B], the first of equally likely ones, and its log-prob [B]: 0, for there is no other choice."""
    return logits.argmax(dim=-1), torch.zeros(len(logits), device=logits.device)


def filtered_logprobs(
    logits: Tensor,  # [..., V] float32, already divided by the temperature
    target: Tensor,  # [...] int64
    *,
    top_p: float,
    ignore_index: int,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy [...] of the distribution that a top-p sampler draws from; 0 where ignored.

    The kept set is the trainer's own; where rounding makes it differ from the sampler's, the target is kept.
    Needs the logits, so no fused path can do this.
    """
    counted = target != ignore_index
    safe = torch.where(counted, target, 0)[..., None]
    kept = keep_top_p(logits.detach(), top_p).scatter(-1, safe, 0.0) > float("-inf")
    logprobs = torch.where(kept, logits, float("-inf")).log_softmax(dim=-1)
    finite = torch.where(kept, logprobs, 0.0)
    entropy = -(finite.exp() * kept * finite).sum(dim=-1)
    return torch.where(counted, finite.gather(-1, safe)[..., 0], 0.0), torch.where(counted, entropy, 0.0)
