"""The validated settings of one log-prob call, this rank's vocabulary shard, and the projection onto it."""

from dataclasses import dataclass
from typing import Any, TypedDict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

# The maximum over no logits, and the lower bound of logit differences. Finite, so that a shard of padding
# causes neither inf - inf nor 0 * inf.
LOWEST_LOGIT = -1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedHead:
    """The settings of a head: a logit is z = outer * u, with u the projection's output or tanh(inner *
    output).

    The tanh applies with a softcap. Maxima are of u, and only differences from the maximum are scaled: at a
    low temperature, z is so large that float32 could not represent the differences.
    """

    projection_dtype: torch.dtype
    logits_dtype: torch.dtype  # the projection's output is rounded to it: projection_dtype or result_dtype
    result_dtype: torch.dtype  # float64 for a float64 projection, else float32
    temperature: float
    logit_scale: float
    logit_softcap: float | None
    ignore_index: int
    vocab_size: int  # over all shards, without padding
    first_row: int  # token id of this shard's row 0
    num_rows: int  # rows of this shard without padding
    group: ProcessGroup | None

    @property
    def inner(self) -> float:
        return 1.0 if self.logit_softcap is None else self.logit_scale / self.logit_softcap

    @property
    def outer(self) -> float:
        return (self.logit_scale if self.logit_softcap is None else self.logit_softcap) / self.temperature

    def ignored(self, target: Tensor) -> Tensor:
        return target == self.ignore_index

    def is_out_of_vocabulary(self, target: Tensor) -> Tensor:
        """Return a mask of targets that no shard has, the same on every rank without communication."""
        return (target < 0) | (target >= self.vocab_size)

    def all_reduce(self, values: Tensor, operation: ReduceOp.RedOpType) -> Tensor:
        """Reduce in place over the vocabulary shards; does nothing if this rank has the whole vocabulary."""
        if self.group is not None:
            dist.all_reduce(values, op=operation, group=self.group)
        return values


class HeadOptions(TypedDict, total=False):
    """Options of a head, documented at `linear_logprobs`; `resolve_head` has their defaults."""

    temperature: float
    logit_scale: float
    logit_softcap: float | None
    ignore_index: int
    vocab_size: int | None
    head_dtype: torch.dtype | None
    logits_dtype: torch.dtype | None
    group: ProcessGroup | None


def resolve_head(
    hidden: Tensor,  # [..., H]
    weight: Tensor,  # [V/P, H]
    target: Tensor,  # [...]
    *,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    head_dtype: torch.dtype | None = None,
    logits_dtype: torch.dtype | None = None,
    group: ProcessGroup | None = None,
) -> ResolvedHead:
    """Check that the arguments fit together, and determine this rank's vocabulary rows.

    Collective over the group, if there is one. Sizes that must agree between ranks are compared first, so
    that later errors and collectives are the same on all ranks.
    """
    num_shards = 1 if group is None else dist.get_world_size(group)
    if group is not None and num_shards > 1:
        _check_same_on_ranks(weight, target, vocab_size, group)
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden, weight: got {list(hidden.shape)} and {list(weight.shape)}; need [..., H] and [V, H]"
        )
    if target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"target: got shape {list(target.shape)}; need {list(hidden.shape[:-1])}, hidden's without H"
        )
    if target.dtype != torch.int64:
        raise ValueError(f"target: got {target.dtype}; need torch.int64")
    if not temperature > 0:
        raise ValueError(f"temperature: got {temperature}; need a value greater than 0")
    if not logit_scale > 0:
        raise ValueError(f"logit_scale: got {logit_scale}; need a value greater than 0")
    if logit_softcap is not None and not logit_softcap > 0:
        raise ValueError(
            f"logit_softcap: got {logit_softcap}; need a value greater than 0, or None for no cap"
        )
    shard = 0 if group is None else dist.get_rank(group)
    shard_rows = weight.shape[0]
    total_rows = num_shards * shard_rows
    true_size = total_rows if vocab_size is None else vocab_size
    if not 0 < true_size <= total_rows:
        raise ValueError(
            f"vocab_size: got {true_size}; need 1 to {total_rows}, the weight's rows over all shards"
        )
    first_row = shard * shard_rows
    return ResolvedHead(
        **_resolve_dtypes(head_dtype or weight.dtype, logits_dtype),
        temperature=temperature,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
        ignore_index=ignore_index,
        vocab_size=true_size,
        first_row=first_row,
        num_rows=min(max(true_size - first_row, 0), shard_rows),
        group=group,
    )


def _resolve_dtypes(projection: torch.dtype, logits_dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    if not projection.is_floating_point:
        raise ValueError(
            f"head_dtype: got {projection}; use a floating-point dtype, or None for the weight's"
        )
    result = torch.float64 if projection == torch.float64 else torch.float32
    logits = logits_dtype or projection
    if logits not in (projection, result):
        allowed = " or ".join(dict.fromkeys([str(projection), str(result)]))
        raise ValueError(f"logits_dtype: got {logits} with a projection in {projection}; allowed: {allowed}")
    return {"projection_dtype": projection, "logits_dtype": logits, "result_dtype": result}


_SAME_ON_RANKS = (  # argument, unit, requirement
    ("weight", " rows", "equal, consecutive shards in rank order: pad the last and pass vocab_size"),
    ("weight", " as hidden size", "the same on every rank"),
    ("target", " tokens", "the same tokens on every rank"),
    ("vocab_size", "", "the same on every rank (0 stands for None)"),
)


def _check_same_on_ranks(weight: Tensor, target: Tensor, vocab_size: int | None, group: ProcessGroup) -> None:
    """Raise the same ValueError on every rank if sizes differ between ranks.

    Needs a small all_gather and a host sync in every call. A cache of checked sizes could deadlock: a rank
    with new sizes would wait for others that skip the check.
    """
    rows, hidden_size = weight.shape if weight.dim() == 2 else (0, 0)
    local_sizes = torch.tensor([rows, hidden_size, target.numel(), vocab_size or 0], device=weight.device)
    sizes_by_rank = [torch.empty_like(local_sizes) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes_by_rank, local_sizes, group=group)
    for sizes, (name, unit, need) in zip(
        torch.stack(sizes_by_rank, dim=1).tolist(), _SAME_ON_RANKS, strict=True
    ):
        if len(set(sizes)) > 1:
            got = ", ".join(map(str, sizes)) + unit
            raise ValueError(f"{name}: got {got} on the ranks of the vocabulary group; need {need}")


# Matmuls that accumulate in a wider dtype than that of their operands.


def matmul(lhs: Tensor, rhs: Tensor, dtype: torch.dtype) -> Tensor:
    """Return lhs @ rhs, accumulated in `dtype`: the operands' or a wider one."""
    if lhs.dtype == rhs.dtype == dtype:
        return lhs @ rhs
    if lhs.is_cuda:
        return torch.mm(lhs, rhs, out_dtype=dtype)
    # On a CPU, a float32 matmul of the converted operands is equivalent, because bfloat16 products are exact
    # in float32.
    return lhs.to(dtype) @ rhs.to(dtype)


def add_matmul(out: Tensor, lhs: Tensor, rhs: Tensor, *, wide: torch.dtype, overwrite: bool = False) -> None:
    """Compute out += lhs @ rhs, or out = lhs @ rhs, summed in `wide` and rounded once to out's dtype."""
    if overwrite and lhs.dtype == rhs.dtype == out.dtype:
        torch.mm(lhs, rhs, out=out)
    elif lhs.is_cuda and out.dtype in (lhs.dtype, wide):
        # Passed only if it differs, because torch accepts it for 16-bit operands alone.
        options: dict[str, Any] = {} if out.dtype == lhs.dtype else {"out_dtype": out.dtype}
        if overwrite:
            torch.mm(lhs, rhs, **options, out=out)
        else:
            torch.addmm(out, lhs, rhs, **options, out=out)
    elif overwrite:
        out.copy_(matmul(lhs, rhs, wide))
    else:
        out.add_(matmul(lhs, rhs, wide))


def project(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:  # [..., H], [V, H] -> [..., V]
    """Return hidden @ weight.T, rounded to `dtype`: the operands' or a wider one. Differentiable."""
    if dtype == weight.dtype:
        return F.linear(hidden, weight)
    rows: Any = _WideMatmul.apply(hidden.flatten(0, -2), weight, dtype)
    return rows.unflatten(0, hidden.shape[:-1])


class _WideMatmul(torch.autograd.Function):
    """lhs @ rhs.T in a wider dtype than its operands. Gradients are matmuls in the operands' dtype."""

    @staticmethod
    def forward(ctx, lhs: Tensor, rhs: Tensor, dtype: torch.dtype) -> Tensor:  # [n, k], [m, k] -> [n, m]
        ctx.save_for_backward(lhs, rhs)
        return matmul(lhs, rhs.t(), dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        lhs, rhs = ctx.saved_tensors
        grad = grad.to(lhs.dtype)
        d_lhs = grad @ rhs if ctx.needs_input_grad[0] else None
        d_rhs = grad.t() @ lhs if ctx.needs_input_grad[1] else None
        return d_lhs, d_rhs, None
