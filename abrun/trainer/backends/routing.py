"""Mixture-of-experts routing: replaying the routers' choices, counting them, and the load-balancing loss.

Letters: L layers with a router, T tokens of a forward pass (flattened rows, or a packed stream), E experts of
a layer, K experts per token.
"""

from dataclasses import dataclass, fields
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from abrun.errors import RecipeError
from abrun.recipe.policy import Policy
from abrun.trainer.rl.metrics import MetricParts


def route_dtype(num_experts: int) -> torch.dtype:
    """Return the dtype of recorded routes, which hold 1 + the expert's index."""
    return torch.uint8 if num_experts < 256 else torch.int16


class RouterChoice(TorchFunctionMode):
    """Records the choice of a router, the only `topk` of its forward pass, or replaces it by a given route.

    Everything before and after is the model's own code, so replaying its own choice is bit-identical.
    """

    def __init__(self, route: Tensor | None) -> None:  # [T, K] int64, 1 + the expert or 0
        super().__init__()
        self._route = route
        self.decision: tuple[Tensor, Tensor] | None = None  # scores [T, E], chosen experts [T, K]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **(kwargs or {}))
        scores, (weights, chosen) = args[0], func(*args, **(kwargs or {}))
        if self._route is not None:
            chosen = torch.where(self._route == 0, chosen, self._route - 1)
            weights = scores.gather(-1, chosen)
        self.decision = scores, chosen
        return torch.return_types.topk((weights, chosen))


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLoad:
    """Sums over routed tokens, float64, which add up over forward passes and ranks."""

    counts: Tensor  # [L, E], tokens routed to each expert
    probabilities: Tensor  # [E], summed over layers and tokens; has a gradient
    entropy: Tensor  # [], of each token's probabilities, summed over layers and tokens, in nats
    num_tokens: Tensor  # []

    @classmethod
    def from_choices(cls, choices: list[tuple[Tensor, Tensor]], weight: Tensor) -> Self:  # [T] float64
        """Return the load of one forward pass, with each token counted `weight` times."""
        counts, probabilities, entropies = [], [], []
        for p, chosen in choices:  # [T, E], [T, K]
            layer_counts = weight.new_zeros(p.shape[1])
            weights = weight.repeat_interleave(chosen.shape[1])
            counts.append(layer_counts.index_add(0, chosen.flatten(), weights))
            probabilities.append(weight @ p.double())
            entropies.append(weight @ torch.special.entr(p.detach().double()).sum(dim=1))  # nats
        return cls(
            counts=torch.stack(counts),
            probabilities=torch.stack(probabilities).sum(dim=0),
            entropy=torch.stack(entropies).sum(),
            num_tokens=weight.sum(),
        )

    def __add__(self, load: Self) -> Self:
        return type(self)(
            **{field.name: getattr(self, field.name) + getattr(load, field.name) for field in fields(self)}
        )

    def detached(self) -> Self:
        return type(self)(**{field.name: getattr(self, field.name).detach() for field in fields(self)})

    def all_reduce(self, group: dist.ProcessGroup) -> Self:
        """Return the sum over the ranks of a group, without gradient. Collective."""
        values = {field.name: getattr(self, field.name).detach() for field in fields(self)}
        flat = torch.cat([value.flatten() for value in values.values()])
        dist.all_reduce(flat, group=group)
        totals = flat.split([value.numel() for value in values.values()])
        return type(self)(
            **{name: total.view_as(values[name]) for name, total in zip(values, totals, strict=True)}
        )

    def balance_loss(self, counts: Tensor, num_tokens: Tensor) -> Tensor:  # [L, E], [] -> []
        """Return this load's share of transformers' auxiliary loss, E * sum_e f_e P_e (arXiv:2101.03961).

        f_e is the fraction of tokens routed to expert e and P_e the expert's mean probability, both over all
        layers of the global batch, whose `counts` and `num_tokens` are given. The shares of all forward
        passes add up to the loss.
        """
        rows = len(counts) * num_tokens
        return counts.shape[1] * (counts.sum(dim=0) / rows * self.probabilities / rows).sum()

    def metrics(self) -> MetricParts:
        """Return the metrics of a global batch's load, which every rank has."""
        unit = torch.ones_like(self.num_tokens)
        max_load = self.counts.amax(dim=1) / self.counts.mean(dim=1)
        rows = len(self.counts) * self.num_tokens
        return MetricParts(
            sums={},
            maxima={"train/moe/max_load": max_load.amax()},
            minima={},
            ratios={
                "train/moe/routing_entropy": torch.stack([self.entropy, rows]),
                "train/moe/aux_loss": torch.stack([self.balance_loss(self.counts, self.num_tokens), unit]),
            },
        )


def check_routing(policy: Policy, network: nn.Module, num_routers: int) -> None:
    """Raise RecipeError if the recipe uses routers but none of the network's are supported."""
    used = {
        "router_aux_loss_coefficient": (policy.router_aux_loss_coefficient, "0.0"),
        "replay_routing": (policy.replay_routing, "false"),
    }
    for name, (value, off_value) in used.items():
        if value and not num_routers:
            raise RecipeError(
                f"policy.{name}: got {str(value).lower()} with {type(network).__name__}, which has no "
                f"routers with a top-k of probabilities over all experts; use {name}: {off_value}"
            )
