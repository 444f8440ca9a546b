"""Lists in the arguments of the command line, as text. What does not read is a RecipeError, one line."""

import re

from abrun.errors import RecipeError

MOST_SEEDS = 1000


def parse_formats(text: str) -> list[str]:
    wanted = [part.strip() for part in text.split(",") if part.strip()]
    allowed = ("terminal", "html", "markdown", "json", "png", "svg")
    for form in wanted:
        if form not in allowed:
            raise RecipeError(f"--format: got {form!r}; allowed: {', '.join(allowed)}")
    if not wanted:
        raise RecipeError(f"--format: got {text!r}, nothing to write; allowed: {', '.join(allowed)}")
    return wanted


def parse_lengths(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,10}", part) and int(part) >= 2 for part in parts):
        raise RecipeError(f"--lengths: got {text!r}; allowed: numbers of at least 2, such as 512,1024,2048")
    return sorted({int(part) for part in parts})


def parse_seeds(text: str) -> list[int]:
    """`0,1,2`, `0-4`, or both mixed."""
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not re.fullmatch(r"[0-9]{1,10}(-[0-9]{1,10})?", part.strip()):
            raise RecipeError(f"--seeds: got {text!r}; allowed: numbers such as 0,1,2 or ranges such as 0-4")
        start, stop = int(first), int(last or first)
        if not 0 <= stop - start < MOST_SEEDS:
            raise RecipeError(f"--seeds: got {part.strip()!r}; the last of at most {MOST_SEEDS} comes last")
        seeds += range(start, stop + 1)
    return seeds
