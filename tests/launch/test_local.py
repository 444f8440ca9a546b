"""The local launcher, with a fake trainer that speaks the trainer's protocol (and once under torchrun)."""

import itertools
import json
import os
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

from abrun import store
from abrun.errors import AbrunError, LaunchError, StoreError
from abrun.launch import local
from abrun.launch.processes import descendants
from abrun.plan import Plan, RunName, make_plan
from abrun.recipe import load_recipe

SMALL = Path(__file__).parent / "small.yaml"
FAKE_TRAINER = Path(__file__).parent / "fake_trainer.py"


def plan_of(*overrides: str) -> Plan:
    return make_plan(load_recipe(SMALL, overrides))


def fake(directory: Path, num_ranks: int) -> list[str]:
    return [sys.executable, str(FAKE_TRAINER), str(directory)]


def launch(runs_dir: Path, *overrides: str, **options: Any) -> local.Outcome:
    return local.launch(plan_of(*overrides), runs_dir, command=fake, say=lambda line: None, **options)


def meta_of(runs_dir: Path, run: str) -> dict[str, Any]:
    return store.read_json(runs_dir / run / "meta.json")


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "POLL_S", 0.02)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("FAKE_TRAINER", raising=False)


@pytest.fixture
def behave(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def set_behaviour(step_s: float = 0.0, **runs: str) -> None:
        """`treatment_0="fail"`: what the fake trainer does in which run."""
        named = {"/seed-".join(run.split("_")): what for run, what in runs.items()}
        monkeypatch.setenv("FAKE_TRAINER", json.dumps({"step_s": step_s, "runs": named}))

    return set_behaviour


# --- a launch that goes well ---


def test_every_run_is_done_in_order_and_recorded(tmp_path: Path) -> None:
    outcome = launch(tmp_path, jobs=1)
    assert outcome.exit_code == 0 and outcome.stopped_by is None
    names = [str(name) for name in outcome.statuses]
    assert names == ["baseline/seed-0", "treatment/seed-0", "baseline/seed-1", "treatment/seed-1"]
    assert set(outcome.statuses.values()) == {"finished"}
    attempts = [meta_of(tmp_path / "small", name)["attempts"] for name in names]
    assert [len(each) for each in attempts] == [1, 1, 1, 1]
    ((first,), *_) = attempts
    assert first["exit_code"] == 0 and first["signal"] is None and first["devices"] == ["cpu"]
    assert first["host"] == socket.gethostname() and first["started_s"] < first["ended_s"]
    # One at a time, in launch order
    assert all(a[0]["ended_s"] <= b[0]["started_s"] for a, b in itertools.pairwise(attempts))
    git = meta_of(tmp_path / "small", names[0])["git"]
    assert git is None or set(git) == {"sha", "dirty", "diff"}
    assert "CUDA_VISIBLE_DEVICES=''" in (tmp_path / "small" / names[0] / "stdout.log").read_text()


def test_the_experiment_is_described_as_agreed(tmp_path: Path) -> None:
    launch(tmp_path, name="mine")
    experiment = store.open_experiment(tmp_path / "mine")
    plan = plan_of()
    assert experiment["experiment"] == "mine"
    assert experiment["recipe"] == plan.recipe.model_dump(mode="json")
    assert experiment["runs"][1] == {"arm": "treatment", "seed": 0, "rerun": 0}
    assert experiment["treatment_diff"] == {"treatment": {"policy.logprobs.impl": ["logits", "chunked"]}}
    config = store.read_json(tmp_path / "mine" / "treatment" / "seed-1" / "config.json")
    assert config.pop("config") == plan.runs[1].config.model_dump(mode="json")
    described = {"schema_version": 1, "experiment": "mine", "arm": "treatment", "seed": 1, "rerun": 0}
    assert config == {**described, "initial_weights": None}


def test_slots_run_in_parallel(tmp_path: Path, behave: Callable[..., None]) -> None:
    behave(step_s=0.15)
    assert launch(tmp_path, jobs=4).exit_code == 0
    attempts = [meta_of(tmp_path / "small", str(run.name))["attempts"][0] for run in plan_of().runs]
    assert max(each["started_s"] for each in attempts) < min(each["ended_s"] for each in attempts)


def test_a_warm_start_comes_first_is_shared_and_is_cached(tmp_path: Path) -> None:
    warm = ("warm_start={steps: 2}", "arms.cold={warm_start: null}")
    assert launch(tmp_path, *warm).exit_code == 0
    (directory,) = (tmp_path / "warm-starts").iterdir()
    made = meta_of(directory, ".")["attempts"]
    described = store.read_json(directory / "config.json")
    assert (described["arm"], described["seed"], described["initial_weights"]) == ("warm-start", 0, None)
    assert described["config"]["algorithm"]["type"] == "sft"
    for run in ("baseline/seed-0", "treatment/seed-1"):
        config = store.read_json(tmp_path / "small" / run / "config.json")
        expected = directory / "checkpoints" / "final"
        assert (tmp_path / "small" / run / config["initial_weights"]).resolve() == expected.resolve()
        assert meta_of(tmp_path / "small", run)["attempts"][0]["started_s"] >= made[0]["ended_s"]
    assert store.read_json(tmp_path / "small" / "cold" / "seed-0" / "config.json")["initial_weights"] is None
    assert launch(tmp_path, *warm, name="again").exit_code == 0
    assert meta_of(directory, ".")["attempts"] == made


def test_two_experiments_make_a_warm_start_once(tmp_path: Path, behave: Callable[..., None]) -> None:
    behave(step_s=0.2)
    outcomes = []
    said: list[str] = []

    def one(name: str) -> None:
        plan = plan_of("warm_start={steps: 4}", "steps=1")
        outcomes.append(local.launch(plan, tmp_path, name=name, jobs=4, command=fake, say=said.append))

    threads = [threading.Thread(target=one, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [outcome.exit_code for outcome in outcomes] == [0, 0]
    (directory,) = (tmp_path / "warm-starts").iterdir()
    assert len(meta_of(directory, ".")["attempts"]) == 1
    assert len(said) == 1 and "another launcher makes it now" in said[0]


# --- failures ---


def test_a_failed_run_does_not_stop_the_others(tmp_path: Path, behave: Callable[..., None]) -> None:
    behave(baseline_0="fail", treatment_0="crash", baseline_1="sigkill", treatment_1="no-result")
    outcome = launch(tmp_path, "seeds=[0, 1, 2]")
    assert outcome.exit_code == 1
    assert list(outcome.statuses.values()) == ["failed"] * 4 + ["finished"] * 2
    log = tmp_path / "small"
    expected = {
        "baseline/seed-0": (3, None, "the planned failure"),
        "treatment/seed-0": (1, None, f"exit code 1 (ValueError: the planned crash); see {log}/treatment"),
        "baseline/seed-1": (None, "SIGKILL", "killed by SIGKILL: was the machine out of memory?"),
        "treatment/seed-1": (0, None, "ended without a result.json"),
    }
    for run, (exit_code, killed_by, message) in expected.items():
        meta = meta_of(tmp_path / "small", run)
        assert meta["status"] == "failed" and meta["message"].startswith(message)
        assert (meta["attempts"][0]["exit_code"], meta["attempts"][0]["signal"]) == (exit_code, killed_by)


def test_runs_whose_warm_start_failed_say_so(tmp_path: Path, behave: Callable[..., None]) -> None:
    behave(**{"warm-start_0": "fail"})
    outcome = launch(tmp_path, "warm_start={steps: 2}", "arms.cold={warm_start: null}")
    assert outcome.statuses[RunName(arm="cold", seed=0)] == "finished"
    assert outcome.statuses[RunName(arm="baseline", seed=0)] == "failed"
    meta = meta_of(tmp_path / "small", "baseline/seed-0")
    assert meta["attempts"] == [] and meta["message"].endswith("failed: the planned failure")
    behave()
    assert (
        launch(tmp_path, "warm_start={steps: 2}", "arms.cold={warm_start: null}", resume=True).exit_code == 0
    )


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "cluster={cpu_ranks: 512}",
            ["arms baseline, treatment", "cluster.cpu_ranks: got 512 ranks", "usable CPU core"],
        ),
        ("cluster={gpus_per_node: 8}", ["cluster.gpus_per_node: got 8 ranks", "no visible GPUs"]),
        ("cluster={nodes: 2}", ["cluster.nodes: got 2", "one machine"]),
        ("arms.treatment.cluster={nodes: 2}", ["arm treatment", "cluster.nodes: got 2"]),
    ],
)
def test_more_than_the_machine_has_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, words: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(LaunchError) as caught:
        launch(tmp_path / "runs", "algorithm.prompts_per_step=1024", override)
    assert all(word in str(caught.value) for word in words), caught.value
    assert list(tmp_path.iterdir()) == []


def test_gpus_are_assigned_and_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behave: Callable[..., None]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    behave(step_s=0.1)
    assert launch(tmp_path, "cluster={gpus_per_node: 1}").exit_code == 0
    runs = [meta_of(tmp_path / "small", str(run.name))["attempts"][0] for run in plan_of().runs]
    assert [run["devices"] for run in runs[:3]] == [["4"], ["5"], ["6"]]
    assert runs[3]["started_s"] >= min(run["ended_s"] for run in runs[:3])
    assert "CUDA_VISIBLE_DEVICES='5'" in (tmp_path / "small" / "treatment/seed-0/stdout.log").read_text()
    with pytest.raises(
        LaunchError, match=r"--jobs: got 2 runs at once of 2 GPUs each; .* has 3: use at most 1"
    ):
        launch(tmp_path, "cluster={gpus_per_node: 2}", name="two", jobs=2)


def test_an_unwritable_place_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for runs_dir in (tmp_path / "file" / "runs", Path("/proc/abrun")):
        with pytest.raises(StoreError, match="cannot be written") as caught:
            launch(runs_dir)
        assert len(str(caught.value).splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


LAUNCH = """
import json, resource, signal, sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[1]).parent.parent.parent))
from tests.launch import test_local
options = json.loads(sys.argv[3])
if "limit" in options:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (options["limit"],) * 2)
test_local.local.POLL_S = 0.02
try:
    outcome = test_local.launch(
        Path(sys.argv[2]), *options.get("set", []), jobs=4, resume=options.get("resume", False),
        grace_s=options.get("grace_s", 10), tick=lambda: print("tick", flush=True),
    )
except test_local.AbrunError as error:
    print(error)
    sys.exit(2)
sys.exit(outcome.exit_code)
"""


def start(runs_dir: Path, **options: Any) -> subprocess.Popen[str]:
    """A launcher in a process of its own, to be signalled."""
    arguments = [__file__, str(runs_dir), json.dumps(options)]
    return subprocess.Popen([sys.executable, "-c", LAUNCH, *arguments], stdout=subprocess.PIPE, text=True)


def until(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def steps(runs_dir: Path, run: str) -> int:
    return len(store.read_lines(runs_dir / "small" / run / "metrics.jsonl"))


@pytest.mark.parametrize("limit", [10, 400])
def test_a_full_disk_before_the_start_leaves_nothing(tmp_path: Path, limit: int) -> None:
    """No file may grow beyond `limit`: the lock, or experiment.json, cannot be written."""
    launcher = start(tmp_path / "runs", limit=limit)
    said, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 2 and said.count("\n") == 1 and "cannot be written: File too large" in said
    assert list(tmp_path.iterdir()) == []


def no_space_for(monkeypatch: pytest.MonkeyPatch, refused: Callable[[Path], bool]) -> None:
    write_json = store.write_json

    def write(path: Path, content: dict[str, Any]) -> None:
        if refused(path):
            raise StoreError(f"{path}: cannot be written: No space left on device")
        write_json(path, content)

    monkeypatch.setattr(store, "write_json", write)


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
        no_space_for(patch, lambda path: path.match("treatment/seed-0/meta.json"))
        with pytest.raises(StoreError, match="No space left"):
            launch(tmp_path, "steps=200", jobs=4)
    (attempt,) = meta_of(tmp_path / "small", "baseline/seed-0")["attempts"]
    assert not descendants(attempt["pid"])
    behave()
    assert launch(tmp_path, "steps=200", jobs=4, resume=True).exit_code == 0


# --- stopping and resuming ---


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything_cleanly_and_resume_continues(
    tmp_path: Path, behave: Callable[..., None], number: signal.Signals
) -> None:
    behave(step_s=0.05)
    launcher = start(tmp_path, set=["steps=40", "seeds=[0, 1, 2]"])
    until(lambda: steps(tmp_path, "treatment/seed-1") > 2)
    launcher.send_signal(number)
    launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + number
    for run in ("baseline/seed-0", "treatment/seed-1"):
        meta = meta_of(tmp_path / "small", run)
        assert meta["status"] == "interrupted" and meta["attempts"][0]["ended_s"]
        assert store.read_lines(tmp_path / "small" / run / "events.jsonl")[-1]["event"] == "interrupted"
    assert not (tmp_path / "small" / "baseline/seed-2/meta.json").exists()
    before = steps(tmp_path, "baseline/seed-0")
    behave()
    outcome = launch(tmp_path, "steps=40", "seeds=[0, 1, 2]", resume=True, jobs=4)
    assert outcome.exit_code == 0
    assert len(meta_of(tmp_path / "small", "baseline/seed-0")["attempts"]) == 2
    reward = store.read_metrics(tmp_path / "small" / "baseline/seed-0")["train/reward"]
    assert reward.steps.tolist() == list(range(1, 41))
    rows = store.read_lines(tmp_path / "small" / "baseline/seed-0/metrics.jsonl")
    assert [row["attempt"] for row in rows].count(1) == before
    # What is finished is left alone
    assert launch(tmp_path, "steps=40", "seeds=[0, 1, 2]", resume=True).exit_code == 0
    assert len(meta_of(tmp_path / "small", "baseline/seed-0")["attempts"]) == 2


def test_what_does_not_listen_is_killed(tmp_path: Path, behave: Callable[..., None]) -> None:
    behave(step_s=0.05, baseline_0="deaf")
    launcher = start(tmp_path, set=["steps=40000"], grace_s=0.5)
    until(lambda: steps(tmp_path, "baseline/seed-0") > 2)
    pid = meta_of(tmp_path / "small", "baseline/seed-0")["attempts"][0]["pid"]
    launcher.terminate()
    launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGTERM
    meta = meta_of(tmp_path / "small", "baseline/seed-0")
    assert (meta["status"], meta["attempts"][0]["signal"]) == ("interrupted", "SIGKILL")
    assert not descendants(pid)


def test_a_second_signal_does_not_wait(tmp_path: Path, behave: Callable[..., None]) -> None:
    behave(step_s=0.05, baseline_0="deaf")
    launcher = start(tmp_path, set=["steps=40000"], grace_s=300)
    until(lambda: steps(tmp_path, "baseline/seed-0") > 2)
    launcher.send_signal(signal.SIGINT)
    until(lambda: meta_of(tmp_path / "small", "treatment/seed-0")["status"] == "interrupted")
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=60)
    assert launcher.returncode == 130


def test_a_killed_launcher_leaves_a_lock_and_runs_that_are_not_run_twice(
    tmp_path: Path, behave: Callable[..., None]
) -> None:
    behave(step_s=0.05)
    launcher = start(tmp_path, set=["steps=400"])
    until(lambda: steps(tmp_path, "treatment/seed-1") > 2)
    with pytest.raises(StoreError, match=f"process {launcher.pid} on host .* launches this experiment"):
        launch(tmp_path, "steps=400", resume=True)
    launcher.kill()
    launcher.communicate()
    runs = [str(run.name) for run in plan_of().runs]
    pids = [meta_of(tmp_path / "small", run)["attempts"][0]["pid"] for run in runs]
    try:
        with pytest.raises(LaunchError, match=f"process {pids[0]} of an earlier launcher still works here"):
            launch(tmp_path, "steps=400", resume=True)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    until(lambda: not any(descendants(pid) for pid in pids))
    behave()
    assert launch(tmp_path, "steps=400", resume=True, jobs=4).exit_code == 0


def test_resume_takes_added_seeds_arms_and_reruns(tmp_path: Path) -> None:
    launch(tmp_path)
    declared = store.open_experiment(tmp_path / "small")["compare_sha256"]
    more = ["seeds=[0, 1, 2]", "arms.other.steps=2", "controls.aa_reruns=1"]
    outcome = launch(
        tmp_path, *more, "compare.primary=[{metric: train/reward, margin: 9}]", resume=True, jobs=4
    )
    assert outcome.exit_code == 0 and len(outcome.statuses) == 10
    assert len(meta_of(tmp_path / "small", "baseline/seed-0")["attempts"]) == 1
    assert store.planned_runs(tmp_path / "small") == list(outcome.statuses)
    # The comparison was declared at the first launch; what comes later must show as post hoc.
    assert store.open_experiment(tmp_path / "small")["compare_sha256"] == declared


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["steps=4"],
            "baseline/seed-0: --resume: the run directory of another experiment: steps is 3 there and 4",
        ),
        (
            ["arms.treatment.policy.logprobs.chunk_size=7"],
            "treatment/seed-0: .* policy.logprobs.chunk_size is None",
        ),
        (["seeds=[0, 2]"], "no run baseline/seed-1, which"),
    ],
)
def test_resume_refuses_another_experiment(tmp_path: Path, overrides: list[str], words: str) -> None:
    launch(tmp_path)
    before = store.read_json(tmp_path / "small" / "experiment.json")
    with pytest.raises(LaunchError, match=words):
        launch(tmp_path, *overrides, resume=True)
    assert store.read_json(tmp_path / "small" / "experiment.json") == before


def test_what_is_there_already_is_refused_without_resume(tmp_path: Path) -> None:
    launch(tmp_path)
    with pytest.raises(
        LaunchError, match=r"already, 4 of 4 runs finished; continue it with --resume, or .* --name"
    ):
        launch(tmp_path)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("")
    with pytest.raises(LaunchError, match="not empty, and no experiment of abrun"):
        launch(tmp_path, name="photos")
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["cat.jpg"]
    with pytest.raises(StoreError, match="no experiment here; there are: small"):
        launch(tmp_path, name="typo", resume=True)
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize("name", ["", "../up", "a/b", "warm-starts", ".hidden", "a b"])
def test_names_that_are_no_folder_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(LaunchError, match="--name: got"):
        launch(tmp_path, name=name)


def test_a_corrupt_file_of_a_run_is_one_line(tmp_path: Path) -> None:
    launch(tmp_path)
    (tmp_path / "small" / "baseline" / "seed-0" / "config.json").write_text("{")
    with pytest.raises(AbrunError, match=r"config.json: not readable as JSON") as caught:
        launch(tmp_path, resume=True)
    assert len(str(caught.value).splitlines()) == 1


# --- the real torchrun ---


def test_torchrun_passes_signals_on_and_reports_the_worker(
    tmp_path: Path, behave: Callable[..., None]
) -> None:

    def torchrun(directory: Path, num_ranks: int) -> list[str]:
        command = local.torchrun(directory, num_ranks)
        assert command[-3:] == ["-m", "abrun.train", str(directory)]
        return [*command[:-3], str(FAKE_TRAINER), str(directory)]

    behave(step_s=0.1, baseline_0="sigkill")
    plan = plan_of("steps=1000", "seeds=[0, 1]", "compare.primary=[]")
    sent: list[int] = []

    def tick() -> None:
        killed = store.run_state(tmp_path / "small", RunName(arm="baseline", seed=0)).status == "failed"
        if not sent and killed and steps(tmp_path, "treatment/seed-0") > 3:
            sent.append(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)

    outcome = local.launch(plan, tmp_path, jobs=2, command=torchrun, say=lambda line: None, tick=tick)
    assert outcome.stopped_by == signal.SIGTERM
    failed = meta_of(tmp_path / "small", "baseline/seed-0")
    assert (failed["attempts"][0]["exit_code"], failed["attempts"][0]["signal"]) == (None, "SIGKILL")
    stopped = meta_of(tmp_path / "small", "treatment/seed-0")
    assert stopped["status"] == "interrupted"
    assert store.read_lines(tmp_path / "small/treatment/seed-0/events.jsonl")[-1]["event"] == "interrupted"


# --- runs of foreign trainers ---


def test_a_foreign_run_gets_its_devices_and_keeps_the_user_s_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert local.environment(["cpu", "cpu"])["OMP_NUM_THREADS"] == "1"
    assert local.environment(["cpu", "cpu"], own=False)["OMP_NUM_THREADS"] == "2"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert local.environment(["cpu", "cpu"], own=False)["OMP_NUM_THREADS"] == "7"
    on_gpus = local.environment(["2", "3"], own=False)
    assert on_gpus["CUDA_VISIBLE_DEVICES"] == "2,3" and on_gpus["OMP_NUM_THREADS"] == "7"
