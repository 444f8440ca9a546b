"""Tasks: where prompts come from and how completions are judged."""

from dataclasses import dataclass
from typing import Protocol

from abrun.recipe import Arithmetic, Gsm8k, Jsonl


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One problem."""

    prompt: str
    completion: str  # a reference solution: what supervised steps imitate
    answer: str  # what the verifier compares with


class Task(Protocol):
    """A stream of examples that is a pure function of the seed and the position, and a verifier."""

    def examples(self, seed: int, start: int, count: int) -> list[Example]:
        """The examples at positions start ... start + count - 1 of the seed's endless stream."""
        ...

    def reward(self, example: Example, completion: str) -> float:
        """The verifier's reward for a completion's text, in [0, 1]."""
        ...


def make_task(config: Arithmetic | Gsm8k | Jsonl) -> Task:
    """The task of a recipe. Raises RecipeError where its file is missing or has a line that does not fit."""
    if isinstance(config, Arithmetic):
        from abrun.tasks.arithmetic import ArithmeticTask

        return ArithmeticTask(config.max_operand)
    from abrun.tasks.problems import gsm8k, jsonl

    return gsm8k(config) if isinstance(config, Gsm8k) else jsonl(config)
