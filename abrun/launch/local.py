"""The local launcher: the runs of a plan as processes on this machine, as many as fit at once.

A run of our own trainer is a torchrun process group, a run of a foreign one is `python -m abrun.external`.

Everything a run says, it says through its directory; this module starts, watches and stops processes, and
keeps `meta.json`. One thread, one loop.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from abrun import store
from abrun.errors import AbrunError
from abrun.launch.devices import Slots, check_runnable, this_machine
from abrun.launch.experiment import (
    experiment_dir_of,
    owned_experiment,
    warm_start_dir,
    worker_alive,
    write_run,
)
from abrun.launch.processes import Process, descendants, kill
from abrun.plan import Plan, RunName
from abrun.recipe import CommandRun, Run
from abrun.store import Status

POLL_S = 0.2
MOST_DIFF = 1 << 18  # characters: meta.json is read often
GRACE_S = 35.0  # torchrun gives its workers 30 s between SIGTERM and SIGKILL
# The last line of a traceback, but not of torchrun's own
PYTHON_ERROR = r"^(?!torch\.distributed\.elastic)[\w.]+(?:Error|Exception)\b.*"
STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a launch ended."""

    statuses: dict[RunName, Status]
    stopped_by: int | None  # the signal that ended it early

    @property
    def exit_code(self) -> int:
        """0 when every run finished, 1 when one did not, 128 + signal when stopped."""
        if self.stopped_by:
            return 128 + self.stopped_by
        return 0 if all(status == "finished" for status in self.statuses.values()) else 1


def torchrun(directory: Path, num_ranks: int, module: str = "abrun.train") -> list[str]:
    """The command of one run. No elastic restarts: a failed rank ends the run, and `--resume` goes on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    static = ["--nnodes", "1", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)),
        *("--max-restarts", "0", *static, "-m", module, str(directory)),
    ]


def external(directory: Path) -> list[str]:
    """The command of one run of a foreign trainer."""
    return [sys.executable, "-m", "abrun.external", str(directory)]


def environment(devices: Sequence[str], *, own: bool = True) -> dict[str, str]:
    """The environment variables of a run on these GPUs, or on CPU cores where there are none among them.

    `own`: a run of our own trainer, which has a process a core. A foreign one gets as many threads as cores,
    unless the user's environment says otherwise.
    """
    inherited = dict(os.environ, PYTHONUNBUFFERED="1")
    gpus = [device for device in devices if device != "cpu"]
    if not gpus:
        threads = "1" if own else inherited.get("OMP_NUM_THREADS", str(len(devices)))
        return inherited | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": threads}
    # nvidia-smi numbers the GPUs by bus, CUDA by speed unless told otherwise
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | inherited | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}


def launch(
    plan: Plan,
    runs_dir: Path,
    *,
    name: str | None = None,
    jobs: int | None = None,
    resume: bool = False,
    command: Callable[[Path, int], list[str]] = torchrun,
    prepared: Callable[[Path], None] = lambda experiment_dir: None,
    say: Callable[[str], None] = print,
    tick: Callable[[], object] = lambda: None,
    grace_s: float = GRACE_S,
) -> Outcome:
    """Run every unfinished run of a plan, and the warm starts that they need; returns when all have ended.

    `prepared` is called once the experiment's directory is whole, `tick` a few times a second from then on.
    Raises LaunchError or StoreError, before anything has started, where the plan cannot run here.
    """
    experiment_dir = experiment_dir_of(plan, runs_dir, name)
    machine = this_machine()
    check_runnable(plan, machine, jobs)
    with owned_experiment(plan, experiment_dir, resume=resume) as note:
        if note:
            say(note)
        prepared(experiment_dir)
        runs = _jobs_of(plan, experiment_dir)
        supervisor = _Supervisor(runs, Slots(machine, jobs), command, say, grace_s)
        stopped_by = supervisor.run(tick)
    states = [store.run_state(experiment_dir, run.name) for run in plan.runs]
    return Outcome(statuses={state.name: state.status for state in states}, stopped_by=stopped_by)


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    """One run directory on its way from pending to done."""

    label: str
    directory: Path
    config: Run
    needs: "_Job | None" = None  # the warm start to wait for
    shared: bool = False  # a warm start: other experiments may want it, too
    lock: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    said_waiting: bool = False
    process: subprocess.Popen[bytes] | None = None
    devices: tuple[str, ...] = ()
    num_events: int = 0  # of earlier attempts
    log_start: int = 0
    stopping: bool = False
    status: Status = "pending"

    @property
    def done(self) -> bool:
        return self.status in ("finished", "failed", "interrupted")


def _jobs_of(plan: Plan, experiment_dir: Path) -> list[_Job]:
    """Jobs in launch order, each warm start before the first run that needs it; finished runs are done."""
    warm_starts: dict[str, _Job] = {}
    jobs: list[_Job] = []
    for run in plan.runs:
        directory = store.run_dir(experiment_dir, run.name)
        job = _Job(label=str(run.name), directory=directory, config=run.config)
        if (directory / "result.json").is_file():
            job.status = "finished"
        elif run.warm_start:
            if run.warm_start not in warm_starts:
                warm_starts[run.warm_start] = _Job(
                    label=f"warm start {run.warm_start}",
                    directory=warm_start_dir(experiment_dir, run.warm_start),
                    config=plan.warm_starts[run.warm_start],
                    shared=True,
                )
                jobs.append(warm_starts[run.warm_start])
            job.needs = warm_starts[run.warm_start]
        jobs.append(job)
    return jobs


class _Supervisor:
    """Starts jobs in order as devices come free, records how they end, and stops them all when asked."""

    def __init__(
        self,
        jobs: list[_Job],
        slots: Slots,
        command: Callable[[Path, int], list[str]],
        say: Callable[[str], None],
        grace_s: float,
    ) -> None:
        self._jobs = jobs
        self._slots = slots
        self._command = command
        self._say = say
        self._grace_s = grace_s
        self._signals: list[int] = []
        self._git = _git_state()

    def run(self, tick: Callable[[], object]) -> int | None:
        """Returns the signal that stopped it, or None when every job has ended by itself."""
        with self._catching_signals():
            try:
                while not self._signals and not all(job.done for job in self._jobs):
                    self._reap()
                    self._start_ready()
                    tick()
                    time.sleep(POLL_S)
                if self._signals:
                    self._stop_all(tick)
            except BaseException:
                self._stop_after_error()
                raise
            finally:
                for job in self._jobs:
                    job.lock.close()
        tick()
        return self._signals[0] if self._signals else None

    @contextlib.contextmanager
    def _catching_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # where Python forbids handlers
            yield
            return
        old = {
            number: signal.signal(number, lambda received, _: self._signals.append(received))
            for number in STOPPING_SIGNALS
            if signal.getsignal(number) != signal.SIG_IGN  # nohup, or a background job: keep that promise
        }
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def _start_ready(self) -> None:
        for job in self._jobs:
            if job.process or job.done:
                continue
            if job.needs and not job.needs.done:
                continue
            if job.needs and job.needs.status != "finished":
                self._give_up(job, job.needs)
                continue
            devices = self._slots.take(job.config.cluster)
            if devices is None:
                return  # in order: a later run that would fit must not starve this one
            if job.shared and not self._claim(job):
                self._slots.give_back(devices)
                continue
            job.devices = devices
            self._start(job)

    def _claim(self, job: _Job) -> bool:
        """Own a warm start, which another experiment may have made, or be making now."""
        if (job.directory / "result.json").is_file():
            job.status = "finished"
            return False
        try:
            pid = worker_alive(job.directory)  # its launcher may have been killed
            if pid is not None:
                raise store.Locked(f"process {pid} works there")
            job.lock.enter_context(store.launcher_lock(job.directory))
        except store.Locked as error:
            if not job.said_waiting:
                self._say(f"{job.label}: another launcher makes it now; waiting for that ({error})")
            job.said_waiting = True
            return False
        if (job.directory / "result.json").is_file():  # made while this launcher waited for the lock
            job.lock.close()
            job.status = "finished"
            return False
        write_run(job.directory, store.WARM_STARTS, RunName(arm="warm-start", seed=0), job.config)
        return True

    def _start(self, job: _Job) -> None:
        meta = _read_meta(job.directory)
        attempts = meta.get("attempts", [])
        attempt = {
            "started_s": time.time(),
            "ended_s": None,
            "pid": None,
            "host": socket.gethostname(),
            "devices": list(job.devices),
            "exit_code": None,
            "signal": None,
        }
        meta = {"status": "running", "attempts": [*attempts, attempt], "message": None, "git": self._git}
        own = not isinstance(job.config, CommandRun)
        log = job.directory / "stdout.log"
        job.num_events = len(store.read_lines(job.directory / "events.jsonl"))
        # Before the process: from here on a process of an older attempt knows that it no longer owns the run.
        store.write_json(job.directory / "meta.json", meta)
        with store.explained(log), log.open("ab") as output:
            job.log_start = output.tell()
            job.process = subprocess.Popen(
                self._command(job.directory, len(job.devices)) if own else external(job.directory),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(job.devices, own=own),
                start_new_session=True,  # Ctrl-C must reach the launcher alone
            )
        attempt["pid"] = job.process.pid
        store.write_json(job.directory / "meta.json", meta)
        job.status = "running"

    def _reap(self) -> None:
        for job in self._jobs:
            if job.process and not job.done and job.process.poll() is not None:
                self._record_end(job, job.process.returncode)

    def _record_end(self, job: _Job, return_code: int) -> None:
        exit_code, killed_by = _worker_exit(job, return_code)
        job.status, message = _ending(job, exit_code, killed_by)
        meta = _read_meta(job.directory)
        ended = {"ended_s": time.time(), "exit_code": exit_code, "signal": killed_by}
        meta["attempts"][-1].update(ended)
        store.write_json(job.directory / "meta.json", meta | {"status": job.status, "message": message})
        self._slots.give_back(job.devices)
        job.lock.close()

    def _give_up(self, job: _Job, cause: _Job) -> None:
        why = _read_meta(cause.directory).get("message")
        message = f"not started: its {cause.label} {cause.status}: {why}"
        job.status = "failed"
        meta = {"attempts": []} | _read_meta(job.directory)
        store.write_json(job.directory / "meta.json", meta | {"status": "failed", "message": message})

    def _stop_all(self, tick: Callable[[], object]) -> None:
        """SIGTERM to every run's first process, which passes it on; time for a checkpoint; then SIGKILL."""
        running = [job for job in self._jobs if job.process and not job.done]
        if running:
            self._say(
                f"stopping {len(running)} run{'s' if len(running) > 1 else ''}: up to {self._grace_s:.0f} s "
                "to save checkpoints; Ctrl-C again kills them"
            )
        family: set[Process] = set()
        for job in running:
            assert job.process is not None
            job.stopping = True
            family |= descendants(job.process.pid)
            job.process.terminate()
        deadline = time.monotonic() + self._grace_s
        while time.monotonic() < deadline and len(self._signals) < 2 and not all(job.done for job in running):
            self._reap()
            tick()
            time.sleep(POLL_S)
        for job in running:
            assert job.process is not None
            family |= set() if job.done else descendants(job.process.pid)
        kill(family)
        for job in running:
            if job.process and not job.done:
                job.process.wait()
        self._reap()

    def _stop_after_error(self) -> None:
        """The launcher itself failed (a full disk, say): leave no process, keep the first error."""
        with contextlib.suppress(AbrunError):
            self._stop_all(lambda: None)
        for job in self._jobs:
            if job.process and job.process.poll() is None:
                kill(descendants(job.process.pid))


def _read_meta(directory: Path) -> dict[str, Any]:
    path = directory / "meta.json"
    return store.read_json(path) if path.is_file() else {}


def _worker_exit(job: _Job, return_code: int) -> tuple[int | None, str | None]:
    """Exit code and signal of the first worker that failed: torchrun's own code is 1 whatever happened."""
    if return_code > 0:
        report = re.search(r"Root Cause.*?exitcode\s*:\s*(-?\d+)", _log(job), re.DOTALL)
        return_code = int(report[1]) if report else return_code
    if return_code >= 0:
        return return_code, None
    try:
        return None, signal.Signals(-return_code).name
    except ValueError:  # a real-time signal has no name
        return None, f"signal {-return_code}"


def _ending(job: _Job, exit_code: int | None, killed_by: str | None) -> tuple[Status, str | None]:
    """Status and a line on why. Done means `result.json`, whatever the exit code says."""
    if (job.directory / "result.json").is_file():
        return "finished", None
    try:
        events = store.read_lines(job.directory / "events.jsonl")[job.num_events :]
    except AbrunError as error:
        return "failed", str(error)
    last = events[-1] if events else {}
    if job.stopping or last.get("event") == "interrupted":
        return "interrupted", "stopped by a signal; continue with --resume"
    log = job.directory / "stdout.log"
    if last.get("event") == "failed" and last.get("message"):
        return "failed", " ".join(str(last["message"]).split())
    if killed_by:
        memory = ": was the machine out of memory?" if killed_by == "SIGKILL" else ""
        return "failed", f"killed by {killed_by}{memory}; see {log}"
    if exit_code == 0:
        return "failed", f"ended without a result.json; see {log}"
    errors = re.findall(PYTHON_ERROR, _log(job), re.MULTILINE)
    return "failed", f"exit code {exit_code}{f' ({errors[-1]})' if errors else ''}; see {log}"


def _log(job: _Job, most: int = 1 << 20) -> str:
    """The end of what this attempt has printed."""
    with (job.directory / "stdout.log").open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(job.log_start, end - most))
        return file.read().decode(errors="replace")


def _git_state() -> dict[str, Any] | None:
    """Commit and uncommitted changes of the working directory; None where it is no git checkout."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], capture_output=True, text=True, errors="replace", check=True, timeout=60
        ).stdout

    try:
        diff = git("diff", "HEAD")
        return {
            "sha": git("rev-parse", "HEAD").strip(),
            "dirty": bool(git("status", "--porcelain").strip()),
            "diff": diff if len(diff) <= MOST_DIFF else diff[:MOST_DIFF] + "\n[cut here]\n",
        }
    except (OSError, subprocess.SubprocessError):
        return None
