"""Rollout engines: they sample completions for prompts and return the log-probs of the tokens."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from abrun.errors import RecipeError
from abrun.recipe.implementations import ENGINES, load_implementation
from abrun.recipe.run import OwnRunConfig
from abrun.trainer.backends import Backend
from abrun.trainer.models.text import Text
from abrun.trainer.seeds import Draws


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled completion of a prompt."""

    token_ids: list[int]  # includes the end token, if there is one
    logprobs: list[float]  # one for each token, under the distribution it was drawn from
    # [T, W] uint8, on the CPU: the support of each draw, with `exact_support`; see trainer.rl.sampling
    support: Tensor | None = field(default=None, compare=False, repr=False)
    truncated: bool  # stopped by max_new_tokens, not by an end token


class RolloutEngine(Protocol):
    """Interface of rollout engines. Training and validation of a run share one engine.

    A subclass inherits what an engine does that shares the policy's weights and has no memory of its own.
    """

    def generate(
        self, prompts: list[list[int]], draws: Draws, *, temperature: float | None = None
    ) -> list[Completion]:
        """Return one completion for each prompt; prompt i is row `draws.rows[i]` of the step.

        `temperature` overrides the recipe; 0 is greedy decoding. Completions with an override are not for
        training and have no support.
        """
        ...

    def sync(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Load the policy's weights: an iterator of full tensors with their Hugging Face names. Collective.

        Do not iterate without need: each tensor costs a collective.
        """

    def sleep(self) -> int:
        """Free device memory for training; return the freed bytes that torch's allocator still counts."""
        return 0

    def wake(self) -> bool:
        """Reclaim the memory freed by `sleep`. Call it before `sync` and `generate`.

        Returns True if the weights were freed too: they must be synced even if the policy has not changed.
        """
        return False

    def close(self, *, finished: bool = False) -> None:
        """End the processes and process groups of the engine. `finished`: the run has taken its last step."""


class RecordedEngine(RolloutEngine):
    """Engine of runs that train on recorded rollouts: loop.grpo reads a step's completions from its file."""

    def __init__(self, config: OwnRunConfig, backend: Backend, text: Text) -> None:
        """See `make_engine`."""

    def generate(
        self, prompts: list[list[int]], draws: Draws, *, temperature: float | None = None
    ) -> list[Completion]:
        """Raise RecipeError."""
        raise RecipeError("rollout.engine: got 'recorded', which cannot sample; use engine: torch or vllm")


def make_engine(config: OwnRunConfig, backend: Backend, text: Text) -> RolloutEngine:
    """Return the engine of a recipe. Raises RecipeError if it cannot sample from this policy."""
    return load_implementation(ENGINES[config.rollout.engine])(config, backend, text)
