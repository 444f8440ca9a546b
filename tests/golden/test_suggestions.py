"""Every command that a recorded report suggests is one that the command line takes."""

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from tests.commands import commands_in, problem_of

RECORDED = Path(__file__).parent / "recorded"
REPORTS = sorted(str(path.relative_to(RECORDED)) for path in RECORDED.rglob("*report.md"))
NEXT = re.compile(r"^\*\*next\*\*: .*: (`+) ?(abrun .*?) ?\1", re.M)
REPEATABLE = ("--set", "--claim", "--alias", "--exclude")
PLACEHOLDERS = {"NEW", "NAME", "METRIC", "WINDOW", "MARGIN"}  # what abrun cannot know


@pytest.mark.parametrize("report", REPORTS)
def test_suggested_commands_can_be_run(report: str) -> None:
    suggested = [command for _, command in NEXT.findall((RECORDED / report).read_text())]
    for words in [words for command in suggested for words in commands_in(command)]:
        assert problem_of(words) is None, words
        assert not option_given_twice(words), words
        placeholders = {word for word in re.findall(r"\b[A-Z]{3,}\b", " ".join(words)) if word != "ABRUN"}
        assert placeholders <= PLACEHOLDERS, words


def option_given_twice(words: list[str]) -> list[str]:
    """Return the options, and the keys of --set, that a command line gives more than once."""
    options = [word for word in words if word.startswith("--") and word not in REPEATABLE]
    keys = [value.partition("=")[0] for word, value in pairwise(words) if word == "--set"]
    return [name for name, count in Counter([*options, *keys]).items() if count > 1]
