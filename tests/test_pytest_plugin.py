"""The fixture for other projects' tests, in a pytest of its own, as they would use it."""

import os
import random
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = """
def test_same(assert_equivalent):
    result = assert_equivalent("old", "same", "train/reward", 0.02)
    assert result.claims["num_pairs"].tolist() == [4]

def test_worse(assert_equivalent):
    assert_equivalent("old", "worse", "train/reward", 0.02)

def test_tight(assert_equivalent):
    assert_equivalent("old", "same", "train/reward", 0.0001)

def test_tight_and_allowed(assert_equivalent):
    assert_equivalent("old", "same", "train/reward", 0.0001, allow_inconclusive=True)

def test_unchanged(assert_equivalent):
    result = assert_equivalent("old", "old-again", "train/reward", 0.0001)
    assert result.verdict == "MATCH" and result.experiment.arms == ("old", "old-again")

def test_gone(assert_equivalent):
    assert_equivalent("old", "gone", "train/reward", 0.02)
"""


def write_runs(folder: Path, shift: float) -> None:
    folder.mkdir()
    for seed in range(4):
        noise, start = random.Random(f"{folder.name} {seed}"), random.Random(seed).gauss(0.2, 0.01)
        rewards = [start + step / 100 + (step > 1) * noise.gauss(shift, 0.005) for step in range(1, 51)]
        rows = [f"{step},{reward}" for step, reward in enumerate(rewards, 1)]
        (folder / f"s{seed}.csv").write_text("step,train/reward\n" + "\n".join(rows))


def test_equal_runs_pass_and_others_fail_with_the_reason_and_the_report(tmp_path: Path) -> None:
    for name, shift in (("old", 0.0), ("same", 0.0), ("worse", -0.1)):
        write_runs(tmp_path / name, shift)
    shutil.copytree(tmp_path / "old", tmp_path / "old-again")
    (tmp_path / "test_it.py").write_text(TESTS)
    plugins = ["-p", "abrun.pytest_plugin", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", *plugins, "--basetemp", str(tmp_path / "kept")],
        cwd=tmp_path,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout
    results = {test: result for result, test in re.findall(r"^(PASSED|FAILED) test_it.py::(\w+)", said, re.M)}
    assert results == {
        "test_same": "PASSED",
        "test_worse": "FAILED",
        "test_tight": "FAILED",
        "test_tight_and_allowed": "PASSED",
        "test_unchanged": "PASSED",
        "test_gone": "FAILED",
    }, said
    assert "MISMATCH: old and worse" in said and "train/reward: worse is 0.1 lower than old" in said
    assert "INCONCLUSIVE: old and same" in said
    assert "During handling of" not in said
    report = next(line.split()[-1] for line in said.splitlines() if line.strip().startswith("report:"))
    assert (Path(report) / "report.html").is_file() and "Traceback" not in said


def test_pytest_finds_it_by_its_entry_point_and_starts_as_fast() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"abrun": "abrun.pytest_plugin"}
    code = "import pytest, sys; before = set(sys.modules); import abrun.pytest_plugin; "
    code += "assert not [*filter(lambda name: not name.startswith('abrun'), set(sys.modules) - before)]"
    subprocess.run([sys.executable, "-c", code], check=True)
