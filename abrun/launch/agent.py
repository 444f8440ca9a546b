"""`python -m abrun.launch.agent MODULE DIRECTORY`: start and supervise the ranks of a run on this node.

The agent starts the ranks with torchrun's environment variables, exits with the status of the first rank that
failed, records the failure in the run directory, and leaves no process behind. Ranks without a heartbeat are
named and end the run. It does not import torch, which would delay the ranks by seconds.
"""

import argparse
import contextlib
import importlib.util
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from abrun import processes
from abrun.errors import AbrunError, LaunchError, StoreError
from abrun.messages import sentence
from abrun.messages.codes import Code, Reason
from abrun.processes import progress
from abrun.processes.capture import capture_output
from abrun.processes.output import ignore_output_errors
from abrun.runs.failures import ERROR_FILE, GRACE_S, POLL_S, cause_of, error_file, first_failure
from abrun.runs.launches import write_ending
from abrun.runs.records import NodeStatus, SilentRank
from abrun.runs.redaction import current_mask, hide_secrets_of
from abrun.runs.rundir import RunDir
from abrun.runs.state import NODE_LOST_AFTER_S, NODE_REPORT_EVERY_S, silent_ranks_reason
from abrun.runs.writer import resume_abandoned_attempt, write_node

LOOPBACK = "127.0.0.1"
BACKLOG = 4096  # pending connections; the default limit of the kernel
CHECK_S = 1.0  # between checks for a new attempt, and between reads of other nodes' notes
FAILED, TIMED_OUT = 2, 124  # exit codes, as of abrun.trainer and timeout(1)


def main() -> int:
    """Run the agent; return its exit code."""
    options = parse_options()
    os.environ[processes.RUN_DIR_VARIABLE] = os.path.realpath(options.directory)
    os.environ[progress.AGENT_PID_VARIABLE] = str(os.getpid())
    processes.adopt_orphans()
    run = RunDir(options.directory)
    hide_secrets_of(os.environ)
    mask = current_mask()
    with (
        processes.catch_stop_signals() as requests,
        capture_output(run.log, int(options.log_mib * 2**20), mask.hide_bytes),
    ):
        previous_attempt = run.last_attempt
        try:
            with _scratch(_local_ranks(options)) as (scratch, status_lines):
                watch = _Watchdog(requests, options, scratch, status_lines, _NodeNotes(run, options))
                status, reason = _run_and_watch(options, scratch, watch)
        except LaunchError as error:
            status, reason = FAILED, error.reason
        _record_ending(run, options.node, previous_attempt, status, reason, requests.first_signal)
    return processes.exit_like(status)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m abrun.launch.agent", description=__doc__)
    parser.add_argument("module", help="module that each rank runs, with DIRECTORY as its argument")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--node", type=int, default=0, help="index of this node")
    parser.add_argument("--meet", metavar="HOST:PORT", help="address of the first node, with several nodes")
    parser.add_argument("--run-s", type=float, default=math.inf)
    parser.add_argument("--stalled-s", type=float, default=math.inf)
    parser.add_argument("--grace-s", type=float, default=GRACE_S)
    parser.add_argument("--log-mib", type=float, default=64.0)
    return parser.parse_args()


def _local_ranks(options: argparse.Namespace) -> range:
    """Return the global numbers of the ranks on this node."""
    return range(options.node * options.ranks, (options.node + 1) * options.ranks)


def _run_and_watch(
    options: argparse.Namespace, scratch: Path, watch: "_Watchdog"
) -> tuple[int, Reason | None]:
    """Run the ranks under a watchdog; return their exit status and the reason of a failure."""
    os.environ[progress.FOLDER_VARIABLE] = str(scratch)
    try:
        status, reason = _run_ranks(options, scratch, watch.start)
    finally:
        watch.done.set()
        if watch.is_alive():
            watch.join()
        processes.kill_run(options.directory, os.getpid())
    return (TIMED_OUT, watch.ended_because) if watch.ended_because else (status, reason)


@contextlib.contextmanager
def _scratch(ranks: range) -> Iterator[tuple[Path, dict[int, int]]]:
    """Yield a temporary folder shared by agent and ranks, and the ranks' heartbeat files in it, opened."""
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(processes.scratch_folder())
            lines = stack.enter_context(progress.open_status_lines(folder, ranks))
        except OSError as error:
            raise LaunchError(f"temporary files: {error}; free some space there, or set TMPDIR") from None
        yield folder, lines


def _run_ranks(
    options: argparse.Namespace, scratch: Path, on_started: Callable[[], None]
) -> tuple[int, Reason | None]:
    """Return exit status (as `subprocess` gives it) and reason of the first rank that failed, or 0 and None.

    `on_started` is called after the ranks have been started.
    """
    oom_kills_before, log_start = processes.count_oom_kills(), RunDir(options.directory).log_size()
    try:
        with _start_ranks(options, scratch) as started:
            on_started()
            failure = first_failure(started, scratch)
    except (OSError, OverflowError, ValueError) as error:  # an invalid port raises the latter two
        raise LaunchError(f"node {options.node} cannot start its ranks: {error}") from None
    if failure is None:
        return 0, None
    reason = Code.RANK_FAILED(
        rank=failure.rank,
        num_ranks=options.nodes * options.ranks,
        host=socket.gethostname() if options.meet else None,
        cause=cause_of(failure, RunDir(options.directory).read_log(log_start), oom_kills_before),
    )
    return failure.status, reason


@contextlib.contextmanager
def _start_ranks(options: argparse.Namespace, scratch: Path) -> Iterator[dict[int, processes.Popen]]:
    """Yield the rank processes of this node. Rank 0 inherits the socket of the rendezvous.

    The agent keeps the socket open as well: if rank 0 dies before it serves, the other ranks wait until they
    are killed, instead of failing with a misleading "connection reset" from torch.
    """
    host, _, port = (options.meet or f"{LOOPBACK}:0").rpartition(":")
    ranks, inherited = _local_ranks(options), dict[int, int]()
    with contextlib.ExitStack() as stack:
        if 0 in ranks:
            rendezvous = stack.enter_context(_listen(int(port), all_interfaces=bool(options.meet)))
            port, inherited[0] = rendezvous.getsockname()[1], rendezvous.fileno()
        command = [sys.executable, "-u", *processes.MODULE_OPTIONS, options.module, str(options.directory)]
        yield {
            rank: subprocess.Popen(
                command,
                env={
                    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
                    **os.environ,
                    **_rank_environment(options, rank, host.strip("[]"), port, inherited.get(rank)),
                    ERROR_FILE: str(error_file(scratch, rank)),
                },
                pass_fds=[inherited[rank]] if rank in inherited else [],
                start_new_session=True,  # signals to the group reach only the agent
            )
            for rank in ranks
        }


def _rank_environment(
    options: argparse.Namespace, rank: int, host: str, port: int | str, listening_fd: int | None
) -> dict[str, str]:
    """Return a rank's variables: those of torchrun and, for rank 0, the socket that it inherits.

    They announce an agent store, so that torch starts no store itself; rank 0 serves it on that socket.
    """
    variables = {
        "RANK": rank,
        "WORLD_SIZE": options.nodes * options.ranks,
        "LOCAL_RANK": rank % options.ranks,
        "LOCAL_WORLD_SIZE": options.ranks,
        "GROUP_RANK": options.node,
        "GROUP_WORLD_SIZE": options.nodes,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "abrun",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        **({} if listening_fd is None else {progress.LISTENING_FD_VARIABLE: listening_fd}),
    }
    return {name: str(value) for name, value in variables.items()}


def _listen(port: int, *, all_interfaces: bool) -> socket.socket:
    """Open the rendezvous socket, so that other ranks can connect before rank 0 has finished its imports."""
    if not all_interfaces:
        return socket.create_server((LOOPBACK, port), backlog=BACKLOG)
    with contextlib.suppress(OSError, ValueError):  # a machine without IPv6
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    return socket.create_server(("", port), backlog=BACKLOG)


def _record_ending(
    run: RunDir, node: int, previous_attempt: int, status: int, reason: Reason | None, stop_signal: int | None
) -> None:
    """Record the ending for an attempt that began and left no result.

    A run that exceeded its time limit records itself that it was interrupted. Nodes other than the first only
    print the reason and write it for the launcher.
    """
    if reason and stop_signal is None:
        print(f"error: {sentence(reason)}", file=sys.stderr)
        write_ending(run, f"node-{node:04d}", previous_attempt, reason)
    if node > 0:
        return
    try:
        writer = resume_abandoned_attempt(run, previous_attempt, interrupted=status == TIMED_OUT)
        if writer and stop_signal:
            writer.interrupt(exit_code=processes.shell_exit_code(status), signal=stop_signal)
        elif writer and reason:
            ending = Code.SEE_LOG(ending=reason, log=run.log) if processes.is_unexplained(reason) else reason
            writer.fail(ending, exit_code=processes.shell_exit_code(status))
    except AbrunError as error:
        print(f"error: {error}", file=sys.stderr)


class _NodeNotes:
    """Notes of each node about its ranks, in the run directory: for run status and for the other nodes."""

    def __init__(self, run: RunDir, options: argparse.Namespace) -> None:
        self._run, self._previous_attempt = run, run.last_attempt
        self._node, self._num_nodes = options.node, options.nodes
        self._limit_s = None if math.isinf(options.stalled_s) else options.stalled_s
        self._attempt = 0
        self._written_s = -math.inf
        self._activity = ""
        self._silent_ranks: list[SilentRank] | None = None
        self._last_read_s = -math.inf
        # Each with the time of reading, by this node's clock
        self._notes_by_node: dict[int, tuple[NodeStatus, float]] = {}

    def write(
        self,
        silent_s: float,
        ranks: Callable[[], list[SilentRank]] | None,
        activity: str,
        *,
        is_in_steps: bool,
    ) -> None:
        """Write this node's note if it is due; call this often.

        `ranks` returns the silent ranks and where they are; None while heartbeats arrive. A new `activity` is
        written within a second, unless it is one of those that alternate in every step.
        """
        now = time.time()  # wall clock: after a suspend of the machine, the note is due at once
        changed = (self._silent_ranks is None) != (ranks is None)
        is_new_activity = activity != self._activity and not is_in_steps
        report_every_s = CHECK_S if is_new_activity else NODE_REPORT_EVERY_S
        if abs(now - self._written_s) < report_every_s and not changed:
            return
        self._written_s = now
        self._attempt = self._attempt or self._run.last_attempt
        if self._attempt <= self._previous_attempt:
            self._attempt = 0
            self._written_s -= NODE_REPORT_EVERY_S - CHECK_S
            return
        if changed:
            self._silent_ranks = ranks() if ranks else None
        self._activity = activity
        note = NodeStatus(
            attempt=self._attempt,
            node=self._node,
            host=socket.gethostname(),
            time_s=time.time(),
            silent_s=silent_s,
            silent_since_s=None if self._silent_ranks is None else time.time() - silent_s,
            limit_s=self._limit_s,
            activity=activity,
            ranks=tuple(self._silent_ranks or ()),
        )
        with contextlib.suppress(StoreError):  # a full disk must not end the ranks
            write_node(self._run, note)

    def other_nodes(self) -> list[NodeStatus]:
        """Return the recent notes of other nodes; their age is measured by this node's clock."""
        now = time.monotonic()
        if self._num_nodes > 1 and now - self._last_read_s > CHECK_S:
            self._last_read_s = now
            for note in self._run.nodes(self._attempt):
                last_note, _ = self._notes_by_node.get(note.node, (None, now))
                if note.node != self._node and note != last_note:
                    self._notes_by_node[note.node] = note, now
        return [note for note, seen_s in self._notes_by_node.values() if now - seen_s <= NODE_LOST_AFTER_S]


class _Watchdog(threading.Thread):
    """Forwards requests to stop to the ranks, and kills ranks that hang or exceed the time limit.

    It reports unusually long silence before it acts.
    """

    def __init__(
        self,
        requests: processes.StopRequests,
        options: argparse.Namespace,
        scratch: Path,
        lines: Mapping[int, int],
        notes: _NodeNotes,
    ) -> None:
        super().__init__(daemon=True)
        self.done = threading.Event()
        self.ended_because: Reason | None = None
        self._requests, self._limits, self._notes = requests, options, notes
        self._scratch, self._lines = scratch, lines
        self._began_s, self._awake = time.monotonic(), processes.PauseDetector()
        self._signalled_pids = set[int]()
        self._kill_at_s = math.inf

    def run(self) -> None:
        while not self.done.wait(POLL_S):
            now, signs = time.monotonic(), progress.read_statuses(self._lines)
            if not self.ended_because and now - self._began_s > self._limits.run_s:
                self.ended_because = Code.TIME_LIMIT_REACHED(limit_s=self._limits.run_s)
            if self.ended_because or self._requests.first_signal is not None:
                self._kill_at_s = min(self._kill_at_s, now + self._limits.grace_s)
                # Once to every rank, including later ones, so that they save a checkpoint
                for pid in processes.find_children(os.getpid()) - self._signalled_pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
                    self._signalled_pids.add(pid)
            hanging = self._check_for_hang(now, signs)
            self.ended_because = hanging or self.ended_because
            if hanging or now > self._kill_at_s or self._requests.is_forced:
                processes.kill_all(lambda: processes.find_descendants(os.getpid()))

    def _check_for_hang(self, now: float, signs: Mapping[int, progress.RankStatus]) -> Reason | None:
        """Return the reason to end the run if all ranks have been silent for too long, else None.

        The reason lists the silent ranks, those that do not wait for others first. With several nodes, the
        ranks of all nodes count: while one of them works, the others wait for it.
        """
        all_begun = len(signs) == self._limits.ranks
        if all_begun:
            processes.reap_orphans({sign.pid for sign in signs.values()})
        last_s = max((sign.time_s for sign in signs.values()), default=self._began_s)
        silent_s = now - max(last_s, self._awake.running_since_s())
        patience_s = max(sign.hang_timeout_s for sign in signs.values()) if all_begun else math.inf
        limit_s = self._limits.stalled_s
        is_unusual = silent_s > min(patience_s, limit_s)
        self._notes.write(
            silent_s,
            (lambda: self._locate_ranks(signs)) if is_unusual else None,
            signs[min(signs)].activity if signs else "",
            is_in_steps=math.isfinite(patience_s),
        )
        if silent_s <= limit_s:
            return None
        other_nodes = self._notes.other_nodes()
        if any(note.silent_s <= limit_s for note in other_nodes):
            return None
        ranks: list[tuple[SilentRank, str | None]] = [(rank, None) for rank in self._locate_ranks(signs)]
        ranks += [(rank, note.host) for note in other_nodes for rank in note.ranks]
        ranks.sort(key=lambda rank_and_host: rank_and_host[0].waits)
        num_unstarted = self._limits.ranks - len(signs)
        return Code.STALL_LIMIT_REACHED(silence=silent_ranks_reason(silent_s, ranks, num_unstarted))

    def _locate_ranks(self, signs: Mapping[int, progress.RankStatus]) -> list[SilentRank]:
        """Return what each rank is doing, ranks that do not wait for others first."""
        places = progress.locate_ranks(self._scratch, signs)
        waits = {rank: signs[rank].is_waiting or is_in_torch(place) for rank, place in places.items()}
        return [
            SilentRank(rank=rank, place=str(places[rank]), doing=signs[rank].activity, waits=waits[rank])
            for rank in sorted(signs, key=lambda rank: (waits[rank], signs[rank].time_s))
        ]


def is_in_torch(place: progress.CodeLocation) -> bool:
    """Return True if a place is inside the installed torch, as in a rank that waits for a collective."""
    torch = importlib.util.find_spec("torch")
    folders = torch.submodule_search_locations or [] if torch else []
    return any(Path(place.file).is_relative_to(folder) for folder in folders)


if __name__ == "__main__":
    ignore_output_errors()
    sys.exit(main())
