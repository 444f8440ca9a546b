"""SIGKILL at any moment, to any process of a launch: nothing lives on, and a resume ends as if none had come.

ABRUN_FUZZ_ROUNDS and ABRUN_FUZZ_SEED choose how many moments, and which.
"""

import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from psutil import AccessDenied, NoSuchProcess, Process, process_iter

from abrun.experiment.command import AGENT
from abrun.experiment.plan import ExperimentPlan, make_plan
from abrun.external import run as external_run
from abrun.launch import mps
from abrun.launch.prepare import write_run_record
from abrun.launch.supervisor import LaunchOutcome
from abrun.processes import find_children, find_descendants, find_run_processes
from abrun.recipe.experiment import load_recipe
from abrun.recipe.implementations import LOCAL_LAUNCHERS
from abrun.runs.experiment import is_experiment, planned_runs, read_run_state
from abrun.runs.lock import LOCK, find_owner
from abrun.runs.rundir import RunDir
from abrun.runs.state import RunState, read_state
from tests.launch.fakes import FAKE_UNDER_AGENT, run_to_end
from tests.runs.faulty import killed_at

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(sys.platform != "linux", reason="/proc and parent-death signals"),
]
ROUNDS = int(os.environ.get("ABRUN_FUZZ_ROUNDS", "50"))
SEED = int(os.environ.get("ABRUN_FUZZ_SEED", "0"))
HERE = Path(__file__).parent
OWN = (HERE / "small.yaml", ("seeds=[0, 1]", "steps=30", "cluster.cpu_ranks=2"))
FOREIGN = (
    HERE.parent / "external" / "foreign.yaml",
    (
        "seeds=[0, 1]",
        "steps=8",
        "trainer.parameters.step_s=0.2",
        "trainer.parameters.behaviour=resumes",
        f"trainer.parameters.script={HERE.parent / 'external' / 'foreign_trainer.py'}",
    ),
)
# Two ranks of our own trainer that cannot do without each other. Optimizer states are cut over them, too.
LAYOUTS = {
    "tensor": ("policy.backend={tensor_parallel: 2, sequence_parallel: true}",),
    "context": ("policy.backend={context_parallel: 2}", "policy.packing=true"),
    "experts": ("policy.backend={expert_parallel: 2}", "model={preset: qwen3-moe-tiny}"),
    "megatron": ("policy.backend={type: megatron}",),
    "megatron tensor": ("policy.backend={type: megatron, tensor_parallel: 2, sequence_parallel: true}",),
    "megatron stages": (
        "policy.backend={type: megatron, pipeline_parallel: 2}",
        "policy.micro_batch_size=4",
        "model={preset: qwen2-wide-vocab}",  # an even number of layers
    ),
    "megatron experts": (
        "policy.backend={type: megatron, expert_parallel: 2}",
        "model={preset: qwen3-moe-tiny}",
    ),
}
TIMES = re.compile(r"timing/|memory/|_per_sec")  # metrics that are another at each start
# On one GPU, which is not there: the trainers are fakes, and so is CUDA's daemon
SHARING = (OWN[0], ("seeds=[0, 1]", "steps=30", "cluster={gpus_per_node: 1, runs_per_gpu: 4}"))
ONE_RUN = "seeds=[0]"  # of the baseline: all that is planned of such a recipe
# What a process is known by, beside the run directory in its environment: of its command line, or which rank
VICTIMS = {
    "launcher": (OWN, None),
    "agent": (OWN, AGENT),
    "rank 0": (OWN, "rank 0"),
    "rank 1": (OWN, "rank 1"),
    "engine": (OWN, "# engine"),
    "launcher of runs on one GPU": (SHARING, None),
    "run on a shared GPU": (SHARING, AGENT),
    "keeper of the daemon": (SHARING, "abrun.launch.mps"),
    "daemon": (SHARING, mps.DAEMON),
    "launcher of a command": (FOREIGN, None),
    "external": (FOREIGN, "abrun.external"),
    "command": (FOREIGN, "foreign_trainer.py"),
}


def plan_of(recipe: tuple[Path, tuple[str, ...]]) -> ExperimentPlan:
    plan = make_plan(load_recipe(recipe[0], list(recipe[1])))
    return replace(plan, runs=plan.runs[:1]) if ONE_RUN in recipe[1] else plan


def launch(
    recipe: tuple[Path, tuple[str, ...]],
    runs_dir: Path,
    *,
    resume: bool = False,
    launcher: str = FAKE_UNDER_AGENT[0],
) -> LaunchOutcome:
    plan = plan_of(recipe)
    jobs = None if recipe is SHARING else 2
    return run_to_end(plan, runs_dir, launcher=launcher, jobs=jobs, resume=resume)


def metrics(recipe: tuple[Path, tuple[str, ...]], runs_dir: Path) -> dict[str, np.ndarray]:
    plan = plan_of(recipe)
    found = {}
    for run in plan.runs:
        for name, series in RunDir(runs_dir / plan.recipe.name / str(run.name)).metrics().items():
            found[f"{run.name} {name}"] = np.stack([series.steps, series.values])
    return found


def pids(runs_dir: Path, launcher: int, known_by: str) -> list[int]:
    """The processes of a launcher, or of any run, that are what `known_by` says."""
    below_launcher = find_children(launcher)
    found = []
    for config in runs_dir.rglob("config.json"):
        words = {one.pid: _words(one.pid) for one in find_run_processes(config.parent)}
        agents = [pid for pid in words if pid in below_launcher and AGENT in words[pid]]
        if known_by == AGENT:
            found += agents
        elif known_by.startswith("rank"):
            ranks = sorted(rank for agent in agents for rank in find_children(agent))
            found += ranks[int(known_by.removeprefix("rank ")) :][:1]
        else:
            found += [pid for pid in words if any(word.endswith(known_by) for word in words[pid])]
    if known_by in ("abrun.launch.mps", mps.DAEMON):
        below = (launcher, *(pid for pid in below_launcher if "abrun.launch.mps" in _words(pid)))
        found = [pid for parent in below for pid in find_children(parent)]
        return [pid for pid in found if any(word.endswith(known_by) for word in _words(pid))]
    return sorted(found)


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


def kill_one(runs_dir: Path, launcher: int, known_by: str | None, delay_s: float) -> None:
    """SIGKILL to one of the processes, so long after the first of its kind has appeared."""
    if known_by is None:
        time.sleep(delay_s)
        os.kill(launcher, signal.SIGKILL)
        return
    deadline = time.monotonic() + 60
    while not pids(runs_dir, launcher, known_by) and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(delay_s)
    for pid in pids(runs_dir, launcher, known_by)[-1:]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it has just ended by itself
            return


def wait_for(pid: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        assert time.monotonic() < deadline  # the launcher does not end
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def one_gpu(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("PATH", f"{HERE}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv(mps.PIPE_VARIABLE, raising=False)


@pytest.fixture(scope="module", autouse=True)
def fakes() -> None:
    LOCAL_LAUNCHERS[FAKE_UNDER_AGENT[0]] = FAKE_UNDER_AGENT[1]


@pytest.fixture
def others() -> frozenset[Process]:
    """Of tests before."""
    return frozenset(find_descendants(os.getpid()))


def states(experiment: Path) -> dict[str, RunState]:
    return {str(name): read_run_state(experiment, name) for name in planned_runs(experiment)}


def left_in(folder: Path) -> list[str]:
    """The files that a killed writer left: partial ones, and those that hold no JSON."""
    left = []
    for path in folder.rglob("*"):
        if path.suffix == ".json" and path.is_file():
            try:
                json.loads(path.read_text())
            except ValueError:
                left.append(str(path))
        elif path.name.endswith(".partial"):
            left.append(str(path))
    return left


def left_of_daemons(folder: Path) -> list[object]:
    """Folders in `folder` of daemons of CUDA's multi-process service, and processes that used one."""
    found: list[object] = [*folder.glob("abrun-mps-*")]
    for process in process_iter():
        with contextlib.suppress(NoSuchProcess, AccessDenied):
            if process.environ().get(mps.PIPE_VARIABLE, "").startswith(f"{folder}{os.sep}"):
                found.append(process)
    return found


def check_killed(runs_dir: Path, experiment: Path, by: str, others: frozenset[Process]) -> None:
    """Wait until no process of a killed launch is left, and check what is said of its runs."""
    deadline = time.monotonic() + 45
    while any(find_run_processes(config.parent) for config in runs_dir.rglob("config.json")):
        assert time.monotonic() < deadline, f"{by}: something lives on"
        time.sleep(0.05)
    while left_of_daemons(Path(tempfile.gettempdir())):
        assert time.monotonic() < deadline, f"{by}: a daemon lives on"
        time.sleep(0.05)
    assert others.issuperset(find_descendants(os.getpid()))
    if is_experiment(experiment):
        over = {"finished", "interrupted", "pending"}
        over |= set() if by.startswith("launcher") else {"failed"}
        found = states(experiment)
        assert {state.status for state in found.values()} <= over, f"{by}: {found}"
        assert find_owner(experiment) is None, by


def check_whole(experiment: Path, by: str) -> None:
    """Check that a resumed experiment is as one that nothing disturbed, and holds nothing else."""
    assert {state.status for state in states(experiment).values()} == {"finished"}, by
    assert left_in(experiment) == [] and find_owner(experiment) is None, by
    assert (experiment / LOCK).read_bytes() == b"", by


@pytest.mark.parametrize("victim", VICTIMS)
def test_nothing_lives_on_and_a_resume_ends_where_none_was_killed(
    victim: str, tmp_path: Path, others: frozenset[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, known_by = VICTIMS[victim]
    monkeypatch.setenv("FAKE_TRAINER", json.dumps({"step_s": 0.03, "engine": victim == "engine"}))
    undisturbed = tmp_path / "undisturbed"
    assert launch(recipe, undisturbed).exit_code == 0
    expected = metrics(recipe, undisturbed)
    moments = random.Random(f"{SEED} {victim}")
    left = -(-ROUNDS // len(VICTIMS))
    while left > 0:
        runs_dir = tmp_path / str(left)
        runs_dir.mkdir()
        experiment = runs_dir / plan_of(recipe).recipe.name
        delays_s = []
        for _ in range(min(left, moments.choice([1, 1, 2, 3]))):  # the same launch may be killed again
            left -= 1
            delays_s.append(moments.uniform(0, moments.choice([0.2, 6.0])))
            launcher = os.fork()
            if launcher == 0:
                os._exit(launch(recipe, runs_dir, resume=is_experiment(experiment)).exit_code)
            kill_one(runs_dir, launcher, known_by, delays_s[-1])
            wait_for(launcher, timeout_s=120)
            check_killed(runs_dir, experiment, f"{victim}, {delays_s} s", others)
        by = f"{victim}, {delays_s} s"
        assert launch(recipe, runs_dir, resume=is_experiment(experiment)).exit_code == 0, by
        found = metrics(recipe, runs_dir)
        assert found.keys() == expected.keys()
        for key, values in found.items():
            if "time" not in key:
                assert np.array_equal(values, expected[key]), f"{by}: {key}"
        check_whole(experiment, by)


def test_a_launcher_killed_before_any_of_its_writes(
    tmp_path: Path, others: frozenset[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the experiment's first file to its end, whose order a random moment would rarely meet."""
    recipe = (OWN[0], ("compare.claims=[]", ONE_RUN, "steps=3"))
    monkeypatch.setenv("FAKE_TRAINER", json.dumps({"step_s": 0.01}))
    every = max(1, 200 // ROUNDS)
    last, seen = 1 + SEED % every, set[str]()
    while True:
        runs_dir = tmp_path / str(last)
        runs_dir.mkdir()
        experiment = runs_dir / "small"
        killed = killed_at(last, runs_dir, lambda runs_dir=runs_dir: launch(recipe, runs_dir))
        check_killed(runs_dir, experiment, f"launcher, call {last}", others)
        if not killed:
            break
        if is_experiment(experiment):
            seen |= {state.status for state in states(experiment).values()}
        assert launch(recipe, runs_dir, resume=is_experiment(experiment)).exit_code == 0, f"call {last}"
        check_whole(experiment, f"call {last}")
        last += every
    check_whole(experiment, "undisturbed")
    assert seen >= {"pending", "interrupted"} and last > 40


def test_a_follower_of_a_command_killed_before_any_of_its_writes(
    tmp_path: Path, others: frozenset[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among them those between the command's last row and the end of the run."""
    monkeypatch.setattr(
        external_run.processes, "find_descendants", lambda pid: find_descendants(pid) - others
    )
    planned = plan_of((FOREIGN[0], ("steps=3", FOREIGN[1][-1]))).runs[0]
    every = max(1, 150 // ROUNDS)
    last, killed, before_end = 1 + SEED % every, True, 0
    while killed:
        experiment = tmp_path / str(last)
        run = RunDir(experiment / str(planned.name))
        write_run_record(run.path, "foreign", planned.name, planned.config)
        killed = killed_at(last, run.path, lambda run=run: external_run.run(run.path))
        deadline = time.monotonic() + 45
        while find_run_processes(run.path):
            assert time.monotonic() < deadline, f"call {last}: something lives on"
            time.sleep(0.02)
        before_end += len(run.metrics_reader().read()) == 3 and not run.finished
        began = bool(run.attempts())
        expected = "finished" if run.finished else "failed" if began else "pending"
        assert read_state(run, planned.name).status == expected, f"call {last}"
        if killed and not run.finished:
            assert external_run.run(run.path) == 0, f"call {last}"
            assert left_in(run.path) == [], f"call {last}"
        assert run.metrics()["train/reward"].steps.tolist() == [1, 2, 3], f"call {last}"
        last += every
    assert before_end > 1


def after_steps(run: Path, num_steps: int) -> None:
    """Waits until so many steps of a run are recorded."""
    deadline = time.monotonic() + 300
    lines = run / "metrics.jsonl"
    while not lines.is_file() or lines.read_bytes().count(b"\n") < num_steps:
        assert time.monotonic() < deadline, "no such step"
        time.sleep(0.02)


def rounds_of_layout(
    layout: str, tmp_path: Path
) -> tuple[tuple[Path, tuple[str, ...]], dict[str, np.ndarray]]:
    """A short recipe of that layout, and the metrics of a launch that nothing disturbs."""
    settings = (
        "compare.claims=[]",
        ONE_RUN,
        "algorithm.prompts_per_step=4",
        "algorithm.entropy_coefficient=0.05",  # gradients that are not 0, whatever the rewards
        "steps=4",
        "checkpoint.every=1",
        "limits.retries=0",
        "cluster.cpu_ranks=2",
        *LAYOUTS[layout],
    )
    recipe = (HERE / "small.yaml", settings)
    assert launch(recipe, tmp_path / "undisturbed", launcher="local").exit_code == 0
    return recipe, metrics(recipe, tmp_path / "undisturbed")


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_whose_ranks_share_a_layer_goes_on_after_the_second_dies(
    layout: str, end: signal.Signals, tmp_path: Path, others: frozenset[Process]
) -> None:
    """SIGKILL to rank 1, which gives no warning; SIGTERM to the launcher, which lets it save."""
    recipe, expected = rounds_of_layout(layout, tmp_path)
    moments = random.Random(SEED)
    runs_dir = tmp_path / "killed"
    runs_dir.mkdir()
    run = runs_dir / "small" / "baseline" / "seed-0"
    launcher = os.fork()
    if launcher == 0:
        os._exit(launch(recipe, runs_dir, launcher="local").exit_code)
    after_steps(run, moments.randint(1, 2))
    time.sleep(moments.uniform(0, 1))
    if end == signal.SIGKILL:
        os.kill(pids(runs_dir, launcher, "rank 1")[-1], end)
    else:
        os.kill(launcher, end)
    wait_for(launcher, timeout_s=60)
    assert not list(find_run_processes(run)) and others.issuperset(find_descendants(os.getpid()))
    assert launch(recipe, runs_dir, resume=True, launcher="local").exit_code == 0
    found = metrics(recipe, runs_dir)
    assert found.keys() == expected.keys()
    for key in (key for key in found if not TIMES.search(key)):
        assert np.array_equal(found[key], expected[key]), f"{layout}: {key}"
