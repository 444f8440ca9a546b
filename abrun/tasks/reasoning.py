"""The tasks of the package reasoning-gym: problems drawn by its generators, judged by its scorers."""

import inspect
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from abrun.errors import RecipeError
from abrun.reasons import Code
from abrun.recipe.tasks import ReasoningGym
from abrun.redaction import shortened
from abrun.tasks import Example
from abrun.tasks.final_answers import last_number
from abrun.tasks.generated import Generated

# How a scorer computes what a completion says; sympy's parse_expr is an eval, too.
RUNS_IT = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\(answer\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning(Example):
    """A problem with what its scorer needs."""

    entry: dict[str, Any] = field(compare=False, repr=False)


def reasoning_gym(config: ReasoningGym) -> Generated:
    """Problems of one task; a completion's reward is the scorer's, from 0 to 1.

    Raises RecipeError where the package has no such task or parameters, where a problem has no reference
    answer, which supervised steps imitate, or is another when it is drawn from the same seed again, and where
    the scorer would run a completion as Python: it could end the run, hang it, or touch files.
    """
    try:
        import reasoning_gym as package  # pyright: ignore[reportMissingImports]
        from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise RecipeError(
            Code.SETTING_NEEDS_PACKAGE(
                field="task.type",
                got="reasoning_gym",
                package="reasoning-gym",
                install="pip install 'abrun[reasoning]'",
                instead=None,
            )
        ) from error
    if config.name not in DATASETS:
        raise RecipeError(
            Code.REASONING_TASK_UNKNOWN(
                got=config.name, version=package.__version__, allowed=sorted(DATASETS)
            )
        )

    def drawn(seed: int) -> tuple[Any, dict[str, Any]]:
        """A data set of one problem, which scores, and the problem."""
        try:
            problems = package.create_dataset(config.name, seed=seed, size=1, **config.parameters)
            return problems, problems[0]
        except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise RecipeError(
                Code.REASONING_PARAMETERS_REFUSED(
                    got=shortened(config.parameters),
                    task=config.name,
                    error=" ".join(str(error).split()) or type(error).__name__,
                )
            ) from error

    def draw(generator: random.Random) -> Example:
        _, entry = drawn(generator.getrandbits(31))
        answer = str(entry["answer"])
        return Reasoning(prompt=entry["question"], completion=answer, answer=answer, entry=entry)

    scorer, _ = drawn(0)
    if config.answer == "text" and RUNS_IT.search(inspect.getsource(type(scorer).score_answer)):
        raise RecipeError(Code.REASONING_SCORER_RUNS_CODE(task=config.name))
    _check(config.name, draw, scorer)

    def judge(example: Example, completion: str) -> float:
        assert isinstance(example, Reasoning)
        number = None if config.answer == "text" else last_number(completion)
        said = completion.strip() if config.answer == "text" else str(number or "")
        try:
            return float(scorer.score_answer(said, example.entry))
        except Exception:  # some scorers parse a completion without asking whether it can be parsed
            return 0.0

    return Generated(name=f"reasoning_gym-{config.name}", draw=draw, judge=judge)


def _check(name: str, draw: Callable[[random.Random], Example], scorer: Any) -> None:
    for seed in range(2):
        first, again = draw(random.Random(seed)), draw(random.Random(seed))
        if first != again:
            raise RecipeError(Code.REASONING_TASK_NOT_REPEATABLE(task=name))
        assert isinstance(first, Reasoning)
        if first.entry["answer"] is None or scorer.score_answer(first.answer, first.entry) < 1:
            raise RecipeError(Code.REASONING_TASK_WITHOUT_ANSWER(task=name))
