"""What a log-prob is in one call: its settings, checked, and this rank's share of the vocabulary."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

# The maximum over no logits at all. Finite, so that a shard of mere padding makes no inf - inf and no 0 *
# inf.
LOWEST_LOGIT = -1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    projection_dtype: torch.dtype
    result_dtype: torch.dtype  # float64 where the projection is, float32 otherwise
    temperature: float
    logit_scale: float
    logit_softcap: float | None
    ignore_index: int
    vocab_size: int  # over all shards, without padding
    first_row: int  # token id of this shard's row 0
    num_rows: int  # rows of this shard that are vocabulary; those after are padding
    group: ProcessGroup | None

    def ignored(self, target: Tensor) -> Tensor:
        return target == self.ignore_index

    def out_of_vocabulary(self, target: Tensor) -> Tensor:
        """Targets that no shard has. Every rank knows the vocabulary's size, so ranks agree without
        asking."""
        return (target < 0) | (target >= self.vocab_size)

    def all_reduce(self, values: Tensor, operation: ReduceOp.RedOpType) -> Tensor:
        """In place over the vocabulary shards; nothing to do where this rank has the whole vocabulary."""
        if self.group is not None:
            dist.all_reduce(values, op=operation, group=self.group)
        return values


def resolve_head(
    hidden: Tensor,  # [..., H]
    weight: Tensor,  # [V/P, H]
    target: Tensor,  # [...]
    *,
    temperature: float,
    logit_scale: float,
    logit_softcap: float | None,
    ignore_index: int,
    vocab_size: int | None,
    head_dtype: torch.dtype | None,
    group: ProcessGroup | None,
) -> Head:
    """Check that the arguments fit together, and find this rank's rows among the shards."""
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
    num_shards = 1 if group is None else dist.get_world_size(group)
    shard = 0 if group is None else dist.get_rank(group)
    shard_rows = weight.shape[0]
    all_rows = num_shards * shard_rows
    true_size = all_rows if vocab_size is None else vocab_size
    if not 0 < true_size <= all_rows:
        raise ValueError(
            f"vocab_size: got {true_size}; it is from 1 to the weight's {all_rows} rows over all shards"
        )
    first_row = shard * shard_rows
    projection_dtype = head_dtype or weight.dtype
    return Head(
        projection_dtype=projection_dtype,
        result_dtype=torch.float64 if projection_dtype == torch.float64 else torch.float32,
        temperature=temperature,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
        ignore_index=ignore_index,
        vocab_size=true_size,
        first_row=first_row,
        num_rows=min(max(true_size - first_row, 0), shard_rows),
        group=group,
    )
