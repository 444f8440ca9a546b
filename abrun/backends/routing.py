"""What the routers of a mixture of experts choose: made for them, counted, and its balance as a loss.

Letters: L layers with a router, T tokens of a forward pass (rows one after the other, or a packed stream), E
experts of a layer, K experts that a token goes to.
"""

from dataclasses import dataclass, fields
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from abrun.errors import RecipeError
from abrun.recipe.policy import Policy
from abrun.rl.metrics import MetricParts


def route_dtype(num_experts: int) -> torch.dtype:
    """Of 1 + an expert's number, in a record."""
    return torch.uint8 if num_experts < 256 else torch.int16


class Choice(TorchFunctionMode):
    """Makes a router's choice, the one `topk` of its forward pass, or leaves it and remembers it.

    What comes before and after stays the family's own, so its own choice replayed is the same to the bit.
    """

    def __init__(self, route: Tensor | None) -> None:  # [T, K] int64, 1 + the expert or 0
        super().__init__()
        self._route = route
        self.made: tuple[Tensor, Tensor] | None = None  # what it chose by [T, E], chosen [T, K]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **(kwargs or {}))
        scores, (weights, chosen) = args[0], func(*args, **(kwargs or {}))
        if self._route is not None:
            chosen = torch.where(self._route == 0, chosen, self._route - 1)
            weights = scores.gather(-1, chosen)
        self.made = scores, chosen
        return torch.return_types.topk((weights, chosen))


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What routers made of counted tokens; adds up over forward passes and ranks. float64."""

    counts: Tensor  # [L, E], tokens sent to each expert
    probabilities: Tensor  # [E], summed over layers and tokens; has a gradient
    entropy: Tensor  # [], of each token's probabilities, summed over layers and tokens, in nats
    num_tokens: Tensor  # []

    @classmethod
    def of(cls, seen: list[tuple[Tensor, Tensor]], counted: Tensor) -> Self:  # [T] float64
        """Of one forward pass, of whose tokens each counts so often."""
        return cls(
            counts=torch.stack([_counts(chosen, counted, p.shape[1]) for p, chosen in seen]),
            probabilities=torch.stack([counted @ p.double() for p, _ in seen]).sum(dim=0),
            entropy=torch.stack([counted @ _entropy(p.detach().double()) for p, _ in seen]).sum(),
            num_tokens=counted.sum(),
        )

    def __add__(self, other: Self) -> Self:
        return type(self)(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def detached(self) -> Self:
        return type(self)(**{f.name: getattr(self, f.name).detach() for f in fields(self)})

    def over(self, group: dist.ProcessGroup) -> Self:
        """The sum over the ranks of a group, without gradient. Collective."""
        values = {field.name: getattr(self, field.name).detach() for field in fields(self)}
        flat = torch.cat([value.flatten() for value in values.values()])
        dist.all_reduce(flat, group=group)
        parts = flat.split([value.numel() for value in values.values()])
        return type(self)(
            **{name: part.view_as(values[name]) for name, part in zip(values, parts, strict=True)}
        )

    def imbalance(self, counts: Tensor, num_tokens: Tensor) -> Tensor:  # [L, E], [] -> []
        """This load's share of E * sum over e of f_e P_e: transformers' auxiliary loss (arXiv:2101.03961).

        f_e is the share of tokens that went to expert e and P_e its mean probability, layers joined, both of
        the global batch: `counts` and `num_tokens` are its. The shares of all forward passes add up.
        """
        rows = len(counts) * num_tokens
        return counts.shape[1] * (counts.sum(dim=0) / rows * self.probabilities / rows).sum()

    def metrics(self) -> MetricParts:
        """Of the whole global batch of an update, which every rank has."""
        one = torch.ones_like(self.num_tokens)
        busiest = self.counts.amax(dim=1) / self.counts.mean(dim=1)
        rows = len(self.counts) * self.num_tokens
        return MetricParts(
            sums={},
            maxima={"train/moe/max_load": busiest.amax()},
            minima={},
            ratios={
                "train/moe/routing_entropy": torch.stack([self.entropy, rows]),
                "train/moe/aux_loss": torch.stack([self.imbalance(self.counts, self.num_tokens), one]),
            },
        )


def _counts(chosen: Tensor, weight: Tensor, num_experts: int) -> Tensor:  # [T, K], [T] -> [E]
    counts = weight.new_zeros(num_experts)
    return counts.index_add(0, chosen.flatten(), weight.repeat_interleave(chosen.shape[1]))


def _entropy(probabilities: Tensor) -> Tensor:  # [T, E] -> [T], nats
    return torch.special.entr(probabilities).sum(dim=1)


def check_routing(policy: Policy, network: nn.Module, num_routers: int) -> None:
    """Raises RecipeError where a recipe asks for what is known of no router of this family."""
    asked = {
        "router_aux_loss_coefficient: got {}": (policy.router_aux_loss_coefficient, "0.0"),
        "replay_routing: got {}": (policy.replay_routing, "false"),
    }
    for words, (value, off) in asked.items():
        if value and not num_routers:
            got = words.format(str(value).lower())
            raise RecipeError(
                f"policy.{got} with {type(network).__name__}, which has no routers that choose among "
                f"probabilities of all experts; use {words.split(':')[0]}: {off}"
            )
