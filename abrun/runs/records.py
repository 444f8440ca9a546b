"""Contents of the small files in a run directory, one dataclass each. Unknown keys are ignored."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from abrun.errors import StoreError
from abrun.messages import sentence
from abrun.messages.codes import Reason
from abrun.messages.records import encode_reasons, stored_reason
from abrun.runs import files
from abrun.runs.layout import RunName
from abrun.runs.owner import Owner
from abrun.runs.redaction import one_line, shortened
from abrun.runs.schemas import MAX_COUNT, Count, ExitCode, Flag, Items, PathText, Seconds, Texts, checked

SCHEMA_VERSION = 1
SAVED_STATE = "state.json"  # the last file of a checkpoint
Status = Literal[
    "pending", "waiting", "running", "stalled", "finished", "failed", "interrupted", "unreadable"
]
MAX_ATTEMPT = 999_999_999  # exclusive in rows: no attempt can begin after this one


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt(Owner):
    """One start of the job, as recorded by the job itself: a file in `attempts/` that only the job writes.

    A job that died without recording its end still has the status `running`.
    """

    number: Count = 0  # from 1; 0 for a run that was never started
    status: Status = "running"
    message: str | None = None
    message_code: dict[str, Any] | None = None  # the code and values of the message; None in older records
    started_s: Seconds | None = None
    ended_s: Seconds | None = None
    exit_code: ExitCode | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextValues:
    """Values of a metric that a command's log holds as text, so that metrics.jsonl lacks them."""

    at: str  # the first text, its position and how to fix it
    steps: Items[Count]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Result of a finished run: `result.json`."""

    step: Count = 0  # the last step
    final_weights_hash: str | None = None
    rollouts_sha256: str | None = None  # of the recorded rollouts that it wrote or trained on
    final_weights: Mapping[PathText, dict[str, Any]] | None = None  # by file, each a fingerprint
    text_values: Mapping[str, TextValues] = field(default_factory=dict)  # by metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Git:
    """Commit and uncommitted changes of the folder that a run is launched from."""

    sha: str | None = None
    dirty: Flag | None = None  # None: unknown
    changes: str | None = None  # hash prefix of the uncommitted changes
    files: Texts = ()  # names of changed and untracked files
    diff: PathText | None = None  # file with the changes, in the experiment's folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch(Owner):
    """One start of the job, as recorded by its launcher: an entry of `launch.json`."""

    launcher: Owner | None = None  # the launcher's process; `pid` and the other fields describe the job's
    started_s: Seconds = 0.0
    ended_s: Seconds | None = None
    devices: Texts = ()
    runs_per_gpu: Count = 1  # runs that may share the GPUs, this one included
    mps: Flag = False  # they share them through CUDA's multi-process service
    exit_code: ExitCode | None = None
    signal: str | None = None
    status: Status = "running"
    message: str | None = None
    message_code: dict[str, Any] | None = None
    attempts: Count = 0  # number of the newest attempt when this was written
    git: Git | None = None  # the code of this launch; `Launches.git` is that of the last launch


def recorded_reason(record: Launch | Attempt) -> Reason | None:
    """Return why a start ended. A text without a code (of an older version) becomes a free-text reason."""
    return stored_reason(record.message_code, record.message)


def message_fields(reason: Reason | None) -> dict[str, Any]:
    """Return the record fields of a reason: a one-line sentence without secrets, and the code."""
    if reason is None:
        return {"message": None, "message_code": None}
    return {"message": one_line(sentence(reason)), "message_code": encode_reasons(reason.map_texts(one_line))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """All launches of a run: `launch.json`."""

    git: Git | None = None
    launches: Items[Launch] = ()


def describe_commit(git: Mapping[str, Any]) -> str:
    """Return a commit and a hash of its uncommitted changes: `939ca1c with changes 527da590`.

    For older launches the name of the diff file, which contains its hash, takes the place of the hash.
    """
    uncommitted = "uncommitted changes" if git.get("dirty") else None
    changes = f"changes {git['changes']}" if git.get("changes") else git.get("diff") or uncommitted
    return f"{str(git.get('sha'))[:7]}{f' with {changes}' if changes else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The last sign of life: `heartbeat.json`."""

    time_s: Seconds = 0.0
    step: Count = 0
    patience_s: Seconds | None = None  # the run counts as stalled if the next heartbeat takes longer
    limit_s: Seconds | None = None  # the job ends itself if the next heartbeat takes longer
    activity: str | None = None  # of a command that takes no steps yet


@dataclass(frozen=True, slots=True, kw_only=True)
class SilentRank:
    """A rank that has sent no heartbeat for long, and where it hangs."""

    rank: Count
    place: str  # the innermost function of its main thread, with file and line
    doing: str  # the last activity that it reported
    waits: Flag  # True inside torch, where a rank waits for the others


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """Status of one node's ranks, written by its agent every few seconds: a file in `nodes/`."""

    attempt: Count = 0
    node: Count = 0
    host: str = ""
    time_s: Seconds = 0.0
    silent_s: Seconds = 0.0  # since the last heartbeat of any of its ranks, when this was written
    silent_since_s: Seconds | None = None  # time of the last heartbeat of any rank; None while they are alive
    limit_s: Seconds | None = None  # the agent ends the run after this silence
    activity: str = ""  # of the node's first rank
    ranks: Items[SilentRank] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstNode:
    """A run's first node at a start, with which the others compare themselves: `nodes/first.json`."""

    start: str = ""  # address where the nodes of this start meet
    host: str = ""
    clock_s: float = 0.0  # by how much its clock is ahead of the file system's
    versions: Mapping[str, str | None] = field(default_factory=dict)  # by name of what is installed


def attempt_file(folder: Path, number: int) -> Path:
    return folder / f"{number:04d}.json"


def attempt_numbers(folder: Path) -> list[int]:
    try:
        # Listing the folder: a network client may cache the absence of single names.
        names = os.listdir(folder)
    except PermissionError:
        raise files.unreadable_error(folder) from None
    except OSError:
        return []
    return sorted(int(name[:-5]) for name in names if re.fullmatch(r"\d{4,9}\.json", name))


def last_attempt(folder: Path) -> int:
    """Return the number of the newest attempt, 0 before the first."""
    return max(attempt_numbers(folder), default=0)


def read_attempt(path: Path, number: int, *, is_over: bool) -> Attempt:
    """Return the record of an attempt. If damaged, it has failed if it `is_over`, else StoreError is raised.

    On a file system without hard links, the file of an attempt that has just begun may be empty.
    """
    file_status = path.stat() if files.is_file(path) else None
    attempt = Attempt(started_s=file_status and file_status.st_mtime)
    if file_status and file_status.st_size:
        try:
            attempt = files.read_as(Attempt, path)
        except files.UnreadableError:
            raise
        except StoreError as error:
            if not is_over:
                raise
            attempt = replace(attempt, status="failed", **message_fields(error.reason))
    return replace(attempt, number=number)


def start_step(environment: Mapping[str, Any] | None) -> int:
    """Return the step that a run starts after: 0, or the step of the checkpoint in its environment.json."""
    checkpoint = (environment or {}).get("started_from")
    return checkpoint.get("step", 0) if checkpoint else 0


def refuse_other_schema(content: Mapping[str, Any], path: Path) -> None:
    """Raise StoreError for a file with another schema version."""
    version = content.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise StoreError(
            f"{path}: schema_version is {shortened(version)}, but this abrun reads {SCHEMA_VERSION}; use the "
            "version that wrote it"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run's name, configuration and initial weights: `config.json`. A missing number is -1."""

    experiment: str = ""
    arm: str = ""
    seed: Count = -1
    rerun: Count = -1
    initial_weights: PathText | None = None  # a folder, relative to the run directory
    # Resolved; abrun.recipe.experiment.parse_stored_run parses it
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        """The number of planned steps; 0 if the configuration has none."""
        steps = self.config.get("steps")
        return steps if type(steps) is int and 0 <= steps <= MAX_COUNT else 0

    @property
    def name(self) -> RunName:
        return RunName(arm=self.arm, seed=self.seed, rerun=self.rerun)

    def identities(self) -> tuple[str, str]:
        """Return the run's name with a hash of its config, and the same of versions before shared GPUs.

        Limits and the share of a GPU, which a resumed launch may change, have no part in the hash.
        """
        config = {key: value for key, value in self.config.items() if key != "limits"}
        configs = [config, config]
        if isinstance(cluster := config.get("cluster"), dict) and "runs_per_gpu" in cluster:
            others = {key: value for key, value in cluster.items() if key != "runs_per_gpu"}
            configs = [{**config, "cluster": {**cluster, "runs_per_gpu": 1}}, {**config, "cluster": others}]
        texts = (json.dumps(content, sort_keys=True) for content in configs)
        now, earlier = (hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts)
        return f"{self.name} {now}", f"{self.name} {earlier}"


def read_run_record(path: Path, max_bytes: int = files.MAX_FILE_BYTES) -> RunRecord:
    """Return the content of `config.json`, which may be missing. Raises StoreError if it is malformed."""
    content = files.read_json_or_empty(path, max_bytes)
    refuse_other_schema(content, path)
    return checked(RunRecord, content, path)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCheckpoint:
    """The checkpoint of another run that a run starts from."""

    run: str | None = None
    step: Count = 0
    sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Software, devices and inputs of a run besides its configuration: `environment.json`. None: unknown."""

    attempt: Count | None = None
    python: str | None = None
    versions: Mapping[str, str | None] | None = None
    scripts: Mapping[str, str] | None = None  # of a command, by path: the content's hash
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
    attempt: Count  # attempt that wrote it
    files: Mapping[PathText, dict[str, Any]]  # by name, each a runs.files.fingerprint


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """Return the folders of checkpoints by step, ascending; empty without a folder. Raises OSError."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return {}
    steps = sorted(int(name[5:]) for name in names if re.fullmatch(r"step-\d{6,18}", name))
    paths = {step: folder / f"step-{step:06d}" for step in steps}
    return {step: path for step, path in paths.items() if os.path.lexists(path)}


def read_saved_state(path: Path) -> SavedState:
    """Return the saved state in a checkpoint's folder. Raises StoreError; its text omits the folder."""
    if not files.exists(path / SAVED_STATE):
        raise StoreError(f"{SAVED_STATE}: no such file")
    try:
        state = files.read_as(SavedState, path / SAVED_STATE)
    except StoreError as error:
        raise StoreError(str(error).replace(str(path / SAVED_STATE), SAVED_STATE)) from None
    expected = {f"rank-{rank}.safetensors" for rank in range(len(state.files))}
    if state.files.keys() != expected or len(expected) != state.num_ranks:
        raise StoreError(f"{SAVED_STATE}: lists {len(expected)} files for {state.num_ranks} ranks")
    return state
