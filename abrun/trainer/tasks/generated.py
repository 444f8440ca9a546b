"""Generated tasks: each example is drawn from its own random generator."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from abrun.errors import RecipeError
from abrun.trainer.tasks import Example

# With 40 draws per prompt, a task of 2n equally likely prompts misses some of them once in 10^8 cases.
DRAWS_A_PROMPT = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """An endless stream of examples; see abrun.trainer.tasks.TrainingTask."""

    name: str  # of the stream
    draw: Callable[[random.Random], Example]
    judge: Callable[[Example, str], float]
    reject: Callable[[Example, random.Random], str] | None = None  # draws a rejected completion
    excluded: frozenset[str] = frozenset()  # prompts that are redrawn

    def examples(self, seed: int, start: int, count: int, redraw: int = 0) -> list[Example]:
        stream = f"{seed}-redraw-{redraw}" if redraw else seed
        return [self._example(f"{stream}-{i}") for i in range(start, start + count)]

    def reward(self, example: Example, completion: str) -> float:
        return self.judge(example, completion)

    def held_out(self, count: int) -> list[Example]:
        """Return the first `count` distinct prompts of the validation stream.

        Raises RecipeError unless the task has at least as many other prompts.
        """
        examples, last_new_draw = dict[str, Example](), 0
        for i in range(DRAWS_A_PROMPT * count):
            example = self._example(f"validation-{i}")
            if example.prompt not in examples:
                examples[example.prompt], last_new_draw = example, i
            if len(examples) == 2 * count:
                return list(examples.values())[:count]
            if i - last_new_draw > DRAWS_A_PROMPT * len(examples):
                break
        raise RecipeError(
            f"validation.num_prompts: got {count}, but the task has about {len(examples)} different prompts "
            f"and at most half can be held out; use {max(1, len(examples) // 2)}, or a larger task"
        )

    def without(self, prompts: frozenset[str]) -> "Generated":
        return replace(self, excluded=self.excluded | prompts)

    def _example(self, place: str) -> Example:
        generator = random.Random(f"{self.name}-{place}")
        while (example := self.draw(generator)).prompt in self.excluded:
            pass
        # Drawn last, so that the prompts do not depend on whether completions are rejected.
        return replace(example, rejected=self.reject(example, generator)) if self.reject else example
