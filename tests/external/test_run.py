"""Runs of a foreign trainer, launched as a user does: what the store holds of them, however they end."""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from abrun.errors import LaunchError
from abrun.experiment.command import find_free_port
from abrun.experiment.plan import ExperimentPlan, RunName, make_plan
from abrun.external import run as external_run
from abrun.external.run import MetricsFollower
from abrun.launch.memory.profile import Variant
from abrun.launch.prepare import write_run_record
from abrun.launch.supervisor import LaunchOutcome
from abrun.logs.recorded.reference import freeze, load_reference, make_regression_experiment
from abrun.logs.recorded.sources import ReadingOptions, open_sources
from abrun.logs.recorded.stored import load_experiment
from abrun.messages import sentence
from abrun.messages.codes import Code, Reason
from abrun.processes import RUN_DIR_VARIABLE, PauseDetector, find_descendants, find_run_processes
from abrun.recipe.claims import Compare, parse_claim
from abrun.recipe.command import MetricsLog
from abrun.recipe.experiment import BASELINE, load_recipe
from abrun.recipe.implementations import LOCAL_LAUNCHERS
from abrun.recipe.reading import Loader
from abrun.runs.experiment import read_run_state
from abrun.runs.files import read_json, write_json
from abrun.runs.launches import begin_launch, read_endings
from abrun.runs.lines import read_json_lines
from abrun.runs.records import recorded_reason
from abrun.runs.rundir import RunDir
from abrun.runs.writer import RunWriter, begin_attempt
from abrun.verdict.validity import find_treatment_diff, invalid_reasons
from tests.launch.fakes import FAKE, FORKING, run_to_end, until
from tests.launch.forked import SHARED_SERVER, ForkedChild
from tests.snapshot import Snapshot

HERE = Path(__file__).parent
FOREIGN = HERE / "foreign.yaml"
SCRIPT = f"trainer.parameters.script={HERE / 'foreign_trainer.py'}"
FOLLOWER = (sys.executable, "-P", "-m", "abrun.external")
linux = pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")


@pytest.fixture(autouse=True)
def others_live_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in this process ends all processes below it: not those that were there before."""
    others = find_descendants(os.getpid())
    monkeypatch.setattr(
        external_run.processes, "find_descendants", lambda pid: find_descendants(pid) - others
    )


def on_other_node(directory: Path, monkeypatch: pytest.MonkeyPatch, node: int = 1) -> int:
    """Run the command of a run as on a node that is not the first."""
    monkeypatch.setenv("ABRUN_NODE_RANK", str(node))
    return external_run.run(directory)


def commands(script: str) -> tuple[str, str]:
    """Settings of a shell script for every node of two, in both arms."""
    metrics = {"format": "csv", "path": "{run_dir}/m.csv"}
    trainer = {"type": "command", "start": "every_node", "argv": ["sh", "-c", script], "metrics": metrics}
    return f"trainer={json.dumps(trainer)}", "arms={baseline: {}, treatment: {steps: 6}}"


def test_on_another_node_only_a_failure_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = prepared(tmp_path, "cluster.nodes=8", *commands("exit {node_rank}"))
    run = RunDir(directory)
    begin_launch(run, (), None)
    assert on_other_node(directory, monkeypatch, 7) == 7
    (reason,) = read_endings(run, 0, "")
    assert sentence(reason).startswith(f"node 7 ({socket.gethostname()}): exit code 7; see {run.node_log(7)}")
    assert run.last_attempt == 0 and read_endings(run, 1, "") == []


def test_another_node_ends_with_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = prepared(tmp_path, "cluster.nodes=2", *commands("exec sleep 1000"))
    run = RunDir(directory)
    begin_launch(run, (), None)
    begin_attempt(run).finish(1)
    monkeypatch.setattr(external_run, "GRACE_S", 0.2)
    assert on_other_node(directory, monkeypatch) == 0
    assert read_endings(run, 0, "") == []


def test_nodes_are_placeholders_and_one_machine_is_one_node(tmp_path: Path) -> None:
    words = "{num_nodes} {node_rank} {node_list} {head_address} {port} {gpus_per_node} $ABRUN_PORT"
    script = f"echo said {words}; echo 'step,a' > {{run_dir}}/m.csv; echo '1,2' >> {{run_dir}}/m.csv"
    launch(tmp_path, *ONE_PAIR, *commands(script))
    (run,) = (RunDir(path) for path in tmp_path.glob("*/baseline/seed-0"))
    (line,) = re.findall(r"^said (.*)", run.read_log(), re.MULTILINE)
    num_nodes, rank, nodes, head, port, gpus, same_port = line.split()
    assert (num_nodes, rank, nodes, head, gpus) == ("1", "0", socket.gethostname(), "127.0.0.1", "0")
    assert port == same_port and port.isdigit()


@pytest.mark.parametrize(("answer", "code"), [("PENDING", 0), ("RUNNING", external_run.TIMED_OUT)])
def test_time_in_the_queue_of_slurm_is_no_stall(
    answer: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "echo Submitted batch job 7; sleep 3; echo step,a > {run_dir}/m.csv; echo 1,2 >> {run_dir}/m.csv"
    directory = prepared(tmp_path, "limits.stalled_s=1.5", *commands(script))
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\ncp {directory}/heartbeat.json {tmp_path}/seen.json; echo {answer}\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert start(directory).wait(60) == code
    said = read_json(tmp_path / "seen.json").get("activity")
    assert said == ("Slurm job 7 is queued" if answer == "PENDING" else None)


def test_a_command_has_a_limit_of_its_own_until_its_first_step(tmp_path: Path) -> None:
    rows = "echo 1,2 >> {run_dir}/m.csv; echo 2,2 >> {run_dir}/m.csv"  # a step counts once another follows
    script = f"echo step,a > {{run_dir}}/m.csv; sleep 2; {rows}; sleep 60"
    directory = prepared(tmp_path, "limits={start_s: 60, stalled_s: 0.5}", *commands(script))
    assert start(directory).wait(60) == external_run.TIMED_OUT
    reason = recorded_reason(RunDir(directory).attempt())
    assert reason and reason.code == Code.STALL_LIMIT_REACHED and reason["silence"]["step"] == 1
    directory = prepared(tmp_path / "late", "limits.start_s=1", *commands(script))
    assert start(directory).wait(60) == external_run.TIMED_OUT
    assert recorded_reason(RunDir(directory).attempt()) == Code.START_LIMIT_REACHED(limit_s=1.0)


FAKE_RAY = """
import os, pathlib
members = pathlib.Path({folder!r})
def init(address, **options):
    if not (members / "head").exists():
        raise ConnectionError
    assert (members / "head").read_text() == address
def is_initialized(): return False
def shutdown(): pass
def nodes(): return [{{"Alive": True}} for _ in members.iterdir()]
"""
FAKE_RAY_START = """
import os, pathlib, socket, sys, time
members = pathlib.Path({folder!r})
options = dict(word.partition("=")[::2] for word in sys.argv)
if "--head" in options and {ends}:
    sys.exit(5)
if "--head" in options:
    server = socket.create_server(("", int(options["--port"])))
    (members / "head").write_text(options["--node-ip-address"] + ":" + options["--port"])
else:
    (members / "node").write_text(options["--address"])
print("temporary", options["--temp-dir"], flush=True)
time.sleep(600)
"""


def with_fake_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, ends: bool) -> Path:
    """Put a Ray on the path that only tells who has joined; return the folder of the members."""
    (members := tmp_path / "members").mkdir()
    scripts = tmp_path / "site" / "ray" / "scripts"
    scripts.mkdir(parents=True)
    (scripts.parent / "__init__.py").write_text(FAKE_RAY.format(folder=str(members)))
    (scripts / "scripts.py").write_text(FAKE_RAY_START.format(folder=str(members), ends=ends))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
    return members


def ray_driver(script: str) -> tuple[str, str]:
    trainer, arms = commands(f"{script}; echo step,a > {{run_dir}}/m.csv; echo 1,2 >> {{run_dir}}/m.csv")
    return trainer.replace('"start": "every_node"', '"ray": true'), arms


@linux
def test_a_ray_driver_gets_a_cluster_of_its_nodes_which_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = with_fake_ray(tmp_path, monkeypatch, ends=False)
    directory = prepared(tmp_path, "cluster.nodes=2", *ray_driver("echo said $RAY_ADDRESS; sleep 1"))
    begin_launch(run := RunDir(directory), (), None)
    port = find_free_port()
    for name, value in {"HEAD_ADDRESS": "127.0.0.1", "PORT": port, "NODE_LIST": "a,127.0.0.1"}.items():
        monkeypatch.setenv(f"ABRUN_{name}", str(value))
    monkeypatch.setenv("RAY_ADDRESS", "another:1")
    first = start(directory)
    until(lambda: "1 of 2 nodes" in run.read_log())
    monkeypatch.setenv("ABRUN_NODE_RANK", "1")
    second = start(directory)
    assert first.wait(60) == 0 and second.wait(60) in (0, -9)  # on one machine the first's end is its end
    assert (members / "node").read_text() == f"127.0.0.1:{port}"
    assert f"said 127.0.0.1:{port}\n" in run.read_log()
    folder, _ = re.findall("^temporary (.*)", run.read_log(), re.MULTILINE)
    assert not os.path.exists(folder)
    assert not find_run_processes(directory)


@linux
@pytest.mark.parametrize("ends", [True, False])
def test_a_ray_that_does_not_start_is_one_line(
    ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ends:
        with_fake_ray(tmp_path, monkeypatch, ends=True)
        why = "trainer.ray: Ray's head ended with exit code 5; see above"
    else:
        why = "cannot import ray (No module named 'ray'); pip install ray there, or set trainer.python"
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        (tmp_path / "ray.py").write_text("raise ImportError(\"No module named 'ray'\")")
    directory = prepared(tmp_path, *ray_driver("true"))
    assert start(directory).wait(60) == 1
    assert why in (RunDir(directory).attempt().message or "")


def plan_of(*overrides: str) -> ExperimentPlan:
    return make_plan(load_recipe(FOREIGN, [SCRIPT, *overrides]))


ONE_PAIR = ("seeds=[0]", "compare.claims=[]")


def launch(runs_dir: Path, *overrides: str) -> LaunchOutcome:
    return run_to_end(plan_of(*overrides), runs_dir)


def prepared(tmp_path: Path, *overrides: str) -> Path:
    """The directory of one run, ready for `python -m abrun.external`."""
    directory = tmp_path / "baseline" / "seed-0"
    config = load_recipe(FOREIGN, [SCRIPT, *overrides]).run_config(BASELINE)
    write_run_record(directory, "by-hand", RunName(arm=BASELINE, seed=0), config)
    return directory


def start(directory: Path) -> ForkedChild:
    """`python -m abrun.external DIRECTORY`, without its imports."""
    run, env = RunDir(directory), {**os.environ, RUN_DIR_VARIABLE: str(directory)}
    return SHARED_SERVER.start(run, ["abrun.external", str(directory)], env)


def events(directory: Path) -> list[dict[str, Any]]:
    return RunDir(directory).events()


def rows(directory: Path) -> list[dict[str, Any]]:
    return read_json_lines(directory / "metrics.jsonl")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(LOCAL_LAUNCHERS, "local", FORKING)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with SHARED_SERVER.in_use():
        yield


# --- runs that go well ---


def test_another_checkout_of_a_recipe_is_no_difference_but_an_edited_script_is(tmp_path: Path) -> None:
    script = (HERE / "foreign_trainer.py").read_text()
    recipe = FOREIGN.read_text().replace('"{script}"', '"{recipe_dir}/trainer.py"')
    recipe = recipe.replace("{script: tests/external/foreign_trainer.py, ", "{")
    treatments = []
    for folder, text in (("one", script), ("two", script), ("three", f"{script}# edited\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "trainer.py").write_text(text)
        (tmp_path / folder / "foreign.yaml").write_text(recipe)
        plan = make_plan(load_recipe(tmp_path / folder / "foreign.yaml", ["seeds=[0, 1]"]))
        assert run_to_end(plan, tmp_path / folder).exit_code == 0
        experiment = load_experiment(tmp_path / folder / "foreign")
        if folder == "one":
            freeze(experiment, "baseline", tmp_path / "reference.json")
        compared = make_regression_experiment(
            experiment, load_reference(tmp_path / "reference.json"), "baseline"
        )
        treatments.append(find_treatment_diff(compared, "new"))
        arms = [str(tmp_path / name / "foreign" / "baseline") for name in ("one", folder)]
        if folder != "one":
            found = open_sources(arms, ReadingOptions(), [])
            assert find_treatment_diff(found, found.treatments[0]) == treatments[-1]
            assert not list(invalid_reasons(found, found.treatments[0], 2, []))
    old, new = treatments[2].pop("scripts.trainer.py")
    assert treatments == [{}, {}, {}] and old != new


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_the_store_holds_what_the_command_logged_under_our_names(tmp_path: Path, form: str) -> None:
    chosen = (f"trainer.metrics.format={form}", f"trainer.parameters.format={form}")
    assert launch(tmp_path, *chosen, "steps=4", *ONE_PAIR).exit_code == 0
    directory = tmp_path / "foreign" / "treatment" / "seed-0"
    found = rows(directory)
    assert [(row["step"], row["attempt"]) for row in found] == [(1, 1), (2, 1), (3, 1), (4, 1)]
    assert {key for row in found for key in row} == {
        "step",
        "attempt",
        "time_s",
        "train/reward",
        "train/loss",
    }
    assert found[3]["train/reward"] == pytest.approx(1 - math.exp(-0.3), abs=0.01)
    assert found[3]["train/loss"] == pytest.approx(1 - found[3]["train/reward"])
    assert [event["event"] for event in events(directory)] == ["started", "finished"]
    assert read_json(directory / "result.json") == {"step": 4, "attempt": 1}
    said = (directory / "stdout.log").read_text()
    assert "seed 0, treatment, attempt 1" in said
    environment = read_json(directory / "environment.json")
    assert environment["versions"]["numpy"] and environment["versions"]["not-a-package"] is None
    assert environment["python"] == ".".join(str(part) for part in sys.version_info[:3])
    assert len(environment["devices"]) == 1 and environment["prompts_sha256"] is None


def test_a_value_that_comes_late_belongs_to_its_step(tmp_path: Path) -> None:
    slow = ("trainer.parameters.behaviour=late", "trainer.parameters.step_s=0.5", "steps=5")
    directory = prepared(tmp_path, *slow)
    assert start(directory).wait(60) == 0
    assert len(rows(directory)) > 5  # no step was told before its late value came: the test shows nothing
    metrics = RunDir(directory).metrics()
    assert metrics["train/loss"].values[:3].tolist() == [-1.0] * 3
    assert (metrics["train/reward"].values[1:] > 0.3).all() and len(metrics["train/reward"]) == 5


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_text_in_the_window_of_a_claim_is_invalid(tmp_path: Path, form: str, snapshot: Snapshot) -> None:
    """Both arms drop the same steps, so that no run lacks one of another's; read as folders too."""
    chosen = (f"trainer.metrics.format={form}", f"trainer.parameters.format={form}")
    assert (
        launch(tmp_path, *chosen, "trainer.parameters.behaviour=text", "steps=10", "seeds=[0, 1]").exit_code
        == 0
    )
    directory = tmp_path / "foreign"
    arms = [f"{arm}={directory / arm}" for arm in ("baseline", "treatment")]
    claim = Compare(claims=[parse_claim("train/reward:last 40%:0.05")])
    for experiment in (load_experiment(directory), open_sources(arms, ReadingOptions())):
        reasons = invalid_reasons(experiment, "treatment", 3, claim.claims)
        assert [reason.code for reason in reasons] == [Code.TEXT_VALUES] * 4
        snapshot(sentence(reasons[0]))


def test_an_alias_of_nothing_ends_the_runs_after_their_first_rows(tmp_path: Path, snapshot) -> None:
    slow = ("steps=2000", "trainer.parameters.step_s=0.05", "seeds=[0, 1, 2]")
    outcome = launch(tmp_path, "trainer.aliases={train/reward: scores, validation/reward: held}", *slow)
    assert outcome.exit_code == 1
    run = RunDir(tmp_path / "foreign" / "baseline" / "seed-0")
    assert recorded_reason(run.attempt()) == Code.ALIAS_NOT_LOGGED(
        name="train/reward",
        metric="scores",
        num_steps=20,
        logged=["objective/loss", "score"],
        num_more=0,
        close="score",
    )
    snapshot(run.attempt().message)
    assert 20 <= max(row["step"] for row in rows(run.path)) < 1000 and len(run.attempts()) == 1


@pytest.mark.slow
def test_a_mended_alias_is_resumed_until_a_run_has_finished(tmp_path: Path) -> None:
    steps = ("steps=30", "trainer.parameters.step_s=0.1", "seeds=[0, 1]")
    assert launch(tmp_path, "trainer.aliases={train/reward: scores}", *steps).exit_code == 1
    mended = plan_of("trainer.aliases={train/reward: score}", *steps)
    assert run_to_end(mended, tmp_path, resume=True).exit_code == 0
    for found in (tmp_path / "foreign").glob("*/seed-*"):
        assert len([row for row in rows(found) if "train/reward" in row]) == 30
    other = plan_of("trainer.aliases={train/loss: score}", *steps)
    with pytest.raises(LaunchError, match=r"trainer.aliases.* is .* there and"):
        run_to_end(other, tmp_path, resume=True)


def test_an_alias_of_nothing_is_said_at_the_end(tmp_path: Path) -> None:
    assert launch(tmp_path, "trainer.aliases={train/entropy: entropie}", *ONE_PAIR).exit_code == 0
    last = events(tmp_path / "foreign" / "baseline" / "seed-0")[-1]
    assert last["event"] == "finished" and last["message"] == "aliases: the log has no metric 'entropie'"


def test_memory_profile_refuses_a_command() -> None:
    with pytest.raises(LaunchError, match=r"arms.baseline: trainer.type: got 'command'.*own tools"):
        Variant(recipe=load_recipe(FOREIGN, [SCRIPT])).configs()


def test_a_log_in_another_format_is_said_to_be_unreadable(tmp_path: Path) -> None:
    launch(tmp_path, "trainer.metrics.format=parquet", *ONE_PAIR)
    reason = read_run_state(tmp_path / "foreign", RunName(arm="baseline", seed=0)).reason
    assert reason and sentence(reason).startswith("no metrics: trainer.metrics: parquet at ")


def test_nan_is_kept_and_a_torn_last_line_is_not(tmp_path: Path) -> None:
    arms = ("arms.treatment={trainer.parameters.behaviour: torn}", "trainer.parameters.behaviour=nan")
    assert launch(tmp_path, *arms, *ONE_PAIR).exit_code == 0
    metrics = RunDir(tmp_path / "foreign" / "baseline" / "seed-0").metrics()
    assert math.isnan(metrics["train/loss"].values[1]) and len(metrics["train/loss"]) == 5
    assert [row["step"] for row in rows(tmp_path / "foreign" / "treatment" / "seed-0")] == [1, 2, 3, 4, 5]


@pytest.mark.usefixtures("trainer_installed")
def test_our_own_trainer_against_a_foreign_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = yaml.load(FOREIGN.read_text(), Loader)["trainer"]
    command["parameters"]["script"] = str(HERE / "foreign_trainer.py")
    ours = yaml.load((HERE.parent / "launch" / "small.yaml").read_text(), Loader)
    arms = {"baseline": {}, "foreign": {"trainer": command}}
    recipe = tmp_path / "mixed.yaml"
    recipe.write_text(yaml.safe_dump(ours | {"name": "mixed", "steps": 5, "arms": arms}))
    plan = make_plan(load_recipe(recipe))
    diff = plan.treatment_diff["foreign"]
    assert diff["trainer.type"] == ("abrun", "command") and diff["model.preset"] == ("qwen2-tiny", None)
    assert "trainer.recipe_dir" not in diff  # in another checkout it would be another treatment
    assert "steps" not in diff and not any(key.startswith("cluster") for key in diff)
    monkeypatch.setitem(LOCAL_LAUNCHERS, *FAKE)
    outcome = run_to_end(plan, tmp_path / "runs", launcher="fake")
    assert outcome.exit_code == 0
    for arm in ("baseline", "foreign"):
        assert len(RunDir(tmp_path / "runs" / "mixed" / arm / "seed-1").metrics()["train/reward"]) == 5


# --- runs that fail ---


@pytest.mark.parametrize(
    ("behaviour", "ending"),
    [
        ("crash", Code.EXIT_CODE(exit_code=1, last_line="ValueError: no such model: the planned crash")),
        ("code", Code.EXIT_CODE(exit_code=7, last_line="seed 0, baseline, attempt 1")),
        ("mute", Code.EXIT_CODE(exit_code=7, last_line=None)),
        ("sigkill", Code.KILLED(signal="SIGKILL")),
        ("silent", None),
    ],
)
def test_a_failure_says_why_in_one_line(
    tmp_path: Path, behaviour: str, ending: Reason | None, snapshot
) -> None:
    outcome = launch(tmp_path, f"trainer.parameters.behaviour={behaviour}", *ONE_PAIR)
    assert outcome.exit_code == 1 and set(outcome.statuses.values()) == {"failed"}
    state = read_run_state(tmp_path / "foreign", RunName(arm="baseline", seed=0))
    if ending:
        assert state.reason == Code.SEE_LOG(ending=ending, log=state.directory / "stdout.log")
    else:
        log = state.directory / "logs" / "metrics.jsonl"
        assert state.message and state.message.startswith(f"no metrics: trainer.metrics: jsonl at {log}: ")
    snapshot(state.message)
    last = events(state.directory)[-1]
    assert last["event"] == "failed" and last["message"] == state.message
    assert not (state.directory / "result.json").exists()


def test_a_command_that_cannot_start_is_a_failed_run(tmp_path: Path) -> None:
    script = tmp_path / "no-interpreter"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    directory = prepared(tmp_path)
    record = read_json(directory / "config.json")
    record["config"]["trainer"]["argv"][0] = str(script)
    write_json(directory / "config.json", record)
    assert external_run.run(directory) == 1
    reason = recorded_reason(RunDir(directory).attempt())
    assert reason and f"trainer.argv: got {str(script)!r}, which cannot be started" in str(reason)


# --- runs that are stopped ---


@linux
def test_sigterm_reaches_the_command_and_the_run_goes_on_where_it_was(tmp_path: Path) -> None:
    overrides = ("trainer.parameters.behaviour=resumes", "trainer.parameters.step_s=0.2", "steps=12")
    directory = prepared(tmp_path, *overrides)
    process = start(directory)
    until(lambda: len(rows(directory)) > 2)
    process.terminate()
    assert process.wait(30) == 3
    last = events(directory)[-1]
    assert last["event"] == "interrupted" and 0 < last["step"] < 12
    assert start(directory).wait(60) == 0
    found = rows(directory)
    assert [row["step"] for row in found] == list(range(1, 13)), "every step once"
    assert {row["attempt"] for row in found[: last["step"]]} == {1} and found[-1]["attempt"] == 2
    assert [event["event"] for event in events(directory)][-2:] == ["resumed", "finished"]


def test_a_trainer_that_begins_anew_rewrites_only_what_changed(tmp_path: Path) -> None:
    directory = prepared(tmp_path)
    assert external_run.run(directory) == 0
    (directory / "result.json").unlink()
    assert external_run.run(directory) == 0  # the same seed, the same values
    assert [(row["step"], row["attempt"]) for row in rows(directory)] == [(step, 1) for step in range(1, 6)]
    write_run_record(directory, "by-hand", RunName(arm=BASELINE, seed=1), plan_of().runs[0].config)
    assert external_run.run(directory) == 0
    assert [(row["step"], row["attempt"]) for row in rows(directory)[5:]] == [
        (step, 3) for step in range(1, 6)
    ]


def test_a_deaf_command_is_killed_after_the_grace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_run, "GRACE_S", 0.3)
    directory = prepared(tmp_path, "trainer.parameters.behaviour=deaf", "trainer.parameters.step_s=3600")

    def stopped(self: object, *, has_ended: bool = False) -> None:
        if not has_ended and (directory / "logs" / "metrics.jsonl").is_file():
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(external_run._Run, "_copy_metrics", stopped)
    assert external_run.run(directory) == external_run.INTERRUPTED
    assert events(directory)[-1]["event"] == "interrupted"


@pytest.mark.parametrize("limit", ["stalled_s", "run_s"])
def test_a_command_that_only_prints_is_ended_and_its_log_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    bounds = ["limits.log_mib=1", f"limits.{limit}=3"]
    directory = prepared(tmp_path, "trainer.parameters.behaviour=babbles", *bounds)
    assert start(directory).wait(60) == 124
    attempt, heartbeat = RunDir(directory).attempt(), RunDir(directory).heartbeat()
    reason = recorded_reason(attempt)
    assert attempt.exit_code == 124 and reason
    assert heartbeat.step in (2, 3) and heartbeat.limit_s == heartbeat.patience_s
    assert heartbeat.limit_s and (heartbeat.limit_s >= 1800) == (limit == "run_s")
    if limit == "run_s":
        assert reason == Code.TIME_LIMIT_REACHED(limit_s=3.0)
    else:
        assert (reason.code, reason["silence"].code) == (Code.STALL_LIMIT_REACHED, Code.NO_NEW_STEP)
        assert reason["silence"]["step"] == 2 and reason["silence"]["silent_s"] >= 3
    log = (directory / "stdout.log").read_text()
    assert len(log) <= 2**20 + 100 and "bytes cut here]" in log and log.startswith("started: ")
    assert "failed: " in log.splitlines()[-1]


@linux
def test_nothing_outlives_the_process_that_follows_it(tmp_path: Path) -> None:
    directory = prepared(tmp_path, "trainer.parameters.step_s=30")
    process = start(directory)
    until(lambda: (directory / "logs" / "metrics.jsonl").is_file())
    heartbeat = RunDir(directory).heartbeat()
    assert (heartbeat.step, heartbeat.patience_s, heartbeat.limit_s) == (0, 1800, 1800)  # before any step
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 1 and alive(int(children[0]))
    process.kill()
    process.wait()
    until(lambda: not alive(int(children[0])))


@linux
@pytest.mark.parametrize("before", ["signal.signal(15, signal.SIG_IGN)", "signal.pthread_sigmask(0, [15])"])
def test_the_death_of_the_launcher_interrupts_the_run(tmp_path: Path, before: str) -> None:
    directory = prepared(tmp_path, "trainer.parameters.step_s=30")
    code = f"import os, signal, sys; from abrun.processes import start_process\n{before}\n"
    code += "start_process(sys.argv[1:], os.environ, death_signal=signal.SIGTERM).wait()"
    launcher = subprocess.Popen([sys.executable, "-c", code, *FOLLOWER, str(directory)])
    until(lambda: (directory / "logs" / "metrics.jsonl").is_file())
    launcher.kill()
    launcher.wait()
    until(lambda: events(directory)[-1]["event"] == "interrupted")


@linux
def test_children_that_the_command_leaves_behind_end_with_it(tmp_path: Path) -> None:
    directory = prepared(tmp_path, "trainer.parameters.behaviour=orphans")
    child = directory / "logs" / "child.pid"
    assert start(directory).wait(60) == 0
    with contextlib.suppress(FileNotFoundError):  # killed before it could write
        until(lambda: not alive(int(child.read_text() or 0)))


@linux
def test_what_a_command_has_done_with_keeps_no_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = prepared(tmp_path, "trainer.parameters.behaviour=daemons", "trainer.parameters.step_s=30")
    process = start(directory)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    until(lambda: (directory / "logs" / "metrics.jsonl").is_file())
    try:
        until(lambda: len(children.read_text().split()) == 1)  # dead ones are among them
    finally:
        process.terminate()
        assert process.wait(60) == 3


@linux
def test_nobody_is_found_by_the_ids_of_another_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_descendants(1)
    monkeypatch.setattr(os, "getpid", lambda: 2)  # as where a namespace has been entered and /proc is the old
    assert not find_descendants(1) and not find_run_processes(Path("/"))


def test_no_sign_of_life_is_asked_of_what_was_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    times_s = iter([100.0, 101.0, 105.0, 110.0, 5000.0, 5001.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(times_s))
    awake = PauseDetector()
    assert [awake.running_since_s() for _ in range(5)] == [100.0, 100.0, 100.0, 5000.0, 5000.0]


def test_a_newer_attempt_stops_the_older(tmp_path: Path) -> None:
    directory = prepared(tmp_path, "trainer.parameters.step_s=0.3", "steps=100")
    process = start(directory)
    until(lambda: rows(directory))
    begin_attempt(RunDir(directory))
    assert process.wait(30) == 2
    fenced = f"error: {directory}: attempt 2 now owns this run, so attempt 1 stops"
    assert fenced in (directory / "stdout.log").read_text()
    assert {row["attempt"] for row in rows(directory)} == {1} and len(events(directory)) == 1


def remove(path: Path) -> None:
    path.unlink()


def cut_short(path: Path) -> None:
    os.truncate(path, 10)


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_text('{"step": 1, "score": 9.0}\nno row\n')
    other.replace(path)


@pytest.mark.parametrize("spoil", [remove, cut_short, replace])
def test_rows_that_are_lost_while_a_command_runs_are_written_again(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    directory = prepared(tmp_path, "steps=6", "trainer.parameters.step_s=0.3")
    command = start(directory)
    until(lambda: rows(directory))
    spoil(directory / "metrics.jsonl")
    assert command.wait(timeout=60) == 0
    assert [row["step"] for row in rows(directory)] == list(range(1, 7))
    assert all(row["train/reward"] < 2 for row in rows(directory))
    repair = next(event for event in events(directory) if event["event"] == "repair")
    assert "metrics.jsonl was removed" in repair["message"]


def test_rows_that_are_lost_between_two_of_a_copy_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, write = prepared(tmp_path, "steps=6"), RunWriter.metrics

    def write_and_lose(writer: RunWriter, step: int, values: Mapping[str, float]) -> None:
        write(writer, step, values)
        if step == 2:
            (directory / "metrics.jsonl").unlink()

    monkeypatch.setattr(RunWriter, "metrics", write_and_lose)
    assert external_run.run(directory) == 0
    assert [row["step"] for row in rows(directory)] == list(range(1, 7))


@pytest.mark.parametrize(
    ("spoil", "behaviour"), [(remove, "resumes"), (cut_short, "resumes"), (replace, "anew")]
)
def test_a_log_that_loses_rows_while_a_command_runs_leaves_a_way_on(
    tmp_path: Path, spoil: Callable[[Path], None], behaviour: str
) -> None:
    chosen = ("steps=6", "trainer.parameters.step_s=0.3", f"trainer.parameters.behaviour={behaviour}")
    directory = prepared(tmp_path, *chosen)
    command = start(directory)
    until(lambda: rows(directory))
    spoil(directory / "logs" / "metrics.jsonl")
    assert command.wait(timeout=60) == 1
    message = read_run_state(tmp_path, RunName(arm=BASELINE, seed=0)).message
    assert message and message.startswith(("metrics: ", "no metrics: ")) and "logs/metrics.jsonl" in message
    assert "lost its rows up to step " in message or "remove the line" in message
    if behaviour == "resumes":
        shutil.rmtree(directory / "logs")
    assert start(directory).wait(timeout=60) == 0
    assert RunDir(directory).metrics()["train/reward"].steps.tolist() == list(range(1, 7))


@pytest.mark.parametrize("spoil", [remove, cut_short])
def test_a_finished_command_whose_rows_are_lost_is_run_again(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    assert launch(tmp_path, "seeds=[0]", "steps=3", "compare.claims=[]").exit_code == 0
    directory = tmp_path / "foreign" / "treatment" / "seed-0"
    before = RunDir(directory).metrics()["train/reward"]
    spoil(directory / "metrics.jsonl")
    plan = plan_of("seeds=[0]", "steps=3", "compare.claims=[]")
    assert run_to_end(plan, tmp_path, resume=True).exit_code == 0
    after = RunDir(directory).metrics()["train/reward"]
    assert after.steps.tolist() == [1, 2, 3] and after.values.tolist() == before.values.tolist()
    attempts = [RunDir(tmp_path / "foreign" / str(run.name)).last_attempt for run in plan.runs]
    assert sorted(attempts) == [1, 2]  # the other stays as it is


def test_a_link_to_a_file_of_abrun_is_no_log(tmp_path: Path) -> None:
    """Read as the command's metrics, abrun's own would be told again and again."""
    directory = prepared(tmp_path)
    run = RunDir(directory)
    begin_attempt(run).metrics(1, {"x": 1.0})
    (directory / "logs").mkdir()
    for link, target in (("logs/log.jsonl", "../metrics.jsonl"), ("here", ".")):
        (directory / link).symlink_to(target)
        follower = MetricsFollower(MetricsLog(format="jsonl", path=link), directory / link, {}, run)
        assert follower.new_rows(has_ended=True) == []
        assert follower.problem and "which is reserved for abrun" in str(follower.problem)
