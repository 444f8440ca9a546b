"""How a message becomes a sentence: a template with a few formats of its own, or a function."""

import inspect
import string
from collections.abc import Callable, Mapping
from typing import Any

Message = str | Callable[..., str]
"""The wording of one code: a template in the syntax of `str.format`, or a function of the values by name.

What follows a template's last semicolon is its remedy. A function's docstring describes the code.
"""


def render(message: Message, values: Mapping[str, Any]) -> str:
    """Return the sentence of a message with these values."""
    return message(**values) if callable(message) else _Templates().vformat(message, (), values)


def value_names(message: Message) -> list[str]:
    """Return the names of the values that a message takes, in their order."""
    if callable(message):
        return list(inspect.signature(message).parameters)
    parsed = string.Formatter().parse(message)
    return list(dict.fromkeys(name.partition(".")[0].partition("[")[0] for _, name, _, _ in parsed if name))


class _Templates(string.Formatter):
    """Beside Python's formats: `{seeds:list}` joins with commas, `{pairs:count pair}` is `1 pair` or
    `2 pairs`, `{seeds:plural seed}` is `seed` or `seeds`, and `{value:repr}` quotes a value as Python does.
    """

    def format_field(self, value: Any, format_spec: str) -> str:
        kind, _, noun = format_spec.partition(" ")
        if kind == "list":
            return ", ".join(map(str, value))
        if kind == "repr":
            return repr(value)
        if kind in ("count", "plural"):
            number = value if isinstance(value, int | float) else len(value)
            plural = noun if number == 1 else f"{noun}s"
            return f"{number} {plural}" if kind == "count" else plural
        return super().format_field(value, format_spec)
