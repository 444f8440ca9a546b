"""Text as markdown shows it, with nothing in it that would be read as more."""

import re
from collections.abc import Sequence

from abrun.redaction import shown


def table_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(escaped(cell) for cell in cells) + " |"


def escaped(text: str) -> str:
    """Without what markdown or the HTML in it would read as more than text."""
    escaped = re.sub(r"([\\`*<>|&]|\](?=[(\[:])|:(?=//)|(?<=www)\.)", r"\\\1", shown(text))
    return re.sub(r"(?<=\S)@(?=\S)", r"\\@", escaped)


def code(text: str) -> str:
    return escaped(text) if "`" in text else f"`{shown(text)}`"
