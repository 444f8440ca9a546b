"""The arithmetic stream is a function of seed and position; its verifier is exact."""

import pytest

from abrun.recipe import Arithmetic
from abrun.tasks import Example, make_task


def test_any_slicing_of_the_stream_gives_the_same_examples() -> None:
    task = make_task(Arithmetic(type="arithmetic"))
    whole = task.examples(7, 0, 50)
    assert [example for start in range(0, 50, 10) for example in task.examples(7, start, 10)] == whole
    assert [task.examples(7, i, 1)[0] for i in reversed(range(50))] == whole[::-1]
    assert make_task(Arithmetic(type="arithmetic")).examples(7, 13, 5) == whole[13:18]


def test_seeds_and_positions_give_different_examples() -> None:
    task = make_task(Arithmetic(type="arithmetic", max_operand=999))
    first, second = task.examples(0, 0, 100), task.examples(1, 0, 100)
    assert len({e.prompt for e in first}) > 95
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 5


def test_every_problem_is_right_and_every_operand_occurs() -> None:
    examples = make_task(Arithmetic(type="arithmetic", max_operand=3)).examples(0, 0, 400)
    seen = set()
    for example in examples:
        left, right = map(int, example.prompt.removesuffix("=").split("+"))
        assert example.answer == example.completion == str(left + right)
        seen.add((left, right))
    assert seen == {(left, right) for left in range(4) for right in range(4)}


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
