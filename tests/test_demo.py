"""`abrun demo`, end to end: two verdicts in a folder, without torch and matplotlib."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from abrun.api.demo import ARCHIVE, EXPERIMENTS, unpack_runs
from abrun.errors import RecipeError
from abrun.experiment.starter.shipped import find_recipe
from abrun.recipe.experiment import load_recipe, parse_stored_recipe
from tests.commands import commands_in, problem_of
from tests.snapshot import Snapshot

BASE_PACKAGE_ONLY = (
    "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'matplotlib', 'pandas')))\n"
    "from abrun.cli import main; main()"
)


def run_demo(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `abrun demo` in `folder` as the base package has it, on a terminal of 80 columns."""
    environment = os.environ | {"COLUMNS": "80", "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", BASE_PACKAGE_ONLY, "demo", *options]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_demo_shows_a_match_and_a_mismatch_with_their_reports(tmp_path: Path, snapshot: Snapshot) -> None:
    first = run_demo(tmp_path)
    assert (first.returncode, first.stderr) == (0, "")
    snapshot(first.stdout)
    assert max(map(len, first.stdout.splitlines())) <= 80
    commands = [
        words for line in first.stdout.replace("\\\n", " ").splitlines() for words in abrun_commands(line)
    ]
    assert len(commands) == 5 and [words for words in commands if problem_of(words)] == []
    for name, verdict in zip(EXPERIMENTS, ("MATCH", "MISMATCH"), strict=True):
        report = tmp_path / "abrun-demo" / name / "report"
        content = json.loads((report / "verdict.json").read_text())
        assert content["verdict"] == verdict and not content["post_hoc"]
        assert [claim["num_pairs"] for claim in content["claims"]] == [4]
        assert (
            verdict in (report / "report.html").read_text()
            and str(report / "report.html")[-30:] in first.stdout
        )

    before = {path: path.read_bytes() for path in (tmp_path / "abrun-demo").rglob("*") if path.is_file()}
    (tmp_path / "abrun-demo" / "notes.txt").write_text("mine")
    second = run_demo(tmp_path)
    assert (second.returncode, second.stdout) == (0, first.stdout)
    assert {path: path.read_bytes() for path in before} == before
    assert (tmp_path / "abrun-demo" / "notes.txt").read_text() == "mine"


def abrun_commands(line: str) -> list[list[str]]:
    return commands_in(line[line.index("abrun ") :]) if " abrun " in line else []


def test_demo_refuses_other_folders_and_a_python_without_lzma(
    tmp_path: Path, snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "notes.txt").write_text("mine")
    refused = run_demo(tmp_path, "-o", "runs")
    assert (refused.returncode, refused.stdout) == (2, "")
    snapshot(refused.stderr)
    assert os.listdir(tmp_path / "runs") == ["notes.txt"]
    with pytest.raises(RecipeError) as error:
        unpack_runs(tmp_path / "runs" / "notes.txt")
    snapshot(error.value)
    monkeypatch.setitem(sys.modules, "lzma", None)
    with pytest.raises(RecipeError) as error:
        unpack_runs(tmp_path / "new")
    snapshot(error.value)


def test_bundled_runs_are_small_and_of_the_built_in_recipes(tmp_path: Path) -> None:
    assert ARCHIVE.stat().st_size < 150_000
    unpack_runs(tmp_path)
    for name in EXPERIMENTS:
        stored = json.loads((tmp_path / name / "experiment.json").read_text())["recipe"]
        assert parse_stored_recipe(stored) == load_recipe(find_recipe(Path(name)))
