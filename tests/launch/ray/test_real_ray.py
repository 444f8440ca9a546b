"""Faults under a real Ray of a head and two nodes on this machine: what status says, and when; what resumes;
whether the end is that of an undisturbed experiment. Prints a row for each fault."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from abrun.launch.cluster import find_cluster_jobs
from tests.launch.disturbed import (
    ARMS,
    DRIVER,
    ROOT,
    abrun,
    at_step,
    check_end,
    check_resumed,
    is_over,
    is_past,
    launch,
    lost_steps,
    marked,
    ranks_of,
    run,
    seconds_until,
    sh,
    state,
    table_row,
    verdict,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CLUSTER = Path(__file__).with_name("cluster.sh")
URL = "http://10.78.0.10:8265"
RAY = Path(sys.executable).with_name("ray")
MISSING = [command for command in ("ip", "nsenter", "curl") if shutil.which(command) is None]
SETTINGS = ("--set", "launcher={type: ray, save_s: 40}", "--set", "cluster.nodes=2")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Path]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("no ray: pip install -e '.[test,ray]'")
    if MISSING:
        pytest.skip(f"no {', '.join(MISSING)}: apt-get install --no-install-recommends iproute2 curl")
    if os.geteuid():
        pytest.skip("network namespaces for the nodes need root")
    folder = Path(tempfile.mkdtemp(prefix="abray-"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "D": folder,
            "RAY": RAY,
            "RAY_ADDRESS": URL,
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "XDG_CONFIG_HOME": folder / "config",
            "PYTHONPATH": ROOT,
        }.items():
            patch.setenv(name, str(value))
        try:
            sh(CLUSTER, "up")
            yield folder
        finally:
            subprocess.run([CLUSTER, "down"], check=False)
            shutil.rmtree(folder, ignore_errors=True)


def submit(runs_dir: Path, name: str, steps: int, *more: str) -> Path:
    launch(runs_dir, name, steps, "--detach", *SETTINGS, *more)
    return runs_dir / name


def says(experiment_dir: Path, status: str, words: str = "") -> bool:
    found = state(experiment_dir)
    return found.status == status and words in (found.message or "")


@pytest.mark.parametrize("fault", ["rank killed", "node killed", "node unplugged"])
def test_what_is_lost_comes_back_by_itself(
    fault: str, cluster: Path, undisturbed: Callable[[int], Path], tmp_path: Path
) -> None:
    experiment_dir = submit(tmp_path, "disturbed", 40)
    baseline = run(experiment_dir)
    reached = at_step(experiment_dir, 12)
    began = time.monotonic()
    if fault == "rank killed":
        (pid,) = ranks_of(baseline.path, 1)
        os.kill(pid, signal.SIGKILL)
        noticed_s = seconds_until(lambda: baseline.launches()[0].status == "failed", within_s=20)
        assert "rank 1 of 2 (on n" in (baseline.launches()[0].message or "")
        assert "killed by SIGKILL" in (baseline.launches()[0].message or "")
    else:
        sh(CLUSTER, "cut" if fault == "node killed" else "unplug", "n2")
        noticed_s = seconds_until(lambda: says(experiment_dir, "waiting", "for 2 nodes"), within_s=120)
        assert " is lost: " in (baseline.launches()[0].message or "")
        sh(CLUSTER, "boot" if fault == "node killed" else "plug", "n2")
    lost = check_resumed(fault, experiment_dir, undisturbed(40), reached, began, noticed_s)
    assert lost <= 5 + 3  # those since the last checkpoint, and some until the fault struck


def test_a_gang_waits_until_there_is_a_node_for_it(
    cluster: Path, undisturbed: Callable[[int], Path], tmp_path: Path
) -> None:
    sh(CLUSTER, "cut", "n2")
    experiment_dir = submit(tmp_path, "gang", 2)
    began = time.monotonic()
    why = "for 2 nodes with 2 CPU each; the cluster has 1 of that size"
    noticed_s = seconds_until(lambda: says(experiment_dir, "waiting", why), within_s=90)
    assert "waiting" in abrun("status", str(experiment_dir))
    assert run(experiment_dir).last_attempt == 0
    sh(CLUSTER, "boot", "n2")
    at_step(experiment_dir, 1)
    table_row("gang without room", noticed_s, time.monotonic() - began, 0)
    said = abrun("logs", str(run(experiment_dir).path), "--follow")
    assert said.rstrip().endswith("finished: step 2")
    check_end(experiment_dir, undisturbed(2))


def test_what_is_cancelled_stays_so_until_it_is_resumed(
    cluster: Path, undisturbed: Callable[[int], Path], tmp_path: Path
) -> None:
    experiment_dir = submit(tmp_path, "cancelled", 40)
    at_step(experiment_dir, 7)
    began = time.monotonic()
    assert abrun("stop", str(experiment_dir)).startswith("cancelled: 1 job (cancelled-")
    noticed_s = seconds_until(
        lambda: all(state(experiment_dir, arm).status == "interrupted" for arm in ARMS), within_s=60
    )
    seconds_until(lambda: not find_cluster_jobs(experiment_dir).active_job_ids, within_s=60)  # pyright: ignore
    reached = {arm: run(experiment_dir, arm).heartbeat().step for arm in ARMS}
    for arm in ARMS:
        assert state(experiment_dir, arm).status == "interrupted"
        assert [event["event"] for event in run(experiment_dir, arm).events()][-1] == "interrupted"
    submit(tmp_path, "cancelled", 40, "--resume")
    seconds_until(lambda: is_past(experiment_dir, reached), within_s=400)
    resumed_s = time.monotonic() - began
    check_end(experiment_dir, undisturbed(40))
    lost = lost_steps(experiment_dir, reached)
    table_row("abrun stop, then --resume", noticed_s, resumed_s, lost)
    assert lost == 0
    assert (experiment_dir / "_ray" / "job.json").read_text().count("-a2") == 1


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_driver_of_ray_trains_on_a_cluster_of_its_own_which_ends_with_it(
    is_stopped: bool, cluster: Path, tmp_path: Path
) -> None:
    (tmp_path / "gang.yaml").write_text(DRIVER)
    steps = ("--set", "steps=60") if is_stopped else ()
    # Two clusters at once would take minutes to start
    where = ("--runs-dir", str(tmp_path), "--launcher", "ray", "--detach", "--exit-zero", "--jobs", "1")
    abrun("launch", str(tmp_path / "gang.yaml"), *where, *steps)
    experiment_dir = tmp_path / "gang"
    at_step(experiment_dir, 4)
    if is_stopped:
        abrun("stop", str(experiment_dir))
    seconds_until(lambda: is_over(experiment_dir), within_s=400)
    assert marked(experiment_dir) == []
    if not is_stopped:
        assert verdict(experiment_dir)["verdict"] == "MATCH"
        assert {row["world"] for row in run(experiment_dir).metrics_reader().read()} == {2}


def test_nodes_that_do_not_share_the_runs_are_found_before_training(cluster: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    sh(CLUSTER, "cut", "n2")
    sh(CLUSTER, "boot", "n2", HIDE=str(tmp_path / "scratch"))
    try:
        experiment_dir = submit(tmp_path / "scratch", "apart", 2)
        seconds_until(lambda: state(experiment_dir).status == "failed", within_s=120)
        said = state(experiment_dir).message or ""
        why = f"{experiment_dir}/baseline/seed-0: exists on "
        assert why in said and ", but not on n2" in said
        assert run(experiment_dir).last_attempt == 0
    finally:
        sh(CLUSTER, "cut", "n2")
        sh(CLUSTER, "boot", "n2")
