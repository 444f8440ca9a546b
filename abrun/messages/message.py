"""How a message becomes a sentence: a template with a few formats of its own, or a function."""

import inspect
import re
import string
from collections.abc import Callable, Mapping
from typing import Any

Message = str | Callable[..., str]
"""The wording of one code: a template in the syntax of `str.format`, or a function of the values by name.

What follows a template's last semicolon is its remedy. A function's docstring describes the code.
"""


def render(message: Message, values: Mapping[str, Any]) -> str:
    """Return the sentence of a message with these values."""
    return message(**values) if callable(message) else _filled(message, values)


def value_names(message: Message) -> list[str]:
    """Return the names of the values that a message takes, in their order."""
    return list(inspect.signature(message).parameters) if callable(message) else _fields(message)


def _fields(template: str) -> list[str]:
    names = []
    for _, field, kind, _ in _FORMATTER.parse(template):
        names += [re.split(r"[.\[]", field)[0], *_fields(kind or "")] if field else []
    return list(dict.fromkeys(names))


def _filled(template: str, values: Mapping[str, Any]) -> str:
    """Return a template with its values filled in.

    Beside Python's formats: `{seeds:list}` joins with commas, `{versions:join , then }` with another text,
    `{runs:first}` and `{runs:some}` are one name, or five, `and 2 more`; `{pairs:count pair}` is `1 pair` or
    `2 pairs`, `{seeds:plural seed}` is `seed` or `seeds`, `{value:repr}` quotes as Python does, and
    `{paired:if its baseline|every baseline run}` chooses between two templates by whether a value is true;
    without a second one it is left out otherwise.
    """
    filled = ""
    for text, field, kind, conversion in _FORMATTER.parse(template):
        filled += text
        if field is None:
            continue
        value = _FORMATTER.convert_field(_FORMATTER.get_field(field, (), values)[0], conversion)
        if kind and kind.startswith("if "):
            chosen = _CLAUSES.match(kind.removeprefix("if "))
            filled += _filled(chosen["yes" if value else "no"] or "", values) if chosen else ""
        else:
            filled += _formatted(value, kind or "")
    return filled


def _formatted(value: Any, spec: str) -> str:
    kind, _, noun = spec.partition(" ")
    if kind == "list":
        return value if isinstance(value, str) else ", ".join(map(str, value))
    if kind == "join":
        return noun.join(map(str, value))
    if kind in ("first", "some"):
        shown = value[: 1 if kind == "first" else _MOST_NAMED]
        return ", ".join(shown) + (f" and {len(value) - len(shown)} more" if len(value) > len(shown) else "")
    if kind == "repr":
        return repr(value)
    if kind in ("count", "plural"):
        number = value if isinstance(value, int | float) else len(value)
        plural = noun if number == 1 else f"{noun}s"
        return f"{number} {plural}" if kind == "count" else plural
    return format(value, spec)


_MOST_NAMED = 5
_FORMATTER = string.Formatter()
_CLAUSES = re.compile(r"(?P<yes>(?:[^{|]|\{[^}]*\})*)(?:\|(?P<no>.*))?$")  # braces may hold a bar
