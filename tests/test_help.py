"""Every command's help ends with examples, and every example is a command line that is taken."""

import re

import pytest

from tests.commands import GROUP, commands_in, problem_of
from tests.snapshot import Snapshot

EXAMPLES = re.compile(r"^ *Examples:\n((?: *abrun .*\n?)+)\s*\Z", re.M)  # indented before Python 3.13


def test_bad_usage_is_noticed(snapshot: Snapshot) -> None:
    (words,) = commands_in("pip install x && abrun launch quickstart --set 'a b=1' > log  # and so on")
    assert words == ["launch", "quickstart", "--set", "a b=1"] and problem_of(words) is None
    snapshot(problem_of(["lunch", "quickstart"]))
    assert problem_of(["launch", "quickstart", "--jbs", "2"]) is not None
    assert problem_of(["launch", "no-such-recipe"]) is not None
    assert problem_of(["launch", "RECIPE", "--no-such-option"]) is not None


@pytest.mark.parametrize("name", sorted(GROUP.commands))
def test_the_examples_of_a_command_are_taken(name: str) -> None:
    found = EXAMPLES.search(GROUP.commands[name].callback.__doc__)
    assert found, f"abrun {name} --help lacks examples"
    examples = [words for line in found[1].splitlines() for words in commands_in(line)]
    assert [words for words in examples if problem_of(words)] == []
    assert all(words[0] == name for words in examples[:1])
    outputs = [option.opts for option in GROUP.commands[name].params if "--output" in option.opts]
    assert outputs in ([], [["--output", "-o"]])  # the same short form everywhere
