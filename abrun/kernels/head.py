"""What a log-prob is in one call: its settings, checked, and this rank's share of the vocabulary."""

from dataclasses import dataclass
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

# The maximum over no logits at all, and the least difference of two. Finite, so that a shard of mere padding
# makes no inf - inf and no 0 * inf.
LOWEST_LOGIT = -1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedHead:
    """A logit is z = outer * u, where u is the projection's output or, under a softcap, tanh(inner * output).

    Logits are compared as u, and only their differences from the largest are scaled: at a low temperature z
    itself is so large that float32 has no digits left for the differences.
    """

    projection_dtype: torch.dtype
    logits_dtype: torch.dtype  # to which the projection's output is rounded: the projection's or the result's
    result_dtype: torch.dtype  # float64 where the projection is, float32 otherwise
    temperature: float
    logit_scale: float
    logit_softcap: float | None
    ignore_index: int
    vocab_size: int  # over all shards, without padding
    first_row: int  # token id of this shard's row 0
    num_rows: int  # rows of this shard that are vocabulary; those after are padding
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
        """Targets that no shard has. Every rank knows the vocabulary's size, so ranks agree without
        asking."""
        return (target < 0) | (target >= self.vocab_size)

    def all_reduce(self, values: Tensor, operation: ReduceOp.RedOpType) -> Tensor:
        """In place over the vocabulary shards; nothing to do where this rank has the whole vocabulary."""
        if self.group is not None:
            dist.all_reduce(values, op=operation, group=self.group)
        return values


class HeadOptions(TypedDict, total=False):
    """Options of a head: `linear_logprobs` says what they mean, and `resolve_head` has their defaults."""

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
    """Check that the arguments fit together, and find this rank's rows among the shards.

    Collective over the group, if there is one. What ranks must have alike is compared first, so that no later
    refusal, or a collective of another size, is that of some ranks alone.
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
        raise ValueError(f"target: got {target.dtype}; token ids are torch.int64")
    if not temperature > 0:
        raise ValueError(f"temperature: got {temperature}; it is greater than 0")
    if not logit_scale > 0:
        raise ValueError(f"logit_scale: got {logit_scale}; it is greater than 0")
    if logit_softcap is not None and not logit_softcap > 0:
        raise ValueError(f"logit_softcap: got {logit_softcap}; it is greater than 0, or None for no cap")
    shard = 0 if group is None else dist.get_rank(group)
    shard_rows = weight.shape[0]
    total_rows = num_shards * shard_rows
    true_size = total_rows if vocab_size is None else vocab_size
    if not 0 < true_size <= total_rows:
        raise ValueError(
            f"vocab_size: got {true_size}; it is from 1 to the weight's {total_rows} rows over all shards"
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


_SAME_ON_RANKS = (  # what it is of, its unit, what is allowed
    ("weight", " rows", "equal, consecutive shards in rank order: pad the last and give vocab_size"),
    ("weight", " as hidden size", "the same on every rank"),
    ("target", " tokens", "the same tokens on every rank"),
    ("vocab_size", "", "the same on every rank (0 stands for None)"),
)


def _check_same_on_ranks(weight: Tensor, target: Tensor, vocab_size: int | None, group: ProcessGroup) -> None:
    """Raises the same ValueError on every rank where one has other sizes than the rest.

    One small all_gather, whose result the host waits for. Remembering what was once found alike would not do:
    a rank that asks again would wait for the others, which do not.
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
