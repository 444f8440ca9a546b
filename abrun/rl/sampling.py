"""Sampling from logits, and the log-probs that match a filtered sampler.

The set that a sampler kept is a bit a token of the vocabulary: [..., W] uint8, W = ceil(V / 8).
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from abrun.recipe.policy import NO_FILTERS, Filters

BLOCK = 1024  # tokens of the vocabulary


def keep_top_p(logits: Tensor, top_p: float) -> Tensor:  # [..., V]
    """-inf outside the nucleus: the fewest most likely tokens whose probabilities reach `top_p`
    (arXiv:1904.09751)."""
    ordered, index = logits.sort(dim=-1, descending=True)
    before = ordered.softmax(dim=-1).cumsum(dim=-1) - ordered.softmax(dim=-1)
    dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, index, before >= top_p)
    return logits.masked_fill(dropped, float("-inf"))


def keep_top_k(logits: Tensor, top_k: int) -> Tensor:  # [..., V]
    """-inf outside the `top_k` most likely tokens, and those that are as likely as the last of them."""
    last = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[..., -1:]
    return logits.masked_fill(logits < last, float("-inf"))


def keep_min_p(logits: Tensor, min_p: float) -> Tensor:  # [..., V]
    """-inf where a token is less than `min_p` times as likely as the most likely one (arXiv:2407.01082)."""
    return logits.masked_fill(logits < logits.amax(dim=-1, keepdim=True) + math.log(min_p), float("-inf"))


def keep(logits: Tensor, filters: Filters) -> Tensor:  # [..., V]
    """-inf where `filters` drop a token, each of what those before it kept."""
    if filters.min_p > 0:
        logits = keep_min_p(logits, filters.min_p)
    if filters.top_k is not None:
        logits = keep_top_k(logits, filters.top_k)
    return keep_top_p(logits, filters.top_p) if filters.top_p < 1 else logits


def sample(
    logits: Tensor,  # [B, V], already divided by the temperature
    uniform: Tensor,  # [B] float64 in [0, 1)
    filters: Filters = NO_FILTERS,
) -> tuple[Tensor, Tensor]:
    """Token [B] and its log-prob [B], by inverting the cumulative distribution at `uniform`.

    One number a token, given by the caller, makes a sample depend on its own stream alone: not on the batch
    it is in, nor on the rank.
    """
    logprobs = keep(logits.float(), filters).log_softmax(dim=-1)
    # First to a block, then to a token in it: one sum along a whole vocabulary takes a GPU far longer.
    blocks = pad(logprobs.exp(), (0, -logprobs.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    weights = blocks.sum(dim=-1, dtype=torch.float64)
    block, rest = _reached(weights, uniform * weights.sum(dim=-1))
    within = blocks[torch.arange(len(block), device=block.device), block].double()
    token = (block * BLOCK + _reached(within, rest)[0]).clamp(max=logits.shape[-1] - 1)
    return token, logprobs.gather(-1, token[:, None])[:, 0]


def _reached(weights: Tensor, amount: Tensor) -> tuple[Tensor, Tensor]:  # [B, N] float64, [B] float64
    """The first place [B] where the sum of weights so far is above `amount`, and what is left of that there.

    Rounding may take the amount past the sum of all: then it is the last place with any weight. Of NaN it is
    the last place: whoever draws from that is told by its log-prob, and not by a fault of the device.
    """
    cumulative = weights.cumsum(dim=-1)
    most = torch.nextafter(cumulative[:, -1], torch.zeros_like(amount))
    place = torch.searchsorted(cumulative, torch.minimum(amount, most)[:, None], right=True)
    place = place.clamp(max=weights.shape[-1] - 1)
    before = cumulative.gather(-1, place) - weights.gather(-1, place)
    return place[:, 0], (amount - before[:, 0]).clamp(min=0)


def most_likely(logits: Tensor) -> tuple[Tensor, Tensor]:  # [B, V]
    """Token [B], the first of equally likely ones, and its log-prob [B]: 0, for there is no other choice."""
    return logits.argmax(dim=-1), torch.zeros(len(logits), device=logits.device)


def packed(kept: Tensor) -> Tensor:  # [..., V] bool -> [..., W]
    places = torch.arange(8, device=kept.device, dtype=torch.uint8)
    bits = pad(kept, (0, -kept.shape[-1] % 8)).unflatten(-1, (-1, 8)).to(torch.uint8)
    return (bits << places).sum(dim=-1, dtype=torch.uint8)


def unpacked(bits: Tensor, size: int) -> Tensor:  # [..., W] -> [..., V] bool
    places = torch.arange(8, device=bits.device, dtype=torch.uint8)
    return (bits[..., None] >> places & 1).flatten(-2)[..., :size].bool()


def filtered_logprobs(
    logits: Tensor,  # [..., V] float32, already divided by the temperature
    target: Tensor,  # [...] int64
    *,
    filters: Filters,
    ignore_index: int,
    support: Tensor | None = None,  # [..., W], what the sampler kept
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy [...] of the distribution that a filtered sampler draws from; 0 where ignored.

    Without `support` the kept set is the trainer's own; where rounding, or an update, makes it differ from
    the sampler's, the target is kept. Needs the logits, so no fused path can do this.
    """
    counted = target != ignore_index
    safe = torch.where(counted, target, 0)[..., None]
    if support is None:
        kept = keep(logits.detach(), filters) > float("-inf")
    else:
        kept = unpacked(support, logits.shape[-1])
    kept = kept.scatter(-1, safe, True)
    logprobs = torch.where(kept, logits, float("-inf")).log_softmax(dim=-1)
    finite = torch.where(kept, logprobs, 0.0)
    entropy = -(finite.exp() * kept * finite).sum(dim=-1)
    return torch.where(counted, finite.gather(-1, safe)[..., 0], 0.0), torch.where(counted, entropy, 0.0)
