"""Engine of runs that train on recorded rollouts: it samples nothing and needs no weights."""

from collections.abc import Iterator

from torch import Tensor

from abrun.errors import RecipeError
from abrun.recipe.run import OwnRunConfig
from abrun.trainer.backends import Backend
from abrun.trainer.models import Text
from abrun.trainer.rollout import Completion
from abrun.trainer.seeds import Draws


class RecordedEngine:
    """See rollout.RolloutEngine. loop.rollouts reads the completions of a step from its file."""

    def generate(
        self, prompts: list[list[int]], draws: Draws, *, temperature: float | None = None
    ) -> list[Completion]:
        """Raise RecipeError."""
        raise RecipeError("rollout.engine: got 'recorded', which cannot sample; use engine: torch or vllm")

    def sync(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Ignore the weights."""

    def sleep(self) -> int:
        return 0

    def wake(self) -> bool:
        return False

    def close(self, *, finished: bool = False) -> None:
        """Do nothing."""


def make_engine(config: OwnRunConfig, backend: Backend, text: Text) -> RecordedEngine:
    """See abrun.trainer.rollout.make_engine."""
    return RecordedEngine()
