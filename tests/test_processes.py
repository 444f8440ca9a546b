"""Processes are started as they were asked for, and what cannot be started is said at once."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from abrun.processes import start

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
def test_a_process_has_the_given_environment_and_no_signal_that_python_ignores(tmp_path: Path) -> None:
    given = {"PATH": os.environ["PATH"], "ODD": "a=b\nc"}  # Python itself would add LC_CTYPE
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        with (tmp_path / "output").open("wb") as output:
            process = start(
                ["sh", "-c", "env -0; grep Sig /proc/self/status"], given, dies_by=15, stdout=output
            )
            assert process.wait() == 0
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    environment, _, status = (tmp_path / "output").read_text().rpartition("\0")
    own = {
        entry
        for entry in environment.split("\0")
        if not entry.startswith(("PWD=", "_=", "SHLVL=", "OLDPWD="))
    }
    assert own == {f"PATH={given['PATH']}", "ODD=a=b\nc"}
    masks = dict(line.split(":\t") for line in status.splitlines())
    by_this_one = {number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN}
    by_python = {signal.SIGPIPE, signal.SIGXFSZ}
    assert int(masks["SigIgn"], 16) == sum(1 << number - 1 for number in by_this_one - by_python)
    assert int(masks["SigBlk"], 16) == 0


def test_what_cannot_be_started_is_an_error_of_the_starter(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        start(["no-such-command"], os.environ, dies_by=signal.SIGTERM)
    data = tmp_path / "data"
    data.write_text("not a program")
    with pytest.raises(PermissionError):
        start([str(data)], os.environ, dies_by=signal.SIGTERM)
    with pytest.raises(NotADirectoryError):
        start(["true"], os.environ, dies_by=signal.SIGTERM, cwd=data)


def test_many_threads_start_processes_at_once() -> None:
    """Where the child of a process with threads runs Python before exec, some of these crash or hang."""
    statuses = list[int]()

    def some() -> None:
        for _ in range(5):
            statuses.append(start(["true"], os.environ, dies_by=signal.SIGKILL).wait())

    threads = [threading.Thread(target=some) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [0] * 40


def test_a_process_is_started_once_it_runs_not_once_it_ends() -> None:
    process = start(["sleep", "5"], os.environ, dies_by=signal.SIGKILL)
    assert process.poll() is None
    process.kill()
    process.wait()
