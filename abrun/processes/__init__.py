"""Processes on this host: start, find, stop and kill them, and explain how they ended.

Used by launchers, foreign runs and abrun's own trainer.
"""

import atexit
import contextlib
import ctypes
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import psutil

from abrun.messages.codes import Code, Reason

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Every process of a run has this environment variable.
RUN_DIR_VARIABLE = "ABRUN_RUN_DIR"
# The sockets of a run's engine hosts, one for each of its ranks, separated as in PATH.
ENGINE_HOST_VARIABLE = "ABRUN_ENGINE_HOST"
FORCE_AFTER_S = 2.0
# Longer than a process has to wait for the CPU on a busy machine.
MIN_PAUSE_S = 10.0
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SLURM_OOM = r"^slurmstepd: error: Detected .*oom.?kill|^srun: error: .*(Out Of Memory|OUT_OF_MEMORY)"
# Interpreter options of abrun's own processes. With -P, the working directory cannot shadow a module.
MODULE_OPTIONS = ("-P", "-m")
STARTER_SCRIPT = Path(__file__).with_name("starter.py")
Popen = subprocess.Popen[bytes]
# Matches the last line of a traceback, except torchrun's own.
PYTHON_ERROR = r"^(?!torch\.distributed\.elastic)[\w.]+(?:Error|Exception|Interrupt)\b.*"

# --- starting and stopping ---


def start_process(argv: Sequence[str], env: Mapping[str, str], *, death_signal: int, **options: Any) -> Popen:
    """Start a process that receives `death_signal` as soon as this process dies (on Linux).

    A process that leads its own session or group starts with default handling of all stop signals,
    even if this process ignores them. `options` are passed to `subprocess.Popen`. Raises OSError if
    the command cannot be started.
    """
    options |= {"env": dict(env), "stdin": subprocess.DEVNULL}
    if sys.platform != "linux":
        return Popen(argv, **options)
    error_read_end, error_write_end = os.pipe()
    try:
        starter = [sys.executable, "-IS", str(STARTER_SCRIPT)]
        starter += map(str, (int(death_signal), os.getpid(), error_write_end))
        inherited_fds = (error_write_end, *options.pop("pass_fds", ()))
        process = Popen([*starter, *argv], pass_fds=inherited_fds, **options)
    except BaseException:
        os.close(error_read_end)
        raise
    finally:
        os.close(error_write_end)
    with open(error_read_end, "rb") as file:
        error_number = file.read()
    if error_number:
        process.wait()
        raise OSError(int(error_number), os.strerror(int(error_number)), argv[0])
    return process


def end_group(process: Popen, grace_s: float, is_forced: Callable[[], bool] = lambda: False) -> None:
    """Send SIGTERM to a process group, wait `grace_s` for a checkpoint, then send SIGKILL.

    SIGKILL follows at once when `is_forced` returns True.
    """
    _signal_group(process, signal.SIGTERM)
    wait_for_exit(process, grace_s, is_forced)
    _signal_group(process, signal.SIGKILL)
    process.wait()


def poll_interval(longest_s: float) -> float:
    """Return the seconds between two looks at what changes; tests shorten it by a number in ABRUN_POLL_S."""
    given = os.environ.get("ABRUN_POLL_S", "")
    return min(longest_s, float(given)) if re.fullmatch(r"\d*\.?\d+", given) else longest_s


def wait_for_exit(process: Popen, timeout_s: float, should_stop: Callable[[], Any]) -> int | None:
    """Return the exit status, or None on timeout or once `should_stop` returns true."""
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline and not should_stop():
        time.sleep(poll_interval(0.05))
    return process.poll()


def die_with_parent(signal_number: int, parent_pid: int) -> None:
    """Send this process `signal_number` when its parent dies, or exit now if the parent is already dead."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent_pid:
        os._exit(shell_exit_code(-signal_number))


def run_to_end(program: Callable[[], object]) -> NoReturn:
    """Run a program and exit as the interpreter does, but without freeing its modules and objects.

    After large imports, freeing takes 1 to 2 s of CPU time.
    """
    status: object = 1
    try:
        program()
        status = 0
    except SystemExit as error:
        status = error.code or 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    with contextlib.suppress(BaseException):
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  # as multiprocessing does
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)


def adopt_orphans() -> None:
    """Adopt processes that descendants leave behind, so that `find_descendants` finds them (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def reap_orphans(own_pids: Collection[int]) -> None:
    """Reap zombies of adopted processes until the next zombie is one of `own_pids`.

    For a process that adopts orphans and knows all its own children: others wait for those.
    """
    with contextlib.suppress(ChildProcessError):  # no children
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid in own_pids:
                return
            os.waitpid(ended.si_pid, 0)


def exit_like(exit_status: int) -> int:
    """End like a child process: return its exit code, or die by the same signal."""
    if exit_status < 0:
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(-exit_status, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_status)
    return shell_exit_code(exit_status)


def _signal_group(process: Popen, signal_number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal_number)


# --- stop requests ---


class StopRequests:
    """Stop signals received so far. The same signal again at least two seconds later forces the stop.

    An earlier repeat does not count: a closing terminal sends SIGHUP twice, systemd SIGTERM and SIGHUP.
    """

    def __init__(self) -> None:
        self.first_signal: int | None = None
        self.is_forced = False
        self._first_heard_s: dict[int, float] = {}

    def hear(self, signal_number: int, frame: object = None) -> None:
        """Record a stop signal (signal handler)."""
        now = time.monotonic()
        if self.first_signal is None:
            self.first_signal = signal_number
        if now - self._first_heard_s.setdefault(signal_number, now) >= FORCE_AFTER_S:
            self.is_forced = True


@contextlib.contextmanager
def catch_stop_signals() -> Iterator[StopRequests]:
    """Record stop signals instead of obeying them. Ignored signals stay ignored.

    SIGHUP is ignored under nohup, SIGINT in a process that a shell script started with `&`.
    """
    requests = StopRequests()
    # Python allows signal handlers in the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield requests
        return
    previous_handlers = {
        signal_number: signal.signal(signal_number, requests.hear)
        for signal_number in STOP_SIGNALS
        if signal.getsignal(signal_number) != signal.SIG_IGN
    }
    try:
        yield requests
    finally:
        for signal_number, handler in previous_handlers.items():
            signal.signal(signal_number, handler)


class PauseDetector:
    """Detects pauses of this process, such as a frozen container, during which no rank can report."""

    def __init__(self) -> None:
        self._since_s = self._last_called_s = time.monotonic()

    def running_since_s(self) -> float:
        """Return the time since which this process has run without a pause. Call it about once a second."""
        now = time.monotonic()
        if now - self._last_called_s > MIN_PAUSE_S:
            self._since_s = now
        self._last_called_s = now
        return self._since_s


# --- exit status ---


def signal_name(exit_status: int) -> str | None:
    """Return the name of the signal that ended a process, or None; `exit_status` as in `subprocess`."""
    if exit_status >= 0:
        return None
    try:
        return signal.Signals(-exit_status).name
    except ValueError:  # a real-time signal has no name
        return f"signal {-exit_status}"


def shell_exit_code(exit_status: int) -> int:
    """Return the exit code that a shell reports for an exit status."""
    return exit_status if exit_status >= 0 else 128 - exit_status


def first_traceback(printed: str) -> str:
    """Return the first of several chained tracebacks: the original cause."""
    return printed.partition("\nThe above exception was the direct cause of")[0].strip()


def ending_reason(exit_status: int, printed: str, oom_kills_before: int | None) -> Reason:
    """Describe how a process ended, with the last error that it printed, or else its last line.

    Reports an out-of-memory kill if Slurm says so, or if the kernel's count of OOM kills has risen above
    `oom_kills_before`, the count when the process started.
    """
    killed_by = signal_name(exit_status)
    # A shell reports the SIGKILL of its child as an exit code.
    if killed_by == "SIGKILL" or exit_status == shell_exit_code(-signal.SIGKILL):
        kills = count_oom_kills()
        is_counted = kills is not None and oom_kills_before is not None and kills > oom_kills_before
        if is_slurm_oom(printed) or is_counted:
            return Code.OUT_OF_MEMORY_KILLED(signal=killed_by, exit_code=None if killed_by else exit_status)
        if not killed_by:
            return Code.EXIT_CODE(exit_code=exit_status, last_line=None)
    if killed_by:
        return Code.KILLED(signal=killed_by)
    error_lines = re.findall(PYTHON_ERROR, printed, re.MULTILINE)
    error_lines = error_lines or [line for line in printed.splitlines() if re.search(r"\w", line)]
    return Code.EXIT_CODE(exit_code=exit_status, last_line=error_lines[-1].strip() if error_lines else None)


def is_unexplained(ending: Reason) -> bool:
    """Return True if only an exit code or a signal is known, so the cause may be anything."""
    match ending.code:
        case Code.SEE_LOG:
            return is_unexplained(ending["ending"])
        case Code.RANK_FAILED | Code.NODE_FAILED:
            return is_unexplained(ending["cause"])
        case Code.SEVERAL_ERRORS:
            return not ending["out_of_memory"] and all(map(is_unexplained, ending["errors"]))
        case Code.EXIT_CODE:
            return ending["last_line"] is None
    return ending.code == Code.KILLED


def is_slurm_oom(printed: str) -> bool:
    """Return True if Slurm reports that the kernel killed processes of a step for lack of memory."""
    return bool(re.search(SLURM_OOM, printed, re.MULTILINE))


def count_oom_kills() -> int | None:
    """Return the number of processes that the kernel's OOM killer has killed.

    Counts those of this control group, or else of this host. Returns None if there is no counter. See
    memory.events in the kernel's cgroup-v2.rst, memory.oom_control in cgroup-v1/memory.rst, and oom_kill in
    vmstat.
    """
    control_groups = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            control_groups[controllers] = path
    root = "/sys/fs/cgroup"
    counters = (
        *(f"{root}{path}/memory.events" for path in (control_groups.get("", ""), "")),
        *(f"{root}/memory{path}/memory.oom_control" for path in (control_groups.get("memory", ""), "")),
        "/proc/vmstat",
    )
    # Narrowest group first, so that other users' processes do not count.
    for counter in counters:
        with contextlib.suppress(OSError):
            counts = re.findall(r"^oom_kill (\d+)$", Path(counter).read_text(), re.MULTILINE)
            if counts:
                return int(counts[0])
    return None


# --- finding processes ---


def find_descendants(pid: int) -> set[psutil.Process]:
    """Return all living descendants of a process, in any session or process group."""
    return {process for process, lineage in _list_living().items() if pid in lineage and process.pid != pid}


def find_children(pid: int) -> set[int]:
    """Return the pids of the living children of a process, adopted ones included."""
    return {process.pid for process, lineage in _list_living().items() if lineage[1:2] == [pid]}


def find_run_processes(run_dir: Path) -> set[psutil.Process]:
    """Return all living processes of a run and their descendants, in any session.

    A process belongs to the run by RUN_DIR_VARIABLE in its environment. Excludes this process and its
    ancestors.
    """
    living = _list_living()
    roots = find_processes_with(RUN_DIR_VARIABLE, os.path.realpath(run_dir), living)
    root_pids = {process.pid for process in roots}
    own_lineage = next((lineage for process, lineage in living.items() if process.pid == os.getpid()), [])
    return {
        process
        for process, lineage in living.items()
        if root_pids & {*lineage} and process.pid not in own_lineage
    }


def find_processes_with(
    variable: str, value: str, among: Iterable[psutil.Process] | None = None
) -> set[psutil.Process]:
    """Return the processes, by default of all living ones, that have this variable in their environment."""
    started = set[psutil.Process]()
    for process in _list_living() if among is None else among:
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(variable) == value:
                started.add(process)
    return started


def kill_all(
    find_processes: Callable[[], set[psutil.Process]], timeout_s: float = 5.0
) -> set[psutil.Process]:
    """Send SIGKILL to all processes that `find_processes` returns, until it returns none.

    Returns the processes that are left after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while (remaining := find_processes()) and time.monotonic() < deadline:
        for process in remaining:
            with contextlib.suppress(psutil.Error):  # for example, the pid was reused
                process.kill()
        time.sleep(0.01)
    return remaining


def kill_run(run_dir: Path, pid: int) -> None:
    """Kill all processes of a run, and the descendants of a process, whatever their environment."""
    kill_all(lambda: find_descendants(pid) | find_run_processes(run_dir))


def _list_living() -> dict[psutil.Process, list[int]]:
    """Return the living processes of this host, each with its lineage: its own pid, then its ancestors' pids.

    Returns nothing if /proc belongs to another pid namespace.
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


# --- temporary folders ---

SCRATCH = "abrun-scratch-"  # start of the names of folders that are removed even after a SIGKILL
MIN_SCRATCH_AGE_S = 60.0


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a temporary folder. Raises OSError if none can be made.

    It is locked while in use, which systemd-tmpfiles respects. Unlocked folders of killed processes are
    removed.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=SCRATCH)))
        file = os.open(folder, os.O_RDONLY)
        stack.callback(os.close, file)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        for unused in folder.parent.glob(f"{SCRATCH}*"):
            with contextlib.suppress(OSError), contextlib.ExitStack() as unlock:
                file = os.open(unused, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
                unlock.callback(os.close, file)
                # A newer folder may not be locked yet
                if time.time() - unused.stat().st_mtime > MIN_SCRATCH_AGE_S:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(unused, ignore_errors=True)
        yield folder
