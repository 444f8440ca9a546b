"""A campaign of hostile recipes through the command line: an answer, or a refusal of one line, in seconds.

ABRUN_FUZZ_SEED=$RANDOM ABRUN_FUZZ_ROUNDS=20000 pytest -m slow -k campaign
"""

import io
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
    ("launch", "--dry-run"),
    ("launch", "--dry-run", "--json"),
    ("plan",),
    ("plan", "--sigma", "0.02", "--json"),
    ("export", "--to", "jobset"),
    ("export", "--to", "skypilot"),
)
LAUNCHERS = ("launcher={type: jobset, image: x, claim: y}", "launcher={type: skypilot, accelerator: H100}")
TEXTS = (  # what YAML, markup, terminals, templates and file systems have of their own
    *(
        "!!python/object/apply:os.system ['touch EXECUTED']",
        "!!python/name:os.system",
        "!!binary aGk=",
        "!x y",
    ),
    *("!!set {a, b}", "!!omap [a: 1]", "!!timestamp 2001-01-01", "!!float 1", "!!int '0x10'", "!!null ''"),
    *("2001-01-01", "2001-01-01T00:00:00Z", "9999-99-99", "0001-01-01 00:00:00 +99:99", "12:30:45", "0x1F"),
    *(
        "0o17",
        "0b101",
        "1_000",
        "1e400",
        "-1e400",
        ".inf",
        ".nan",
        "9" * 5000,
        f"-{'9' * 400}",
        f"0.{'9' * 5000}",
    ),
    *(
        "~",
        "yes",
        "on",
        "'[red]x[/red]'",
        "'[/x]'",
        "'[link=file:///x]y'",
        "'\\e[31m'",
        '"\\e[31mx"',
        '"\\0"',
    ),
    *(
        '"\\uD800"',
        '"\\u202Ex"',
        '"a\\nb"',
        "'{seed}'",
        "'{0}'",
        "'{'",
        "'{{}}'",
        "'{a.__class__}'",
        "'{:>99999999}'",
    ),
    *(
        "'${HOME}'",
        "'${'",
        "'$(id)'",
        "'~nobody-at-all/x'",
        "'~'",
        "/dev/zero",
        "/dev/stdin",
        "/proc/self/mem",
    ),
    *(
        "'../../x'",
        "'/'",
        "'.'",
        "a" * 300,
        f"/{'a/' * 3000}",
        "ü" * 200,
        "'-rf'",
        "' '",
        "'%s%n'",
        "'\u2028'",
    ),
    *(
        "[" * 500,
        "{a: " * 300,
        "[[[[[[[[1]]]]]]]]",
        "{? [a, b] : c}",
        "{? {a: 1} : c}",
        "[*x]",
        "&x [*x]",
        "*x",
    ),
    *(
        "{<<: {steps: 3}}",
        "{<<: [1]}",
        "{<<: 3}",
        "{true: 1, null: 2, 3: 4, 1.5: 6}",
        "{a: 1, a: 2}",
        "|\n  a",
        "@x",
    ),
)
BOMB = "".join(
    f"b{level}: &b{level} [{', '.join([f'*b{level - 1}' if level else 'x'] * 9)}]\n" for level in range(9)
)
HEADS = (
    *("x: &x [*x]\n", "x: &x {a: *x}\n", "x: &x {steps: 3}\n<<: *x\n", "<<: [{steps: 3}, {name: y}]\n", BOMB),
    *(
        "defaults: [r.yaml]\n",
        "defaults: [/dev/zero]\n",
        "defaults: ['.']\n",
        "defaults: r.yaml\n",
        "--- \n---\n",
    ),
    *(
        "%YAML 9.9\n---\n",
        "%TAG ! tag:x,2000:\n---\n",
        "\ufeff",
        "- a\n- b\n",
        "'x'\n",
        "!!map\n",
        "steps: 3\nsteps: 4\n",
    ),
    *(
        f"{'a' * 2000}: 1\n",
        "? - a\n: b\n",
        "{}: 1\n",
        "'[/x]': 1\n",
        '"\\e[31m": 1\n',
        "'': 1\n",
        "2001-01-01: 1\n",
    ),
)


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
        more = [*(LAUNCHERS[command[-1] == "skypilot"],), *overrides] if command[0] == "export" else overrides
        argv = [command[0], f"recipes/{path.name}", *command[1:], *(f"--set={each}" for each in more)]
        argv += ["-o", f"out-{round_}"] if command[0] == "export" else []
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
        shutil.rmtree(f"out-{round_}", ignore_errors=True)
        assert not os.path.exists("EXECUTED"), round_
    assert not failures, "\n".join([f"{len(failures)} of {count}", *failures[:40]])
    assert count < 100 or (codes[0] > count / 20 and codes[2] > count / 4), codes


def test_a_sample_of_the_campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    campaign(tmp_path, 60, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    campaign(tmp_path, rounds(1000), monkeypatch)
