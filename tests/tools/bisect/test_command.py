"""`abrun bisect`: a repository of twelve commits, of which the sixth breaks its trainer."""

import json
import os
import subprocess
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from abrun import cli
from abrun.errors import AbrunError, LaunchError, RecipeError
from abrun.experiment.plan import ExperimentPlan
from abrun.launch.prepare import own_experiment
from abrun.messages.codes import Code
from abrun.report.present.terminal import terminal
from abrun.runs.experiment import is_experiment, read_run_state
from abrun.runs.layout import RunName
from abrun.runs.rundir import RunDir
from abrun.runs.writer import begin_attempt
from abrun.tools.bisect.candidates import commits, refs, versions
from abrun.tools.bisect.cli import _search
from abrun.tools.bisect.command import Bisection, BisectionOutcome, StoppedError, bisect_recipe
from abrun.tools.bisect.environments import SetupError, environments_for
from abrun.tools.bisect.report import render_outcome, render_plan
from abrun.tools.bisect.search import Design, pair_counts
from tests.snapshot import Snapshot

TRAINER = """
import json, math, random, sys
seed, out, arm = int(sys.argv[1]), sys.argv[2], sys.argv[3]
shared, own = random.Random(seed), random.Random(f"{seed} {arm}")
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
  argv: ["{python}", "{checkout}/train.py", "{seed}", "{run_dir}/scores.jsonl", "{arm}-{rerun}"]
  parameters: {checkout: .}
  metrics: {format: jsonl, path: "{run_dir}/scores.jsonl"}
  aliases: {train/reward: score}
steps: 12
arms: {baseline: {}}
seeds: [0, 1, 2, 3, 4, 5]
compare:
  claims: [{metric: train/reward, window: last 40%, margin: 0.04}]
"""


def git(repo: Path, *arguments: str) -> str:
    named = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    # A candidate's noise is by its hash, which dates are part of.
    dates = dict.fromkeys(("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"), "2026-01-01T00:00:00Z")
    return subprocess.run(
        ["git", *named, "-C", str(repo), *arguments],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | dates,
    ).stdout.strip()


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Commits 0 to 12, tagged; from the sixth on the trainer learns less."""
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
    return CliRunner().invoke(cli.app, typed, catch_exceptions=False)


def found(runs_dir: Path) -> dict:
    return json.loads((runs_dir / "tiny-bisect" / "bisect.json").read_text())


@pytest.mark.slow
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


class Inline:
    """Makes runs by calling the trainer in their checkout, without a launcher's processes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.made: list[RunName] = []
        self.broken: set[str] = set()  # arms whose trainer crashes
        self.killed: set[str] = set()  # arms that are killed with this launcher
        self.stops_after = 1000
        self.noisy = True

    def __call__(self, plan: ExperimentPlan, only: Collection[RunName]) -> int:
        with own_experiment(plan, self.directory, resume=is_experiment(self.directory)):
            for run in plan.runs:
                if run.name in only:
                    if len(self.made) == self.stops_after:
                        return 130
                    self.made.append(run.name)
                    self.train(RunDir(self.directory / str(run.name)), run.name)
        return 0

    def train(self, run: RunDir, name: RunName) -> None:
        config = run.record().config
        out = run.path / "scores.jsonl"
        trainer = Path(config["trainer"]["parameters"]["checkout"]) / "train.py"
        writer = begin_attempt(run)
        writer.environment({"python": "3", "versions": {}, "devices": ["cpu"], "hosts": ["here"]})
        if name.arm in self.killed:
            (attempt,) = (run.path / "attempts").iterdir()
            gone = subprocess.Popen(["true"])
            gone.wait()
            attempt.write_text(json.dumps({**json.loads(attempt.read_text()), "pid": gone.pid}))
            raise KeyboardInterrupt
        if name.arm in self.broken:
            writer.fail(Code.FOREIGN_TEXT(text="exit code 1: no such function"), exit_code=1)
            return
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                sys, "argv", [str(trainer), str(name.seed), str(out), str(name) if self.noisy else ""]
            )
            exec(compile(trainer.read_text(), str(trainer), "exec"), {})
        for line in out.read_text().splitlines():
            row = json.loads(line)
            writer.metrics(row["step"], {"train/reward": row["score"]})
        writer.finish(12)


def bisection(
    repo: Path, tmp_path: Path, good: str, bad: str, *, last: int = 4, sets: str = "steps=12"
) -> Bisection:
    recipe = bisect_recipe(repo / "recipe.yaml", ["seeds=[0,1,2,3]", sets])
    found = commits(repo, good, bad)
    design = Design(num_candidates=len(found) - 1, alpha=0.05, spare=1, counts=pair_counts(4, last))
    environments = environments_for(recipe, tmp_path, repo, None)
    return Bisection(recipe, found, environments, design, tmp_path / "tiny-bisect")


def run(one: Bisection, inline: Inline) -> BisectionOutcome:
    return one.run(inline, lambda line: None)


def test_it_is_named_and_the_same_call_goes_on_after_a_stop(
    repo: Path, tmp_path: Path, snapshot: Snapshot
) -> None:
    stopped = Inline(tmp_path / "tiny-bisect")
    stopped.stops_after = 14  # within the first candidate between
    with pytest.raises(StoppedError):
        run(bisection(repo, tmp_path, "v4", "v8"), stopped)
    went_on = Inline(tmp_path / "tiny-bisect")
    search = bisection(repo, tmp_path, "v4", "v8")
    outcome = run(search, went_on)
    assert outcome.exit_code == 0 and "change 6 broke it" in outcome.sentence
    assert [test.answer for test in outcome.tests] == ["good", "bad", "bad", "good"]  # A/A, v8, v6, v5
    assert len(stopped.made) + len(went_on.made) == 5 * 4 and not {*stopped.made} & {*went_on.made}
    assert found(tmp_path)["suspects"] == [git(repo, "rev-parse", "v6")[:12]]
    snapshot([outcome.sentence, *(test.reason for test in outcome.tests)])
    terminal().print(render_outcome(search, outcome))
    again = Inline(tmp_path / "tiny-bisect")
    one = bisection(repo, tmp_path, "v4", "v8")
    assert run(one, again).sentence == outcome.sentence and not again.made  # all of it is on disk
    one.clean_up()
    assert str(tmp_path) not in git(repo, "worktree", "list")
    with snapshot.refused(LaunchError):
        run(bisection(repo, tmp_path, "v4", "v8", last=6), again)


def test_a_commit_that_cannot_run_is_passed_over_and_the_answer_is_a_range(repo, tmp_path, monkeypatch):
    inline = Inline(tmp_path / "tiny-bisect")
    inline.broken = {git(repo, "rev-parse", "v6")[:12]}
    search = bisection(repo, tmp_path, "v4", "v8")
    outcome = run(search, inline)
    assert outcome.exit_code == 4 and outcome.sentence.startswith("one of these 2 broke it: ")
    assert "change 6" in outcome.sentence and "change 7" in outcome.sentence
    skipped = next(test for test in outcome.tests if test.answer == "skipped")
    assert "exit code 1: no such function" in skipped.reason
    assert outcome.search is not None and outcome.search.tests <= search.design.tests
    again = Inline(tmp_path / "tiny-bisect")
    assert run(bisection(repo, tmp_path, "v4", "v8"), again).sentence == outcome.sentence and not again.made


def test_a_run_that_was_killed_with_the_launcher_is_run_again(
    repo: Path, tmp_path: Path, snapshot: Snapshot
) -> None:
    inline = Inline(tmp_path / "tiny-bisect")
    inline.killed = {git(repo, "rev-parse", "v6")[:12]}
    with pytest.raises(KeyboardInterrupt):
        run(bisection(repo, tmp_path, "v4", "v8"), inline)
    killed = read_run_state(inline.directory, inline.made[-1])
    snapshot((killed.status, killed.message))
    outcome = run(bisection(repo, tmp_path, "v4", "v8"), Inline(tmp_path / "tiny-bisect"))
    assert outcome.exit_code == 0 and "change 6 broke it" in outcome.sentence


def test_commits_that_change_no_number_match(repo: Path, tmp_path: Path) -> None:
    inline = Inline(tmp_path / "tiny-bisect")
    inline.noisy = False
    outcome = run(bisection(repo, tmp_path, "v4", "v7"), inline)
    assert outcome.exit_code == 0 and "change 6 broke it" in outcome.sentence
    assert [test.answer for test in outcome.tests] == ["good", "bad", "good", "bad"]  # A/A, v7, v5, v6


def test_what_is_undecided_gets_more_seeds_and_then_is_passed_over(repo: Path, tmp_path: Path) -> None:
    """Margin 0.18, of a difference of 0.18: no number of seeds decides."""
    inline = Inline(tmp_path / "tiny-bisect")
    one = bisection(repo, tmp_path, "v4", "v8", last=6, sets="compare.claims.0.margin=0.1815")
    outcome = run(one, inline)
    assert outcome.exit_code == 4 and "undecided after 6 pairs" in outcome.sentence
    assert [(test.answer, test.num_pairs) for test in outcome.tests] == [("good", 4), ("undecided", 6)]
    assert len(inline.made) == 4 + 4 + 6 + 2  # good, its reruns, bad, and good's runs of the later seeds


def test_what_does_not_differ_is_not_bisected(repo: Path, tmp_path: Path) -> None:
    outcome = run(bisection(repo, tmp_path, "v6", "v9"), Inline(tmp_path / "tiny-bisect"))
    assert outcome.exit_code == 5 and "does not differ" in outcome.sentence and len(outcome.tests) == 2


def test_a_good_one_that_cannot_match_itself_is_no_ground(
    repo: Path, tmp_path: Path, snapshot: Snapshot
) -> None:
    one = bisection(repo, tmp_path, "v4", "v8", sets="compare.claims.0.margin=0.0005")
    outcome = run(one, Inline(tmp_path / "tiny-bisect"))
    assert outcome.exit_code == 4
    snapshot(outcome.sentence)


def test_a_bad_one_that_does_not_run_is_said_and_nothing_is_left_in_the_repository(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot
) -> None:
    inline = Inline(tmp_path / "tiny-bisect")
    inline.broken = {git(repo, "rev-parse", "v8")[:12]}
    one = bisection(repo, tmp_path, "v4", "v8")
    monkeypatch.setattr("abrun.tools.bisect.cli._make_launch_function", lambda *_: inline)
    with snapshot.refused(LaunchError):
        _search(one, inline.directory, None, keep=True)
    assert git(repo, "worktree", "list").count(str(tmp_path)) == 2
    with pytest.raises(LaunchError):
        _search(one, inline.directory, None, keep=False)
    assert str(tmp_path) not in git(repo, "worktree", "list") and is_experiment(inline.directory)


def test_setups_have_an_environment_of_their_own_and_their_failure_is_a_line(
    repo, tmp_path, monkeypatch, snapshot
):
    monkeypatch.setenv("PYTHONPATH", "/leaks")
    recipe = bisect_recipe(repo / "recipe.yaml", [])
    found = commits(repo, "v4", "v6")
    setup = 'grep -q "# 5" train.py && echo "no wheel" && exit 3; env > seen; which python >> seen'
    environments = environments_for(recipe, tmp_path, repo, setup)
    monkeypatch.setattr("abrun.tools.bisect.environments.VENV", ("-I", "-m", "venv", "--without-pip"))
    good, broken, _ = found
    environments.make(good)
    checkout = Path(environments.changes(good)["trainer.parameters.checkout"])
    seen = (checkout / "seen").read_text()
    assert "/leaks" not in seen and seen.splitlines()[-1] == environments.changes(good)["trainer.python"]
    (checkout / "seen").unlink()
    environments.make(good)
    assert not (checkout / "seen").exists()  # made once
    with snapshot.refused(SetupError):
        environments.make(broken)
    other = replace(environments, setup="true")
    assert other.changes(good)["trainer.python"] != environments.changes(good)["trainer.python"]
    for candidate in found:
        environments.remove(candidate)
    assert str(tmp_path) not in git(repo, "worktree", "list")
    (log,) = (tmp_path / ".environments").glob("*/setup.log")  # of the one that failed
    assert log.parent.name.startswith(broken.arm)
    snapshot(log.read_text())


def test_a_dry_run_lists_candidates_levels_and_runs_and_writes_nothing(
    repo: Path, tmp_path: Path, snapshot: Snapshot
) -> None:
    said = bisect(repo, tmp_path, "--good", "v0", "--bad", "v12", "--dry-run")
    assert said.exit_code == 0 and not list(tmp_path.iterdir())
    words = " ".join(said.output.split())
    assert "good " in words and "change 12" in words and "of at most 6" in words and "after 6, 9, 12" in words
    snapshot(words)  # 12 x (2 + 6)
    assert render_plan(bisection(repo, tmp_path, "v0", "v12"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--good", "v6"],
        ["--good", "v6", "--bad", "v2"],
        ["--good", "v6", "--bad", "v6"],
        ["--good", "nothing", "--bad", "v6"],
        ["--refs", "v1,v3,v1"],
        ["--package", "torch", "--versions", "2.10.0"],
        ["--package", "to rch", "--versions", "2.10.0,2.11.0"],
        ["--good", "v1", "--bad", "v6", "--max-seeds", "3"],
        ["--good", "v1", "--bad", "v6", "--set", "compare.claims=[]"],
        ["--good", "v1", "--bad", "v6", "--set", "compare.paired=false"],
        ["--good", "v1", "--bad", "v6", "--set", "launcher.type=slurm"],
        ["--good", "v1", "--bad", "v6", "--name", "a/b"],
    ],
)
def test_what_cannot_be_bisected_is_refused_in_a_line(repo, tmp_path, arguments, snapshot):
    with pytest.raises(AbrunError) as refused:
        bisect(repo, tmp_path, *arguments, "--dry-run")
    assert "\n" not in str(refused.value)
    snapshot(str(refused.value))


def test_a_command_that_would_not_follow_its_candidate_is_refused(
    repo: Path, tmp_path: Path, snapshot: Snapshot
) -> None:
    recipe = bisect_recipe(repo / "recipe.yaml", ["trainer.parameters={}", "trainer.argv=['true']"])
    with snapshot.refused(RecipeError):
        environments_for(recipe, tmp_path, repo, None)
    own = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"
    with snapshot.refused(RecipeError):
        bisect_recipe(own, [])


def test_candidates_are_first_parents_refs_and_versions(repo: Path) -> None:
    assert [one.title.split()[-1] for one in commits(repo, "v3", "v6")] == ["3", "4", "5", "6"]
    assert [one.title.split()[-1] for one in refs(repo, ["v9", "v2"])] == ["9", "2"]
    found = versions("torch", ["2.10.0+cpu", "2.11.0"])
    assert [one.requirement for one in found] == ["torch==2.10.0+cpu", "torch==2.11.0"]
    assert [one.arm for one in found] == ["torch-2.10.0_cpu", "torch-2.11.0"]
