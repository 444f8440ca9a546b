"""Where a fault is injected, and how: methods of built objects are wrapped."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from torch import Tensor

from abrun.backends.microbatches import Microbatches
from abrun.rl.batch import TrainBatch
from abrun.train.policy_objective import PolicyObjective
from abrun.train.setup import Setup

O = TypeVar("O", bound=PolicyObjective)  # noqa: E741
Updates = list[tuple[TrainBatch, PolicyObjective]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What a run has built, and how much is to be broken."""

    setup: Setup
    algorithm: Any  # a PolicyGradient, but for faults of the setup alone
    size: float
    draw: int

    def on_updates(self, change: Callable[[Updates, int], Updates]) -> None:
        """Change what a step's updates are made of: their batches, or their objectives."""
        around(self.algorithm, "train", lambda train, updates, step: train(change(updates, step), step))

    def on_objectives(self, kind: type[O]) -> None:
        """Train by another kind of objective, which has the size."""
        self.on_updates(
            lambda updates, step: [
                (batch, kind(**_values(objective), size=self.size))  # pyright: ignore[reportCallIssue]
                for batch, objective in updates
            ]
        )

    def cut(self, batch: TrainBatch) -> Microbatches[TrainBatch]:
        """The microbatches that a backend makes of a batch. Collective."""
        return Microbatches(batch, self.setup.config.policy, self.setup.ranks)


def around(owner: Any, method: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method by `wrapper(method, *arguments)`, on this object alone."""
    inner = getattr(owner, method)
    setattr(owner, method, lambda *args, **settings: wrapper(inner, *args, **settings))


def first_rows(share: float, num_rows: int) -> slice:
    """So many of a batch's rows; at least one."""
    return slice(0, max(round(share * num_rows), 1))


def partly_detached(values: Tensor, share: float) -> Tensor:
    """The same values, with so much less of a gradient."""
    return values.detach() if share == 1 else share * values.detach() + (1 - share) * values


def _values(objective: PolicyObjective) -> dict[str, Any]:
    return {field.name: getattr(objective, field.name) for field in fields(objective)}
