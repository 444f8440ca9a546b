"""Generated calculations such as `37+58=`, verified exactly."""

import random
from collections.abc import Sequence
from functools import partial

from abrun.recipe.tasks import Arithmetic
from abrun.trainer.tasks import Example
from abrun.trainer.tasks.generated import Generated

SYMBOLS = {"add": "+", "subtract": "-", "multiply": "*"}


def arithmetic(config: Arithmetic) -> Generated:
    """Return the task of calculations with uniformly drawn operands and operations."""
    return Generated(name="arithmetic", draw=partial(_draw, config), judge=_judge, reject=_reject)


def value(operands: Sequence[int], operations: Sequence[str]) -> int:
    """Return the value of a chain of operations, with products before sums."""
    terms = [operands[0]]
    for operation, operand in zip(operations, operands[1:], strict=True):
        if operation == "multiply":
            terms[-1] *= operand
        else:
            terms.append(operand if operation == "add" else -operand)
    return sum(terms)


def _draw(config: Arithmetic, draw: random.Random) -> Example:
    # Operands first: this keeps the stream of additions from versions without other operations.
    operands = [draw.randint(0, config.max_operand) for _ in range(config.num_operands)]
    operations = [draw.choice(config.operations) for _ in operands[1:]]
    signs = [SYMBOLS[operation] for operation in operations]
    prompt = "".join(f"{operand}{sign}" for operand, sign in zip(operands, [*signs, "="], strict=True))
    answer = str(value(operands, operations))
    return Example(prompt=prompt, completion=answer, answer=answer)


def _reject(example: Example, draw: random.Random) -> str:
    """Return an answer that is off by 1, 2 or 10; negative only if the correct answer is."""
    answer, distance = int(example.answer), draw.choice((1, 2, 10))
    return str(answer + distance if answer < distance or draw.random() < 0.5 else answer - distance)


def _judge(example: Example, completion: str) -> float:
    return float(completion.strip() == example.answer)
