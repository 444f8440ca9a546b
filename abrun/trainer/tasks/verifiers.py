"""Verifiers of completions: by the text of the final answer, by its value, or by a user's function."""

import importlib
import os
import sys
from collections.abc import Callable
from numbers import Real
from typing import Any

from abrun.errors import RecipeError
from abrun.trainer.tasks import Example
from abrun.trainer.tasks.expressions import final_answer
from abrun.trainer.tasks.final_answers import last_box, last_number, number
from abrun.trainer.tasks.values import is_equal, is_number

MAX_REWARD = 3.4028234663852886e38  # rewards are float32


def final_number(example: Example, completion: str) -> float:
    """Return 1 if the last number of the completion equals the reference, else 0."""
    reference = number(example.answer)
    return float(reference is not None and last_number(completion) == reference)


def boxed(example: Example, completion: str) -> float:
    """Return 1 if the last \\boxed{} contains exactly the reference, else 0.

    A numeric reference is compared as a number, any other as text without spaces.
    """
    content, reference = last_box(completion), number(example.answer)
    if content is None:
        return 0.0
    if reference is not None:
        return float(number(content) == reference)
    return float("".join(content.split()) == "".join(example.answer.strip().strip("$").split()))


def judge_by_reference(example: Example, completion: str) -> float:
    """Return 1 if the final answer equals the reference, else 0.

    A numeric reference requires a number of the same value, without evaluation of expressions. Any other
    reference is judged by `judge_by_value`.
    """
    if number(example.answer) is None:
        return judge_by_value(example, completion)
    return float(is_number(example.answer, completion))


def judge_by_value(example: Example, completion: str) -> float:
    """Return 1 if the final answers have the same value (math-verify), otherwise 0.

    Expressions are evaluated, so repeating the question can count as an answer.
    """
    return float(is_equal(example.answer, final_answer(completion)))


def load_verifier(name: str) -> Callable[[Example, str], float]:
    """Load a user's verifier, given as `module:function`; it takes prompt, completion and answer.

    The working directory is appended to sys.path for the import. Raises RecipeError if there is no such
    function. The verifier raises RecipeError if the user's function raises or returns anything but a finite
    number, because training on a reward of 0 instead would hide the bug.
    """
    function = _import_function(name)

    def judge(example: Example, completion: str) -> float:
        try:
            reward = function(example.prompt, completion, example.answer)
        except Exception as error:  # a user's code may raise anything
            raise RecipeError(
                f"task.verifier: {name!r} raised {_one_line(error)} for the prompt at {example.source}; it "
                "must return a number for every completion"
            ) from error
        if not isinstance(reward, Real) or not _is_float32(reward):
            raise RecipeError(
                f"task.verifier: {name!r} returned {repr(reward)[:60]} for the prompt at {example.source}; "
                "it must return a finite number"
            )
        return float(reward)

    return judge


def _import_function(name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's code may raise anything
        raise RecipeError(
            f"task.verifier: got {name!r}, but importing {module_name} raised {_one_line(error)}; name an "
            "installed module, or one in the directory where abrun is started"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        problem = (
            f"{function_name} of {module_name} is not a function"
            if function
            else (f"{module_name} has no {function_name}")
        )
        raise RecipeError(
            f"task.verifier: got {name!r}; {problem}; name a function (prompt, completion, answer) -> number"
        )
    return function


def _is_float32(reward_value: Any) -> bool:
    # NaN compares false, and a huge int is compared without conversion to float
    return bool(-MAX_REWARD <= reward_value <= MAX_REWARD)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
