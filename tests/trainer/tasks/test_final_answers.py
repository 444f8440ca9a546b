"""Final answers are read as they are written: an echo of the question is not its answer."""

import json
from pathlib import Path

import pytest

from abrun.errors import RecipeError
from abrun.recipe.tasks import Gsm8k, Jsonl
from abrun.trainer.tasks import Example, make_task
from abrun.trainer.tasks.final_answers import last_box, last_number, number
from abrun.trainer.tasks.problems import boxed, final_number, judge_by_value
from tests.snapshot import Snapshot

# One completion a line, and what it earns where the last number is compared literally
FINAL_NUMBERS = [
    json.loads(line)
    for line in Path(__file__).with_name("final_numbers.jsonl").read_text(encoding="utf-8").splitlines()
]


@pytest.mark.parametrize("kind", dict.fromkeys(row["kind"] for row in FINAL_NUMBERS))
def test_the_last_number_literally(kind: str) -> None:
    for row in FINAL_NUMBERS:
        example = Example(prompt="", completion="", answer=row["answer"])
        reward = final_number(example, row["completion"])
        assert row["kind"] != kind or reward == row["reward"], row


def test_math_verify_takes_an_echo_for_the_answer() -> None:
    echo = Example(prompt="23 + 45", completion="", answer="68"), "23 + 45"
    assert judge_by_value(*echo) == 1 and final_number(*echo) == 0 and boxed(*echo) == 0


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        ("68", "\\boxed{68}", 1),
        ("68", "\\boxed{67}, no, $\\boxed{ 68. }$ in 3 steps", 1),
        ("68", "\\boxed{\\$68\\text{ dollars}}", 1),
        ("1234", "\\boxed{1{,}234}", 1),
        ("68", "\\boxed{23 + 45}", 0),
        ("45", "\\boxed{23 + 45}", 0),
        ("68", "\\boxed{x = 68}", 0),
        ("68", "68", 0),
        ("68", "\\boxed{68", 0),
        ("68", "\\boxed{68} or \\boxed{6", 1),
        ("\\frac{3}{4}", "\\boxed{\\frac{3}{4}}", 1),
        ("$x + 1$", "\\boxed{x+1}", 1),
        ("x + 1", "\\boxed{1 + x}", 0),
        ("(1, 2)", "\\boxed{(1,2)}", 1),
    ],
)
def test_what_the_last_box_holds(answer: str, completion: str, reward: float) -> None:
    assert boxed(Example(prompt="", completion="", answer=answer), completion) == reward


@pytest.mark.parametrize(
    "text", ["42", " -4.5 ", "1,000", "$42$", "$5.00", "20\\%", "3/4", "\\frac{3}{4}", "1e-3", "42."]
)
def test_what_is_a_number(text: str) -> None:
    assert number(text) == last_number(text) is not None


@pytest.mark.parametrize(
    "text", ["", "x", "2x", "x+1", "3 4", "(1, 2)", "23 + 45", "3\\pi", "1 1/2", "42 km"]
)
def test_what_is_no_number(text: str) -> None:
    assert number(text) is None


def test_long_texts_are_read_in_a_moment() -> None:
    assert last_number("1," * 50_000 + "7") == number("7")
    assert last_number("9" * 100_000 + " 7") == number("7")
    assert last_box("\\boxed{" * 2000 + "7") is None


def task_file(folder: Path, answer: str, **row: str) -> str:
    path = folder / "x.jsonl"
    path.write_text(json.dumps({"prompt": "?", "question": "?", "answer": answer}) + "\n")
    return str(path)


def test_each_way_as_a_recipe_asks_for_it(tmp_path: Path) -> None:
    jsonl, gsm8k = task_file(tmp_path, "68"), tmp_path / "gsm8k.jsonl"
    gsm8k.write_text(json.dumps({"question": "?", "answer": "So.\n#### 68"}) + "\n")
    for answer, rewards in {
        None: (0, 1, 1),
        "final_number": (0, 1, 1),
        "boxed": (0, 0, 1),
        "math_verify": (1, 1, 1),
    }.items():
        tasks = (
            make_task(Jsonl(type="jsonl", path=jsonl, answer=answer)),
            make_task(Gsm8k(type="gsm8k", path=str(gsm8k), answer=answer)),
        )
        for task in tasks:
            example = task.examples(0, 0, 1)[0]
            completions = "23 + 45", "It is 68.", "\\boxed{68}"
            assert tuple(task.reward(example, completion) for completion in completions) == rewards


def test_a_reference_that_is_no_number(tmp_path: Path, snapshot: Snapshot) -> None:
    path = task_file(tmp_path, "x + 1")
    make_task(Jsonl(type="jsonl", path=path))
    with pytest.raises(RecipeError) as raised:
        make_task(Jsonl(type="jsonl", path=path, answer="final_number"))
    message = str(raised.value)
    assert "math_verify" in message
    snapshot(message)
    with pytest.raises(RecipeError) as refusal:
        make_task(Gsm8k(type="gsm8k", path=task_file(tmp_path, "#### x")))
    snapshot(refusal.value)
    make_task(Gsm8k(type="gsm8k", path=task_file(tmp_path, "#### x"), answer="math_verify"))
