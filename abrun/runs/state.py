"""State of a run, which any reader derives from what its launcher, its job and its nodes have recorded."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from abrun.messages import sentence
from abrun.messages.codes import Code, Reason, in_words
from abrun.runs import layout, records
from abrun.runs.files import require_access
from abrun.runs.layout import RunName
from abrun.runs.owner import Owner
from abrun.runs.rundir import RunDir

STALLED_AFTER_S = 600.0
MAX_RANKS_SHOWN = 4  # ranks that hang
IMPORTS = "imports"  # activity of a process that has not begun its attempt yet
# The interval at which a node's agent reports, and the silence after which the node counts as lost.
NODE_REPORT_EVERY_S, NODE_LOST_AFTER_S = 15.0, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a run that is running or stalled, as far as its records tell."""

    last_step_s: float  # time of the last step, or of the last start if that is later
    activity: str | None  # of the first rank, or of a queued command
    limit_s: float | None  # seconds of silence after which the job ends itself; None if they do not count yet
    attempt: int | None = None  # that takes the steps; None: not begun


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """State of a run, read from its directory."""

    name: RunName
    directory: Path
    status: records.Status
    step: int = 0
    num_steps: int = 0
    started_s: float | None = None  # time of the last start
    reason: Reason | None = None  # why it failed, was interrupted, waits or hangs, if known
    exit_code: int | None = None  # of the last attempt, if its end was observed
    signal: str | None = None  # the signal that ended it, such as SIGKILL
    progress: Progress | None = None  # while it is running or stalled
    ended_s: float | None = None  # of the last attempt, if its end was observed

    @property
    def ending(self) -> str | None:
        """`exit code 1` or `signal SIGKILL`, if the end of the last attempt was observed."""
        if self.signal:
            return f"signal {self.signal}"
        return None if self.exit_code is None else f"exit code {self.exit_code}"

    @property
    def has_ending_in_reason(self) -> bool:
        """True if the reason already names the exit code or signal."""
        name, value = ("signal", self.signal) if self.signal else ("exit_code", self.exit_code)
        return any(reason.values.get(name) == value for reason in (self.reason.walk() if self.reason else ()))

    @property
    def message(self) -> str | None:
        return self.reason and sentence(self.reason)


@dataclass(frozen=True, slots=True)
class LatestRecord:
    """The newest record of a run's last start, and the process to poll to see if it is alive."""

    record: records.Launch | records.Attempt
    process: Owner
    launcher: Owner | None  # None if no launcher of abrun is known to have started it
    started_s: float | None
    attempt: int  # number of the newest attempt


def read_state(run: RunDir, name: RunName) -> RunState:
    """Return a run's state: finished if `result.json` exists, stalled if running without heartbeats."""
    require_access(run.path)
    heartbeat, latest = run.heartbeat(), _read_latest(run)
    while is_process_gone := latest.record.status == "running" and latest.process.is_gone:
        previous, latest = latest, _read_latest(run)
        if latest == previous:  # otherwise its end was recorded since the first read
            break

    record, started_s, progress = latest.record, latest.started_s or 0.0, None
    status, reason = record.status, records.recorded_reason(record)
    if is_process_gone and latest.launcher and latest.launcher.is_gone:
        ending = "run and launcher ended without writing a result (killed?); continue with --resume"
        status, reason = "interrupted", in_words(ending)
    elif is_process_gone:
        status, reason = "failed", in_words("process died without writing a result (disk full?)")
    if run.finished:
        status = "finished"
    elif status == "finished":
        status = "pending"  # its result was removed, so it has to run again
    elif status == "running":
        nodes = run.nodes(latest.attempt)
        reason = _stall_reason(nodes, heartbeat, started_s, time.time())
        status = "stalled" if reason else "running"
        progress = _describe_progress(latest, nodes, heartbeat)

    return RunState(
        name=name,
        directory=run.path,
        status=status,
        step=heartbeat.step,
        started_s=latest.started_s,
        num_steps=records.read_run_record(run.path / layout.CONFIG).num_steps,
        reason=reason if status in ("failed", "interrupted", "stalled") else None,
        exit_code=record.exit_code,
        signal=record.signal if isinstance(record, records.Launch) else None,
        progress=progress,
        ended_s=record.ended_s,
    )


def _read_latest(run: RunDir) -> LatestRecord:
    """Return the newer of the last launch and the newest attempt, with the process to poll."""
    launches, attempt = run.launches(), run.attempt()
    launch = launches[-1] if launches else None
    # The record of the newest attempt counts, the launcher's before the job's.
    record = launch if launch and launch.attempts >= attempt.number else attempt
    if launch is None or attempt.number > launch.attempts + (launch.ended_s is None):
        return LatestRecord(record, attempt, None, attempt.started_s, attempt.number)
    process: Owner = launch  # the run's first process, which outlives the others
    if launch.pid is None:  # not recorded yet, or the launcher was killed before recording it
        process = attempt if attempt.number > launch.attempts else launch.launcher or launch
    return LatestRecord(record, process, launch.launcher, launch.started_s, attempt.number)


def _stall_reason(
    nodes: Sequence[records.NodeStatus], heartbeat: records.Heartbeat, started_s: float, now: float
) -> Reason | None:
    """Return why a running run seems to hang, by its node agents or else its last heartbeat; None if not.

    Ranks that do not wait for others come first: one of them is the likely cause. A node without reports is
    lost. If only some nodes are silent, their ranks are waiting for the others, and the run does not hang.
    """
    if not nodes:
        silent_s = now - max(started_s, heartbeat.time_s)
        if silent_s <= (heartbeat.patience_s or STALLED_AFTER_S):
            return None
        if heartbeat.step:
            return Code.NO_NEW_STEP(step=heartbeat.step, silent_s=round(silent_s))
        return Code.NO_SIGN_OF_LIFE(silent_s=round(silent_s))

    lost_nodes = [node for node in nodes if now - node.time_s > NODE_LOST_AFTER_S]
    if lost_nodes:
        silent_s = round(now - min(node.time_s for node in lost_nodes))
        names = [{"node": node.node, "host": node.host} for node in lost_nodes]
        return Code.NODES_SILENT(nodes=names, silent_s=silent_s)

    silent_since_s = [node.silent_since_s for node in nodes if node.silent_since_s is not None]
    if len(silent_since_s) < len(nodes):
        return None
    ranks = [(rank, node.host) for node in nodes for rank in node.ranks]
    ranks.sort(key=lambda rank_and_host: (rank_and_host[0].waits, rank_and_host[0].rank))
    return silent_ranks_reason(now - max(silent_since_s), ranks)


def silent_ranks_reason(
    silent_s: float, ranks: Sequence[tuple[records.SilentRank, str | None]], num_unstarted: int = 0
) -> Reason:
    """Return the reason that names hanging ranks and their hosts (None on a single host).

    Seconds are rounded, so that runs that hang alike have equal reasons.
    """
    return Code.RANKS_SILENT(
        silent_s=round(silent_s),
        ranks=[
            {"rank": rank.rank, "host": host, "place": rank.place, "doing": rank.doing}
            for rank, host in ranks[:MAX_RANKS_SHOWN]
        ],
        num_unstarted=num_unstarted,
        num_more=max(0, len(ranks) - MAX_RANKS_SHOWN),
    )


def _describe_progress(
    latest: LatestRecord, nodes: Sequence[records.NodeStatus], heartbeat: records.Heartbeat
) -> Progress:
    """Return the progress of a run by its newest record, its node agents and its last heartbeat.

    The limit of abrun's own trainer counts from the last sign of life of any rank, so it is returned only
    while all nodes are silent; that of a command counts from its last step.
    """
    started_s = latest.started_s or 0.0
    last_step_s = max(started_s, heartbeat.time_s)
    if isinstance(latest.record, records.Launch):
        return Progress(last_step_s=last_step_s, activity=IMPORTS, limit_s=None)
    first_node = min(nodes, key=lambda node: node.node, default=None)
    if first_node is None:
        is_new = heartbeat.time_s > started_s
        activity, limit_s = (heartbeat.activity, heartbeat.limit_s) if is_new else (None, None)
    else:
        is_silent = all(node.silent_since_s is not None for node in nodes)
        activity, limit_s = first_node.activity or None, first_node.limit_s if is_silent else None
    return Progress(last_step_s=last_step_s, activity=activity, limit_s=limit_s, attempt=latest.attempt)
