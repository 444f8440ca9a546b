"""wandb's own client, offline and against a server on this machine: what reaches it, once, and what it costs
when there is nobody."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from abrun.errors import StoreError
from abrun.logs.wandb_files import read_wandb_files
from abrun.messages.codes import Code, Reason
from abrun.runs.experiment import write_experiment
from abrun.runs.rundir import RunDir
from abrun.runs.writer import begin_attempt
from abrun.wandb_sync import report, run_module, wandb_run
from abrun.wandb_sync.__main__ import exit_code_of
from abrun.wandb_sync.sync import sync_experiment
from tests.snapshot import Snapshot
from tests.verdict.verdicts import claim, verdict
from tests.wandb_sync.server import Server, serving
from tests.written_runs import make_run, run_config

CLEAN = ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_PROJECT", "WANDB_ENTITY")
SETTINGS = ("steps=9", "wandb={project: test}")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CLEAN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    (tmp_path / "home").mkdir()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with serving() as kept:
        monkeypatch.setenv("WANDB_BASE_URL", kept.url)
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        yield kept


def run_of(experiment: Path) -> RunDir:
    directory = experiment / "baseline" / "seed-0"
    make_run(directory, run_config(*SETTINGS))
    return RunDir(directory)


def attempt(run: RunDir, first: int, last: int, value: float) -> None:
    """An attempt at the run that records steps, and dies."""
    writer = begin_attempt(run)
    for step in range(first, last + 1):
        writer.metrics(step, {"train/reward": value + step})


def mirrored(run: RunDir, *options: str) -> list[Reason]:
    """Mirror what a run has recorded so far; what was said."""
    code, reasons = run_module(["abrun.wandb_sync", str(run.path), *options], 100)
    assert code is not None
    return reasons


def offline(run: RunDir) -> list[tuple[int, float]]:
    """What all offline files of the run hold, in the order in which they were begun."""
    files = sorted((run.path / "wandb").glob("offline-run-*/run-*.wandb"))
    found = []
    for file in files:
        log = read_wandb_files([file], "run")
        series = log.metrics["train/reward"]
        assert (log.group, log.job_type, log.name) == ("x", "baseline", "baseline-s0")
        found += list(zip(map(int, series.steps), map(float, series.values), strict=True))
    return found


def test_offline_attempts_are_one_run_with_every_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = run_of(tmp_path / "x")
    attempt(run, 1, 5, 0.0)
    assert mirrored(run) == []
    attempt(run, 4, 7, 0.5)  # from the checkpoint of step 3
    assert mirrored(run) == []
    assert offline(run) == [*((step, float(step)) for step in range(1, 6)), (6, 6.5), (7, 7.5)]
    ids = {path.name.rpartition("-")[2] for path in (run.path / "wandb").glob("offline-run-*")}
    assert ids == {run.wandb_location()["id"]} == {wandb_run.new_id(run.record(), run.path)}
    for path in run.path.rglob("*"):  # wandb's files hold the configuration
        is_ours = path.is_dir() and not path.is_relative_to(run.path / "wandb")
        assert path.is_symlink() or is_ours or not path.stat().st_mode & 0o077, path


@pytest.mark.parametrize(
    ("ending", "code", "code_of_upload"),
    [
        ("finished", 0, 0),
        pytest.param("interrupted", 3, 3, marks=pytest.mark.slow),
        pytest.param("failed", 2, 2, marks=pytest.mark.slow),
        ("died", 1, 0),  # standard input closes, and nothing is recorded; for abrun wandb-sync it still runs
    ],
)
def test_a_wandb_run_ends_as_its_run_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, code: int, code_of_upload: int
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = run_of(tmp_path / "x")
    writer = begin_attempt(run)
    writer.metrics(1, {"train/reward": 1.0})
    if ending == "finished":
        writer.finish(1, {})
    elif ending == "interrupted":
        writer.interrupt(exit_code=3)
    elif ending == "failed":
        writer.fail(Code.FOREIGN_TEXT(text="x: y"), exit_code=2)
    mirrored(run)
    (file,) = (run.path / "wandb").glob("offline-run-*/run-*.wandb")
    assert read_wandb_files([file], "run").failure == (f"exit code {code}" if code else "")
    assert exit_code_of(run, is_still_running=True) == code_of_upload


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_same_one(tmp_path: Path, server: Server) -> None:
    run = run_of(tmp_path / "x")
    attempt(run, 1, 5, 0.0)
    assert mirrored(run) == []
    attempt(run, 4, 7, 0.5)
    assert mirrored(run) == []
    (name,) = server.runs
    kept = server.runs[name]
    assert [row["_step"] for row in kept.history] == [row["step"] for row in kept.history] == [*range(1, 8)]
    assert [row["train/reward"] for row in kept.history] == [1, 2, 3, 4, 5, 6.5, 7.5]
    assert (kept.settings["groupName"], kept.settings["jobType"]) == ("x", "baseline")
    assert run.wandb_location() == {
        "id": name,
        "project": "test",
        "entity": "team",
        "url": f"{server.url}/team/test/runs/{name}",
    }
    assert "train/reward" in kept.summary


@pytest.mark.slow
def test_sync_sends_what_was_recorded_offline_and_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    experiment = tmp_path / "x"
    run = run_of(experiment)
    names = [{"arm": "baseline", "seed": 0, "rerun": 0}]
    write_experiment(experiment, {"experiment": "x", "recipe": {}, "runs": names})
    attempt(run, 1, 5, 0.0)
    mirrored(run)
    attempt(run, 4, 9, 0.5)
    with serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        said: list[str] = []
        sync_experiment(experiment, said.append)
        sync_experiment(experiment, said.append)
        kept = server.runs[run.wandb_location()["id"]]
        url = run.wandb_location()["url"]
        assert said == [f"baseline/seed-0: 9 steps sent, {url}", f"baseline/seed-0: 0 steps sent, {url}"]
        assert [row["train/reward"] for row in kept.history] == [1, 2, 3, 4.5, 5.5, 6.5, 7.5, 8.5, 9.5]
    monkeypatch.setattr(wandb_run, "INIT_TIMEOUT_S", 1.0)
    monkeypatch.delenv("WANDB_API_KEY")
    with pytest.raises(StoreError) as gone:
        sync_experiment(experiment, said.append)
    snapshot(gone.value)
    assert "\n" not in str(gone.value)


@pytest.mark.slow
def test_a_report_is_an_artifact_with_the_verdict_in_the_summary(
    tmp_path: Path, server: Server, snapshot: Snapshot
) -> None:
    page = tmp_path / "report.html"
    page.write_text("the report")
    content = verdict([claim(mean_difference=0.5, certified_bound=None)], experiment="x", num_pairs=4)
    said = report.upload_report(content, [page], None)
    snapshot(said)
    (kept,) = [run for run in server.runs.values() if run.artifacts]
    assert kept.settings["jobType"] == "compare" and kept.settings["groupName"] == "x"
    assert kept.artifacts[0]["artifactCollectionName"] == "x-report"
    assert kept.summary["verdict"] == "MATCH" and kept.summary["num_pairs"] == 4
    assert kept.summary["treatment/train/reward/mean_difference"] == 0.5
    assert any(b"the report" in part for part in server.runs["a"].uploaded.values())


def test_what_is_switched_off_is_no_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.chdir(tmp_path)
    said = report.upload_report(verdict(), [], None)
    snapshot(said)


def test_a_report_that_does_not_get_there_is_one_line(tmp_path: Path, snapshot: Snapshot) -> None:
    said = report.upload_report(verdict(), [], None)
    assert "API key" in said and "\n" not in said
    snapshot(said)


def test_the_control_plane_answers_without_wandb(tmp_path: Path) -> None:
    """A wandb that cannot be imported: one line, here as from abrun compare --wandb."""
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "wandb.py").write_text("raise ImportError('no wandb here')")
    run = run_of(tmp_path / "x")
    attempt(run, 1, 2, 0.0)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path / 'fake'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    for module, given in (
        (["abrun.wandb_sync", str(run.path)], ""),
        (["abrun.wandb_sync.report"], json.dumps({})),
    ):
        done: Any = subprocess.run(
            [sys.executable, "-m", *module], input=given, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1 and "no wandb here" in done.stdout and not done.stderr
