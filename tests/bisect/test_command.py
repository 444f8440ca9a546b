"""`abrun bisect` as a user types it: a repository of twelve commits, of which the sixth breaks its trainer."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from abrun.cli import _run, app

TRAINER = """
import json, math, random, sys
seed, out, arm = int(sys.argv[1]), sys.argv[2], sys.argv[3]
shared, own = random.Random(seed), random.Random(f"{seed} {arm} {out}")
level = 0.02 * shared.gauss(0, 1) + 0.004 * own.gauss(0, 1)
with open(out, "w") as file:
    for step in range(1, 13):
        reward = (1 - math.exp(-step / 4)) * QUALITY + level + 0.002 * shared.random()
        file.write(json.dumps({"step": step, "score": reward}) + "\\n")
"""
RECIPE = """
name: tiny
trainer:
  type: command
  argv: ["{python}", "{checkout}/train.py", "{seed}", "{run_dir}/scores.jsonl", "{arm}"]
  parameters: {checkout: .}
  metrics: {format: jsonl, path: "{run_dir}/scores.jsonl"}
  aliases: {train/reward: score}
steps: 12
arms: {baseline: {}}
seeds: [0, 1, 2, 3, 4, 5]
compare:
  primary: [{metric: train/reward, window: last 40%, margin: 0.04}]
"""


def git(repo: Path, *arguments: str) -> str:
    named = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    return subprocess.run(
        ["git", *named, "-C", str(repo), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Commits 0 to 12, tagged; from the sixth on the trainer learns less. The fifth has a syntax error."""
    repo = tmp_path_factory.mktemp("repo")
    git(repo, "init", "-q")
    for number in range(13):
        quality = "0.7" if number >= 6 else "0.9"
        (repo / "train.py").write_text(f"QUALITY = {quality}  # {number}\n{TRAINER}")
        git(repo, "add", ".")
        git(repo, "commit", "-q", "-m", f"change {number}")
        git(repo, "tag", f"v{number}")
    (repo / "train.py").write_text("work of somebody's that is not committed")
    (repo / "recipe.yaml").write_text(RECIPE)
    return repo


def bisect(repo: Path, runs_dir: Path, *arguments: str, recipe: str = "recipe.yaml") -> Result:
    typed = ["bisect", str(repo / recipe), "--repo", str(repo), "--runs-dir", str(runs_dir), *arguments]
    return CliRunner().invoke(app, typed, catch_exceptions=False)


def found(runs_dir: Path) -> dict:
    return json.loads((runs_dir / "tiny-bisect" / "bisect.json").read_text())


def test_the_commit_that_broke_it_is_named_and_nothing_of_the_repository_is_touched(repo, tmp_path):
    before = git(repo, "status", "--porcelain"), git(repo, "worktree", "list"), git(repo, "rev-parse", "HEAD")
    said = bisect(repo, tmp_path, "--good", "v3", "--bad", "v12", "--max-seeds", "6")
    assert said.exit_code == 0, said.output
    assert "change 6 broke it" in said.output
    content = found(tmp_path)
    assert content["suspects"] == [git(repo, "rev-parse", "v6")[:12]]
    assert content["declared"]["design"]["num_candidates"] == 9
    assert content["level"] == pytest.approx(0.05 / 6)  # the endpoint, four halvings, one to spare
    assert len(content["tests"]) <= 7
    after = git(repo, "status", "--porcelain"), git(repo, "worktree", "list"), git(repo, "rev-parse", "HEAD")
    assert after == before
    again = bisect(repo, tmp_path, "--good", "v3", "--bad", "v12", "--max-seeds", "6")  # nothing is run again
    assert again.exit_code == 0 and not list((tmp_path / ".environments").iterdir())
    changed = bisect(repo, tmp_path, "--good", "v3", "--bad", "v12", "--max-seeds", "8", "--dry-run")
    assert changed.exit_code == 0 and "after 6, 7, 8 pairs" in changed.output
