"""Differentiable per-token log-probs and entropies of an LM head, in several implementations.

Letters used in this package: N tokens (any leading shape), H hidden size, V vocabulary, P ranks of the
vocabulary group.

Precision: every implementation accumulates the logits in float32, rounds them to `logits_dtype` (by default
the projection's dtype, as most frameworks do), and computes in float32 from there. On a GPU, float32 matmuls
use TF32 only if torch's setting allows it (torch.backends.cuda.matmul; IEEE by default).
"""

from typing import Unpack

import torch
from torch import Tensor

from .head import HeadOptions, ResolvedHead, TorchTiles, project, resolve_head
from .linear import LinearLogprobs, LinearPolicyLoss, Tiles, TokenLoss
from .logits import dense_logprobs

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
    """Compute the log-prob of each target under softmax(z / temperature), and that softmax's entropy, in
    nats.

    z = softcap(logit_scale * hidden @ weight.T), with softcap(z) = logit_softcap * tanh(z / logit_softcap).
    The projection runs in the weight's dtype (or in `head_dtype`) and accumulates in float32. Results are
    float32, or float64 for a float64 projection. Gradients have the dtypes of their inputs. Autocast has no
    effect.

    - impl: "logits" holds the dense [N, V] logits; its backward pass peaks at three float32 copies, as many
    as log_softmax and gather. "chunked" (plain PyTorch, any device) and "triton" (GPU) never hold them and
    recompute them in the backward pass. These two have no second derivatives.
    - entropy: also return the entropy; otherwise the second result is None. It is differentiable unless
      `entropy_gradient` is false. With "logits" its gradient needs a fourth copy.
    - logits_dtype: the dtype that logits are rounded to: the projection's (None) or the results'.
    - ignore_index: targets with this value have log-prob 0, entropy 0 and no gradient. A target outside the
      vocabulary also has log-prob 0, but its true entropy, and the gradient -softmax * g, as in other
      vocabulary-parallel implementations.
    - vocab_size: the true size if the last shards are padded. Padding gets no probability and no gradient.
    - chunk_size: vocabulary rows per chunk (not for "logits"). None: as many as the memory budget allows.
    - memory_budget_bytes: the memory that "chunked" and "triton" may use besides inputs and gradients. If it
      holds d_hidden's float32 sum for some of the tokens only, d_weight is rounded once per tile of tokens.
    - group: ranks that hold equal, consecutive vocabulary shards in rank order (pad the last one and pass
      `vocab_size` if necessary). If sizes differ between ranks, all raise the same ValueError. Every rank
      passes the same hidden and target and gets the same results. The gradient of hidden is this rank's
      partial sum, which the caller reduces, as for any column-parallel linear.

    Raises ValueError for an unavailable impl and for shapes, dtypes or settings that do not fit.
    """
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size: got {chunk_size}; need at least 1, or None to fit the memory budget")
    head = resolve_head(hidden, weight, target, **options)
    tiles = _make_tiles(impl, head, weight, memory_budget_bytes)
    tokens, targets = hidden.reshape(target.numel(), hidden.shape[-1]), target.reshape(-1).contiguous()
    # Autocast would silently run a float32 head in bfloat16.
    with torch.autocast(hidden.device.type, enabled=False):
        logprobs, entropies = _compute_logprobs(
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
    """Sum a per-token loss of log-probs and entropies, and compute both gradients in the same pass.

    `token_loss(logprobs, entropies, tokens)` receives the log-probs [n] of some tokens and their entropies
    [n] (None without `entropy`), and returns their losses [n], computed by differentiable operations.
    `tokens` is the slice of the N flattened tokens, to select advantages and masks. A token's loss may depend
    on that token alone: losses of full sequences, such as GSPO's, need linear_logprobs.

    linear_logprobs recomputes the logits in the backward pass (8NHV operations in total). Here the forward
    pass computes the gradients as well (6NHV), and `loss.backward()`, which may run only once, returns them.
    Until then they take memory besides the budget. A tile keeps its logits over the whole vocabulary, so it
    has few tokens, and d_weight is rounded once per tile. impl "logits" is the dense path with plain
    autograd.

    Log-probs and entropies are returned without gradient. Everything else is as in linear_logprobs.
    """
    head = resolve_head(hidden, weight, target, **options)
    tiles = _make_tiles(impl, head, weight, memory_budget_bytes)
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
            logprobs, entropies = _compute_logprobs(
                tokens, weight, targets, head, tiles, entropy, entropy_gradient, None, memory_budget_bytes
            )
            loss = token_loss(logprobs, entropies, slice(0, len(targets))).sum()
    logprobs = logprobs.detach().reshape(target.shape)
    return loss, logprobs, None if entropies is None else entropies.detach().reshape(target.shape)


def _compute_logprobs(
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


def _make_tiles(impl: str, head: ResolvedHead, weight: Tensor, memory_budget_bytes: int) -> Tiles | None:
    """Return the tile implementation of `impl`, or None if it computes dense logits."""
    if memory_budget_bytes < 1:
        raise ValueError(f"memory_budget_bytes: got {memory_budget_bytes}; need at least 1")
    if impl == "logits":
        return None
    if impl == "chunked":
        return TorchTiles(head)
    if impl != "triton":
        raise ValueError(f"impl: got {impl!r}; use one of {', '.join(map(repr, _IMPLS))}")
    try:
        from . import triton_tiles
    except ImportError as error:
        raise ValueError(
            f"impl: 'triton' needs the package triton ({error}); pip install 'abrun[triton]'"
        ) from error
    return triton_tiles.TritonTiles(head, weight)
