"""A copy of a process is as good as a process of its own, and outlives nobody who asked for it."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from abrun.processes import (
    RUN_DIR_VARIABLE,
    ForkedChild,
    adopt_orphans,
    find_children,
    find_descendants,
    find_run_processes,
    fork_server,
    kill_all,
    wait_for_exit,
)
from abrun.processes.fork_server import ForkServer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="copies are Linux's alone")
ASKER = """
import os, sys, time
from pathlib import Path
from abrun.processes import find_children
from tests.processes.test_fork_server import first_copy
run = Path(sys.argv[1])
with (run / "log").open("w") as log:
    server, copy = first_copy([], dict(os.environ), ["sleep"], {"ABRUN_RUN_DIR": str(run)}, log.fileno())
print(*find_children(os.getpid()), flush=True)
time.sleep(60)
"""


def first_copy(
    words: list[str], env: dict[str, str], does: list[str], variables: Mapping[str, str | None], output: int
) -> tuple[ForkServer, ForkedChild | None]:
    """A server and, once it has done its imports, its first copy; None where it ends instead."""
    server, before = ForkServer("tests.copied", words, env), {*find_children(os.getpid())}
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and before <= find_children(os.getpid()):
        copy = server.fork(does, variables, output)
        if copy:
            return server, copy
        time.sleep(0.01)
    return server, None


def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def ended(copy: ForkedChild) -> int | None:
    return wait_for_exit(copy, 20.0, lambda: False)


@pytest.fixture
def forked(tmp_path: Path) -> Iterator[Callable[..., ForkedChild]]:
    servers = list[ForkServer]()

    def fork(*does: str, **variables: str | None) -> ForkedChild:
        variables |= {RUN_DIR_VARIABLE: str(tmp_path)}
        with (tmp_path / "log").open("ab") as log:
            if servers:
                copy = servers[0].fork(does, variables, log.fileno())
            else:
                env = {**os.environ, "KEPT": "kept", "REMOVED": "there", "CHANGED": "before"}
                server, copy = first_copy([], env, [*does], variables, log.fileno())
                servers.append(server)
        assert copy is not None
        return copy

    yield fork
    servers[0].close()
    adopt_orphans(False)


def test_a_copy_has_its_variables_output_session_and_no_file_more(
    forked: Callable[..., ForkedChild], tmp_path: Path
) -> None:
    copy = forked("tell", "KEPT", "REMOVED", "CHANGED", RUN_DIR_VARIABLE, REMOVED=None, CHANGED="=\n\udcff")
    assert ended(copy) == 0
    variables, system = (tmp_path / "log").read_text(errors="surrogateescape").splitlines()
    assert variables == repr(["kept", None, "=\n\udcff", str(tmp_path)])
    assert system == "True 4"  # input, output, errors, and listdir's own
    assert [ended(forked("end", status)) for status in "05"] == [0, 5]


def test_a_copy_and_what_it_starts_are_found_by_their_run_and_reached_by_signals(
    forked: Callable[..., ForkedChild], tmp_path: Path
) -> None:
    copy = forked("start_below")
    until(lambda: len(find_run_processes(tmp_path)) == 3)
    assert copy.pid in {process.pid for process in find_run_processes(tmp_path)}
    copy.kill()
    assert ended(copy) == -signal.SIGKILL
    assert len(find_run_processes(tmp_path)) == 2  # though nobody says any more whose they are
    assert not kill_all(lambda: find_run_processes(tmp_path))
    asked = forked("sleep")
    asked.terminate()
    assert ended(asked) == -signal.SIGTERM


@pytest.mark.parametrize("stopped", [False, True])
def test_nothing_lives_longer_than_who_asked(stopped: bool, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ASKER, str(tmp_path)]
    asker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert asker.stdout is not None
    pids = [int(word) for word in asker.stdout.readline().split()]
    assert len(pids) == 2 and all(map(lives, pids))
    if stopped:
        for pid in pids:
            if pid not in {process.pid for process in find_run_processes(tmp_path)}:
                os.kill(pid, signal.SIGSTOP)
    asker.kill()
    asker.wait()
    asker.stdout.close()
    until(lambda: not any(map(lives, pids)))


@pytest.mark.parametrize("word", ["thread", "refuses", "one"])
def test_a_server_that_no_copy_should_be_made_of_ends(word: str, tmp_path: Path) -> None:
    with (tmp_path / "log").open("ab") as log:
        order = (["end", "0"], {RUN_DIR_VARIABLE: str(tmp_path)}, log.fileno())
        server, copy = first_copy([word], dict(os.environ), *order)
        assert copy is None and server.fork(*order) is None
    server.close()


def test_a_copy_that_is_forked_too_late_does_nothing_and_earlier_ones_go_on(
    forked: Callable[..., ForkedChild], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = forked("sleep")
    (server,) = (pid for pid in find_children(os.getpid()) - {earlier.pid} if "tests.copied" in words_of(pid))
    monkeypatch.setattr(fork_server, "ANSWER_TIMEOUT_S", 0.3)
    os.kill(server, signal.SIGSTOP)
    with pytest.raises(AssertionError):
        forked("tell")
    until(lambda: not lives(server))
    with pytest.raises(AssertionError):
        forked("tell")
    assert earlier.poll() is None and not (tmp_path / "log").read_text()
    earlier.kill()
    assert ended(earlier) == -signal.SIGKILL


def words_of(pid: int) -> list[str]:
    """Return a process's command line; nothing of one that has ended since it was listed."""
    try:
        return psutil.Process(pid).cmdline()
    except psutil.NoSuchProcess:  # gone, or a zombie
        return []


def test_a_slow_answer_is_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ForkServer("tests.copied", ["slow"], dict(os.environ))
    until(lambda: any("tests.copied" in words_of(pid) for pid in find_children(os.getpid())))
    monkeypatch.setattr(fork_server, "ANSWER_TIMEOUT_S", 0.3)
    with (tmp_path / "log").open("ab") as log:
        until(
            lambda: (
                server.fork(["tell"], {RUN_DIR_VARIABLE: str(tmp_path)}, log.fileno()) or ended_server(server)
            )
        )
    time.sleep(1.5)
    assert not (tmp_path / "log").read_text() and not find_run_processes(tmp_path)
    server.close()


def ended_server(server: ForkServer) -> bool:
    return not any("tests.copied" in words_of(process.pid) for process in find_descendants(os.getpid()))


def test_one_asks_who_has_many_files_open(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    try:
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context((tmp_path / "log").open("ab")) for _ in range(1100)]
            order = (["end", "3"], {RUN_DIR_VARIABLE: str(tmp_path)}, files[-1].fileno())
            server, copy = first_copy([], dict(os.environ), *order)
            assert copy and ended(copy) == 3
            server.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_child_that_is_forked_ends_alone_hears_signals_and_dies_with_its_parent(
    forked: Callable[..., ForkedChild], tmp_path: Path
) -> None:
    (tmp_path / "go").touch()
    copy = forked("fork_children", str(tmp_path))
    assert ended(copy) == 0
    lines = ["at its exit", "status 7", "status -15", f"the end of {copy.pid}"]
    assert (tmp_path / "log").read_text().splitlines() == lines
    (tmp_path / "go").unlink()
    (tmp_path / "pids").unlink()
    copy = forked("fork_children", str(tmp_path))
    until((tmp_path / "pids").exists)
    waiting = int((tmp_path / "pids").read_text().split()[0])
    assert lives(waiting)
    copy.kill()
    until(lambda: not lives(waiting))
    assert ended(copy) == -signal.SIGKILL
