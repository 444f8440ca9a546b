"""Words of other programs' logs, from words.toml."""

import tomllib
from pathlib import Path
from typing import Any

WORDS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
COLUMNS: dict[str, list[str]] = WORDS["columns"]
