"""Problem files: read strictly, reshuffled every pass, judged by math-verify or a verifier of one's own."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from abrun.errors import RecipeError
from abrun.recipe.tasks import CompletionsTask, Gsm8k, Jsonl, PreferencesTask, Validation
from abrun.trainer.tasks import Example, TrainingTask, hold_out, make_task
from tests.snapshot import Snapshot

GSM8K = [
    {"question": "How many?", "answer": "It is 2*3=<<2*3=6>>6.\nSo six.\n#### 6"},
    {"question": "How much?", "answer": "A lot.\n#### 1,234,567"},
    {"question": "Below zero?", "answer": "Cold.\n####  -5 "},
]


def written(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def numbered(folder: Path, count: int) -> TrainingTask:
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
    "line",
    [
        '{"prompt": "a", "answer": ',
        '{"prompt": "a"}',
        '{"prompt": "a", "answer": 3}',
        '["a", "b"]',
        "null",
        '{"prompt": "", "answer": "1"}',
    ],
)
def test_a_bad_line_is_named(line: str, tmp_path: Path, snapshot: Snapshot) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"prompt": "a", "answer": "1"}}\n\n{line}\n')
    with pytest.raises(RecipeError) as raised:
        make_task(Jsonl(type="jsonl", path=str(path)))
    message = str(raised.value)
    assert f"{path}, line 3: " in message and "\n" not in message
    snapshot(message)


def test_a_gsm8k_answer_without_its_mark(tmp_path: Path, snapshot: Snapshot) -> None:
    path = written(tmp_path / "x.jsonl", [GSM8K[0], {"question": "?", "answer": "42"}])
    with pytest.raises(RecipeError) as refusal:
        make_task(Gsm8k(type="gsm8k", path=path))
    snapshot(refusal.value)


@pytest.mark.parametrize("content", [None, b"", b"\n\n", b"\xff\xfe\x00"])
def test_a_file_without_problems(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RecipeError, match=r"task\.path: got ") as raised:
        make_task(Jsonl(type="jsonl", path=str(path)))
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


# --- texts to imitate and to prefer ---

PAIRS = [{"prompt": f"p{i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(6)]


def test_completions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    written(tmp_path / "x.jsonl", [{"q": "Hello?", "a": "", "n": 3}])
    config = CompletionsTask(type="completions", path="~/x.jsonl", prompt_field="q", completion_field="a")
    assert make_task(config).examples(0, 0, 1) == [Example(prompt="Hello?", completion="")]


def test_preferences_hold_out_their_last_lines(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", [*PAIRS, PAIRS[0] | {"rejected": "worse"}])
    config = PreferencesTask(type="preferences", path=path)
    assert make_task(config).examples(0, 0, 7) != make_task(config).examples(1, 0, 7)
    training, held_out = hold_out(config, Validation(every=1, num_prompts=2))
    assert held_out == [
        Example(prompt="p5", completion="good 5", rejected="bad 5"),
        Example(prompt="p0", completion="good 0", rejected="worse"),
    ]
    # Another pair of a held-out prompt is not trained on either.
    assert {example.prompt for example in training.examples(0, 0, 8)} == {"p1", "p2", "p3", "p4"}
    assert held_out[0].source == f"{path}, line 6"


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "a", "chosen": "b"}',
        '{"prompt": "a", "chosen": ["b"], "rejected": "c"}',
        '{"prompt": "a", "chosen": "b", "rejected": "b"}',
        '{"prompt": "", "chosen": "b", "rejected": "c"}',
    ],
)
def test_a_bad_pair_is_named(line: str, tmp_path: Path, snapshot: Snapshot) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(PAIRS[0]) + f"\n{line}\n")
    with pytest.raises(RecipeError) as raised:
        make_task(PreferencesTask(type="preferences", path=str(path)))
    message = str(raised.value)
    assert message.startswith(f"task.path: {path}, line 2: ") and "\n" not in message
    snapshot(message)


# --- verifiers of one's own ---

SENTENCE = Example(prompt="1+1=", completion="2", answer="2", source="x.jsonl, line 7")
VERIFIERS = """
import json, math
from decimal import Decimal
from fractions import Fraction
import numpy as np
calls = []
def length(prompt, completion, answer):
    calls.append((prompt, completion, answer))
    return -len(completion) / 2
def yes(*texts): return True
def half(*texts): return np.float32(0.5)
def third(*texts): return Fraction(1, 3)
def fails(*texts): return json.loads("{")
def nothing(*texts): pass
def nan(*texts): return math.nan
def endless(*texts): return 1e39
def enormous(*texts): return 10**400
def text(*texts): return "1"
def decimal(*texts): return Decimal(1)
def few(completion): return 1.0
number = 3
"""


def verified_by(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> TrainingTask:
    """A task with a verifier out of a module in the working directory."""
    (folder / "the_verifiers.py").write_text(VERIFIERS)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "the_verifiers", raising=False)
    path = written(folder / "x.jsonl", [{"prompt": "1+1=", "answer": "2"}])
    return make_task(Jsonl(type="jsonl", path=path, verifier=name))


@pytest.mark.parametrize(
    ("function", "reward"), [("length", -2.5), ("yes", 1.0), ("half", 0.5), ("third", 1 / 3)]
)
def test_a_verifier_of_ones_own_may_give_any_number(
    function: str, reward: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = verified_by(tmp_path, f"the_verifiers:{function}", monkeypatch)
    assert task.reward(SENTENCE, "is it") == reward
    assert task.without(frozenset()).reward(SENTENCE, "is it") == reward
    if function == "length":
        assert sys.modules["the_verifiers"].calls == [("1+1=", "is it", "2")] * 2


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("fails", "raised JSONDecodeError: Expecting property name"),
        ("few", "raised TypeError: few() takes 1 positional argument"),
        ("nothing", "returned None"),
        ("nan", "returned nan"),
        ("endless", "returned 1e+39"),
        ("enormous", "returned 1000000"),
        ("text", "returned '1'"),
        ("decimal", "returned Decimal('1')"),
    ],
)
def test_a_verifier_that_fails_names_the_line_of_its_prompt(
    function: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = verified_by(tmp_path, f"the_verifiers:{function}", monkeypatch)
    with pytest.raises(RecipeError) as raised:
        task.reward(task.examples(0, 0, 1)[0], "is it")
    message = str(raised.value)
    assert message.startswith(f"task.verifier: 'the_verifiers:{function}' {reason}"), message
    assert f"{tmp_path / 'x.jsonl'}, line 1;" in message and "\n" not in message


@pytest.mark.parametrize(
    "name",
    [
        "no_such_module:judge",
        "the_verifiers.deeper:judge",
        "broken_verifiers:judge",
        "the_verifiers:judge",
        "the_verifiers:number",
    ],
)
def test_a_verifier_that_is_not_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot
) -> None:
    (tmp_path / "broken_verifiers.py").write_text("def judge(:\n")
    with pytest.raises(RecipeError) as raised:
        verified_by(tmp_path, name, monkeypatch)
    message = str(raised.value)
    assert message.startswith(f"task.verifier: got {name!r}")
    snapshot(message)
    assert "\n" not in message


def test_gsm8k_with_a_verifier_gives_it_the_final_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified_by(tmp_path, "the_verifiers:length", monkeypatch)
    path = written(tmp_path / "train.jsonl", GSM8K[1:2])
    task = make_task(Gsm8k(type="gsm8k", path=path, verifier="the_verifiers:length"))
    assert task.reward(task.examples(0, 0, 1)[0], "1234") == -2
    assert sys.modules["the_verifiers"].calls == [("How much?", "1234", "1234567")]
