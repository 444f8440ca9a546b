"""SIGKILL before any call that writes: files are whole or absent, the status right, and nothing left over."""

import errno
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from abrun.errors import StoreError
from abrun.runs import owner
from abrun.runs.files import read_json, remove_partial_files, write_json
from abrun.runs.launches import begin_launch, end_launch, update_launch, write_config
from abrun.runs.layout import RunName
from abrun.runs.rundir import RunDir
from abrun.runs.state import read_state
from abrun.runs.writer import begin_attempt
from tests.runs.faulty import killed_at

NAME = RunName(arm="baseline", seed=0)
HERE = owner.this_process_fields()["host"]


def make_run(path: Path) -> RunDir:
    run = RunDir(path / "run")
    write_config(run, "e", NAME, {"steps": 2})
    return run


def launch(run: RunDir) -> None:
    """Do what a launcher and its job write, in their order."""
    begin_launch(run, ["cpu"], None)
    update_launch(run, pid=os.getpid())
    writer = begin_attempt(run)
    writer.environment({})
    for step in (1, 2):
        writer.metrics(step, {"x": 1.0 * step})
        writer.heartbeat(step)
    writer.finish(2)
    end_launch(run, "finished", None, exit_code=0, signal=None)


def left_in(folder: Path) -> list[Path]:
    """Return the files that are partial, empty or no JSON."""
    return [
        path
        for path in folder.rglob("*")
        if path.name.endswith(".partial")
        or (path.suffix == ".json" and not path.is_dir() and not _is_json(path))
    ]


def _is_json(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_text()), dict)
    except ValueError:
        return False


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_after_a_kill_at_any_call_the_status_is_right_and_nothing_is_left(tmp_path: Path, every: int) -> None:
    last, seen = 1, []
    while True:
        run = make_run(tmp_path / str(last))
        killed = killed_at(last, run.path, lambda run=run: launch(run))
        state = read_state(run, NAME)
        expected = "finished" if run.finished else "interrupted" if run.launches() else "pending"
        assert state.status == expected, f"call {last}: {state}"
        assert [path for path in left_in(run.path) if not path.name.endswith(".partial")] == [], (
            f"call {last}"
        )
        if not killed:
            break
        if not run.finished:
            launch(run)
            assert [read_state(run, NAME).status, *run.metrics()["x"].values] == ["finished", 1.0, 2.0]
            assert left_in(run.path) == [], f"call {last}"
        seen.append(state.status)
        last += every
    assert last > 50 and sorted(set(seen)) == ["finished", "interrupted", "pending"]


def test_a_run_whose_launcher_was_killed_before_it_noted_the_process(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    sleep = subprocess.Popen(["sleep", "60"])
    assert not killed_at(10**9, run.path, lambda: begin_launch(run, ["cpu"], None))
    assert read_state(run, NAME).status == "interrupted", "nothing has begun"
    begin_attempt(run)
    assert read_state(run, NAME).status == "running"  # its process lives on, to save a checkpoint
    path = run.path / "attempts" / "0001.json"
    write_json(path, read_json(path) | owner.process_fields(sleep.pid))
    sleep.kill()
    sleep.wait()
    state = read_state(run, NAME)
    assert state.status == "interrupted" and "continue with --resume" in str(state.message)


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_hard_links_has_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(error, os.strerror(error))

    run = make_run(tmp_path)
    monkeypatch.setattr(os, "link", refuse)
    assert [begin_attempt(run).attempt, begin_attempt(run).attempt] == [1, 2]
    assert [attempt.pid for attempt in run.attempts()] == [os.getpid()] * 2 and left_in(run.path) == []


@pytest.mark.parametrize("content", [b'{"number": 2, "sta', b"[]", b'{"started_s": "soon"}'])
def test_a_damaged_record_of_an_attempt_that_is_over_says_that_it_failed(
    tmp_path: Path, content: bytes
) -> None:
    run = make_run(tmp_path)
    for _ in range(3):
        writer = begin_attempt(run)
    (run.path / "attempts" / "0002.json").write_bytes(content)
    assert [attempt.status for attempt in run.attempts()] == ["running", "failed", "running"]
    assert run.attempts()[1].ended_s is None
    (run.path / "attempts" / "0003.json").write_bytes(content)
    with pytest.raises(StoreError, match=r"0003\.json: "):
        read_state(run, NAME)
    writer.finish(2)
    (run.path / "attempts" / "0003.json").write_bytes(content)
    assert read_state(run, NAME).status == "finished"
    assert "0003.json: " in str(run.attempts()[2].message)


def gone() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.mark.parametrize(
    ("name", "old", "removed"),
    [
        (lambda: f".result.json.{HERE}.{gone()}.partial", False, True),
        (lambda: f".result.json.{HERE}.{os.getpid()}.partial", True, False),
        (lambda: ".result.json.elsewhere.7.partial", False, False),
        (lambda: ".result.json.elsewhere.7.partial", True, True),
        (lambda: f".result.json.{gone()}.partial", True, True),  # of an older version
        (lambda: "my.partial", True, False),
        (lambda: ".weights.safetensors.partial", True, False),  # a trainer's
    ],
)
def test_partial_files_of_dead_writers_are_removed(
    tmp_path: Path, name: Callable[[], str], old: bool, removed: bool
) -> None:
    for folder in (tmp_path, tmp_path / "arm" / "seed-0" / "attempts"):
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / name()
        partial.write_bytes(b"{")
        os.utime(partial, (0, 0) if old else None)
        remove_partial_files(tmp_path)
        assert partial.exists() is not removed


def test_the_name_of_a_partial_file_says_whose_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (named.append(Path(a).name), replace(a, b)))
    write_json(tmp_path / "a.json", {})
    assert re.fullmatch(rf"\.a\.json\.{re.escape(HERE)}\.{os.getpid()}\.partial", named[0])
