"""Tasks without a file: every example is drawn by a generator of its own."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from abrun.errors import RecipeError
from abrun.reasons import Code
from abrun.tasks import Example

DRAWS_A_PROMPT = 40  # a task of 2n equally likely prompts has shown them all by then, save for 1 in 10^8


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """An endless stream of examples; see abrun.tasks.Task."""

    name: str  # of the stream
    draw: Callable[[random.Random], Example]
    judge: Callable[[Example, str], float]
    reject: Callable[[Example, random.Random], str] | None = None  # draws a worse completion
    excluded: frozenset[str] = frozenset()  # prompts that are drawn again

    def examples(self, seed: int, start: int, count: int) -> list[Example]:
        return [self._example(f"{seed}-{i}") for i in range(start, start + count)]

    def reward(self, example: Example, completion: str) -> float:
        return self.judge(example, completion)

    def held_out(self, count: int) -> list[Example]:
        """The first `count` different prompts of a stream of its own; as many others have to exist."""
        found, newest = dict[str, Example](), 0  # the draw that gave the last new one
        for i in range(DRAWS_A_PROMPT * count):
            example = self._example(f"validation-{i}")
            if example.prompt not in found:
                found[example.prompt], newest = example, i
            if len(found) == 2 * count:
                return list(found.values())[:count]
            if i - newest > DRAWS_A_PROMPT * len(found):
                break
        raise RecipeError(Code.TOO_FEW_PROMPTS(got=count, prompts=len(found), most=max(1, len(found) // 2)))

    def without(self, prompts: frozenset[str]) -> "Generated":
        return replace(self, excluded=self.excluded | prompts)

    def _example(self, place: str) -> Example:
        generator = random.Random(f"{self.name}-{place}")
        while (example := self.draw(generator)).prompt in self.excluded:
            pass
        # Last, so that prompts are those of a task without rejected completions.
        return replace(example, rejected=self.reject(example, generator)) if self.reject else example
