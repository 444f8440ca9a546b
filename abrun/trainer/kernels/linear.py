"""Log-probs, and a loss of them, computed tile by tile: the logits [N, V] are never held in full.

The outer loop is over tiles of tokens, the inner one over chunks of the vocabulary. A token's softmax needs
only a few sums over the vocabulary, and these can be added up chunk by chunk (see head.SoftmaxSums). Its
gradient with respect to one logit needs these sums and that logit alone (see head.LogitGradient).

With dz [n, v] the gradient of a tile's logits, d_hidden [n, H] is the sum over chunks of dz @ rows, and
d_weight [v, H] the sum over tiles of dz.T @ tokens. d_hidden is summed in float32. If one tile holds all
tokens, d_weight is one matmul per chunk. Otherwise every further tile adds to it and rounds to the weight's
dtype again, as gradient accumulation over microbatches does. Letters: n tokens of a tile, v rows of a chunk.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, Unpack

import torch
from torch import Tensor

from .head import (
    Cost,
    HeadOptions,
    LogitGradient,
    ResolvedHead,
    SoftmaxSums,
    Targets,
    TorchTiles,
    add_matmul,
    resolve_head,
)
from .logits import dense_logprobs

DEFAULT_MEMORY_BUDGET_BYTES = 512 * 2**20

# Maximum number of rows that one matmul sums into d_hidden if its operands are float32: a float32 sum of
# partial sums has a smaller error than one sum over the vocabulary. With 16-bit operands, rounding dominates.
MAX_SUMMED_ROWS = 32768

# (log-probs [n], entropies [n] or None, slice of the N tokens) -> losses [n]
TokenLoss = Callable[[Tensor, Any, slice], Tensor]


class Tiles(Protocol):
    """An implementation of the operations on one tile of logits.

    Hidden [n, H] and rows [v, H] have the projection's dtype; row 0 is token id `first_row`. A cost is the
    memory that a call needs at once.
    """

    sums_cost: Cost
    gradient_cost: Cost
    saved_cost: Cost  # of `add` with keep, and then `gradient_from_saved`

    def add(
        self,
        sums: SoftmaxSums,
        hidden: Tensor,  # [n, H]
        rows: Tensor,  # [v, H]
        target: Tensor,  # [n] int64
        first_row: int,
        *,
        keep: bool = False,
    ) -> Any:
        """Add these rows' logits to the sums; with `keep`, return the input of `gradient_from_saved`."""
        ...

    def gradient(
        self, gradient: LogitGradient, hidden: Tensor, rows: Tensor, target: Tensor, first_row: int
    ) -> Tensor:
        """Return the gradient [n, v] of the projection's output, in the projection's dtype."""
        ...

    def gradient_from_saved(
        self, gradient: LogitGradient, saved: Any, num_rows: int, target: Tensor, first_row: int
    ) -> Tensor:
        """Return the same gradient without recomputing the logits; overwrites `saved`."""
        ...

    def scale(self, values: Tensor, factor: Tensor) -> Tensor:
        """Multiply `values` in place by `factor` [], a tensor on their device."""
        ...


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
        if tiles is None:
            logprobs, entropies = dense_logprobs(
                tokens, weight, targets, head, entropy=entropy, entropy_gradient=entropy_gradient
            )
        else:
            sizes = chunk_size, memory_budget_bytes
            logprobs, entropies = LinearLogprobs.apply(  # pyright: ignore
                tokens, weight, targets, head, tiles, entropy, entropy_gradient, *sizes
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
    if impl == "logits" or not (torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)):
        logprobs, entropies = linear_logprobs(
            hidden,
            weight,
            target,
            impl=impl,
            entropy=entropy,
            entropy_gradient=entropy_gradient,
            memory_budget_bytes=memory_budget_bytes,
            **options,
        )
        flat_entropies = None if entropies is None else entropies.reshape(-1)
        with torch.autocast(hidden.device.type, enabled=False):
            loss = token_loss(logprobs.reshape(-1), flat_entropies, slice(0, target.numel())).sum()
    else:
        head = resolve_head(hidden, weight, target, **options)
        tiles = _make_tiles(impl, head, weight, memory_budget_bytes)
        tokens, targets = hidden.reshape(target.numel(), hidden.shape[-1]), target.reshape(-1).contiguous()
        with torch.autocast(hidden.device.type, enabled=False):
            settings = head, tiles, entropy, entropy_gradient, memory_budget_bytes
            loss, logprobs, entropies = LinearPolicyLoss.apply(  # pyright: ignore
                tokens, weight, targets, token_loss, *settings
            )
    logprobs = logprobs.detach().reshape(target.shape)
    return loss, logprobs, None if entropies is None else entropies.detach().reshape(target.shape)


def _make_tiles(impl: str, head: ResolvedHead, weight: Tensor, memory_budget_bytes: int) -> Tiles | None:
    """Return the tile implementation of `impl`, or None if it computes dense logits."""
    if memory_budget_bytes < 1:
        raise ValueError(f"memory_budget_bytes: got {memory_budget_bytes}; need at least 1")
    if impl == "logits":
        return None
    if impl == "chunked":
        return TorchTiles(head)
    if impl != "triton":
        raise ValueError(f"impl: got {impl!r}; use one of 'logits', 'chunked', 'triton'")
    try:
        from . import triton_tiles
    except ImportError as error:
        raise ValueError(
            f"impl: 'triton' needs the package triton ({error}); pip install 'abrun[triton]'"
        ) from error
    return triton_tiles.TritonTiles(head, weight)


class LinearLogprobs(torch.autograd.Function):
    """Tiled log-probs: 2NHV operations forward and 6NHV backward, which recomputes the logits."""

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,  # [N, H]
        weight: Tensor,  # [V/P, H]
        target: Tensor,  # [N]
        head: ResolvedHead,
        tiles: Tiles,
        entropy: bool,
        entropy_gradient: bool,
        chunk_size: int | None,
        budget_bytes: int,
    ) -> tuple[Tensor, Tensor | None]:  # [N], [N]
        cost = tiles.sums_cost + _copy_cost(hidden, weight, head)
        grid = make_grid(len(hidden), head.num_rows, cost, budget_bytes, chunk_size)
        sums, targets = SoftmaxSums.empty(target, head, entropy=entropy), Targets.from_ids(target, head)
        for tile in grid.tiles:
            tokens = _as_operand(hidden[tile], head)
            for chunk in grid.chunks:
                target_rows = target[tile], head.first_row + chunk.start
                tiles.add(sums[tile], tokens, _as_operand(weight[chunk], head), *target_rows)
            del tokens  # before the next tile's copy is made
        sums.reduce_over_shards(targets, head)
        # Without a gradient to compute, autograd drops the context and these tensors.
        ctx.save_for_backward(
            hidden, weight, target, sums.maximum, sums.sum_exp, sums.sum_exp_logit, sums.target_logit
        )
        ctx.head, ctx.tiles, ctx.chunk_size, ctx.budget_bytes = head, tiles, chunk_size, budget_bytes
        ctx.set_materialize_grads(False)
        logprobs, entropies = sums.results(targets)
        if entropies is not None and not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, grad_logprobs: Tensor | None, grad_entropies: Tensor | None):
        _refuse_second_derivatives()
        head, tiles = ctx.head, ctx.tiles
        hidden, weight, target, maximum, sum_exp, sum_exp_logit, target_logit = ctx.saved_tensors
        sums = SoftmaxSums(
            maximum=maximum, sum_exp=sum_exp, sum_exp_logit=sum_exp_logit, target_logit=target_logit
        )
        gradient = LogitGradient.from_sums(
            sums, grad_logprobs, grad_entropies, Targets.from_ids(target, head), head
        )
        cost = tiles.gradient_cost + _gradient_cost(hidden, weight, head, ctx.needs_input_grad)
        max_chunk = MAX_SUMMED_ROWS if head.projection_dtype == head.result_dtype else math.inf
        grid = make_grid(len(hidden), head.num_rows, cost, ctx.budget_bytes, ctx.chunk_size, max_chunk)
        gradients = _Gradients(hidden, weight, head, ctx.needs_input_grad)
        with torch.autocast(hidden.device.type, enabled=False):
            for tile in grid.tiles:
                gradients.start(tile, grid)
                for chunk in grid.chunks:
                    rows = _as_operand(weight[chunk], head)
                    target_rows = target[tile], head.first_row + chunk.start
                    d_logits = tiles.gradient(gradient[tile], gradients.tokens, rows, *target_rows)
                    gradients.add(chunk, rows, d_logits)
                    del rows, d_logits  # before the next chunk's are made
                gradients.finish()
        return gradients.d_hidden, gradients.d_weight, *(None,) * 7


class LinearPolicyLoss(torch.autograd.Function):
    """Tiled loss and both gradients in 6NHV operations, all in the forward pass.

    This is exact because the loss is a sum of token losses f_t(logprob_t, entropy_t): the gradient of a
    tile's logits needs the df_t of its own tokens only, which are known as soon as its sums are. The backward
    pass multiplies by the gradient of the sum, one number.

    A tile keeps its logits over the whole vocabulary until its gradient, so it has few tokens.
    """

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,  # [N, H]
        weight: Tensor,  # [V/P, H]
        target: Tensor,  # [N]
        token_loss: TokenLoss,
        head: ResolvedHead,
        tiles: Tiles,
        entropy: bool,
        entropy_gradient: bool,
        budget_bytes: int,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # [], [N], [N]
        grid = _make_one_pass_grid(hidden, weight, head, tiles, budget_bytes, ctx.needs_input_grad)
        sums, targets = SoftmaxSums.empty(target, head, entropy=entropy), Targets.from_ids(target, head)
        gradients = _Gradients(hidden, weight, head, ctx.needs_input_grad)
        loss = torch.zeros((), dtype=head.result_dtype, device=hidden.device)
        for tile in grid.tiles:
            gradients.start(tile, grid)
            saved = []
            for chunk in grid.chunks:
                target_rows = target[tile], head.first_row + chunk.start
                rows = _as_operand(weight[chunk], head)
                saved.append(tiles.add(sums[tile], gradients.tokens, rows, *target_rows, keep=True))
                del rows  # before the next chunk's copy is made

            sums[tile].reduce_over_shards(targets[tile], head)
            logprobs, entropies = sums[tile].results(targets[tile])
            tile_loss, g, h = _differentiate_loss(token_loss, logprobs, entropies, tile, entropy_gradient)
            gradient = LogitGradient.from_sums(sums[tile], g, h, targets[tile], head)

            for chunk in grid.chunks:
                target_rows = target[tile], head.first_row + chunk.start
                rows = _as_operand(weight[chunk], head)
                d_logits = tiles.gradient_from_saved(gradient, saved.pop(0), len(rows), *target_rows)
                gradients.add(chunk, rows, d_logits)
                del rows, d_logits
            gradients.finish()
            loss += tile_loss
        ctx.tiles, ctx.gradients = tiles, (gradients.d_hidden, gradients.d_weight)
        logprobs, entropies = sums.results(targets)
        ctx.mark_non_differentiable(logprobs, *([] if entropies is None else [entropies]))
        return loss, logprobs, entropies

    @staticmethod
    def backward(ctx, grad_loss: Tensor, *_: Tensor | None):
        _refuse_second_derivatives()
        if ctx.gradients is None:
            raise RuntimeError(
                "linear_policy_loss: its backward pass can run only once, and it has run before"
            )
        scaled = [
            None if gradient is None else ctx.tiles.scale(gradient, grad_loss) for gradient in ctx.gradients
        ]
        ctx.gradients = None
        return *scaled, *(None,) * 7


def _refuse_second_derivatives() -> None:
    """Raise RuntimeError in a backward pass with `create_graph=True`."""
    if torch.is_grad_enabled():
        message = "linear_logprobs: 'chunked' and 'triton' have no second derivatives; use impl 'logits'"
        raise RuntimeError(message)


def _differentiate_loss(
    token_loss: TokenLoss, logprobs: Tensor, entropies: Tensor | None, tile: slice, entropy_gradient: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the tile's loss [] and its gradients with respect to log-probs [n] and entropies [n]."""
    logprobs = logprobs.detach().requires_grad_()
    leaves = [logprobs]
    if entropies is not None and entropy_gradient:
        entropies = entropies.detach().requires_grad_()
        leaves.append(entropies)
    with torch.enable_grad():
        losses = token_loss(logprobs, entropies, tile)
        if losses.shape != logprobs.shape:
            raise ValueError(
                f"token_loss: returned shape {list(losses.shape)}; need one loss a token, "
                f"{list(logprobs.shape)}"
            )
        loss = losses.sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else ()
    grad_logprobs, grad_entropies, *_ = (*grads, None, None)
    return loss.detach(), grad_logprobs, grad_entropies


class _Gradients:
    """Accumulates the gradients of hidden and weight, as far as needed, from those of the logits."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, head: ResolvedHead, needs_input_grad: tuple[bool, ...]
    ) -> None:
        self._head, self._hidden = head, hidden
        self.d_hidden = torch.empty_like(hidden) if needs_input_grad[0] else None
        self.d_weight = torch.empty_like(weight) if needs_input_grad[1] else None
        if self.d_weight is not None:
            self.d_weight[head.num_rows if len(hidden) else 0 :] = 0  # rows that no matmul writes

    def start(self, tile: slice, grid: "Grid") -> None:
        """Begin a tile: set `tokens` to its hidden states in the projection's dtype."""
        self._tile, self.tokens = tile, _as_operand(self._hidden[tile], self._head)
        self._d_tokens = None  # the sum over the vocabulary; with a vocabulary group, over this shard
        if self.d_hidden is not None and len(grid.chunks) != 1:
            self._d_tokens = torch.zeros_like(self.tokens, dtype=self._head.result_dtype)

    def add(self, chunk: slice, rows: Tensor, d_logits: Tensor) -> None:
        wide = self._head.result_dtype
        if self._d_tokens is not None:
            add_matmul(self._d_tokens, d_logits, rows, wide=wide)
        elif self.d_hidden is not None:
            add_matmul(self.d_hidden[self._tile], d_logits, rows, wide=wide, overwrite=True)
        if self.d_weight is not None:
            is_first = self._tile.start == 0
            add_matmul(self.d_weight[chunk], d_logits.t(), self.tokens, wide=wide, overwrite=is_first)

    def finish(self) -> None:
        if self.d_hidden is not None and self._d_tokens is not None:
            self.d_hidden[self._tile] = self._d_tokens
        del self.tokens, self._d_tokens  # before the next tile's are made


def _make_one_pass_grid(
    hidden: Tensor,
    weight: Tensor,
    head: ResolvedHead,
    tiles: Tiles,
    budget_bytes: int,
    needs_input_grad: tuple[bool, ...],
) -> "Grid":
    """Make tiles that keep their logits over all rows: the same on every rank, as each tile is reduced."""
    cost = tiles.saved_cost + _gradient_cost(hidden, weight, head, needs_input_grad, one_chunk=True)
    if cost.row:
        cost = tiles.saved_cost + _gradient_cost(hidden, weight, head, needs_input_grad)
    grid = make_whole_row_grid(len(hidden), len(weight), cost, budget_bytes)
    chunks = [slice(chunk.start, min(chunk.stop, head.num_rows)) for chunk in grid.chunks]  # without padding
    return Grid(tiles=grid.tiles, chunks=[chunk for chunk in chunks if chunk.start < head.num_rows])


def _as_operand(values: Tensor, head: ResolvedHead) -> Tensor:
    operand = values.to(head.projection_dtype).contiguous()
    if operand.stride(0) != operand.shape[1]:  # a single row is contiguous whatever its stride
        operand = operand.clone(memory_format=torch.contiguous_format)
    return operand


def _copy_cost(hidden: Tensor, weight: Tensor, head: ResolvedHead) -> Cost:
    """Return the cost of copying hidden and weight if they are not contiguous in the projection's dtype."""
    copy = hidden.shape[1] * head.projection_dtype.itemsize
    is_copied = [
        not (operand.dtype == head.projection_dtype and operand.is_contiguous())
        for operand in (hidden, weight)
    ]
    return Cost(token=copy * is_copied[0], row=copy * is_copied[1])


def _gradient_cost(
    hidden: Tensor,
    weight: Tensor,
    head: ResolvedHead,
    needs_input_grad: tuple[bool, ...],
    *,
    one_chunk: bool = False,
) -> Cost:
    """Return the cost of the operands' copies, and of gradient sums in a wider dtype than the gradients."""
    wide = hidden.shape[1] * head.result_dtype.itemsize
    sums = Cost(
        token=wide * needs_input_grad[0] * (not (one_chunk and _is_written_by_matmul(hidden, head))),
        row=wide * needs_input_grad[1] * (not _is_written_by_matmul(weight, head)),
    )
    return _copy_cost(hidden, weight, head) + sums


def _is_written_by_matmul(gradient: Tensor, head: ResolvedHead) -> bool:
    """Return whether a matmul can write this gradient directly, without a copy in a wider dtype."""
    return gradient.is_cuda and gradient.dtype in (head.projection_dtype, head.result_dtype)


# Tiling within a memory budget: tokens are split into tiles, the vocabulary shard's rows into chunks.

# Rows per chunk that a matmul needs for full throughput. Tokens are tiled before chunks get narrower than
# this, unless that would leave few tokens per tile.
PREFERRED_CHUNK = 4096
# Tiles and chunks larger than this are aligned to multiples of it, for matmul throughput.
ALIGNMENT = 256
# Alignment of tiles over all rows, whose d_hidden is one matmul over the vocabulary. On the 132
# multiprocessors of an H200 it takes a sixth more time per token with 1,408 or 1,664 tokens than with 1,024
# or 1,536.
WHOLE_ROW_ALIGNMENT = 512
# For the softmax sums, the gradient's coefficients and their intermediate results.
BYTES_PER_TOKEN = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    tiles: list[slice]  # of the tokens
    chunks: list[slice]  # of this shard's rows


def make_grid(
    num_tokens: int,
    num_rows: int,
    cost: Cost,
    budget_bytes: int,
    chunk_size: int | None = None,
    max_chunk: float = math.inf,
) -> Grid:
    """Return the largest tiles, and then the largest chunks, that the budget allows.

    `chunk_size` fixes the chunks. Tokens are tiled if they alone would take more than half of the budget, or
    leave too little for chunks of the preferred size. If the budget is too small for that size, chunks are
    narrowed first: to half of the budget, and to no more rows than a tile has tokens, because thin strips
    would read the operands repeatedly. A tile or chunk has at least one token or row.
    """
    budget = _remaining_budget(budget_bytes, num_tokens)
    # The rows per chunk that leave half of the budget to the tile, with no fewer tokens than rows
    by_rows = budget / 2 / cost.row if cost.row else math.inf
    preferred = min(PREFERRED_CHUNK, max(by_rows, 1), max(math.sqrt(budget / cost.logit), 1))
    width = min(chunk_size or preferred, max(num_rows, 1))
    max_length = (budget - width * cost.row) / (cost.token + width * cost.logit)
    tiles = _split_evenly(
        num_tokens, min(max_length, budget / 2 / cost.token) if cost.token else max_length, ALIGNMENT
    )
    if chunk_size is not None:
        return Grid(tiles=tiles, chunks=_split_evenly(num_rows, chunk_size, 1))
    tile_size = max(longest_slice(tiles), 1)
    max_length = (budget - tile_size * cost.token) / (cost.row + tile_size * cost.logit)
    return Grid(tiles=tiles, chunks=_split_evenly(num_rows, min(max_length, max_chunk), ALIGNMENT))


def make_whole_row_grid(num_tokens: int, num_rows: int, cost: Cost, budget_bytes: int) -> Grid:
    """Return tiles whose logits over all rows fit the budget; rows are chunked only if they cost memory."""
    budget = _remaining_budget(budget_bytes, num_tokens)
    chunks = _split_evenly(num_rows, budget / 2 / cost.row if cost.row else math.inf, ALIGNMENT)
    max_length = (budget - longest_slice(chunks) * cost.row) / (cost.token + max(num_rows, 1) * cost.logit)
    alignment = WHOLE_ROW_ALIGNMENT if max_length >= 2 * WHOLE_ROW_ALIGNMENT else ALIGNMENT
    return Grid(tiles=_split_evenly(num_tokens, max_length, alignment), chunks=chunks)


def _remaining_budget(budget_bytes: int, num_tokens: int) -> float:
    """Return the budget left for tiles and chunks after the fixed cost of all tokens.

    At least half of the budget, because no tiling reduces the fixed cost.
    """
    return max(budget_bytes - num_tokens * BYTES_PER_TOKEN, budget_bytes / 2)


def longest_slice(slices: list[slice]) -> int:
    return max((token_slice.stop - token_slice.start for token_slice in slices), default=0)


def _split_evenly(total: int, max_length: float, alignment: int) -> list[slice]:
    """Split `total` into the fewest, about equal slices of at most `max_length`, aligned if possible."""
    if total <= max_length:
        return [slice(0, total)] if total else []
    unit = alignment if max_length >= alignment else 1
    num_units = -(-total // unit)
    num_slices = -(-num_units // max(int(max_length) // unit, 1))
    bounds = [num_units * index // num_slices * unit for index in range(num_slices)] + [total]
    return [slice(*cut) for cut in pairwise(bounds)]
