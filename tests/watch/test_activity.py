"""Runs without a recent step, by a fake clock: what the table, the log and the JSON say of them."""

import io
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from abrun import watch
from abrun.runs.files import write_json
from abrun.watch import LINE_EVERY_S
from tests.watch.test_watch import add_steps, drawn, make_experiment, with_warm_start

START_S = 1e9


class Clock:
    """Both of Python's clocks, which stand still until a test moves them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = START_S
        for name in ("time", "monotonic"):
            monkeypatch.setattr(time, name, lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Follower:
    """A launch followed without a terminal: the lines printed since the last look, without their time."""

    def __init__(self, experiment_dir: Path) -> None:
        self._output = io.StringIO()
        self._view = watch.View(Console(file=self._output, width=200))
        self._view.follow(experiment_dir)

    def lines(self) -> list[str]:
        position = self._output.tell()
        self._view.tick(now=True)
        return [line.split(" ", 1)[1] for line in self._output.getvalue()[position:].splitlines()]


def begin(directory: Path, started_s: float = START_S) -> None:
    write_json(directory / "attempts/0001.json", {"status": "running", "started_s": started_s})


def take_steps(directory: Path, clock: Clock, first: int, last: int, step_s: float) -> None:
    """A command's steps, and the heartbeat that abrun writes for the last of them."""
    for step in range(first, last + 1):
        clock.now_s += step_s
        add_steps(directory, step, step, time_s=clock.now_s)
    beat_command(directory, clock, last)


def beat_command(directory: Path, clock: Clock, step: int) -> None:
    bounds = {"patience_s": 1800.0, "limit_s": 1800.0}
    write_json(directory / "heartbeat.json", {"time_s": clock.now_s, "step": step, **bounds})


def note(directory: Path, clock: Clock, activity: str, **values: Any) -> None:
    content = {"attempt": 1, "node": 0, "host": "n0", "time_s": clock.now_s, "activity": activity}
    write_json(directory / "nodes/0000.json", {**content, "limit_s": 600.0, **values})


def run_json(experiment_dir: Path) -> dict[str, Any]:
    return watch.status_json(experiment_dir.parent, experiment_dir)["runs"][0]


def test_a_command_that_hangs_after_step_5_is_marked_after_a_minute(tmp_path: Path, clock: Clock) -> None:
    experiment_dir = make_experiment(tmp_path, baseline_0=0, treatment_0=0)
    directory = experiment_dir / "baseline/seed-0"
    begin(directory)
    take_steps(directory, clock, 1, 5, step_s=1.0)
    follower = Follower(experiment_dir)
    assert follower.lines()[0].startswith("baseline/seed-0: running, step 5/60, reward 0.083")
    clock.now_s += 60
    assert follower.lines() == [] and "no step" not in drawn(experiment_dir, 80)
    assert run_json(experiment_dir)["eta_s"] == 27.5
    clock.now_s += 1
    marked = "baseline/seed-0: running 5/60, no step for 1:01 (limit 30:00)"
    assert follower.lines() == [marked] and follower.lines() == []
    clock.now_s += 252
    for width in (80, 120):
        lines = drawn(experiment_dir, width).splitlines()
        assert lines[0] == "demo  1 running (no step for 5:13)  1 pending"
        assert lines[-2] == "baseline/seed-0: no step for 5:13 (limit 30:00)"
        assert "left" not in lines[-1] and max(map(len, lines)) <= width
    status = run_json(experiment_dir)
    assert (status["status"], status["activity"]) == ("running", "no step for 5:13 (limit 30:00)")
    assert (status["since_step_s"], status["stall_limit_s"], status["eta_s"]) == (313.0, 1800.0, None)
    clock.now_s += LINE_EVERY_S
    assert follower.lines() == ["baseline/seed-0: running 5/60, no step for 10:13 (limit 30:00)"]
    take_steps(directory, clock, 6, 7, step_s=1.0)
    assert follower.lines()[0].startswith("baseline/seed-0: step 7/60") and follower.lines() == []
    assert "no step" not in drawn(experiment_dir, 80) and run_json(experiment_dir)["activity"] is None


def test_ten_usual_steps_may_pass_without_one(tmp_path: Path, clock: Clock) -> None:
    experiment_dir = make_experiment(tmp_path, baseline_0=0)
    begin(experiment_dir / "baseline/seed-0")
    take_steps(experiment_dir / "baseline/seed-0", clock, 1, 5, step_s=30.0)
    clock.now_s += 300
    assert "no step" not in drawn(experiment_dir, 80)
    clock.now_s += 1
    assert "baseline/seed-0: no step for 5:01 (limit 30:00)" in drawn(experiment_dir, 80)


def test_a_command_that_goes_on_after_its_last_step_is_not_said_to_lack_one(
    tmp_path: Path, clock: Clock
) -> None:
    experiment_dir = make_experiment(tmp_path, baseline_0=0)
    begin(experiment_dir / "baseline/seed-0")
    take_steps(experiment_dir / "baseline/seed-0", clock, 1, 60, step_s=1.0)
    clock.now_s += 90
    assert "baseline/seed-0: last step 1:30 ago (limit 30:00)" in drawn(experiment_dir, 80)


def test_a_command_that_never_logs_and_one_that_warms_up_for_long_are_counted(
    tmp_path: Path, clock: Clock
) -> None:
    experiment_dir = make_experiment(tmp_path, baseline_0=0, treatment_0=0)
    directories = [experiment_dir / arm / "seed-0" for arm in ("baseline", "treatment")]
    for directory in directories:
        begin(directory)
        clock.now_s += 1
        beat_command(directory, clock, 0)
    follower = Follower(experiment_dir)
    started = [f"{arm}/seed-0: started, 60 steps" for arm in ("baseline", "treatment")]
    assert follower.lines() == started
    clock.now_s = START_S + 314
    text = "starting for 5:14: no step logged yet (limit 30:00)"
    assert follower.lines()[0] == f"baseline/seed-0: {text}"
    lines = drawn(experiment_dir, 80).splitlines()
    assert lines[0] == "demo  2 starting" and lines[-2] == f"baseline/seed-0 and 1 more: {text}"
    assert lines[-1].endswith("5:14 elapsed")
    take_steps(directories[1], clock, 1, 2, step_s=4.0)
    lines = drawn(experiment_dir, 80).splitlines()
    assert lines[0] == "demo  1 starting  1 running"
    assert lines[-2] == "baseline/seed-0: starting for 5:22: no step logged yet (limit 30:00)"


def test_the_start_of_abruns_trainer_says_what_it_does(tmp_path: Path, clock: Clock) -> None:
    experiment_dir = make_experiment(tmp_path, baseline_0=0)
    directory = experiment_dir / "baseline/seed-0"
    write_json(directory / "launch.json", {"launches": [{"started_s": START_S, "attempts": 0}]})
    follower = Follower(experiment_dir)
    assert follower.lines() == ["baseline/seed-0: started, 60 steps"]
    clock.now_s += 7
    assert drawn(experiment_dir, 80).splitlines()[-2] == "baseline/seed-0: starting for 0:07: imports"
    begin(directory)
    note(directory, clock, "rendezvous of the ranks")
    assert "baseline/seed-0: starting for 0:07: rendezvous of the ranks" in drawn(experiment_dir, 80)
    clock.now_s += 113
    note(directory, clock, "model set-up")
    starting = "baseline/seed-0: starting for 2:00: model set-up"
    assert follower.lines() == [starting] and drawn(experiment_dir, 80).splitlines()[-2] == starting
    status = run_json(experiment_dir)
    assert (status["status"], status["stall_limit_s"]) == ("starting", None)  # it is at work: no limit counts
    add_steps(directory, 1, 1, time_s=clock.now_s)
    write_json(directory / "heartbeat.json", {"time_s": clock.now_s, "step": 1})
    clock.now_s += 313
    note(directory, clock, "generation")
    assert "baseline/seed-0: no step for 5:13: generation" in drawn(experiment_dir, 80)
    rank = {"rank": 0, "place": "read (data/shards.py:88)", "doing": "generation", "waits": False}
    note(directory, clock, "generation", silent_since_s=clock.now_s - 300, ranks=[rank])
    assert follower.lines() == [
        "baseline/seed-0: stalled 1/60, no progress for 300 s: rank 0 (on n0) in read (data/shards.py:88) "
        "during generation (limit 10:00)"
    ]


def test_a_run_that_starts_again_says_so(tmp_path: Path, clock: Clock) -> None:
    experiment_dir = make_experiment(tmp_path, baseline_0=0)
    directory = experiment_dir / "baseline/seed-0"
    begin(directory)
    take_steps(directory, clock, 1, 20, step_s=1.0)
    again = {"status": "running", "started_s": clock.now_s + 100}
    write_json(directory / "attempts/0002.json", again)
    clock.now_s += 112
    note(directory, clock, "checkpoint restore", attempt=2)
    lines = drawn(experiment_dir, 80).splitlines()
    assert lines[0] == "demo  1 starting" and "20/60" in lines[3]
    assert lines[-2] == "baseline/seed-0: starting for 0:12: checkpoint restore"


def test_runs_that_wait_for_the_warm_start_count_its_time(tmp_path: Path, clock: Clock) -> None:
    experiment_dir = make_experiment(tmp_path, baseline_0=0, treatment_0=0, other_0=0)
    for arm in ("baseline", "treatment"):
        warm_start = with_warm_start(experiment_dir / arm / "seed-0")
    clock.now_s += 8
    note(warm_start, clock, "model set-up")
    lines = drawn(experiment_dir, 80).splitlines()
    assert "warm start: starting for 0:08: model set-up" in lines
    write_json(warm_start / "heartbeat.json", {"time_s": clock.now_s, "step": 42})
    clock.now_s += 34
    lines = drawn(experiment_dir, 80).splitlines()
    assert lines[-2] == "baseline/seed-0 and 1 more: waiting for the warm start, 0:42 so far"
    assert lines[-1].split("%")[1] == "  0:42 of warm start"
    write_json(warm_start / "result.json", {})
    assert "warm start" not in drawn(experiment_dir, 80)


def test_a_clock_set_back_does_not_make_a_run_start_again(tmp_path: Path, clock: Clock) -> None:
    experiment_dir = make_experiment(tmp_path, baseline_0=0, treatment_0=0)
    directory = experiment_dir / "baseline/seed-0"
    begin(directory)
    clock.now_s -= 3600
    take_steps(directory, clock, 1, 5, step_s=1.0)
    run = run_json(experiment_dir)
    assert (run["status"], run["activity"], run["since_step_s"]) == ("running", None, 0.0)
    write_json(directory / "attempts/0002.json", {"status": "running", "started_s": clock.now_s})
    assert run_json(experiment_dir)["status"] == "starting"
