"""Processes are started as they were asked for, and what cannot be started is said at once."""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from abrun.messages import sentence
from abrun.messages.codes import Code, Reason
from abrun.processes import ending_reason, is_unexplained, poll_interval, start_process

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
def test_a_process_has_the_given_environment_and_no_signal_that_python_ignores(tmp_path: Path) -> None:
    given = {"PATH": os.environ["PATH"], "ODD": "a=b\nc"}  # Python itself would add LC_CTYPE
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        with (tmp_path / "output").open("wb") as output:
            process = start_process(
                ["sh", "-c", "env -0; grep Sig /proc/self/status"], given, death_signal=15, stdout=output
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
    # The C library's signals 32 and 33 may come ignored from whoever started the tests.
    ignored = {number for number in signal.valid_signals() if int(masks["SigIgn"], 16) >> number - 1 & 1}
    assert ignored == by_this_one - by_python
    assert int(masks["SigBlk"], 16) == 0


def test_what_cannot_be_started_is_an_error_of_the_starter(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        start_process(["no-such-command"], os.environ, death_signal=signal.SIGTERM)
    data = tmp_path / "data"
    data.write_text("not a program")
    with pytest.raises(PermissionError):
        start_process([str(data)], os.environ, death_signal=signal.SIGTERM)
    with pytest.raises(NotADirectoryError):
        start_process(["true"], os.environ, death_signal=signal.SIGTERM, cwd=data)


def test_many_threads_start_processes_at_once() -> None:
    """Where the child of a process with threads runs Python before exec, some of these crash or hang."""
    statuses = list[int]()

    def some() -> None:
        for _ in range(5):
            statuses.append(start_process(["true"], os.environ, death_signal=signal.SIGKILL).wait())

    threads = [threading.Thread(target=some) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [0] * 40


def test_a_process_is_started_once_it_runs_not_once_it_ends() -> None:
    process = start_process(["sleep", "5"], os.environ, death_signal=signal.SIGKILL)
    assert process.poll() is None
    process.kill()
    process.wait()


EATER = """
import sys, time
from abrun.processes import count_oom_kills, ending_reason, start_process
import signal
before = count_oom_kills()
eater = start_process([sys.executable, "-c", sys.argv[1]], {}, death_signal=signal.SIGKILL)
print(ending_reason(eater.wait(), "", before).code)
"""


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of 80 MB: what is written into its `cgroup.procs` or `tasks` belongs to it."""
    name = f"abrun-test-{os.getpid()}"
    first = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    group = Path("/sys/fs/cgroup") / name if first else Path("/sys/fs/cgroup/memory") / name
    try:
        group.mkdir()
        (group / ("memory.max" if first else "memory.limit_in_bytes")).write_text("80000000")
    except OSError as error:
        pytest.skip(f"no control group of our own: {error}")
    yield group
    for pid in (group / "cgroup.procs").read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    time.sleep(0.2)
    group.rmdir()


@pytest.mark.parametrize(
    ("does", "expected"),
    [
        ("x = [bytearray(1 << 20) for _ in range(300)]", Code.OUT_OF_MEMORY_KILLED),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", Code.KILLED),
    ],
)
def test_a_process_that_the_kernel_starved_is_told_from_one_that_was_killed(
    small_group: Path, does: str, expected: Code
) -> None:
    joins = f"echo $$ > {small_group}/cgroup.procs; exec "
    command = shlex.join([sys.executable, "-c", EATER, does])
    done = subprocess.run(["sh", "-c", joins + command], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == expected, done.stderr


@pytest.mark.parametrize(
    ("printed", "starved"),
    [
        ("slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0. Some", True),
        (
            "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of",
            True,
        ),
        ("srun: error: n1: task 0: Out Of Memory", True),
        ("srun: error: n1: task 0: Killed", False),
        ("torch.OutOfMemoryError: out of memory", False),
    ],
)
def test_slurm_says_that_memory_ran_out(printed: str, starved: bool) -> None:
    killed, exited = Code.KILLED(signal="SIGKILL"), Code.EXIT_CODE(exit_code=137, last_line=None)
    if starved:
        killed = Code.OUT_OF_MEMORY_KILLED(signal="SIGKILL", exit_code=None)
        exited = Code.OUT_OF_MEMORY_KILLED(signal=None, exit_code=137)
    assert ending_reason(-9, f"step 3\n{printed}\n", None) == killed
    assert ending_reason(137, f"step 3\n{printed}\n", None) == exited
    assert ending_reason(1, printed, None).code == Code.EXIT_CODE
    assert not (starved and is_unexplained(killed))


@pytest.mark.parametrize(
    ("printed", "last_line"),
    [
        ("", None),
        ("loading\nno config.yaml here  \n\n", "no config.yaml here"),
        ("  0%\r 50%\rlost the socket\r\n", "lost the socket"),
        ("ValueError: no\ncleaning up", "ValueError: no"),
    ],
)
def test_an_end_is_told_with_the_last_words_before_it(printed: str, last_line: str | None, snapshot) -> None:
    ending = ending_reason(1, printed, None)
    assert ending == Code.EXIT_CODE(exit_code=1, last_line=last_line)
    ranks = [_rank_failed(ending), _rank_failed(Code.KILLED(signal="SIGABRT"))]
    several = Code.SEE_LOG(ending=Code.SEVERAL_ERRORS(errors=ranks, out_of_memory=False), log="x")
    assert (is_unexplained(ending), is_unexplained(several)) == (last_line is None,) * 2
    assert not is_unexplained(Code.SEVERAL_ERRORS(errors=ranks, out_of_memory=True))
    snapshot(sentence(several))


def _rank_failed(cause: Reason) -> Reason:
    return Code.RANK_FAILED(rank=1, num_ranks=2, host="h", cause=cause)


@linux
@pytest.mark.parametrize("alone", [True, False])
def test_a_process_in_a_group_of_its_own_ignores_no_signal_to_stop(tmp_path: Path, alone: bool) -> None:
    """In its parent's group it keeps ignoring Ctrl-C, which the terminal sends to the whole group."""
    numbers = (signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    options = {"process_group": 0} if alone else {}
    try:
        with (tmp_path / "output").open("wb") as output:
            process = start_process(
                ["grep", "SigIgn", "/proc/self/status"], os.environ, death_signal=9, stdout=output, **options
            )
            assert process.wait() == 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    mask = int((tmp_path / "output").read_text().split()[1], 16)
    assert [bool(mask & 1 << number - 1) for number in numbers] == [not alone] * 2


@pytest.mark.parametrize(
    ("given", "seconds"), [("", 0.2), ("0.02", 0.02), (".05", 0.05), ("3", 0.2), ("x", 0.2)]
)
def test_polls_are_shortened_by_a_number_alone(
    given: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ABRUN_POLL_S", given)
    assert poll_interval(0.2) == seconds
