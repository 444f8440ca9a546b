"""Every code has a message, and every call gives exactly the values that the message takes."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from abrun.errors import AbrunError
from abrun.messages import MESSAGES, sentence
from abrun.messages.message import render, value_names
from abrun.reasons import Code, Reason
from docs import codes

ROOT = Path(__file__).parents[1]


def calls() -> Iterator[tuple[str, Code, ast.Call]]:
    """Yield each `Code.NAME(...)` in the package with the place where it stands."""
    for path in sorted((ROOT / "abrun").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="Code"), attr=name)):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", Code[name], node


def test_every_code_has_a_message_and_is_used() -> None:
    assert set(MESSAGES) == set(Code)
    text = "".join(
        path.read_text() for path in (ROOT / "abrun").rglob("*.py") if "messages" not in path.parts
    )
    assert [code for code in Code if f"Code.{code.name}" not in text] == []


def test_every_call_gives_the_values_that_its_message_takes() -> None:
    wrong = []
    for place, code, call in calls():
        given = {keyword.arg for keyword in call.keywords}
        if None not in given and (given != set(value_names(MESSAGES[code])) or call.args):
            wrong.append(
                f"{place}: {code.name} takes {value_names(MESSAGES[code])}, got {sorted(map(str, given))}"
            )
    assert wrong == []


def test_the_documented_table_is_that_of_the_code() -> None:
    written = (ROOT / "docs/codes.md").read_text()
    assert written == codes.page() + "\n", "print it again: python docs/codes.py > docs/codes.md"


@pytest.mark.parametrize(
    ("template", "values", "expected"),
    [
        ("{seeds:list}", {"seeds": [1, 2]}, "1, 2"),
        ("{pairs:count usable pair}", {"pairs": 1}, "1 usable pair"),
        ("{pairs:count pair}", {"pairs": 0}, "0 pairs"),
        ("{seeds:plural seed}", {"seeds": [1, 2]}, "seeds"),
        ("{run:if run {run}|none}{more:if  and {more:count run}}", {"run": "a", "more": 0}, "run a"),
        ("{run:if run {run}|{more:if some|none}}", {"run": None, "more": 1}, "some"),
        ("{runs:first}, {runs:some}, {runs:join /}", {"runs": ["a", "b"]}, "a and 1 more, a, b, a/b"),
        ("{value:repr} {share:.2f}", {"value": "a", "share": 0.5}, "'a' 0.50"),
    ],
)
def test_templates_have_formats_of_their_own(template, values, expected) -> None:
    assert render(template, values) == expected


def test_a_reason_is_equal_by_code_and_values_and_carries_plain_values_alone() -> None:
    reason = Code.NO_CLAIM(path=Path("a"), sizes=(1, 2))
    assert reason == Reason(Code.NO_CLAIM, {"path": "a", "sizes": [1, 2]}) and reason["path"] == "a"
    assert len({reason, Code.NO_CLAIM(sizes=[1, 2], path="a")}) == 1
    with pytest.raises(TypeError):
        Code.NO_CLAIM(value=object())


def test_an_error_shows_its_sentence_and_keeps_its_code() -> None:
    error = AbrunError(Code.NO_CLAIM())
    assert (error.code, str(error)) == (Code.NO_CLAIM, sentence(Code.NO_CLAIM()))
