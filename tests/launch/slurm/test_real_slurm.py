"""Faults under a real Slurm of two nodes on this machine: what status says, and when; what resumes; whether
the end is that of an undisturbed experiment. Prints a row for each fault."""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from abrun.errors import LaunchError
from abrun.launch.cluster import find_cluster_jobs
from abrun.watch import ExperimentReader
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
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CLUSTER = Path(__file__).with_name("cluster.sh")
COMMANDS = ("slurmctld", "slurmd", "sbatch", "ip", "nsenter")
MISSING = [command for command in COMMANDS if shutil.which(command) is None]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if MISSING:
        pytest.skip(f"no {', '.join(MISSING)}: apt-get install --no-install-recommends slurm-wlm iproute2")
    if os.geteuid():
        pytest.skip("network namespaces for the nodes need root")
    folder = tmp_path_factory.mktemp("slurm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("D", str(folder))
        patch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        patch.setenv("PYTHONPATH", str(ROOT))
        try:
            sh(CLUSTER, "up", D=str(folder / "killed"))  # whose end nobody waited for
            sh(CLUSTER, "up")
            yield folder
        finally:
            subprocess.run([CLUSTER, "down"], check=False)


def submit(runs_dir: Path, name: str, steps: int, *more: str) -> Path:
    launch(runs_dir, name, steps, "--launcher", "slurm", "--detach", "--set", "cluster.nodes=2", *more)
    return runs_dir / name


def job_of(experiment_dir: Path) -> str:
    return next(iter(json.loads((experiment_dir / "_slurm" / "jobs.json").read_text())["jobs"]))


@pytest.mark.parametrize("fault", ["rank killed", "power cut", "node set down", "preempted"])
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
        assert "rank 1 of 2 (on n2): killed by SIGKILL" in (baseline.launches()[0].message or "")
    elif fault == "power cut":
        sh(CLUSTER, "cut", "n2")
        noticed_s = seconds_until(lambda: state(experiment_dir).status != "running", within_s=20)
        seconds_until(lambda: state(experiment_dir).status == "waiting", within_s=90)
        sh(CLUSTER, "boot", "n2")
    elif fault == "node set down":
        sh("scontrol", "update", "NodeName=n2", "State=down", "Reason=test")
        noticed_s = seconds_until(lambda: state(experiment_dir).status == "waiting", within_s=60)
        with contextlib.suppress(AssertionError):  # it may have come back by itself
            sh("scontrol", "update", "NodeName=n2", "State=resume")
    else:
        sh("sbatch", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 5")
        noticed_s = seconds_until(lambda: state(experiment_dir).status == "waiting", within_s=60)
        reached = {arm: run(experiment_dir, arm).heartbeat().step for arm in ARMS}
    lost = check_resumed(fault, experiment_dir, undisturbed(40), reached, began, noticed_s)
    assert lost <= 5 + 3  # those since the last checkpoint, and some until the fault struck


def test_a_run_that_takes_longer_than_its_job_goes_on_in_the_next(
    cluster: Path, undisturbed: Callable[[int], Path], tmp_path: Path
) -> None:
    limits = ["--set", "launcher={type: slurm, time: '3', save_s: 40}"]
    experiment_dir = submit(tmp_path, "limited", 40, *limits)
    at_step(experiment_dir, 8)
    ranks = [pid for arm in ARMS for rank in (0, 1) for pid in ranks_of(run(experiment_dir, arm).path, rank)]
    assert len(ranks) == 4
    for pid in ranks:  # a step that takes until the limit
        os.kill(pid, signal.SIGSTOP)
    log = experiment_dir / "_slurm" / "pairs-0.log"
    seconds_until(lambda: "stopping 2 runs" in log.read_text(), within_s=200)
    began = time.monotonic()
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)
    noticed_s = seconds_until(lambda: state(experiment_dir).status == "waiting", within_s=40)
    reached = {arm: run(experiment_dir, arm).heartbeat().step for arm in ARMS}
    lost = check_resumed("time limit", experiment_dir, undisturbed(40), reached, began, noticed_s)
    assert lost == 0


def test_what_is_cancelled_stays_so_until_it_is_resumed(
    cluster: Path, undisturbed: Callable[[int], Path], tmp_path: Path
) -> None:
    experiment_dir = submit(tmp_path, "cancelled", 40)
    reached = at_step(experiment_dir, 7)
    sh("scancel", job_of(experiment_dir))
    noticed_s = seconds_until(lambda: state(experiment_dir).status == "interrupted", within_s=30)
    seconds_until(lambda: not find_cluster_jobs(experiment_dir).active_job_ids, within_s=60)  # pyright: ignore
    assert state(experiment_dir).status == "interrupted"
    resumed = time.monotonic()
    submit(tmp_path, "cancelled", 40, "--resume")
    seconds_until(lambda: is_past(experiment_dir, reached), within_s=400)
    resumed_s = time.monotonic() - resumed
    assert abrun("stop", str(experiment_dir)).startswith("cancelled: 2 jobs")
    seconds_until(lambda: not find_cluster_jobs(experiment_dir).active_job_ids, within_s=60)  # pyright: ignore
    for arm in ARMS:
        assert state(experiment_dir, arm).status == "interrupted"
        assert [event["event"] for event in run(experiment_dir, arm).events()][-1] == "interrupted"
    submit(tmp_path, "cancelled", 40, "--resume")
    check_end(experiment_dir, undisturbed(40))
    table_row("scancel", noticed_s, resumed_s, lost_steps(experiment_dir, reached))


def idle_nodes() -> int:
    return int(sh("sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D").strip() or 0)


def test_a_network_cut_in_mid_step_ends_both_sides(
    cluster: Path, undisturbed: Callable[[int], Path], tmp_path: Path
) -> None:
    experiment_dir = submit(tmp_path, "parted", 40, "--set", "limits.stalled_s=90")
    reached = at_step(experiment_dir, 12)
    began = time.monotonic()
    sh(CLUSTER, "unplug", "n2")
    try:
        noticed_s = seconds_until(lambda: state(experiment_dir).status != "running", within_s=90)
        said = state(experiment_dir).message
        gone = lambda: not any(ranks_of(run(experiment_dir, arm).path, 1) for arm in ARMS)  # noqa: E731
        ended_s = seconds_until(gone, within_s=150)  # what the other side cannot be told
        reached = {arm: run(experiment_dir, arm).heartbeat().step for arm in ARMS}
    finally:
        sh(CLUSTER, "plug", "n2")
    lost = check_resumed("network cut", experiment_dir, undisturbed(40), reached, began, noticed_s)
    print(f"status said: {said}; beyond the cut: ended {noticed_s + ended_s:.0f} s after it")
    assert lost <= 5 + 3


def test_a_head_that_restarts_costs_nothing(
    cluster: Path, undisturbed: Callable[[int], Path], tmp_path: Path
) -> None:
    experiment_dir = submit(tmp_path, "headless", 80)
    at_step(experiment_dir, 12)
    sh(CLUSTER, "behead")
    try:
        began = time.monotonic()
        assert "contact slurm controller" in abrun("stop", str(experiment_dir), code=2)
        refused_s, began = time.monotonic() - began, time.monotonic()
        assert abrun("status", str(experiment_dir)).count("running") >= 2
        answered_s = time.monotonic() - began
        reached = at_step(experiment_dir, run(experiment_dir).heartbeat().step + 2)
    finally:
        sh(CLUSTER, "head")
    began = time.monotonic()
    known = lambda: find_cluster_jobs(experiment_dir).active_job_ids  # noqa: E731  # pyright: ignore
    with contextlib.suppress(LaunchError):
        seconds_until(known, within_s=60)
    resumed_s = time.monotonic() - began
    check_end(experiment_dir, undisturbed(80))
    assert [run(experiment_dir, arm).last_attempt for arm in ARMS] == [1, 1]
    table_row("head restarted", refused_s, resumed_s, lost_steps(experiment_dir, reached))
    print(f"without a head: cancel refused after {refused_s:.0f} s, status answered after {answered_s:.0f} s")


def test_a_full_disk_fails_the_runs_and_resumes_once_there_is_room(
    cluster: Path, undisturbed: Callable[[int], Path], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    sh("mount", "-t", "tmpfs", "-o", "size=64m", "none", str(disk))
    try:
        for node in ("n1", "n2"):  # so that they see it
            sh(CLUSTER, "cut", node)
            sh(CLUSTER, "boot", node)
        seconds_until(lambda: idle_nodes() == 2, within_s=60)
        experiment_dir = submit(disk, "full", 40)
        reached = at_step(experiment_dir, 12)
        began = time.monotonic()
        with contextlib.suppress(OSError), (disk / "hog").open("wb", buffering=0) as hog:
            while True:
                hog.write(bytes(4096))
        noticed_s = seconds_until(lambda: state(experiment_dir).status == "failed", within_s=90)
        said = state(experiment_dir).message
        seconds_until(lambda: not find_cluster_jobs(experiment_dir).active_job_ids, within_s=60)  # pyright: ignore
        (disk / "hog").unlink()
        resumed = time.monotonic()
        submit(disk, "full", 40, "--resume")
        seconds_until(lambda: is_past(experiment_dir, reached), within_s=400)
        resumed_s = time.monotonic() - resumed
        check_end(experiment_dir, undisturbed(40))
        table_row("disk full, then --resume", noticed_s, resumed_s, lost_steps(experiment_dir, reached))
        print(f"status said: {said}; after {time.monotonic() - began:.0f} s: over")
    finally:
        for node in ("n1", "n2"):
            sh(CLUSTER, "cut", node)
        sh("umount", "-l", str(disk))
        for node in ("n1", "n2"):
            sh(CLUSTER, "boot", node)
        seconds_until(lambda: idle_nodes() == 2, within_s=60)


def test_a_run_directory_removed_in_mid_run_is_made_anew_and_nothing_else_is_lost(
    cluster: Path, undisturbed: Callable[[int], Path], tmp_path: Path
) -> None:
    experiment_dir = submit(tmp_path, "removed", 40)
    reached = at_step(experiment_dir, 12)
    shutil.rmtree(run(experiment_dir).path)
    noticed_s = seconds_until(lambda: state(experiment_dir).status == "failed", within_s=60)
    said = state(experiment_dir).message
    seconds_until(lambda: not find_cluster_jobs(experiment_dir).active_job_ids, within_s=300)  # pyright: ignore
    assert state(experiment_dir, "treatment").status == "finished"
    assert run(experiment_dir, "treatment").last_attempt == 1
    resumed = time.monotonic()
    submit(tmp_path, "removed", 40, "--resume")
    seconds_until(lambda: run(experiment_dir).heartbeat().step > reached["baseline"], within_s=400)
    resumed_s = time.monotonic() - resumed
    (experiment_dir / "report" / "verdict.json").unlink(missing_ok=True)
    check_end(experiment_dir, undisturbed(40))
    table_row("run directory removed, then --resume", noticed_s, resumed_s, reached["baseline"])
    print(f"status said: {said}")


def test_an_experiment_removed_in_mid_run_ends_its_jobs_and_does_not_come_back(
    cluster: Path, tmp_path: Path
) -> None:
    experiment_dir = submit(tmp_path, "gone", 40)
    at_step(experiment_dir, 7)
    job = job_of(experiment_dir)
    shutil.rmtree(experiment_dir)
    ended = lambda: job not in sh("squeue", "-h", "-t", "R,CG,PD", "-o", "%F")  # noqa: E731
    noticed_s = seconds_until(ended, within_s=90)
    print(f"\n| experiment removed | {noticed_s:.0f} s |")
    assert not [path for path in experiment_dir.rglob("*") if path.is_file()]


def test_a_rank_that_hangs_in_mid_step_is_named(
    cluster: Path, undisturbed: Callable[[int], Path], tmp_path: Path
) -> None:
    experiment_dir = submit(tmp_path, "hanging", 40)
    reached = at_step(experiment_dir, 12)
    (pid,) = ranks_of(run(experiment_dir).path, 1)
    os.kill(pid, signal.SIGSTOP)
    try:
        noticed_s = seconds_until(lambda: state(experiment_dir).status == "stalled", within_s=90)
        said = state(experiment_dir).message or ""
        assert "stalled" in abrun("status", str(experiment_dir))
        assert re.match(r".* for \d+ s: rank 1 \(on n2\) in a process .*signal", said)
        assert re.search(r"; rank 0 \(on n1\) in \w+ \(.*torch/.*\) during \w+$", said)
        assert state(experiment_dir, "treatment").status in ("running", "finished")
    finally:
        os.kill(pid, signal.SIGCONT)
    resumed_s = seconds_until(lambda: state(experiment_dir).status == "running", within_s=30)
    check_end(experiment_dir, undisturbed(40))
    table_row("rank that hangs", noticed_s, resumed_s, lost_steps(experiment_dir, reached))
    print(f"status said: {said}")


def test_nodes_that_do_not_share_the_runs_are_found_before_training(cluster: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    sh(CLUSTER, "cut", "n2")
    sh(CLUSTER, "boot", "n2", HIDE=str(tmp_path / "scratch"))
    try:
        experiment_dir = submit(tmp_path / "scratch", "apart", 2)
        seconds_until(lambda: state(experiment_dir).status == "failed", within_s=60)
        said = state(experiment_dir).message or ""
        assert f"{experiment_dir}/baseline/seed-0: exists on n1, but not on n2" in said
        assert run(experiment_dir).last_attempt == 0
    finally:
        sh(CLUSTER, "cut", "n2")
        sh(CLUSTER, "boot", "n2")


MANY = """
name: many
steps: 3
trainer:
  type: command
  argv: [sh, -c, 'sleep {x}; printf "step,train/reward\\\\n1,0.5\\\\n2,0.6\\\\n3,0.7\\\\n" > {run_dir}/m.csv']
  parameters: {x: 1}
  metrics: {format: csv, path: '{run_dir}/m.csv'}
arms: {baseline: {}, treatment: {trainer.parameters.x: 2}}
seeds: SEEDS
"""


def test_two_hundred_runs_at_once_leave_it_responsive(cluster: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "many.yaml"
    recipe.write_text(MANY.replace("SEEDS", str(list(range(100)))))
    where = ["--runs-dir", str(tmp_path)]

    def seconds(*argv: str) -> float:
        began = time.monotonic()
        abrun(*argv, *where)
        return time.monotonic() - began

    submitted_s = seconds("launch", str(recipe), "--launcher", "slurm", "--detach", "--jobs", "2")
    queued_s = seconds("status", "many")
    finished = lambda: len(list(tmp_path.glob("many/*/*/result.json")))  # noqa: E731
    seconds_until(lambda: finished() >= 4, within_s=200)
    working_s = seconds("status", "many")
    reader = ExperimentReader(tmp_path / "many", find_cluster_jobs)
    reader.read()
    began = time.monotonic()
    statuses = Counter(run.state.status for run in reader.read())
    tick_s = time.monotonic() - began
    cancelled_s = seconds("stop", "many")
    ended_s = seconds_until(lambda: not find_cluster_jobs(tmp_path / "many").active_job_ids, within_s=60)  # pyright: ignore
    print(
        f"\n200 runs: submitted in {submitted_s:.1f} s; status {queued_s:.1f} s, "
        f"{working_s:.1f} s at work ({dict(statuses)}); a tick of watch {1000 * tick_s:.0f} ms; "
        f"cancelled in {cancelled_s:.1f} s, the queue empty {ended_s:.0f} s later"
    )
    assert statuses["waiting"] > 100 and sum(statuses.values()) == 200
    assert max(submitted_s, queued_s, working_s, cancelled_s) < 20 and tick_s < 1


RANKS = """
import json, os, sys, time
import torch, torch.distributed as dist

steps, out, rate = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
dist.init_process_group("gloo")
torch.manual_seed(int(os.environ["ABRUN_SEED"]))
weights = torch.zeros(4, requires_grad=True)
for step in range(1, steps + 1):
    inputs = torch.randn(8, 4)
    loss = (inputs @ weights - inputs.sum(1)).square().mean()
    (gradient,) = torch.autograd.grad(loss, weights)
    dist.all_reduce(gradient)
    weights = (weights - rate * gradient / dist.get_world_size()).detach().requires_grad_()
    if dist.get_rank() == 0:
        row = {"step": step, "train/loss": loss.item(), "world": dist.get_world_size()}
        with open(out, "a") as file:
            file.write(json.dumps(row) + "\\n")
    time.sleep(0.3)
"""
GANG = """
name: gang
steps: 12
trainer:
  type: command
  start: every_node
  argv: ["{python}", -m, torch.distributed.run, "--nnodes={num_nodes}", "--node_rank={node_rank}",
         "--master_addr={head_address}", "--master_port={port}", "--nproc_per_node=1",
         "{recipe_dir}/ranks.py", "{steps}", "{run_dir}/m.jsonl", "{rate}"]
  env: {GLOO_SOCKET_IFNAME: eth0, USE_LIBUV: "0"}
  parameters: {rate: 0.02}
  metrics: {format: jsonl, path: "{run_dir}/m.jsonl"}
cluster: {nodes: 2}
arms: {baseline: {}, treatment: {trainer.parameters.rate: 0.0201}}
seeds: [0, 1]
compare: {claims: [{metric: train/loss, window: last 50%, margin: 0.5, climbs: false}]}
"""
STEPS = """
name: gang
steps: 2
trainer:
  type: command
  argv: [bash, -c, 'srun hostname > {run_dir}/hosts; srun --nodes={num_nodes} --ntasks={num_nodes} sleep {s};
         printf "step,train/reward\\n1,0.5\\n2,0.6\\n" > {run_dir}/m.csv']
  parameters: {s: 0}
  metrics: {format: csv, path: '{run_dir}/m.csv'}
cluster: {nodes: 2}
limits: {stalled_s: 60}
arms: {baseline: {}, treatment: {trainer.parameters.s: 1}}
seeds: [0]
compare: {claims: []}
"""


def submit_command(folder: Path, text: str, *settings: str) -> Path:
    """Launch a command on both nodes."""
    (folder / "gang.yaml").write_text(text)
    (folder / "ranks.py").write_text(RANKS)
    words = [word for setting in settings for word in ("--set", setting)]
    jobs = ("--jobs=1",) if text == DRIVER else ()  # four clusters at once would take minutes to start
    where = (f"--runs-dir={folder}", "--launcher=slurm", "--detach", *jobs)
    abrun("launch", str(folder / "gang.yaml"), *where, *words)
    return folder / "gang"


needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="no ray: pip install -e '.[test,ray]'"
)
COMMANDS_OF_NODES = [GANG, pytest.param(DRIVER, marks=needs_ray)]


@pytest.mark.parametrize("recipe", COMMANDS_OF_NODES, ids=["torchrun", "ray"])
def test_another_trainer_on_two_nodes_gets_a_verdict_and_leaves_nothing(
    recipe: str, cluster: Path, tmp_path: Path
) -> None:
    experiment_dir = submit_command(tmp_path, recipe, "steps=40")
    at_step(experiment_dir, 4)
    raylets = marked(experiment_dir / "baseline", b"raylet/raylet")
    pids = [pid for pid in raylets if b"ABRUN_NODE_RANK=1" in Path(f"/proc/{pid}/environ").read_bytes()]
    for pid in pids or ranks_of(run(experiment_dir).path, 1):
        os.kill(pid, signal.SIGKILL)
    seconds_until(lambda: run(experiment_dir).launches()[0].status == "failed", within_s=30)
    assert (run(experiment_dir).launches()[0].message or "").startswith("node 1 (n2): exit code 1")
    seconds_until(lambda: is_over(experiment_dir), within_s=200)
    assert json.loads((experiment_dir / "report" / "verdict.json").read_text())["verdict"] == "MATCH"
    assert run(experiment_dir).environment()["hosts"] == ["n1", "n2"]  # pyright: ignore
    assert {row["world"] for row in run(experiment_dir).metrics_reader().read()} == {2}
    assert marked(experiment_dir) == []


@pytest.mark.parametrize("recipe", COMMANDS_OF_NODES, ids=["torchrun", "ray"])
@pytest.mark.parametrize("fault", ["stop", "kill"])
def test_another_trainer_on_two_nodes_leaves_nothing_when_it_is_ended(
    fault: str, recipe: str, cluster: Path, tmp_path: Path
) -> None:
    experiment_dir = submit_command(tmp_path, recipe, "steps=400", "seeds=[0]", "compare.claims=[]")
    at_step(experiment_dir, 4)
    if fault == "stop":
        abrun("stop", str(experiment_dir))
    else:  # of the launcher in each job
        for pid in sh("pgrep", "-f", f"slurm.allocation {experiment_dir}").split():
            os.kill(int(pid), signal.SIGKILL)
    seconds_until(lambda: is_over(experiment_dir) and not marked(experiment_dir), within_s=60)


def test_a_command_that_calls_srun_gets_all_nodes(cluster: Path, tmp_path: Path) -> None:
    experiment_dir = submit_command(tmp_path, STEPS)
    seconds_until(lambda: is_over(experiment_dir), within_s=100)
    for arm in ARMS:
        assert state(experiment_dir, arm).status == "finished"
        assert sorted((run(experiment_dir, arm).path / "hosts").read_text().split()) == ["n1", "n2"]
