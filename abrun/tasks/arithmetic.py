"""Additions such as `37+58=`, generated, verified exactly."""

import random
from dataclasses import dataclass

from abrun.tasks import Example


@dataclass(frozen=True, slots=True)
class ArithmeticTask:
    """Sums of two numbers from 0 to `max_operand`, drawn uniformly."""

    max_operand: int

    def examples(self, seed: int, start: int, count: int) -> list[Example]:
        return [self._example(random.Random(f"arithmetic-{seed}-{i}")) for i in range(start, start + count)]

    def reward(self, example: Example, completion: str) -> float:
        return float(completion.strip() == example.answer)

    def _example(self, draw: random.Random) -> Example:
        left, right = draw.randint(0, self.max_operand), draw.randint(0, self.max_operand)
        total = str(left + right)
        return Example(prompt=f"{left}+{right}=", completion=total, answer=total)
