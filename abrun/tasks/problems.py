"""Tasks from JSON-lines files.

Problems are judged by the value of their final answers, or by a user's verifier; completions and preferences
are there to learn from, and nothing judges another completion.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from abrun.errors import RecipeError
from abrun.recipe import Completions, Gsm8k, Jsonl, Preferences
from abrun.tasks import Example
from abrun.tasks.verifiers import mathematically, users_verifier

FileConfig = Gsm8k | Jsonl | Completions | Preferences


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemFile:
    """A finite set of examples, reshuffled for every pass over it; see abrun.tasks.Task."""

    path: str
    field: str  # of the recipe: who asked for the file
    problems: list[Example]  # as they stand in the file
    judge: Callable[[Example, str], float] | None = None

    def examples(self, seed: int, start: int, count: int) -> list[Example]:
        size = len(self.problems)
        orders = {
            epoch: _order(seed, epoch, size)
            for epoch in range(start // size, (start + count - 1) // size + 1)
        }
        return [self.problems[orders[i // size][i % size]] for i in range(start, start + count)]

    def reward(self, example: Example, completion: str) -> float:
        assert self.judge is not None, "recipes keep a task without a verifier from whatever asks for rewards"
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


def problem_file(config: FileConfig) -> ProblemFile:
    """A task with a file. Raises RecipeError where file or verifier do not fit."""
    problems = read_problems(config, config.path, "task.path")
    if isinstance(config, Completions | Preferences):
        return problems
    return replace(problems, judge=users_verifier(config.verifier) if config.verifier else mathematically)


def read_problems(config: FileConfig, path: str, field: str) -> ProblemFile:
    """The problems of a file in the format of `config`; `field` of the recipe asked for it."""
    match config:
        case Gsm8k():
            return _read(path, field, ("question", "answer"), _gsm8k)
        case Jsonl():
            return _read(path, field, (config.prompt_field, config.answer_field), _answered)
        case Completions():
            return _read(path, field, (config.prompt_field, config.completion_field), _completed)
        case Preferences():
            fields = (config.prompt_field, config.chosen_field, config.rejected_field)
            return _read(path, field, fields, _preferred)


def _gsm8k(question: str, answer: str) -> Example:
    """GSM8K's format: the last line of an answer is `#### <number>`."""
    reasoning, mark, final = answer.rpartition("####")
    if not mark:
        raise ValueError("answer without a line '#### <number>'")
    final = final.strip().replace(",", "")
    return Example(prompt=question, completion=f"{reasoning.strip()}\n#### {final}", answer=final)


def _answered(prompt: str, answer: str) -> Example:
    return Example(prompt=prompt, completion=answer, answer=answer)


def _completed(prompt: str, completion: str) -> Example:
    return Example(prompt=prompt, completion=completion)


def _preferred(prompt: str, chosen: str, rejected: str) -> Example:
    if chosen == rejected:
        raise ValueError("the chosen and the rejected completion are the same text")
    return Example(prompt=prompt, completion=chosen, rejected=rejected)


def _read(
    path: str,
    field: str,
    fields: tuple[str, ...],
    read: Callable[..., Example],  # of the texts of `fields`
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
            example = read(*(row[key] for key in fields))
            if not example.prompt:
                raise ValueError("the prompt is empty, and a completion's first token needs one before it")
        except ValueError as error:
            raise RecipeError(
                f"{field}: {path}, line {number}: {error}; correct or remove the line"
            ) from None
        problems.append(replace(example, source=f"{path}, line {number}"))
    if not problems:
        raise RecipeError(f"{field}: got {path!r}, which has no problems; give a JSON-lines file with some")
    return ProblemFile(path=path, field=field, problems=problems)


def _order(seed: int, epoch: int, size: int) -> list[int]:
    order = list(range(size))
    random.Random(f"order-{seed}-{epoch}").shuffle(order)
    return order
