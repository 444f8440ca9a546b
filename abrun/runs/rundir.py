"""A run directory and its owner: what is written into it, by whom, and how it is read back.

A job begins its own attempt, whoever started it: a launcher here, or a cluster that starts it again. From
then on processes of older attempts must not write, which every write of theirs finds out first.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from abrun.errors import StoreError
from abrun.reasons import Code, Reason
from abrun.regular_files import is_directory, is_file, open_regular
from abrun.runs import layout
from abrun.runs.access import ignore_damage, require_access
from abrun.runs.files import (
    create_file,
    find_damage,
    json_text,
    make_folder,
    open_without_links,
    read_as,
    read_json,
    remove_partial_files,
    sync_folder,
    wrap_write_errors,
    write_json,
)
from abrun.runs.layout import RunName
from abrun.runs.lines import (
    LineReader,
    LineWriter,
    find_bad_lines,
    overwrite_lines,
    read_json_lines,
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
    TextValues,
    attempt_file,
    attempt_numbers,
    describe_commit,
    last_attempt,
    latest_record,
    message_fields,
    read_attempt,
    read_stored_config,
    recorded_reason,
    stall_reason,
    start_step,
)
from abrun.runs.samples import Sample, read_samples
from abrun.runs.schemas import checked
from abrun.runs.writer import RunWriter

if TYPE_CHECKING:
    from abrun.runs.metrics import ValidationRow
    from abrun.stats.series import Array, Series

MAX_RECORD_BYTES = 1 << 21  # bytes of what a run was started with: all of it is shown


@dataclass(frozen=True, slots=True)
class RunDir:
    """The only code that knows what the files of a run directory are called and who writes them."""

    path: Path

    @property
    def exists(self) -> bool:
        """Whether a run is here: a folder without a config.json is none."""
        return os.path.isfile(self.path / layout.CONFIG)

    @property
    def finished(self) -> bool:
        return os.path.isfile(self.path / layout.RESULT)

    @property
    def has_metrics(self) -> bool:
        return os.path.isfile(self.path / layout.METRICS)

    @property
    def log(self) -> Path:
        """What the job prints."""
        return self.path / layout.LOG

    @property
    def checkpoints(self) -> Path:
        return self.path / layout.CHECKPOINTS

    @property
    def final_weights(self) -> Path:
        """The trained model, where the run keeps it."""
        return self.checkpoints / "final"

    @property
    def initial_weights(self) -> Path | None:
        """The folder of the weights that the run starts from, where those are not its model's."""
        weights = read_stored_config(self.path / layout.CONFIG).initial_weights
        return self.path / weights if weights else None

    def is_run_file(self, path: Path) -> bool:
        """Whether a path leads to this folder, or to one of abrun's files in it, by whatever links."""
        real_path, real_folder = os.path.realpath(path), os.path.realpath(self.path)
        run_files = {os.path.join(real_folder, name) for name in layout.RUN_FILES}
        return real_path == real_folder or any(
            real_path == file or real_path.startswith(f"{file}/") for file in run_files
        )

    # --- what the launcher writes ---

    def write_record(self, record: RunRecord) -> None:
        """Tell the job what to do."""
        identity = {"experiment": record.experiment, **asdict(record.name)}
        content = {"initial_weights": record.initial_weights, "config": record.config}
        write_json(self.path / layout.CONFIG, {"schema_version": SCHEMA_VERSION, **identity, **content})

    def begin_launch(self, devices: Sequence[str], git: Mapping[str, Any] | None) -> None:
        """Note, before there is a process, that one is about to be started."""
        launch = Launch(
            launcher=Owner(**this_process_fields()),
            started_s=time.time(),
            devices=tuple(devices),
            attempts=self.last_attempt,
            **this_machine_fields(),
        )
        launches = [*map(asdict, self._read_launches().launches), {**asdict(launch), "git": git}]
        write_json(self.path / layout.LAUNCH, {"git": git, "launches": launches})

    def _read_launches(self) -> Launches:
        """Return what launchers have written, and nothing where it is damaged: that ends no launch."""
        try:
            return read_as(Launches, self.path / layout.LAUNCH)
        except StoreError:
            return Launches()

    @contextlib.contextmanager
    def open_log(self) -> Iterator[int]:
        """What the job is to print into, as a file descriptor. Raises StoreError."""
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
        last_launch = (
            recorded.launches[-1]
            if recorded.launches
            else Launch(started_s=time.time(), **this_machine_fields())
        )
        launches = [*map(asdict, recorded.launches[:-1]), {**asdict(last_launch), **values}]
        write_json(self.path / layout.LAUNCH, {**asdict(recorded), "launches": launches})

    def end_launch(self, status: Status, reason: Reason | None, **exit_fields: Any) -> None:
        """How the job ended as the launcher saw it: `seen` are exit_code and signal."""
        # Of the job's own attempt alone: a newer one, which has fenced it, may be at work.
        attempts = self.last_attempt
        for launch in self._read_launches().launches[-1:]:
            attempts = min(attempts, launch.attempts + 1)
        ending = {"status": status, **message_fields(reason), "ended_s": time.time()}
        self.update_launch(**ending, attempts=attempts, **exit_fields)

    def reopen(self, reason: str) -> None:
        """Take back that the run is finished, for something of it is gone; no job may be at work here."""
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
        """Keep where wandb mirrors the run: id, project, entity, url, as far as they are known."""
        write_json(self.path / layout.WANDB, location)

    # --- what the job writes ---

    def begin_attempt(self) -> RunWriter:
        """Own the directory from now on; processes of older attempts find that they no longer do.

        Its number is above that of every attempt that wrote anything here, should its own file be gone.
        """
        folder = self.path / layout.ATTEMPTS
        number = max([self.last_attempt, *self._attempts_with_rows()])
        with wrap_write_errors(folder):
            make_folder(folder)
            while True:
                number += 1
                if number > MAX_ATTEMPT:
                    raise OSError(f"there is an attempt {MAX_ATTEMPT}: remove its file")
                attempt = Attempt(number=number, started_s=time.time(), **this_process_fields())
                with contextlib.suppress(FileExistsError):  # of two that begin at once the other one's
                    create_file(attempt_file(folder, number), json_text(asdict(attempt)))
                    break
        remove_partial_files(self.path)
        writer = RunWriter(self.path, attempt)
        bad_lines = find_bad_lines(self.path / layout.METRICS)
        if bad_lines:
            overwrite_lines(self.path / layout.METRICS, bad_lines)
            description = (
                f"{len(bad_lines)} that are no rows are blank now, the first is line {bad_lines[0].number}"
            )
            writer.event("repair", message=f"lines of {layout.METRICS}: {description}")
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
        """The pen of an attempt later than the one `known` that has died without a word.

        `interrupted`: or with that word alone.
        """
        attempt = self.attempt()
        unfinished = ("running", "interrupted") if interrupted else ("running",)
        is_abandoned = attempt.number > previous_attempt and attempt.status in unfinished
        return RunWriter(self.path, attempt) if is_abandoned else None

    def write_node(self, node: NodeStatus) -> None:
        """What a node's agent says of its ranks; of a run that is there, and that no later attempt owns."""
        if self.exists and self.last_attempt == node.attempt:
            write_json(self.path / layout.NODES / f"{node.node:04d}.json", asdict(node), durable=False)

    # --- what anybody reads ---

    def record(self) -> RunRecord:
        """Raises StoreError where the directory holds no run, or a record of another form."""
        path = self.path / layout.CONFIG
        if not is_file(path):
            read_json(path)
        record = read_stored_config(path, MAX_RECORD_BYTES).record()
        if record is None:
            raise StoreError(Code.RUN_RECORD_INCOMPLETE(path=path))
        return record

    def find_record(self) -> RunRecord | None:
        """None where the directory holds no run of abrun; StoreError where what it says is none."""
        path = self.path / layout.CONFIG
        is_run = False
        with ignore_damage():
            is_run = read_json(path).keys() >= {"arm", "seed", "rerun", "config"}
        return read_stored_config(path).record() if is_run else None

    def identity(self) -> str:
        """Which run this is, so that nothing of another is taken for its own: name and hash of its config.

        Limits are not counted in: they change how long it may take, not what it computes.
        """
        stored = read_stored_config(self.path / layout.CONFIG)
        relevant_config = {key: value for key, value in stored.config.items() if key != "limits"}
        digest = hashlib.sha256(json.dumps(relevant_config, sort_keys=True).encode()).hexdigest()
        return f"{stored.name} {digest[:16]}"

    def attempts(self) -> list[Attempt]:
        """Every start of the job, oldest first."""
        return [self._attempt(number) for number in attempt_numbers(self.path / layout.ATTEMPTS)]

    def attempt(self) -> Attempt:
        """The newest start of the job; one with the number 0, which is pending, before the first."""
        number = self.last_attempt
        return self._attempt(number) if number else Attempt(status="pending")

    def _attempt(self, number: int) -> Attempt:
        path = attempt_file(self.path / layout.ATTEMPTS, number)
        return read_attempt(path, number, is_over=self.finished or number < self.last_attempt)

    @property
    def last_attempt(self) -> int:
        """The number of the newest start of the job, 0 before the first."""
        return last_attempt(self.path / layout.ATTEMPTS)

    def launches(self) -> list[Launch]:
        return list(read_as(Launches, self.path / layout.LAUNCH).launches)

    def git(self) -> dict[str, Any] | None:
        """Commit and uncommitted changes of the folder that the run was launched from."""
        git = read_as(Launches, self.path / layout.LAUNCH).git
        return git and asdict(git)

    def code_versions(self) -> tuple[str, ...]:
        """Return the code of each attempt in order, without repetitions; empty where launches do not say.

        An attempt is of the last launch that started before it.
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
        """The last sign of life; none where the file does not read, as after a loss of power."""
        with ignore_damage():
            return read_as(Heartbeat, self.path / layout.HEARTBEAT)
        return Heartbeat()

    def nodes(self, attempt: int) -> list[NodeStatus]:
        """What the agents of an attempt's nodes said last."""
        nodes = []
        require_access(self.path / layout.NODES)
        for path in sorted((self.path / layout.NODES).glob("[0-9]*.json")):
            with ignore_damage():  # as after a loss of power
                nodes.append(read_as(NodeStatus, path))
        return [node for node in nodes if node.attempt == attempt]

    def environment(self) -> dict[str, Any] | None:
        """Versions, devices, prompts, initial weights of the last attempt; None before they are recorded."""
        path = self.path / layout.ENVIRONMENT
        if not is_file(path):
            return None
        content = read_json(path, MAX_RECORD_BYTES)
        checked(Environment, content, path)
        return content

    def events(self) -> list[dict[str, Any]]:
        return read_json_lines(self.path / layout.EVENTS)

    def wandb_location(self) -> dict[str, str]:
        """What `note_wandb` has kept; nothing where the file does not read."""
        try:
            return dict(read_as(Mapping[str, str], self.path / layout.WANDB))
        except StoreError:
            return {}

    def metrics_reader(self) -> LineReader:
        """The rows of metrics as they were written, to be followed."""
        return LineReader(self.path / layout.METRICS)

    def metrics(self) -> "dict[str, Series]":
        """Every metric by step; see abrun.runs.metrics."""
        from abrun.runs.metrics import read_metrics  # numpy, which status does without

        return read_metrics(self.path / layout.METRICS, finished=self.finished)

    def validations(self) -> "dict[int, ValidationRow]":
        """The validations by step, ascending; of several attempts the last one counts."""
        from abrun.runs.metrics import read_validation

        return read_validation(self.path / layout.VALIDATION, finished=self.finished)

    def samples(self) -> dict[int, tuple[Sample, ...]]:
        """Completions that were kept, by step, ascending; of several attempts the last one counts."""
        return read_samples(self.path / layout.SAMPLES)

    def read_log(self, start: int = 0, max_bytes: int = 1 << 20) -> str:
        """The end of what the job has printed since its log had `start` bytes."""
        try:
            with open_regular(self.log) as file:
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
        """What the run is doing. Done means `result.json`; running without a sign of life means stalled.

        Of job and launcher that one is believed which speaks of the newest attempt, the launcher first.
        """
        require_access(self.path)
        heartbeat, latest = self.heartbeat(), latest_record(self.launches(), self.attempt())
        while is_process_gone := latest.record.status == "running" and latest.process.is_gone:
            previous, latest = latest, latest_record(self.launches(), self.attempt())
            if latest == previous:  # else it has ended with a word since its word was read
                break
        record, attempt, started_s = latest.record, latest.attempt, latest.started_s
        status, reason = (
            latest.status_without_ending if is_process_gone else (record.status, recorded_reason(record))
        )
        num_steps = read_stored_config(self.path / layout.CONFIG).num_steps
        if self.finished:
            status = "finished"
        elif status == "finished":
            status = "pending"  # its result was removed: it is to run again
        elif status == "running":
            reason = stall_reason(self.nodes(attempt), heartbeat, started_s or 0.0, time.time())
            status = "stalled" if reason else "running"
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
        )

    def step_attempts(self) -> dict[int, int]:
        """By step, the newest attempt that recorded it; of a file that is damaged, what can be read."""
        newest: dict[int, int] = {}
        for row in read_valid_rows(self.path / layout.METRICS):
            if row_problem(row) is None:
                step, attempt = row["step"], row.get("attempt", 1)
                newest[step] = max(attempt, newest.get(step, 0))
        return newest

    @property
    def final_weights_hash(self) -> str | None:
        """Of what was trained; None of a run that has not finished, or did not say."""
        return read_as(RunResult, self.path / layout.RESULT).final_weights_hash

    @property
    def text_values(self) -> Mapping[str, TextValues]:
        """By metric, the values that a command's log holds as text; empty until the run has finished."""
        return read_as(RunResult, self.path / layout.RESULT).text_values

    def final_sketch(self) -> "dict[str, Array]":
        """Sketches of the final weights, float64, by tensor; none where there are none that read."""
        return self._sketch(layout.FINAL_SKETCH)

    def initial_sketch(self) -> "dict[str, Array]":
        """Sketches of the initial weights."""
        return self._sketch(layout.INITIAL_SKETCH)

    def _sketch(self, name: str) -> "dict[str, Array]":
        from abrun.runs.metrics import read_sketch

        return read_sketch(self.path / name)

    @property
    def start_step(self) -> int:
        """The step that the run began after: 0, or that of the checkpoint it started from."""
        return start_step(self.environment())

    def describe_missing_steps(self, num_steps: int) -> str | None:
        """Which of the steps that a finished run of our own has to have are not recorded, or do not read."""
        recorded, planned = self.step_attempts(), range(self.start_step + 1, num_steps + 1)
        missing = [step for step in planned if step not in recorded]
        if not missing:
            bad_lines = find_bad_lines(self.path / layout.METRICS)
            return f"{layout.METRICS}, line {bad_lines[0].number}: is no row" if bad_lines else None
        return f"{layout.METRICS} lacks {len(missing)} of {len(planned)} steps, from step {missing[0]} on"

    def describe_missing_last_step(self) -> str | None:
        """Why the metrics of a finished command cannot be whole: their last step, or all, is gone."""
        last_step = read_as(RunResult, self.path / layout.RESULT).step
        return (
            f"{layout.METRICS} lacks step {last_step}, the last"
            if last_step not in self.step_attempts()
            else None
        )

    def describe_weights_damage(self) -> str | None:
        """What is wrong with the trained model of a finished run that was to keep it; None: nothing."""
        if not is_directory(self.final_weights):
            return f"{self.final_weights} is missing"
        files = read_as(RunResult, self.path / layout.RESULT).final_weights
        for name, recorded in (files or {}).items():
            problem = find_damage(self.final_weights / name, recorded)
            if problem:
                return f"{self.final_weights / name} {problem}"
        return None
