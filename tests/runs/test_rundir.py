"""Run directories: attempts and their fence, and what runs and experiments are said to be doing."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from abrun.errors import StoreError
from abrun.messages.codes import Code, Reason
from abrun.runs import files, owner
from abrun.runs.experiment import open_experiment, planned_runs, read_run_state, run_dir
from abrun.runs.files import read_json, write_json
from abrun.runs.launches import begin_launch, end_launch, update_launch, write_config
from abrun.runs.layout import RunName
from abrun.runs.records import NodeStatus
from abrun.runs.rundir import RunDir
from abrun.runs.state import read_state
from abrun.runs.writer import FencedError, RunWriter, begin_attempt, write_node
from tests.snapshot import Snapshot

NAME = RunName(arm="baseline", seed=0)


def make_run(experiment_dir: Path, name: RunName = NAME, **files: dict) -> Path:
    write_json(
        experiment_dir / "experiment.json",
        {"schema_version": 1, "runs": [{"arm": name.arm, "seed": name.seed, "rerun": name.rerun}]},
    )
    directory = run_dir(experiment_dir, name)
    write_json(directory / "config.json", {"config": {"steps": 60}})
    for stem, content in files.items():
        write_json(directory / f"{stem}.json", content)
    return directory


@pytest.mark.parametrize(
    ("files", "status"),
    [
        ({}, "pending"),
        ({"attempts/0001": {"status": "failed", "message": "why"}}, "failed"),
        ({"attempts/0001": {"status": "failed", "message": "why"}, "result": {}}, "finished"),
        ({"attempts/0001": {"status": "finished", "exit_code": 0}}, "pending"),  # result removed
        ({"launch": {"launches": [{"status": "finished", "ended_s": 2.0}]}}, "pending"),
    ],
)
def test_run_states(tmp_path: Path, files: dict, status: str) -> None:
    make_run(tmp_path, **files)
    state = read_run_state(tmp_path, *planned_runs(tmp_path))
    assert (state.status, state.step, state.num_steps) == (status, 0, 60)
    assert state.reason == (Code.FOREIGN_TEXT(text="why") if status == "failed" else None)


@pytest.mark.parametrize(
    ("started_ago", "heartbeat", "status"),
    [
        (0.0, {}, "running"),
        (1e6, {"ago": 0.0}, "running"),
        (1e6, {"ago": 1e6}, "stalled"),
        (1e6, {}, "stalled"),
        (1000.0, {"ago": 100.0, "patience_s": 600.0}, "running"),  # a command that says how long a step takes
        (1000.0, {"ago": 100.0, "patience_s": 60.0}, "stalled"),
    ],
)
def test_an_attempt_under_way_runs_or_stalls(
    tmp_path: Path, started_ago: float, heartbeat: dict, status: str
) -> None:
    now = time.time()
    files: dict = {"attempts/0001": {"status": "running", "started_s": now - started_ago}}
    if heartbeat:
        patience_s = heartbeat.get("patience_s")
        files["heartbeat"] = {"time_s": now - heartbeat["ago"], "step": 7, "patience_s": patience_s}
    make_run(tmp_path, **files)
    state = read_run_state(tmp_path, *planned_runs(tmp_path))
    assert (state.status, state.step) == (status, 7 if heartbeat else 0)


NOW = 1e9
WAITS = {"place": "all_reduce (torch/distributed/d.py:9)", "doing": "logprobs", "waits": True}
READS = {"place": "read (data/shards.py:88)", "doing": "generation", "waits": False}


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([{}, {}], None),
        ([{"silent_since_s": NOW - 90, "ranks": [{"rank": 0, **WAITS}]}, {}], None),  # for the other node
        (
            [
                {"silent_since_s": NOW - 90, "ranks": [{"rank": 0, **WAITS}]},
                {"silent_since_s": NOW - 80, "ranks": [{"rank": 2, **WAITS}, {"rank": 3, **READS}]},
            ],
            Code.RANKS_SILENT(
                silent_s=80,
                ranks=[
                    {"rank": 3, "host": "n1", "place": READS["place"], "doing": READS["doing"]},
                    {"rank": 0, "host": "n0", "place": WAITS["place"], "doing": WAITS["doing"]},
                    {"rank": 2, "host": "n1", "place": WAITS["place"], "doing": WAITS["doing"]},
                ],
                num_unstarted=0,
                num_more=0,
            ),
        ),
        ([{}, {"time_s": NOW - 90}], Code.NODES_SILENT(nodes=[{"node": 1, "host": "n1"}], silent_s=90)),
        ([{}, {"attempt": 1, "time_s": NOW - 90}], None),  # of the attempt before, on other nodes
        ([{"attempt": 1}, {"attempt": 1}], Code.NO_NEW_STEP(step=7, silent_s=700)),  # they are silent yet
    ],
)
def test_a_run_seems_to_hang_where_no_node_of_it_gives_a_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: list[dict], expected: Reason | None, snapshot
) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW)
    beaten: dict = {"heartbeat": {"time_s": NOW - 700, "step": 7}}  # a long step, if the nodes say so
    attempt: dict = {"attempts/0002": {"status": "running", "started_s": NOW - 1000}}
    said: dict = {
        f"nodes/{number:04d}": {"attempt": 2, "node": number, "host": f"n{number}", "time_s": NOW, **node}
        for number, node in enumerate(nodes)
    }
    state = read_state(RunDir(make_run(tmp_path, **attempt, **beaten, **said)), NAME)
    assert (state.status, state.reason) == ("stalled" if expected else "running", expected)
    snapshot(state.message)


def test_only_the_newest_attempt_speaks_for_its_nodes(tmp_path: Path) -> None:
    run = RunDir(make_run(tmp_path))
    begin_attempt(run)
    begin_attempt(run)
    for attempt in (1, 2):
        write_node(run, NodeStatus(attempt=attempt, host="here", time_s=1.0))
    assert [node.attempt for node in run.nodes(2)] == [2] and run.nodes(1) == []
    shutil.rmtree(run.path)
    write_node(run, NodeStatus(attempt=2, host="here", time_s=1.0))
    assert not run.path.exists()


def test_attempts_count_from_one_and_say_how_they_ended(tmp_path: Path) -> None:
    run = RunDir(make_run(tmp_path))
    assert run.attempts() == [] and run.attempt().status == "pending"
    writer = begin_attempt(run)
    assert writer.attempt == 1 and read_state(run, NAME).status == "running"
    writer.fail(
        Code.MEMORY_RAN_OUT(on_gpu=False, doing="", others=None, error="no\nmore"), exit_code=2, step=3
    )
    (attempt,) = run.attempts()
    assert attempt.pid == os.getpid() and attempt.exit_code == 2 and attempt.ended_s
    state = read_state(run, NAME)
    reason = Code.MEMORY_RAN_OUT(on_gpu=False, doing="", others=None, error="no more")
    assert (state.status, state.reason, state.ending) == ("failed", reason, "exit code 2")
    assert (attempt.message, run.events()[-1]["message"]) == (state.message, state.message)
    writer = begin_attempt(run)
    assert writer.attempt == 2 and read_state(run, NAME).status == "running"
    writer.interrupt(exit_code=3)
    state = read_state(run, NAME)
    assert (state.status, state.reason) == ("interrupted", Code.STOPPED_BY_SIGNAL())
    begin_attempt(run).finish(60)
    assert (read_state(run, NAME).status, read_state(run, NAME).message) == ("finished", None)
    assert [row["event"] for row in run.events()] == ["failed", "interrupted", "finished"]


WRITES: dict[str, Callable[[RunWriter], None]] = {
    "metrics": lambda writer: writer.metrics(2, {"x": 1.0}),
    "validation": lambda writer: writer.validation(2, prompts_sha256="", rewards=[], lengths=[]),
    "heartbeat": lambda writer: writer.heartbeat(2),
    "event": lambda writer: writer.event("checkpoint"),
    "environment": lambda writer: writer.environment({}),
    "finish": lambda writer: writer.finish(2),
}


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("write", WRITES)
def test_an_older_attempt_writes_nothing_more(tmp_path: Path, write: str) -> None:
    run = RunDir(make_run(tmp_path))
    older = begin_attempt(run)
    WRITES["metrics"](older)
    begin_attempt(run)
    before = contents(run.path)
    with pytest.raises(FencedError, match="attempt 2 now owns this run, so attempt 1 stops"):
        WRITES[write](older)
    older.fail(Code.FOREIGN_TEXT(text="too late"), exit_code=2)
    older.interrupt(exit_code=3)
    assert contents(run.path) == before


def test_of_two_attempts_that_begin_at_once_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both look before either has begun: each gets a number of its own, and the higher one the run."""
    run = RunDir(make_run(tmp_path))
    begun: list[RunWriter] = []
    make_folder = files.make_folder

    def late(path: Path) -> None:  # the other one begins where this one has looked and not yet begun
        monkeypatch.setattr(files, "make_folder", make_folder)
        begun.append(begin_attempt(run))
        make_folder(path)

    monkeypatch.setattr(files, "make_folder", late)
    newer = begin_attempt(run)
    (older,) = begun
    assert (older.attempt, newer.attempt) == (1, 2)
    newer.metrics(1, {"x": 1.0})
    with pytest.raises(FencedError):
        older.metrics(1, {"x": 1.0})


def test_an_older_attempt_that_ends_as_a_newer_begins_leaves_it_be(tmp_path: Path) -> None:
    """It had passed its fence: what it writes then is its own file alone."""
    run = RunDir(make_run(tmp_path))
    older = begin_attempt(run)
    older.check_fence = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
    newer = begin_attempt(run)
    older.interrupt(exit_code=3)
    newer.metrics(1, {"x": 1.0})
    assert [attempt.status for attempt in run.attempts()] == ["interrupted", "running"]
    assert read_state(run, NAME).status == "running"


def test_attempts_that_were_removed_by_hand_are_not_counted_again(tmp_path: Path) -> None:
    """Otherwise the rows of older attempts would win over those of the new one."""
    run = RunDir(make_run(tmp_path))
    for value in (1.0, 2.0):
        begin_attempt(run).metrics(1, {"x": value})
    shutil.rmtree(run.path / "attempts")
    writer = begin_attempt(run)
    writer.metrics(1, {"x": 3.0})
    assert writer.attempt == 3 and run.metrics()["x"].values.tolist() == [3.0]
    shutil.rmtree(run.path / "attempts")
    with pytest.raises(FencedError):
        writer.metrics(2, {"x": 3.0})


def test_an_attempt_killed_while_it_began_blocks_nothing(tmp_path: Path) -> None:
    run = RunDir(make_run(tmp_path))
    (run.path / "attempts").mkdir()
    (run.path / "attempts" / "0001.json").touch()
    assert run.attempt().number == 1 and run.attempts()[0].pid is None
    assert begin_attempt(run).attempt == 2


def test_a_run_whose_process_is_gone_without_a_word_is_not_running(tmp_path: Path) -> None:
    """A full disk kept job and launcher from saying anything."""
    run = RunDir(make_run(tmp_path))
    begin_launch(run, ["cpu"], None)
    process = subprocess.Popen(["sleep", "60"])
    update_launch(run, pid=process.pid)
    assert read_state(run, NAME).status == "running"
    process.kill()
    process.wait()
    state = read_state(run, NAME)
    assert (state.status, state.message) == ("failed", "process died without writing a result (disk full?)")
    end_launch(run, "failed", Code.FOREIGN_TEXT(text="killed"), exit_code=None, signal="SIGKILL")
    begin_attempt(run)
    assert read_state(run, NAME).status == "running"
    path = run.path / "attempts" / "0001.json"
    for elsewhere in ({"host": "elsewhere", "boot_id": "another"}, {"pid_namespace": "pid:[1]"}):
        write_json(path, read_json(path) | elsewhere | {"pid": process.pid})
        assert read_state(run, NAME).status == "running"  # that cannot be told from here
    begin_attempt(run)
    path = run.path / "attempts" / "0002.json"
    write_json(path, read_json(path) | {"process_started": "1"})  # the id is another's now
    assert read_state(run, NAME).status == "failed"


@pytest.mark.parametrize("by", ["job", "launcher"])
def test_a_process_that_ends_while_it_is_asked_about_has_left_its_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Its end comes between the look at what it says and the one at whether it lives."""
    run = RunDir(make_run(tmp_path))
    begin_launch(run, ["cpu"], None)
    writer = begin_attempt(run)
    update_launch(run, pid=os.getpid())

    def ends(owner: object) -> bool:
        if by == "job":
            writer.fail(Code.TIME_LIMIT_REACHED(limit_s=5.0), exit_code=124)
        else:
            end_launch(run, "failed", Code.TIME_LIMIT_REACHED(limit_s=5.0), exit_code=124)
        return True

    monkeypatch.setattr(owner.Owner, "is_gone", property(ends))
    state = read_state(run, NAME)
    assert (state.status, state.reason) == ("failed", Code.TIME_LIMIT_REACHED(limit_s=5.0))


@pytest.mark.parametrize(
    "code",
    [
        None,
        {},
        {"code": "of_a_newer_version", "values": {}},
        {"code": "killed", "values": {}},
        {"code": "killed", "values": []},
        {"code": "time_limit_reached", "values": {"limit_s": "long"}},
        {"code": "killed", "values": {"signal": "SIGKILL", "more": 1}},
    ],
)
def test_a_record_without_a_known_code_is_read_by_its_text(tmp_path: Path, code: dict | None) -> None:
    attempt = {"status": "failed", "message": "killed by SIGKILL", "message_code": code}
    run = RunDir(make_run(tmp_path, NAME, **{"attempts/0001": attempt}))
    assert read_state(run, NAME).reason == Code.FOREIGN_TEXT(text="killed by SIGKILL")


@pytest.mark.parametrize(
    ("reason", "exit_code", "killed_by", "tells"),
    [
        (Code.EXIT_CODE(exit_code=1, last_line=None), 1, None, True),
        (Code.EXIT_CODE(exit_code=1, last_line=None), 137, None, False),
        (Code.SEE_LOG(ending=Code.KILLED(signal="SIGKILL"), log="x"), None, "SIGKILL", True),
        (Code.KILLED(signal="SIGKILL"), 137, None, False),
        (Code.OUT_OF_MEMORY_KILLED(signal="SIGKILL", exit_code=None), None, "SIGKILL", True),
        (Code.FOREIGN_TEXT(text="exit code 7; see the log"), 7, None, False),
        (Code.FOREIGN_TEXT(text="no space"), 7, None, False),
    ],
)
def test_a_reason_may_tell_the_exit_code_or_signal_too(
    tmp_path: Path, reason: Reason, exit_code: int | None, killed_by: str | None, tells: bool
) -> None:
    run = RunDir(make_run(tmp_path))
    begin_launch(run, ["cpu"], None)
    end_launch(run, "failed", reason, exit_code=exit_code, signal=killed_by)
    assert (read_state(run, NAME).reason, read_state(run, NAME).has_ending_in_reason) == (reason, tells)


def test_a_heartbeat_that_a_loss_of_power_emptied_is_none(tmp_path: Path) -> None:
    run = RunDir(make_run(tmp_path))
    begin_attempt(run).heartbeat(7)
    assert read_state(run, NAME).step == 7
    (run.path / "heartbeat.json").write_bytes(b"")
    assert (read_state(run, NAME).status, read_state(run, NAME).step) == ("running", 0)


def test_a_link_where_a_file_has_to_be_is_one_line_and_not_followed(
    tmp_path: Path, snapshot: Snapshot
) -> None:
    run, target = RunDir(make_run(tmp_path)), tmp_path / "target"
    target.write_text("precious")
    for name, write in (
        ("metrics.jsonl", lambda _: begin_attempt(run)),
        ("heartbeat.json", lambda writer: writer.heartbeat(1)),
        ("result.json", lambda writer: writer.finish(1)),
    ):
        writer = begin_attempt(run)
        content = (run.path / name).read_bytes() if (run.path / name).exists() else None
        (run.path / name).unlink(missing_ok=True)
        (run.path / name).symlink_to(target)
        with pytest.raises(StoreError) as caught:
            write(writer)
        snapshot(caught.value)
        assert len(str(caught.value).splitlines()) == 1
        (run.path / name).unlink()
        if content is not None:
            (run.path / name).write_bytes(content)
    assert target.read_text() == "precious"


def test_job_and_launcher_are_believed_in_turn(tmp_path: Path) -> None:
    run = RunDir(make_run(tmp_path))

    def seen() -> tuple[str, str | None, str | None]:
        state = read_state(run, NAME)
        return state.status, state.message, state.ending

    begin_launch(run, ["cpu"], None)
    update_launch(run, pid=1)
    assert seen() == ("running", None, None)  # it is being started
    end_launch(run, "failed", Code.FOREIGN_TEXT(text="exit code 7; see the log"), exit_code=7, signal=None)
    assert seen() == ("failed", "exit code 7; see the log", "exit code 7")  # it never began an attempt
    begin_launch(run, ["cpu"], None)
    begin_attempt(run)
    assert seen() == ("running", None, None)
    end_launch(run, "failed", Code.FOREIGN_TEXT(text="killed by SIGKILL"), exit_code=None, signal="SIGKILL")
    assert seen() == ("failed", "killed by SIGKILL", "signal SIGKILL")  # it died without a word
    again = begin_attempt(run)  # started again by a cluster: no launcher saw that
    assert seen() == ("running", None, None)
    again.fail(Code.FOREIGN_TEXT(text="no space"), exit_code=2)
    assert seen() == ("failed", "no space", "exit code 2")
    assert [launch.attempts for launch in run.launches()] == [0, 1]


def test_a_launcher_does_not_speak_of_an_attempt_that_fenced_its_job(tmp_path: Path) -> None:
    run = RunDir(make_run(tmp_path))
    begin_launch(run, ["cpu"], None)
    begin_attempt(run)
    newer = begin_attempt(run)  # a cluster's, say: the launcher's job stops, with exit code 2
    end_launch(run, "failed", Code.FOREIGN_TEXT(text="exit code 2 (FencedError)"), exit_code=2, signal=None)
    assert read_state(run, NAME).status == "running"
    newer.interrupt(exit_code=3)
    assert read_state(run, NAME).status == "interrupted"


def test_a_record_is_read_as_it_was_written(tmp_path: Path, snapshot: Snapshot) -> None:
    run = RunDir(tmp_path / "run")
    assert not run.exists and not run.is_run
    name = RunName(arm="b", seed=3, rerun=1)
    write_config(run, "e", name, {"steps": 2}, "../w")
    assert run.exists and run.is_run
    record = run.record()
    assert (record.experiment, record.name, record.config) == ("e", name, {"steps": 2})
    assert run.initial_weights == tmp_path / "run" / "../w"
    write_json(run.path / "config.json", {"model_type": "qwen2"})
    assert not run.is_run
    with snapshot.refused(StoreError):
        run.record()
    for wrong in ({"seed": "3"}, {"config": None}, {"initial_weights": 7}):
        write_config(run, "e", name, {"steps": 2}, "../w")
        write_json(run.path / "config.json", read_json(run.path / "config.json") | wrong)
        for read in (run.record, lambda: read_state(run, name), lambda: run.initial_weights):
            with snapshot.refused(StoreError):
                read()


def test_a_resumed_launch_may_change_limits_and_the_share_of_a_gpu_and_checkpoints_stay_valid(
    tmp_path: Path,
) -> None:
    def identity(config: dict) -> str:
        run = RunDir(tmp_path / "run")
        write_config(run, "e", NAME, config)
        return run.identity()

    config = {"steps": 2, "cluster": {"gpus_per_node": 1, "runs_per_gpu": 1}, "limits": {}}
    shared = {**config, "cluster": {"gpus_per_node": 1, "runs_per_gpu": 5}, "limits": {"run_s": 9.0}}
    assert identity(config) == identity(shared)
    assert identity(config) != identity({**config, "cluster": {"gpus_per_node": 2, "runs_per_gpu": 1}})


def test_opening_what_is_no_experiment_lists_those_that_are(tmp_path: Path, snapshot: Snapshot) -> None:
    with snapshot.refused(StoreError):
        open_experiment(tmp_path / "mine")
    make_run(tmp_path / "other")
    with snapshot.refused(StoreError):
        open_experiment(tmp_path / "mine")
    write_json(tmp_path / "other" / "experiment.json", {"schema_version": 99})
    with snapshot.refused(StoreError):
        open_experiment(tmp_path / "other")


@pytest.mark.parametrize("kind", ["pipe", "endless"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "validation.jsonl", "stdout.log"])
def test_what_is_no_file_neither_hangs_nor_fills_the_memory(
    tmp_path: Path, name: str, kind: str, snapshot: Snapshot
) -> None:
    run = RunDir(make_run(tmp_path))
    path = run.path / name
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    assert run.step_attempts() == {} and run.read_log() == "" and read_state(run, NAME).status == "pending"
    if name in ("metrics.jsonl", "events.jsonl"):
        with snapshot.refused(StoreError):
            begin_attempt(run)
    else:
        assert begin_attempt(run).attempt == 1


@pytest.mark.parametrize("attempt", [10**18, 999_999_999, 10**400, True, "2"])
def test_an_absurd_attempt_in_a_row_blocks_no_later_one(tmp_path: Path, attempt: object) -> None:
    run = RunDir(make_run(tmp_path))
    begin_attempt(run).metrics(1, {"x": 1.0})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "attempt": attempt, "x": 7.0}) + "\n")
    assert run.step_attempts() == {1: 1}
    writer = begin_attempt(run)
    writer.metrics(2, {"x": 2.0})
    assert writer.attempt == 2 and run.metrics()["x"].values.tolist() == [1.0, 2.0]


def test_after_the_last_attempt_that_can_be_numbered_comes_one_line(
    tmp_path: Path, snapshot: Snapshot
) -> None:
    run = RunDir(make_run(tmp_path))
    write_json(run.path / "attempts" / "999999999.json", {})
    with snapshot.refused(StoreError):
        begin_attempt(run)


@pytest.mark.parametrize(
    "bad",
    [
        *(b'{"step": 2, "at', b"\xef\xbb\xbf{}", b'{"step": 2, "x": "y"}', b'{"step": 2, "x": [1]}', b"[]"),
        b'{"step": 2, "attempt": 1, "x": 2.0}',  # without its checksum
        b'{"step": 2, "attempt": 1, "x": 6.0, "crc32": "2ef28bf0"}',  # not with its own
    ],
)
def test_a_line_that_is_no_row_is_recorded_anew_by_the_next_attempt(tmp_path: Path, bad: bytes) -> None:
    """Nobody has to edit a file by hand; those who follow it lose no place."""
    run = RunDir(make_run(tmp_path))
    writer = begin_attempt(run)
    for step in (1, 2, 3):
        writer.metrics(step, {"x": float(step)})
    path = run.path / "metrics.jsonl"
    first, _, third, _ = path.read_bytes().split(b"\n")
    path.write_bytes(first + b"\n")
    follower = run.metrics_reader()
    assert len(follower.read()) == 1
    path.write_bytes(b"\n".join([first, bad, third, b""]))
    assert "lacks 1 of 3 steps, the first is 2" in str(run.describe_missing_steps(3))
    writer = begin_attempt(run)
    writer.metrics(2, {"x": 20.0})
    assert [row["step"] for row in follower.read()] == [3, 2]
    assert run.metrics()["x"].values.tolist() == [1.0, 20.0, 3.0] and run.describe_missing_steps(3) is None
    (repair,) = (row["message"] for row in run.events() if row["event"] == "repair")
    assert repair.startswith("lines of metrics.jsonl: blanked 1 ") and repair.endswith(" line 2")
    with path.open("ab") as file:
        file.write(bad + b"\n")
    assert str(run.describe_missing_steps(3)).startswith("metrics.jsonl, line 5 is not a row of metrics")
