"""Messages of reason codes and their rendering. A message is a template with extra formats, or a function."""

import inspect
import re
import string
from collections.abc import Callable, Mapping
from typing import Any

from abrun.messages.numbers import more_text

Message = str | Callable[..., object]
"""Wording of one code: a template in the syntax of `str.format`, a function of the reason's values, or a
class of records with these values as fields, whose text is the sentence.
"""


def render(message: Message, values: Mapping[str, Any]) -> str:
    """Return the sentence of a message with these values; reasons among them become sentences first."""
    texts = {name: _word_reasons(value) for name, value in values.items()}
    return str(message(**texts)) if callable(message) else _fill_template(message, texts)


def _word_reasons(value: Any) -> Any:
    """Return a value with each reason in it, at any depth, as its sentence."""
    if isinstance(value, list):
        return [_word_reasons(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _word_reasons(item) for name, item in value.items()}
    # Besides reasons, the values of a reason are only plain ones
    return value if value is None or isinstance(value, str | int | float) else str(value)


def value_names(message: Message) -> list[str]:
    """Return the names of the values that a message takes, in order."""
    return list(inspect.signature(message).parameters) if callable(message) else _field_names(message)


def _field_names(template: str) -> list[str]:
    names = []
    for _, field, kind, _ in _FORMATTER.parse(template):
        names += [re.split(r"[.\[]", field)[0], *_field_names(kind or "")] if field else []
    return list(dict.fromkeys(names))


def _fill_template(template: str, values: Mapping[str, Any]) -> str:
    """Return a template with its values filled in.

    In addition to Python's formats:
    `{seeds:list}` joins with commas, `{versions:join , then }` with another text;
    `{runs:first}` gives the first name, `{runs:some}` the first five, and both the number of the others;
    `{pairs:count pair}` gives `1 pair` or `2 pairs`, `{seeds:plural seed}` gives `seed` or `seeds`;
    `{value:repr}` quotes as Python does;
    `{paired:if its baseline|every baseline run}` gives the first text if the value is true, else the second
    (or nothing).
    """
    filled = ""
    for text, field, kind, conversion in _FORMATTER.parse(template):
        filled += text
        if field is None:
            continue
        value = _FORMATTER.convert_field(_FORMATTER.get_field(field, (), values)[0], conversion)
        if kind and kind.startswith("if "):
            clauses = _CLAUSES.match(kind.removeprefix("if "))
            filled += _fill_template(clauses["yes" if value else "no"] or "", values) if clauses else ""
        else:
            filled += _format_value(value, kind or "")
    return filled


def _format_value(value: Any, spec: str) -> str:
    kind, _, noun = spec.partition(" ")
    if kind == "list":
        return value if isinstance(value, str) else ", ".join(map(str, value))
    if kind == "join":
        return noun.join(map(str, value))
    if kind in ("first", "some"):
        names = value[: 1 if kind == "first" else _MAX_NAMES]
        return ", ".join(names) + more_text(len(value) - len(names))
    if kind == "repr":
        return repr(value)
    if kind in ("count", "plural"):
        number = value if isinstance(value, int | float) else len(value)
        noun = noun if number == 1 else f"{noun}s"
        return f"{number} {noun}" if kind == "count" else noun
    return format(value, spec)


_MAX_NAMES = 5
_FORMATTER = string.Formatter()
# A bar inside braces does not separate the clauses
_CLAUSES = re.compile(r"(?P<yes>(?:[^{|]|\{[^}]*\})*)(?:\|(?P<no>.*))?$")
