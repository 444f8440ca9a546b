"""Escaping of text for Markdown."""

import re

from abrun.redaction import display_safe


def escape_markdown(text: str) -> str:
    """Escape characters that Markdown, or HTML within it, would interpret."""
    marks_escaped = re.sub(r"([\\`*<>|&]|\](?=[(\[:])|:(?=//)|(?<=www)\.)", r"\\\1", display_safe(text))
    return re.sub(r"(?<=\S)@(?=\S)", r"\\@", marks_escaped)


def code_span(text: str) -> str:
    """Return `text` as inline code, or escaped if it holds a backtick."""
    return escape_markdown(text) if "`" in text else f"`{display_safe(text)}`"
