"""Problems from JSON-lines files, judged by the value of their final answers, or by a user's verifier."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from abrun.errors import RecipeError
from abrun.recipe import Gsm8k, Jsonl
from abrun.tasks import Example
from abrun.tasks.verifiers import mathematically, users_verifier


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemFile:
    """A finite set of examples, reshuffled for every pass over it; see abrun.tasks.Task."""

    path: str
    field: str  # of the recipe: who asked for the file
    problems: list[Example]  # as they stand in the file
    judge: Callable[[Example, str], float] = mathematically

    def examples(self, seed: int, start: int, count: int) -> list[Example]:
        size = len(self.problems)
        orders = {
            epoch: _order(seed, epoch, size)
            for epoch in range(start // size, (start + count - 1) // size + 1)
        }
        return [self.problems[orders[i // size][i % size]] for i in range(start, start + count)]

    def reward(self, example: Example, completion: str) -> float:
        return self.judge(example, completion)

    def held_out(self, count: int) -> list[Example]:
        """The last `count` problems of the file."""
        if count > len(self.problems):
            raise RecipeError(
                f"validation.num_prompts: got {count}; {self.field}, {self.path}, has {len(self.problems)} "
                "problems: use at most that many"
            )
        return self.problems[-count:]

    def without(self, prompts: frozenset[str]) -> "ProblemFile":
        left = [problem for problem in self.problems if problem.prompt not in prompts]
        if not left:
            raise RecipeError(
                f"validation: holds out every problem of {self.field}, {self.path}; use a smaller "
                "num_prompts, or another file for validation.path"
            )
        return replace(self, problems=left)


def problem_file(config: Gsm8k | Jsonl) -> ProblemFile:
    """A task with a file. Raises RecipeError where file or verifier do not fit."""
    problems = read_problems(config, config.path, "task.path")
    return replace(problems, judge=users_verifier(config.verifier)) if config.verifier else problems


def read_problems(config: Gsm8k | Jsonl, path: str, field: str) -> ProblemFile:
    """The problems of a file in the format of `config`; `field` of the recipe asked for it."""
    if isinstance(config, Gsm8k):
        return _read(path, field, ("question", "answer"), _gsm8k)
    fields = (config.prompt_field, config.answer_field)
    return _read(path, field, fields, lambda row: (row[fields[0]], row[fields[1]], row[fields[1]]))


def _gsm8k(row: dict[str, Any]) -> tuple[str, str, str]:
    """GSM8K's format: `question`, and an `answer` whose last line is `#### <number>`."""
    reasoning, mark, final = row["answer"].rpartition("####")
    if not mark:
        raise ValueError("answer without a line '#### <number>'")
    final = final.strip().replace(",", "")
    return row["question"], f"{reasoning.strip()}\n#### {final}", final


def _read(
    path: str,
    field: str,
    fields: tuple[str, str],
    read: Callable[[dict[str, Any]], tuple[str, str, str]],  # prompt, completion, answer
) -> ProblemFile:
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").split("\n")  # a text may hold U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            f"{field}: got {path!r}, which cannot be read: {error}; give a JSON-lines file"
        ) from None
    problems = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in fields):
                raise ValueError(f"text fields {' and '.join(map(repr, fields))} are expected")
            prompt, completion, answer = read(row)
        except ValueError as error:
            raise RecipeError(
                f"{field}: {path}, line {number}: {error}; correct or remove the line"
            ) from None
        source = f"{path}, line {number}"
        problems.append(Example(prompt=prompt, completion=completion, answer=answer, source=source))
    if not problems:
        raise RecipeError(f"{field}: got {path!r}, which has no problems; give a JSON-lines file with some")
    return ProblemFile(path=path, field=field, problems=problems)


def _order(seed: int, epoch: int, size: int) -> list[int]:
    order = list(range(size))
    random.Random(f"order-{seed}-{epoch}").shuffle(order)
    return order
