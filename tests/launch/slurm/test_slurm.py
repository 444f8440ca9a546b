"""Slurm without one: what is rendered, submitted, refused and cancelled, against a fake of its commands."""

import functools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from abrun.errors import LaunchError, RecipeError
from abrun.experiment.command import Rendezvous
from abrun.experiment.plan import ExperimentPlan, make_plan
from abrun.launch import node, prepare
from abrun.launch.cluster import cancel_experiment, find_cluster_jobs, make_cluster
from abrun.launch.slurm import allocation, launcher
from abrun.recipe.experiment import load_recipe
from abrun.recipe.implementations import LOCAL_LAUNCHERS
from abrun.recipe.launcher import parse_time_limit, resolve_launcher_settings
from abrun.runs.experiment import read_run_state
from abrun.runs.launches import begin_launch
from abrun.runs.layout import RunName
from abrun.runs.lock import launcher_lock
from abrun.runs.rundir import RunDir
from abrun.runs.writer import begin_attempt
from tests.launch import fakes
from tests.launch.fakes import FAKE, SMALL, plan_of, seen
from tests.snapshot import Snapshot

ROOT = Path(__file__).parents[3]
FAKE_SLURM = Path(__file__).with_name("fake_slurm.sh")
GOLDEN = Path(__file__).with_name("golden")
WHOLE = (
    "launcher={type: slurm, account: rl, partition: low, qos: normal, constraint: 'h200&ib', "
    "time: '4:00:00', save_s: 300, cpus_per_rank: 2, "
    "setup: [module load cuda], sbatch: {exclusive: true, mem: 64G}}"
)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the fake."""
    folder = tmp_path / "slurm"
    (folder / "bin").mkdir(parents=True)
    for command in ("sbatch", "squeue", "scancel", "scontrol", "srun"):
        (folder / "bin" / command).symlink_to(FAKE_SLURM)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(folder))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return folder


submit = functools.partial(fakes.submit, launcher="slurm")


def queue(slurm: Path) -> list[str]:
    return (slurm / "queue").read_text().splitlines() if (slurm / "queue").exists() else []


def waiting(slurm: Path) -> list[str]:
    return [line for line in queue(slurm) if "|PENDING|" in line]


# --- scripts ---


@pytest.mark.parametrize("name", ["pairs", "runs", "warm-start-0", "compare"])
def test_the_scripts_are_these(
    name: str, slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    plan = plan_of(WHOLE, "cluster.nodes=2", "warm_start={steps: 2}", "controls.aa_reruns=1")
    cluster = make_cluster(resolve_launcher_settings(plan.recipe.launcher, None), Path("/runs/small"), None)
    assert cluster is not None and cluster.find_problems(plan) == []
    texts = cluster.render_scripts(plan, compare=True)
    assert [*texts] == ["warm-start-0", "pairs", "runs", "compare"]
    text = texts[name].replace(sys.executable, "/venv/bin/python").replace(os.getcwd(), "/home/me")
    text = re.sub(r"warm-start/\w{16}", "warm-start/KEY", text)
    assert text == (GOLDEN / f"{name}.sh").read_text()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
@pytest.mark.parametrize("name", ["pairs", "runs", "warm-start-0", "compare"])
def test_shellcheck_finds_nothing_in_them(name: str) -> None:
    done = subprocess.run(["shellcheck", GOLDEN / f"{name}.sh"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_arms_that_fill_a_node_have_jobs_of_their_own(slurm: Path, tmp_path: Path) -> None:
    submit(plan_of("cluster.cpu_ranks=8"), tmp_path, compare=False)
    scripts = sorted(path.name for path in (tmp_path / "small" / "_slurm").glob("*.sh"))
    assert scripts == ["runs.sh"]
    record = json.loads((tmp_path / "small" / "_slurm" / "jobs.json").read_text())
    names = [["baseline/seed-0"], ["treatment/seed-0"], ["baseline/seed-1"], ["treatment/seed-1"]]
    assert record["jobs"] == {"101": names}


SHARED = ("cluster={gpus_per_node: 1, runs_per_gpu: 4}", "seeds=[0, 1, 2, 3, 4]")


@pytest.mark.parametrize(
    ("num_jobs", "arms", "tasks", "gpus"),
    [
        (None, 2, [4, 4, 2], [1, 1, 1]),
        (2, 2, [2, 2, 2, 2, 2], [1, 1, 1, 1, 1]),
        (None, 3, [3, 3, 3, 3, 3], [1, 1, 1, 1, 1]),
        (None, 5, [5, 5, 5, 5, 5], [2, 2, 2, 2, 2]),  # the arms of a seed stay on one node
    ],
)
def test_runs_that_share_a_gpu_are_one_task(
    num_jobs: int | None, arms: int, tasks: list[int], gpus: list[int], slurm: Path, tmp_path: Path
) -> None:
    more = [f"arms.more-{arm}={{steps: {4 + arm}}}" for arm in range(arms - 2)]
    plan = plan_of("launcher={type: slurm}", *SHARED, *more)
    settings: Any = resolve_launcher_settings(plan.recipe.launcher, None)
    scripts = launcher.group_into_scripts(plan.runs, settings, {}, num_jobs)
    found = sorted(
        ((len(task), script.need.gpus) for script in scripts for task in script.tasks), reverse=True
    )
    assert found == [*zip(tasks, gpus, strict=True)]
    names = [name for script in scripts for task in script.tasks for name in task]
    assert sorted(names) == sorted(str(run.name) for run in plan.runs)
    cluster = make_cluster(settings, tmp_path / "small", num_jobs)
    assert cluster is not None and cluster.find_problems(plan) == []
    text = next(iter(cluster.render_scripts(plan, compare=False).values()))
    assert f"--gres=gpu:{gpus[0]}\n" in text and f"--ntasks-per-node={tasks[0]}\n" in text
    assert ("%1\n" in text) == (num_jobs == 2)


def test_steps_that_share_a_gpu_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sees all GPUs of the job's node, and its agent takes those that its place has."""
    monkeypatch.setenv("SLURM_JOB_ID", "101")
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "64000")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    more = [f"arms.more-{arm}={{steps: {4 + arm}}}" for arm in range(3)]
    plan = plan_of("launcher={type: slurm, cpus_per_rank: 3}", *SHARED, *more)
    settings: Any = resolve_launcher_settings(plan.recipe.launcher, None)
    configs = [run.config for run in plan.runs[:5]]
    engine = allocation.StepEngine(settings, 5, configs)
    places = []
    for config in configs:
        run = RunDir(tmp_path / "arm" / "seed-0")
        devices = engine.find_devices(run, config)
        assert devices is not None
        engine._slots.take(devices)
        places.append(devices)
        command, env = engine.command(run, config, devices), engine.environment(run, config, devices)
        assert {"--overlap", "--gres=gpu:2", "--cpus-per-task=15", "--nodes=1"} <= {*command}
        assert not any(word.startswith(("--mem", "--exact")) for word in command)
        assert (env[node.GPU_POSITIONS], env["OMP_NUM_THREADS"]) == (devices[0], "3")
    assert places == [("0",), ("1",), ("0",), ("1",), ("0",)]
    alone = plan_of("launcher={type: slurm}", "cluster.gpus_per_node=1")
    engine = allocation.StepEngine(settings, 2, [run.config for run in alone.runs[:2]])
    assert engine.find_devices(run, alone.runs[0].config) == ()
    command = engine.command(run, alone.runs[0].config, ())
    assert {"--exact", "--gres=gpu:1", "--mem=32000"} <= {*command}


def test_a_node_gives_a_run_the_gpus_of_its_place(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(plan_of(*SHARED), tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    monkeypatch.setenv(node.GPU_POSITIONS, "1")
    run, meeting = (
        RunDir(tmp_path / "small" / "baseline" / "seed-0"),
        Rendezvous(address="n:1", node=1, grace_s=1),
    )
    _, env = node.make_agent_command(run, meeting, "n")
    assert env["CUDA_VISIBLE_DEVICES"] == "GPU-b"


# --- commands on several nodes ---

METRICS = "metrics: {format: csv, path: '{run_dir}/m.csv'}"


def command_plan(start: str, *settings: str) -> ExperimentPlan:
    trainer = f"trainer={{type: command, start: {start}, argv: [echo, '{{seed}}', '{{x}}'], {METRICS}"
    other = ("compare.claims=[]", "cluster={nodes: 2, cpu_ranks: 2}", f"{trainer}, parameters: {{x: 1}}}}")
    recipe = load_recipe(ROOT / "tests" / "external" / "foreign.yaml", [*settings, *other, *ARMS_OF_X])
    return make_plan(recipe)


ARMS_OF_X = ("arms={baseline: {}, treatment: {trainer.parameters.x: 2}}", "seeds=[0, 1]")


@pytest.mark.parametrize(("start", "tasks"), [("every_node", [2, 2]), ("once", [1, 1, 1, 1])])
def test_a_command_that_starts_steps_itself_has_a_job_of_its_own(
    start: str, tasks: list[int], slurm: Path, tmp_path: Path
) -> None:
    submit(command_plan(start), tmp_path)
    (record,) = tmp_path.glob("*/_slurm/jobs.json")
    jobs = json.loads(record.read_text())["jobs"]
    assert [len(task) for job in jobs.values() for task in job] == tasks


@pytest.mark.parametrize(("start", "nodes", "names"), [("every_node", "2", []), ("once", "1", ["n1"])])
def test_a_command_starts_on_the_nodes_that_it_asks_for_and_is_told_all(
    start: str, nodes: str, names: list[str], slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = command_plan(start)
    submit(plan, tmp_path)
    run = RunDir(next(tmp_path.glob("*/baseline/seed-0")))
    variables = {"JOB_ID": "101", "JOB_NODELIST": "n[1-2]", "MEM_PER_CPU": "100", "NTASKS": "1"}
    for name, value in {**variables, "PROCID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setattr(allocation.launcher, "run_slurm", lambda *argv: "n1\nn2\n")
    settings: Any = resolve_launcher_settings(None, "slurm")
    config = plan.runs[0].config
    engine = allocation.StepEngine(settings, 1, [config])
    command = engine.command(run, config, ())
    assert {f"--nodes={nodes}", f"--ntasks={nodes}", "--cpus-per-task=2", "--exact"} <= {*command}
    assert [word for word in command if word.startswith("--nodelist")] == [f"--nodelist={n}" for n in names]
    for name, value in engine.environment(run, config, ()).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(node, "node_refusals", lambda config, machine: [])
    monkeypatch.setattr(node.os, "dup2", lambda *fds: None)  # the output of this test
    monkeypatch.setattr(node, "_compare_with_first_node", lambda *nodes: None)
    _, env = node.make_agent_command(run, Rendezvous(address="n1:7000", node=1, grace_s=1), "n1")
    told = {name.removeprefix("ABRUN_"): value for name, value in env.items() if name.startswith("ABRUN_")}
    assert told | {"RUN_DIR": "", "POLL_S": ""} == {
        **{"NUM_NODES": "2", "NODE_RANK": "1", "NODE_LIST": "n1,n2", "GPUS_PER_NODE": "0"},
        **{"HEAD_ADDRESS": "n1", "PORT": "7000", "RUN_DIR": "", "POLL_S": ""},
    }
    assert (env["SLURM_OVERLAP"], env["SLURM_MEM_PER_NODE"], env["SLURM_NTASKS"]) == ("1", "0", "2")
    assert "SLURM_MEM_PER_CPU" not in env  # srun refuses both


# --- submission and refusals ---


def test_arms_of_other_sizes_are_side_by_side_where_the_nodes_are_as_many(
    slurm: Path, tmp_path: Path
) -> None:
    wider = plan_of("arms.treatment={cluster.cpu_ranks: 4}")
    text = submit(wider, tmp_path).joinpath("_slurm", "pairs.sh").read_text()
    assert "--ntasks-per-node=2\n#SBATCH --cpus-per-task=4\n" in text
    more_nodes = plan_of("name=other", "arms.treatment={cluster.nodes: 2}")
    folder = submit(more_nodes, tmp_path) / "_slurm"
    assert "--nodes=1\n" in (folder / "runs.sh").read_text()
    assert "--nodes=2\n" in (folder / "runs-2.sh").read_text()


def test_jobs_wait_for_the_warm_start_and_the_comparison_for_all(slurm: Path, tmp_path: Path) -> None:
    submit(plan_of("warm_start={steps: 2}", "controls.aa_reruns=1"), tmp_path)
    calls = (slurm / "calls").read_text().splitlines()
    submitted = [call.split(" --parsable ")[1] for call in calls if "--parsable" in call]
    folder = tmp_path / "small" / "_slurm"
    assert submitted == [
        f"{folder}/warm-start-0.sh",
        f"--dependency=afterany:101 {folder}/pairs.sh",
        f"--dependency=afterany:101 {folder}/runs.sh",
        f"--dependency=afterany:101:102:103 {folder}/compare.sh",
    ]


@pytest.mark.parametrize(
    "setting",
    [
        "partition: gone",
        "account: nobody",
        "cpus_per_rank: 9",
        "container: {image: 'nvcr.io#nvidia/pytorch'}",
    ],
)
def test_what_slurm_refuses_is_one_line_of_its_own_and_leaves_nothing(
    setting: str, slurm: Path, tmp_path: Path, snapshot: Snapshot
) -> None:
    with snapshot.refused(LaunchError):
        submit(plan_of(f"launcher={{type: slurm, {setting}}}"), tmp_path / "runs")
    assert queue(slurm) == [] and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("script", ["pairs.sh", "compare.sh"])
def test_a_refusal_half_way_takes_back_what_was_submitted(
    script: str, slurm: Path, tmp_path: Path, snapshot: Snapshot
) -> None:
    (slurm / "refused").write_text(script)
    with pytest.raises(LaunchError) as refusal:
        submit(plan_of("warm_start={steps: 2}"), tmp_path / "runs")
    snapshot(refusal.value)
    assert len(queue(slurm)) > 0 and waiting(slurm) == []
    assert not (tmp_path / "runs" / "small").exists()
    (slurm / "refused").unlink()
    submit(plan_of("warm_start={steps: 2}"), tmp_path / "runs")
    assert len(waiting(slurm)) == 4


@pytest.mark.parametrize("script", ["pairs.sh", "compare.sh"])
def test_a_job_that_a_killed_launcher_could_not_record_is_found(
    script: str, slurm: Path, tmp_path: Path, snapshot: Snapshot
) -> None:
    (slurm / "deadly").write_text(script)  # the launcher is killed as this one is submitted
    launching = [sys.executable, "-m", "abrun", "launch", str(SMALL), "--launcher", "slurm", "--detach"]
    done = subprocess.run([*launching, "--runs-dir", str(tmp_path)], capture_output=True, check=False)
    assert done.returncode == -9
    number, experiment_dir = len(waiting(slurm)), tmp_path / "small"
    assert number == (2 if script == "pairs.sh" else 3)
    assert seen(experiment_dir).message == "job 101_0 is queued: Priority"
    with snapshot.refused(LaunchError):
        submit(plan_of(), tmp_path, resume=True)
    (slurm / "deadly").unlink()
    assert cancel_experiment(experiment_dir).startswith("cancelled: ") and waiting(slurm) == []
    submit(plan_of(), tmp_path, resume=True)
    record = json.loads((experiment_dir / "_slurm" / "jobs.json").read_text())
    assert len(waiting(slurm)) == 3 and "submitting" not in record


def test_what_cannot_be_withdrawn_is_said_and_can_be_cancelled(
    slurm: Path, tmp_path: Path, snapshot: Snapshot
) -> None:
    (slurm / "refused").write_text("compare.sh")
    (slurm / "deaf").touch()
    with snapshot.refused(LaunchError):
        submit(plan_of(), tmp_path)
    (slurm / "deaf").unlink()
    assert len(waiting(slurm)) == 2 and seen(tmp_path / "small").message == "job 101_0 is queued: Priority"
    assert cancel_experiment(tmp_path / "small").startswith("cancelled: 1 job (101)") and waiting(slurm) == []


def test_of_two_that_resume_at_once_one_submits(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot
) -> None:
    """The second has found nothing in the queue, and waits for the lock until the first has handed over."""
    experiment_dir = submit(plan_of(), tmp_path)
    cancel_experiment(experiment_dir)
    lock = launcher_lock

    def later(directory: Path, **options: Any) -> Any:
        monkeypatch.setattr(prepare, "launcher_lock", lock)
        submit(plan_of(), tmp_path, resume=True)
        return lock(directory, **options)

    monkeypatch.setattr(prepare, "launcher_lock", later)
    with snapshot.refused(LaunchError):
        submit(plan_of(), tmp_path, resume=True)
    assert len(waiting(slurm)) == 3


def test_a_machine_without_slurm_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with snapshot.refused(LaunchError):
        submit(plan_of(), tmp_path / "runs")


@pytest.mark.parametrize("setting", ["partition: low", "container: {image: x}"])
def test_a_machine_without_slurm_conf_says_so(
    setting: str, slurm: Path, tmp_path: Path, snapshot: Snapshot
) -> None:
    (slurm / "no-conf").touch()
    with snapshot.refused(LaunchError):
        submit(plan_of(f"launcher={{type: slurm, {setting}}}"), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_login_node_without_gpus_can_submit_what_needs_them(slurm: Path, tmp_path: Path) -> None:
    plan = plan_of("cluster.gpus_per_node=8", "policy.logprobs.impl=triton", "arms.treatment={steps: 4}")
    submit(plan, tmp_path)
    assert "--gres=gpu:8\n" in (tmp_path / "small" / "_slurm" / "runs.sh").read_text()


def test_what_no_machine_can_do_is_refused_at_once(slurm: Path, tmp_path: Path, snapshot: Snapshot) -> None:
    with snapshot.refused(LaunchError):
        submit(
            plan_of("rollout={engine: vllm, devices: 1}", "cluster={nodes: 2, gpus_per_node: 1}"), tmp_path
        )


def test_resume_submits_what_is_left_once_the_queue_is_empty(
    slurm: Path, tmp_path: Path, snapshot: Snapshot
) -> None:
    experiment_dir = submit(plan_of(), tmp_path)
    with snapshot.refused(LaunchError):
        submit(plan_of(), tmp_path, resume=True)
    cancel_experiment(experiment_dir)
    begin_attempt(RunDir(experiment_dir / "baseline" / "seed-0")).finish(3)
    (experiment_dir / "baseline/seed-0/metrics.jsonl").write_text(
        "".join(f'{{"step": {step}, "attempt": 1}}\n' for step in (1, 2, 3))
    )
    submit(plan_of(), tmp_path, resume=True)
    record = json.loads((experiment_dir / "_slurm" / "jobs.json").read_text())
    names = [["treatment/seed-0"]], [["baseline/seed-1", "treatment/seed-1"]]
    assert [*record["jobs"].values()] == [*names] and "cancelled" not in record


# --- what becomes of jobs ---


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("101|0|PENDING|Resources||N/A|", "waiting"),
        ("101|0|RUNNING|None|n[1-2]|N/A|", "waiting"),
        ("101|0|CANCELLED|None||N/A|", "interrupted"),
        ("101|0|FAILED|NonZeroExitCode|n1|N/A|", "failed"),
        ("999|0|RUNNING|None|n1|N/A|", "failed"),
    ],
)
def test_the_state_of_a_run_that_has_not_begun_is_its_jobs(
    line: str, status: str, slurm: Path, tmp_path: Path, snapshot: Snapshot
) -> None:
    experiment_dir = submit(plan_of(), tmp_path)
    (slurm / "queue").write_text(line + "\n")
    state = seen(experiment_dir)
    assert state.status == status
    snapshot(state.message)


def test_a_queued_job_says_for_how_long(slurm: Path, tmp_path: Path) -> None:
    experiment_dir = submit(plan_of(), tmp_path)
    queued = datetime.now() - timedelta(minutes=12, seconds=30)
    (slurm / "queue").write_text(f"101|0|PENDING|Resources||{queued:%Y-%m-%dT%H:%M:%S}|\n")
    assert seen(experiment_dir).message == "job 101_0 is queued for 12 min: Resources"


def test_a_run_whose_folder_is_removed_while_its_job_runs_has_failed(slurm: Path, tmp_path: Path) -> None:
    experiment_dir = submit(plan_of(), tmp_path)
    (slurm / "queue").write_text("101|0|RUNNING|None|n1|N/A|\n")
    shutil.rmtree(experiment_dir / "baseline" / "seed-0")
    removed = f"{experiment_dir / 'baseline' / 'seed-0'}: was removed while job 101_0 runs; "
    state = seen(experiment_dir)
    assert (state.status, state.message) == ("failed", f"{removed}create it again with --resume")
    assert seen(experiment_dir, "treatment").status == "waiting"


def test_a_run_at_work_whose_job_has_ended_is_dead(slurm: Path, tmp_path: Path) -> None:
    experiment_dir = submit(plan_of(), tmp_path)
    here = RunDir(experiment_dir / "baseline" / "seed-0")
    begin_launch(here, (), None)
    begin_attempt(here)
    (slurm / "queue").write_text("101|0|RUNNING|None|n1|N/A|\n")
    assert seen(experiment_dir).status == "running"
    (slurm / "queue").write_text("101|0|NODE_FAIL|None|n1|N/A|\n")
    assert (seen(experiment_dir).status, seen(experiment_dir).message) == (
        "failed",
        "job 101_0 ended: NODE_FAIL",
    )
    (slurm / "queue").write_text("101|0|PENDING|BeginTime||N/A|\n")
    assert seen(experiment_dir).status == "waiting"


def test_what_was_cancelled_while_it_waited_has_not_failed_once_slurm_forgets_it(
    slurm: Path, tmp_path: Path
) -> None:
    experiment_dir = submit(plan_of(), tmp_path)
    jobs = find_cluster_jobs(experiment_dir)
    assert jobs is not None
    jobs.cancel()
    (slurm / "queue").write_text("")
    state = seen(experiment_dir)
    said = "job 101 was cancelled while it waited; continue with --resume"
    assert (state.status, state.message) == ("interrupted", said)


def test_a_folder_with_a_percent_sign_is_no_pattern_of_slurm(slurm: Path, tmp_path: Path) -> None:
    experiment_dir = submit(plan_of(), tmp_path / "50 %u")
    script = (experiment_dir / "_slurm" / "pairs.sh").read_text()
    assert f'--output="{tmp_path}/50 %%u/small/_slurm/pairs-%a.log"' in script


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("90", 5400), ("2:30", 150), ("2:00:05", 7205), ("1-12", 129600), ("1-0:30", 88200),
        ("1-0:0:1", 86401), ("0", float("inf")),
    ],
)  # fmt: skip
def test_a_limit_is_read_as_sbatch_reads_it(time: str, seconds: float) -> None:
    assert parse_time_limit(time) == seconds


def test_a_job_that_would_be_told_to_stop_as_it_begins_is_refused(
    slurm: Path, tmp_path: Path, snapshot: Snapshot
) -> None:
    with snapshot.refused(LaunchError):
        submit(plan_of("launcher={type: slurm, time: '2'}"), tmp_path)
    assert not (slurm / "queue").exists() and not (tmp_path / "runs").exists()


def test_where_slurm_does_not_answer_the_run_directory_does(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment_dir = submit(plan_of(), tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert seen(experiment_dir).status == "pending"


def test_cancel_takes_back_what_waits_and_asks_what_runs(slurm: Path, tmp_path: Path) -> None:
    experiment_dir = submit(plan_of(), tmp_path)
    assert cancel_experiment(experiment_dir).startswith("cancelled: 2 jobs (101, 102)")
    assert (slurm / "calls").read_text().splitlines()[-2:] == [
        "scancel --quiet --state=PENDING 101 102",
        "scancel --quiet --batch --signal=TERM --state=RUNNING 101 102",
    ]
    assert cancel_experiment(experiment_dir).startswith("small: no run is active")
    assert allocation._should_requeue(experiment_dir) is False


def test_whoever_watches_releases_what_slurm_keeps_back_but_not_at_once(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = find_cluster_jobs(submit(plan_of(), tmp_path))
    assert jobs is not None
    (slurm / "queue").write_text("101|0|PENDING|BeginTime||N/A|\n101|1|PENDING|Resources||N/A|\n")
    monkeypatch.setattr(launcher.SlurmCluster, "query_interval_s", 0)

    def updates() -> list[str]:
        assert jobs.active_job_ids == ["101"]
        calls = (slurm / "calls").read_text().splitlines()
        return [call for call in calls if "update" in call]

    assert updates() == updates() == []
    monkeypatch.setattr(launcher, "RELEASE_AFTER_S", 0)
    assert updates() == ["scontrol update JobId=101_0 StartTime=now"]


# --- in a job ---


def run_job(experiment_dir: Path, monkeypatch: pytest.MonkeyPatch, *, restarts: int = 0) -> int:
    """What the job of a run does."""
    for name, value in {"JOB_ID": 101, "RESTART_COUNT": restarts, "JOB_NUM_NODES": 1}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setattr(sys, "argv", ["allocation", str(experiment_dir), "baseline/seed-0"])
    monkeypatch.setattr(allocation.signal, "signal", lambda *_: None)
    return allocation.main()


def test_a_job_that_begins_again_too_often_gives_up(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment_dir = submit(plan_of("launcher={type: slurm, requeues: 2}"), tmp_path)
    assert run_job(experiment_dir, monkeypatch, restarts=3) == 2
    state = read_run_state(experiment_dir, RunName(arm="baseline", seed=0))
    assert state.status == "failed" and "launcher.requeues" in str(state.message)


@pytest.mark.parametrize(
    ("status", "requeued"), [("interrupted", True), ("finished", False), ("failed", False)]
)
def test_a_job_queues_itself_again_where_its_runs_were_interrupted(
    status: Any, requeued: bool, slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ended:
        def __init__(self, queue: Any, *_: Any, **__: Any) -> None:
            self._jobs = queue.jobs

        def run(self) -> None:
            for job in self._jobs:
                job.status = status

    asked: list[str] = []
    monkeypatch.setattr(allocation, "Supervisor", Ended)
    monkeypatch.setattr(allocation, "_all_nodes_answer", lambda: True)
    monkeypatch.setattr(allocation, "_should_requeue", lambda _: True)
    monkeypatch.setattr(allocation, "_requeue", lambda: asked.append("requeue"))
    code = run_job(submit(plan_of(), tmp_path), monkeypatch)
    assert code == (status != "finished") and bool(asked) == requeued


# --- on a node ---


def on_node(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setattr(sys, "argv", ["node", str(directory), "n1:4000", "30", "n1"])
    return node.main(), capfd.readouterr().err


def test_a_node_that_does_not_see_the_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    host = socket.gethostname()
    code, said = on_node(tmp_path / "runs", monkeypatch, capfd)
    assert code == 2
    assert said.startswith(
        f"error: {tmp_path / 'runs'}: exists on n1, but not on {host}; launch with --runs-dir"
    )


def test_a_node_that_lacks_gpus_says_so(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    submit(plan_of("cluster.gpus_per_node=8"), tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    code, said = on_node(tmp_path / "small" / "baseline" / "seed-0", monkeypatch, capfd)
    assert code == 2
    assert said.startswith(f"error: {socket.gethostname()}: cluster.gpus_per_node: got 8, but this machine")


# --- what a recipe, a profile and the command line say ---


def test_a_profile_lies_below_the_recipe(slurm: Path, tmp_path: Path) -> None:
    profile = tmp_path / "config" / "abrun" / "launchers.yaml"
    profile.parent.mkdir(parents=True)
    profile.write_text("slurm: {account: mine, partition: low, save_s: 60}\n")
    recipe = load_recipe(SMALL, ["launcher={type: slurm, partition: high}"])
    settings = resolve_launcher_settings(recipe.launcher, None)
    assert settings is not None and settings.type == "slurm"
    assert (settings.account, settings.partition, settings.save_s) == ("mine", "high", 60)
    assert resolve_launcher_settings(recipe.launcher, "local").type == "local"  # pyright: ignore
    of_profile = resolve_launcher_settings(None, "slurm")
    assert of_profile is not None and of_profile.partition == "low"  # pyright: ignore


@pytest.mark.parametrize(
    "text",
    [
        "slurm: {partitoin: low}",
        "slurm: {save_s: 0}",
        "slurm: [low]",
        "slurm: {",
    ],
)
def test_a_bad_profile_is_one_line(text: str, slurm: Path, tmp_path: Path, snapshot: Snapshot) -> None:
    profile = tmp_path / "config" / "abrun" / "launchers.yaml"
    profile.parent.mkdir(parents=True)
    profile.write_text(text + "\n")
    with snapshot.refused(RecipeError):
        resolve_launcher_settings(None, "slurm")


Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, abrun: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setitem(LOCAL_LAUNCHERS, "local", FAKE[1])
    return lambda *arguments: abrun(*arguments, "--runs-dir", tmp_path / "runs")


def test_a_detached_launch_and_what_can_be_asked_of_it(slurm: Path, tmp_path: Path, run: Cli) -> None:
    code, said, _ = run("launch", SMALL, "--launcher", "slurm", "--detach")
    assert code == 0 and said.startswith("queued: 101, 102; ") and "abrun watch" in said
    code, said, _ = run("status", "small")
    assert (
        code == 0
        and "4 waiting" in said
        and "baseline/seed-0 and 1 more: job 101_0 is queued: Priority" in said
    )
    log = tmp_path / "runs" / "small" / "baseline" / "seed-0" / "stdout.log"
    log.write_text("one\ntwo\x1b[2J\nthree")
    assert run("logs", "small/baseline/seed-0") == (0, "one\ntwo\\x1b[2J\nthree\n", "")
    code, _, refused = run("logs", "small/baseline/seed-7")
    assert code == 2 and "small/baseline/seed-7" in refused
    assert "4 waiting" in run("status")[1]
    code, said, _ = run("stop", "small")
    assert code == 0 and said.startswith("cancelled: 2 jobs")
    assert "4 interrupted" in run("status")[1]
    (slurm / "no-conf").touch()
    assert "4 pending" in run("status")[1] and "slurm.conf" in run("status")[1]
    (slurm / "no-conf").unlink()
    assert run("logs", "small/baseline/seed-0", "--follow")[1] == "one\ntwo\\x1b[2J\nthree\n"


def test_a_dry_run_shows_the_scripts_and_submits_nothing(slurm: Path, tmp_path: Path, run: Cli) -> None:
    code, said, _ = run("launch", SMALL, "--launcher", "slurm", "--dry-run")
    assert code == 0 and "#SBATCH --array=0-1" in said and "abrun compare" in said
    assert queue(slurm) == [] and not (tmp_path / "runs").exists()
    code, said, _ = run("launch", SMALL, "--launcher", "slurm", "--dry-run", "--set", "cluster.cpu_ranks=16")
    assert code == 2 and "cannot run" in said and "Requested node configuration" in said


def test_an_empty_name_of_a_launcher_is_none(run: Cli) -> None:
    code, _, errors = run("launch", SMALL, "--launcher", "")
    assert code == 2 and "--launcher: got ''; allowed: local, slurm, ray" in errors


def test_the_local_launcher_does_not_detach(run: Cli) -> None:
    code, _, said = run("launch", SMALL, "--detach")
    assert code == 2 and said.startswith("abrun: --detach: ") and said.count("\n") == 1
