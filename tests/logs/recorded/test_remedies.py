"""Refusals of runs that cannot be told apart: each ends with a command that works."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from abrun.cli import app
from abrun.errors import ComparisonError
from tests.logs.test_who_is_who import write

CLAIM = ("--claim", "train/loss:all:0.5")

# Folder -> settings beside the log, sources, options, and a part of the command that the refusal suggests
KINDS: dict[str, tuple[Mapping[str, Mapping[str, object]], Sequence[str], Sequence[str], str]] = {
    "two runs of a name": (
        {"a/x/s0": {}, "a/y/s0": {}, "a/x/s1": {}, "a/y/s1": {}, "b/x/s0": {}, "b/x/s1": {}},
        ["a", "b"],
        [],
        "--exclude",
    ),
    "no seeds for a claim": (
        {"a/apple": {}, "a/pear": {}, "b/kiwi": {}, "b/plum": {}},
        ["a", "b"],
        CLAIM,
        "--unpaired",
    ),
    "seeds under another key": (
        {f"{arm}/{fruit}{n}": {"rng": n} for arm in "ab" for n, fruit in enumerate(("fig", "kiwi"))},
        ["a", "b"],
        ["--seeds-by", "seed"],
        "--seeds-by rng",
    ),
    "several numbers": ({f"x{a}-y{b}-z": {} for a in (1, 2) for b in (3, 4)}, ["."], [], "--pattern"),
    "processes": ({f"a/rank_{n}": {} for n in (1, 2, 3)}, ["."], [], "--exclude"),
    "kinds in each source": (
        {f"{arm}/{task}": {} for arm in "ab" for task in ("math", "code")},
        ["a", "b"],
        [],
        "--exclude",
    ),
    "several arms in a source": (
        {f"{folder}/{arm}-s{n}": {} for folder in "xy" for arm in "ab" for n in (0, 1)},
        ["x", "y"],
        [],
        "--exclude",
    ),
    "settings in one arm": (
        {f"run{n}": {"lr": [0.1, 0.2][n % 2], "note": n // 2} for n in range(4)},
        ["."],
        [],
        "--arms-by lr",
    ),
    "no such setting": (
        {f"run{n}": {"lr": [0.1, 0.2][n % 2], "seed": n // 2} for n in range(4)},
        ["."],
        ["--arms-by", "learning_rate"],
        "--arms-by lr --seeds-by seed",
    ),
    "a pattern that does not match": (
        {f"{arm}-s{n}": {} for arm in "ab" for n in (0, 1)},
        ["."],
        ["--pattern", "{arm}_{seed}", *CLAIM],
        "abrun compare",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_refusal_ends_with_a_command_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folders, sources, options, expected = KINDS[kind]
    for number, (folder, settings) in enumerate(folders.items()):
        write(tmp_path / folder / "log.jsonl", number)
        if settings:
            (tmp_path / folder / "config.json").write_text(json.dumps(settings))
    refused = CliRunner().invoke(app, ["compare", *sources, *options])
    assert isinstance(refused.exception, ComparisonError)
    command = str(refused.exception).rpartition("for example: ")[2]
    assert command.startswith("abrun compare") and expected in command
    assert all(word in shlex.split(command) for word in options if options is CLAIM)
    accepted = CliRunner().invoke(app, shlex.split(command)[1:])
    assert accepted.exit_code in (0, 3, 4, 5), accepted.exception
