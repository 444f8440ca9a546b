"""The mirror that a training run starts."""

import os
import signal
import time
from pathlib import Path

import pytest

from abrun.logs.wandb_files import read_wandb_files
from abrun.messages.codes import Code
from abrun.runs.writer import begin_attempt
from tests.snapshot import Snapshot
from tests.wandb_sync.server import Server
from tests.wandb_sync.test_mirror import _home, mirrored, run_of, server

__all__ = ["_home", "server"]


@pytest.mark.slow
def test_a_server_that_falls_silent_is_left_behind(
    tmp_path: Path, server: Server, snapshot: Snapshot
) -> None:
    """The mirror of a training run, whose last rows no server takes, is ended, with its processes."""
    from abrun.trainer.loop.recorder import WandbSync

    run = run_of(tmp_path / "x")
    writer, said = begin_attempt(run), list[str]()
    mirror = WandbSync(run, said.append, finish_s=5.0)
    writer.metrics(1, {"train/reward": 1.0})
    until = time.monotonic() + 60
    while not server.runs:
        assert time.monotonic() < until
        time.sleep(0.1)
    server.silent.set()
    writer.metrics(2, {"train/reward": 2.0})
    time.sleep(2.0)
    mirror.finish()
    snapshot(said)
    server.silent.clear()
    assert mirrored(run, "--all")[-1].code is Code.STEPS_SENT
    (kept,) = server.runs.values()
    assert [row["step"] for row in kept.history] == [1, 2]


def test_a_killed_mirror_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot) -> None:
    from abrun.trainer.loop.recorder import WandbSync

    monkeypatch.setenv("WANDB_MODE", "offline")
    said = list[str]()
    mirror = WandbSync(run_of(tmp_path / "x"), said.append)
    assert mirror._process
    os.kill(mirror._process.pid, signal.SIGKILL)
    mirror.finish()
    snapshot(said)


@pytest.mark.parametrize("is_success", [True, False])
def test_a_trainer_says_whether_its_run_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_success: bool
) -> None:
    """Its result is written after the upload, so the run has none yet."""
    from abrun.trainer.loop.recorder import WandbSync

    monkeypatch.setenv("WANDB_MODE", "offline")
    run = run_of(tmp_path / "x")
    begin_attempt(run).metrics(1, {"train/reward": 1.0})
    mirror = WandbSync(run, pytest.fail)
    mirror.finish(is_success=is_success)
    (file,) = (run.path / "wandb").glob("offline-run-*/run-*.wandb")
    assert read_wandb_files([file], "run").failure == ("" if is_success else "exit code 1")
