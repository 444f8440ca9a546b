"""The fixture for other projects' tests, in a pytest of its own, as they would use it."""

import os
import random
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ASKED = """
def test_they_train_alike(assert_equivalent):
    result = assert_equivalent("old", "{other}", "train/reward", {margin})
    assert result.claims["num_pairs"].tolist() == [4]
"""


def write_runs(folder: Path, shift: float) -> None:
    folder.mkdir()
    for seed in range(4):
        noise, of_seed = random.Random(f"{folder.name} {seed}"), random.Random(seed)
        start = of_seed.gauss(0.2, 0.01)
        rows = [
            f"{step},{start + (step > 1) * (shift + noise.gauss(0, 0.005)) + step / 100}"
            for step in range(1, 51)
        ]
        (folder / f"s{seed}.csv").write_text("step,train/reward\n" + "\n".join(rows))


@pytest.fixture
def run_tests(tmp_path: Path):
    write_runs(tmp_path / "old", 0.0)
    write_runs(tmp_path / "same", 0.0)
    write_runs(tmp_path / "worse", -0.1)

    def run(**asked: object) -> "subprocess.CompletedProcess[str]":
        (tmp_path / "test_it.py").write_text(ASKED.format(**asked))
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "abrun.pytest_plugin", "-p", "no:cacheprovider"],
            cwd=tmp_path,
            env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_equal_runs_pass_and_others_fail_with_the_reason_and_the_report(run_tests) -> None:
    assert run_tests(other="same", margin=0.02).returncode == 0
    worse = run_tests(other="worse", margin=0.02)
    assert worse.returncode == 1 and "MISMATCH: old and worse" in worse.stdout
    assert "train/reward: differs by -0.1" in worse.stdout
    report = next(
        line.split()[-1] for line in worse.stdout.splitlines() if line.strip().startswith("report:")
    )
    assert (Path(report) / "report.html").is_file() and "Traceback" not in worse.stdout


def test_what_is_not_decided_fails_and_so_does_what_cannot_be_read(run_tests) -> None:
    tight = run_tests(other="same", margin=0.0001)
    assert tight.returncode == 1 and "INCONCLUSIVE: old and same" in tight.stdout
    gone = run_tests(other="gone", margin=0.02)
    assert gone.returncode == 1 and "these runs cannot be compared: " in gone.stdout


def test_pytest_finds_it_by_its_entry_point_and_starts_as_fast() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"abrun": "abrun.pytest_plugin"}
    code = "import pytest, sys; before = set(sys.modules); import abrun.pytest_plugin; "
    code += "assert {name for name in set(sys.modules) - before if not name.startswith('abrun')} == set()"
    subprocess.run([sys.executable, "-c", code], check=True)
