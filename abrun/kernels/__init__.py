"""Per-token log-probs and entropy of a language-model head, both differentiable, by one of several routes.

Letters used in this package: N tokens (any leading shape), H hidden, V vocabulary, P ranks of the vocabulary
group.

Precision: every route accumulates the logits in float32, rounds them to `logits_dtype` (by default the
projection's dtype, as in every framework's stock path), and computes in float32 from there. Products of
float32 run in TF32 on a GPU only where torch's own setting allows it
(torch.backends.cuda.matmul; IEEE by default).
"""

from typing import Unpack

import torch
from torch import Tensor

from .head import HeadOptions, ResolvedHead, resolve_head
from .linear import LinearLogprobs, LinearPolicyLoss, Tiles, TokenLoss
from .logits import dense_logprobs
from .matmul import project
from .torch_tiles import TorchTiles

__all__ = ["DEFAULT_MEMORY_BUDGET_BYTES", "TokenLoss", "linear_logprobs", "linear_policy_loss", "project"]

_IMPLS = ("logits", "chunked", "triton")
DEFAULT_MEMORY_BUDGET_BYTES = 512 * 2**20


def linear_logprobs(
    hidden: Tensor,  # [..., H] any float dtype
    weight: Tensor,  # [V/P, H] this rank's contiguous vocabulary shard (whole vocabulary when group is None)
    target: Tensor,  # [...] int64 global token ids
    *,
    impl: str,
    entropy: bool = False,
    entropy_gradient: bool = True,
    chunk_size: int | None = None,
    memory_budget_bytes: int = DEFAULT_MEMORY_BUDGET_BYTES,
    **options: Unpack[HeadOptions],
) -> tuple[Tensor, Tensor | None]:  # float32 [...] log-probs, float32 [...] entropy
    """Log-prob of each target under softmax(z / temperature), and the entropy of that softmax, in nats.

    z = softcap(logit_scale * hidden @ weight.T), where softcap(z) = logit_softcap * tanh(z / logit_softcap).
    The projection runs in the weight's dtype (or in `head_dtype`) and accumulates in float32; results are
    float32, or float64 where the projection is; gradients return in each input's own dtype, whatever autocast
    says.

    - impl: "logits" holds the dense [N, V] logits: at the peak of its backward pass three float32 copies, as
      many as log_softmax and gather. "chunked", in plain PyTorch on any device, and "triton", on a GPU, never
      hold them and compute them again in the backward pass. These two have no second derivatives.
    - entropy: also return the entropy, otherwise the second result is None. It has a gradient unless
      `entropy_gradient` is false; with "logits" that gradient takes a fourth copy.
    - logits_dtype: the dtype to which logits are rounded, the projection's (None) or the results'.
    - ignore_index: such a target has log-prob 0, entropy 0 and no gradient. A target outside the vocabulary
      has log-prob 0 too, but the gradient -softmax * g of the stock vocabulary-parallel path, and its true
      entropy.
    - vocab_size: true size where the last shards are padded; padded rows take no probability and no gradient.
    - chunk_size: vocabulary rows a chunk ("logits" has none). None: as many as the memory budget allows.
    - memory_budget_bytes: what "chunked" and "triton" hold at once above the inputs and the gradients. Where
      it holds d_hidden's float32 sum for a part of the tokens only, d_weight is rounded once a part.
    - group: ranks that hold equal, consecutive vocabulary shards, in rank order (the last padded, with
      `vocab_size`, where they would not be equal); ranks that differ in these sizes all raise the same
      ValueError. Every rank passes the same hidden and target and gets the same results; the gradient of
      hidden is this rank's partial sum, which the caller reduces, as that of any column-parallel linear.

    Raises ValueError for an impl that is not available and for shapes, dtypes or settings that do not fit.
    """
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size: got {chunk_size}; it is at least 1, or None to choose by memory")
    head = resolve_head(hidden, weight, target, **options)
    tiles = _tiles(impl, head, weight, memory_budget_bytes)
    tokens, targets = hidden.reshape(target.numel(), hidden.shape[-1]), target.reshape(-1).contiguous()
    # Under autocast a float32 head would run in bfloat16 without a word.
    with torch.autocast(hidden.device.type, enabled=False):
        logprobs, entropies = _logprobs(
            tokens, weight, targets, head, tiles, entropy, entropy_gradient, chunk_size, memory_budget_bytes
        )
    return logprobs.reshape(target.shape), None if entropies is None else entropies.reshape(target.shape)


def linear_policy_loss(
    hidden: Tensor,  # [..., H] any float dtype
    weight: Tensor,  # [V/P, H] this rank's contiguous vocabulary shard (whole vocabulary when group is None)
    target: Tensor,  # [...] int64 global token ids
    token_loss: TokenLoss,
    *,
    impl: str,
    entropy: bool = False,
    entropy_gradient: bool = True,
    memory_budget_bytes: int = DEFAULT_MEMORY_BUDGET_BYTES,
    **options: Unpack[HeadOptions],
) -> tuple[Tensor, Tensor, Tensor | None]:  # float32 [] loss, float32 [...] log-probs, float32 [...] entropy
    """The sum of a per-token loss of the log-probs and entropies, with both gradients from one pass.

    `token_loss(logprobs, entropies, tokens)` gets the log-probs [n] of some of the tokens, and their
    entropies [n] (None without `entropy`), and returns their losses [n] by differentiable operations.
    `tokens` is the slice of the N flattened tokens that they are, to cut advantages and masks by. A token's
    loss depends on that token alone: a loss of whole sequences, as GSPO's, needs linear_logprobs.

    Where linear_logprobs computes the logits a second time in the backward pass (8NHV operations in all),
    here the loss gives their gradient at once (6NHV), and `loss.backward()`, which runs once, only hands the
    gradients out. Until then they are held, beside the memory budget. Few tokens fit the budget with their
    logits over the whole vocabulary, and d_weight is rounded once for each such part. impl "logits" is the
    dense path with plain autograd.

    Log-probs and entropies are returned without gradient. All else is as in linear_logprobs.
    """
    head = resolve_head(hidden, weight, target, **options)
    tiles = _tiles(impl, head, weight, memory_budget_bytes)
    tokens, targets = hidden.reshape(target.numel(), hidden.shape[-1]), target.reshape(-1).contiguous()
    wants_gradients = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    with torch.autocast(hidden.device.type, enabled=False):
        if tiles is not None and wants_gradients:
            loss, logprobs, entropies = LinearPolicyLoss.apply(  # pyright: ignore
                tokens,
                weight,
                targets,
                token_loss,
                head,
                tiles,
                entropy,
                entropy_gradient,
                memory_budget_bytes,
            )
        else:
            logprobs, entropies = _logprobs(
                tokens, weight, targets, head, tiles, entropy, entropy_gradient, None, memory_budget_bytes
            )
            loss = token_loss(logprobs, entropies, slice(0, len(targets))).sum()
    logprobs = logprobs.detach().reshape(target.shape)
    return loss, logprobs, None if entropies is None else entropies.detach().reshape(target.shape)


def _logprobs(
    tokens: Tensor,  # [N, H]
    weight: Tensor,
    targets: Tensor,  # [N]
    head: ResolvedHead,
    tiles: Tiles | None,
    entropy: bool,
    entropy_gradient: bool,
    chunk_size: int | None,
    budget_bytes: int,
) -> tuple[Tensor, Tensor | None]:  # [N], [N]
    if tiles is None:
        return dense_logprobs(
            tokens, weight, targets, head, entropy=entropy, entropy_gradient=entropy_gradient
        )
    return LinearLogprobs.apply(  # pyright: ignore
        tokens, weight, targets, head, tiles, entropy, entropy_gradient, chunk_size, budget_bytes
    )


def _tiles(impl: str, head: ResolvedHead, weight: Tensor, memory_budget_bytes: int) -> Tiles | None:
    """How `impl` works on its tiles of logits; None where it has none."""
    if memory_budget_bytes < 1:
        raise ValueError(f"memory_budget_bytes: got {memory_budget_bytes}; it is at least 1")
    if impl == "logits":
        return None
    if impl == "chunked":
        return TorchTiles(head)
    if impl != "triton":
        raise ValueError(f"impl: {impl!r} is unknown; available are {', '.join(map(repr, _IMPLS))}")
    try:
        from . import triton_tiles
    except ImportError as error:
        raise ValueError(
            f"impl: 'triton' needs the package triton ({error}); pip install 'abrun[triton]'"
        ) from error
    return triton_tiles.TritonTiles(head, weight)
