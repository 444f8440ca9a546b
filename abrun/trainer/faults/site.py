"""The place of an injected fault: the objects of a run, and functions to wrap their methods."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from abrun.trainer.backends.microbatches import Microbatches
from abrun.trainer.loop.grpo import PolicyObjective
from abrun.trainer.loop.setup import RunSetup
from abrun.trainer.rl.batch import TrainBatch

Updates = list[tuple[TrainBatch, PolicyObjective]]


@dataclass(frozen=True, kw_only=True)
class SizedObjective(PolicyObjective):
    """A policy's objective with a fault of some size."""

    size: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSite:
    """The objects of a run, and the size of the fault to inject."""

    setup: RunSetup
    algorithm: Any  # a PolicyGradient, except for faults in the setup
    size: float
    draw: int

    def on_updates(self, change: Callable[[Updates, int], Updates]) -> None:
        """Change the updates of a step: their batches or their objectives."""
        wrap_method(self.algorithm, "train", lambda train, updates, step: train(change(updates, step), step))

    def on_objectives(self, kind: type[SizedObjective]) -> None:
        """Replace the objectives by another class, which also gets the size of the fault."""

        def change(updates: Updates, step: int) -> Updates:
            names = [field.name for field in fields(PolicyObjective)]
            return [
                (batch, kind(**{name: getattr(objective, name) for name in names}, size=self.size))
                for batch, objective in updates
            ]

        self.on_updates(change)

    def cut(self, batch: TrainBatch) -> Microbatches[TrainBatch]:
        """Return the microbatches that the backend makes of a batch. Collective."""
        return Microbatches(batch, self.setup.config.policy, self.setup.ranks)


def wrap_method(owner: Any, method: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method of this object by `wrapper(method, *arguments)`."""
    inner = getattr(owner, method)
    setattr(owner, method, lambda *args, **settings: wrapper(inner, *args, **settings))


def leading_rows(share: float, num_rows: int) -> slice:
    """Return the slice of the first `share` of a batch's rows, at least one row."""
    return slice(0, max(round(share * num_rows), 1))


def partly_detached(values: Tensor, share: float) -> Tensor:
    """Return the same values, with the gradient reduced by `share`."""
    return values.detach() if share == 1 else share * values.detach() + (1 - share) * values
