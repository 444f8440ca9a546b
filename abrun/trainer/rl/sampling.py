"""Sampling from logits, and the log-probs that match a filtered sampler.

The support of a draw is the set of tokens that the filters keep. It is stored with one bit for each token of
the vocabulary: [..., W] uint8, W = ceil(V / 8).
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from abrun.recipe.policy import NO_FILTERS, Filters

BLOCK = 1024  # tokens of the vocabulary


def keep_top_p(logits: Tensor, top_p: float) -> Tensor:  # [..., V]
    """Set logits to -inf outside the nucleus (arXiv:1904.09751).

    The nucleus is the smallest set of most likely tokens with a total probability of at least `top_p`.
    """
    ordered, index = logits.sort(dim=-1, descending=True)
    mass_above = ordered.softmax(dim=-1).cumsum(dim=-1) - ordered.softmax(dim=-1)
    dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, index, mass_above >= top_p)
    return logits.masked_fill(dropped, float("-inf"))


def keep_top_k(logits: Tensor, top_k: int) -> Tensor:  # [..., V]
    """Set logits to -inf outside the `top_k` most likely tokens; ties with the last of them are kept."""
    threshold = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[..., -1:]
    return logits.masked_fill(logits < threshold, float("-inf"))


def keep_min_p(logits: Tensor, min_p: float) -> Tensor:  # [..., V]
    """Set logits to -inf for tokens less than `min_p` times as likely as the best one (arXiv:2407.01082)."""
    return logits.masked_fill(logits < logits.amax(dim=-1, keepdim=True) + math.log(min_p), float("-inf"))


def filter_logits(logits: Tensor, filters: Filters) -> Tensor:  # [..., V]
    """Apply min_p, top_k and top_p in this order: logits of dropped tokens become -inf."""
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
    """Draw tokens [B] by inverting the cumulative distribution at `uniform`; return them and their log-probs.

    The caller supplies one uniform number for each token. A sample therefore depends only on its own random
    stream, not on the rest of the batch or on the rank.
    """
    logprobs = filter_logits(logits.float(), filters).log_softmax(dim=-1)
    # Find the block, then the token within it: one cumulative sum over the vocabulary is far slower on a GPU.
    blocks = pad(logprobs.exp(), (0, -logprobs.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    weights = blocks.sum(dim=-1, dtype=torch.float64)
    block, rest = _invert_cumulative(weights, uniform * weights.sum(dim=-1))
    within = blocks[torch.arange(len(block), device=block.device), block].double()
    token = (block * BLOCK + _invert_cumulative(within, rest)[0]).clamp(max=logits.shape[-1] - 1)
    return token, logprobs.gather(-1, token[:, None])[:, 0]


def _invert_cumulative(
    weights: Tensor, amount: Tensor
) -> tuple[Tensor, Tensor]:  # [B, N] float64, [B] float64
    """Return the first index [B] at which the cumulative weight exceeds `amount`, and the remainder there.

    If rounding puts the amount above the total, the index is the last one with a nonzero weight. For NaN it
    is the last index: the log-prob then reveals the problem, instead of a device-side assertion.
    """
    cumulative = weights.cumsum(dim=-1)
    largest_below_total = torch.nextafter(cumulative[:, -1], torch.zeros_like(amount))
    index = torch.searchsorted(cumulative, torch.minimum(amount, largest_below_total)[:, None], right=True)
    index = index.clamp(max=weights.shape[-1] - 1)
    mass_before = cumulative.gather(-1, index) - weights.gather(-1, index)
    return index[:, 0], (amount - mass_before[:, 0]).clamp(min=0)


def sample_greedily(logits: Tensor) -> tuple[Tensor, Tensor]:  # [B, V]
    """Return the most likely token [B], the first one of a tie, and its log-prob [B], which is 0."""
    return logits.argmax(dim=-1), torch.zeros(len(logits), device=logits.device)


def pack_bits(is_kept: Tensor) -> Tensor:  # [..., V] bool -> [..., W]
    bit_positions = torch.arange(8, device=is_kept.device, dtype=torch.uint8)
    bits = pad(is_kept, (0, -is_kept.shape[-1] % 8)).unflatten(-1, (-1, 8)).to(torch.uint8)
    return (bits << bit_positions).sum(dim=-1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, size: int) -> Tensor:  # [..., W] -> [..., V] bool
    bit_positions = torch.arange(8, device=bits.device, dtype=torch.uint8)
    return (bits[..., None] >> bit_positions & 1).flatten(-2)[..., :size].bool()


def filtered_logprobs(
    logits: Tensor,  # [..., V] float32, already divided by the temperature
    target: Tensor,  # [...] int64
    *,
    filters: Filters,
    ignore_index: int,
    support: Tensor | None = None,  # [..., W]: the tokens that the sampler kept
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropy [...] of the distribution of a filtered sampler; 0 at ignored targets.

    Without `support`, the filters are applied to these logits. The target is always kept, because rounding or
    an update may remove it from the sampler's set. No fused implementation can do this: it needs the logits.
    """
    counted = target != ignore_index
    target_index = torch.where(counted, target, 0)[..., None]
    if support is None:
        is_kept = filter_logits(logits.detach(), filters) > float("-inf")
    else:
        is_kept = unpack_bits(support, logits.shape[-1])
    is_kept = is_kept.scatter(-1, target_index, True)
    logprobs = torch.where(is_kept, logits, float("-inf")).log_softmax(dim=-1)
    finite = torch.where(is_kept, logprobs, 0.0)
    entropy = -(finite.exp() * is_kept * finite).sum(dim=-1)
    return torch.where(counted, finite.gather(-1, target_index)[..., 0], 0.0), torch.where(
        counted, entropy, 0.0
    )
