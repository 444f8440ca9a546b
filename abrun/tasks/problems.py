"""Problems from JSON-lines files, judged by a mathematical comparison of the final answers (math-verify)."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from math_verify import parse, verify

from abrun.errors import RecipeError
from abrun.recipe import Gsm8k, Jsonl
from abrun.tasks import Example


@dataclass(frozen=True, slots=True)
class ProblemFile:
    """A finite set of examples, reshuffled for every pass over it."""

    problems: list[Example]

    def examples(self, seed: int, start: int, count: int) -> list[Example]:
        size = len(self.problems)
        orders = {
            epoch: _order(seed, epoch, size)
            for epoch in range(start // size, (start + count - 1) // size + 1)
        }
        return [self.problems[orders[i // size][i % size]] for i in range(start, start + count)]

    def reward(self, example: Example, completion: str) -> float:
        # math-verify's own time limits (SIGALRM, so the main thread only) keep a hostile expression from
        # hanging us.
        return float(verify(parse(example.answer), parse(completion)))


def gsm8k(config: Gsm8k) -> ProblemFile:
    """GSM8K's format: `question`, and an `answer` whose last line is `#### <number>`."""

    def example(row: dict[str, Any]) -> Example:
        reasoning, mark, final = row["answer"].rpartition("####")
        if not mark:
            raise ValueError("answer without a line '#### <number>'")
        final = final.strip().replace(",", "")
        completion = f"{reasoning.strip()}\n#### {final}"
        return Example(prompt=row["question"], completion=completion, answer=final)

    return _read(config.path, ("question", "answer"), example)


def jsonl(config: Jsonl) -> ProblemFile:
    """Any JSON lines with a field for the prompt and one for the reference answer."""

    def example(row: dict[str, Any]) -> Example:
        answer = row[config.answer_field]
        return Example(prompt=row[config.prompt_field], completion=answer, answer=answer)

    return _read(config.path, (config.prompt_field, config.answer_field), example)


def _read(path: str, fields: tuple[str, str], example: Callable[[dict[str, Any]], Example]) -> ProblemFile:
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").split("\n")  # a text may hold U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            f"task.path: got {path!r}, which cannot be read: {error}; give a JSON-lines file"
        ) from None
    problems = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not all(isinstance(row.get(field), str) for field in fields):
                raise ValueError(f"text fields {' and '.join(map(repr, fields))} are expected")
            problems.append(example(row))
        except ValueError as error:
            raise RecipeError(
                f"task.path: {path}, line {number}: {error}; correct or remove the line"
            ) from None
    if not problems:
        raise RecipeError(f"task.path: got {path!r}, which has no problems; give a JSON-lines file with some")
    return ProblemFile(problems)


def _order(seed: int, epoch: int, size: int) -> list[int]:
    order = list(range(size))
    random.Random(f"order-{seed}-{epoch}").shuffle(order)
    return order
