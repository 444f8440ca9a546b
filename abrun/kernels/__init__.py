"""Per-token log-probs and entropy of a language-model head, both differentiable, by one of several routes.

Letters used in this package: N tokens (any leading shape), H hidden, V vocabulary, P ranks of the vocabulary
group.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .chunked import chunked_logprobs
from .head import resolve_head
from .logits import dense_logprobs

__all__ = ["linear_logprobs"]

_IMPLS = {"logits": dense_logprobs, "chunked": chunked_logprobs}


def linear_logprobs(
    hidden: Tensor,  # [..., H] any float dtype
    weight: Tensor,  # [V/P, H] this rank's contiguous vocabulary shard (whole vocabulary when group is None)
    target: Tensor,  # [...] int64 global token ids
    *,
    impl: str,
    entropy: bool = False,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    head_dtype: torch.dtype | None = None,
    chunk_size: int | None = None,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None]:  # float32 [...] log-probs, float32 [...] entropy
    """Log-prob of each target under softmax(z / temperature), and the entropy of that softmax, in nats.

    z = softcap(logit_scale * hidden @ weight.T), where softcap(z) = logit_softcap * tanh(z / logit_softcap).
    The projection runs in the weight's dtype (or in `head_dtype`) and accumulates in float32; results are
    float32, or float64 where the projection is; gradients return in each input's own dtype, whatever autocast
    says.

    - impl: "logits" holds the dense [N, V] logits, in the projection's dtype, as every framework's stock path
      does; "chunked" never holds them, keeps its logits in float32 and recomputes them in the backward pass.
    - entropy: also return it, with gradient; otherwise the second result is None.
    - ignore_index: such a target has log-prob 0, entropy 0 and no gradient. A target outside the vocabulary
      has log-prob 0 too, but the gradient -softmax * g of the stock vocabulary-parallel path, and its true
      entropy.
    - vocab_size: true size where the last shards are padded; padded rows take no probability and no gradient.
    - chunk_size: vocabulary rows a chunk, for "chunked" ("logits" has none). None: chosen from a memory
      budget.
    - group: ranks that hold equal, consecutive vocabulary shards, in rank order. Every rank passes the same
      hidden and target and gets the same results; the gradient of hidden is this rank's partial sum, which
      the caller reduces, as that of any column-parallel linear.

    Raises ValueError for an impl that is not available and for shapes, dtypes or settings that do not fit.
    """
    if impl not in _IMPLS:
        reason = "is not built yet" if impl == "triton" else "is unknown"
        raise ValueError(f"impl: {impl!r} {reason}; available are {', '.join(map(repr, _IMPLS))}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size: got {chunk_size}; it is at least 1, or None to choose by memory")
    head = resolve_head(
        hidden,
        weight,
        target,
        temperature=temperature,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
        ignore_index=ignore_index,
        vocab_size=vocab_size,
        head_dtype=head_dtype,
        group=group,
    )
    tokens = hidden.reshape(target.numel(), hidden.shape[-1])
    # Under autocast a float32 head would run in bfloat16 without a word.
    with torch.autocast(hidden.device.type, enabled=False):
        logprobs, entropies = _IMPLS[impl](tokens, weight, target.reshape(-1), head, entropy, chunk_size)
    return logprobs.reshape(target.shape), None if entropies is None else entropies.reshape(target.shape)
