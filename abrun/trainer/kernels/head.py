"""The arithmetic of an LM head: its settings, matmuls, softmax sums and gradients of a tile of logits.

`linear` loops over tiles; `triton_tiles` has the same operations as kernels. Letters: n tokens of a tile, v
rows of a chunk of the vocabulary.
"""

from dataclasses import dataclass, fields
from typing import Any, Self, TypedDict

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
    """The settings of a head: a logit is z = outer * u, u the projection's output or tanh(inner * output).

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
    def forward(ctx, lhs: Tensor, rhs: Tensor, dtype: torch.dtype) -> Tensor:  # [N, H], [V, H] -> [N, V]
        ctx.save_for_backward(lhs, rhs)
        return matmul(lhs, rhs.t(), dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        lhs, rhs = ctx.saved_tensors
        grad = grad.to(lhs.dtype)
        d_lhs = grad @ rhs if ctx.needs_input_grad[0] else None
        d_rhs = grad.t() @ lhs if ctx.needs_input_grad[1] else None
        return d_lhs, d_rhs, None


@dataclass(frozen=True, slots=True)
class _ByToken:
    """Tensors [N] or None, of which `[tile]` selects some of the tokens."""

    def __getitem__(self, tile: slice) -> Self:
        tensors: dict[str, Tensor | None] = {field.name: getattr(self, field.name) for field in fields(self)}
        selected = {name: None if tensor is None else tensor[tile] for name, tensor in tensors.items()}
        return type(self)(**selected)


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets(_ByToken):
    """The targets of N tokens."""

    ids: Tensor  # [N] int64
    ignored: Tensor  # [N] bool
    has_no_logprob: Tensor  # [N] bool: ignored or outside the vocabulary, so the log-prob is 0

    @classmethod
    def from_ids(cls, ids: Tensor, head: ResolvedHead) -> "Targets":
        ignored = head.ignored(ids)
        return cls(ids=ids, ignored=ignored, has_no_logprob=ignored | head.is_out_of_vocabulary(ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxSums(_ByToken):
    """Each token's online softmax over the logits added so far, relative to the running maximum.

    With m the largest u, y = outer * (u - m), and s and x the sums of exp(y) and exp(y) * y over the rows,

        log-prob of the target = y_target - log(s)
        entropy = log(s) - x / s.

    The largest logit adds exactly 1 to s. So no log-prob exceeds 0, and the entropy keeps its precision for
    large logits. When m rises, all y fall by the same amount (see `raise_maximum`), so logits can be added in
    any number of parts and shards.

    u and outer are defined in `ResolvedHead`. All tensors are updated in place, and `sums[tile]` is a view of
    some of the tokens.
    """

    maximum: Tensor  # [N] m, the largest u
    sum_exp: Tensor  # [N] sum of exp(y), where y = outer * (u - m)
    sum_exp_logit: Tensor | None  # [N] sum of exp(y) * y; None without entropy
    target_logit: Tensor  # [N] the target's u if this shard has it; after the reduction its y, on every shard

    @classmethod
    def empty(cls, target: Tensor, head: ResolvedHead, *, entropy: bool) -> "SoftmaxSums":
        zeros = torch.zeros(target.shape, dtype=head.result_dtype, device=target.device)
        return cls(
            maximum=torch.full_like(zeros, LOWEST_LOGIT),
            sum_exp=zeros,
            sum_exp_logit=zeros.clone() if entropy else None,
            target_logit=zeros.clone(),
        )

    def raise_maximum(self, candidate: Tensor, head: ResolvedHead) -> None:
        """Rescale the sums to the larger of the old maximum and the candidate [N].

        Every y becomes y + drop, so s becomes exp(drop) * s, and x becomes exp(drop) * (x + drop * s).
        """
        raised = torch.maximum(self.maximum, candidate)
        drop = (self.maximum - raised).mul_(head.outer).clamp_(min=LOWEST_LOGIT)  # [N], 0 or less
        self.maximum.copy_(raised)
        if self.sum_exp_logit is not None:
            self.sum_exp_logit.add_(self.sum_exp * drop).mul_(drop.exp())
        self.sum_exp.mul_(drop.exp())

    def reduce_over_shards(self, targets: Targets, head: ResolvedHead) -> None:
        """Reduce over the vocabulary shards, by one MAX and one SUM; every rank then has the full sums."""
        if head.group is not None:
            self.raise_maximum(head.all_reduce(self.maximum.clone(), ReduceOp.MAX), head)
        self.target_logit.sub_(self.maximum).mul_(head.outer).clamp_(max=0)
        if head.group is None:
            return
        row = targets.ids - head.first_row
        self.target_logit.masked_fill_((row < 0) | (row >= head.num_rows), 0.0)
        local_sums = [self.sum_exp, self.target_logit]
        if self.sum_exp_logit is not None:
            local_sums.append(self.sum_exp_logit)
        for local_sum, total in zip(
            local_sums, head.all_reduce(torch.stack(local_sums), ReduceOp.SUM), strict=True
        ):
            local_sum.copy_(total)

    def results(self, targets: Targets) -> tuple[Tensor, Tensor | None]:
        """Return log-probs [N] and entropies [N], from reduced sums."""
        log_sum_exp = self.sum_exp.log()
        logprobs = (self.target_logit - log_sum_exp).masked_fill_(targets.has_no_logprob, 0.0)
        if self.sum_exp_logit is None:
            return logprobs, None
        entropies = log_sum_exp.sub_(self.sum_exp_logit / self.sum_exp)
        return logprobs, entropies.masked_fill_(targets.ignored, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitGradient(_ByToken):
    """Coefficients of the projection output's gradient, from those of log-probs (g) and entropies (h).

    With y, s and x as in `SoftmaxSums`, p = exp(y) / s, E = x / s, and t 1 at the target, else 0,

        d log-prob / dz = t - p,    d entropy / dz = p * (E - y),
        dz = g * (t - p) + h * p * (E - y) = onehot * t - exp(y) * (constant + linear * y),
        onehot = g,    constant = (g - h * E) / s,    linear = h / s.

    So a logit's gradient follows from the logit and three numbers of its token. All three include the factor
    logit_scale / temperature between the projection's output and z. The softcap's slope differs by logit and
    is applied last.
    """

    maximum: Tensor  # [N] m, of u
    constant: Tensor  # [N]
    linear: Tensor | None  # [N]; None if the entropies have no gradient
    onehot: Tensor  # [N]
    target_logit: Tensor  # [N] the target's y

    @classmethod
    def from_sums(
        cls,
        sums: SoftmaxSums,
        grad_logprobs: Tensor | None,  # [N] g
        grad_entropies: Tensor | None,  # [N] h
        targets: Targets,
        head: ResolvedHead,
    ) -> "LogitGradient":
        factor = head.logit_scale / head.temperature

        def scale_by_logit_factor(gradient: Tensor) -> Tensor:
            # Filled, not multiplied by 0, because a loss of ignored tokens can be NaN.
            gradient = gradient.masked_fill(targets.ignored, 0.0)
            return gradient if factor == 1 else gradient.mul_(factor)

        onehot = (
            torch.zeros_like(sums.maximum) if grad_logprobs is None else scale_by_logit_factor(grad_logprobs)
        )
        constant, linear = onehot, None
        if grad_entropies is not None and sums.sum_exp_logit is not None:
            h = scale_by_logit_factor(grad_entropies)
            constant = torch.addcmul(onehot, h, sums.sum_exp_logit / sums.sum_exp, value=-1)
            linear = h.div_(sums.sum_exp)
        return cls(
            maximum=sums.maximum,
            constant=constant / sums.sum_exp,
            linear=linear,
            onehot=onehot.contiguous(),
            target_logit=sums.target_logit,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Bytes held at once besides inputs and gradients: per token of a tile, row of a chunk, and logit."""

    token: float = 0.0
    row: float = 0.0
    logit: float = 0.0

    def __add__(self, addend: "Cost") -> "Cost":
        return Cost(
            token=self.token + addend.token, row=self.row + addend.row, logit=self.logit + addend.logit
        )


class TorchTiles:
    """Tiles of logits in plain PyTorch, on any device: `impl: chunked`. See linear.Tiles."""

    def __init__(self, head: ResolvedHead) -> None:
        self._head = head
        wide = head.result_dtype.itemsize
        copy = head.projection_dtype.itemsize if head.projection_dtype != head.result_dtype else 0
        softcap_slope = wide if head.logit_softcap is not None else 0
        self.sums_cost = Cost(logit=2 * wide)
        self.gradient_cost = Cost(logit=2 * wide + softcap_slope + copy)
        self.saved_cost = Cost(logit=3 * wide + softcap_slope + copy)

    def add(
        self,
        sums: SoftmaxSums,
        hidden: Tensor,
        rows: Tensor,
        target: Tensor,
        first_row: int,
        *,
        keep: bool = False,
    ) -> Tensor | None:
        u = self._compute_unscaled_logits(hidden, rows)
        column, is_local = _locate_target(target, first_row, len(rows))
        target_logits = u.gather(1, column).squeeze(1)
        sums.target_logit.copy_(torch.where(is_local, target_logits, sums.target_logit))
        sums.raise_maximum(u.amax(1), self._head)
        shifted = self._scaled(u - sums.maximum[:, None] if keep else u.sub_(sums.maximum[:, None]))
        if sums.sum_exp_logit is None:
            sums.sum_exp.add_(shifted.exp_().sum(1))
        else:
            exponentials = shifted.exp()
            sums.sum_exp.add_(exponentials.sum(1))
            shifted.clamp_(min=LOWEST_LOGIT)  # 0 times -inf is no number
            sums.sum_exp_logit.add_(exponentials.mul_(shifted).sum(1))
        return u if keep else None

    def gradient(
        self, gradient: LogitGradient, hidden: Tensor, rows: Tensor, target: Tensor, first_row: int
    ) -> Tensor:
        return self.gradient_from_saved(
            gradient, self._compute_unscaled_logits(hidden, rows), len(rows), target, first_row
        )

    def gradient_from_saved(
        self, gradient: LogitGradient, saved: Tensor, num_rows: int, target: Tensor, first_row: int
    ) -> Tensor:
        softcap_slope = None  # derivative of tanh: 1 - tanh^2
        if self._head.logit_softcap is not None:
            softcap_slope = saved.square().neg_().add_(1.0)
        shifted = self._scaled(saved.sub_(gradient.maximum[:, None]))
        if gradient.linear is None:
            d_logits = shifted.exp_().mul_(-gradient.constant[:, None])
        else:
            d_logits = shifted.exp()
            shifted.clamp_(min=LOWEST_LOGIT)  # 0 times -inf is no number
            d_logits.mul_(shifted.mul_(-gradient.linear[:, None]).sub_(gradient.constant[:, None]))
        column, is_local = _locate_target(target, first_row, num_rows)
        d_logits.scatter_add_(1, column, gradient.onehot.masked_fill(~is_local, 0.0)[:, None])
        if softcap_slope is not None:
            d_logits.mul_(softcap_slope)
        return d_logits.to(self._head.projection_dtype)

    def scale(self, values: Tensor, factor: Tensor) -> Tensor:
        return values.mul_(factor)

    def _compute_unscaled_logits(self, hidden: Tensor, rows: Tensor) -> Tensor:  # [n, H], [v, H] -> [n, v]
        output = matmul(hidden, rows.t(), self._head.logits_dtype).to(self._head.result_dtype)
        return output if self._head.logit_softcap is None else output.mul_(self._head.inner).tanh_()

    def _scaled(self, differences: Tensor) -> Tensor:
        return differences if self._head.outer == 1.0 else differences.mul_(self._head.outer)


def _locate_target(target: Tensor, first_row: int, num_rows: int) -> tuple[Tensor, Tensor]:  # [n, 1], [n]
    """Return the target's column among these rows, 0 if it is not there, and whether it is there."""
    column = target - first_row
    is_local = (column >= 0) & (column < num_rows)
    return column.masked_fill(~is_local, 0)[:, None], is_local
