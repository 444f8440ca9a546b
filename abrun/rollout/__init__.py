"""Rollout engines: prompts in, completions and the log-probs of their tokens out."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from abrun.backends import Backend
from abrun.models import Text
from abrun.recipe.implementations import ENGINES, load_implementation
from abrun.recipe.run import OwnRunConfig
from abrun.rollout.draws import Draws


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine sampled for one prompt."""

    token_ids: list[int]  # with the end token, where there is one
    logprobs: list[float]  # of each token, under the distribution it was drawn from
    # [tokens, W] uint8, on the CPU: what `exact_support` records of each draw; see abrun.rl.sampling
    support: Tensor | None = field(default=None, compare=False, repr=False)
    truncated: bool  # stopped by max_new_tokens, not by an end token; it counts like any other everywhere


class RolloutEngine(Protocol):
    """Samples completions from the policy's weights. One serves a run's training and its validation."""

    def generate(
        self, prompts: list[list[int]], draws: Draws, *, temperature: float | None = None
    ) -> list[Completion]:
        """One completion a prompt; prompt i is the global batch's row `draws.rows[i]`.

        `temperature` stands in for the recipe's; at 0 every token is the most likely one. What is sampled so
        is not trained on, and has no support.
        """
        ...

    def sync(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Take the policy's weights, whole and one by one under their Hugging Face names. Collective.

        Whoever has no use for one must not run through it: each costs a collective.
        """
        ...

    def sleep(self) -> int:
        """Give the device's memory to training; returns the bytes of it that torch's allocator counts on."""
        ...

    def wake(self) -> bool:
        """Take it back, before weights are synced and completions sampled.

        True where the weights were given away too, and have to be synced, moved or not.
        """
        ...

    def close(self) -> None:
        """End what the engine has started."""
        ...


def make_engine(config: OwnRunConfig, backend: Backend, text: Text) -> RolloutEngine:
    """The engine that a run's recipe names. Raises RecipeError where it cannot sample from this policy."""
    return load_implementation(ENGINES[config.rollout.engine])(config, backend, text)
