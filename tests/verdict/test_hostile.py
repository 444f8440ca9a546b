"""Names and files that mean no good: every output stays whole, and what cannot be read is one line."""

import json
import random
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.verdict.simulate import edit, edit_rows, fail, write_experiment

NAMES = [
    '<script>alert("x")</script>',
    "</script><img src=x onerror=alert(1)>",
    "quo\"te's & `ticks` $math$ \\back",
    "new\nline\tand\x1b[31mred",
    "../../etc/passwd",
    "a|b [link](javascript:alert(1))",
    "\u202eright-to-left \u2028 \U0001f600",
]


def write_arms(folder: Path, metric: str, arms=("baseline", "treatment")) -> list[str]:
    rng = np.random.default_rng(0)
    for arm in arms:
        (folder / arm).mkdir(parents=True)
        for seed in range(3):
            values = np.linspace(0, 1, 20) + 0.01 * np.random.default_rng(seed).normal(size=20)
            values[1:] += 1e-3 * rng.normal()
            frame = pd.DataFrame({"step": range(1, 21), metric: values, "train/loss": 1 - values})
            frame.to_csv(folder / arm / f"s{seed}.csv", index=False)
    return [str(folder / arm) for arm in arms]


def without_code(markdown):
    """The Markdown without commands (code spans of one line) and without the report's own fold."""
    folds = r"^<details><summary>Evidence(?: and curves)?</summary>$|^</details>$"
    return re.sub(folds, "", re.sub(r"(?<!\\)`[^`\n]+`", "", markdown), flags=re.MULTILINE)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.seen.append(tag)


@pytest.mark.parametrize("name", NAMES)
def test_a_metric_of_any_name_is_only_a_name(tmp_path, abrun, name):
    sources = write_arms(tmp_path / "runs", name)
    shown = name.replace("\n", "\\n").replace("\t", "\\t").replace("\x1b", "\\x1b")
    shown = shown.replace("\u202e", "\\u202e").replace("\u2028", "\\u2028")
    code, output, errors = abrun("compare", *sources, "--claim", f"{shown}:all:0.1", "--output", "report")
    assert (code, errors) == (0, "") and "\x1b" not in output and "\u202e" not in output
    report = tmp_path / "report"
    assert json.loads((report / "verdict.json").read_text())["claims"][0]["metric"] == shown
    tags = Tags()
    tags.feed((report / "report.html").read_text())
    assert tags.seen.count("img") == 0 and len(tags.seen) < 60
    markdown = without_code((report / "report.md").read_text())
    assert not re.search(r"(?<!\\)<", markdown) and not re.search(r"(?<!\\)\]\(java", markdown)
    for path in report.iterdir():
        assert re.fullmatch(r"[A-Za-z0-9_.-]+", path.name)
        if path.suffix == ".svg":
            ET.fromstring(path.read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report", "runs"]


@pytest.mark.parametrize("name", ["<b>bold</b>", "two\nlines", "$x$", "-leading", "a b"])
def test_an_arm_of_any_name_is_only_a_name(tmp_path, abrun, name):
    sources = write_arms(tmp_path / "runs", "reward", arms=("baseline", name))
    code, _, errors = abrun("compare", *sources, "--claim", "reward:all:0.1", "--output", "report")
    assert (code, errors) == (0, "")
    tags = Tags()
    tags.feed((tmp_path / "report/report.html").read_text())
    assert "b" not in tags.seen


@pytest.mark.parametrize(
    "content",
    [b"", b"step,reward\n", random.Random(0).randbytes(2000), b"\x00" * 500],
    ids=["empty", "header", "noise", "zeros"],
)
def test_files_that_hold_no_table(tmp_path, abrun, content):
    sources = write_arms(tmp_path / "runs", "reward")
    (tmp_path / "runs/treatment/s1.csv").write_bytes(content)
    code, _, errors = abrun("compare", *sources, "--claim", "reward:all:0.1", "--output", "report")
    assert (code, errors) == (5, "")


CONTROLS = "\x1b[31m\x1b]0;t\x07\x9b2J\r\x7f\u202e\u2066\x00"
WILD = f"a{CONTROLS}|`b`\n# <img src=x>[l](javascript:x) https://evil.ex www.evil.example me@evil.ex &lt;"


def test_no_text_of_a_stored_experiment_is_more_than_text(tmp_path, abrun) -> None:
    """Names, messages, environments, a lock and a log, each with all that could do harm."""
    token = "hf_aB3dE5gH7jK9mN1pQ3sT5vW7yZ"
    folder = write_experiment(tmp_path / "runs" / "demo", steps=12, seeds=[0, 1, 2])
    edit(folder / "experiment.json", lambda content: content.update(experiment=WILD))
    edit(
        folder / "experiment.json",
        lambda content: content["treatment_diff"]["treatment"].update(
            {
                f"trainer.env.{WILD}": [WILD, token],
                "trainer.env.DB": ["db://me:hunter2@h", "db://me:hunter3@h"],
            }
        ),
    )
    edit(folder / "baseline/seed-1/environment.json", lambda content: content.update(python=WILD + token))
    edit_rows(folder / "treatment" / "seed-0", lambda row: row.update({WILD: 1.0}))
    fail(folder / "treatment" / "seed-2", after_steps=5, message=f"{WILD} {token}")
    (folder / "launcher.lock").write_text(json.dumps({"pid": 1, "host": WILD, "time_s": 1e12}))
    for arguments in (
        ["status", str(folder)],
        ["status", "--runs-dir", str(folder.parent)],
        ["compare", str(folder), "--output", str(folder / "report")],
    ):
        said = "".join(abrun(*arguments)[1:])
        assert "Traceback" not in said
        assert all(char.isprintable() or char == "\n" for char in said), arguments
        assert token not in said and "hunter" not in said
    for name in ("report.md", "verdict.json", "report.html"):
        text = (folder / "report" / name).read_text()
        assert all(char.isprintable() or char in "\n\t" for char in text), name
        assert token not in text and "hunter" not in text, name
    markdown = without_code((folder / "report" / "report.md").read_text())
    assert not re.search(r"(?<!\\)[<&`]|(?<!\\)\]\(java|https?://|www\.|e@e", markdown)
    assert all(
        line[:2] in ("# ", "- ", "| ", "**", "![", "an", "di", "Di", "") for line in markdown.splitlines()
    )
