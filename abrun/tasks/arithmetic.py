"""Additions such as `37+58=`, generated, verified exactly."""

import random
from dataclasses import dataclass

from abrun.tasks import Example


@dataclass(frozen=True, slots=True)
class ArithmeticTask:
    """Sums of two numbers below 10**digits, drawn uniformly."""

    digits: int

    def examples(self, seed: int, start: int, count: int) -> list[Example]:
        return [self._example(random.Random(f"arithmetic-{seed}-{i}")) for i in range(start, start + count)]

    def reward(self, example: Example, completion: str) -> float:
        return float(completion.strip() == example.answer)

    def _example(self, draw: random.Random) -> Example:
        left, right = draw.randrange(10**self.digits), draw.randrange(10**self.digits)
        total = str(left + right)
        return Example(prompt=f"{left}+{right}=", completion=total, answer=total)
