"""Expert parallelism: each rank holds some of a layer's experts; tokens are sent to their experts and back.

Letters: N tokens of this rank, H hidden size, K experts per token, P ranks of a group, E experts of a layer,
R rows that this rank's experts receive from all ranks of the group.

The ranks of a group hold different tokens, so an expert's gradient is already a sum over the group. FSDP sums
it over the copies of the group (see abrun.trainer.backends.dtensor.fsdp).
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from abrun.errors import RecipeError
from abrun.trainer.backends.dtensor.fsdp import shard
from abrun.trainer.backends.ranks import Ranks
from abrun.trainer.models.families import experts_of


def shard_experts(network: nn.Module, ranks: Ranks, dtype: str) -> "list[DispatchedExperts]":
    """Distribute the experts of every layer over the ranks if there is expert parallelism.

    Call it before the layers are sharded. Raises RecipeError if the network's experts do not fit the ranks.
    """
    if ranks.expert_mesh is None:
        return []
    copies, expert = ranks.expert_mesh["copies"], ranks.expert_mesh["expert"]
    layers = experts_of(network)
    check_expert_counts(network, [experts.num_experts for experts in layers], expert.size())
    dispatched = [DispatchedExperts(experts, expert) for experts in layers]
    for experts in layers:
        shard(experts, copies, dtype, cast_inputs=False, dim=fsdp_shard_dim(experts, copies.size()))
    return dispatched


class DispatchedExperts:
    """A layer's experts, distributed over a group of ranks; the forward pass computes with all of them."""

    def __init__(self, experts: Any, mesh: Any) -> None:
        self._experts, self._group = experts, mesh.get_group()
        self._num_ranks, self._num_experts = mesh.size(), experts.num_experts
        self._forward = experts.forward
        self._all_parameters: dict[str, Tensor] | None = None
        for name, parameter in list(experts.named_parameters(recurse=False)):
            shard = distribute_tensor(parameter.data, mesh, [Shard(0)], src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(shard, requires_grad=parameter.requires_grad))
        experts.num_experts = self._num_experts // self._num_ranks
        experts.forward = self.forward

    def forward(
        self,
        hidden: Tensor,  # [N, H]
        chosen: Tensor,  # [N, K] int64
        weights: Tensor,  # [N, K]
    ) -> Tensor:  # [N, H]
        """Return the weighted sum of the chosen experts' outputs. Collective, except with all experts."""
        if self._all_parameters is not None:
            with self._with_parameters(self._all_parameters, self._num_experts):
                return self._forward(hidden, chosen, weights)
        order = chosen.flatten().argsort(stable=True)  # [N * K], sorted by expert, so by rank
        counts = torch.bincount(chosen.flatten(), minlength=self._num_experts).view(self._num_ranks, -1)
        received = torch.empty_like(counts)  # [P, E/P], for each of this rank's experts
        dist.all_to_all_single(received, counts, group=self._group)
        sizes = counts.sum(dim=1).tolist(), received.sum(dim=1).tolist()
        rows = _AllToAll.apply(hidden[order // chosen.shape[1]], *sizes, self._group)
        local = torch.arange(received.shape[1], device=hidden.device).repeat(self._num_ranks)
        outputs = self._compute_local(rows, local.repeat_interleave(received.flatten()))
        returned = _AllToAll.apply(outputs, *reversed(sizes), self._group)
        expert_outputs = returned[order.argsort()].view(*chosen.shape, -1)  # [N, K, H]
        return (expert_outputs * weights[..., None]).sum(dim=1).to(hidden.dtype)

    @contextlib.contextmanager
    def with_all_experts(self) -> Iterator[None]:
        """Hold all experts on this rank while the context is open, so that the forward needs no collective.

        FSDP must have gathered its shards before.
        """
        parameters: Mapping[str, Any] = self._experts._parameters
        self._all_parameters = {
            name: parameter.detach().full_tensor() for name, parameter in parameters.items()
        }
        try:
            yield
        finally:
            self._all_parameters = None

    def _compute_local(self, rows: Any, chosen: Tensor) -> Tensor:  # [R, H], [R] -> [R, H]
        """Run each row through the local expert that it has chosen.

        Without rows the experts run on one row of zeros, which is dropped again: FSDP's gradient reduction
        waits for every rank.
        """
        inputs, expert_ids = rows, chosen
        if not len(rows):
            inputs, expert_ids = rows.sum(dim=0, keepdim=True), chosen.new_zeros(1)
        parameters: Mapping[str, Any] = self._experts._parameters
        local = {name: parameter.to_local() for name, parameter in parameters.items()}
        with self._with_parameters(local, self._num_experts // self._num_ranks):
            outputs = self._forward(inputs, expert_ids[:, None], inputs.new_ones(len(inputs), 1))
        return outputs[: len(rows)].contiguous()

    @contextlib.contextmanager
    def _with_parameters(self, parameters: Mapping[str, Tensor], num_experts: int) -> Iterator[None]:
        """Let the experts' module compute with these plain tensors while the context is open."""
        experts = self._experts
        sharded_parameters, num_local_experts = dict(experts._parameters), experts.num_experts
        experts._parameters.update(parameters)
        experts.num_experts = num_experts
        try:
            yield
        finally:
            experts._parameters.update(sharded_parameters)
            experts.num_experts = num_local_experts


class _AllToAll(torch.autograd.Function):
    """Sends rows to the ranks of a group, the first `sent[0]` to rank 0; gradients travel back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.sizes
        return _all_to_all(gradients[0].contiguous(), received, sent, ctx.group), None, None, None


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows, received, sent, group=group)
    return out


def fsdp_shard_dim(experts: Any, copies: int) -> int:
    """Return the dimension along which FSDP shards a rank's experts over the copies of its group.

    0 distributes whole experts, 1 shards the rows of each. Raises RecipeError if neither is possible.
    """
    if experts.num_experts % copies == 0:
        return 0
    sizes = [parameter.shape[1] for parameter in experts.parameters(recurse=False)]
    if any(size % copies for size in sizes):
        raise RecipeError(
            f"policy.backend.expert_parallel: the {experts.num_experts} experts of a rank, matrices of "
            f"{' and '.join(map(str, sizes))} rows, cannot be sharded over {copies} ranks; use a larger "
            "expert_parallel, or another number of ranks"
        )
    return 1


def check_expert_counts(network: nn.Module, expert_counts: list[int], size: int) -> None:
    """Raise RecipeError if layers with these numbers of experts cannot be distributed over `size` ranks."""
    got = f"policy.backend.expert_parallel: got {size} with {type(network).__name__}"
    if not expert_counts:
        raise RecipeError(f"{got}, which has no experts to distribute; use expert_parallel: 1")
    for count in expert_counts:
        if count % size:
            raise RecipeError(f"{got}, whose layers have {count} experts; use a divisor of {count}")
