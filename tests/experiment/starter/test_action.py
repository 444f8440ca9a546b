"""The composite action, whole, on what `abrun init` writes: its steps in a checkout, GitHub is a script."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from abrun.experiment.starter.initial import initial_files, write_files

GH = """#!/bin/sh
echo "$@" >> "$CALLED"
"""


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def run_action(checkout: Path, inputs: dict[str, str], environment: dict[str, str]) -> dict[str, int]:
    """The exit code of each step that runs a script; after a failure only of those with `always()`."""
    action = yaml.safe_load((checkout / ".github/actions/regression/action.yml").read_text())
    given = {name: one.get("default", "") for name, one in action["inputs"].items()} | inputs
    known = {f"inputs.{name}": value for name, value in given.items()}
    known["inputs.allow-inconclusive == 'true' && '--allow-inconclusive' || ''"] = ""
    known |= {"github.event.number": "12", "github.token": "token"}
    codes: dict[str, int] = {}
    for step in action["runs"]["steps"]:
        if "run" not in step or (any(codes.values()) and "always()" not in str(step.get("if"))):
            continue
        env: dict[str, Any] = dict(step.get("env", {}))
        for name, value in env.items():
            for expression, meaning in known.items():
                value = str(value).replace(f"${{{{ {expression} }}}}", meaning)
            assert "${{" not in value, f"{step['name']}: {value}"
            env[name] = value
        done = subprocess.run(
            ["bash", "-e", "-c", step["run"]], cwd=checkout, env=environment | env, check=False
        )
        codes[step["name"]] = done.returncode
    return codes


@pytest.mark.slow
def test_a_pull_request_is_trained_judged_and_commented_on(tmp_path: Path) -> None:
    """Real runs of the regression recipe that ships: a minute or two."""
    checkout, origin = tmp_path / "checkout", tmp_path / "origin.git"
    write_files(initial_files("regression", "convergence", "quickstart-regression"), checkout)
    git(tmp_path, "init", "--quiet", "--bare", str(origin))
    git(checkout, "init", "--quiet")
    git(checkout, "remote", "add", "origin", origin.as_uri())
    git(checkout, "add", "--all")
    git(checkout, "commit", "--quiet", "-m", "code")
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "gh").write_text(GH)
    (bin_folder / "abrun").write_text(f'#!/bin/sh\nexec {sys.executable} -m abrun "$@"\n')
    for script in bin_folder.iterdir():
        script.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{bin_folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "RUNNER_TEMP": str(tmp_path),
        "GITHUB_RUN_ID": "7",
        "GITHUB_SERVER_URL": "https://github.com",
        "GITHUB_REPOSITORY": "team/project",
        "GITHUB_OUTPUT": str(tmp_path / "output"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
        "CALLED": str(tmp_path / "called"),
    }
    codes = run_action(checkout, {"recipe": "convergence.yaml"}, environment)
    assert codes == {"launch": 0, "verdict": 0, "pictures": 0, "summary": 0, "comment": 0}
    assert (tmp_path / "output").read_text() == "verdict=MATCH\n"
    comment = (checkout / "comment.md").read_text()
    assert comment.startswith("<!-- convergence -->\n# MATCH") and "train/reward" in comment
    tip = git(origin, "rev-parse", "convergence-pictures")
    assert f"https://github.com/team/project/blob/{tip}/train-reward.png?raw=true" in comment
    assert "train-reward.png" in git(origin, "ls-tree", "--name-only", tip)
    assert (tmp_path / "summary").read_text() in comment
    assert "--method POST repos/team/project/issues/12/comments" in (tmp_path / "called").read_text()
