"""The routers of a network of transformers: what they choose seen, and replayed; see abrun.backends.routing.

Letters: L layers with a router, T tokens of a forward pass (rows one after the other, or a packed stream), E
experts of a layer, K experts that a token goes to.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from abrun.backends.routing import Choice
from abrun.models import routers_of


class Routing:
    """The routers of one network. What they choose can be seen, and chosen for them."""

    def __init__(self, network: nn.Module) -> None:
        routers = routers_of(network)
        self.num_layers = len(routers)
        self.num_experts, self.top_k = (routers[0].num_experts, routers[0].top_k) if routers else (0, 0)
        self._seen: list[tuple[Tensor, Tensor]] | None = None
        self._replayed: Tensor | None = None  # [T, L, K]
        for layer, router in enumerate(routers):
            router.forward = partial(self._route, layer, router.forward)

    @contextlib.contextmanager
    def seen(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Of the one forward pass inside, by layer: probabilities [T, E], and the experts chosen [T, K]."""
        self._seen = []
        try:
            yield self._seen
        finally:
            self._seen = None

    @contextlib.contextmanager
    def replayed(self, routes: Tensor | None) -> Iterator[None]:
        """Tokens go to the experts in `routes` [T, L * K] inside, in recomputation, too; None: as ever.

        Each is weighed by its router's own probability of it, which has a gradient. Padding, of which nothing
        is recorded, goes where its router sends it.
        """
        self._replayed = None if routes is None else routes.view(len(routes), self.num_layers, self.top_k)
        try:
            yield
        finally:
            self._replayed = None

    def _route(self, layer: int, forward: Any, *inputs: Any) -> Any:
        with Choice(None if self._replayed is None else self._replayed[:, layer].long()) as choice:
            outputs = forward(*inputs)
        if self._seen is not None:
            assert choice.made is not None
            self._seen.append(choice.made)
        return outputs
