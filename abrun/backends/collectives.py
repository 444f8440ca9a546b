"""Collectives along any dimension of a tensor, under the names of torch 2.11 and 2.13."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gathered(part: Tensor, dim: int, group: ProcessGroup) -> Tensor:  # [..., n, ...] -> [..., P * n, ...]
    """The parts of all ranks of the group, joined along `dim` in their order."""
    size, dim = group.size(), dim % part.dim()
    by_rank = part.new_empty(size * part.shape[0], *part.shape[1:])  # joined along the first dimension
    _all_gather(by_rank, part.contiguous(), group=group)
    return by_rank.unflatten(0, (size, part.shape[0])).movedim(0, dim).flatten(dim, dim + 1)


def scattered(whole: Tensor, dim: int, group: ProcessGroup) -> Tensor:  # [..., P * n, ...] -> [..., n, ...]
    """This rank's part, along `dim`, of the sum over all ranks of the group."""
    size, dim = group.size(), dim % whole.dim()
    by_rank = whole.unflatten(dim, (size, whole.shape[dim] // size)).movedim(dim, 0).contiguous()
    part = by_rank.new_empty(by_rank.shape[1:])
    _reduce_scatter(part, by_rank.flatten(0, 1), group=group)
    return part


def summed(part: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over all ranks of the group."""
    whole = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(whole, group=group)
    return whole
