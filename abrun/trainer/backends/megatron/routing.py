"""megatron-core's routers: auxiliary loss, load, recorded and replayed routes. See trainer.backends.routing.

Letters: L layers of the network, l of them on this stage, T tokens of a microbatch that this rank's routers
see, E experts of a layer, K experts per token.
"""

import functools
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from abrun.trainer.backends.ranks import Ranks
from abrun.trainer.backends.routing import RouterChoice, RouterLoad, route_dtype
from abrun.trainer.rl.batch import Sequences


class MicrobatchRouting:
    """The inputs of the routers for one microbatch, and the choices that they record."""

    def __init__(
        self,
        shape: torch.Size,  # [B, S]
        positions: Tensor,  # [T] int64: indices of the tokens in the flattened rows; -1: padding
        routes: Tensor | None,  # [T, l, K] int64: 1 + the prescribed expert; 0: the router decides
        aux_loss: tuple[float, RouterLoad] | None,  # its coefficient, and the global batch's load
    ) -> None:
        self.shape, self.positions, self.routes, self.aux_loss = shape, positions, routes, aux_loss
        self.is_real = positions >= 0
        self.loads: dict[int, RouterLoad] = {}  # by layer of this stage
        self.chosen: dict[int, Tensor] = {}  # [T, K]


class StageRouters:
    """The routers of one network on this rank's stage; none if the network has no experts."""

    def __init__(self, model: Any, ranks: Ranks) -> None:
        config = model.config
        self._ranks = ranks
        self.num_layers = config.num_layers if config.num_moe_experts else 0
        self._num_experts, self._top_k = config.num_moe_experts or 0, config.moe_router_topk
        layers = model.decoder.layers if self.num_layers else []
        self._num_local, self._first_layer = len(layers), layers[0].layer_number - 1 if layers else 0
        self._current_routing: MicrobatchRouting | None = None
        for index, layer in enumerate(layers):
            # Set before each layer runs, because a recomputed layer can run between layers of other passes.
            layer.register_forward_pre_hook(self._set_current_routing, with_kwargs=True)
            layer.mlp.router.routing = partial(self._route, index, layer.mlp.router.routing)

    def start_microbatch(
        self, batch: Sequences, positions: Tensor, aux_loss: tuple[float, RouterLoad] | None
    ) -> MicrobatchRouting:
        """Return the routers' inputs for a microbatch, with the batch's recorded routes."""
        routes = None
        if batch.routes is not None:
            token_routes = (
                batch.routes.flatten(0, 1)[positions.clamp(min=0)].long() * (positions >= 0)[:, None]
            )
            routes = token_routes.unflatten(1, (self.num_layers, self._top_k))[:, self._local_layers]
        return MicrobatchRouting(batch.token_ids.shape, positions, routes, aux_loss)

    def reduce_load(self, passes: Sequence[MicrobatchRouting]) -> RouterLoad:
        """Return the load of the global batch: all passes, layers and ranks. Collective over all ranks."""
        return functools.reduce(operator.add, map(self._local_load, passes)).all_reduce(self._ranks.world)

    def record_routes(self, passes: Sequence[MicrobatchRouting]) -> list[Tensor]:  # [b, s, L * K] each
        """Return each microbatch's routes on every rank of a replica. Collective over the replica."""
        dtype, device = route_dtype(self._num_experts), self._ranks.device
        records = []
        for routing in passes:
            chosen = torch.stack([1 + routing.chosen[index] for index in range(self._num_local)], dim=1)
            record = torch.zeros(
                routing.shape.numel(), self.num_layers, self._top_k, dtype=dtype, device=device
            )
            record[routing.positions[routing.is_real], self._local_layers] = chosen[routing.is_real].to(dtype)
            for group in (self._ranks.context, self._ranks.tensor, self._ranks.pipeline):
                # Each rank fills its own elements and leaves 0 in the rest: a sum of bytes merges them.
                if group is not None:
                    dist.all_reduce(record.view(torch.uint8), group=group)
            records.append(record.flatten(1).unflatten(0, routing.shape))
        return records

    @property
    def _local_layers(self) -> slice:
        return slice(self._first_layer, self._first_layer + self._num_local)

    def _local_load(self, routing: MicrobatchRouting) -> RouterLoad:
        """Return the load of one pass on this rank, with 0 for other stages' layers.

        Only the first stage counts the tokens, so that the sum over stages counts them once.
        """
        loads = [routing.loads[index] for index in range(self._num_local)]
        counts = loads[0].counts.new_zeros(self.num_layers, self._num_experts)
        counts[self._local_layers] = torch.cat([load.counts for load in loads])
        return RouterLoad(
            counts=counts,
            probabilities=torch.stack([load.probabilities for load in loads]).sum(dim=0),
            entropy=torch.stack([load.entropy for load in loads]).sum(),
            num_tokens=loads[0].num_tokens * (self._first_layer == 0),
        )

    def _set_current_routing(self, layer: Any, inputs: Any, named: dict[str, Any]) -> None:
        self._current_routing = named["packed_seq_params"].routing

    def _route(self, index: int, route_tokens: Any, logits: Tensor, *inputs: Any, **named: Any) -> Any:
        """Route a layer's tokens. Return weights [T, E], 0 if not chosen, and the choice [T, E] bool."""
        routing = self._current_routing
        if routing is None:
            return route_tokens(logits, *inputs, **named)
        with RouterChoice(None if routing.routes is None else routing.routes[:, index]) as choice:
            weights, chosen = route_tokens(logits, *inputs, **named)
        assert choice.decision is not None
        probabilities = logits.flatten(0, -2).float().softmax(dim=-1)
        load = RouterLoad.from_choices([(probabilities, choice.decision[1])], routing.is_real.double())
        routing.loads[index], routing.chosen[index] = load.detached(), choice.decision[1]
        if routing.aux_loss is not None:
            coefficient, global_load = routing.aux_loss
            layer_loss = coefficient * load.balance_loss(global_load.counts, global_load.num_tokens)
            weights = _AttachLoss.apply(weights, layer_loss)
        return weights, chosen


class _AttachLoss(torch.autograd.Function):
    """Identity on values that also backpropagates from a loss [].

    Pipeline stages before the last and recomputed layers have no other way to add a loss.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        ctx.loss_gradient = torch.ones_like(loss)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], ctx.loss_gradient
