"""The agent around the ranks: it ends as they do, names who hangs, and leaves nothing."""

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from torch.distributed.elastic.multiprocessing.errors import record

from abrun.errors import LaunchError
from abrun.launch import agent as agents
from abrun.launch.agent import TIMED_OUT
from abrun.launch.agent import _NodeNotes as Notes
from abrun.launch.agent import _record_ending as conclude
from abrun.launch.agent import _scratch as scratch
from abrun.messages import sentence
from abrun.messages.codes import Code, Reason
from abrun.messages.records import encode_reasons
from abrun.processes import SCRATCH, find_run_processes, progress
from abrun.runs.failures import (
    ERROR_FILE,
    Failure,
    cause_of,
    first_failure,
    record_exception,
    record_failure,
)
from abrun.runs.failures import _read_error_file as recorded
from abrun.runs.launches import read_endings, write_config
from abrun.runs.layout import RunName
from abrun.runs.records import NodeStatus, recorded_reason
from abrun.runs.rundir import RunDir
from abrun.runs.state import read_state
from abrun.runs.writer import begin_attempt, write_node

NAME = RunName(arm="baseline", seed=0)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc and parent-death signals")


def start(
    directory: Path, *limits: str, stdout: Any = subprocess.PIPE, **does: str
) -> "subprocess.Popen[str]":
    """Two ranks under an agent; `rank_0="hang"`: what each does, to wait being the rule."""
    environment = {
        **os.environ,
        "ABRUN_RUN_DIR": str(directory),
        "RANK_DOES": json.dumps({name.removeprefix("rank_"): what for name, what in does.items()}),
    }
    command = [sys.executable, "-m", "abrun.launch.agent", "--ranks", "2", *limits, "tests.trainer.loop.rank"]
    return subprocess.Popen(
        [*command, str(directory)],
        env=environment,
        stdout=stdout,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_in(directory: Path) -> RunDir:
    run = RunDir(directory)
    write_config(run, "e", NAME, {"steps": 9})
    return run


def ending_of(agent: "subprocess.Popen[str]", run: RunDir) -> Reason:
    """What the agent notes of its end; it prints the same."""
    printed, _ = agent.communicate(timeout=120)
    (ending,) = read_endings(run, 0, "")
    assert f"error: {sentence(ending)}\n" in printed
    return ending


def until(condition: Callable[[], object], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def started(directory: Path) -> bool:
    return len([path for path in directory.glob("pid-*") if path.read_text()]) == 2


def test_a_rank_that_hangs_is_named_and_ended(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    ending = ending_of(start(tmp_path, "--stalled-s", "4", rank_1="hang"), run)
    silence = ending["silence"]
    assert (ending.code, silence.code) == (Code.STALL_LIMIT_REACHED, Code.RANKS_SILENT)
    assert (silence["silent_s"] >= 4, silence["num_unstarted"], silence["num_more"]) == (True, 0, 0)
    (hanging,) = [rank for rank in silence["ranks"] if rank["rank"] == 1]
    assert hanging["place"].startswith("hang (trainer/loop/rank.py:")
    assert (hanging["doing"], hanging["host"]) == ("generation", None)
    attempt = run.attempt()
    assert (attempt.status, attempt.exit_code) == ("failed", TIMED_OUT)
    assert not find_run_processes(tmp_path)


def test_a_rank_that_never_came_to_its_first_line_is_counted(tmp_path: Path) -> None:
    silence = agents.silent_ranks_reason(7.6, [], num_unstarted=2)
    assert silence == Code.RANKS_SILENT(silent_s=8, ranks=[], num_unstarted=2, num_more=0)


def test_a_silence_of_more_than_ten_steps_is_told_by_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATIENCE_S", "1")
    run = run_in(tmp_path)
    agent = start(tmp_path, rank_1="hang")
    try:
        until(lambda: read_state(run, NAME).status == "stalled")
        reason = read_state(run, NAME).reason
        assert reason is not None and reason.code == Code.RANKS_SILENT
        assert [(rank["rank"], rank["doing"]) for rank in reason["ranks"]] == [
            (0, "policy_training"),
            (1, "generation"),
        ]
        assert {rank["host"] for rank in reason["ranks"]} == {socket.gethostname()}
        assert reason["ranks"][0]["place"].startswith("main (")
        (tmp_path / "go-on").touch()
        until(lambda: read_state(run, NAME).status == "running")
    finally:
        agent.terminate()
        agent.communicate(timeout=60)


@pytest.mark.slow
def test_a_node_that_waits_for_another_is_not_taken_for_one_that_hangs(tmp_path: Path) -> None:
    """Rank 0 is silent for longer than it may, as in a collective, and rank 1 on the other node works on."""
    run = run_in(tmp_path)
    (tmp_path / "go-on").touch()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meet = f"127.0.0.1:{free.getsockname()[1]}"
    nodes = [
        start(
            tmp_path,
            *("--ranks", "1", "--nodes", "2", "--node", str(node), "--meet", meet, "--stalled-s", "3"),
            rank_1="hang",
        )
        for node in range(2)
    ]
    until(lambda: started(tmp_path))
    time.sleep(6)
    assert [node.poll() for node in nodes] == [None, None]
    (tmp_path / "go-on").unlink()
    for node in nodes:  # one ends both: it is one machine
        node.communicate(timeout=120)
    ending = read_endings(run, 0, "")[0]
    assert ending.code == Code.STALL_LIMIT_REACHED
    places = {rank["rank"]: rank["place"] for rank in ending["silence"]["ranks"]}
    assert places[1].startswith("hang (trainer/loop/rank.py:")


def notes_of(directory: Path, num_nodes: int) -> tuple[RunDir, Notes]:
    run = RunDir(directory)
    config: dict[str, Any] = {"steps": 9}
    write_config(run, "e", RunName(arm="a", seed=0), config)
    notes = Notes(run, Namespace(node=0, nodes=num_nodes, stalled_s=math.inf))
    begin_attempt(run)
    return run, notes


def test_an_attempt_that_begins_just_now_has_not_been_silent_since_1970(tmp_path: Path) -> None:
    run, _ = notes_of(tmp_path, 1)
    (tmp_path / "attempts" / "0002.json").touch()  # and is about to be written
    assert read_state(run, RunName(arm="a", seed=0)).status == "running"


def test_what_another_node_says_counts_for_a_minute_by_this_ones_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, notes = notes_of(tmp_path, 2)
    now = [1000.0]
    monkeypatch.setattr(agents.time, "monotonic", lambda: now[0])
    notes.write(0.0, None, "", is_in_steps=True)
    assert notes.other_nodes() == []
    write_node(
        run, NodeStatus(attempt=1, node=1, host="n2", time_s=5.0, silent_s=2.0)
    )  # its clock is far off
    now[0] += 2
    assert [note.host for note in notes.other_nodes()] == ["n2"]
    now[0] += 59
    assert notes.other_nodes()
    now[0] += 2
    assert notes.other_nodes() == []


def test_a_machine_that_has_slept_says_at_once_that_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Monotonic clocks stand still meanwhile; whoever asks for the status goes by the calendar."""
    run, notes = notes_of(tmp_path, 1)
    name = RunName(arm="a", seed=0)
    notes.write(0.0, None, "", is_in_steps=True)
    late = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: late)
    assert read_state(run, name).status == "stalled"
    notes.write(0.0, None, "", is_in_steps=True)
    assert read_state(run, name).status == "running"


def test_what_a_rank_does_is_noted_at_once_while_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And every 15 s between the phases of usual steps, which alternate."""
    run, notes = notes_of(tmp_path, 1)
    now = [time.time()]
    monkeypatch.setattr(time, "time", lambda: now[0])

    def noted(after_s: float, activity: str, *, is_in_steps: bool) -> str:
        now[0] += after_s
        notes.write(0.0, None, activity, is_in_steps=is_in_steps)
        return run.nodes(1)[0].activity

    assert noted(0, "model set-up", is_in_steps=False) == "model set-up"
    assert noted(0.5, "generation", is_in_steps=False) == "model set-up"
    assert noted(0.5, "generation", is_in_steps=False) == "generation"
    assert noted(14, "logprobs", is_in_steps=True) == "generation"
    assert noted(1, "logprobs", is_in_steps=True) == "logprobs"
    progress = read_state(run, RunName(arm="a", seed=0)).progress
    assert progress and (progress.activity, progress.limit_s) == ("logprobs", None)


@pytest.mark.slow
def test_a_run_outlives_its_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `rm -rf /tmp/*` leaves it: the ranks go on giving signs, and where one is cannot be said."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "go-on").touch()
    run = run_in(tmp_path)
    agent = start(tmp_path, "--stalled-s", "2", rank_0="hang", rank_1="hang")
    until(lambda: started(tmp_path))
    for folder in (tmp_path / "tmp").glob(f"{SCRATCH}*"):
        shutil.rmtree(folder)
    time.sleep(2.5)
    assert agent.poll() is None
    (tmp_path / "go-on").unlink()
    silence = ending_of(agent, run)["silence"]
    assert {rank["place"] for rank in silence["ranks"]} == {str(progress.CodeLocation("an unknown place"))}


def test_what_nccl_said_of_a_collective_is_told(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    with (tmp_path / "stdout.log").open("w") as log:  # as launchers have it
        agent = start(tmp_path, stdout=log, rank_1="abort")
        agent.wait(timeout=60)
    (ending,) = read_endings(run, 0, "")
    cause = Code.COLLECTIVE_TIMED_OUT(waited_s=5.041, work="SeqNum=3, OpType=ALLREDUCE")
    assert ending == Code.RANK_FAILED(rank=1, num_ranks=2, host=None, cause=cause)
    assert f"error: {sentence(ending)}" in run.read_log()


def test_it_ends_as_the_first_rank_that_failed(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    agent = start(tmp_path, rank_0="orphan", rank_1="wait")
    until(lambda: started(tmp_path))
    os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
    assert ending_of(agent, run) == rank_failed(1, Code.KILLED(signal="SIGKILL"))
    assert agent.returncode == -signal.SIGKILL
    assert not find_run_processes(tmp_path)


def rank_failed(rank: int, cause: Reason, num_ranks: int = 2) -> Reason:
    return Code.RANK_FAILED(rank=rank, num_ranks=num_ranks, host=None, cause=cause)


class ImportErrorByName(Exception):
    pass


class MissingExtra(ImportError):
    pass


@pytest.mark.parametrize(
    ("kind", "has_origin"),
    [(ModuleNotFoundError, True), (MissingExtra, True), (ImportErrorByName, False), (ValueError, False)],
)
def test_a_failed_import_names_the_error_behind_it_by_its_type(
    kind: type[Exception], has_origin: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers raises it where torchvision is built for another torch."""
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "rank-0.error"))

    @record
    def import_model() -> None:
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as error:
            raise kind("could not import module 'X'") from error

    with pytest.raises(kind) as raised:
        import_model()
    record_exception(raised.value)
    cause, _ = recorded(tmp_path / "rank-0.error") or (None, None)
    assert cause == Code.EXCEPTION(
        kind=None,
        error=f"{kind.__name__}: could not import module 'X'",
        origin="RuntimeError: operator torchvision::nms does not exist" if has_origin else None,
    )


def test_an_exception_without_a_reason_is_quoted(tmp_path: Path) -> None:
    """As another rank program leaves it, which only torch's `record` wraps."""
    message = "ModuleNotFoundError: X"
    failure = failure_of(tmp_path, {0: error_of(message, "")}, Ends(1))
    assert cause_of(failure, "", None) == Code.EXCEPTION(kind=None, error=message, origin=None)


def test_an_error_of_abruns_keeps_its_code_on_its_way_to_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rank-0.error"
    monkeypatch.setenv(ERROR_FILE, str(file))
    reason = Code.RANKS_LOST(waited_s=None, doing="logprobs", error="broken  pipe")
    record_failure(LaunchError(reason))
    cause, _ = recorded(file) or (None, None)
    expected = Code.RANKS_LOST(waited_s=None, doing="logprobs", error="broken pipe")
    assert cause == Code.EXCEPTION(kind="LaunchError", error=expected, origin=None)
    assert cause and sentence(cause) == " ".join(json.loads(file.read_text())["message"]["message"].split())
    record_failure(LaunchError("plain words"))
    plain = Code.FOREIGN_TEXT(text="plain words")
    assert recorded(file) == (Code.EXCEPTION(kind="LaunchError", error=plain, origin=None), ANY)


class Ends:
    """A process that has ended, with a status, when it is looked at the last time."""

    pid = 1

    def __init__(self, *polls: int | None) -> None:
        self._polls = list(polls)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self.returncode = self._polls.pop(0) if len(self._polls) > 1 else self._polls[0]
        return self.returncode

    def terminate(self) -> None:
        pass

    kill = terminate


def error_of(message: str, callstack: str = "", **more: Any) -> str:
    """The file of a rank that fails, as torch writes it."""
    extra = {"py_callstack": callstack, "timestamp": "100"}
    return json.dumps({"message": {"message": message, "extraInfo": extra}, **more})


def failure_of(directory: Path, said: dict[int, str], *ranks: Ends) -> Failure:
    """The failure that is taken for the first one."""
    for rank, content in said.items():
        (directory / f"rank-{rank}.error").write_text(content)
    processes: Any = dict(enumerate(ranks))
    failure = first_failure(processes, directory)
    assert failure is not None
    return failure


def blamed(directory: Path, said: dict[int, str], *ranks: Ends) -> tuple[int, int]:
    """The rank of the first failure, and its status."""
    failure = failure_of(directory, said, *ranks)
    return failure.rank, failure.status


@pytest.mark.parametrize("polls", [[7], [None, 7], [None, None, 7]])
def test_a_failure_is_noted_whenever_it_happens(tmp_path: Path, polls: list[int | None]) -> None:
    assert blamed(tmp_path, {}, Ends(*polls)) == (0, 7)


@pytest.mark.parametrize(
    "effect",
    [
        Code.RANKS_LOST(waited_s=1.0, doing="logprobs", error="timed out"),
        Code.RANKS_NOT_FOUND(rank=0, address="127.0.0.1:1", error="timed out"),
    ],
)
def test_who_has_lost_others_is_not_the_first_that_failed(tmp_path: Path, effect: Reason) -> None:
    """It says when, in whole seconds; when another was killed is known only once somebody looks."""
    reason = Code.EXCEPTION(kind="LaunchError", error=effect, origin=None)
    lost = {0: error_of("LaunchError: in whatever words", reason=encode_reasons(reason))}
    assert blamed(tmp_path, lost, Ends(None, None, None, 2), Ends(-9)) == (1, -9)
    assert blamed(tmp_path, lost, Ends(2), Ends(None, None, None, 1)) == (1, 1)
    assert blamed(tmp_path, lost, Ends(2), Ends(None, None, None, -15)) == (0, 2), "by the agent"


@pytest.mark.parametrize(
    "said", ["", '{"mess', "[]", "{}", '{"message": "x"}', '{"message": {"message": 1}}']
)
def test_what_a_rank_could_not_say_to_the_end_is_told_by_its_status(tmp_path: Path, said: str) -> None:
    failure = failure_of(tmp_path, {0: said}, Ends(7))
    assert (failure.rank, failure.status) == (0, 7)
    assert cause_of(failure, "", None) == Code.EXIT_CODE(exit_code=7, last_line=None)


def test_a_run_that_took_too_long_has_failed_though_it_saved_a_checkpoint(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    begin_attempt(run).interrupt(exit_code=3)
    limit = Code.TIME_LIMIT_REACHED(limit_s=3.0)
    conclude(run, 0, 0, TIMED_OUT, limit, None)
    assert (run.attempt().status, recorded_reason(run.attempt())) == ("failed", limit)


def test_a_rank_without_a_word_leaves_the_path_of_what_it_printed(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    begin_attempt(run)
    wordless = rank_failed(0, Code.EXIT_CODE(exit_code=7, last_line=None), num_ranks=1)
    conclude(run, 0, 0, 7, wordless, None)
    assert recorded_reason(run.attempt()) == Code.SEE_LOG(ending=wordless, log=run.log)


def test_a_node_that_is_not_the_first_leaves_a_note_for_the_launcher(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    begin_attempt(run)
    reason = rank_failed(1, Code.KILLED(signal="SIGKILL"))
    conclude(run, 1, 0, -9, reason, None)
    assert (run.attempt().status, read_endings(run, 0, ""), read_endings(run, 1, "")) == (
        "running",
        [reason],
        [],
    )
    for torn in ("", '{"after": 0, "reas', "[]", '{"after": 0, "reason": {"code": "no_such", "values": {}}}'):
        (tmp_path / "nodes" / "ending-node-0001.json").write_text(torn)
        assert (read_endings(run, 0, ""), run.nodes(1)) == ([], [])


def all_children(pid: int) -> list[str]:
    """The children of a process, dead ones included."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_what_killed_agents_left_is_removed_and_what_others_use_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / f"{SCRATCH}left"
    with scratch(range(1)) as (used, _), scratch(range(2)) as (other, _):
        assert {path.name for path in other.iterdir()} == {"rank-0", "rank-1"}
        left.mkdir()
        (left / "rank-0").touch()
        for folder in (left, used):
            os.utime(folder, (0, 0))
        with scratch(range(1)):
            assert not left.exists()
            assert used.exists() and other.exists()
    assert not list(tmp_path.iterdir())


def test_no_room_for_temporary_files_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(LaunchError, match=r"^temporary files: .*; free some space there, or set TMPDIR$"):
        scratch(range(1)).__enter__()


def listening(pid: int) -> list[str]:
    """The IPv4 addresses (as /proc has them) and IPv6 ones on which a process listens."""
    inodes = set[str]()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(entry) if entry.is_symlink() else ""
        inodes |= {target[8:-1]} if target.startswith("socket:[") else set[str]()
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                addresses.append(fields[1].rpartition(":")[0])
    return addresses


@pytest.mark.parametrize("delay_s", [0.0, pytest.param(0.1, marks=pytest.mark.slow)])
def test_its_death_is_that_of_the_ranks(tmp_path: Path, delay_s: float) -> None:
    agent = start(tmp_path)
    until(lambda: len(find_run_processes(tmp_path)) > 1)  # ranks that may not have run a line yet
    time.sleep(delay_s)
    agent.kill()
    agent.communicate(timeout=60)
    until(lambda: not find_run_processes(tmp_path), timeout_s=10)


@pytest.mark.usefixtures("heard_signals")
def test_a_request_to_stop_is_passed_on_once_and_ended_daemons_keep_no_ids(tmp_path: Path) -> None:
    agent = start(tmp_path, rank_0="daemons")
    until(lambda: len(all_children(agent.pid)) > 2)
    until(lambda: started(tmp_path) and len(all_children(agent.pid)) == 2)  # the ranks
    pids = [agent.pid, *(int((tmp_path / f"pid-{rank}").read_text()) for rank in range(2))]
    own = ["0100007F"]  # the network hears of no rank
    assert [listening(pid) for pid in pids] == [own, own, []]
    assert [os.getpgid(pid) for pid in pids[1:]] == pids[1:]  # Ctrl-C asks the agent alone
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):
        agent.send_signal(number)
    agent.communicate(timeout=60)
    assert agent.returncode == -signal.SIGTERM  # the ranks have no handler of their own
