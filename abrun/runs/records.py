"""What the small files of a run directory say, each as a dataclass. Keys of another version are let be."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from abrun.errors import StoreError
from abrun.messages import sentence
from abrun.messages.records import coded, stored_reason
from abrun.reasons import Code, Reason
from abrun.redaction import shortened
from abrun.redaction import told as one_line
from abrun.regular_files import MAX_FILE_BYTES, exists, is_file
from abrun.runs.access import UnreadableError, unreadable_error
from abrun.runs.files import read_as, read_json_or_empty
from abrun.runs.layout import RunName
from abrun.runs.owner import Owner
from abrun.runs.schemas import MAX_COUNT, Count, ExitCode, Flag, Items, PathText, Seconds, Texts, checked

SCHEMA_VERSION = 1
SAVED_STATE = "state.json"  # the last file of a checkpoint
Status = Literal[
    "pending", "waiting", "running", "stalled", "finished", "failed", "interrupted", "unreadable"
]
STALLED_AFTER_S = 600.0
MAX_RANKS_SHOWN = 4  # ranks that hang
NODE_REPORT_EVERY_S, NODE_LOST_AFTER_S = (
    15.0,
    60.0,
)  # how often a node's agent says that it is there, and when it is lost
MAX_ATTEMPT = 999_999_999  # of which no row can be, and after which none can begin


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Which run a directory holds and what it is started with: `config.json`."""

    experiment: str
    name: RunName
    initial_weights: str | None  # a folder, relative to the run directory
    config: dict[str, Any]  # resolved; abrun.recipe.experiment.stored_run reads it


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt(Owner):
    """One start of the job, in the job's own words: a file in `attempts/`, which that job alone writes.

    One that died without a word is running in it.
    """

    number: Count = 0  # from 1; 0 is the attempt of a run that was never begun
    status: Status = "running"
    message: str | None = None
    message_code: dict[str, Any] | None = None  # the code and values of the message; None in older records
    started_s: Seconds | None = None
    ended_s: Seconds | None = None
    exit_code: ExitCode | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextValues:
    """The values of a metric that a command's log holds as text, and that no row therefore has."""

    at: str  # the first text, where it stands, and what to write there
    steps: Items[Count]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a finished run leaves: `result.json`."""

    step: Count = 0  # the last one
    final_weights_hash: str | None = None
    final_weights: Mapping[PathText, dict[str, Any]] | None = None  # by file, each a fingerprint
    text_values: Mapping[str, TextValues] = field(default_factory=dict)  # by metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Git:
    """Commit and uncommitted changes of the folder that a run is launched from."""

    sha: str | None = None
    dirty: Flag | None = None  # None: not known
    changes: str | None = None  # the start of a hash of them
    files: Texts = ()  # the names of changed and of untracked files
    diff: PathText | None = None  # the file of the changes, in the experiment's folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch(Owner):
    """One start by a launcher, in the launcher's words: of `launch.json`."""

    launcher: Owner | None = None  # the process that writes this; `pid` and the rest are of what it started
    started_s: Seconds = 0.0
    ended_s: Seconds | None = None
    devices: Texts = ()
    exit_code: ExitCode | None = None
    signal: str | None = None
    status: Status = "running"
    message: str | None = None
    message_code: dict[str, Any] | None = None
    attempts: Count = 0  # the newest when this was written: of a later one it knows nothing
    git: Git | None = None  # of this start's code, as `Launches.git` is of the last one's


@dataclass(frozen=True, slots=True)
class LatestRecord:
    """The newest start of a run: who speaks of it, and whose life tells whether it goes on."""

    record: Launch | Attempt
    process: Owner
    launcher: Owner | None  # None where no launcher of abrun started it, as far as is known
    started_s: float | None
    attempt: int  # the newest

    @property
    def status_without_ending(self) -> tuple[Status, Reason]:
        """Status and reason where the process is gone and nobody has noted how it ended."""
        if self.launcher and self.launcher.is_gone:
            return "interrupted", Code.LAUNCHER_GONE()
        return "failed", Code.PROCESS_GONE()


def recorded_reason(record: Launch | Attempt) -> Reason | None:
    """Why it ended; the text of an older record, or one of another program, is a reason without a code."""
    return stored_reason(record.message_code, record.message)


def message_fields(reason: Reason | None) -> dict[str, Any]:
    """Return how a record keeps why something ended: a sentence of one line without secrets, and its code."""
    if reason is None:
        return {"message": None, "message_code": None}
    return {"message": one_line(sentence(reason)), "message_code": coded(reason.map_texts(one_line))}


def latest_record(launches: Sequence[Launch], attempt: Attempt) -> LatestRecord:
    """Choose between the last launch and the newest attempt: the attempt where it is later."""
    launch = launches[-1] if launches else None
    record = launch if launch and launch.attempts >= attempt.number else attempt
    if launch is None or attempt.number > launch.attempts + (launch.ended_s is None):
        return LatestRecord(record, attempt, None, attempt.started_s, attempt.number)
    process: Owner = launch  # the run's first process, which outlives the others
    if launch.pid is None:  # its launcher has not noted it yet, or was killed before that
        process = attempt if attempt.number > launch.attempts else launch.launcher or launch
    return LatestRecord(record, process, launch.launcher, launch.started_s, attempt.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """What launchers say of a run: `launch.json`."""

    git: Git | None = None
    launches: Items[Launch] = ()


def describe_commit(git: Mapping[str, Any]) -> str:
    """Return a commit and a hash of its uncommitted changes: `939ca1c with changes 527da590`.

    Older launches name the file of their diff instead, whose own hash that name holds.
    """
    uncommitted = "uncommitted changes" if git.get("dirty") else None
    changes = f"changes {git['changes']}" if git.get("changes") else git.get("diff") or uncommitted
    return f"{str(git.get('sha'))[:7]}{f' with {changes}' if changes else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The last sign of life: `heartbeat.json`."""

    time_s: Seconds = 0.0
    step: Count = 0
    patience_s: Seconds | None = None  # of silence from then on, after which the run seems to hang


@dataclass(frozen=True, slots=True, kw_only=True)
class SilentRank:
    """Where a rank is that has given no sign of life for long."""

    rank: Count
    place: str  # the innermost function of its main thread, with its file and line
    doing: str  # as it said last
    waits: Flag  # in the code of torch, as one that waits for the others does


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """What the agent of the ranks of one node says of them, every few seconds: a file in `nodes/`."""

    attempt: Count = 0
    node: Count = 0
    host: str = ""
    time_s: Seconds = 0.0
    silent_s: Seconds = 0.0  # since the last sign of any of its ranks, when this was written
    silent_since_s: Seconds | None = None  # the last sign of any of its ranks; None while they give some
    ranks: Items[SilentRank] = ()


def node_stall_reason(nodes: Sequence[NodeStatus], now: float) -> Reason | None:
    """Why a run of these nodes seems to hang, with those ranks first that wait for no other; None: it works.

    A node that says nothing is lost. Ranks that are silent on one node alone wait for those of another.
    """
    lost_nodes = [node for node in nodes if now - node.time_s > NODE_LOST_AFTER_S]
    if lost_nodes:
        silent_s = now - min(node.time_s for node in lost_nodes)
        return Code.NODES_SILENT(
            nodes=[{"node": node.node, "host": node.host} for node in lost_nodes], silent_s=round(silent_s)
        )
    silent_since_s = [node.silent_since_s for node in nodes if node.silent_since_s is not None]
    if len(silent_since_s) < len(nodes) or not nodes:
        return None
    ranks = [(rank, node.host) for node in nodes for rank in node.ranks]
    ranks.sort(key=lambda rank_and_host: (rank_and_host[0].waits, rank_and_host[0].rank))
    return silent_ranks_reason(now - max(silent_since_s), ranks)


def silent_ranks_reason(
    silent_s: float, ranks: Sequence[tuple[SilentRank, str | None]], num_unstarted: int = 0
) -> Reason:
    """Say of ranks, and their hosts if several, where they hang. Whole seconds: two runs may hang alike."""
    return Code.RANKS_SILENT(
        silent_s=round(silent_s),
        ranks=[
            {"rank": rank.rank, "host": host, "place": rank.place, "doing": rank.doing}
            for rank, host in ranks[:MAX_RANKS_SHOWN]
        ],
        num_unstarted=num_unstarted,
        num_more=max(0, len(ranks) - MAX_RANKS_SHOWN),
    )


def stall_reason(
    nodes: Sequence[NodeStatus], heartbeat: Heartbeat, started_s: float, now: float
) -> Reason | None:
    """Why a run that is at work seems to hang, by its nodes' agents, else by its last sign of life."""
    if nodes:
        return node_stall_reason(nodes, now)
    silent_s = now - max(started_s, heartbeat.time_s)
    if silent_s <= (heartbeat.patience_s or STALLED_AFTER_S):
        return None
    if heartbeat.step:
        return Code.NO_NEW_STEP(step=heartbeat.step, silent_s=round(silent_s))
    return Code.NO_SIGN_OF_LIFE(silent_s=round(silent_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """What a run is doing, read from its directory."""

    name: RunName
    directory: Path
    status: Status
    step: int
    num_steps: int
    started_s: float | None  # when it was last started
    reason: Reason | None  # why it failed, was interrupted, waits or hangs, where that is known
    exit_code: int | None  # of the last attempt, where its end was seen
    signal: str | None  # that ended it, such as SIGKILL

    @property
    def ending(self) -> str | None:
        """`exit code 1` or `signal SIGKILL`, where the last attempt's end was seen."""
        if self.signal:
            return f"signal {self.signal}"
        return None if self.exit_code is None else f"exit code {self.exit_code}"

    @property
    def has_ending_in_reason(self) -> bool:
        """Return True if the reason names the exit code or signal, too."""
        name, value = ("signal", self.signal) if self.signal else ("exit_code", self.exit_code)
        return any(reason.values.get(name) == value for reason in (self.reason.walk() if self.reason else ()))

    @property
    def message(self) -> str | None:
        return self.reason and sentence(self.reason)


def attempt_file(folder: Path, number: int) -> Path:
    return folder / f"{number:04d}.json"


def attempt_numbers(folder: Path) -> list[int]:
    try:
        names = os.listdir(folder)  # not a look at single names, of which a file server's client may not know
    except PermissionError:
        raise unreadable_error(folder) from None
    except OSError:
        return []
    return sorted(int(name[:-5]) for name in names if re.fullmatch(r"\d{4,9}\.json", name))


def last_attempt(folder: Path) -> int:
    """The number of the newest start of the job, 0 before the first."""
    return max(attempt_numbers(folder), default=0)


def read_attempt(path: Path, number: int, *, is_over: bool) -> Attempt:
    """Return the record of an attempt. Raises StoreError for a damaged one, which has failed if it `is_over`.

    An attempt that begins just now has an empty file, on a file system without hard links.
    """
    file_status = path.stat() if is_file(path) else None
    attempt = Attempt(started_s=file_status and file_status.st_mtime)
    if file_status and file_status.st_size:
        try:
            attempt = read_as(Attempt, path)
        except UnreadableError:
            raise
        except StoreError as error:
            if not is_over:
                raise
            attempt = replace(attempt, status="failed", **message_fields(error.reason))
    return replace(attempt, number=number)


def start_step(environment: Mapping[str, Any] | None) -> int:
    """The step that a run began after, by its environment.json: 0, or that of a checkpoint of another run."""
    checkpoint = (environment or {}).get("started_from")
    return checkpoint.get("step", 0) if checkpoint else 0


def refuse_other_schema(content: Mapping[str, Any], path: Path) -> None:
    """Raises StoreError for a file that says that it is of another form than this version's."""
    version = content.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise StoreError(
            Code.SCHEMA_VERSION_UNKNOWN(path=path, got=shortened(version), supported=SCHEMA_VERSION)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredConfig:
    """The fields of `config.json`; a missing name has the arm "", a missing number is -1."""

    experiment: str | None = None
    arm: str = ""
    seed: Count = -1
    rerun: Count = -1
    initial_weights: PathText | None = None
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        """The steps that are planned; 0 where the configuration does not say."""
        steps = self.config.get("steps")
        return steps if type(steps) is int and 0 <= steps <= MAX_COUNT else 0

    @property
    def name(self) -> RunName:
        return RunName(arm=self.arm, seed=self.seed, rerun=self.rerun)

    def record(self) -> RunRecord | None:
        """Return which run this is; None where it lacks what every run of abrun has."""
        if not (self.arm and self.seed >= 0 and self.rerun >= 0 and self.config):
            return None
        return RunRecord(
            experiment=str(self.experiment),
            name=self.name,
            initial_weights=self.initial_weights,
            config=self.config,
        )


def read_stored_config(path: Path, max_bytes: int = MAX_FILE_BYTES) -> StoredConfig:
    """Read `config.json`, which may be missing. Raises StoreError where it is of another form."""
    content = read_json_or_empty(path, max_bytes)
    refuse_other_schema(content, path)
    return checked(StoredConfig, content, path)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCheckpoint:
    """The checkpoint of another run that a run began from."""

    run: str | None = None
    step: Count = 0
    sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What a run depends on besides its configuration: `environment.json`. Null: not known."""

    attempt: Count | None = None
    python: str | None = None
    versions: Mapping[str, str | None] | None = None
    devices: Texts | None = None
    hosts: Texts | None = None
    drivers: Texts | None = None
    dtype: str | None = None
    precision: Mapping[str, str | None] | None = None
    prompts_sha256: str | None = None
    initial_weights_hash: str | None = None
    started_from: StartCheckpoint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """The state of a run after a step."""

    run: str  # RunDir.identity
    step: Count
    num_ranks: Count
    attempt: Count  # which wrote it
    files: Mapping[PathText, dict[str, Any]]  # by name, each a store.fingerprint


def read_saved_state(path: Path) -> SavedState:
    """Of a checkpoint's folder. Raises StoreError, which says no more than what is wrong with the file."""
    if not exists(path / SAVED_STATE):
        raise StoreError(Code.STATE_MISSING(file=SAVED_STATE))
    try:
        state = read_as(SavedState, path / SAVED_STATE)
    except StoreError as error:
        full_path = str(path / SAVED_STATE)
        raise StoreError(
            error.reason.map_texts(lambda text: SAVED_STATE if text == full_path else text)
        ) from None
    expected = {f"rank-{rank}.safetensors" for rank in range(len(state.files))}
    if state.files.keys() != expected or len(expected) != state.num_ranks:
        raise StoreError(Code.STATE_LACKS_RANKS(file=SAVED_STATE, files=len(expected), ranks=state.num_ranks))
    return state
