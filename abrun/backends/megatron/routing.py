"""The routers of megatron-core: balanced, counted, recorded and replayed; see abrun.backends.routing.

Letters: L layers of the network, l of them on this stage, T tokens that this rank's routers see of a
microbatch, E experts of a layer, K experts that a token goes to.
"""

import functools
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from abrun.backends.ranks import Ranks
from abrun.backends.routing import Choice, Load, route_dtype
from abrun.rl.batch import Sequences


class Routed:
    """A microbatch as routers see it: what they are told of its tokens, and what they made of them."""

    def __init__(
        self,
        shape: torch.Size,  # [B, S] of its rows
        places: Tensor,  # [T] int64, of tokens in the flattened rows; -1: padding
        routes: Tensor | None,  # [T, l, K] int64: 1 + the expert to go to, 0 where the router is free
        balance: tuple[float, Load] | None,  # the auxiliary loss's coefficient, and the global batch's load
    ) -> None:
        self.shape, self.places, self.routes, self.balance = shape, places, routes, balance
        self.counted = places >= 0
        self.loads: dict[int, Load] = {}  # by layer of this stage
        self.chosen: dict[int, Tensor] = {}  # [T, K]


class Routing:
    """The routers of one network on this rank's stage; none, where it has no experts."""

    def __init__(self, model: Any, ranks: Ranks) -> None:
        config = model.config
        self._ranks = ranks
        self.num_layers = config.num_layers if config.num_moe_experts else 0
        self._num_experts, self._top_k = config.num_moe_experts or 0, config.moe_router_topk
        layers = model.decoder.layers if self.num_layers else []
        self._num_own, self._first = len(layers), layers[0].layer_number - 1 if layers else 0
        self._routed: Routed | None = None
        for index, layer in enumerate(layers):
            # Said to each layer as it runs: a recomputed one may run between the layers of other passes.
            layer.register_forward_pre_hook(self._enter, with_kwargs=True)
            layer.mlp.router.routing = partial(self._route, index, layer.mlp.router.routing)

    def of(self, batch: Sequences, places: Tensor, balance: tuple[float, Load] | None) -> Routed:
        """A microbatch whose tokens stand at `places`, with its recorded routes."""
        routes = None
        if batch.routes is not None:
            of_tokens = batch.routes.flatten(0, 1)[places.clamp(min=0)].long() * (places >= 0)[:, None]
            routes = of_tokens.unflatten(1, (self.num_layers, self._top_k))[:, self._own_layers]
        return Routed(batch.token_ids.shape, places, routes, balance)

    def load(self, routed: Sequence[Routed]) -> Load:
        """Of the global batch: all passes, layers and ranks. Collective over all ranks."""
        return functools.reduce(operator.add, map(self._own_load, routed)).over(self._ranks.world)

    def record(self, routed: Sequence[Routed]) -> list[Tensor]:  # [b, s, L * K] each
        """Where the tokens of each microbatch went, on every rank of a replica. Collective over it."""
        dtype, device = route_dtype(self._num_experts), self._ranks.device
        records = []
        for each in routed:
            chosen = torch.stack([1 + each.chosen[index] for index in range(self._num_own)], dim=1)
            record = torch.zeros(each.shape.numel(), self.num_layers, self._top_k, dtype=dtype, device=device)
            record[each.places[each.counted], self._own_layers] = chosen[each.counted].to(dtype)
            for group in (self._ranks.context, self._ranks.tensor, self._ranks.pipeline):
                if group is not None:  # each has other tokens or layers, and adding up bits keeps every one
                    dist.all_reduce(record.view(torch.uint8), group=group)
            records.append(record.flatten(1).unflatten(0, each.shape))
        return records

    @property
    def _own_layers(self) -> slice:
        return slice(self._first, self._first + self._num_own)

    def _own_load(self, routed: Routed) -> Load:
        """Of one pass on this rank, with the layers of other stages as 0; tokens count on the first stage."""
        loads = [routed.loads[index] for index in range(self._num_own)]
        counts = loads[0].counts.new_zeros(self.num_layers, self._num_experts)
        counts[self._own_layers] = torch.cat([load.counts for load in loads])
        return Load(
            counts=counts,
            probabilities=torch.stack([load.probabilities for load in loads]).sum(dim=0),
            entropy=torch.stack([load.entropy for load in loads]).sum(),
            num_tokens=loads[0].num_tokens * (self._first == 0),
        )

    def _enter(self, layer: Any, inputs: Any, named: dict[str, Any]) -> None:
        self._routed = named["packed_seq_params"].routed

    def _route(self, index: int, routing: Any, logits: Tensor, *inputs: Any, **named: Any) -> Any:
        """A layer's choice: the weights of all experts [T, E], 0 where not chosen, and whether chosen."""
        routed = self._routed
        if routed is None:
            return routing(logits, *inputs, **named)
        with Choice(None if routed.routes is None else routed.routes[:, index]) as choice:
            weights, chosen = routing(logits, *inputs, **named)
        assert choice.made is not None
        probabilities = logits.flatten(0, -2).float().softmax(dim=-1)
        load = Load.of([(probabilities, choice.made[1])], routed.counted.double())
        routed.loads[index], routed.chosen[index] = load.detached(), choice.made[1]
        if routed.balance is not None:
            coefficient, whole = routed.balance
            share = coefficient * load.imbalance(whole.counts, whole.num_tokens)
            weights = _WithLoss.apply(weights, share)
        return weights, chosen


class _WithLoss(torch.autograd.Function):
    """Values as they are; whoever goes back through them goes back from the loss [] too.

    A stage has no other way to it, nor does a layer that is recomputed.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        ctx.one = torch.ones_like(loss)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], ctx.one
