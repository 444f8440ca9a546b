"""Rollout engines: prompts in, completions and the log-probs of their tokens out."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine sampled for one prompt."""

    token_ids: list[int]  # with the end token, where there is one
    logprobs: list[float]  # of each token, under the distribution it was drawn from
    truncated: bool  # stopped by max_new_tokens, not by an end token; it counts like any other everywhere


class RolloutEngine(Protocol):
    """Samples completions from the policy's current weights."""

    def generate(
        self, prompts: list[list[int]], uniforms: Tensor, *, temperature: float | None = None
    ) -> list[Completion]:
        """One completion a prompt. `uniforms` [B, max_new_tokens] float64 in [0, 1) decides every draw.

        `temperature` stands in for the recipe's; at 0 every token is the most likely one.
        """
        ...
