"""`python -m abrun.train.agent MODULE DIRECTORY`: the ranks of a run on this node, watched to their end.

Starts them with torchrun's variables, ends as the first failed rank did, says so in the run directory, and
leaves nothing behind. A rank that gives no sign of life is named and ends the run. It imports no torch, which
would take seconds before a rank starts.
"""

import argparse
import contextlib
import fcntl
import importlib.util
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from abrun.errors import AbrunError, LaunchError, StoreError
from abrun.messages import sentence
from abrun.processes import (
    MODULE_OPTIONS,
    RUN_DIR_VARIABLE,
    Child,
    PauseDetector,
    StopRequests,
    adopt_orphans,
    catch_stop_signals,
    count_oom_kills,
    exit_like,
    find_children,
    find_descendants,
    find_run_processes,
    is_unexplained,
    kill_all,
    progress,
    reap_orphans,
    shell_exit_code,
)
from abrun.processes.capture import capture_output
from abrun.processes.output import ignore_output_errors
from abrun.reasons import Code, Reason
from abrun.redaction import current_mask, hide_secrets_of
from abrun.runs.endings import write_ending
from abrun.runs.records import (
    NODE_LOST_AFTER_S,
    NODE_REPORT_EVERY_S,
    NodeStatus,
    SilentRank,
    silent_ranks_reason,
)
from abrun.runs.rundir import RunDir
from abrun.train.failures import ERROR_FILE, GRACE_S, POLL_S, cause_of, error_file, first_failure

LOOPBACK = "127.0.0.1"
BACKLOG = 4096  # of connections; the kernel allows that many
SCRATCH = "abrun-ranks-"
NEW_S = 60.0
LOOK_S = 1.0  # from one look for a new attempt, or at what other nodes say, to the next
FAILED, TIMED_OUT = 2, 124  # exit codes, as of abrun.train and timeout(1)
# Starts a rank by what it runs (words behind `python -m`), its environment, and the open files it inherits.
# Called while this process is one thread.
StartRank = Callable[[list[str], Mapping[str, str], list[int]], Child]


def start_rank_anew(words: list[str], env: Mapping[str, str], inherited: list[int]) -> Child:
    """A process of its own, in a session: whoever signals the agent's group asks the agent alone (_Watch)."""
    command = [sys.executable, "-u", *MODULE_OPTIONS, *words]
    return subprocess.Popen(command, env=env, pass_fds=inherited, start_new_session=True)


def main(start_rank: StartRank = start_rank_anew) -> int:
    """The exit code."""
    asked = asked_for()
    os.environ[RUN_DIR_VARIABLE] = os.path.realpath(asked.directory)
    os.environ[progress.AGENT_PID_VARIABLE] = str(os.getpid())
    adopt_orphans()
    run = RunDir(asked.directory)
    hide_secrets_of(os.environ)
    mask = current_mask()
    with (
        catch_stop_signals() as requests,
        capture_output(run.log, int(asked.log_mib * 2**20), mask.hide_bytes) as pass_on,
    ):
        known = run.last_attempt
        try:
            with _scratch(_ranks_here(asked)) as (scratch, lines):
                notes = _Notes(run, known, asked.node, asked.nodes)
                status, reason = _watched(asked, start_rank, requests, scratch, lines, notes, pass_on)
        except LaunchError as error:
            status, reason = FAILED, error.reason
        _conclude(run, asked.node, known, status, reason, requests.first_signal)
    return exit_like(status)


def asked_for() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m abrun.train.agent", description=__doc__)
    parser.add_argument("module", help="what each rank runs, with DIRECTORY as its argument")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--node", type=int, default=0, help="which of them this is")
    parser.add_argument("--meet", metavar="HOST:PORT", help="of the first node, where there are several")
    parser.add_argument("--run-s", type=float, default=math.inf)
    parser.add_argument("--stalled-s", type=float, default=math.inf)
    parser.add_argument("--grace-s", type=float, default=GRACE_S)
    parser.add_argument("--log-mib", type=float, default=64.0)
    return parser.parse_args()


def _ranks_here(asked: argparse.Namespace) -> range:
    """The ranks of this node among those of all."""
    return range(asked.node * asked.ranks, (asked.node + 1) * asked.ranks)


def _watched(
    asked: argparse.Namespace,
    start_rank: StartRank,
    requests: StopRequests,
    scratch: Path,
    lines: Mapping[int, int],
    notes: "_Notes",
    pass_on: Callable[[], None],
) -> tuple[int, Reason | None]:
    """The exit status of the ranks, and what was wrong."""
    os.environ[progress.FOLDER_VARIABLE] = str(scratch)
    watch = _Watch(requests, asked, scratch, lines, notes)

    def begin() -> None:
        pass_on()
        watch.start()

    try:
        status, reason = _run_ranks(asked, start_rank, scratch, begin)
    finally:
        watch.done.set()
        if watch.is_alive():
            watch.join()
        kill_all(lambda: find_descendants(os.getpid()) | find_run_processes(asked.directory))
    return (TIMED_OUT, watch.ended_because) if watch.ended_because else (status, reason)


@contextlib.contextmanager
def _scratch(ranks: range) -> Iterator[tuple[Path, dict[int, int]]]:
    """A folder for what agent and ranks tell each other, and the ranks' lines in it, opened.

    Those that killed agents have left are removed.

    It is locked as long as it is in use, which systemd-tmpfiles respects, too.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=SCRATCH)))
            file = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, file)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            lines = stack.enter_context(progress.open_status_lines(folder, ranks))
        except OSError as error:
            raise LaunchError(Code.NO_TEMPORARY_FILES(error=str(error))) from None
        for other in folder.parent.glob(f"{SCRATCH}*"):
            with contextlib.suppress(OSError):
                _remove_unused(other)
        yield folder, lines


def _remove_unused(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    try:
        if time.time() - folder.stat().st_mtime > NEW_S:  # else it may not be locked yet
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(file)


def _run_ranks(
    asked: argparse.Namespace, start_rank: StartRank, scratch: Path, begin: Callable[[], None]
) -> tuple[int, Reason | None]:
    """The exit status of the first rank that failed, as `subprocess` gives it, and why it did; or 0.

    `begin` is called once they have been started.
    """
    oom_kills_before, log_start = count_oom_kills(), RunDir(asked.directory).log_size()
    try:
        with _started_ranks(asked, start_rank, scratch) as processes:
            begin()
            failure = first_failure(processes, scratch)
    except (OSError, OverflowError, ValueError) as error:  # the latter two of a port that is none
        raise LaunchError(Code.RANKS_NOT_STARTED(node=asked.node, error=str(error))) from None
    if failure is None:
        return 0, None
    reason = Code.RANK_FAILED(
        rank=failure.rank,
        num_ranks=asked.nodes * asked.ranks,
        host=socket.gethostname() if asked.meet else None,
        cause=cause_of(failure, RunDir(asked.directory).read_log(log_start), oom_kills_before),
    )
    return failure.status, reason


@contextlib.contextmanager
def _started_ranks(
    asked: argparse.Namespace, start_rank: StartRank, scratch: Path
) -> Iterator[dict[int, Child]]:
    """This node's ranks, as processes. The first of all inherits the socket where they meet.

    It stays open here, too: where the first rank dies before it serves, the others wait to be ended, and
    torch does not print what a connection that was reset means.
    """
    host, _, port = (asked.meet or f"{LOOPBACK}:0").rpartition(":")
    ranks, inherited = _ranks_here(asked), dict[int, int]()
    with contextlib.ExitStack() as stack:
        if 0 in ranks:
            listening = stack.enter_context(_listen(int(port), everywhere=bool(asked.meet)))
            port, inherited[0] = listening.getsockname()[1], listening.fileno()
        yield {
            rank: start_rank(
                [asked.module, str(asked.directory)],
                {
                    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
                    **os.environ,
                    **_variables(asked, rank, host.strip("[]"), port, inherited.get(rank)),
                    ERROR_FILE: str(error_file(scratch, rank)),
                },
                [inherited[rank]] if rank in inherited else [],
            )
            for rank in ranks
        }


def _variables(
    asked: argparse.Namespace, rank: int, host: str, port: int | str, listening: int | None
) -> dict[str, str]:
    """Of a rank, as torchrun has them, where a store that is served already is called its agent's."""
    found = {
        "RANK": rank,
        "WORLD_SIZE": asked.nodes * asked.ranks,
        "LOCAL_RANK": rank % asked.ranks,
        "LOCAL_WORLD_SIZE": asked.ranks,
        "GROUP_RANK": asked.node,
        "GROUP_WORLD_SIZE": asked.nodes,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "abrun",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        **({} if listening is None else {progress.LISTENING_FD_VARIABLE: listening}),
    }
    return {name: str(value) for name, value in found.items()}


def _listen(port: int, *, everywhere: bool) -> socket.socket:
    """A socket that the ranks of a large run reach before the first of them has done its imports."""
    if not everywhere:
        return socket.create_server((LOOPBACK, port), backlog=BACKLOG)
    with contextlib.suppress(OSError, ValueError):  # a machine without IPv6
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    return socket.create_server(("", port), backlog=BACKLOG)


def _conclude(
    run: RunDir, node: int, known: int, status: int, reason: Reason | None, asked: int | None
) -> None:
    """How the ranks ended, in the words of an attempt that has begun and died without any.

    One that took too long notes itself that it was interrupted. A node that is not the first only prints it,
    and notes it for the launcher.
    """
    if reason and asked is None:
        print(f"error: {sentence(reason)}", file=sys.stderr)
        write_ending(run, f"node-{node:04d}", known, reason)
    if node > 0:
        return
    try:
        writer = run.resume_abandoned_attempt(known, interrupted=status == TIMED_OUT)
        if writer and asked:
            writer.interrupt(exit_code=shell_exit_code(status), signal=asked)
        elif writer and reason:
            ending = Code.SEE_LOG(ending=reason, log=run.log) if is_unexplained(reason) else reason
            writer.fail(ending, exit_code=shell_exit_code(status))
    except AbrunError as error:
        print(f"error: {error}", file=sys.stderr)


class _Notes:
    """What each node says of its ranks in the run directory: for its status, and for the other nodes."""

    def __init__(self, run: RunDir, known: int, node: int, num_nodes: int) -> None:
        self._run, self._known, self._node, self._num_nodes = run, known, node, num_nodes
        self._attempt = 0
        self._written_s = -math.inf
        self._where: list[SilentRank] | None = None
        self._looked_s = -math.inf
        self._others: dict[
            int, tuple[NodeStatus, float]
        ] = {}  # with when this one saw that, by its own clock

    def write(self, silent_s: float, ranks: Callable[[], list[SilentRank]] | None) -> None:
        """To be asked often; `ranks` says where they are, None while they give signs."""
        now = time.time()  # which jumps where a machine has slept: the note is old, then
        changed = (self._where is None) != (ranks is None)
        if abs(now - self._written_s) < NODE_REPORT_EVERY_S and not changed:
            return
        self._written_s = now
        self._attempt = self._attempt or self._run.last_attempt
        if self._attempt <= self._known:
            self._attempt = 0
            self._written_s -= NODE_REPORT_EVERY_S - LOOK_S
            return
        if changed:
            self._where = ranks() if ranks else None
        note = NodeStatus(
            attempt=self._attempt,
            node=self._node,
            host=socket.gethostname(),
            time_s=time.time(),
            silent_s=silent_s,
            silent_since_s=None if self._where is None else time.time() - silent_s,
            ranks=tuple(self._where or ()),
        )
        with contextlib.suppress(StoreError):  # a full disk is no reason to end ranks
            self._run.write_node(note)

    def others(self) -> list[NodeStatus]:
        """What the nodes say that still do, but for this one: clocks need not agree."""
        now = time.monotonic()
        if self._num_nodes > 1 and now - self._looked_s > LOOK_S:
            self._looked_s = now
            for note in self._run.nodes(self._attempt):
                seen, _ = self._others.get(note.node, (None, now))
                if note.node != self._node and note != seen:
                    self._others[note.node] = note, now
        return [note for note, seen_s in self._others.values() if now - seen_s <= NODE_LOST_AFTER_S]


class _Watch(threading.Thread):
    """Passes requests to stop on to the ranks, and ends ranks that hang or take too long.

    Whose silence is unusual says so before.
    """

    def __init__(
        self,
        requests: StopRequests,
        asked: argparse.Namespace,
        scratch: Path,
        lines: Mapping[int, int],
        notes: _Notes,
    ) -> None:
        super().__init__(daemon=True)
        self.done = threading.Event()
        self.ended_because: Reason | None = None
        self._requests = requests
        self._limits = asked
        self._scratch, self._lines = scratch, lines
        self._notes = notes
        self._began_s = time.monotonic()
        self._awake = PauseDetector()
        self._told = set[int]()
        self._kill_at_s = math.inf

    def run(self) -> None:
        while not self.done.wait(POLL_S):
            now, signs = time.monotonic(), progress.read_statuses(self._lines)
            if not self.ended_because and now - self._began_s > self._limits.run_s:
                self.ended_because = Code.TIME_LIMIT_REACHED(limit_s=self._limits.run_s)
            if self.ended_because or self._requests.first_signal is not None:
                self._ask_to_stop(now)
            hanging = self._hanging(now, signs)
            self.ended_because = hanging or self.ended_because
            if hanging or now > self._kill_at_s or self._requests.is_forced:
                kill_all(lambda: find_descendants(os.getpid()))

    def _ask_to_stop(self, now: float) -> None:
        """SIGTERM once to every rank, whenever it appears: time for a checkpoint."""
        self._kill_at_s = min(self._kill_at_s, now + self._limits.grace_s)
        for pid in find_children(os.getpid()) - self._told:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            self._told.add(pid)

    def _hanging(self, now: float, signs: Mapping[int, progress.RankStatus]) -> Reason | None:
        """Where the ranks are that have all been silent for too long, those first that wait for no other.

        Of a run on several nodes those of the others, too: while one of them works, these wait for it.
        """
        begun = len(signs) == self._limits.ranks
        if begun:
            reap_orphans({sign.pid for sign in signs.values()})
        last_s = max((sign.time_s for sign in signs.values()), default=self._began_s)
        silent_s = now - max(last_s, self._awake.running_since_s())
        patience_s = max(sign.hang_timeout_s for sign in signs.values()) if begun else math.inf
        limit_s = self._limits.stalled_s
        unusual = silent_s > min(patience_s, limit_s)
        self._notes.write(silent_s, (lambda: self._where(signs)) if unusual else None)
        if silent_s <= limit_s:
            return None
        others = self._notes.others()
        if any(note.silent_s <= limit_s for note in others):
            return None
        found: list[tuple[SilentRank, str | None]] = [(rank, None) for rank in self._where(signs)]
        found += [(rank, note.host) for note in others for rank in note.ranks]
        found.sort(key=lambda each: each[0].waits)
        silence = silent_ranks_reason(silent_s, found, 0 if begun else self._limits.ranks - len(signs))
        return Code.STALL_LIMIT_REACHED(silence=silence)

    def _where(self, signs: Mapping[int, progress.RankStatus]) -> list[SilentRank]:
        """Where ranks are, those first that wait for no other."""
        places = progress.locate_ranks(self._scratch, signs)
        waits = {rank: signs[rank].is_waiting or is_in_torch(place) for rank, place in places.items()}
        return [
            SilentRank(rank=rank, place=str(places[rank]), doing=signs[rank].activity, waits=waits[rank])
            for rank in sorted(signs, key=lambda rank: (waits[rank], signs[rank].time_s))
        ]


def is_in_torch(place: progress.CodeLocation) -> bool:
    """Return True if a rank is in the installed torch, as one is that waits for the others."""
    torch = importlib.util.find_spec("torch")
    folders = torch.submodule_search_locations or [] if torch else []
    return any(Path(place.file).is_relative_to(folder) for folder in folders)


if __name__ == "__main__":
    ignore_output_errors()
    sys.exit(main())
