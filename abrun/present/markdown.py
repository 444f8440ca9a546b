"""Text as Markdown shows it, with nothing in it that would be read as more."""

import re

from abrun.redaction import shown


def escaped(text: str) -> str:
    """Escape what Markdown or the HTML in it would read as more than text."""
    escaped = re.sub(r"([\\`*<>|&]|\](?=[(\[:])|:(?=//)|(?<=www)\.)", r"\\\1", shown(text))
    return re.sub(r"(?<=\S)@(?=\S)", r"\\@", escaped)


def code(text: str) -> str:
    return escaped(text) if "`" in text else f"`{shown(text)}`"
