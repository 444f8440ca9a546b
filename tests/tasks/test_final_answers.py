"""Final answers are read as they are written: an echo of the question is not its answer."""

import json
from pathlib import Path

import pytest

from abrun.errors import RecipeError
from abrun.recipe.tasks import Gsm8k, Jsonl
from abrun.tasks import Example, make_task
from abrun.tasks.final_answers import last_box, last_number, number
from abrun.tasks.verifiers import boxed, by_reference, final_number, mathematically
from tests.snapshot import Snapshot


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        # plain
        ("68", "68", 1),
        ("68", "The answer is 68.", 1),
        ("68", "So 23 + 45 = 68", 1),
        ("68", "<<23+45=68>>68\n#### 68", 1),
        ("68", "68, and not 67", 0),
        ("68", "6", 0),
        ("68", "680", 0),
        ("68", "168", 0),
        ("68", "", 0),
        ("68", "sixty-eight", 0),
        # echoes of the question, and sums left undone
        ("68", "23 + 45", 0),
        ("68", "23+45=", 0),
        ("68", "\\boxed{23 + 45}", 0),
        ("68", "136/2", 0),
        ("68", "\\frac{136}{2}", 0),
        ("68", "4 * 17", 0),
        ("68", "4 \\times 17", 0),
        ("68", "90 - 22", 0),
        ("68", "The sum of 23 and 45", 0),
        ("8", "2^3", 0),
        ("8", "2^{3}", 0),
        ("300", "3 * 10^2", 0),
        ("10", "3 * 10^2", 0),
        ("2", "3 * 10^2", 0),
        ("3.5", "7/2", 0),
        ("7/2", "7/2", 1),
        # thousands
        ("1234567", "1,234,567 people.", 1),
        ("1,234,567", "1234567", 1),
        ("1234", "1{,}234", 1),
        ("1234", "$1\\,234$", 1),
        ("234", "1,234", 0),
        ("4", "1, 2, 3, 4", 1),
        ("1234", "1,23,4", 0),
        # decimals
        ("0.5", ".5", 1),
        ("0.5", "0.50.", 1),
        ("68", "68.0", 1),
        ("68", "68.", 1),
        ("68", "68.5", 0),
        ("5", "68.5", 0),
        ("3.14", "Pi is about 3.14...", 1),
        ("3.14159265358979323846", "3.14159265358979323847", 0),
        ("3", "section 1.2.3", 0),
        # negatives
        ("-5", "It is -5.", 1),
        ("-5", "\N{MINUS SIGN}5", 1),
        ("-5", "x = \N{EN DASH}5", 1),
        ("6", "5\N{EN DASH}6", 0),
        ("-5", "x=-5", 1),
        ("-5", "(-5)", 1),
        ("-5", "5", 0),
        ("5", "-5", 0),
        ("5", "+5", 1),
        ("5", "10-5", 0),
        ("-5", "10-5", 0),
        ("-5", "10 - 5", 0),
        ("-5", "-$5", 1),
        ("-5", "$-5", 1),
        ("-5", "- 5", 1),
        ("5", "- 5", 0),
        ("-5", "x = - 5", 1),
        ("-5", "The answer is \N{MINUS SIGN} 5.", 1),
        ("-5", "minus 5", 1),
        ("-5", "10 -5", 0),
        # a number that belongs to something longer
        ("45", "23 + 45", 0),
        ("17", "4 \\times 17", 0),
        ("17", "4 x 17", 0),
        ("5", "10 - 5", 0),
        ("5", "x - 5", 0),
        ("5", "3 apples + 5 apples", 0),
        ("72", "71 or 72", 0),
        ("72", "$71$ or $72$", 0),
        ("72", "71 \\text{ or } 72", 0),
        ("72", "\\boxed{71} or \\boxed{72}", 0),
        ("72", "x = 71 or x = 72", 0),
        ("72", "71 to 72", 0),
        ("72", "between 71 and 72", 0),
        ("72", "He goes to 72.", 1),
        ("7", "3 and 4 make 7", 1),
        ("5", "5x", 0),
        ("5", "5xy", 0),
        ("5", "5 - x", 0),
        ("5", "5i", 0),
        ("5", "5\\pi", 0),
        ("5", "5\\sqrt{2}", 0),
        ("2", "\\sqrt{2}", 0),
        ("4", "\\log 4", 0),
        ("4", "f(4)", 0),
        ("5", "5m", 1),
        ("5", "5 more", 1),
        ("1.5", "1.5.2", 0),
        ("2", "1.5.2", 0),
        ("12", "12:30", 0),
        ("30", "12:30", 0),
        ("1/2", "2 1/2", 0),
        ("1/2", "2\\frac{1}{2}", 0),
        ("2", "(1, 2)", 0),
        ("1000", "1 000", 1),
        ("1000", "1\\ 000", 1),
        ("1000", "1\\;000", 1),
        ("1000", "1\N{NARROW NO-BREAK SPACE}000", 1),
        ("3", "5 3", 1),
        # fractions
        ("3/4", "\\frac{3}{4}", 1),
        ("\\frac{3}{4}", "It is 3/4.", 1),
        ("3/4", "$\\dfrac34$", 1),
        ("-3/4", "-\\frac{3}{4}", 1),
        ("3/4", "6/8", 0),
        ("3/4", "0.75", 0),
        ("0.75", "3/4", 0),
        ("4", "3/4", 0),
        ("11/2", "1\\frac{1}{2}", 0),
        ("2", "\\frac{-1}{2}", 0),
        ("-1/2", "\\frac{-1}{2}", 1),
        ("2", "2\N{VULGAR FRACTION ONE HALF}", 0),
        ("1/2", "\N{VULGAR FRACTION ONE HALF}", 1),
        ("5", "5\N{SUPERSCRIPT TWO}", 0),
        ("68", "68 m\N{SUPERSCRIPT TWO}", 1),
        # percent, currency, units
        ("20", "20%", 1),
        ("20%", "20 percent", 1),
        ("20", "20\\%", 1),
        ("0.2", "20%", 0),
        ("68", "$68", 1),
        ("$68", "68 dollars", 1),
        ("68", "\\$68.00", 1),
        ("68", "€68", 1),
        ("68", "68€.", 1),
        ("68", "68km", 1),
        ("68", "68 m^2", 1),
        ("68", "68 m2", 1),
        ("68", "68 cm^{-2}", 1),
        ("68", "68 \\text{ apples}", 1),
        ("68", "68^\\circ", 1),
        ("68", "\N{CJK UNIFIED IDEOGRAPH-7EA6}68\N{CJK UNIFIED IDEOGRAPH-5143}", 1),
        ("2", "68 m^2", 0),
        ("68", "**68**", 1),
        # scientific notation
        ("3.2e5", "3.2E+5", 1),
        ("320000", "3.2e5", 1),
        ("3.2e-5", "0.000032", 1),
        ("5", "3.2e5", 0),
        ("5", "5eggs", 1),
        ("1", "1e99999999999999999999", 0),
    ],
)
def test_the_last_number_literally(answer: str, completion: str, reward: float) -> None:
    assert final_number(Example(prompt="", completion="", answer=answer), completion) == reward


def test_math_verify_takes_an_echo_for_the_answer() -> None:
    echo = Example(prompt="23 + 45", completion="", answer="68"), "23 + 45"
    assert mathematically(*echo) == 1 and final_number(*echo) == 0 and boxed(*echo) == 0


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


def test_no_number_is_not_the_reference_s() -> None:
    assert final_number(Example(prompt="", completion="", answer="no number"), "x") == 0


def test_by_the_kind_of_the_reference() -> None:
    def judged(answer: str, completion: str) -> float:
        return by_reference(Example(prompt="", completion="", answer=answer), completion)

    assert judged("68", "23 + 45") == 0 and judged("68", "So it is 68.") == 1
    assert judged("$x + 1$", "$1 + x$") == 1


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
