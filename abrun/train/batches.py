"""The source of a step's batches: `rollouts.Rollouts`."""

from typing import Protocol

from abrun.rl.batch import Sampled


class BatchSource(Protocol):
    """Gives a step its completions with their rewards."""

    def collect(self, step: int) -> tuple[Sampled, dict[str, float]]:
        """This rank's sequences of a step, and metrics of how they came about. Collective."""
        ...
