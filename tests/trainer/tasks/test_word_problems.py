"""Word problems: right, deterministic, readable by the presets' tokenizer, judged by their final answer."""

import hashlib
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from abrun.recipe.tasks import WordProblems
from abrun.trainer.models.sources import UNKNOWN, character_tokenizer
from abrun.trainer.tasks import Example, TrainingTask, make_task
from abrun.trainer.tasks.generated import TOPICS
from tests.snapshot import Snapshot

GOLDEN = "4d3d5645efda1f5852c25a10f3f2d84764e719e492412996d27869f05f1cd1d0"
CALCULATION = re.compile(r"(\d+(?: [-+*/] \d+)+) = (\d+)")


def word_problems(**fields: Any) -> TrainingTask:
    return make_task(WordProblems.model_validate({"type": "word_problems", **fields}))


def test_the_first_problems_of_a_stream(snapshot: Snapshot) -> None:
    """A change of the templates shows here: the prompt hash is part of stored experiments."""
    examples = word_problems().examples(0, 0, 300)
    snapshot(examples[1].prompt)
    snapshot(examples[1].completion)
    lines = (f"{example.prompt}|{example.completion}" for example in examples)
    assert hashlib.sha256("\0".join(lines).encode()).hexdigest() == GOLDEN


@given(
    seed=st.integers(0, 2**56), max_number=st.sampled_from([3, 20, 999_999]), topic=st.sampled_from([*TOPICS])
)
@settings(deadline=None, max_examples=60)
def test_every_calculation_of_a_solution_is_right_and_the_last_number_is_the_answer(
    seed: int, max_number: int, topic: str
) -> None:
    task = word_problems(topics=[topic], max_number=max_number)
    for example in task.examples(seed, 0, 10):
        solution, _, claim = example.completion.rpartition(" The answer is ")
        assert claim == f"{example.answer}."
        calculations = CALCULATION.findall(solution)
        assert calculations and all(eval(left) == int(right) for left, right in calculations), solution
        assert int(example.answer) >= 0
        assert re.findall(r"\d+", solution.removesuffix("left over."))[-1] == example.answer
        assert task.reward(example, example.completion) == 1
        assert 20 < len(example.completion) < 200


def test_problems_hold_all_that_their_solution_starts_from() -> None:
    """Every number of a solution is one of the problem's, or was calculated before it."""
    for example in word_problems(max_number=500).examples(1, 0, 300):
        known = set(re.findall(r"\d+", example.prompt))
        for left, right in CALCULATION.findall(example.completion):
            new = set(re.findall(r"\d+", left)) - known
            # How many full bags there are is found by division, which the solution leaves out.
            assert not new or ("bags of" in example.prompt and len(new) == 1), example
            known |= {right, *new}


def test_any_slicing_of_the_stream_gives_the_same_examples() -> None:
    task = word_problems()
    whole = task.examples(7, 0, 50)
    assert [example for start in range(0, 50, 10) for example in task.examples(7, start, 10)] == whole
    assert task.examples(8, 0, 50) != whole
    assert len({example.prompt for example in whole}) > 45


def test_the_presets_tokenizer_reads_every_character() -> None:
    tokenizer = character_tokenizer()
    unknown = tokenizer.convert_tokens_to_ids(UNKNOWN)
    for example in word_problems().examples(0, 0, 500):
        for text in (example.prompt, example.completion):
            token_ids = tokenizer(text)["input_ids"]
            assert unknown not in token_ids and tokenizer.decode(token_ids) == text


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("6 * 7 = 42. The answer is 42.", 1.0),
        ("The answer is 42", 1.0),
        ("the answer is 42 dollars", 1.0),
        ("The answer is $42.", 1.0),
        ("The answer is 41. No: the answer is 42.", 1.0),
        ("The answer is 42. No: the answer is 41.", 0.0),
        ("The answer is 42. No: the answer is 42.5.", 0.0),
        ("The answer is 4", 0.0),
        ("The answer is 420.", 0.0),
        ("The answer is -42.", 0.0),
        ("The answer is forty-two. 42.", 0.0),
        ("42", 0.0),
        ("The answer is", 0.0),
        ("", 0.0),
    ],
)
def test_the_verifier_reads_the_final_answer(completion: str, reward: float) -> None:
    assert word_problems().reward(Example(prompt="", completion="", answer="42"), completion) == reward
