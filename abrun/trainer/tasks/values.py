"""Compare a final answer with a reference: as texts, or by their values with math-verify."""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from abrun.trainer.tasks.expressions import (
    TEXT,
    as_text,
    final_answer,
    opening_bracket,
    to_latex,
    units_differ,
)
from abrun.trainer.tasks.final_answers import BOX, is_box_open, last_box_span, last_number, number

MAX_LENGTH = 400  # characters of an answer; math-verify's parser takes seconds for longer ones
TIME_LIMIT_S = 5  # to parse an answer, and again to compare it

CHOICE = re.compile(r"\(?([A-J])\)?")
CHOSEN = re.compile(r"\(?([A-Ja-j])\)?(?:(?<=\))(?!and|or)[\w\\$-].*|[.:](?!and|or)[\w\\$-].*)?")
WORDS = re.compile(r"(?=.*(?:[A-Z][a-z]|[A-Za-z]{4}))[A-Za-z][A-Za-z '.-]*")
RATIO = re.compile(r"[0-9]+(?::[0-9]+)+")
# A version, a time, a ratio, a congruence: math-verify would take a number out of them
NO_VALUE = re.compile(r"[0-9]\.[0-9]+\.[0-9]|[0-9] *: *[0-9]|\\equiv|\\[pb]?mod")
NAME_OR_DIGIT = re.compile(r"[0-9]|(?<![\\A-Za-z])[A-Za-z]|\\(?!text|mbox|math|boxed|left|right)[A-Za-z]")
LABEL = re.compile(r"\(?\w\)?")
PAIRS = (r"\\left(?![a-z])", r"\\right(?![a-z])"), (r"\\begin\{", r"\\end\{")
UNFINISHED = re.compile(r"[=^_\\]\s*$|\\[dtc]?frac\s*(?:\{[^{}]*\}|[0-9])?\s*$")
# x = 5, f(2) = 5, 2 + 3 = 5
EQUATION = re.compile(
    r"^(?:(?:[^A-Za-z=\\]|\\(?:times|cdot|div|d?frac)(?![A-Za-z]))*"
    r"|\s*[A-Za-z](?:_\{?\w+\}?|\([a-z0-9]\))?\s*)=(?!.*=)"
)
LIST = re.compile(r"\\?\{?[-+0-9./]+(?:, +[-+0-9./]+)+\\?\}?")
OPERATION = re.compile(r"[\w)}]\s*(?:[-+*]|\\(?:times|cdot)(?![A-Za-z]))\s*[\w(\\]")


def is_number(reference: str, completion: str) -> bool:
    """Return True if the final answer is a number equal to the reference, with nothing left to compute.

    The final answer is the content of the last box, the last number of the text, or the result of
    `final_answer`. Integers must be written as such: `136/2` is not 68. But 1/2, 0.5 and 50% are equal.
    """
    value = number(reference)
    answer = EQUATION.sub("", final_answer(completion))
    latex = to_latex(answer)
    is_marked = last_box_span(completion) is not None or LIST.fullmatch(answer)
    final_value = None if is_marked else last_number(completion)
    if value is None or is_box_open(completion) or units_differ(latex, to_latex(reference)):
        return False
    if (final_value or number(latex)) == value:
        return True
    is_whole = not value.joined and value.value == value.value.to_integral_value()
    if (is_whole and "%" not in reference) or OPERATION.search(latex):
        return False
    return is_equal(reference, answer)


def is_equal(reference: str, answer: str) -> bool:
    """Return True if two answers have the same text or value.

    Choices (`A`), words (`Evelyn`), ratios and congruences have no value and are compared as texts.
    """
    reference_text, text = as_text(reference), as_text(answer)
    if reference_text == text:
        return bool(text)
    if choice := CHOICE.fullmatch(reference_text):
        chosen = CHOSEN.fullmatch(text)
        return bool(chosen and chosen[1].upper() == choice[1])
    if is_words(reference) or RATIO.fullmatch(reference_text):
        return reference_text.casefold() == text.casefold()
    latex, reference_latex = to_latex(answer), to_latex(reference)
    if (
        not text
        or len(latex) > MAX_LENGTH
        or is_words(answer)
        or NO_VALUE.search(latex + " " + reference_latex)
    ):
        return False
    is_set = {
        bracket == "{" for bracket in (opening_bracket(latex), opening_bracket(reference_latex)) if bracket
    }
    return (
        len(is_set) < 2
        and not units_differ(latex, reference_latex)
        and _is_same_value(reference_latex, latex)
    )


def check_reference(reference: str) -> None:
    """Raise ValueError for a reference that no answer could equal, not even its own text in a box.

    Checks the text only, in 5 microseconds. Parsing with math-verify takes 9 ms and happens when the
    reference is first used. A reference that math-verify cannot parse is compared as text.
    """
    if not (NAME_OR_DIGIT.search(reference) or NAME_OR_DIGIT.search(as_text(reference))):
        raise ValueError(
            f"the answer {reference[:60]!r} has no number or name to compare with; give its value"
        )
    content = BOX.sub("{", reference)
    is_closed = last_box_span(f"\\boxed{{{content}}}") == (len("\\boxed{"), len("\\boxed{" + content))
    pairs = PAIRS if "[" in content or "]" in content else (*PAIRS, (r"\(", r"\)"))
    is_paired = all(
        len(re.findall(opens, content)) == len(re.findall(closes, content)) for opens, closes in pairs
    )
    if not ((is_closed and is_paired) or LABEL.fullmatch(content)) or UNFINISHED.search(content):
        raise ValueError(
            f"the answer {reference[:60]!r} lacks a brace, bracket, argument or side; no completion could "
            "equal it"
        )


def is_words(answer: str) -> bool:
    """Return True if an answer is words (`Evelyn`, `\\text{June 20}`) rather than variables (`xy`)."""
    stripped = answer.strip(" $.")
    text = TEXT.fullmatch(stripped)
    return bool(re.search("[A-Za-z]{2}", text[1]) if text else WORDS.fullmatch(stripped))


def _is_same_value(reference: str, answer: str) -> bool:
    """Compare with math-verify. Its time limits use SIGALRM, so it must run in the main thread."""
    from math_verify import verify  # imported late: it takes a second, and file checks do not need it

    expected, values = _parse(reference), _parse(answer)
    # Allow 0 <= x < 1 for [0,1)
    is_close = verify(expected, values, allow_set_relation_comp=True, timeout_seconds=TIME_LIMIT_S)
    return is_close and not (expected and values and _is_rounded(values[0], expected[0]))


def _is_rounded(answer: Any, reference: Any) -> bool:
    """Return True if an answer has a rounded decimal for a number of the reference that is not rational.

    math-verify compares 6 places: it takes 1.41421356 for the root of 2.
    """
    from sympy import Float, nsimplify

    decimals = [nsimplify(value, rational=True) for value in _find_numbers(answer) if value.has(Float)]
    exact_values = [value for value in _find_numbers(reference) if decimals and not value.is_rational]
    distances = (abs((exact - decimal).n(40)) for exact in exact_values for decimal in decimals)
    return any(distance.is_comparable and 1e-20 < distance < 1e-5 for distance in distances)


def _find_numbers(expression: Any) -> Iterator[Any]:
    """Yield the numbers of a sympy expression that are not part of a larger number."""
    if getattr(expression, "is_number", False):
        yield expression
        return
    for part in getattr(expression, "args", ()):
        yield from _find_numbers(part)


@lru_cache(maxsize=4096)
def _parse(latex: str) -> list[Any]:
    from math_verify import parse

    # No fallback: math-verify would compare texts that it cannot parse, cut at a comma or colon.
    settings: Any = {"fallback_mode": "no_fallback", "parsing_timeout": TIME_LIMIT_S}
    return parse(f"\\boxed{{{latex}}}", **settings) or parse(latex, **settings)
