"""Words of other programs' logs, from words.toml."""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WORDS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
COLUMNS: dict[str, list[str]] = WORDS["columns"]


def find_columns(names: Iterable[str], words: Iterable[str]) -> list[str]:
    """Return the columns that are called by some words, in any letter case, in the order of the words."""
    names = [*names]
    by_word = {name.strip().lower(): name for name in reversed(names)} | {name: name for name in names}
    return [by_word[word] for word in words if word in by_word]
