"""A run that is stopped and started again gives the metrics of one that never stopped, bit for bit."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from abrun.errors import RecipeError
from abrun.runs.rundir import RunDir
from abrun.runs.writer import begin_attempt
from tests.snapshot import Snapshot
from tests.trainer.loop.runs import Trainer, last_step, run_to_end, train_here
from tests.written_runs import events, make_run, metric_values, run_config


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, warm_weights: Path) -> Path:
    """A run that was never stopped."""
    directory = make_run(tmp_path_factory.mktemp("whole"), run_config(), initial_weights=warm_weights)
    run_to_end(directory)
    assert last_step(directory) == 12
    values = RunDir(directory).metrics()
    assert values["train/grad_norm"].values.min() > 0 and len(set(values["train/reward"].values.tolist())) > 5
    return directory


def without_memory(directory: Path) -> dict[str, list[str]]:
    return {key: value for key, value in metric_values(directory).items() if not key.startswith("memory/")}


def kill_during_step(directory: Path, step: int, delay_s: float) -> None:
    trainer = Trainer(directory)
    trainer.wait_for_step(step - 1)
    time.sleep(delay_s)
    trainer.send(signal.SIGKILL)
    assert trainer.wait() == -signal.SIGKILL


def test_killed_twice_gives_the_same_metrics(tmp_path: Path, warm_weights: Path, whole: Path) -> None:
    directory = make_run(tmp_path / "killed", run_config(), initial_weights=warm_weights)
    draw = random.Random()
    moments = [(draw.randint(2, 5), draw.uniform(0, 0.1)), (draw.randint(7, 11), draw.uniform(0, 0.1))]
    for step, delay_s in moments:
        kill_during_step(directory, step, delay_s)
    run_to_end(directory)
    assert metric_values(directory) == metric_values(whole), f"killed at {moments}"
    assert events(directory).count("resumed") >= 1 and events(directory)[-1] == "finished"


def test_a_run_does_not_go_on_with_other_prompts(tmp_path: Path, group: None, snapshot: Snapshot) -> None:
    """The other arm has those that both began with."""
    path = tmp_path / "problems.jsonl"

    def write(first: int) -> None:
        rows = ({"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(first, first + 4))
        path.write_text("\n".join(map(json.dumps, rows)))

    write(0)
    config = run_config(f"task={{type: jsonl, path: {path}}}", "steps=2", "checkpoint.every=1")
    directory = make_run(tmp_path / "run", config)
    train_here(directory)
    write(1)
    with pytest.raises(RecipeError) as refusal:
        train_here(directory)
    snapshot(refusal.value)
    write(0)
    train_here(directory)


@pytest.mark.slow
def test_killed_before_the_first_checkpoint_starts_again(
    tmp_path: Path, warm_weights: Path, whole: Path
) -> None:
    directory = make_run(tmp_path / "killed", run_config(), initial_weights=warm_weights)
    kill_during_step(directory, 2, 0.0)
    run_to_end(directory)
    assert metric_values(directory) == metric_values(whole)


@pytest.mark.slow
def test_killed_at_ten_random_moments_gives_the_same_metrics(tmp_path: Path, warm_weights: Path) -> None:
    config = run_config("steps=40", "algorithm.kl_coefficient=0.05", "algorithm.entropy_coefficient=0.01")
    undisturbed = make_run(tmp_path / "whole", config, initial_weights=warm_weights)
    start = time.monotonic()
    run_to_end(undisturbed)
    duration_s = time.monotonic() - start
    directory = make_run(tmp_path / "killed", config, initial_weights=warm_weights)
    draw, moments = random.Random(), []
    for _ in range(10):
        trainer = Trainer(directory)
        moments.append(draw.uniform(0.2, 0.35 * duration_s))  # long enough to get past a checkpoint at times
        trainer.processes[0].join(moments[-1])
        if trainer.running:
            trainer.send(signal.SIGKILL)
        assert trainer.wait() in (0, -signal.SIGKILL), trainer.stderr
    run_to_end(directory)
    assert metric_values(directory) == metric_values(undisturbed), f"killed after {moments} s"


def test_sigterm_leaves_a_checkpoint_and_resumes(tmp_path: Path, warm_weights: Path, whole: Path) -> None:
    directory = make_run(tmp_path / "stopped", run_config(), initial_weights=warm_weights)
    trainer = Trainer(directory)
    trainer.wait_for_step(4)
    trainer.send(signal.SIGTERM)
    assert trainer.wait() == 3
    stopped_at = last_step(directory)
    assert 4 <= stopped_at < 12
    assert (directory / "checkpoints" / f"step-{stopped_at:06d}" / "state.json").exists()
    assert events(directory)[-2:] == ["checkpoint", "interrupted"]
    assert trainer.stderr.count("\n") == 1 and "--resume" in trainer.stderr
    assert not (directory / "result.json").exists()
    run_to_end(directory)
    resumed = [row for row in RunDir(directory).events() if row["event"] == "resumed"]
    assert [row["step"] for row in resumed] == [stopped_at]
    assert metric_values(directory) == metric_values(whole)


def test_sigusr1_leaves_a_checkpoint_and_goes_on(tmp_path: Path, warm_weights: Path, whole: Path) -> None:
    config = run_config("checkpoint.every=100")
    directory = make_run(tmp_path / "asked", config, initial_weights=warm_weights)
    trainer = Trainer(directory)
    trainer.wait_for_step(3)
    trainer.send(signal.SIGUSR1)
    assert trainer.wait() == 0, trainer.stderr
    saved = [path.name for path in (directory / "checkpoints").iterdir()]
    assert len(saved) == 1 and events(directory) == ["started", "checkpoint", "finished"]
    assert metric_values(directory) == metric_values(whole)


def test_a_superseded_attempt_stops_and_writes_nothing_more(
    tmp_path: Path, warm_weights: Path, snapshot: Snapshot
) -> None:
    directory = make_run(tmp_path / "run", run_config("steps=500"), initial_weights=warm_weights)
    trainer = Trainer(directory)
    trainer.wait_for_step(2)
    begin_attempt(RunDir(directory))
    before = {
        name: (directory / name).read_bytes() for name in ("metrics.jsonl", "events.jsonl", "heartbeat.json")
    }
    assert trainer.wait() == 2
    snapshot(trainer.stderr)
    assert trainer.stderr.count("\n") == 1
    for name, content in before.items():
        # One write may have been past the fence already when the attempt was replaced.
        added = (directory / name).read_bytes().removeprefix(content)
        assert name == "heartbeat.json" or added.count(b"\n") <= 1, added
    assert "failed" not in events(directory)
    assert not (directory / "result.json").exists()


@pytest.mark.slow
def test_two_ranks_under_torchrun_stop_on_sigterm_and_resume(tmp_path: Path, warm_weights: Path) -> None:
    config = run_config("steps=9", "cluster.cpu_ranks=2", "algorithm.kl_coefficient=0.05")
    undisturbed = make_run(tmp_path / "whole", config, initial_weights=warm_weights)
    run_to_end(undisturbed, ranks=2)
    directory = make_run(tmp_path / "stopped", config, initial_weights=warm_weights)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with (directory / "torchrun.log").open("ab") as log:
        agent = subprocess.Popen([*command, "-m", "abrun.trainer", str(directory)], stdout=log, stderr=log)
    while last_step(directory) < 2 and agent.poll() is None:
        time.sleep(0.01)
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(timeout=120) != 0
    assert events(directory)[-1] == "interrupted"
    state = max((directory / "checkpoints").iterdir()) / "state.json"
    said = json.loads(state.read_text())
    assert (said["step"], said["num_ranks"], len(said["files"])) == (last_step(directory), 2, 2)
    run_to_end(directory, ranks=2)
    # Not the memory of the first step: until its first backward, FSDP holds no reduce-scatter buffer.
    assert without_memory(directory) == without_memory(undisturbed)


def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path: Path, warm_weights: Path) -> None:
    config = run_config("steps=500", "cluster.cpu_ranks=2")
    directory = make_run(tmp_path / "stopped", config, initial_weights=warm_weights)
    trainer = Trainer(directory, ranks=2)
    trainer.wait_for_step(1)  # rank 1 waits for rank 0 to write this: the signal arrives inside a collective
    os.kill(trainer.processes[1].pid, signal.SIGTERM)
    assert trainer.wait() == 3
    assert [process.exitcode for process in trainer.processes] == [3, 3]
    assert events(directory)[-2:] == ["checkpoint", "interrupted"]
