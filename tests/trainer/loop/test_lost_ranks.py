"""Eight ranks under their agent: one killed, one stopped in mid-step; named, and resumed to the bit."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from abrun.experiment.command import ranks_command, run_environment
from abrun.messages.codes import Code, Reason
from abrun.processes import find_run_processes
from abrun.recipe.run import OwnRunConfig
from abrun.runs.failures import GRACE_S
from abrun.runs.launches import read_endings
from abrun.runs.rundir import RunDir
from tests.trainer.loop.runs import last_step
from tests.written_runs import events, make_run, metric_values, run_config

RANKS, STALLED_S = 8, 60.0
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc and parent-death signals")


def config_of_eight() -> OwnRunConfig:
    return run_config(
        f"cluster.cpu_ranks={RANKS}",
        f"algorithm.prompts_per_step={RANKS}",
        "rollout.max_new_tokens=8",
        "steps=8",
        "checkpoint={every: 2, keep: 2}",
        f"limits.stalled_s={STALLED_S}",
        "validation=null",
    )


def start(directory: Path, config: OwnRunConfig) -> "subprocess.Popen[str]":
    command, environment = ranks_command(directory, config, RANKS), run_environment(directory, [], config)
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def signal_rank(agent: "subprocess.Popen[str]", directory: Path, step: int, rank: int, number: int) -> float:
    """Send a signal to one rank after a step, and return the time."""
    deadline = time.monotonic() + 300
    while last_step(directory) < step:
        assert agent.poll() is None and time.monotonic() < deadline, "no such step"
        time.sleep(0.01)
    ranks = {process.environ().get("RANK"): process for process in psutil.Process(agent.pid).children()}
    os.kill(ranks[str(rank)].pid, number)
    return time.monotonic()


def ending_of(agent: "subprocess.Popen[str]", directory: Path, attempt: int) -> Reason:
    agent.communicate(timeout=120)
    assert not find_run_processes(directory)
    (ending,) = read_endings(RunDir(directory), attempt, "")
    return ending


def values(directory: Path) -> dict[str, list[str]]:
    return {key: rows for key, rows in metric_values(directory).items() if not key.startswith("memory/")}


@pytest.mark.slow
def test_a_lost_rank_of_eight_is_named_and_the_run_resumes_to_the_bit(tmp_path: Path) -> None:
    config = config_of_eight()
    whole, lost = (make_run(tmp_path / name, config) for name in ("whole", "lost"))
    agent = start(lost, config)
    sent_s = signal_rank(agent, lost, 3, 5, signal.SIGKILL)
    killed = Code.KILLED(signal="SIGKILL")
    expected = Code.RANK_FAILED(rank=5, num_ranks=RANKS, host=None, cause=killed)
    assert ending_of(agent, lost, 0) == expected
    assert time.monotonic() - sent_s < GRACE_S  # the others had it to end by themselves
    agent = start(lost, config)
    sent_s = signal_rank(agent, lost, 5, 6, signal.SIGSTOP)
    silence = ending_of(agent, lost, 1)["silence"]
    assert STALLED_S < time.monotonic() - sent_s < STALLED_S + GRACE_S
    # The first is the one that waits for no other; the other seven are in a collective
    assert silence.code == Code.RANKS_SILENT and silence["ranks"][0]["rank"] == 6
    assert silence["num_unstarted"] == 0 and len(silence["ranks"]) + silence["num_more"] == RANKS
    for directory in (lost, whole):
        agent = start(directory, config)
        assert agent.communicate(timeout=300) and agent.returncode == 0
    assert values(lost) == values(whole)
    assert events(lost).count("resumed") == 2
