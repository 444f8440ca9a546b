"""The arithmetic stream is a function of seed and position; its verifier is exact."""

import hashlib
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from abrun.recipe.tasks import Arithmetic, Validation
from abrun.trainer.tasks import Example, hold_out, make_task
from abrun.trainer.tasks.generated import value

NAMES = {"+": "add", "-": "subtract", "*": "multiply"}


def arithmetic(**fields: Any) -> Arithmetic:
    return Arithmetic.model_validate({"type": "arithmetic", **fields})


@pytest.mark.parametrize(
    ("fields", "sha256"),
    [
        ({}, "f88dc66fdd9837733e53710fe984102156beaba96b02dccdb7dd20feb40066ac"),
        ({"max_operand": 3}, "509f0ddf90eb5493468786ad18e767cc94c71367769d1fbc540b24ed1114d316"),
    ],
)
def test_additions_are_byte_for_byte_those_of_the_first_release(fields: dict, sha256: str) -> None:
    """Recorded before there were other operations: the prompt hash is part of stored experiments."""
    lines = (
        f"{e.prompt}|{e.completion}|{e.answer}" for e in make_task(arithmetic(**fields)).examples(7, 0, 1000)
    )
    assert hashlib.sha256("\0".join(lines).encode()).hexdigest() == sha256


def test_prompts_drawn_instead_of_held_out_ones_are_those_of_the_first_release() -> None:
    """Recorded before examples had rejected completions, which are drawn from the same generator."""
    task, _ = hold_out(arithmetic(max_operand=3), Validation(every=1, num_prompts=8))
    lines = (f"{e.prompt}|{e.completion}|{e.answer}" for e in task.examples(7, 0, 1000))
    digest = hashlib.sha256("\0".join(lines).encode()).hexdigest()
    assert digest == "a812ecf08c7de6a77d8a4794ba70ec3465d51a8952629e11791ca54aaee281e4"


@given(seed=st.integers(0, 2**56), operation=st.sampled_from(list(NAMES.values())))
@settings(deadline=None, max_examples=40)
def test_a_rejected_completion_is_a_little_off(seed: int, operation: str) -> None:
    task = make_task(arithmetic(operations=[operation], max_operand=9))
    for example in task.examples(seed, 0, 20):
        answer, rejected = int(example.answer), int(example.rejected)
        assert abs(answer - rejected) in (1, 2, 10)
        assert rejected >= 0 or answer < 0
        assert str(rejected) == example.rejected
    assert task.examples(seed, 7, 3) == task.examples(seed, 0, 10)[7:]


@given(
    operations=st.lists(st.sampled_from(list(NAMES.values())), min_size=1, max_size=3),
    num_operands=st.integers(2, 20),
    max_operand=st.integers(1, 1000),
    seed=st.integers(0, 2**56),
)
@settings(deadline=None, max_examples=60)
def test_calculations_of_any_difficulty_are_right(
    operations: list[str], num_operands: int, max_operand: int, seed: int
) -> None:
    config = arithmetic(operations=operations, num_operands=num_operands, max_operand=max_operand)
    for example in make_task(config).examples(seed, 3, 5):
        calculation = example.prompt.removesuffix("=")
        operands = [int(number) for number in re.findall(r"\d+", calculation)]
        assert len(operands) == num_operands and max(operands) <= max_operand
        assert {NAMES[sign] for sign in re.findall(r"[^\d]", calculation)} <= set(operations)
        assert example.answer == example.completion == str(eval(calculation))


def test_products_bind_closer_than_sums() -> None:
    assert value([2, 3, 4], ["add", "multiply"]) == 14
    assert value([2, 3, 4], ["multiply", "subtract"]) == 2
    assert value([1, 2, 3, 4, 5], ["subtract", "multiply", "multiply", "add"]) == -18
    assert value([3, 8], ["subtract"]) == -5


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("95", 1.0),
        (" 95\n", 1.0),
        ("9", 0.0),
        ("950", 0.0),
        ("095", 0.0),
        ("95.0", 0.0),
        ("", 0.0),
        ("5+90", 0.0),
    ],
)
def test_the_verifier_is_exact(completion: str, reward: float) -> None:
    example = Example(prompt="37+58=", completion="95", answer="95")
    assert make_task(Arithmetic(type="arithmetic")).reward(example, completion) == reward
