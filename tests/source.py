"""The package's source, read and parsed once a process."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[1]


@functools.cache
def sources() -> dict[str, str]:
    """Return the text of each module by its place."""
    paths = sorted((ROOT / "abrun").rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {place: ast.parse(text) for place, text in sources().items()}
