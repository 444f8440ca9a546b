"""How a message becomes a sentence: a template with a few formats of its own, or a function."""

import inspect
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Message:
    """The wording of one code.

    `text` is a template in the syntax of `str.format`, or a function that takes the values by name. Its
    remedy is a template of the same values. `meaning` describes the code in the documentation where a
    function has no template to show.
    """

    text: str | Callable[..., str]
    remedy: str = ""
    meaning: str = ""

    def sentence(self, values: Mapping[str, Any]) -> str:
        text = self.text(**values) if callable(self.text) else _filled(self.text, values)
        return f"{text}; {_filled(self.remedy, values)}" if self.remedy else text

    def value_names(self) -> list[str]:
        """Return the names of the values that the message takes, in their order."""
        names = inspect.signature(self.text).parameters if callable(self.text) else _fields(self.text)
        return list(dict.fromkeys([*names, *_fields(self.remedy)]))


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


def _filled(template: str, values: Mapping[str, Any]) -> str:
    return _Templates().vformat(template, (), values)


def _fields(template: str) -> list[str]:
    parsed = string.Formatter().parse(template)
    return [name.partition(".")[0].partition("[")[0] for _, name, _, _ in parsed if name]
