"""The chunked path: a running softmax over chunks of the vocabulary, logits recomputed in the backward pass.

Chunks are of the vocabulary and not of the tokens, so that each chunk's d_weight is complete in one product:
summing it over token chunks would round a low-precision d_weight once a chunk. Tokens are tiled only where
one tile of logits would outgrow the budget, and then d_weight is summed over the tiles in float32. Letters: n
tokens of a tile, v rows of a chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ReduceOp

from .head import LOWEST_LOGIT, Head

# Bytes of one [n, v] tile of logits. The backward pass holds two such tiles, three under a softcap, besides a
# copy in the projection's dtype: below 1 GiB in all. Smaller tiles give slower products.
TILE_BUDGET_BYTES = 256 * 2**20
# Rows below which tokens are tiled instead: narrower products do not run at full rate.
PREFERRED_CHUNK = 8192


def chunked_logprobs(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V/P, H]
    target: Tensor,  # [N]
    head: Head,
    entropy: bool,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor | None]:  # [N], [N]
    grid = _grid(hidden.shape[0], head, chunk_size)
    logprobs, entropies = _ChunkedLogprobs.apply(hidden, weight, target, head, grid, entropy)  # pyright: ignore
    return logprobs, entropies


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grid:
    num_rows: int
    num_tokens: int
    chunk_size: int
    tile_size: int

    def chunks(self) -> Iterator[slice]:
        """Slices of this shard's rows."""
        for start in range(0, self.num_rows, self.chunk_size):
            yield slice(start, min(start + self.chunk_size, self.num_rows))

    def tiles(self) -> Iterator[slice]:
        """Slices of the tokens."""
        for start in range(0, self.num_tokens, self.tile_size):
            yield slice(start, min(start + self.tile_size, self.num_tokens))


def _grid(num_tokens: int, head: Head, chunk_size: int | None) -> _Grid:
    budget = TILE_BUDGET_BYTES // head.result_dtype.itemsize  # logits a tile
    if chunk_size is None:
        # At most half the vocabulary, so that [N, V] is never held, however small the problem is.
        chunk_size = min(max(budget // max(num_tokens, 1), PREFERRED_CHUNK), -(-head.num_rows // 2))
        if chunk_size > 128:
            chunk_size -= chunk_size % 128  # GEMMs like aligned rows
    chunk_size = max(min(chunk_size, head.num_rows), 1)
    tile_size = max(budget // chunk_size, 1)
    return _Grid(num_rows=head.num_rows, num_tokens=num_tokens, chunk_size=chunk_size, tile_size=tile_size)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, target: Tensor, head: Head, grid: _Grid, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        softmax = _RunningSoftmax.of_nothing(target, head, entropy)
        operand = _operand(hidden, head)
        for chunk in grid.chunks():
            rows = _operand(weight[chunk], head)
            for tile in grid.tiles():
                softmax.add(_logits(operand[tile], rows, head), chunk, tile)
        softmax.reduce_over_shards()

        ignored = head.ignored(target)
        log_sum_exp = softmax.sum_exp.log()
        logprobs = softmax.target_logit - log_sum_exp
        logprobs.masked_fill_(ignored | head.out_of_vocabulary(target), 0.0)
        entropies = mean_logit = None
        if softmax.sum_exp_logit is not None:
            mean_logit = softmax.sum_exp_logit / softmax.sum_exp
            entropies = (log_sum_exp - mean_logit).masked_fill_(ignored, 0.0)
        # Kept only where a gradient is wanted: without one autograd drops the context.
        ctx.save_for_backward(hidden, weight, target, softmax.maximum, softmax.sum_exp, mean_logit)
        ctx.head, ctx.grid = head, grid
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs: Tensor | None, grad_entropies: Tensor | None):
        head: Head = ctx.head
        hidden, weight, target, maximum, sum_exp, mean_logit = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        gradient = _LogitGradient.of(
            grad_logprobs, grad_entropies, target, maximum, sum_exp, mean_logit, head
        )
        # Wide, since it is summed over the chunks. With a vocabulary group it is this shard's partial sum.
        d_hidden = torch.zeros_like(hidden, dtype=head.result_dtype) if needs_hidden else None
        d_weight = torch.zeros_like(weight) if needs_weight else None  # padded rows stay 0
        with torch.autocast(hidden.device.type, enabled=False):
            operand = _operand(hidden, head)
            for chunk in ctx.grid.chunks():
                rows = _operand(weight[chunk], head)
                d_rows = None  # [v, H]
                for tile in ctx.grid.tiles():
                    d_logits = gradient.of_logits(_logits(operand[tile], rows, head), chunk, tile)
                    d_logits = d_logits.to(operand.dtype)
                    if d_hidden is not None:
                        d_hidden[tile] += _product(d_logits, rows, head)
                    if d_weight is not None:
                        d_tile = _product(d_logits.t(), operand[tile], head)
                        d_rows = d_tile if d_rows is None else d_rows.add_(d_tile)
                if d_weight is not None and d_rows is not None:
                    d_weight[chunk] = d_rows
        return None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, None, None, None, None


@dataclass(slots=True, kw_only=True)
class _RunningSoftmax:
    """Each token's softmax over the chunks seen so far, its sums measured from the running maximum.

    Measured so, the largest logit adds exactly 1 to sum_exp: no log-prob exceeds 0, and the entropy
    log(sum_exp) - sum_exp_logit / sum_exp keeps its digits where logits are large.
    """

    head: Head
    target: Tensor  # [N]
    maximum: Tensor  # [N] m, the largest logit
    sum_exp: Tensor  # [N] sum of exp(z - m)
    sum_exp_logit: Tensor | None  # [N] sum of exp(z - m) * (z - m), where the entropy is asked for
    target_logit: Tensor  # [N] the target's z where this shard has it; z - m on every shard once reduced

    @classmethod
    def of_nothing(cls, target: Tensor, head: Head, entropy: bool) -> "_RunningSoftmax":
        zeros = torch.zeros(target.shape, dtype=head.result_dtype, device=target.device)
        return cls(
            head=head,
            target=target,
            maximum=torch.full_like(zeros, LOWEST_LOGIT),
            sum_exp=zeros,
            sum_exp_logit=zeros.clone() if entropy else None,
            target_logit=zeros.clone(),
        )

    def add(self, logits: Tensor, chunk: slice, tile: slice) -> None:
        """Take in the logits [n, v] of one chunk and one tile; they are overwritten."""
        column, here = _target_column(self.target[tile], chunk, self.head)
        picked = logits.gather(1, column).squeeze(1)
        self.target_logit[tile] = torch.where(here, picked, self.target_logit[tile])

        self._raise_maximum(logits.amax(1), tile)
        shifted = logits.sub_(self.maximum[tile, None])
        if self.sum_exp_logit is None:
            self.sum_exp[tile] += shifted.exp_().sum(1)
        else:
            exponentials = shifted.exp()
            self.sum_exp[tile] += exponentials.sum(1)
            self.sum_exp_logit[tile] += exponentials.mul_(shifted).sum(1)

    def _raise_maximum(self, candidate: Tensor, tile: slice) -> None:
        """Measure the sums from the larger of the old maximum and the candidate [n]."""
        maximum = torch.maximum(self.maximum[tile], candidate)
        drop = self.maximum[tile] - maximum  # [n], 0 or less
        self.maximum[tile] = maximum
        if self.sum_exp_logit is not None:
            self.sum_exp_logit[tile] += self.sum_exp[tile] * drop
            self.sum_exp_logit[tile] *= drop.exp()
        self.sum_exp[tile] *= drop.exp()

    def reduce_over_shards(self) -> None:
        """One MAX and one SUM; afterwards every rank holds the statistics of the whole vocabulary."""
        self._raise_maximum(self.head.all_reduce(self.maximum.clone(), ReduceOp.MAX), slice(None))
        _, here = _target_column(self.target, slice(0, self.head.num_rows), self.head)
        self.target_logit = (self.target_logit - self.maximum).masked_fill_(~here, 0.0)
        parts = [self.sum_exp, self.target_logit]
        if self.sum_exp_logit is not None:
            parts.append(self.sum_exp_logit)
        sums = self.head.all_reduce(torch.stack(parts), ReduceOp.SUM)
        self.sum_exp, self.target_logit = sums[0], sums[1]
        if self.sum_exp_logit is not None:
            self.sum_exp_logit = sums[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class _LogitGradient:
    """The gradient of the projection's output, given those of the log-probs (g) and of the entropies (h).

    With y = z - m, p = exp(y) / sum_exp and E = sum(p * y), dz = g * (onehot - p) + h * p * (E - y).
    Collected per token that is exp(y) * (constant + linear * y) + onehot. The factor logit_scale /
    temperature between the projection's output and z is in all three; the softcap's slope differs by logit
    and is applied last.
    """

    head: Head
    target: Tensor  # [N]
    maximum: Tensor  # [N] m
    constant: Tensor  # [N]
    linear: Tensor | None  # [N], where the entropies have a gradient
    onehot: Tensor  # [N]

    @classmethod
    def of(
        cls,
        grad_logprobs: Tensor | None,  # [N] g
        grad_entropies: Tensor | None,  # [N] h
        target: Tensor,
        maximum: Tensor,
        sum_exp: Tensor,
        mean_logit: Tensor | None,  # [N] E
        head: Head,
    ) -> "_LogitGradient":
        ignored = head.ignored(target)
        factor = head.logit_scale / head.temperature
        g = torch.zeros_like(maximum)
        if grad_logprobs is not None:
            g = grad_logprobs.masked_fill(ignored, 0.0) * factor
        constant, linear = -g / sum_exp, None
        if grad_entropies is not None and mean_logit is not None:
            h = grad_entropies.masked_fill(ignored, 0.0) * factor / sum_exp
            constant, linear = constant + h * mean_logit, -h
        return cls(head=head, target=target, maximum=maximum, constant=constant, linear=linear, onehot=g)

    def of_logits(self, logits: Tensor, chunk: slice, tile: slice) -> Tensor:
        """The gradient [n, v] where the logits [n, v] are z; the logits are overwritten."""
        softcap = self.head.logit_softcap
        slope = None  # of c * tanh(u / c): 1 - tanh(u / c)^2, where z = c * tanh(u / c) / temperature
        if softcap is not None:
            slope = (logits * (self.head.temperature / softcap)).square_().neg_().add_(1.0)
        shifted = logits.sub_(self.maximum[tile, None])
        if self.linear is None:
            gradient = shifted.exp_().mul_(self.constant[tile, None])
        else:
            gradient = shifted.exp()
            gradient.mul_(shifted.mul_(self.linear[tile, None]).add_(self.constant[tile, None]))
        column, here = _target_column(self.target[tile], chunk, self.head)
        gradient.scatter_add_(1, column, self.onehot[tile].masked_fill(~here, 0.0)[:, None])
        return gradient if slope is None else gradient.mul_(slope)


def _target_column(target: Tensor, chunk: slice, head: Head) -> tuple[Tensor, Tensor]:  # [n, 1], [n]
    """The target's column in a chunk of this shard's rows, and whether it is there (column 0 where not)."""
    column = target - (head.first_row + chunk.start)
    here = (column >= 0) & (column < chunk.stop - chunk.start)
    return column.masked_fill(~here, 0)[:, None], here


def _operand(values: Tensor, head: Head) -> Tensor:
    """Rounded to the projection's dtype, in the dtype its products take.

    On a CPU there is no bfloat16 product with float32 output, but the product of the same numbers held in
    float32 is the same thing: bfloat16 factors multiply exactly in float32.
    """
    values = values.to(head.projection_dtype)
    return values if values.is_cuda else values.to(head.result_dtype)


def _product(left: Tensor, right: Tensor, head: Head) -> Tensor:
    if left.dtype == head.result_dtype:
        return left @ right
    return torch.mm(left, right, out_dtype=head.result_dtype)


def _logits(hidden: Tensor, rows: Tensor, head: Head) -> Tensor:  # [n, H], [v, H] -> [n, v]
    logits = _product(hidden, rows.t(), head)
    if head.logit_scale != 1.0:
        logits.mul_(head.logit_scale)
    if head.logit_softcap is not None:
        logits.div_(head.logit_softcap).tanh_().mul_(head.logit_softcap)
    if head.temperature != 1.0:
        logits.div_(head.temperature)
    return logits
