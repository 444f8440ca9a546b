"""Problem files: read strictly, reshuffled every pass, judged by mathematical value."""

import json
from collections import Counter
from pathlib import Path

import pytest

from abrun.errors import RecipeError
from abrun.recipe import Gsm8k, Jsonl
from abrun.tasks import Example, Task, make_task

GSM8K = [
    {"question": "How many?", "answer": "It is 2*3=<<2*3=6>>6.\nSo six.\n#### 6"},
    {"question": "How much?", "answer": "A lot.\n#### 1,234,567"},
    {"question": "Below zero?", "answer": "Cold.\n####  -5 "},
]


def written(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def numbered(folder: Path, count: int) -> Task:
    rows = [{"prompt": f"problem {i}", "answer": str(i)} for i in range(count)]
    return make_task(Jsonl(type="jsonl", path=written(folder / "numbered.jsonl", rows)))


def test_gsm8k_lines(tmp_path: Path) -> None:
    task = make_task(Gsm8k(type="gsm8k", path=written(tmp_path / "train.jsonl", GSM8K)))
    found = {example.prompt: example for example in task.examples(0, 0, 3)}
    assert found["How many?"] == Example(
        prompt="How many?", completion="It is 2*3=<<2*3=6>>6.\nSo six.\n#### 6", answer="6"
    )
    assert found["How much?"].answer == "1234567"
    assert found["How much?"].completion == "A lot.\n#### 1234567"
    assert found["Below zero?"].answer == "-5"


def test_jsonl_lines_with_fields_of_ones_own(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", [{"q": "½ + ½?", "solution": "1", "source": None}])
    task = make_task(Jsonl(type="jsonl", path=path, prompt_field="q", answer_field="solution"))
    assert task.examples(0, 0, 1) == [Example(prompt="½ + ½?", completion="1", answer="1")]


def test_empty_lines_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(
        '\n{"prompt": "a", "answer": "1"}\n\n  \n{"prompt": "b", "answer": "2"}'
    )
    task = make_task(Jsonl(type="jsonl", path=str(tmp_path / "x.jsonl")))
    assert {example.prompt for example in task.examples(0, 0, 2)} == {"a", "b"}


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    prompt = "one\u2028two\x85three"
    row = json.dumps({"prompt": prompt, "answer": "1"}, ensure_ascii=False)
    (tmp_path / "x.jsonl").write_text(row + "\r\n", encoding="utf-8", newline="")
    task = make_task(Jsonl(type="jsonl", path=str(tmp_path / "x.jsonl")))
    assert task.examples(0, 0, 1)[0].prompt == prompt


def test_every_pass_visits_every_example_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    task = numbered(tmp_path, 20)
    stream = [example.prompt for example in task.examples(3, 0, 60)]
    passes = [stream[0:20], stream[20:40], stream[40:60]]
    assert all(len(set(one)) == 20 for one in passes)
    assert passes[0] != passes[1] != passes[2] != passes[0]
    assert [e.prompt for e in task.examples(4, 0, 20)] != passes[0]


def test_any_slicing_gives_the_same_stream(tmp_path: Path) -> None:
    task = numbered(tmp_path, 7)
    whole = task.examples(3, 0, 50)
    assert [e for start in range(0, 50, 10) for e in task.examples(3, start, 10)] == whole
    assert task.examples(3, 33, 3) == whole[33:36]
    assert Counter(e.prompt for e in whole[:49]) == {f"problem {i}": 7 for i in range(7)}


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        ("42", "so the answer is \\boxed{42}", 1.0),
        ("42", "The answer is 42.", 1.0),
        ("42", "first 7, then \\boxed{41}", 0.0),
        ("42", "#### 42", 1.0),
        ("42", "", 0.0),
        ("42", "I do not know", 0.0),
        ("1/2", "\\boxed{0.5}", 1.0),
        ("0.5", "$\\frac{1}{2}$", 1.0),
        ("1/2", "\\boxed{\\frac{1}{3}}", 0.0),
        ("1234567", "That makes 1,234,567.", 1.0),
        ("1,234,567", "\\boxed{1234567}", 1.0),
        ("1234567", "That makes 1,234,568.", 0.0),
        ("-5", "\\boxed{-5}", 1.0),
        ("-5", "\\boxed{5}", 0.0),
        ("\\frac{3}{4}", "$\\frac{3}{4}$", 1.0),
    ],
)
def test_verdicts(answer: str, completion: str, reward: float, tmp_path: Path) -> None:
    task = numbered(tmp_path, 1)
    assert task.reward(Example(prompt="", completion=answer, answer=answer), completion) == reward


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "a", "answer": ', ""),
        ('{"prompt": "a"}', "text fields 'prompt' and 'answer' are expected"),
        ('{"prompt": "a", "answer": 3}', "text fields"),
        ('["a", "b"]', "text fields"),
        ("null", "text fields"),
    ],
)
def test_a_bad_line_is_named(line: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"prompt": "a", "answer": "1"}}\n\n{line}\n')
    with pytest.raises(RecipeError) as raised:
        make_task(Jsonl(type="jsonl", path=str(path)))
    message = str(raised.value)
    assert f"{path}, line 3: " in message and reason in message and "\n" not in message


def test_a_gsm8k_answer_without_its_mark(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", [GSM8K[0], {"question": "?", "answer": "42"}])
    with pytest.raises(RecipeError, match=r"line 2: answer without a line '#### <number>'"):
        make_task(Gsm8k(type="gsm8k", path=path))


@pytest.mark.parametrize("content", [None, b"", b"\n\n", b"\xff\xfe\x00"])
def test_a_file_without_problems(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RecipeError, match=r"task\.path: got ") as raised:
        make_task(Jsonl(type="jsonl", path=str(path)))
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)
