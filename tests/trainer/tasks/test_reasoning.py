"""reasoning-gym's tasks: a stream that repeats, its own scorer, and what it cannot do said in a line."""

from typing import Any

import pytest

from abrun.errors import RecipeError
from abrun.recipe.tasks import ReasoningGym
from abrun.trainer.tasks import TrainingTask, make_task

pytest.importorskip("reasoning_gym")
EASY = {"max_terms": 2, "max_digits": 2}


def task(name: str = "chain_sum", **fields: Any) -> TrainingTask:
    return make_task(ReasoningGym.model_validate({"type": "reasoning_gym", "name": name, **fields}))


def test_a_stream_is_a_function_of_seed_and_position() -> None:
    easy = task(parameters=EASY)
    examples = easy.examples(3, 0, 12)
    assert examples == [*easy.examples(3, 0, 5), *task(parameters=EASY).examples(3, 5, 7)]
    assert len({example.prompt for example in examples}) == 12
    assert examples != easy.examples(4, 0, 12)
    for example in examples:  # its parameters are the task's difficulty
        left, sign, right = example.prompt.split(": ")[1].removesuffix(" =").split()
        assert max(len(left), len(right)) <= 2
        assert int(example.answer) == int(left) + (int(right) if sign == "+" else -int(right))


def test_rewards_are_the_scorer_s() -> None:
    strict, by_number = task(), task(answer="final_number")
    (example,) = strict.examples(0, 0, 1)
    assert strict.reward(example, f" {example.answer}\n") == 1
    assert strict.reward(example, "I don't know") == 0
    said = f"It is {example.answer}."
    assert strict.reward(example, said) == pytest.approx(len(example.answer) / len(said))
    assert by_number.reward(example, said) == 1
    assert (
        by_number.reward(example, "no number") == by_number.reward(example, f"{example.answer} or 7.5") == 0
    )


def test_what_a_scorer_cannot_parse_earns_nothing() -> None:
    factors = task("prime_factorization")
    (example,) = factors.examples(0, 0, 1)
    assert factors.reward(example, example.answer) == 1 and factors.reward(example, "two times 3") == 0


def test_prompts_that_are_held_out_are_never_drawn() -> None:
    whole = task("gcd", parameters={"max_value": 20})
    held_out = frozenset(example.prompt for example in whole.held_out(30))
    assert len(held_out) == 30
    assert held_out & {example.prompt for example in whole.examples(0, 0, 300)}
    assert not held_out & {example.prompt for example in whole.without(held_out).examples(0, 0, 300)}


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("chainsum", {}, ["task.name: got 'chainsum'", "chain_sum"]),
        (
            "chain_sum",
            {"terms": 2},
            ["task.parameters: got {'terms': 2}", "'chain_sum'", "terms"],
        ),
        (
            "chain_sum",
            {"min_terms": 9},
            ["task.parameters: got {'min_terms': 9}"],
        ),
        (
            "chain_sum",
            {"operators": []},
            ["task.parameters: got {'operators': []}"],
        ),
        ("spiral_matrix", {}, ["task.name: got 'spiral_matrix', whose scorer runs completions as Python"]),
        ("countdown", {}, ["task.name: got 'countdown', whose scorer runs completions as Python"]),
        ("graph_color", {}, ["task.name: got 'graph_color', whose problems have no answer"]),
    ],
)
def test_what_it_cannot_do_is_one_line(name: str, parameters: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        task(name, parameters=parameters)
    line = str(caught.value)
    assert len(line.splitlines()) == 1 and all(word in line for word in words), line
