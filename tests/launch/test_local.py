"""The local launcher, with a fake trainer that speaks the trainer's protocol (and once under an agent)."""

import errno
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from psutil import Process

from abrun.errors import LaunchError, StoreError
from abrun.experiment.command import run_environment
from abrun.experiment.plan import RunName
from abrun.experiment.preflight import checks
from abrun.launch import queue, supervisor
from abrun.launch.prepare import own_experiment
from abrun.launch.supervisor import LaunchOutcome
from abrun.messages.codes import Code, Reason, in_words
from abrun.messages.records import encode_reasons
from abrun.processes import find_run_processes
from abrun.recipe.experiment import load_recipe, parse_stored_run
from abrun.recipe.implementations import LOCAL_LAUNCHERS
from abrun.runs import files, launches, lock
from abrun.runs.experiment import WARM_STARTS, open_experiment, planned_runs, read_run_state
from abrun.runs.files import fingerprint, read_json
from abrun.runs.launches import begin_launch, read_endings, write_ending
from abrun.runs.lines import read_json_lines
from abrun.runs.lock import LOCK, Lease, LockedError, TakenOverError, describe_launcher
from abrun.runs.records import Launch, recorded_reason
from abrun.runs.rundir import RunDir
from abrun.runs.state import RunState, read_state
from abrun.runs.writer import begin_attempt
from tests.launch.fakes import FAKE, FRESH_FAKES, SMALL, Silent, plan_of, run_to_end, until
from tests.snapshot import Snapshot
from tests.written_runs import make_run, run_config

SLOW = pytest.mark.slow


@pytest.mark.parametrize("name", ["environment.json", "result.json"])
def test_a_damaged_file_of_a_finished_run_ends_no_resume(tmp_path: Path, name: str) -> None:
    plan = plan_of()
    with own_experiment(plan, tmp_path / "small", resume=False):
        job = queue.LaunchQueue(plan, tmp_path / "small").jobs[0]
    writer = begin_attempt(job.run)
    for step in range(1, job.config.steps + 1):
        writer.metrics(step, {"train/reward": 1.0})
    writer.finish(job.config.steps)
    (job.run.path / name).write_text("{")
    assert queue.LaunchQueue(plan, tmp_path / "small").jobs[0].status == "finished"


def launch(
    runs_dir: Path, *overrides: str, tick: Callable[[], object] = lambda: None, **options: Any
) -> LaunchOutcome:
    options = {"launcher": "fake", "observer": Silent(tick), **options}
    return run_to_end(plan_of(*overrides), runs_dir, **options)


def at_work(runs_dir: Path) -> set[Process]:
    """What is left of the processes of any run."""
    configs = runs_dir.rglob("config.json")
    return set[Process]().union(*(find_run_processes(path.parent) for path in configs))


def launches_of(experiment_dir: Path, run: str) -> list[Launch]:
    return RunDir(experiment_dir / run).launches()


def ended(launch: Launch) -> float:
    assert launch.ended_s
    return launch.ended_s


def state_of(experiment_dir: Path, run: str) -> RunState:
    return read_state(RunDir(experiment_dir / run), RunName(arm="any", seed=0))


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOCAL_LAUNCHERS, *FAKE)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("FAKE_TRAINER", raising=False)


# --- a launch that goes well ---


def test_every_run_is_done_in_order_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOCAL_LAUNCHERS, "fake", FRESH_FAKES)
    outcome = launch(tmp_path, jobs=1)
    assert outcome.exit_code == 0 and outcome.stopped_by is None
    names = [str(name) for name in outcome.statuses]
    assert names == ["baseline/seed-0", "treatment/seed-0", "baseline/seed-1", "treatment/seed-1"]
    assert set(outcome.statuses.values()) == {"finished"}
    attempts = [launches_of(tmp_path / "small", name) for name in names]
    assert [len(each) for each in attempts] == [1, 1, 1, 1]
    ((first,), *_) = attempts
    assert first.exit_code == 0 and first.signal is None and first.devices == ("cpu",)
    assert first.host == socket.gethostname() and first.started_s < ended(first)
    (itself,) = RunDir(tmp_path / "small" / names[0]).attempts()
    assert itself.exit_code == 0 and itself.pid == first.pid
    # One at a time, in launch order
    assert all(ended(a[0]) <= b[0].started_s for a, b in itertools.pairwise(attempts))
    git = RunDir(tmp_path / "small" / names[0]).git()
    assert git is None or set(git) == {"sha", "dirty", "changes", "files", "diff"}
    assert "CUDA_VISIBLE_DEVICES=''" in (tmp_path / "small" / names[0] / "stdout.log").read_text()


def test_a_warm_start_comes_first_is_shared_and_is_cached(tmp_path: Path) -> None:
    warm = ("warm_start={steps: 2}", "arms.cold={warm_start: null}")
    assert launch(tmp_path, *warm).exit_code == 0
    (directory,) = (tmp_path / "warm-starts").iterdir()
    made = launches_of(directory, ".")
    described = read_json(directory / "config.json")
    assert (described["arm"], described["seed"], described["initial_weights"]) == ("warm-start", 2**31, None)
    assert described["config"]["algorithm"]["type"] == "sft"
    for run in ("baseline/seed-0", "treatment/seed-1"):
        config = read_json(tmp_path / "small" / run / "config.json")
        expected = directory / "checkpoints" / "final"
        assert (tmp_path / "small" / run / config["initial_weights"]).resolve() == expected.resolve()
        assert launches_of(tmp_path / "small", run)[0].started_s >= ended(made[0])
    assert read_json(tmp_path / "small" / "cold" / "seed-0" / "config.json")["initial_weights"] is None
    assert launch(tmp_path, *warm, name="again").exit_code == 0
    assert launches_of(directory, ".") == made


def test_two_experiments_make_a_warm_start_once(tmp_path: Path, behave: Callable[..., None]) -> None:
    behave(step_s=0.2)
    outcomes = []
    observer = Silent()

    def one(name: str) -> None:
        warm_start = ("warm_start={steps: 4}", "steps=1")
        outcomes.append(launch(tmp_path, *warm_start, name=name, jobs=4, observer=observer))

    threads = [threading.Thread(target=one, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [outcome.exit_code for outcome in outcomes] == [0, 0]
    (directory,) = (tmp_path / "warm-starts").iterdir()
    assert len(launches_of(directory, ".")) == 1
    (said,) = observer.said
    assert "another launcher" in said


@pytest.mark.parametrize(
    "damage", [*(pytest.param(d, marks=SLOW) for d in ("removed", "rows")), "other bits"]
)
def test_a_warm_start_that_is_not_whole_is_trained_again(tmp_path: Path, damage: str) -> None:
    warm = ("warm_start={steps: 2}",)
    assert launch(tmp_path, *warm).exit_code == 0
    (directory,) = (tmp_path / "warm-starts").iterdir()
    weights = directory / "checkpoints" / "final" / "model.safetensors"
    weights.write_bytes(b"weights")
    result = read_json(directory / "result.json")
    recorded = {"final_weights": {weights.name: fingerprint(weights)}}
    files.write_json(directory / "result.json", result | recorded)
    observer = Silent()
    assert launch(tmp_path, *warm, name="whole", observer=observer).exit_code == 0
    assert len(launches_of(directory, ".")) == 1 and not observer.said
    if damage == "removed":
        shutil.rmtree(weights.parent)
    elif damage == "other bits":
        weights.write_bytes(b"weighty")
    else:
        rows = (directory / "metrics.jsonl").read_bytes()
        (directory / "metrics.jsonl").write_bytes(rows[: rows.index(b"\n") + 1])
    assert launch(tmp_path, *warm, name="again", observer=observer).exit_code == 0
    assert len(launches_of(directory, ".")) == 2 and weights.parent.is_dir()
    (said,) = observer.said
    expected = {
        "removed": "final is missing",
        "other bits": "its recorded checksum",
        "rows": "metrics.jsonl lacks 1 of 2 steps, the first is 2",
    }
    assert "trained again: " in said and expected[damage] in said
    events = RunDir(directory).events()
    assert [row["event"] for row in events][1:3] == ["finished", "repair"]


def test_a_warm_start_is_claimed_before_anything_is_asked_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a worker could start between the question whether one is there and the claim."""
    asked: list[bool] = []

    def processes_there(directory: Path) -> set[Process]:
        if directory.parent.name == WARM_STARTS:
            with pytest.raises(LockedError):
                Lease(directory).acquire()
            asked.append(True)
        return set()

    monkeypatch.setattr(queue, "find_run_processes", processes_there)
    assert launch(tmp_path, "warm_start={steps: 2}").exit_code == 0
    assert asked


# --- failures ---


PLANNED_FAILURE = Code.FOREIGN_TEXT(text="the planned failure")  # the fake trainer's words


def see_log(directory: Path, run: str, ending: Reason) -> Reason:
    return Code.SEE_LOG(ending=ending, log=directory / run / "stdout.log")


def test_a_failed_run_does_not_stop_the_others(tmp_path: Path, behave: Callable[..., None]) -> None:
    behave(baseline_0="fail", treatment_0="crash", baseline_1="sigkill", treatment_1="no-result")
    outcome = launch(tmp_path, "seeds=[0, 1, 2]")
    assert outcome.exit_code == 1
    assert list(outcome.statuses.values()) == ["failed"] * 4 + ["finished"] * 2
    directory = tmp_path / "small"
    crash = Code.EXIT_CODE(exit_code=1, last_line="ValueError: the planned crash")
    expected = {
        "baseline/seed-0": (3, None, PLANNED_FAILURE),
        "treatment/seed-0": (1, None, see_log(directory, "treatment/seed-0", crash)),
        "baseline/seed-1": (
            *(None, "SIGKILL"),
            see_log(directory, "baseline/seed-1", Code.KILLED(signal="SIGKILL")),
        ),
        "treatment/seed-1": (
            *(0, None),
            see_log(directory, "treatment/seed-1", in_words("ended without a result")),
        ),
    }
    for run, (exit_code, killed_by, reason) in expected.items():
        state, (launch_of_it,) = state_of(directory, run), launches_of(directory, run)
        assert (state.status, state.reason) == ("failed", reason)
        assert (launch_of_it.exit_code, launch_of_it.signal) == (exit_code, killed_by)
        assert recorded_reason(launch_of_it) == reason


def test_what_fails_whatever_the_seed_is_not_tried_with_all_of_them(
    tmp_path: Path, behave: Callable[..., None], snapshot
) -> None:
    seeds = "seeds=[0, 1, 2, 3]"
    behave(**{f"{arm}_{seed}": "fail" for arm in ("baseline", "treatment") for seed in range(4)})
    observer = Silent()
    outcome = launch(tmp_path, seeds, jobs=1, observer=observer)
    assert list(outcome.statuses.values()) == ["failed"] * 8
    tried = [run for run in map(str, outcome.statuses) if launches_of(tmp_path / "small", run)[-1].pid]
    assert tried == ["baseline/seed-0", "treatment/seed-0", "baseline/seed-1"]
    state = state_of(tmp_path / "small", "baseline/seed-3")
    cause = "baseline/seed-0 and 2 more, of several seeds, failed in the same way at their start"
    assert state.message == f"not started: {cause}: {PLANNED_FAILURE}"
    for text in (*observer.said, state.message):
        snapshot(text)
    behave()
    assert launch(tmp_path, seeds, resume=True).exit_code == 0


def test_an_exit_code_alone_is_no_failure_in_the_same_words(
    tmp_path: Path, behave: Callable[..., None]
) -> None:
    behave(**{f"{arm}_{seed}": "silent" for arm in ("baseline", "treatment") for seed in range(2)})
    outcome = launch(tmp_path, "seeds=[0, 1, 2]", jobs=1)
    assert list(outcome.statuses.values()) == ["failed"] * 4 + ["finished"] * 2
    wordless = Code.EXIT_CODE(exit_code=7, last_line=None)
    directory, run = tmp_path / "small", "baseline/seed-0"
    assert state_of(directory, run).reason == see_log(directory, run, wordless)


@pytest.mark.parametrize(
    ("jobs", "more"), [(3, ()), (2, ("warm_start={steps: 4}", "arms.treatment.warm_start=null"))]
)
def test_what_fails_one_arm_is_tried_with_all_seeds_of_it(
    tmp_path: Path, behave: Callable[..., None], jobs: int, more: tuple[str, ...]
) -> None:
    """Some of it have failed before the other arm's first step, or before any run of that: it waits."""
    behave(step_s=0.5, **{f"treatment_{seed}": "fail" for seed in range(4)})
    outcome = launch(tmp_path, "steps=1", "seeds=[0, 1, 2, 3]", *more, jobs=jobs)
    assert list(outcome.statuses.values()) == ["finished", "failed"] * 4
    assert all(launches_of(tmp_path / "small", f"treatment/seed-{seed}")[0].pid for seed in range(4))


def test_what_fails_one_arm_leaves_runs_that_wait_to_be_started_again(
    tmp_path: Path, behave: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both baselines were killed after steps, and seen to be in one look, when all else had failed alike."""
    monkeypatch.setattr(supervisor, "POLL_S", 1.5)
    killed = {"baseline_0": "killed-later", "baseline_1": "killed-later"}
    behave(**killed, **{f"treatment_{seed}": "fail" for seed in range(3)})
    outcome = launch(tmp_path, "seeds=[0, 1, 2]", "steps=5", "limits.retries=2", jobs=4)
    assert list(outcome.statuses.values()) == ["finished", "failed"] * 3


@pytest.mark.parametrize("retries", [0, 1])
def test_a_run_that_came_further_is_started_again(
    tmp_path: Path, behave: Callable[..., None], retries: int
) -> None:
    behave(baseline_0="killed-later", baseline_1="sigkill")
    observer = Silent()
    outcome = launch(tmp_path, f"limits.retries={retries}", observer=observer)
    statuses = [outcome.statuses[run.name] for run in plan_of().runs]
    assert statuses == ["finished" if retries else "failed", "finished", "failed", "finished"]
    assert len(launches_of(tmp_path / "small", "baseline/seed-0")) == 1 + retries
    assert len(launches_of(tmp_path / "small", "baseline/seed-1")) == 1  # it had come no further
    assert [line for line in observer.said if "restarting" in line] == [
        line for line in observer.said if line.startswith("baseline/seed-0: killed by SIGKILL")
    ]


def test_a_warm_start_is_started_again_before_the_runs_that_need_it(
    tmp_path: Path, behave: Callable[..., None]
) -> None:
    behave(**{"warm-start_2147483648": "killed-later"})
    observer = Silent()
    assert launch(tmp_path, "warm_start={steps: 5}", observer=observer).exit_code == 0
    assert sum("restarting" in line for line in observer.said) == 1
    (directory,) = (tmp_path / "warm-starts").iterdir()
    rows = RunDir(directory).metrics_reader().read()
    assert [(row["step"], row["attempt"]) for row in rows] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)]


def test_a_run_whose_directory_is_removed_does_not_stop_the_others(
    tmp_path: Path, behave: Callable[..., None]
) -> None:
    behave(step_s=0.1)
    gone = tmp_path / "small" / "baseline" / "seed-0"

    def remove() -> None:
        if (gone / "metrics.jsonl").is_file():
            shutil.rmtree(gone, ignore_errors=True)  # the trainer may write meanwhile

    outcome = launch(tmp_path, "steps=8", tick=remove, jobs=4)
    statuses = [outcome.statuses[run.name] for run in plan_of().runs]
    assert outcome.exit_code == 1 and statuses == ["pending"] + ["finished"] * 3
    behave()
    assert launch(tmp_path, "steps=8", resume=True, jobs=4).exit_code == 0


def test_runs_whose_warm_start_failed_say_so(tmp_path: Path, behave: Callable[..., None]) -> None:
    behave(**{"warm-start_2147483648": "fail"})
    observer = Silent()
    outcome = launch(tmp_path, "warm_start={steps: 2}", "arms.cold={warm_start: null}", observer=observer)
    assert outcome.statuses[RunName(arm="cold", seed=0)] == "finished"
    assert outcome.statuses[RunName(arm="baseline", seed=0)] == "failed"
    assert launches_of(tmp_path / "small", "baseline/seed-0")[-1].pid is None
    (made,) = (tmp_path / "warm-starts").iterdir()
    cause = f"the warm start in {made} failed"
    state = state_of(tmp_path / "small", "baseline/seed-0")
    assert state.message == f"not started: {cause}: {PLANNED_FAILURE}"
    assert len(observer.said) == 1 and cause in observer.said[0]
    behave()
    assert (
        launch(tmp_path, "warm_start={steps: 2}", "arms.cold={warm_start: null}", resume=True).exit_code == 0
    )


def test_gpus_are_assigned_and_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behave: Callable[..., None], snapshot: Snapshot
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    behave(step_s=0.1)
    assert launch(tmp_path, "cluster={gpus_per_node: 1}").exit_code == 0
    runs = [launches_of(tmp_path / "small", str(run.name))[0] for run in plan_of().runs]
    assert [run.devices for run in runs[:3]] == [("4",), ("5",), ("6",)]
    assert runs[3].started_s >= min(ended(run) for run in runs[:3])
    assert "CUDA_VISIBLE_DEVICES='5'" in (tmp_path / "small" / "treatment/seed-0/stdout.log").read_text()
    with snapshot.refused(LaunchError):
        launch(tmp_path, "cluster={gpus_per_node: 2}", name="two", jobs=2)


def test_an_unwritable_place_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for runs_dir in (tmp_path / "file" / "runs", Path("/proc/abrun")):
        with pytest.raises(StoreError, match="cannot be written") as caught:
            launch(runs_dir)
        assert len(str(caught.value).splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# Imports neither this module nor torch: a launcher needs neither.
LAUNCH = """
import json, resource, signal, sys
from pathlib import Path
import pytest
sys.path.insert(0, str(Path(sys.argv[1]).parent.parent.parent))
from abrun.errors import AbrunError
from abrun.experiment.plan import make_plan
from abrun.launch import supervisor
from abrun.recipe.experiment import load_recipe
from abrun.recipe.implementations import LOCAL_LAUNCHERS
from tests.installed import see_trainer_installed
from tests.launch.fakes import FAKE, FRESH_FAKES, Silent, run_to_end
see_trainer_installed(pytest.MonkeyPatch())
options = json.loads(sys.argv[3])
if "limit" in options:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (options["limit"],) * 2)
LOCAL_LAUNCHERS["fake"] = FRESH_FAKES if options.get("fresh") else FAKE[1]
try:
    recipe = load_recipe(Path(sys.argv[1]).with_name("small.yaml"), options.get("set", []))
    outcome = run_to_end(
        make_plan(recipe), Path(sys.argv[2]), launcher="fake", jobs=4, resume=options.get("resume", False),
        grace_s=options.get("grace_s", 10), observer=Silent(lambda: print("tick", flush=True)),
    )
except AbrunError as error:
    print(error)
    sys.exit(2)
sys.exit(outcome.exit_code)
"""


def start(runs_dir: Path, **options: Any) -> subprocess.Popen[str]:
    """A launcher in a process of its own, to be signalled."""
    arguments = [__file__, str(runs_dir), json.dumps(options)]
    return subprocess.Popen([sys.executable, "-c", LAUNCH, *arguments], stdout=subprocess.PIPE, text=True)


def steps(runs_dir: Path, run: str) -> int:
    return len(read_json_lines(runs_dir / "small" / run / "metrics.jsonl"))


def test_a_full_disk_before_the_start_leaves_nothing(tmp_path: Path) -> None:
    """No file may grow beyond the limit: experiment.json cannot be written."""
    launcher = start(tmp_path / "runs", limit=600)
    said, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 2 and said.count("\n") == 1 and "cannot be written: File too large" in said
    assert list(tmp_path.iterdir()) == []


def no_space_for(monkeypatch: pytest.MonkeyPatch, refused: Callable[[Path], bool]) -> None:
    write_json = files.write_json

    def write(path: Path, content: dict[str, Any]) -> None:
        if refused(path):
            raise StoreError(f"{path}: cannot be written: No space left on device")
        write_json(path, content)

    for module in (launches, files):
        monkeypatch.setattr(module, "write_json", write)


def test_a_disk_that_fills_up_while_preparing_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_space_for(monkeypatch, lambda path: path.parent.name == "seed-1")
    with pytest.raises(StoreError, match="No space left"):
        launch(tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_later_leaves_no_process_and_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behave: Callable[..., None]
) -> None:
    behave(step_s=0.05)
    with monkeypatch.context() as patch:
        no_space_for(patch, lambda path: path.match("treatment/seed-0/launch.json"))
        observer = Silent()
        assert launch(tmp_path, "steps=20", jobs=4, observer=observer).exit_code == 1
    assert any("treatment/seed-0: " in line and "No space left" in line for line in observer.said)
    assert state_of(tmp_path / "small", "baseline/seed-0").status == "finished"
    assert not at_work(tmp_path)
    assert launch(tmp_path, "steps=20", jobs=4, resume=True).exit_code == 0


def test_a_run_that_could_not_be_noted_gives_its_place_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = supervisor.update_launch

    def full(run: RunDir, **values: Any) -> None:
        if "pid" in values and run.path.match("baseline/seed-0"):
            raise StoreError("no space")
        update(run, **values)

    monkeypatch.setattr(supervisor, "update_launch", full)
    outcome = launch(tmp_path, jobs=1)
    assert sorted(outcome.statuses.values()) == ["failed", "finished", "finished", "finished"]


def test_an_observer_that_cannot_print_stops_nothing(tmp_path: Path, behave: Callable[..., None]) -> None:
    class OutputFull(Silent):
        def say(self, line: str) -> None:
            raise OSError(errno.ENOSPC, "No space left")

    def tick() -> None:
        if steps(tmp_path, "baseline/seed-0"):
            raise OSError(errno.ENOSPC, "No space left")

    behave(step_s=0.05)
    assert launch(tmp_path, "steps=20", jobs=1, observer=OutputFull(tick)).exit_code == 0
    assert not at_work(tmp_path)


# --- stopping and resuming ---


@pytest.mark.usefixtures("heard_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=SLOW)])
def test_a_signal_stops_everything_cleanly_and_resume_continues(
    tmp_path: Path, behave: Callable[..., None], number: signal.Signals
) -> None:
    behave(step_s=0.05)
    launcher = start(tmp_path, set=["steps=40", "seeds=[0, 1, 2]"])
    until(lambda: all(steps(tmp_path, run) > 2 for run in ("baseline/seed-0", "treatment/seed-1")))
    launcher.send_signal(number)
    launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + number
    for run in ("baseline/seed-0", "treatment/seed-1"):
        assert state_of(tmp_path / "small", run).status == "interrupted"
        assert ended(launches_of(tmp_path / "small", run)[0])
        assert RunDir(tmp_path / "small" / run).events()[-1]["event"] == "interrupted"
    assert state_of(tmp_path / "small", "baseline/seed-2").status == "pending"
    before = steps(tmp_path, "baseline/seed-0")
    behave()
    outcome = launch(tmp_path, "steps=40", "seeds=[0, 1, 2]", resume=True, jobs=4)
    assert outcome.exit_code == 0
    assert len(launches_of(tmp_path / "small", "baseline/seed-0")) == 2
    reward = RunDir(tmp_path / "small" / "baseline/seed-0").metrics()["train/reward"]
    assert reward.steps.tolist() == list(range(1, 41))
    rows = read_json_lines(tmp_path / "small" / "baseline/seed-0/metrics.jsonl")
    assert [row["attempt"] for row in rows].count(1) == before
    # What is finished is left alone
    assert launch(tmp_path, "steps=40", "seeds=[0, 1, 2]", resume=True).exit_code == 0
    assert len(launches_of(tmp_path / "small", "baseline/seed-0")) == 2


def test_what_does_not_listen_is_killed(tmp_path: Path, behave: Callable[..., None]) -> None:
    behave(step_s=0.05, baseline_0="deaf")
    launcher = start(tmp_path, set=["steps=40000"], grace_s=0.5)
    until(lambda: steps(tmp_path, "baseline/seed-0") > 2)
    launcher.terminate()
    launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert state_of(tmp_path / "small", "baseline/seed-0").status == "interrupted"
    assert launches_of(tmp_path / "small", "baseline/seed-0")[0].signal == "SIGKILL"
    assert not at_work(tmp_path)


@pytest.mark.usefixtures("heard_signals")
def test_a_second_signal_does_not_wait(tmp_path: Path, behave: Callable[..., None]) -> None:
    behave(step_s=0.05, baseline_0="deaf")
    launcher = start(tmp_path, set=["steps=40000"], grace_s=300)
    until(lambda: steps(tmp_path, "baseline/seed-0") > 2)
    launcher.send_signal(signal.SIGINT)
    launcher.send_signal(signal.SIGINT)  # of a shaky hand
    until(lambda: state_of(tmp_path / "small", "treatment/seed-0").status == "interrupted")
    time.sleep(2)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=60)
    assert launcher.returncode == 130


def test_a_killed_launcher_takes_its_runs_along_and_nothing_is_run_twice(
    tmp_path: Path, behave: Callable[..., None]
) -> None:
    behave(step_s=0.05)
    launcher = start(tmp_path, set=["steps=400"], fresh=True)
    until(lambda: steps(tmp_path, "treatment/seed-1") > 2)
    with pytest.raises(StoreError, match=f"process {launcher.pid} on .* is already launching this; wait"):
        launch(tmp_path, "steps=400", resume=True)
    launcher.kill()
    launcher.communicate()
    behave()
    assert launch(tmp_path, "steps=400", resume=True, jobs=4).exit_code == 0
    for run in plan_of().runs:
        reward = RunDir(tmp_path / "small" / str(run.name)).metrics()["train/reward"]
        assert reward.steps.tolist() == list(range(1, 401))


@pytest.mark.slow
def test_a_deaf_run_of_a_killed_launcher_is_killed_before_it_runs_again(
    tmp_path: Path, behave: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "ORPHAN_GRACE_S", 0.5)
    behave(step_s=0.05, baseline_0="deaf")
    launcher = start(tmp_path, set=["steps=4000"])
    until(lambda: steps(tmp_path, "baseline/seed-0") > 2)
    launcher.kill()
    launcher.communicate()
    behave()
    observer = Silent()
    assert launch(tmp_path, "steps=4000", resume=True, jobs=4, observer=observer).exit_code == 0
    assert any(line.startswith("baseline/seed-0: processes of") for line in observer.said)


def test_what_cannot_be_killed_fails_one_run_and_not_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_another_user = Process(os.getpid())

    def at_work_there(run_dir: Path) -> set[Process]:
        return {of_another_user} if run_dir.match("baseline/seed-0") else set()

    monkeypatch.setattr(queue, "ORPHAN_GRACE_S", 0.1)
    monkeypatch.setattr(queue, "find_run_processes", at_work_there)
    monkeypatch.setattr(queue, "kill_all", lambda find: find())
    observer = Silent()
    outcome = launch(tmp_path, jobs=4, observer=observer)
    assert sorted(outcome.statuses.values()) == ["failed", "finished", "finished", "finished"]
    assert any(line.startswith("baseline/seed-0: ") and f"({os.getpid()})" in line for line in observer.said)


def test_resume_takes_added_seeds_arms_and_reruns(tmp_path: Path) -> None:
    launch(tmp_path)
    declared = open_experiment(tmp_path / "small")["compare_sha256"]
    more = ["seeds=[0, 1, 2]", "arms.other.steps=2", "controls.aa_reruns=1"]
    outcome = launch(
        tmp_path, *more, "compare.claims=[{metric: train/reward, margin: 9}]", resume=True, jobs=4
    )
    assert outcome.exit_code == 0 and len(outcome.statuses) == 10
    assert len(launches_of(tmp_path / "small", "baseline/seed-0")) == 1
    assert planned_runs(tmp_path / "small") == list(outcome.statuses)
    # The comparison was declared at the first launch; what comes later must show as post hoc.
    assert open_experiment(tmp_path / "small")["compare_sha256"] == declared


def test_a_launch_names_packages_in_untested_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = {"torch": "99.0", "transformers": "5.5.3", "triton": "3.5", "liger-kernel": "0.1"}
    monkeypatch.setattr(checks, "installed_packages", lambda: installed)
    observer = Silent()
    assert launch(tmp_path, "seeds=[0, 1]", observer=observer).exit_code == 0
    # not of a package that no run imports
    assert [line.partition(":")[0] for line in observer.said] == ["torch 99.0", "triton 3.5"]


def test_a_finished_run_that_lost_rows_is_repaired(tmp_path: Path) -> None:
    launch(tmp_path)
    run = RunDir(tmp_path / "small" / "treatment" / "seed-0")
    first, *_ = (run.path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run.path / "metrics.jsonl").write_bytes(first)
    assert launch(tmp_path, resume=True).exit_code == 0
    assert run.metrics()["train/reward"].steps.tolist() == [1, 2, 3]
    assert [row["event"] for row in run.events()] == ["started", "finished", "repair", "resumed", "finished"]
    assert len(launches_of(tmp_path / "small", "treatment/seed-0")) == 2
    assert len(launches_of(tmp_path / "small", "baseline/seed-0")) == 1


def test_resume_adds_no_run_that_starts_from_other_weights_than_its_arm(tmp_path: Path) -> None:
    launch(tmp_path, "warm_start={steps: 2}")
    experiment_dir = tmp_path / "small"
    for run in ("treatment/seed-0", "treatment/seed-1"):  # as a version made it that hashed otherwise
        path = experiment_dir / run / "config.json"
        config = read_json(path)
        files.write_json(path, {**config, "initial_weights": "../../../warm-starts/before/checkpoints/final"})
    assert launch(tmp_path, "warm_start={steps: 2}", resume=True).exit_code == 0
    shutil.rmtree(experiment_dir / "treatment" / "seed-1")
    with pytest.raises(LaunchError, match="the other runs of its arm started from before"):
        launch(tmp_path, "warm_start={steps: 2}", resume=True)
    assert not (experiment_dir / "treatment" / "seed-1").exists()


@pytest.mark.parametrize(
    "override", ["steps=4", "arms.treatment.policy.logprobs.chunk_size=7", "seeds=[0, 2]"]
)
def test_resume_refuses_another_experiment(tmp_path: Path, override: str, snapshot: Snapshot) -> None:
    launch(tmp_path)
    before = read_json(tmp_path / "small" / "experiment.json")
    with snapshot.refused(LaunchError):
        launch(tmp_path, override, resume=True)
    assert read_json(tmp_path / "small" / "experiment.json") == before


def test_what_is_there_already_is_refused_without_resume(tmp_path: Path) -> None:
    launch(tmp_path)
    with pytest.raises(
        LaunchError,
        match=r"already exists here \(4 of 4 runs finished\); continue .* --resume, or .* --name",
    ):
        launch(tmp_path)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("")
    with pytest.raises(
        LaunchError, match="photos: is not empty and not an experiment; choose another --name"
    ):
        launch(tmp_path, name="photos")
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["cat.jpg"]
    with pytest.raises(StoreError, match="typo: there is nothing to resume; leave out --resume"):
        launch(tmp_path, name="typo", resume=True)
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize(
    "names", [[".experiment.json.7.partial"], [".reference.json.7.partial", "reference.json"]]
)
def test_a_launcher_killed_before_its_experiment_was_written_leaves_the_name_free(
    tmp_path: Path, names: list[str]
) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / LOCK).write_text('{"pid": 1')
    for name in names:
        (tmp_path / "small" / name).write_text("{")
    assert launch(tmp_path).exit_code == 0


def test_a_launcher_that_is_taken_over_stops_its_runs_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behave: Callable[..., None]
) -> None:
    monkeypatch.setattr(lock, "FIRST_REFRESH_S", 0.02)
    monkeypatch.setattr(lock, "REFRESH_EVERY_S", 0.02)
    behave(step_s=0.05)

    def take_over() -> None:
        if steps(tmp_path, "baseline/seed-0") > 2:
            other = {"pid": 7, "host": "elsewhere", "boot_id": "another", "token": "theirs"}
            (tmp_path / "small" / LOCK).write_text(json.dumps(other))

    with pytest.raises(TakenOverError, match="process 7 on host elsewhere has taken over"):
        launch(tmp_path, "steps=400", tick=take_over, jobs=1)
    assert not at_work(tmp_path)
    assert state_of(tmp_path / "small", "baseline/seed-0").status == "interrupted"
    assert describe_launcher(tmp_path / "small") == "process 7 on host elsewhere"
    observer = Silent()
    behave()
    assert launch(tmp_path, "steps=400", resume=True, take_over=True, observer=observer).exit_code == 0
    assert observer.said[0] == "took over the lock of process 7 on host elsewhere (--take-over)"


@pytest.mark.parametrize("name", ["", "../up", "a/b", "warm-starts", ".hidden", "a b"])
def test_names_that_are_no_folder_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(LaunchError, match="--name: got"):
        launch(tmp_path, name=name)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("launch.json", "{"),
        pytest.param("heartbeat.json", '{"step": "x"}', marks=SLOW),
        pytest.param("attempts/0001.json", "[]", marks=SLOW),
    ],
)
def test_notes_that_do_not_read_are_written_anew(tmp_path: Path, name: str, content: str) -> None:
    launch(tmp_path)
    run = RunDir(tmp_path / "small" / "baseline" / "seed-0")
    (run.path / "result.json").unlink()
    (run.path / name).write_text(content)
    assert launch(tmp_path, resume=True).exit_code == 0


def test_a_repair_that_cannot_be_made_fails_one_run(tmp_path: Path) -> None:
    launch(tmp_path)
    run = RunDir(tmp_path / "small" / "treatment" / "seed-0")
    (run.path / "metrics.jsonl").write_bytes(b"")
    (run.path / "events.jsonl").unlink()
    (run.path / "events.jsonl").mkdir()
    outcome = launch(tmp_path, resume=True)
    assert outcome.exit_code == 1 and outcome.statuses[RunName(arm="treatment", seed=0)] == "failed"
    assert list(outcome.statuses.values()).count("finished") == 3


def test_limits_may_change_between_launches(tmp_path: Path) -> None:
    """What ended a run must not be what it can never get rid of; nor does it make another warm start."""
    launch(tmp_path, "warm_start={steps: 2}", "limits.run_s=5")
    run = RunDir(tmp_path / "small" / "treatment" / "seed-0")
    (run.path / "result.json").unlink()
    assert launch(tmp_path, "warm_start={steps: 2}", "limits.run_s=50", resume=True).exit_code == 0
    assert run.record().config["limits"]["run_s"] == 50
    assert len(list((tmp_path / "warm-starts").iterdir())) == 1


# --- the real agent ---


def test_an_agent_passes_signals_on_and_reports_the_rank(
    tmp_path: Path, behave: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOCAL_LAUNCHERS, "fake", "tests.launch.fakes:FakesUnderAgent")
    behave(step_s=0.1, baseline_0="sigkill")
    sent: list[int] = []

    def tick() -> None:
        killed = read_run_state(tmp_path / "small", RunName(arm="baseline", seed=0)).status == "failed"
        if not sent and killed and steps(tmp_path, "treatment/seed-0") > 3:
            sent.append(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)

    outcome = launch(tmp_path, "steps=1000", "seeds=[0, 1]", "compare.claims=[]", jobs=2, tick=tick)
    assert outcome.stopped_by == signal.SIGTERM
    (failed,) = launches_of(tmp_path / "small", "baseline/seed-0")
    assert (failed.exit_code, failed.signal) == (None, "SIGKILL")
    assert state_of(tmp_path / "small", "treatment/seed-0").status == "interrupted"
    assert read_json_lines(tmp_path / "small/treatment/seed-0/events.jsonl")[-1]["event"] == "interrupted"


# --- runs of foreign trainers ---


def test_a_foreign_run_gets_its_devices_and_keeps_the_user_s_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    own: Any = {"trainer": {}, "algorithm": {"type": "grpo"}, "model": {"preset": "qwen2-tiny"}, "steps": 1}
    own = parse_stored_run(own | {"task": {"type": "arithmetic"}})
    metrics = {"format": "csv", "path": "{run_dir}/metrics.csv"}
    foreign = parse_stored_run(
        {"trainer": {"type": "command", "argv": ["x"], "metrics": metrics}, "steps": 1}
    )
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert run_environment(Path("run"), ["cpu", "cpu"], own)["OMP_NUM_THREADS"] == "1"
    assert run_environment(Path("run"), ["cpu", "cpu"], foreign)["OMP_NUM_THREADS"] == "2"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert run_environment(Path("run"), ["cpu", "cpu"], foreign)["OMP_NUM_THREADS"] == "7"
    on_gpus = run_environment(Path("run"), ["2", "3"], foreign)
    assert on_gpus["CUDA_VISIBLE_DEVICES"] == "2,3" and on_gpus["OMP_NUM_THREADS"] == "7"


def test_a_run_of_our_own_gets_the_variables_of_its_recipe() -> None:
    recipe = load_recipe(SMALL, ["trainer.env={SOME_SWITCH: on-, OMP_NUM_THREADS: '5'}"])
    found = run_environment(Path("run"), ["cpu"], recipe.run_config("baseline"))
    assert found["SOME_SWITCH"] == "on-"
    assert found["OMP_NUM_THREADS"] == "1"  # a rank on CPU cores has one thread, whatever a recipe says
    assert run_environment(Path("run"), ["0"], recipe.run_config("baseline"))["OMP_NUM_THREADS"] == "5"


@pytest.mark.parametrize(("asked_after_s", "expected"), [(1.0, "failed"), (-1.0, "interrupted")])
def test_what_failed_before_it_was_asked_to_stop_has_failed(
    asked_after_s: float, expected: str, tmp_path: Path
) -> None:
    """Between the word of a run and its end lie seconds in which Ctrl-C may come."""
    run = make_run(tmp_path / "run", run_config())
    run_dir = RunDir(run)
    begin_launch(run_dir, (), None)
    failure = Code.EXIT_CODE(exit_code=2, last_line="no engine")
    begin_attempt(run_dir).fail(failure, exit_code=2)
    job = queue.LaunchJob(label="run", run=run_dir, config=run_config())
    job.is_stopping, job.stop_requested_s = True, (run_dir.attempt().ended_s or 0) + asked_after_s
    reason = failure if expected == "failed" else Code.STOPPED_BY_SIGNAL()
    assert supervisor._determine_ending(job, -signal.SIGTERM) == (expected, reason)


def test_of_several_errors_those_that_tell_of_a_cause_come_first(tmp_path: Path) -> None:
    """Of what is printed beside notes, reasons count, of a node that does not see the run directory."""
    run = RunDir(make_run(tmp_path / "run", run_config()))
    begin_launch(run, (), None)
    lost = Code.RANKS_LOST(waited_s=9.0, doing="logprobs", error="timed out")
    effect = Code.EXCEPTION(kind="LaunchError", error=lost, origin=None)
    killed = Code.OUT_OF_MEMORY_KILLED(signal="SIGKILL", exit_code=None)
    for rank, cause in enumerate((effect, killed)):
        reason = Code.RANK_FAILED(rank=rank, num_ranks=2, host=f"n{rank}", cause=cause)
        write_ending(run, f"node-{rank:04d}", 0, reason)
    first, second = read_endings(run, 0, "")
    unseen = Code.FOREIGN_TEXT(text="x: exists on n0, but not on n2")
    lines = f"error: rank 7 of 9: killed by SIGKILL\n{json.dumps(encode_reasons(unseen))}\n"
    printed = f"{lines}slurmstepd: error: Detected 1 oom_kill event in StepId=7.0\n"
    run.log.write_text(printed)
    job = queue.LaunchJob(label="run", run=run, config=run_config())
    status, reason = supervisor._determine_ending(job, 1)
    errors = [second, unseen, first]
    several = Code.SEVERAL_ERRORS(errors=errors, out_of_memory=False)  # that is told already
    assert (status, reason) == ("failed", Code.SEE_LOG(ending=several, log=run.log))
