"""What is held out for validation: fixed, and never met in training."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from abrun.errors import RecipeError
from abrun.recipe.tasks import Arithmetic, Gsm8k, Jsonl, Validation, WordProblems
from abrun.trainer.tasks import Example, TrainingTask, hold_out, make_task
from abrun.trainer.tasks.generated import Generated
from tests.snapshot import Snapshot

TASK: TypeAdapter[Any] = TypeAdapter(Arithmetic | WordProblems | Gsm8k | Jsonl)
GENERATED = (
    {"type": "arithmetic", "max_operand": 3},
    {"type": "arithmetic", "operations": ["add", "multiply"], "num_operands": 3, "max_operand": 9},
    {"type": "word_problems"},
    {"type": "word_problems", "topics": ["ages"], "max_number": 3},
)


def held_out(task: dict[str, Any], count: int, **fields: Any) -> tuple[TrainingTask, list[Example]]:
    return hold_out(TASK.validate_python(task), Validation(every=1, num_prompts=count, **fields))


def numbered(path: Path, *numbers: int) -> str:
    path.write_text("".join(json.dumps({"prompt": f"p{i}", "answer": str(i)}) + "\n" for i in numbers))
    return str(path)


@given(task=st.sampled_from(GENERATED), count=st.integers(1, 8), seed=st.integers(0, 2**56))
@settings(deadline=None, max_examples=60)
def test_no_seed_trains_on_a_held_out_prompt(task: dict[str, Any], count: int, seed: int) -> None:
    training, examples = held_out(task, count)
    prompts = {example.prompt for example in examples}
    assert len(prompts) == len(examples) == count
    assert not prompts & {example.prompt for example in training.examples(seed, 0, 100)}
    assert training.examples(seed, 37, 5) == training.examples(seed, 0, 50)[37:42]


@pytest.mark.parametrize("task", GENERATED)
def test_the_rest_of_the_stream_stays_as_it_was(task: dict[str, Any]) -> None:
    training, examples = held_out(task, 8)
    prompts = {example.prompt for example in examples}
    pairs = list(
        zip(
            make_task(TASK.validate_python(task)).examples(5, 0, 200),
            training.examples(5, 0, 200),
            strict=True,
        )
    )
    assert all((before == after) == (before.prompt not in prompts) for before, after in pairs)


def test_where_there_are_too_few_prompts_it_does_not_look_for_long(
    monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot
) -> None:
    drawn, example = list[str](), Generated._example
    monkeypatch.setattr(Generated, "_example", lambda task, at: drawn.append(at) or example(task, at))
    with pytest.raises(RecipeError) as refusal:
        held_out(GENERATED[0], 100_000)
    snapshot(refusal.value)
    assert len(drawn) < 2000


def test_at_most_half_of_the_prompts_are_held_out(snapshot: Snapshot) -> None:
    training, _ = held_out(GENERATED[0], 8)
    assert len({example.prompt for example in training.examples(0, 0, 300)}) == 8
    with pytest.raises(RecipeError) as refusal:
        held_out(GENERATED[0], 9)
    snapshot(refusal.value)


def test_the_last_lines_of_the_tasks_own_file(tmp_path: Path) -> None:
    path = numbered(tmp_path / "x.jsonl", *range(20), 18)  # the last line's prompt stands twice
    training, examples = held_out({"type": "jsonl", "path": path}, 5)
    assert [example.prompt for example in examples] == ["p16", "p17", "p18", "p19", "p18"]
    assert {example.prompt for example in training.examples(3, 0, 48)} == {f"p{i}" for i in range(16)}
    assert [example.source for example in examples][-1] == f"{path}, line 21"


def test_a_file_of_its_own(tmp_path: Path) -> None:
    path = numbered(tmp_path / "x.jsonl", *range(10))
    other = numbered(tmp_path / "y.jsonl", 100, 101, 3, 102)
    training, examples = held_out({"type": "jsonl", "path": path}, 2, path=other)
    assert [example.prompt for example in examples] == ["p3", "p102"]
    assert {example.prompt for example in training.examples(0, 0, 18)} == {
        f"p{i}" for i in range(10) if i != 3
    }
    rows = [{"question": f"q{i}", "answer": f"So.\n#### {i}"} for i in range(3)]
    (tmp_path / "z.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"type": "gsm8k", "path": str(tmp_path / "z.jsonl")}
    assert [e.answer for e in held_out(task, 2)[1]] == ["1", "2"]


@pytest.mark.parametrize(
    ("count", "other"),
    [
        (11, None),
        (10, None),
        (3, (1, 2)),
        (10, range(10)),
        (1, ()),
    ],
)
def test_too_few_lines(count: int, other: Any, tmp_path: Path, snapshot: Snapshot) -> None:
    path = numbered(tmp_path / "x.jsonl", *range(10))
    fields = {} if other is None else {"path": numbered(tmp_path / "y.jsonl", *other)}
    with pytest.raises(RecipeError) as raised:
        held_out({"type": "jsonl", "path": path}, count, **fields)
    assert "\n" not in str(raised.value)
    snapshot(str(raised.value))


def test_a_validation_file_that_cannot_be_read(tmp_path: Path) -> None:
    path = numbered(tmp_path / "x.jsonl", 1)
    with pytest.raises(RecipeError, match=r"^validation\.path: got '/nonexistent'"):
        held_out({"type": "jsonl", "path": path}, 1, path="/nonexistent")
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(RecipeError, match=r"^validation\.path: .*bad.jsonl, line 1: "):
        held_out({"type": "jsonl", "path": path}, 1, path=str(tmp_path / "bad.jsonl"))
