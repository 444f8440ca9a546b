"""The routers of a transformers network: recording and replaying their choices. See abrun.backends.routing.

Letters: L layers with a router, T tokens of a forward pass (flattened rows, or a packed stream), E experts of
a layer, K experts per token.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from abrun.backends.routing import RouterChoice
from abrun.models import routers_of


class Routers:
    """The routers of one network, whose choices can be recorded and replayed."""

    def __init__(self, network: nn.Module) -> None:
        routers = routers_of(network)
        self.num_layers = len(routers)
        self.num_experts, self.top_k = (routers[0].num_experts, routers[0].top_k) if routers else (0, 0)
        self._choices: list[tuple[Tensor, Tensor]] | None = None
        self._replayed_routes: Tensor | None = None  # [T, L, K]
        for layer, router in enumerate(routers):
            router.forward = partial(self._route, layer, router.forward)

    @contextlib.contextmanager
    def record(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Record one forward pass: for each layer, probabilities [T, E] and chosen experts [T, K]."""
        self._choices = []
        try:
            yield self._choices
        finally:
            self._choices = None

    @contextlib.contextmanager
    def replay(self, routes: Tensor | None) -> Iterator[None]:
        """Route tokens to the experts in `routes` [T, L * K] while the context is open; None: no replay.

        Recomputed layers are included. Each expert is weighted with the router's current probability, which
        has a gradient. Padding has no recorded route, so the router decides.
        """
        self._replayed_routes = (
            None if routes is None else routes.view(len(routes), self.num_layers, self.top_k)
        )
        try:
            yield
        finally:
            self._replayed_routes = None

    def _route(self, layer: int, forward: Any, *inputs: Any) -> Any:
        with RouterChoice(
            None if self._replayed_routes is None else self._replayed_routes[:, layer].long()
        ) as choice:
            outputs = forward(*inputs)
        if self._choices is not None:
            assert choice.decision is not None
            self._choices.append(choice.decision)
        return outputs
