"""Verifiers of completions: by the final answer as it is written, by its value, or a user's own function."""

import importlib
import os
import sys
from collections.abc import Callable
from numbers import Real
from typing import Any

from abrun.errors import RecipeError
from abrun.reasons import Code
from abrun.tasks import Example
from abrun.tasks.expressions import final_answer
from abrun.tasks.final_answers import last_box, last_number, number
from abrun.tasks.values import is_equal, is_number

LARGEST = 3.4028234663852886e38  # rewards are float32


def final_number(example: Example, completion: str) -> float:
    """Whether the completion's last number is the reference: 1 or 0; 0 for a reference that is none."""
    reference = number(example.answer)
    return float(reference is not None and last_number(completion) == reference)


def boxed(example: Example, completion: str) -> float:
    """Whether the last \\boxed{} holds the reference and nothing else: 1 or 0.

    Compared as numbers where the reference is one, otherwise as texts without their spaces.
    """
    content, reference = last_box(completion), number(example.answer)
    if content is None:
        return 0.0
    if reference is not None:
        return float(number(content) == reference)
    return float("".join(content.split()) == "".join(example.answer.strip().strip("$").split()))


def by_reference(example: Example, completion: str) -> float:
    """Judge a number by its value with nothing computed, any other reference as `mathematically`: 1 or 0."""
    if number(example.answer) is None:
        return mathematically(example, completion)
    return float(is_number(example.answer, completion))


def mathematically(example: Example, completion: str) -> float:
    """Return 1 if the final answers have the same value (math-verify), otherwise 0.

    An expression has the value that it computes to: the question, repeated, is then an answer.
    """
    return float(is_equal(example.answer, final_answer(completion)))


def users_verifier(name: str) -> Callable[[Example, str], float]:
    """The verifier in a user's `module:function`, which takes prompt, completion and answer.

    Imports the module, with the working directory behind the other places where modules are looked for.
    Raises RecipeError where there is no such function; the verifier does where it raises, or returns anything
    but a finite number: a reward of 0 in its place would train on a fault.
    """
    function = _imported(name)

    def judge(example: Example, completion: str) -> float:
        try:
            reward = function(example.prompt, completion, example.answer)
        except Exception as error:  # a user's code may raise anything
            raise RecipeError(
                Code.VERIFIER_RAISED(verifier=name, error=_line(error), prompt=example.source)
            ) from error
        if not isinstance(reward, Real) or not _fits(reward):
            raise RecipeError(
                Code.VERIFIER_RETURNED(verifier=name, returned=repr(reward)[:60], prompt=example.source)
            )
        return float(reward)

    return judge


def _imported(name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's code may raise anything
        raise RecipeError(
            Code.VERIFIER_IMPORT_FAILED(verifier=name, module=module_name, error=_line(error))
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        what = (
            f"the {function_name} of {module_name} is no function"
            if function
            else (f"{module_name} has no {function_name}")
        )
        raise RecipeError(Code.VERIFIER_INVALID(verifier=name, problem=what))
    return function


def _fits(reward: Any) -> bool:
    # NaN compares false, and a huge int compares without becoming a float
    return bool(-LARGEST <= reward <= LARGEST)


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
