"""Collectives along any dimension of a tensor, for torch 2.11 to 2.13, which name them differently."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(shard: Tensor, dim: int, group: ProcessGroup) -> Tensor:  # [..., n, ...] -> [..., P * n, ...]
    """Concatenate the shards of all ranks of the group along `dim`, in rank order."""
    size, dim = group.size(), dim % shard.dim()
    by_rank = shard.new_empty(size * shard.shape[0], *shard.shape[1:])  # concatenated along dimension 0
    _all_gather(by_rank, shard.contiguous(), group=group)
    return by_rank.unflatten(0, (size, shard.shape[0])).movedim(0, dim).flatten(dim, dim + 1)


def reduce_scatter(
    full: Tensor, dim: int, group: ProcessGroup
) -> Tensor:  # [..., P * n, ...] -> [..., n, ...]
    """Return this rank's shard, along `dim`, of the sum over all ranks of the group."""
    size, dim = group.size(), dim % full.dim()
    by_rank = full.unflatten(dim, (size, full.shape[dim] // size)).movedim(dim, 0).contiguous()
    shard = by_rank.new_empty(by_rank.shape[1:])
    _reduce_scatter(shard, by_rank.flatten(0, 1), group=group)
    return shard


def all_reduce_sum(partial: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over all ranks of the group."""
    total = partial.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
