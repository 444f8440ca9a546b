"""Tasks of the package reasoning-gym: problems from its generators, rewards from its scorers."""

import inspect
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from abrun.errors import RecipeError
from abrun.messages.texts import listed
from abrun.recipe.extras import needs_package
from abrun.recipe.tasks import ReasoningGym
from abrun.runs.redaction import shortened
from abrun.trainer.tasks import Example
from abrun.trainer.tasks.final_answers import last_number
from abrun.trainer.tasks.generated import Generated

# Calls by which a scorer would evaluate a completion as Python; sympy's parse_expr uses eval, too.
EVALUATES_ANSWER = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\(answer\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning(Example):
    """A problem with the entry that its scorer needs."""

    entry: dict[str, Any] = field(compare=False, repr=False)


def reasoning_gym(config: ReasoningGym) -> Generated:
    """Return the task that a recipe names; rewards come from its scorer, from 0 to 1.

    Raises RecipeError if the package is missing or has no such task or parameters, if problems have no
    reference answer (the target of supervised steps) or are not reproducible from a seed, and if the scorer
    would run completions as Python code, which could end or hang the run, or change files.
    """
    try:
        import reasoning_gym as package  # pyright: ignore[reportMissingImports]
        from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise RecipeError(
            needs_package("task.type", "reasoning_gym", "reasoning-gym", "pip install 'abrun[reasoning]'")
        ) from error
    if config.name not in DATASETS:
        raise RecipeError(
            f"task.name: got {config.name!r}; reasoning-gym {package.__version__} has "
            f"{listed(sorted(DATASETS))}"
        )

    def draw_problem(seed: int) -> tuple[Any, dict[str, Any]]:
        """Return a data set of one problem, which is also its scorer, and the problem."""
        try:
            problems = package.create_dataset(config.name, seed=seed, size=1, **config.parameters)
            return problems, problems[0]
        except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise RecipeError(
                f"task.parameters: got {shortened(config.parameters)} with task.name {config.name!r}, which "
                f"refuses them: {' '.join(str(error).split()) or type(error).__name__}"
            ) from error

    def draw(generator: random.Random) -> Example:
        _, entry = draw_problem(generator.getrandbits(31))
        answer = str(entry["answer"])
        return Reasoning(prompt=entry["question"], completion=answer, answer=answer, entry=entry)

    scorer, _ = draw_problem(0)
    if config.answer == "text" and EVALUATES_ANSWER.search(inspect.getsource(type(scorer).score_answer)):
        raise RecipeError(
            f"task.name: got {config.name!r}, whose scorer runs completions as Python; use another task, or "
            "answer: final_number"
        )
    _check_reproducible(config.name, draw, scorer)

    def judge(example: Example, completion: str) -> float:
        assert isinstance(example, Reasoning)
        number = None if config.answer == "text" else last_number(completion)
        answer = completion.strip() if config.answer == "text" else str(number or "")
        try:
            return float(scorer.score_answer(answer, example.entry))
        except Exception:  # some scorers raise for completions that they cannot parse
            return 0.0

    return Generated(name=f"reasoning_gym-{config.name}", draw=draw, judge=judge)


def _check_reproducible(name: str, draw: Callable[[random.Random], Example], scorer: Any) -> None:
    for seed in range(2):
        example, repeated_example = draw(random.Random(seed)), draw(random.Random(seed))
        if example != repeated_example:
            raise RecipeError(
                f"task.name: got {name!r}, which does not repeat its problems with the same seed; use "
                "another task"
            )
        assert isinstance(example, Reasoning)
        if example.entry["answer"] is None or scorer.score_answer(example.answer, example.entry) < 1:
            raise RecipeError(
                f"task.name: got {name!r}, whose problems have no answer that its scorer accepts; use "
                "another task"
            )
