"""The sample of regression mode that ships: recipe, frozen reference and workflow fit together."""

import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from abrun.logs.recorded.reference import load_reference
from abrun.logs.recorded.sources import ReadingOptions, open_sources
from abrun.recipe.experiment import load_recipe
from abrun.recipe.reading import dotted
from abrun.report.comparing import compare_sources, freeze_arm
from tests.verdict.simulate import edit, write_experiment

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes" / "regression"
ACTION = yaml.safe_load((ROOT / ".github/actions/regression/action.yml").read_text())


def test_the_recipe_is_the_quickstart_s_baseline_and_names_the_reference():
    recipe, quickstart = (
        load_recipe(FOLDER / "quickstart-regression.yaml"),
        load_recipe(ROOT / "recipes/quickstart.yaml"),
    )
    assert recipe.run_config("baseline") == quickstart.run_config("baseline")
    assert recipe.seeds == quickstart.seeds
    assert recipe.compare.reference == str(FOLDER / "quickstart.json")


def test_the_reference_holds_that_recipe_s_runs_and_claims():
    reference, quickstart = (
        load_reference(FOLDER / "quickstart.json"),
        load_recipe(ROOT / "recipes/quickstart.yaml"),
    )
    assert reference.compare == quickstart.compare
    assert sorted({run.name.seed for run in reference.runs}) == quickstart.seeds
    now = dotted(quickstart.run_config("baseline").model_dump(mode="json"))
    for run in reference.runs:
        assert run.config is not None
        assert {key: now.get(key) for key in run.config} == run.config


@pytest.mark.parametrize(("devices", "is_valid"), [(["NVIDIA H200"], False), (["another CPU"], True)])
def test_another_machine_may_end_a_warm_start_with_other_roundings(
    tmp_path: Path, devices: list[str], is_valid: bool
):
    anchor, later = (write_experiment(tmp_path / name) for name in ("anchor", "later"))
    reference = tmp_path / "reference.json"
    freeze_arm(open_sources([str(anchor)], ReadingOptions(allows_one_arm=True)), "baseline", reference)
    for path in later.glob("baseline/*/environment.json"):
        edit(path, lambda content: content.update(devices=devices, initial_weights_hash="e" * 16))
    comparison = compare_sources([str(later)], ReadingOptions(), reference=reference, arm="baseline")
    assert (comparison.verdict != "INVALID") is is_valid


def test_the_action_runs_commands_that_exist():
    from typer.main import get_group

    from abrun.cli import app

    lines = [line.strip() for step in ACTION["runs"]["steps"] for line in step.get("run", "").splitlines()]
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("abrun ")]
    assert [words[0] for words in commands] == ["launch", "compare"]
    for name, *words in commands:
        known = {option for one in get_group(app).commands[name].params for option in one.opts}
        assert {word for word in words if word.startswith("--")} <= known


REPORT = "# MATCH: x\n\n| a | b |\n\n![claims](claims.png)\n![train-reward](train-reward.png)\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Runs a step of the action in a shallow checkout, as the runner does."""
    steps = {step["name"]: step for step in ACTION["runs"]["steps"]}
    here, origin = tmp_path / "checkout", tmp_path / "origin.git"
    git(tmp_path, "init", "--quiet", "--bare", str(origin))
    git(tmp_path, "init", "--quiet", str(tmp_path / "author"))
    git(tmp_path / "author", "commit", "--quiet", "--allow-empty", "-m", "code")
    git(tmp_path / "author", "push", "--quiet", str(origin), "HEAD:refs/heads/main")
    git(tmp_path, "clone", "--quiet", "--depth=1", "-b", "main", origin.as_uri(), str(here))
    (here / "report").mkdir()
    (here / "report/report.md").write_text(REPORT)
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()

    def run(step: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        given = {
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "HOME": str(tmp_path),
            "RUNNER_TEMP": str(tmp_path),
            "GITHUB_RUN_ID": "7",
            "GITHUB_SERVER_URL": "https://github.com",
            "GITHUB_REPOSITORY": "team/project",
            "NUMBER": "12",
            "BRANCH": "refs/heads/convergence-pictures",
        }
        command = ["bash", "-e", "-c", steps[step]["run"]]
        return subprocess.run(
            command, cwd=here, env=given | environment, capture_output=True, text=True, check=False
        )

    return run


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_the_pictures_are_commits_of_a_branch_of_their_own(checkout, tmp_path):
    report, origin = tmp_path / "checkout/report", tmp_path / "origin.git"
    tips = []
    for content in (b"first", b"second"):
        for name in ("claims.png", "train-reward.png"):
            (report / name).write_bytes(content)
        assert checkout("pictures").returncode == 0
        tips.append(git(origin, "rev-parse", "convergence-pictures"))
        assert git(origin, "show", f"{tips[-1]}:claims.png") == content.decode()
        assert git(origin, "ls-tree", "--name-only", tips[-1]).split() == ["claims.png", "train-reward.png"]
        address = f"https://github.com/team/project/blob/{tips[-1]}"
        assert (tmp_path / "checkout/summary.md").read_text() == REPORT.replace(
            "(claims.png)", f"({address}/claims.png?raw=true)"
        ).replace("(train-reward.png)", f"({address}/train-reward.png?raw=true)")
    assert git(origin, "log", "--format=%H", "convergence-pictures").split() == tips[::-1]
    assert git(tmp_path / "checkout", "status", "--short", "--untracked-files=no") == ""


def test_without_the_right_to_push_the_summary_says_where_the_pictures_are(checkout, tmp_path):
    hook = tmp_path / "origin.git/hooks/pre-receive"
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    (tmp_path / "checkout/report/claims.png").write_bytes(b"first")
    assert checkout("pictures").returncode == 0
    summary = (tmp_path / "checkout/summary.md").read_text()
    assert summary.startswith("# MATCH: x") and "![" not in summary and "artifact" in summary


def test_a_report_without_a_claim_has_no_pictures_and_passes(checkout, tmp_path):
    report = "# DESCRIPTION: x\n"
    (tmp_path / "checkout/report/report.md").write_text(report)
    finished = checkout("pictures")
    assert finished.returncode == 0, finished.stderr
    assert (tmp_path / "checkout/summary.md").read_text() == report


def test_without_a_report_the_summary_says_so(checkout, tmp_path, snapshot):
    (tmp_path / "checkout/report/report.md").unlink()
    assert checkout("pictures").returncode == 0
    snapshot((tmp_path / "checkout/summary.md").read_text())


@pytest.mark.parametrize(("listed", "expected"), [("", "POST"), ("31", "PATCH")])
def test_a_comment_is_made_once_and_then_replaced(checkout, tmp_path, listed, expected):
    called = tmp_path / "called"
    gh = tmp_path / "bin/gh"
    gh.write_text(f'#!/bin/sh\necho "$@" >> {called}\ncase "$*" in *--jq*) echo "{listed}";; esac\n')
    gh.chmod(0o755)
    (tmp_path / "checkout/summary.md").write_text("# MATCH")
    assert checkout("comment").returncode == 0
    listing, written = called.read_text().splitlines()
    assert "repos/team/project/issues/12/comments" in listing
    place = "issues/comments/31" if listed else "issues/12/comments"
    assert f"--method {expected} repos/team/project/{place} --field body=@comment.md" in written
    assert (tmp_path / "checkout/comment.md").read_text() == "<!-- convergence -->\n# MATCH"
