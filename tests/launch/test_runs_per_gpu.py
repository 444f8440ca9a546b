"""Several runs on a GPU: their places, their shares of its memory, MPS, and what is refused."""

import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from abrun.experiment.preflight.machine import Machine
from abrun.launch import mps
from abrun.launch.local import Slots, count_parallel_runs
from abrun.processes import find_descendants, find_processes_with, kill_all
from abrun.recipe.experiment import RUNS_PER_GPU
from abrun.recipe.implementations import LOCAL_LAUNCHERS
from abrun.recipe.run import ClusterConfig, RunConfig, can_change_numbers
from abrun.runs.rundir import RunDir
from tests.launch.fakes import FAKE, Silent, plan_of, run_to_end
from tests.launch.forked import SHARED_SERVER
from tests.snapshot import Snapshot

HERE = Path(__file__).parent
ON_GPU, SHARED = "cluster.gpus_per_node=1", "cluster={gpus_per_node: 1, runs_per_gpu: 4}"
STEP_TIME = "timing/train/total_step_time_s"


# --- places ---


def run_on(gpus: int, runs_per_gpu: int) -> RunConfig:
    return RunConfig(steps=1, cluster=ClusterConfig(gpus_per_node=gpus, runs_per_gpu=runs_per_gpu))


def machine_with(num_gpus: int) -> Machine:
    gpus = tuple(str(gpu) for gpu in range(num_gpus))
    return Machine(gpus=gpus, cores=8, packages={}, ask_hub=lambda _: None)


@pytest.mark.parametrize("seed", range(30))
def test_a_run_gets_the_emptiest_gpus(seed: int) -> None:
    draws = random.Random(seed)
    num_gpus, runs_per_gpu = draws.randint(1, 5), draws.randint(1, 4)
    count, num_jobs = draws.randint(1, num_gpus), draws.choice([None, 3, 100])
    slots, config = Slots(machine_with(num_gpus), num_jobs), run_on(count, runs_per_gpu)
    running: list[tuple[str, ...]] = []
    for _ in range(60):
        if running and draws.random() < 0.4:
            slots.release(running.pop(draws.randrange(len(running))))
            continue
        devices = slots.find_devices(config)
        loads = [sum(str(gpu) in run for run in running) for gpu in range(num_gpus)]
        has_room = sum(load < runs_per_gpu for load in loads) >= count and len(running) != num_jobs
        assert (devices is not None) == has_room
        if devices is None:
            continue
        assert len(set(devices)) == count
        assert sorted(loads[int(gpu)] for gpu in devices) == sorted(loads)[:count]
        slots.take(devices)
        running.append(devices)
        assert all(sum(str(gpu) in run for run in running) <= runs_per_gpu for gpu in range(num_gpus))


@pytest.mark.parametrize(("num_gpus", "count"), [(1, 1), (3, 1), (3, 2), (4, 3), (8, 8)])
@pytest.mark.parametrize("runs_per_gpu", [1, 2, 5])
@pytest.mark.parametrize("num_jobs", [None, 4])
def test_as_many_run_at_once_as_there_are_places(
    num_gpus: int, count: int, runs_per_gpu: int, num_jobs: int | None
) -> None:
    configs = itertools.repeat(run_on(count, runs_per_gpu))
    expected = min(num_gpus * runs_per_gpu // count, num_jobs or 1000)
    assert count_parallel_runs(machine_with(num_gpus), num_jobs, configs) == expected


# --- the recipe ---


def test_neighbours_change_nothing_that_is_compared() -> None:
    alone, shared = (plan_of(sets, "warm_start={steps: 2}") for sets in (ON_GPU, SHARED))
    assert alone.warm_starts.keys() == shared.warm_starts.keys()
    assert alone.treatment_diff == shared.treatment_diff
    assert not can_change_numbers(RUNS_PER_GPU)
    assert {run.config.cluster.runs_per_gpu for run in shared.runs} == {4}


# --- launches ---


@pytest.fixture
def on_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behave: Callable[..., None]
) -> Callable[..., None]:
    """One GPU, fake trainers, and the stand-in for CUDA's daemon, whose folders are in `tmp_path`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setitem(LOCAL_LAUNCHERS, *FAKE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    monkeypatch.setenv("PATH", f"{HERE}{os.pathsep}{os.environ['PATH']}")
    for variable in (mps.PIPE_VARIABLE, mps.LOG_VARIABLE, "OMP_NUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)

    behave()
    return behave


def test_runs_that_share_a_gpu_run_at_once_and_their_places_come_free(
    tmp_path: Path, on_gpu: Callable[..., None]
) -> None:
    on_gpu(step_s=0.3, baseline_0="fail")
    SHARED_SERVER.start_server()
    others = find_descendants(os.getpid())
    sets = ("cluster={gpus_per_node: 1, runs_per_gpu: 3}", "steps=4")
    observer = Silent()
    outcome = run_to_end(plan_of(*sets), tmp_path, launcher="fake", observer=observer)
    assert [*outcome.statuses.values()] == ["failed", "finished", "finished", "finished"]
    runs = {str(name): RunDir(tmp_path / "small" / str(name)) for name in outcome.statuses}
    launches = [run.launches()[0] for run in runs.values()]
    assert [(launch.devices, launch.runs_per_gpu, launch.mps) for launch in launches] == [
        (("4",), 3, True)
    ] * 4
    first_ends = min(launch.ended_s or 0.0 for launch in launches)
    assert all(launch.started_s < first_ends for launch in launches[:3])
    assert launches[3].started_s >= first_ends
    assert observer.said == [line for line in observer.said if "failure" in line]
    assert [*tmp_path.glob("abrun-mps-*")] == [] and find_descendants(os.getpid()) <= others
    # Resumed with other neighbours: what has finished stays, the record of the rest follows
    on_gpu()
    sets = ("cluster={gpus_per_node: 1, runs_per_gpu: 2}", "steps=4")
    assert run_to_end(plan_of(*sets), tmp_path, launcher="fake", resume=True).exit_code == 0
    numbers = {name: run.record().config["cluster"]["runs_per_gpu"] for name, run in runs.items()}
    assert numbers == {name: 2 if name == "baseline/seed-0" else 3 for name in runs}
    assert [launch.runs_per_gpu for launch in runs["baseline/seed-0"].launches()] == [3, 2]


@pytest.mark.parametrize("why", ["missing", "fails", "of the user", "several GPUs"])
def test_without_a_daemon_runs_share_by_time_slices(
    why: str,
    tmp_path: Path,
    on_gpu: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    snapshot: Snapshot,
) -> None:
    sets = [SHARED]
    if why == "missing":
        monkeypatch.setattr(mps.shutil, "which", lambda name: None)
    elif why == "fails":
        monkeypatch.setenv("FAKE_MPS_FAILS", "1")
    elif why == "of the user":
        monkeypatch.setenv(mps.PIPE_VARIABLE, str(tmp_path))
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
        sets = ["cluster={gpus_per_node: 2, runs_per_gpu: 4}"]
    observer = Silent()
    assert run_to_end(plan_of(*sets), tmp_path, launcher="fake", observer=observer).exit_code == 0
    run = RunDir(tmp_path / "small" / "baseline" / "seed-0")
    assert run.launches()[0].mps == (why == "of the user")
    snapshot("\n".join(observer.said))


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals")
@pytest.mark.parametrize("victim", ["launcher", "keeper"])
def test_a_daemon_outlives_its_launcher_until_the_runs_have_ended(
    victim: str, tmp_path: Path, on_gpu: Callable[..., None]
) -> None:
    """A run that saves a checkpoint after its launcher's death still needs the GPU."""
    code = (
        "import os, subprocess, sys, time\n"
        "from abrun.launch.mps import MpsService\n"
        "service = MpsService()\n"
        "run = subprocess.Popen(['sleep', '600'], env={**os.environ, **service.variables})\n"
        "print(run.pid, service._keeper.pid, service.variables['CUDA_MPS_PIPE_DIRECTORY'], flush=True)\n"
        "service._keeper.wait()\n"
        "assert not service.variables\n"
        "run.kill()\n"
        "service.close()\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    run_pid, keeper_pid, pipes = launcher.stdout.readline().split()
    try:
        users = find_processes_with(mps.PIPE_VARIABLE, pipes)
        assert len(users) >= 4, "the run, the keeper, the daemon and its server"
        os.kill(launcher.pid if victim == "launcher" else int(keeper_pid), signal.SIGKILL)
        if victim == "launcher":
            launcher.wait()
            time.sleep(1.5)
            assert find_processes_with(mps.PIPE_VARIABLE, pipes) == users
            os.kill(int(run_pid), signal.SIGKILL)
        else:
            assert launcher.wait(30) == 0
        deadline = time.monotonic() + 30
        while find_processes_with(mps.PIPE_VARIABLE, pipes) or Path(pipes).parent.exists():
            assert time.monotonic() < deadline, "something lives on"
            time.sleep(0.05)
    finally:
        launcher.kill()
        kill_all(lambda: find_processes_with(mps.PIPE_VARIABLE, pipes))


# --- memory ---
