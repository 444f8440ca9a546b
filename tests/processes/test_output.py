"""What a command prints may fail to be printed: its work goes on, and it ends as it would have."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

import pytest

from abrun.processes.output import MAX_PENDING_BYTES, UnfailingOutput
from abrun.runs.experiment import planned_runs, read_run_state, run_dir
from tests.launch.fakes import until
from tests.snapshot import Snapshot

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full and /proc")
SLOW = pytest.mark.slow

TRAINER = """
import json, random, signal, sys, time
arm, seed, path, step_s = sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
ignored = [number.name for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN]
print("ignored:", *sorted(set(ignored) & {"SIGINT", "SIGHUP", "SIGQUIT", "SIGTERM"}), flush=True)
with open(path, "a", buffering=1) as file:
    for step in range(1, 11):
        reward = 1 - 0.8**step + random.Random(f"{arm}/{seed}/{step}").gauss(0, 0.02)
        file.write(json.dumps({"step": step, "reward": reward}) + "\\n")
        time.sleep(step_s)
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe whose runs take a second, and finish in the same way each time."""
    (tmp_path / "trainer.py").write_text(TRAINER)
    argv = ["{python}", str(tmp_path / "trainer.py"), "{arm}", "{seed}", "{run_dir}/log.jsonl", "{step_s}"]
    content: dict[str, Any] = {
        "name": "tiny",
        "trainer": {
            "type": "command",
            "argv": argv,
            "parameters": {"step_s": 0.05},
            "metrics": {"format": "jsonl", "path": "{run_dir}/log.jsonl"},
        },
        "steps": 10,
        "arms": {"baseline": {}, "treatment": {"trainer.parameters.step_s": 0.051}},
        "seeds": [0, 1],
        "compare": {"claims": [{"metric": "reward", "window": "last 20%", "margin": 0.05}]},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(content))
    return path


def abrun(*words: str | Path, **options: Any) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "abrun", *map(str, words)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen(command, **options)


def statuses(experiment_dir: Path) -> list[str]:
    names = planned_runs(experiment_dir)
    return [read_run_state(experiment_dir, name).status for name in names]


# --- faults of the output ---


@contextmanager
def closed_pipe() -> Iterator[int]:
    """A pipe whose reader goes away after the first line."""
    reading, writing = os.pipe()
    with subprocess.Popen(["head", "-n", "1"], stdin=reading, stdout=subprocess.DEVNULL):
        os.close(reading)
        yield writing
        os.close(writing)


@contextmanager
def full_disk() -> Iterator[int]:
    with open("/dev/full", "wb") as file:
        yield file.fileno()


@contextmanager
def closed_terminal() -> Iterator[int]:
    """A terminal that has been closed, as one is that a launch under nohup outlives."""
    master, slave = pty.openpty()
    os.close(master)
    yield slave
    os.close(slave)


@contextmanager
def paused_reader() -> Iterator[int]:
    """A full pipe that nobody reads, as by `less` before the next key."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writing, b" " * 1024)
    os.set_blocking(writing, True)
    yield writing
    os.close(writing)
    os.close(reading)


FAULTS = {
    "closed pipe": closed_pipe,
    "full disk": full_disk,
    "closed terminal": closed_terminal,
    "paused reader": paused_reader,
    "closed descriptor": None,
}
STREAMS = {"stdout": (1,), "stderr": (2,), "both": (1, 2)}
QUICK = [("closed pipe", "stdout")]
MATRIX = [
    pytest.param(fault, streams, marks=() if (fault, streams) in QUICK else SLOW)
    for fault in FAULTS
    for streams in STREAMS
]


@linux
@pytest.mark.parametrize(("fault", "streams"), MATRIX)
def test_a_launch_that_cannot_print_ends_as_any_other(
    tmp_path: Path, recipe: Path, fault: str, streams: str
) -> None:
    numbers, make = STREAMS[streams], FAULTS[fault]
    with ExitStack() as faults:
        given: dict[str, Any] = {}
        if make is None:
            given["preexec_fn"] = lambda: [os.close(number) for number in numbers]
        else:
            number = faults.enter_context(make())
            given |= {name: number for name, one in (("stdout", 1), ("stderr", 2)) if one in numbers}
        launched = abrun("launch", recipe, "--runs-dir", tmp_path / "runs", **given)
        output, errors = launched.communicate(timeout=120)
    experiment_dir = tmp_path / "runs" / "tiny"
    assert statuses(experiment_dir) == ["finished"] * 4
    verdict = json.loads((experiment_dir / "report" / "verdict.json").read_text())["verdict"]
    assert (launched.returncode, verdict) == (5, "INVALID")  # as without the fault
    assert (experiment_dir / "report" / "report.html").is_file()
    assert output is None or 1 in numbers or "INVALID" in output
    assert errors is None or ("Traceback" not in errors and "Exception ignored" not in errors)


@linux
@pytest.mark.usefixtures("heard_signals")
def test_a_closed_terminal_stops_the_runs_and_is_told_by_the_exit_code(tmp_path: Path, recipe: Path) -> None:
    master, slave = pty.openpty()
    options = {"stdin": slave, "stdout": slave, "stderr": slave, "start_new_session": True}
    settings = ("--set", "trainer.parameters.step_s=3", "--runs-dir", tmp_path)
    script = "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    script += "from abrun.cli import main; main()"
    words = [sys.executable, "-c", script, "launch", str(recipe), *map(str, settings)]
    launched = subprocess.Popen(words, **options)
    os.close(slave)
    until(lambda: any(path.stat().st_size for path in tmp_path.rglob("log.jsonl")))
    os.close(master)  # the kernel sends SIGHUP, and every write fails
    assert launched.wait(60) == 128 + signal.SIGHUP
    assert set(statuses(tmp_path / "tiny")) <= {"interrupted", "pending"}


@linux
def test_an_ignored_signal_stays_ignored_and_the_runs_hear_it(tmp_path: Path, recipe: Path) -> None:
    """As under nohup, or behind a script's `&`: SIGTERM alone stops the launch."""
    ignored = {signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
    launched = abrun(
        *("launch", recipe, "--runs-dir", tmp_path, "--set", "trainer.parameters.step_s=0.5", "--jobs", "1"),
        preexec_fn=lambda: [signal.signal(number, signal.SIG_IGN) for number in ignored],
    )
    until(lambda: any(path.stat().st_size for path in tmp_path.rglob("log.jsonl")))
    for number in ignored:
        launched.send_signal(number)
    log = run_dir(tmp_path / "tiny", planned_runs(tmp_path / "tiny")[0]) / "log.jsonl"
    until(lambda: len(log.read_bytes().splitlines()) > 4)
    assert launched.poll() is None and "running" in statuses(tmp_path / "tiny")
    launched.terminate()
    launched.communicate(timeout=60)
    assert launched.returncode == 128 + signal.SIGTERM
    printed = (log.parent / "stdout.log").read_text()
    assert "ignored:\n" in printed  # the command's own process ignores none


@linux
def test_a_command_that_only_prints_ends_with_its_output(tmp_path: Path, snapshot: Snapshot) -> None:
    for words in (["recipes"], ["status", "--runs-dir", tmp_path]):
        with full_disk() as number:
            printing = abrun(*words, stdout=number)
            errors = printing.communicate()[1]
        assert (printing.returncode, errors.count("\n")) == (2, 1)
        snapshot(errors)
        reading, writing = os.pipe()
        os.close(reading)
        printing = abrun(*words, stdout=writing)
        os.close(writing)
        assert printing.communicate()[1] == "" and printing.returncode == 1


# --- the stream ---


@contextmanager
def stream_to(number: int, **options: Any) -> Iterator[tuple[UnfailingOutput, TextIO]]:
    with open(number, "w", closefd=False, **options) as stream:
        yield UnfailingOutput(stream), stream


def timed(action: Callable[[], object]) -> float:
    began_s = time.monotonic()
    action()
    return time.monotonic() - began_s


def test_a_reader_that_pauses_blocks_one_write_for_a_second_and_gets_the_text_later() -> None:
    reading, writing = os.pipe()
    with stream_to(writing) as (output, _):
        assert timed(lambda: output.write("x" * 2**16 + "\nwaits\n")) > 0.9
        assert timed(lambda: [output.write(f"line {number}\n") for number in range(1000)]) < 0.5
        assert len(os.read(reading, 2**17)) == 2**16
        output.write("again\n")
        printed = os.read(reading, 2**17).decode()
        assert printed.startswith("\nwaits\nline 0\n") and printed.endswith("line 999\nagain\n")
        for _ in range(40):
            output.write("y" * MAX_PENDING_BYTES + "\n")
        assert len(output._unwritten) <= 2 * MAX_PENDING_BYTES + 2
        os.close(reading)
        output.drain()
    os.close(writing)


@linux
def test_a_stopped_terminal_blocks_nobody() -> None:
    master, slave = pty.openpty()
    with stream_to(slave) as (output, _):
        termios.tcflow(slave, termios.TCOOFF)  # as Ctrl-S does
        assert timed(lambda: [output.write("line\n") for _ in range(20_000)]) < 10
        termios.tcflow(slave, termios.TCOON)
        assert timed(lambda: [output.write("full\n") for _ in range(20_000)]) < 10  # nobody reads
        assert os.get_blocking(slave)  # the shell's descriptor stays as it was
        os.close(master)
        output.drain()
    os.close(slave)


def test_a_descriptor_that_does_not_block_loses_nothing() -> None:
    """Some programs leave theirs so to those that they start: a print may then raise BlockingIOError."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    command = [sys.executable, "-c", "import sys, time; time.sleep(0.2); print(len(sys.stdin.read()))"]
    with subprocess.Popen(command, stdin=reading, stdout=subprocess.PIPE, text=True) as reader:
        os.close(reading)
        with stream_to(writing) as (output, _):
            output.write("x" * 300_000 + "\n")
        os.close(writing)
        assert reader.communicate()[0] == "300001\n"


def test_a_fork_while_another_thread_prints_leaves_the_child_able_to(tmp_path: Path) -> None:
    path = tmp_path / "printed"
    with path.open("w") as file, ThreadPoolExecutor() as threads:
        stream, held, forked = UnfailingOutput(file), threading.Event(), threading.Event()

        def hold() -> None:
            with stream._lock:
                held.set()
                forked.wait()

        threads.submit(hold)
        held.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(5)
            stream.write("of the child\n")
            os._exit(0)
        forked.set()
        assert os.waitpid(child, 0)[1] == 0
    assert path.read_text() == "of the child\n"


def test_text_that_the_encoding_lacks_is_escaped(tmp_path: Path) -> None:
    with (tmp_path / "output").open("wb") as file, stream_to(file.fileno(), encoding="ascii") as (output, _):
        output.write("\u2500 \udcff\n")
    assert (tmp_path / "output").read_text() == "\\u2500 \\udcff\n"


def test_a_stream_of_somebody_elses_is_written_to_by_its_own_method(tmp_path: Path) -> None:
    own = io.StringIO()
    output = UnfailingOutput(own)
    output.write("line\n")
    assert own.getvalue() == "line\n"
    own.close()
    output.write("lost\n")
