"""Processes of this host: started in their own groups, found, stopped and killed, and what their end means.

One place for launchers, foreign runs and our trainer.
"""

import base64
import contextlib
import ctypes
import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from abrun.reasons import Code, Reason

STOPPING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
RUN_DIR = "ABRUN_RUN_DIR"  # the environment variable that every process of a run has
INSISTS_AFTER_S = 2.0
PAUSE_S = 10.0  # more than a busy machine lets a process wait
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SLURM_STARVED = r"^slurmstepd: error: Detected .*oom.?kill|^srun: error: .*(Out Of Memory|OUT_OF_MEMORY)"
MODULE = ("-P", "-m")  # of our own processes: a module of the working directory must not shadow any
STARTER = Path(__file__).with_name("starter.py")
Popen = subprocess.Popen[bytes]
# The last line of a traceback, but not of torchrun's own
PYTHON_ERROR = r"^(?!torch\.distributed\.elastic)[\w.]+(?:Error|Exception|Interrupt)\b.*"

# --- starting and stopping ---


class Fork:
    """A child that was forked, with what abrun asks of a `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def terminate(self) -> None:
        if self.poll() is None:  # else its id may be another's
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


Child = Popen | Fork


def start(argv: Sequence[str], env: Mapping[str, str], *, dies_by: int, **options: Any) -> Popen:
    """A process that gets the signal `dies_by` when this one dies, however soon (on Linux).

    In a session or group of its own it ignores no signal to stop, whatever this process ignores.
    `options` are those of `subprocess.Popen`. Raises OSError where it cannot be started.
    """
    options |= {"env": dict(env), "stdin": subprocess.DEVNULL}
    if sys.platform != "linux":
        return Popen(argv, **options)
    failures, failing = os.pipe()
    try:
        tied = (sys.executable, "-IS", str(STARTER), str(int(dies_by)), str(os.getpid()), str(failing), *argv)
        inherited = (failing, *options.pop("pass_fds", ()))
        process = Popen(tied, pass_fds=inherited, **options)
    except BaseException:
        os.close(failures)
        raise
    finally:
        os.close(failing)
    with open(failures, "rb") as file:
        number = file.read()
    if number:
        process.wait()
        raise OSError(int(number), os.strerror(int(number)), argv[0])
    return process


def end_group(process: Popen, grace_s: float, insisted: Callable[[], bool] = lambda: False) -> None:
    """SIGTERM to a process group, time for a checkpoint, then SIGKILL: at once where somebody insists."""
    _signal_group(process, signal.SIGTERM)
    wait(process, grace_s, insisted)
    _signal_group(process, signal.SIGKILL)
    process.wait()


def wait(process: Child, timeout_s: float, stopped: Callable[[], Any]) -> int | None:
    """The exit status, or None where time is up or `stopped` has become true."""
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline and not stopped():
        time.sleep(0.05)
    return process.poll()


def die_with_parent(number: int, parent: int) -> None:
    """From now on the death of the parent is this signal to this process, at once if that has happened."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(shell_code(-number))


def adopt_orphans(adopts: bool = True) -> None:
    """What a process below this one leaves behind becomes this one's child (on Linux): `below` finds it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopts))


def reap_adopted(own: Collection[int]) -> None:
    """Forget the children that have ended, up to one of this process's own: each keeps an id until then.

    For who adopts orphans. Only where all of its own children are known: their ends are others' to ask for.
    """
    with contextlib.suppress(ChildProcessError):  # there is no child at all
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid in own:
                return
            os.waitpid(ended.si_pid, 0)


def end_like(status: int) -> int:
    """End as a process below has ended: returns its exit code, or dies by the same signal."""
    if status < 0:
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return shell_code(status)


def _signal_group(process: Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


# --- being asked to stop ---


class StopRequests:
    """The signals to stop that have come: the first asks; one of its kind two seconds later insists.

    Sooner is no second thought: a closing terminal sends SIGHUP twice, systemd SIGTERM and SIGHUP.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self.insisted = False
        self._heard_s: dict[int, float] = {}

    def hear(self, number: int, frame: object = None) -> None:
        """A signal handler."""
        now = time.monotonic()
        if self.first is None:
            self.first = number
        if now - self._heard_s.setdefault(number, now) >= INSISTS_AFTER_S:
            self.insisted = True


@contextlib.contextmanager
def stopping_signals() -> Iterator[StopRequests]:
    """Signals to stop are noted instead of obeyed. One that is ignored already, as under nohup, stays so.

    SIGINT is, in a process that a shell script has started with `&`.
    """
    requests = StopRequests()
    if threading.current_thread() is not threading.main_thread():  # where Python forbids handlers
        yield requests
        return
    old = {
        number: signal.signal(number, requests.hear)
        for number in STOPPING_SIGNALS
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield requests
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


class Awake:
    """Since when this process has been running without a pause: in a frozen container nobody gives a sign."""

    def __init__(self) -> None:
        self._since_s = self._seen_s = time.monotonic()

    def since_s(self) -> float:
        """To be asked every second or so."""
        now = time.monotonic()
        if now - self._seen_s > PAUSE_S:
            self._since_s = now
        self._seen_s = now
        return self._since_s


# --- what an exit status means ---


def killed_by(status: int) -> str | None:
    """The name of the signal that ended a process, by its exit status as `subprocess` gives it."""
    if status >= 0:
        return None
    try:
        return signal.Signals(-status).name
    except ValueError:  # a real-time signal has no name
        return f"signal {-status}"


def shell_code(status: int) -> int:
    """The exit code with which a shell would report an exit status."""
    return status if status >= 0 else 128 - status


def first_cause(printed: str) -> str:
    """Of chained tracebacks the first one, which the others were raised from."""
    return printed.partition("\nThe above exception was the direct cause of")[0].strip()


def ending_of(status: int, printed: str, oom_kills_before: int | None) -> Reason:
    """A process's end, with the error that is the last in what it printed, or else its last line.

    Where the kernel has killed more for want of memory than `oom_kills` said when it started, or Slurm says
    that it has, it says so.
    """
    name = killed_by(status)
    if name == "SIGKILL" or status == shell_code(-signal.SIGKILL):  # that of a shell's child
        now = oom_kills()
        is_counted = now is not None and oom_kills_before is not None and now > oom_kills_before
        if memory_ran_out(printed) or is_counted:
            return Code.OUT_OF_MEMORY_KILLED(signal=name, exit_code=None if name else status)
        return Code.KILLED(signal=name) if name else Code.EXIT_CODE(exit_code=status, last_line=None)
    if name:
        return Code.KILLED(signal=name)
    said = re.findall(PYTHON_ERROR, printed, re.MULTILINE) or re.findall(r"\S[^\r\n]*", printed)
    return Code.EXIT_CODE(exit_code=status, last_line=said[-1].strip() if said else None)


def is_wordless(ending: Reason) -> bool:
    """Return True if an end is told by exit codes or signals alone: what is behind it may be anything."""
    match ending.code:
        case Code.SEE_LOG:
            return is_wordless(ending["ending"])
        case Code.RANK_FAILED:
            return is_wordless(ending["cause"])
        case Code.SEVERAL_ERRORS:
            return not ending["out_of_memory"] and all(map(is_wordless, ending["errors"]))
        case Code.EXIT_CODE:
            return ending["last_line"] is None
    return ending.code == Code.KILLED


def memory_ran_out(printed: str) -> bool:
    """Whether Slurm says of a step that the kernel has killed some of it for want of memory."""
    return bool(re.search(SLURM_STARVED, printed, re.MULTILINE))


def oom_kills() -> int | None:
    """How many processes the kernel has killed for want of memory: in this control group, else on this host.

    None where nobody counts. See memory.events in the kernel's cgroup-v2.rst, memory.oom_control in
    cgroup-v1/memory.rst, and vmstat's oom_kill.
    """
    groups = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            groups[controllers] = path
    root = "/sys/fs/cgroup"
    counters = (
        *(f"{root}{path}/memory.events" for path in (groups.get("", ""), "")),
        *(f"{root}/memory{path}/memory.oom_control" for path in (groups.get("memory", ""), "")),
        "/proc/vmstat",
    )
    for counter in counters:  # the narrowest first: others' processes are not counted there
        with contextlib.suppress(OSError):
            counts = re.findall(r"^oom_kill (\d+)$", Path(counter).read_text(), re.MULTILINE)
            if counts:
                return int(counts[0])
    return None


# --- finding ---


def mark_of(run_dir: str | Path) -> str:
    """Return the name that a copy of a process takes for its run: at most 15 bytes, which `ps -e` shows."""
    digest = hashlib.sha256(os.fsencode(os.path.realpath(run_dir))).digest()
    return f"abrun-{base64.urlsafe_b64encode(digest)[:9].decode()}"


def below(pid: int) -> set[psutil.Process]:
    """Return every living process below another, in whatever session or process group."""
    return {process for process, above in _living().items() if pid in above and process.pid != pid}


def children(pid: int) -> set[int]:
    """Return the living processes that another one has started, and those that it has adopted."""
    return {process.pid for process, above in _living().items() if above[1:2] == [pid]}


def processes_of(run_dir: Path) -> set[psutil.Process]:
    """Return every living process that was started for a run, and all below, in whatever session.

    RUN_DIR in its environment tells, or its name, which a copy gets and what it forks inherits. Left out are
    this process and those it descends from.
    """
    path, mark, living = os.path.realpath(run_dir), mark_of(run_dir), _living()
    roots = set[int]()
    for process in living:
        with contextlib.suppress(psutil.Error, OSError):
            if process.name() == mark or process.environ().get(RUN_DIR) == path:
                roots.add(process.pid)
    here = next((above for process, above in living.items() if process.pid == os.getpid()), [])
    return {process for process, above in living.items() if roots & {*above} and process.pid not in here}


def end_all(find: Callable[[], set[psutil.Process]], timeout_s: float = 5.0) -> set[psutil.Process]:
    """SIGKILL to all that `find` finds, until it finds no more; returns what is left after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while (found := find()) and time.monotonic() < deadline:
        for process in found:
            with contextlib.suppress(psutil.Error):  # such as an id that is another process's by now
                process.kill()
        time.sleep(0.01)
    return found


def _living() -> dict[psutil.Process, list[int]]:
    """Return the living processes of this host, each with its own id and those of all above, from it upwards.

    None where /proc is that of another namespace: its ids mean other processes here.
    """
    if sys.platform == "linux" and os.readlink("/proc/self") != str(os.getpid()):
        return {}
    parents, processes = dict[int, int](), list[psutil.Process]()
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            with process.oneshot():
                if process.status() != psutil.STATUS_ZOMBIE:
                    parents[pid] = process.ppid()
                    processes.append(process)

    def lineage(pid: int) -> list[int]:
        above = [pid]
        while (parent := parents.get(above[-1])) is not None and parent not in above:
            above.append(parent)
        return above

    return {process: lineage(process.pid) for process in processes}
