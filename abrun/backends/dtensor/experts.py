"""Expert parallelism: a rank holds some of a layer's experts whole, and tokens travel to them and back.

Letters: N tokens of this rank, H hidden size, K experts that a token goes to, P ranks of a group, E experts
of a layer, R rows that this rank's experts get from all ranks of the group.

The ranks of a group hold different tokens, so the gradient of an expert is a sum over them before anything is
reduced; FSDP adds up what is left, over the copies of the group (see abrun.backends.dtensor.fsdp).
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from abrun.backends.dtensor.fsdp import shard
from abrun.backends.ranks import Ranks
from abrun.errors import RecipeError
from abrun.models import experts_of


def spread_experts(network: nn.Module, ranks: Ranks, dtype: str) -> "list[Dispatched]":
    """Spread the experts of every layer over the ranks, where there is expert parallelism.

    To be called before the layers are sharded. Raises RecipeError where the network cannot be spread so.
    """
    if ranks.experts is None:
        return []
    copies, expert = ranks.experts["copies"], ranks.experts["expert"]
    layers = experts_of(network)
    check_spread(network, [experts.num_experts for experts in layers], expert.size())
    spread = [Dispatched(experts, expert) for experts in layers]
    for experts in layers:
        shard(experts, copies, dtype, cast_inputs=False, dim=cut_dimension(experts, copies.size()))
    return spread


class Dispatched:
    """A layer's experts, of which this rank holds a part; its forward pass is that of all of them."""

    def __init__(self, experts: Any, mesh: Any) -> None:
        self._experts, self._group = experts, mesh.get_group()
        self._num_ranks, self._num_experts = mesh.size(), experts.num_experts
        self._forward = experts.forward
        self._gathered: dict[str, Tensor] | None = None
        for name, parameter in list(experts.named_parameters(recurse=False)):
            part = distribute_tensor(parameter.data, mesh, [Shard(0)], src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        experts.num_experts = self._num_experts // self._num_ranks
        experts.forward = self.forward

    def forward(
        self,
        hidden: Tensor,  # [N, H]
        chosen: Tensor,  # [N, K] int64
        weights: Tensor,  # [N, K]
    ) -> Tensor:  # [N, H]
        """The weighted sum of what the chosen experts make of each token. Collective unless gathered."""
        if self._gathered is not None:
            with self._holding(self._gathered, self._num_experts):
                return self._forward(hidden, chosen, weights)
        order = chosen.flatten().argsort(stable=True)  # [N * K], by expert, and so by rank
        counts = torch.bincount(chosen.flatten(), minlength=self._num_experts).view(self._num_ranks, -1)
        received = torch.empty_like(counts)  # [P, E / P], for each of this rank's experts
        dist.all_to_all_single(received, counts, group=self._group)
        sizes = counts.sum(dim=1).tolist(), received.sum(dim=1).tolist()
        rows = _Travel.apply(hidden[order // chosen.shape[1]], *sizes, self._group)
        local = torch.arange(received.shape[1], device=hidden.device).repeat(self._num_ranks)
        outputs = self._outputs(rows, local.repeat_interleave(received.flatten()))
        back = _Travel.apply(outputs, *reversed(sizes), self._group)
        each = back[order.argsort()].view(*chosen.shape, -1)  # [N, K, H]
        return (each * weights[..., None]).sum(dim=1).to(hidden.dtype)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """All experts on this rank inside, without any collective. What FSDP shards is whole already."""
        parameters: Mapping[str, Any] = self._experts._parameters
        self._gathered = {name: parameter.detach().full_tensor() for name, parameter in parameters.items()}
        try:
            yield
        finally:
            self._gathered = None

    def _outputs(self, rows: Any, chosen: Tensor) -> Tensor:  # [R, H], [R] -> [R, H]
        """Of this rank's experts, for one of them a row.

        Without rows they run on zeros, cut off again: FSDP's reduction waits for every rank's gradient.
        """
        some, of_expert = rows, chosen
        if not len(rows):
            some, of_expert = rows.sum(dim=0, keepdim=True), chosen.new_zeros(1)
        parameters: Mapping[str, Any] = self._experts._parameters
        local = {name: parameter.to_local() for name, parameter in parameters.items()}
        with self._holding(local, self._num_experts // self._num_ranks):
            found = self._forward(some, of_expert[:, None], some.new_ones(len(some), 1))
        return found[: len(rows)].contiguous()

    @contextlib.contextmanager
    def _holding(self, parameters: Mapping[str, Tensor], num_experts: int) -> Iterator[None]:
        """The experts' module computes with these plain tensors inside."""
        experts = self._experts
        own, own_number = dict(experts._parameters), experts.num_experts
        experts._parameters.update(parameters)
        experts.num_experts = num_experts
        try:
            yield
        finally:
            experts._parameters.update(own)
            experts.num_experts = own_number


class _Travel(torch.autograd.Function):
    """Rows to the ranks of a group: `sent[0]` to the first of them, and so on; their gradients go back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.sizes
        return _exchanged(gradients[0].contiguous(), received, sent, ctx.group), None, None, None


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows, received, sent, group=group)
    return out


def cut_dimension(experts: Any, copies: int) -> int:
    """Where FSDP cuts a rank's experts over the copies of its group: between them, or each along its rows."""
    if experts.num_experts % copies == 0:
        return 0
    sizes = [parameter.shape[1] for parameter in experts.parameters(recurse=False)]
    if any(size % copies for size in sizes):
        raise RecipeError(
            f"policy.backend.expert_parallel: the {experts.num_experts} experts of a rank, matrices of "
            f"{' and '.join(map(str, sizes))} rows, cannot be cut over {copies} copies; use a larger "
            "expert_parallel, or other cluster sizes"
        )
    return 1


def check_spread(network: nn.Module, numbers: list[int], size: int) -> None:
    """Raises RecipeError where layers of so many experts cannot be spread over `size` ranks."""
    got = f"policy.backend.expert_parallel: got {size} with {type(network).__name__}"
    if not numbers:
        raise RecipeError(f"{got}, which has no experts that can be spread; use expert_parallel: 1")
    for number in numbers:
        if number % size:
            raise RecipeError(f"{got}, whose layers have {number} experts; use a divisor of {number}")
