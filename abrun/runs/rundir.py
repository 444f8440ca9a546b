"""A run directory: its files, who writes them and how they are read.

A job begins its own attempt, whether a launcher or a cluster's scheduler started it. From then on, processes
of older attempts must not write; every write checks that first.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from abrun.errors import StoreError
from abrun.messages.codes import Code, Reason
from abrun.runs import layout
from abrun.runs.files import (
    create_file,
    find_damage,
    ignore_damage,
    is_directory,
    is_file,
    json_text,
    make_folder,
    open_regular,
    open_without_links,
    read_as,
    read_json,
    remove_partial_files,
    require_access,
    sync_folder,
    wrap_write_errors,
    write_json,
)
from abrun.runs.layout import RunName
from abrun.runs.lines import (
    LineReader,
    LineWriter,
    Sample,
    find_bad_lines,
    overwrite_lines,
    read_json_lines,
    read_samples,
    read_valid_rows,
    row_problem,
)
from abrun.runs.owner import Owner, process_fields, this_machine_fields, this_process_fields
from abrun.runs.records import (
    MAX_ATTEMPT,
    SCHEMA_VERSION,
    Attempt,
    Environment,
    Heartbeat,
    Launch,
    Launches,
    NodeStatus,
    RunRecord,
    RunResult,
    RunState,
    Status,
    attempt_file,
    attempt_numbers,
    describe_commit,
    last_attempt,
    latest_record,
    message_fields,
    read_attempt,
    read_progress,
    read_stored_config,
    recorded_reason,
    stall_reason,
    start_step,
)
from abrun.runs.schemas import checked
from abrun.runs.writer import RunWriter

if TYPE_CHECKING:
    from abrun.runs.metrics import ValidationRow
    from abrun.stats.series import Array, Series

MAX_RECORD_BYTES = 1 << 21  # of config.json and environment.json, which are shown in full


@dataclass(frozen=True, slots=True)
class RunDir:
    """A run directory. No code outside abrun.runs knows the names or writers of its files."""

    path: Path

    @property
    def exists(self) -> bool:
        """True if the directory holds a run, that is, a config.json."""
        return os.path.isfile(self.path / layout.CONFIG)

    @property
    def finished(self) -> bool:
        return os.path.isfile(self.path / layout.RESULT)

    @property
    def has_metrics(self) -> bool:
        return os.path.isfile(self.path / layout.METRICS)

    @property
    def log(self) -> Path:
        """The file of the job's output."""
        return self.path / layout.LOG

    @property
    def checkpoints(self) -> Path:
        return self.path / layout.CHECKPOINTS

    @property
    def final_weights(self) -> Path:
        """The folder of the trained model, if the run keeps it."""
        return self.checkpoints / "final"

    @property
    def initial_weights(self) -> Path | None:
        """The folder of the initial weights; None if the run starts from its model's weights."""
        weights = read_stored_config(self.path / layout.CONFIG).initial_weights
        return self.path / weights if weights else None

    def is_run_file(self, path: Path) -> bool:
        """Return True if a path resolves to this folder or to one of abrun's files in it."""
        real_path, real_folder = os.path.realpath(path), os.path.realpath(self.path)
        run_files = {os.path.join(real_folder, name) for name in layout.RUN_FILES}
        return real_path == real_folder or any(
            real_path == file or real_path.startswith(f"{file}/") for file in run_files
        )

    # --- what the launcher writes ---

    def write_record(self, record: RunRecord) -> None:
        """Write config.json, which tells the job what to run."""
        identity = {"schema_version": SCHEMA_VERSION, "experiment": record.experiment, **asdict(record.name)}
        content = {"initial_weights": record.initial_weights, "config": record.config}
        write_json(self.path / layout.CONFIG, identity | content)

    def begin_launch(
        self, devices: Sequence[str], git: Mapping[str, Any] | None, runs_per_gpu: int = 1
    ) -> None:
        """Record a launch before its process is started."""
        launch = Launch(
            launcher=Owner(**this_process_fields()),
            started_s=time.time(),
            devices=tuple(devices),
            runs_per_gpu=runs_per_gpu,
            attempts=self.last_attempt,
            **this_machine_fields(),
        )
        launches = [*map(asdict, self._read_launches().launches), {**asdict(launch), "git": git}]
        write_json(self.path / layout.LAUNCH, {"git": git, "launches": launches})

    def _read_launches(self) -> Launches:
        """Return the recorded launches; empty if the file is damaged, which must not stop a launch."""
        try:
            return read_as(Launches, self.path / layout.LAUNCH)
        except StoreError:
            return Launches()

    @contextlib.contextmanager
    def open_log(self) -> Iterator[int]:
        """Open the log that the job prints into and yield its file descriptor. Raises StoreError."""
        with wrap_write_errors(self.log):
            file = open_without_links(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            yield file
        finally:
            os.close(file)

    def update_launch(self, **values: Any) -> None:
        """Replace fields of the last launch."""
        if "pid" in values:
            values |= process_fields(values["pid"])
        recorded = self._read_launches()
        unrecorded = Launch(started_s=time.time(), **this_machine_fields())
        last_launch = (recorded.launches or (unrecorded,))[-1]
        launches = [*map(asdict, recorded.launches[:-1]), {**asdict(last_launch), **values}]
        write_json(self.path / layout.LAUNCH, {**asdict(recorded), "launches": launches})

    def end_launch(self, status: Status, reason: Reason | None, **exit_fields: Any) -> None:
        """Record how the job ended, as its launcher observed it: `exit_fields` are exit_code and signal."""
        # Only the job's own attempt ended: a newer one that fenced it may be running.
        attempts = self.last_attempt
        for launch in self._read_launches().launches[-1:]:
            attempts = min(attempts, launch.attempts + 1)
        ending = {"status": status, **message_fields(reason), "ended_s": time.time()}
        self.update_launch(**ending, attempts=attempts, **exit_fields)

    def reopen(self, reason: str) -> None:
        """Mark a finished run as unfinished because files of it are gone. No job may be running here."""
        events = LineWriter(self.path / layout.EVENTS)
        try:
            row = {"time_s": time.time(), "attempt": self.last_attempt, "event": "repair", "message": reason}
            events.write(row)
            events.sync()
        finally:
            events.close()
        with wrap_write_errors(self.path / layout.RESULT):
            (self.path / layout.RESULT).unlink(missing_ok=True)
            sync_folder(self.path)

    def write_wandb_location(self, location: Mapping[str, str]) -> None:
        """Record the run's mirror in wandb: id, project, entity and url, as far as known."""
        write_json(self.path / layout.WANDB, location)

    # --- what the job writes ---

    def begin_attempt(self) -> RunWriter:
        """Begin a new attempt, which fences all older ones.

        Its number is above that of every attempt with a file or rows here, even if their files are gone.
        """
        folder = self.path / layout.ATTEMPTS
        number = max([self.last_attempt, *self._attempts_with_rows()])
        with wrap_write_errors(folder):
            make_folder(folder)
            while True:
                number += 1
                if number > MAX_ATTEMPT:
                    raise OSError(f"attempt {MAX_ATTEMPT} is the highest number possible: remove its file")
                attempt = Attempt(number=number, started_s=time.time(), **this_process_fields())
                with contextlib.suppress(FileExistsError):  # another attempt began at the same time
                    create_file(attempt_file(folder, number), json_text(asdict(attempt)))
                    break
        remove_partial_files(self.path)
        writer = RunWriter(self.path, attempt)
        bad_lines = find_bad_lines(self.path / layout.METRICS)
        if bad_lines:
            overwrite_lines(self.path / layout.METRICS, bad_lines)
            text = f"blanked {len(bad_lines)} that are not rows, the first is line {bad_lines[0].number}"
            writer.event("repair", message=f"lines of {layout.METRICS}: {text}")
        return writer

    def _attempts_with_rows(self) -> Iterator[int]:
        for name in (layout.METRICS, layout.EVENTS, layout.VALIDATION, layout.SAMPLES):
            for row in read_valid_rows(self.path / name):
                attempt = row.get("attempt")
                if type(attempt) is int and attempt < MAX_ATTEMPT:
                    yield attempt

    def resume_abandoned_attempt(
        self, previous_attempt: int, *, interrupted: bool = False
    ) -> RunWriter | None:
        """Return a writer for an attempt after `previous_attempt` that died without recording its end.

        `interrupted`: also for one that only recorded an interruption. None if there is no such attempt.
        """
        attempt = self.attempt()
        unfinished = ("running", "interrupted") if interrupted else ("running",)
        is_abandoned = attempt.number > previous_attempt and attempt.status in unfinished
        return RunWriter(self.path, attempt) if is_abandoned else None

    def write_node(self, node: NodeStatus) -> None:
        """Write a node agent's status, unless the run is gone or a later attempt owns it."""
        if self.exists and self.last_attempt == node.attempt:
            write_json(self.path / layout.NODES / f"{node.node:04d}.json", asdict(node), durable=False)

    # --- what anybody reads ---

    def record(self) -> RunRecord:
        """Return the run's config.json. Raises StoreError if it is missing or malformed."""
        path = self.path / layout.CONFIG
        if not is_file(path):
            read_json(path)
        record = read_stored_config(path, MAX_RECORD_BYTES).record()
        if record is None:
            raise StoreError(Code.RUN_RECORD_INCOMPLETE(path=path))
        return record

    @property
    def is_run(self) -> bool:
        """True for a run of abrun, also if its config.json is missing, damaged or not readable."""
        try:
            content = read_json(self.path / layout.CONFIG, MAX_RECORD_BYTES)
            return content.keys() >= {"arm", "seed", "rerun", "config"}
        except StoreError:
            return self.last_attempt > 0

    def identity(self) -> str:
        """Return the run's name and a hash of its config, which identify its files."""
        return self.identities()[0]

    def identities(self) -> tuple[str, str]:
        """Return the identity, and that of versions before runs could share a GPU."""
        return read_stored_config(self.path / layout.CONFIG).identities()

    def attempts(self) -> list[Attempt]:
        """Return every attempt, oldest first."""
        return [self._attempt(number) for number in attempt_numbers(self.path / layout.ATTEMPTS)]

    def attempt(self) -> Attempt:
        """Return the newest attempt; before the first, a pending one with number 0."""
        number = self.last_attempt
        return self._attempt(number) if number else Attempt(status="pending")

    def _attempt(self, number: int) -> Attempt:
        path = attempt_file(self.path / layout.ATTEMPTS, number)
        return read_attempt(path, number, is_over=self.finished or number < self.last_attempt)

    @property
    def last_attempt(self) -> int:
        """The number of the newest attempt, 0 before the first."""
        return last_attempt(self.path / layout.ATTEMPTS)

    def launches(self) -> list[Launch]:
        return list(read_as(Launches, self.path / layout.LAUNCH).launches)

    def git(self) -> dict[str, Any] | None:
        """Return commit and uncommitted changes of the folder that the run was launched from."""
        return (git := read_as(Launches, self.path / layout.LAUNCH).git) and asdict(git)

    def code_versions(self) -> tuple[str, ...]:
        """Return the code version of each attempt in order, without repetitions; empty if unknown.

        An attempt belongs to the last launch that started before it.
        """
        recorded = read_as(Launches, self.path / layout.LAUNCH)
        commits = []
        for attempt in self.attempts():
            started_s = time.time() if attempt.started_s is None else attempt.started_s
            earlier_commits = [launch.git for launch in recorded.launches if launch.started_s <= started_s]
            commits += [git for git in earlier_commits[-1:] if git]
        commits = commits or ([recorded.git] if recorded.git else [])
        return tuple(dict.fromkeys(describe_commit(asdict(git)) for git in commits))

    def heartbeat(self) -> Heartbeat:
        """Return the last heartbeat; a default one if the file is missing or damaged by a power loss."""
        with ignore_damage():
            return read_as(Heartbeat, self.path / layout.HEARTBEAT)
        return Heartbeat()

    def nodes(self, attempt: int) -> list[NodeStatus]:
        """Return the last status of each node of an attempt."""
        nodes = []
        require_access(self.path / layout.NODES)
        for path in sorted((self.path / layout.NODES).glob("[0-9]*.json")):
            with ignore_damage():  # for example after a power loss
                nodes.append(read_as(NodeStatus, path))
        return [node for node in nodes if node.attempt == attempt]

    def environment(self) -> dict[str, Any] | None:
        """Return environment.json of the last attempt; None before it is written. Raises StoreError."""
        path = self.path / layout.ENVIRONMENT
        if not is_file(path):
            return None
        content = read_json(path, MAX_RECORD_BYTES)
        checked(Environment, content, path)
        return content

    def events(self) -> list[dict[str, Any]]:
        return read_json_lines(self.path / layout.EVENTS)

    def wandb_location(self) -> dict[str, str]:
        """Return the recorded wandb mirror of the run; empty if the file is missing or damaged."""
        try:
            return dict(read_as(Mapping[str, str], self.path / layout.WANDB))
        except StoreError:
            return {}

    def metrics_reader(self) -> LineReader:
        """Return a reader that follows the rows of metrics.jsonl as written."""
        return LineReader(self.path / layout.METRICS)

    def metrics(self) -> "dict[str, Series]":
        """Return every metric by step; see abrun.runs.metrics."""
        from abrun.runs.metrics import read_metrics  # imports numpy, which `status` does not need

        return read_metrics(self.path / layout.METRICS, finished=self.finished)

    def validations(self) -> "dict[int, ValidationRow]":
        """Return the validations by step, ascending; the last attempt wins."""
        from abrun.runs.metrics import read_validation

        return read_validation(self.path / layout.VALIDATION, finished=self.finished)

    def samples(self) -> dict[int, tuple[Sample, ...]]:
        """Return the sampled completions by step, ascending; the last attempt wins."""
        return read_samples(self.path / layout.SAMPLES)

    def read_log(self, start: int = 0, max_bytes: int = 1 << 20) -> str:
        """Return at most `max_bytes` from the end of the job's log, skipping the first `start` bytes."""
        try:
            with open_regular(self.log, os.O_NOFOLLOW) as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(start, end - max_bytes))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def log_size(self) -> int:
        try:
            return self.log.stat().st_size
        except OSError:
            return 0

    def state(self, name: RunName) -> RunState:
        """Return the run's state: finished if `result.json` exists, stalled if running without heartbeats."""
        require_access(self.path)
        # The record of the newest attempt counts, the launcher's before the job's.
        heartbeat, latest = self.heartbeat(), latest_record(self.launches(), self.attempt())
        while is_process_gone := latest.record.status == "running" and latest.process.is_gone:
            previous, latest = latest, latest_record(self.launches(), self.attempt())
            if latest == previous:  # otherwise its end was recorded since the first read
                break
        record, attempt, started_s = latest.record, latest.attempt, latest.started_s
        status, reason = (
            latest.status_without_ending if is_process_gone else (record.status, recorded_reason(record))
        )
        progress, num_steps = None, read_stored_config(self.path / layout.CONFIG).num_steps
        if self.finished:
            status = "finished"
        elif status == "finished":
            status = "pending"  # its result was removed, so it has to run again
        elif status == "running":
            nodes = self.nodes(attempt)
            reason = stall_reason(nodes, heartbeat, started_s or 0.0, time.time())
            status = "stalled" if reason else "running"
            progress = read_progress(latest, nodes, heartbeat)
        return RunState(
            name=name,
            directory=self.path,
            status=status,
            step=heartbeat.step,
            started_s=started_s,
            num_steps=num_steps,
            reason=reason if status in ("failed", "interrupted", "stalled") else None,
            exit_code=record.exit_code,
            signal=record.signal if isinstance(record, Launch) else None,
            progress=progress,
            ended_s=record.ended_s,
        )

    def step_attempts(self) -> dict[int, int]:
        """Return the newest attempt that recorded each step, from all undamaged rows."""
        newest: dict[int, int] = {}
        for row in read_valid_rows(self.path / layout.METRICS):
            if row_problem(row) is None:
                step, attempt = row["step"], row.get("attempt", 1)
                newest[step] = max(attempt, newest.get(step, 0))
        return newest

    @property
    def result(self) -> RunResult:
        """Return the result that the run recorded at its end; empty until then."""
        return read_as(RunResult, self.path / layout.RESULT)

    def final_sketch(self) -> "dict[str, Array]":
        """Return the float64 sketches of the final weights by tensor; empty if missing or unreadable."""
        return self._sketch(layout.FINAL_SKETCH)

    def initial_sketch(self) -> "dict[str, Array]":
        """Return the sketches of the initial weights; see `final_sketch`."""
        return self._sketch(layout.INITIAL_SKETCH)

    def _sketch(self, name: str) -> "dict[str, Array]":
        from abrun.runs.metrics import read_sketch

        return read_sketch(self.path / name)

    @property
    def start_step(self) -> int:
        """The step that the run starts after: 0, or that of the checkpoint that it starts from."""
        return start_step(self.environment())

    def describe_missing_steps(self, num_steps: int) -> str | None:
        """Return a sentence on missing or damaged steps of a finished run of abrun's trainer, or None."""
        recorded, planned = self.step_attempts(), range(self.start_step + 1, num_steps + 1)
        missing = [step for step in planned if step not in recorded]
        if missing:
            return f"{layout.METRICS} lacks {len(missing)} of {len(planned)} steps, the first is {missing[0]}"
        bad_lines = find_bad_lines(self.path / layout.METRICS)
        return f"{layout.METRICS}, line {bad_lines[0].number} is not a row of metrics" if bad_lines else None

    def describe_missing_last_step(self) -> str | None:
        """Return a sentence if the last step of a finished command's run is missing; None if it is there."""
        last_step = read_as(RunResult, self.path / layout.RESULT).step
        is_recorded = last_step in self.step_attempts()
        return None if is_recorded else f"{layout.METRICS} lacks the last step, {last_step}"

    def describe_weights_damage(self) -> str | None:
        """Return what is wrong with the saved model of a finished run; None if nothing is."""
        if not is_directory(self.final_weights):
            return f"{self.final_weights} is missing"
        files = read_as(RunResult, self.path / layout.RESULT).final_weights
        for name, recorded in (files or {}).items():
            problem = find_damage(self.final_weights / name, recorded)
            if problem:
                return f"{self.final_weights / name} {problem}"
        return None
