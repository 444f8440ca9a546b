"""A fuzz test of recipes through the command line: an answer, or a refusal of one line, in seconds.

ABRUN_FUZZ_SEED=$RANDOM ABRUN_FUZZ_ROUNDS=20000 pytest -m slow -k fuzz
"""

import io
import json
import os
import random
import shutil
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml

from abrun import cli
from abrun.recipe.reading import Loader
from tests.fuzzing import SEED, bounded, damaged, rounds
from tests.recipe.test_recipe import FOREIGN, SMALL, VALUES, mutate, places
from tests.recipe.test_shipped_recipes import RECIPES

COMMANDS = (
    ("launch", "--plan-only"),
    ("launch", "--plan-only", "--json"),
    ("power",),
    ("power", "--sigma", "0.02", "--json"),
)
BOMB = "".join(
    f"b{level}: &b{level} [{', '.join([f'*b{level - 1}' if level else 'x'] * 9)}]\n" for level in range(9)
)
# What YAML, markup, terminals, templates and file systems have of their own, as values and as lines of a file
HOSTILE: dict[str, list[str]] = json.loads(Path(__file__).with_name("hostile.json").read_text())
TEXTS = [
    *HOSTILE["texts"],
    *("9" * 5000, f"-{'9' * 400}", f"0.{'9' * 5000}", "a" * 300, f"/{'a/' * 3000}", "\u00fc" * 200),
    *("[" * 500, "{a: " * 300),
]
HEADS = [*HOSTILE["heads"], f"{'a' * 2000}: 1\n", BOMB]


def hostile(text: str, tree: dict[str, Any], draw: random.Random) -> tuple[bytes, list[str]]:
    """A recipe's bytes and overrides: changed in its text, its structure, or by what is set on top."""
    match draw.randrange(6):
        case 0:
            return damaged(text.encode(), draw), []
        case 1:
            mutated: Any = tree
            for _ in range(draw.randint(1, 4)):
                mutated = mutate(mutated, draw) if isinstance(mutated, dict) else mutated
            return yaml.safe_dump(mutated, allow_unicode=True).encode(), []
        case 2:
            head = draw.choice(HEADS)
            return (head + text if draw.random() < 0.7 else text + "\n" + head).encode(), []
        case 3:  # a value of the text replaced, as YAML has it
            lines = text.split("\n")
            at = draw.choice([index for index, line in enumerate(lines) if ": " in line])
            key = lines[at].partition(": ")[0]
            lines[at] = f"{key}: {draw.choice(TEXTS)}"
            return "\n".join(lines).encode(), []
        case _:
            overrides = []
            for _ in range(draw.choice([1, 1, 2])):
                key = ".".join(map(str, draw.choice(places(tree))))
                key = draw.choice(
                    [key, key, key, f"arms.treatment.{key}", f"{key}.x", f"{key}.0", key[1:], "", "="]
                )
                dumped = yaml.safe_dump(draw.choice(VALUES), default_flow_style=True)
                overrides.append(f"{key}={draw.choice([draw.choice(TEXTS), dumped])}")
            return text.encode(), overrides


def answer(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str, str]:
    """Exit code, standard output and standard error of a command, called in this process."""
    monkeypatch.setattr(sys, "argv", ["abrun", *argv])
    out, error = io.StringIO(), io.StringIO()
    code: Any = "no exit"
    with redirect_stdout(out), redirect_stderr(error), bounded():
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code
    return code, out.getvalue(), error.getvalue()


def campaign(folder: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    failures, codes, paths = list[str](), dict[Any, int](), [SMALL, FOREIGN, *RECIPES]
    for round_ in range(count):
        draw = random.Random(f"{SEED} campaign {round_}")
        path = draw.choice(paths)
        text = path.read_text()
        content, overrides = hostile(text, yaml.load(text, Loader), draw)
        shutil.rmtree("recipes", ignore_errors=True)
        shutil.copytree(path.parent, "recipes", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        Path("recipes", path.name).write_bytes(content)
        command = draw.choice(COMMANDS)
        argv = [command[0], f"recipes/{path.name}", *command[1:], *(f"--set={each}" for each in overrides)]
        try:
            code, _, error = answer(argv, monkeypatch)
            codes[code] = codes.get(code, 0) + 1
            lines = error.splitlines()
            wrong = code not in (0, 2) or (
                code == 2 and len([each for each in lines if each[:7] == "abrun: "]) != 1
            )
            wrong = wrong or "Traceback" in error or (code == 2 and not error.rstrip("\n").isprintable())
            wrong = wrong or len(error) > 3000
            problem = f"exit code {code}: {error[:300]!r}" if wrong else ""
        except BaseException as raised:
            if isinstance(raised, KeyboardInterrupt):
                raise
            last = traceback.extract_tb(raised.__traceback__)[-1]
            problem = f"{type(raised).__name__}: {str(raised)[:200]} at {last.filename[-50:]}:{last.lineno}"
        if problem:
            failures.append(f"round {round_}: {[each[:150] for each in argv]}: {problem}")
            if folder.joinpath("KEEP").exists():
                shutil.copytree("recipes", f"failed-{round_}")
        assert not os.path.exists("EXECUTED"), round_
    assert not failures, "\n".join([f"{len(failures)} of {count}", *failures[:40]])
    assert count < 100 or (codes[0] > count / 20 and codes[2] > count / 4), codes


def test_fuzz_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    campaign(tmp_path, 40, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_fuzz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    campaign(tmp_path, rounds(2000), monkeypatch)
