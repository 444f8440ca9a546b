"""A copy of a process is as good as a process of its own, and outlives nobody who asked for it."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from abrun.processes import RUN_DIR, children, end_all, forks, processes_of, wait
from abrun.processes.forks import Copy, ForkServer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="copies are Linux's alone")
ASKER = """
import os, sys, time
from pathlib import Path
from tests.processes.test_forks import asked_until_ready
server = asked_until_ready([], dict(os.environ))
run = Path(sys.argv[1])
with (run / "log").open("w") as log:
    copy = server.fork(["sleep"], {"ABRUN_RUN_DIR": str(run)}, log.fileno())
print(server._process.pid, copy.pid, flush=True)
time.sleep(60)
"""


def asked_until_ready(modules: list[str], env: dict[str, str]) -> ForkServer:
    server = ForkServer("tests.copied", modules, env)
    until(lambda: server._hear() is None and (server._may_ask or server.gone))
    return server


def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def server() -> Iterator[ForkServer]:
    server = asked_until_ready([], {**os.environ, "KEPT": "kept", "REMOVED": "there", "CHANGED": "before"})
    yield server
    server.close()


@pytest.fixture
def forked(server: ForkServer, tmp_path: Path) -> Callable[..., Copy]:
    def fork(*words: str, **variables: str | None) -> Copy:
        with (tmp_path / "log").open("ab") as log:
            copy = server.fork(words, {RUN_DIR: str(tmp_path), **variables}, log.fileno())
        assert copy is not None
        return copy

    return fork


def ended(copy: Copy) -> int | None:
    return wait(copy, 20.0, lambda: False)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def lives(pid: int) -> bool:
    try:
        return state(pid) != "Z"
    except OSError:
        return False


def test_a_copy_has_its_variables_output_session_and_no_file_more(
    forked: Callable[..., Copy], tmp_path: Path
) -> None:
    copy = forked("tell", "KEPT", "REMOVED", "CHANGED", RUN_DIR, REMOVED=None, CHANGED="=\n\udcff")
    assert ended(copy) == 0
    variables, system = (tmp_path / "log").read_text(errors="surrogateescape").splitlines()
    assert variables == repr(["kept", None, "=\n\udcff", str(tmp_path)])
    assert system == "True 4"  # input, output, errors, and listdir's own


@pytest.mark.parametrize(("words", "status"), [(["end", "0"], 0), (["end", "5"], 5), (["die", "9"], -9)])
def test_how_a_copy_ends_is_told(forked: Callable[..., Copy], words: list[str], status: int) -> None:
    copies = [forked(*words) for _ in range(3)]
    assert [ended(copy) for copy in copies] == [status] * 3
    copies[0].kill()  # whose id may be another's by now


def test_a_copy_and_what_it_starts_are_found_by_their_run(
    forked: Callable[..., Copy], server: ForkServer, tmp_path: Path
) -> None:
    copy = forked("start_below")
    until(lambda: len(processes_of(tmp_path)) == 2)
    assert copy.pid in {process.pid for process in processes_of(tmp_path)}
    command = Path(f"/proc/{copy.pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    assert command == [os.fsencode(sys.executable), b"-P", b"-m", b"start_below"]
    assert not end_all(lambda: processes_of(tmp_path))
    assert ended(copy) == -signal.SIGKILL
    assert not server.gone  # it is no process of a run


def test_signals_reach_a_copy(forked: Callable[..., Copy]) -> None:
    asked, killed = forked("sleep"), forked("sleep")
    assert asked.poll() is None
    asked.terminate()
    killed.kill()
    assert (ended(asked), ended(killed)) == (-signal.SIGTERM, -signal.SIGKILL)


def test_copies_are_asked_to_end_with_their_server(
    forked: Callable[..., Copy], server: ForkServer, tmp_path: Path
) -> None:
    copy, quick = forked("sleep"), forked("end", "3")
    until(lambda: quick.poll() is not None)
    os.kill(server._process.pid, signal.SIGKILL)
    assert (ended(copy), quick.poll()) == (-signal.SIGTERM, 3)
    assert server.gone and not lives(copy.pid)
    with (tmp_path / "log").open("ab") as log:
        assert server.fork(["sleep"], {RUN_DIR: str(tmp_path)}, log.fileno()) is None


@pytest.mark.parametrize("stopped", [False, True])
def test_nothing_lives_longer_than_who_asked(stopped: bool, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ASKER, str(tmp_path)]
    asker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert asker.stdout is not None
    pids = [int(word) for word in asker.stdout.readline().split()]
    assert len(pids) == 2 and all(map(lives, pids))
    if stopped:
        os.kill(pids[0], signal.SIGSTOP)
        until(lambda: state(pids[0]) == "T")
    asker.kill()
    asker.wait()
    asker.stdout.close()
    until(lambda: not any(map(lives, pids)))


@pytest.mark.parametrize("modules", [["thread"], ["refuses"]])
def test_a_server_that_no_copy_should_be_made_of_ends(modules: list[str], tmp_path: Path) -> None:
    server = asked_until_ready(modules, dict(os.environ))
    until(lambda: server.gone)
    with (tmp_path / "log").open("ab") as log:
        assert server.fork(["end", "0"], {RUN_DIR: str(tmp_path)}, log.fileno()) is None
    server.close()


@pytest.mark.parametrize("modules", [[], ["slow"]])
def test_a_copy_that_is_forked_too_late_does_nothing(
    modules: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = asked_until_ready(modules, dict(os.environ))
    monkeypatch.setattr(forks, "ANSWER_S", 0.3)
    if not modules:
        os.kill(server._process.pid, signal.SIGSTOP)
    with (tmp_path / "log").open("ab") as log:
        assert server.fork(["sleep"], {RUN_DIR: str(tmp_path)}, log.fileno()) is None
        os.kill(server._process.pid, signal.SIGCONT)
        time.sleep(1.0)
        until(lambda: not children(server._process.pid))
        assert not server.gone and not (tmp_path / "log").read_text()
        assert server.fork(["sleep"], {RUN_DIR: str(tmp_path)}, log.fileno()) is None
    server.close()


def test_a_server_that_does_not_say_how_its_copy_ended_is_ended(
    server: ForkServer, forked: Callable[..., Copy], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = forked("sleep")
    monkeypatch.setattr(forks, "ANSWER_S", 0.3)
    os.kill(server._process.pid, signal.SIGSTOP)
    copy.kill()
    assert ended(copy) == -signal.SIGTERM and server.gone


def test_no_copy_is_taken_for_an_earlier_one_with_its_id(
    server: ForkServer, forked: Callable[..., Copy]
) -> None:
    first = forked("end", "7")
    assert ended(first) == 7
    server._ended |= dict.fromkeys(range(first.pid, first.pid + 5000), 7)
    second = forked("sleep")
    assert second.poll() is None
    second.kill()
    assert ended(second) == -signal.SIGKILL


def test_where_no_more_processes_are_allowed_those_there_are_go_on(tmp_path: Path) -> None:
    server = asked_until_ready(["one"], dict(os.environ))
    with (tmp_path / "log").open("ab") as log:
        copy = server.fork(["sleep"], {RUN_DIR: str(tmp_path)}, log.fileno())
        assert server.fork(["sleep"], {RUN_DIR: str(tmp_path)}, log.fileno()) is None
    assert copy and copy.poll() is None
    time.sleep(1.0)
    copy.kill()
    assert ended(copy) == -signal.SIGKILL
    server.close()


def test_one_asks_who_has_many_files_open(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    try:
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context((tmp_path / "log").open("ab")) for _ in range(1100)]
            server = asked_until_ready([], dict(os.environ))
            copy = server.fork(["end", "3"], {RUN_DIR: str(tmp_path)}, files[-1].fileno())
            assert copy and ended(copy) == 3
            server.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_spare_becomes_a_child_with_files_and_variables_and_the_others_end(
    forked: Callable[..., Copy], tmp_path: Path
) -> None:
    copy = forked("spares", str(tmp_path), "3")
    until((tmp_path / "written").exists)
    (tmp_path / "go").touch()
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert ended(copy) == 0
    assert (tmp_path / "inherited").read_text() == repr(["of a spare", "now", None])
    printed = (tmp_path / "log").read_text()
    assert "a spare prints\n" in printed and "status 7\n" in printed
    until(lambda: not any(map(lives, pids)))


def test_spares_die_with_whose_they_are(forked: Callable[..., Copy], tmp_path: Path) -> None:
    copy = forked("spares", str(tmp_path), "2", REMOVED="there")
    until(lambda: (tmp_path / "written").exists())
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert lives(pids[0])
    copy.kill()
    until(lambda: not any(map(lives, pids)))


def test_a_spare_that_is_killed_before_it_is_told_what_to_run_has_ended_so() -> None:
    spare = forks.Spare(lambda words: None, [])
    os.kill(spare.pid, signal.SIGKILL)
    os.waitid(os.P_PID, spare.pid, os.WEXITED | os.WNOWAIT)
    assert wait(spare.become(["sleep"], dict(os.environ), []), 5.0, lambda: False) == -signal.SIGKILL
