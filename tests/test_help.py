"""Every command's help ends with examples, and every example is a command line that is taken."""

import os
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.commands import GROUP, all_commands, commands_in, problem_of
from tests.snapshot import Snapshot

EXAMPLES = re.compile(r"^ *Examples:\n((?: *abrun .*\n?)+)\s*\Z", re.M)  # indented before Python 3.13


def test_bad_usage_is_noticed(snapshot: Snapshot) -> None:
    (words,) = commands_in("pip install x && abrun launch quickstart --set 'a b=1' > log  # and so on")
    assert words == ["launch", "quickstart", "--set", "a b=1"] and problem_of(words) is None
    snapshot(problem_of(["lunch", "quickstart"]))
    assert problem_of(["launch", "quickstart", "--jbs", "2"]) is not None
    assert problem_of(["launch", "no-such-recipe"]) is not None
    assert problem_of(["launch", "RECIPE", "--no-such-option"]) is not None
    assert problem_of(["faults", "run", "quickstart"]) is None and problem_of(["faults", "--json"]) is None
    assert problem_of(["faults", "walk", "quickstart"]) and problem_of(["reference"])
    assert problem_of(["reference"], whole=False) is None


@pytest.mark.parametrize(("name", "command"), [*all_commands()])
def test_the_examples_of_a_command_are_taken(name: str, command: Any) -> None:
    found = EXAMPLES.search(command.callback.__doc__)
    assert found, f"abrun {name} --help lacks examples"
    examples = [words for line in found[1].splitlines() for words in commands_in(line)]
    assert [words for words in examples if problem_of(words)] == []
    assert " ".join(examples[0]).startswith(name)
    outputs = [option.opts for option in command.params if "--output" in option.opts]
    assert outputs in ([], [["--output", "-o"]])  # the same short form everywhere


def test_help_is_one_screen_with_a_line_for_every_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "abrun"], env={**os.environ, "COLUMNS": "80"}, capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) <= 41 and max(map(len, lines)) <= 80
    listed = [line.split()[0] for line in lines if re.match(r"  [a-z][a-z-]+ +[A-Z].*[^.]\.$", line)]
    assert listed == GROUP.list_commands(None)
    assert sorted(listed) == sorted(GROUP.commands)
