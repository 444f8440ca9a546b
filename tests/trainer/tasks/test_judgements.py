"""The default judge (`answer: null`) against a person's judgement of 900 completions, kind by kind."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from abrun.errors import RecipeError
from abrun.recipe.tasks import Gsm8k, Jsonl
from abrun.trainer.tasks import Example, make_task
from abrun.trainer.tasks import problems as values
from abrun.trainer.tasks.expressions import final_answer
from abrun.trainer.tasks.problems import judge_by_reference, judge_by_value

# One reference a line, with completions that a person calls right and wrong
JUDGEMENTS = [
    json.loads(line) for line in Path(__file__).with_name("judgements.jsonl").open(encoding="utf-8")
]

# A person says otherwise: what the judge returns today, and why
DISAGREEMENTS = [
    ("72", "She sold 72 clips in 2 months.", 0),  # prose without a mark: the last number counts
    ("68", "68, and not 67", 0),
    ("4", "4 = 2+2", 0),
    ("1024", r"\boxed{2^{10}}", 0),  # nothing is computed for a whole number
    ("5", r"\boxed{\frac{10}{2}}", 0),
    ("4", "maybe 3, maybe 4", 1),
    ("4", "4!", 1),  # a factorial reads like an exclamation
    ("C", "I think C.", 0),  # a choice has to be boxed, announced or alone
    ("B", "Option B is correct.", 0),
    (r"\text{ellipse}", r"\boxed{\text{an ellipse}}", 0),  # words are compared as they are
    ("2:3", r"\boxed{\frac{2}{3}}", 0),
    (r"(0,\infty)", r"\boxed{(0, \infty]}", 1),  # math-verify's sets
    (r"1 \text{ m}", r"\boxed{100\text{ cm}}", 0),  # units are not converted
    (r"(x-1)^2", r"\boxed{x^2-2x+1}", 1),  # factored, expanded and simplified forms have one value
    (r"x^2-5x+6=0", r"\boxed{x=2,3}", 0),  # an equation is not solved
]


def judged(reference: str, completion: str) -> float:
    return judge_by_reference(Example(prompt="", completion="", answer=reference), completion)


@pytest.mark.parametrize("kind", sorted({row["kind"] for row in JUDGEMENTS}))
def test_the_default_judge_agrees_with_a_person(kind: str) -> None:
    def disagreements() -> Iterator[tuple[str, str, float]]:
        for row in JUDGEMENTS:
            completions = [(text, 1) for text in row["right"]] + [(text, 0) for text in row["wrong"]]
            for completion, reward in completions if row["kind"] == kind else []:
                if (judged_reward := judged(row["reference"], completion)) != reward:
                    yield row["reference"], completion, judged_reward

    assert not list(disagreements())


def test_every_reference_is_right_in_a_box_and_taken_at_load() -> None:
    for row in JUDGEMENTS:
        values.check_reference(row["reference"])
        assert judged(row["reference"], f"\\boxed{{{row['reference']}}}") == 1, row["reference"]


@pytest.mark.parametrize(("reference", "completion", "reward"), DISAGREEMENTS)
def test_known_disagreements_with_a_person(reference: str, completion: str, reward: float) -> None:
    assert judged(reference, completion) == reward


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"first \boxed{1}, at last \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} and $\boxed{2}$", "1, 2"),
        (r"\boxed{1} was wrong, so now \boxed{2}", "2"),
        (r"The answer is $x$ since $y$.", "x"),
        (r"The answer is $x$ or $y$.", "x, y"),
        ("The answer is (A). It is not (B).", "(A)"),
        (r"Answer: The result is \(x^2\)", "x^2"),
        ("#### 5 apples", "5 apples"),
        (r"Hence $x$, and finally \[ y \]", "y"),
        ("Some words.\n\nx + 1", "x + 1"),
        ("<think>It is 3.</think><answer>x + 1</answer>", "x + 1"),
        ("That leaves all of them with 3.50 in the end.", "3.50"),
        ("", ""),
    ],
)
def test_where_the_final_answer_stands(text: str, answer: str) -> None:
    assert final_answer(text).strip() == answer


@pytest.mark.parametrize("answer", [None, "math_verify"])
@pytest.mark.parametrize(
    "reference",
    [
        "",
        " ",
        "$$",
        r"\text{}",
        "???",
        "∎",
        r"\frac{1}{2",
        "}{",
        "x}",
        r"\frac{1}",
        "y =",
        "x^",
        "(1,2",
        r"\left( 1, 2",
    ],
)
def test_a_reference_that_nothing_can_equal_is_refused_at_load(
    reference: str, answer: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "x.jsonl"
    rows = [{"prompt": "a", "answer": r"\sqrt{2}"}, {"prompt": "b", "answer": reference}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(RecipeError) as raised:
        make_task(Jsonl(type="jsonl", path=str(path), answer=answer))  # pyright: ignore[reportArgumentType]
    message = str(raised.value)
    assert message.startswith(f"task.path: {path}, line 2: the answer {reference!r} ") and "\n" not in message
    make_task(Jsonl(type="jsonl", path=str(path), answer="boxed"))
    gsm8k = {"question": "?", "answer": f"#### {reference}"}
    path.write_text(json.dumps(gsm8k) + "\n")
    with pytest.raises(RecipeError, match="line 1: the answer"):
        make_task(Gsm8k(type="gsm8k", path=str(path), answer="math_verify"))


@pytest.mark.parametrize(
    "reference", [r"x \rightarrow y", r"\left\{ x \right.", "[0,1[", "a)", "O+", "∞", r"\boxed{7}"]
)
def test_an_unusual_reference_is_taken(reference: str) -> None:
    values.check_reference(reference)
    assert judged(reference, f"\\boxed{{{reference}}}") == 1


def test_many_references_are_checked_in_a_moment() -> None:
    """math-verify would take a quarter of an hour for 100,000 of them."""
    started = time.process_time()
    for _ in range(40):
        for row in JUDGEMENTS:
            values.check_reference(row["reference"])
    assert (time.process_time() - started) / (40 * len(JUDGEMENTS)) < 1e-4


@pytest.mark.parametrize(
    "completion",
    [
        r"\boxed{9^{9^{9^{9}}}}",
        r"\boxed{" + "(" * 180 + "x" + ")" * 180 + "}",
        r"\boxed{1}," * 20_000,
        r"\(" * 50_000,
        "9" * 100_000,
        "(1," * 30_000,
    ],
)
def test_a_hostile_completion_is_wrong_before_long(completion: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "TIME_LIMIT_S", 1)
    for reference in ("x+1", "5"):
        started = time.process_time()
        assert judged(reference, completion) == 0
        assert judge_by_value(Example(prompt="", completion="", answer=reference), completion) == 0
        assert time.process_time() - started < 8


@pytest.mark.parametrize(
    ("reference", "right", "wrong"),
    [
        (r"8\pi\text{ cm}", r"8\pi", r"8\pi\text{ in}"),
        (r"10\text{ cm}^2", r"10", r"10\text{ cm}^3"),
        (r"10\text{ cm}^2", r"10\text{ cm}^{2}", r"10\text{ cm}"),
        (r"60\text{ mph}", r"60\text{ miles per hour}", r"60\text{ km/h}"),
        ("204_5", "204_{5}", "204_6"),
    ],
)
def test_answers_in_different_units_or_bases_differ(reference: str, right: str, wrong: str) -> None:
    assert judged(reference, f"\\boxed{{{right}}}") == 1
    assert judged(reference, f"\\boxed{{{wrong}}}") == 0


@pytest.mark.parametrize("left", [r"6\cdot 7", r"6 \times 7 ", r"\frac{84}{2}", "6*7", "x"])
def test_the_right_side_of_an_equation_is_the_answer(left: str) -> None:
    assert judged("42", f"\\boxed{{{left}=42}}") == 1
    assert judged("42", f"\\boxed{{{left}=43}}") == 0
