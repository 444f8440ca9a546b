"""What goes wrong with an engine in processes of its own ends the run in one line, and nothing lives on."""

import os
import signal
import time
from pathlib import Path

import pytest
from psutil import Process

from abrun.processes import RUN_DIR_VARIABLE, find_descendants, find_run_processes
from abrun.runs.rundir import RunDir
from tests.trainer.loop.runs import Trainer, metrics_by_step
from tests.trainer.loop.test_batch_cuts_of_a_run import assert_same_up_to_rounding
from tests.trainer.loop.test_vllm import settings, untimed
from tests.trainer.rollout.vllm_sampling import needs_vllm
from tests.written_runs import events, make_run, run_config

pytestmark = needs_vllm
SEPARATE = ("rollout.devices=1", "rollout.max_new_tokens=200", "steps=3", "checkpoint.every=1")


def started(directory: Path, *overrides: str) -> Trainer:
    if not directory.exists():
        make_run(directory, run_config(*settings(directory.parent, *SEPARATE, *overrides)))
    temporary = directory.parent / "temporary"
    temporary.mkdir(exist_ok=True)
    return Trainer(directory, env={RUN_DIR_VARIABLE: str(directory.resolve()), "TMPDIR": str(temporary)})


def engines(trainer: Trainer) -> set[Process]:
    pid = trainer.processes[0].pid
    assert pid is not None
    return {
        process
        for process in find_descendants(pid)
        if b"abrun.trainer.rollout.vllm.server" in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    }


def assert_nothing_is_left(directory: Path) -> None:
    deadline = time.monotonic() + 10
    while (left := find_run_processes(directory)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def test_an_engine_killed_as_it_samples_ends_the_run_which_resumes(tmp_path: Path) -> None:
    whole, directory = tmp_path / "whole", tmp_path / "killed"
    trainer = started(whole)
    assert trainer.wait(280) == 0, trainer.stderr
    assert_nothing_is_left(whole)
    assert (whole / "engine-0.log").stat().st_size > 0

    trainer = started(directory)
    trainer.wait_for_step(1, 280)
    time.sleep(0.7)  # a sync takes less, sampling more
    (engine,) = engines(trainer)
    os.kill(engine.pid, signal.SIGKILL)
    began_s = time.monotonic()
    assert trainer.wait(60) == 2
    print(f"ended after {time.monotonic() - began_s:.1f} s")
    last = RunDir(directory).events()[-1]
    print(last["message"])
    assert last["event"] == "failed" and "killed by SIGKILL; last in" in last["message"]
    assert "\n" not in last["message"] and "engine-0.log" in last["message"]
    assert time.monotonic() - began_s < 20
    assert_nothing_is_left(directory)

    trainer = started(directory)
    assert trainer.wait(280) == 0, trainer.stderr
    assert "resumed" in events(directory)
    assert_same_up_to_rounding(untimed(metrics_by_step(directory)), untimed(metrics_by_step(whole)))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_with_the_trainer_its_engine_ends(number: signal.Signals, tmp_path: Path) -> None:
    trainer = started(tmp_path / "run")
    trainer.wait_for_step(1, 280)
    assert len(engines(trainer)) == 1
    trainer.send(number)
    assert trainer.wait(60) == (-9 if number == signal.SIGKILL else 3)
    assert_nothing_is_left(tmp_path / "run")


@pytest.mark.parametrize("victim", ["first", "second", "trainer"])
def test_engines_that_are_killed_leave_no_segments_and_no_sockets(victim: str, tmp_path: Path) -> None:
    """Of two processes that share one."""
    before = set(os.listdir("/dev/shm"))
    trainer = started(tmp_path / "run", "rollout.devices=2", "rollout.tensor_parallel=2")
    trainer.wait_for_step(1, 280)
    first, second = sorted(engines(trainer), key=lambda process: process.pid)
    pid = {"first": first.pid, "second": second.pid, "trainer": trainer.processes[0].pid}[victim]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert trainer.wait(60) == (-9 if victim == "trainer" else 2)
    assert_nothing_is_left(tmp_path / "run")
    assert set(os.listdir("/dev/shm")) <= before
    assert not [path for path in (tmp_path / "temporary").iterdir() if path.is_socket()]
