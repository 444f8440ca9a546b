"""Every code has a message, and every call gives exactly the values that the message takes."""

import ast
import math
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from abrun.errors import AbrunError
from abrun.messages import MESSAGES, sentence
from abrun.messages.codes import Code, Reason
from abrun.messages.message import render, value_names
from abrun.messages.records import stored_reason
from tests.source import sources, trees


def calls() -> Iterator[tuple[str, Code, ast.Call]]:
    """Yield each `Code.NAME(...)` in the package with the place where it stands."""
    for place, tree in trees().items():
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="Code"), attr=name)):
                    yield f"{place}:{node.lineno}", Code[name], node


def test_every_code_has_a_message_and_is_used() -> None:
    assert set(MESSAGES) == set(Code)
    text = "".join(text for place, text in sources().items() if "messages" not in place.split("/"))
    unused = [code for code in Code if f"Code.{code.name}" not in text]
    assert unused == [Code.FOREIGN_TEXT]  # of `in_words`, and of codes that this version lacks


def test_every_call_gives_the_values_that_its_message_takes() -> None:
    wrong = []
    for place, code, call in calls():
        given = {keyword.arg for keyword in call.keywords}
        if None not in given and (given != set(value_names(MESSAGES[code])) or call.args):
            wrong.append(
                f"{place}: {code.name} takes {value_names(MESSAGES[code])}, got {sorted(map(str, given))}"
            )
    assert wrong == []


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


SEARCHES = {
    *("startswith", "endswith", "removeprefix", "removesuffix", "split", "rsplit", "partition", "rpartition"),
    *("find", "index", "replace", "match", "search", "fullmatch", "findall", "finditer", "sub", "compile"),
}
PHRASE = re.compile(r"[A-Za-z]{2,}[,:;]? \(?[A-Za-z]{2,}|\w: *$|\w $")
# Rooms that read what other programs, people and models write, and no sentence of abrun's
READERS = ("abrun/logs/", "abrun/trainer/tasks/", "abrun/messages/")
# A text of one word, or part of a longer one: who writes it, or what it is if that is abrun
FOREIGN = {
    "Submitted batch job": "Slurm",
    "Input should be ": "pydantic",
    "Value error, ": "pydantic",
    "can't start new thread": "Python",
    "level ": "a recipe's limit",
    "\n\nExamples:\n": "docstrings of commands",
    " vs ": "Megatron-LM",
    "model name": "Linux",
    "status code 404": "Ray",
    "slurmstepd: error": "Slurm",
    "fatal: (Could": "Slurm",
    "GPU ": "nvidia-smi",
    "imed out": "gloo and NCCL",
    "allocate memory": "torch",
    "out of memory": "CUDA",
    "Watchdog caught": "NCCL",
    "Kernel Module": "NVIDIA's driver",
    "weights were not loaded": "vLLM",
    "Failed to load weights": "vLLM",
    "sampling distribution replay": "vLLM",
    "maximum model length": "vLLM",
    "The above exception": "Python",
    "most recent call first": "Python",
    "but got '{'": "PyYAML",
    "last ": "a recipe's window",
    "steps ": "a recipe's window",
    "of climb": "a recipe's margin",
    "highest in": "the heading of a column",
    "fails in": "the heading of a column",
    "allocated in": "the heading of a column",
    "abrun reference save": "a command to paste, before its places are filled",
    "abrun compare": "a command to paste, before its places are filled",
}


def compared_phrases() -> Iterator[tuple[str, str]]:
    """Yield each phrase that the package compares with, searches for or cuts text by, with its place."""
    for place, tree in trees().items():
        if place.startswith(READERS):
            continue
        named = {
            target.id: node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name) and target.id.isupper()
        }
        for node in ast.walk(tree):
            match node:
                case ast.Compare(left=left, comparators=others):
                    operands = [left, *others]
                case ast.Call(func=ast.Attribute(attr=name), args=[first, *_]) if name in SEARCHES:
                    operands = [first]
                case ast.MatchValue(value=value):
                    operands = [value]
                case _:
                    continue
            for operand in operands:
                for part in ast.walk(operand):
                    value = named.get(part.id) if isinstance(part, ast.Name) else part
                    keys = value.keys if isinstance(value, ast.Dict) else [value]
                    for text in (inner for key in keys if key for inner in ast.walk(key)):
                        if isinstance(text, ast.Constant) and isinstance(text.value, str | bytes):
                            yield f"{place}:{node.lineno}", str(text.value)


def values_of_enumerations() -> set[str]:
    """Return the strings among which a type chooses: they are values, whatever they look like."""
    return {
        text.value
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Literal"
        for text in ast.walk(node.slice)
        if isinstance(text, ast.Constant) and isinstance(text.value, str)
    }


def test_no_decision_reads_a_sentence() -> None:
    """A phrase is another program's, named above, or a value of an enumeration; decide by codes instead."""
    known = values_of_enumerations()
    phrases = {text: place for place, text in compared_phrases() if PHRASE.search(text)}
    own = {
        place: text
        for text, place in phrases.items()
        if text not in known and not any(is_part(part, text) for part in FOREIGN)
    }
    assert own == {}
    assert [part for part in FOREIGN if not any(is_part(part, text) for text in phrases)] == []


def is_part(part: str, text: str) -> bool:
    return text == part or (" " in part.strip() and part in text)


DAMAGE = [None, True, -1, 0, 10**400, math.inf, "", "NaN", "text", [], [1], ["text"], [[{}]], {}, {"rank": 1}]
DAMAGE += [[{"rank": 1}], {"code": "killed", "values": {}}, {"code": "of_a_newer_version", "values": {}}]


def test_stored_values_that_do_not_fit_give_the_stored_sentence() -> None:
    random, told = Random(0), Code.FOREIGN_TEXT(text="as it was told")
    for code in [code for code in Code for _ in range(20)]:
        values = {name: random.choice(DAMAGE) for name in value_names(MESSAGES[code])}
        reason = stored_reason({"code": code.value, "values": values}, "as it was told")
        assert reason and (reason.code == code or reason == told) and isinstance(sentence(reason), str)


@pytest.mark.parametrize(
    "stored",
    [
        {"code": "of_a_newer_version", "values": {}},
        {"code": "killed", "values": {"signal": {"code": "of_a_newer_version", "values": {}}}},
        {"code": "killed", "values": {"signal": "SIGKILL", "new": 1}},
        {"code": "killed", "values": []},
        {"code": [], "values": {}},
        {"code": "killed"},
        {},
        None,
    ],
)
def test_a_stored_code_that_is_not_known_gives_the_stored_sentence(stored: dict[str, Any] | None) -> None:
    assert stored_reason(stored, "as it was told") == Code.FOREIGN_TEXT(text="as it was told")
    assert stored_reason(stored, None) is None


def test_reasons_are_worded_wherever_they_stand_among_the_values() -> None:
    inner = Code.NO_CLAIM()
    reason = Code.OF_ARM(arm="a", reason={"first": [inner]})
    assert sentence(reason) == f"a: {{'first': ['{sentence(inner)}']}}"
