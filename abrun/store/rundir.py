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

from abrun import layout
from abrun.errors import StoreError
from abrun.layout import RunName
from abrun.redaction import told
from abrun.regular_files import open_regular, read_regular
from abrun.store.access import ignore_damage, refuse_closed
from abrun.store.files import (
    damage,
    explained,
    make_folder,
    open_in_place,
    open_to_change,
    read_json,
    read_json_or_empty,
    sync_folder,
    write_json,
)
from abrun.store.lines import (
    LineReader,
    LineWriter,
    bad_lines,
    blank_lines,
    is_row,
    problem_of,
    read_lines,
    sound_lines,
)
from abrun.store.owner import process, this_machine, this_process
from abrun.store.records import (
    LARGEST_ATTEMPT,
    SCHEMA_VERSION,
    Attempt,
    Heartbeat,
    Launch,
    Launches,
    Node,
    Result,
    RunRecord,
    RunState,
    Status,
    TextValues,
    attempt_file,
    attempt_numbers,
    code_name,
    ending_of,
    last_attempt,
    read_as,
    read_attempt,
    record_in,
    refuse_other_schema,
    silence,
    started_after,
)
from abrun.store.samples import Sample, read_samples
from abrun.store.writer import RunWriter

if TYPE_CHECKING:
    from abrun.series import Array, Series
    from abrun.store.metrics import ValidationRow

STALLED_AFTER_S = 600.0
MOST_SKETCH = 1 << 28  # bytes
MOST_RECORD = 1 << 21  # bytes of what a run was started with: all of it is shown


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
    def num_metric_bytes(self) -> int:
        try:
            return (self.path / layout.METRICS).stat().st_size
        except OSError:
            return 0

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
        weights = read_json_or_empty(self.path / layout.CONFIG).get("initial_weights")
        return self.path / weights if weights and isinstance(weights, str) else None

    def is_own(self, path: Path) -> bool:
        """Whether a path leads to this folder, or to one of abrun's files in it, by whatever links."""
        real, here = os.path.realpath(path), os.path.realpath(self.path)
        own = {os.path.join(here, name) for name in layout.RUN_FILES}
        return real == here or any(real == each or real.startswith(f"{each}/") for each in own)

    # --- what the launcher writes ---

    def write_record(self, record: RunRecord) -> None:
        """Tell the job what to do."""
        identity = {"experiment": record.experiment, **asdict(record.name)}
        content = {"initial_weights": record.initial_weights, "config": record.config}
        write_json(self.path / layout.CONFIG, {"schema_version": SCHEMA_VERSION, **identity, **content})

    def begin_launch(self, devices: Sequence[str], git: Mapping[str, Any] | None) -> None:
        """Note, before there is a process, that one is about to be started."""
        launch = Launch(
            started_s=time.time(),
            devices=tuple(devices),
            attempts=self.last_attempt,
            git=dict(git) if git else None,
            **this_machine(),
        )
        before: list[Launch] = []
        with contextlib.suppress(StoreError):  # what launchers said is no reason not to start again
            before = self.launches()
        launches = [asdict(each) for each in (*before, launch)]
        write_json(self.path / layout.LAUNCH, {"git": git, "launches": launches})

    @contextlib.contextmanager
    def open_log(self) -> Iterator[int]:
        """What the job is to print into, as a file descriptor. Raises StoreError."""
        with explained(self.log):
            file = open_to_change(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            yield file
        finally:
            os.close(file)

    def update_launch(self, **values: Any) -> None:
        """Replace fields of the last launch."""
        content = read_json(self.path / layout.LAUNCH)
        if "pid" in values:
            values |= process(values["pid"])
        content["launches"][-1].update(values)
        write_json(self.path / layout.LAUNCH, content)

    def end_launch(self, status: Status, message: str | None, **seen: Any) -> None:
        """How the job ended as the launcher saw it: `seen` are exit_code and signal."""
        # Of the job's own attempt alone: a newer one, which has fenced it, may be at work.
        attempts = min(self.last_attempt, self.launches()[-1].attempts + 1)
        message = message and told(message)
        ending = {"status": status, "message": message, "ended_s": time.time(), "attempts": attempts}
        self.update_launch(**ending, **seen)

    def reopen(self, reason: str) -> None:
        """Take back that the run is finished, for something of it is gone; no job may be at work here."""
        events = LineWriter(self.path / layout.EVENTS)
        try:
            row = {"time_s": time.time(), "attempt": self.last_attempt, "event": "repair", "message": reason}
            events.write(row)
            events.sync()
        finally:
            events.close()
        with explained(self.path / layout.RESULT):
            (self.path / layout.RESULT).unlink(missing_ok=True)
            sync_folder(self.path)

    def note_wandb(self, place: Mapping[str, str]) -> None:
        """Keep where wandb mirrors the run: id, project, entity, url, as far as they are known."""
        write_json(self.path / layout.WANDB, place)

    # --- what the job writes ---

    def begin_attempt(self) -> RunWriter:
        """Own the directory from now on; processes of older attempts find that they no longer do.

        Its number is above that of every attempt that wrote anything here, should its own file be gone.
        """
        folder = self.path / layout.ATTEMPTS
        number = max([self.last_attempt, *self._attempts_that_wrote()])
        with explained(folder):
            make_folder(folder)
            while True:
                number += 1
                if number > LARGEST_ATTEMPT:
                    raise OSError(f"there is an attempt {LARGEST_ATTEMPT}: remove its file")
                with contextlib.suppress(FileExistsError):  # of two that begin at once the other one's
                    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                    os.close(open_in_place(attempt_file(folder, number), flags))
                    break
        attempt = Attempt(number=number, started_s=time.time(), **this_process())
        write_json(attempt_file(folder, number), asdict(attempt))
        writer = RunWriter(self.path, attempt)
        bad = bad_lines(self.path / layout.METRICS, is_row)
        if bad:
            blank_lines(self.path / layout.METRICS, bad.values())
            words = f"{len(bad)} that are no rows are blank now, the first is line {min(bad)}"
            writer.event("repair", message=f"lines of {layout.METRICS}: {words}")
        return writer

    def _attempts_that_wrote(self) -> Iterator[int]:
        for name in (layout.METRICS, layout.EVENTS, layout.VALIDATION, layout.SAMPLES):
            for row in sound_lines(self.path / name):
                attempt = row.get("attempt")
                if type(attempt) is int and attempt < LARGEST_ATTEMPT:
                    yield attempt

    def abandoned_attempt(self, known: int, *, interrupted: bool = False) -> RunWriter | None:
        """The pen of an attempt later than the one `known` that has died without a word.

        `interrupted`: or with that word alone.
        """
        attempt = self.attempt()
        unfinished = ("running", "interrupted") if interrupted else ("running",)
        is_it = attempt.number > known and attempt.status in unfinished
        return RunWriter(self.path, attempt) if is_it else None

    def write_node(self, node: Node) -> None:
        """What a node's agent says of its ranks; of a run that is there, and that no later attempt owns."""
        if self.exists and self.last_attempt == node.attempt:
            write_json(self.path / layout.NODES / f"{node.node:04d}.json", asdict(node), durable=False)

    # --- what anybody reads ---

    def record(self) -> RunRecord:
        """Raises StoreError where the directory holds no run, or a record of another form."""
        path = self.path / layout.CONFIG
        record = record_in(read_json(path, MOST_RECORD), path)
        if record is None:
            raise StoreError(f"{path}: does not say arm, seed, rerun and config; launch the run again")
        return record

    def find_record(self) -> RunRecord | None:
        """None where the directory holds no run of abrun; StoreError where what it says is none."""
        path = self.path / layout.CONFIG
        content = None
        with ignore_damage():
            content = read_json(path)
        return None if content is None else record_in(content, path)

    def identity(self) -> str:
        """Which run this is, so that nothing of another is taken for its own: name and hash of its config.

        Limits are not counted in: they change how long it may take, not what it computes.
        """
        content = read_json_or_empty(self.path / layout.CONFIG)
        config = content.get("config")
        does = {key: config[key] for key in config if key != "limits"} if isinstance(config, dict) else None
        digest = hashlib.sha256(json.dumps(does, sort_keys=True).encode()).hexdigest()
        name = RunName(
            arm=str(content.get("arm")), seed=content.get("seed", 0), rerun=content.get("rerun", 0)
        )
        return f"{name} {digest[:16]}"

    def attempts(self) -> list[Attempt]:
        """Every start of the job, oldest first."""
        folder = self.path / layout.ATTEMPTS
        return [read_attempt(attempt_file(folder, number), number) for number in attempt_numbers(folder)]

    def attempt(self) -> Attempt:
        """The newest start of the job; one with the number 0, which is pending, before the first."""
        number = self.last_attempt
        folder = self.path / layout.ATTEMPTS
        return read_attempt(attempt_file(folder, number), number) if number else Attempt(status="pending")

    @property
    def last_attempt(self) -> int:
        """The number of the newest start of the job, 0 before the first."""
        return last_attempt(self.path / layout.ATTEMPTS)

    def launches(self) -> list[Launch]:
        return list(read_as(Launches, self.path / layout.LAUNCH).launches)

    def git(self) -> dict[str, Any] | None:
        """Commit and uncommitted changes of the folder that the run was launched from."""
        return read_as(Launches, self.path / layout.LAUNCH).git

    def code(self) -> tuple[str, ...]:
        """Return the code of each attempt in order, without repetitions; empty where launches do not say.

        An attempt is of the last launch that started before it.
        """
        told = read_as(Launches, self.path / layout.LAUNCH)
        known = []
        for attempt in self.attempts():
            begun_s = time.time() if attempt.started_s is None else attempt.started_s
            before = [launch.git for launch in told.launches if launch.started_s <= begun_s]
            known += [git for git in before[-1:] if git]
        known = known or ([told.git] if told.git else [])
        return tuple(dict.fromkeys(map(code_name, known)))

    def heartbeat(self) -> Heartbeat:
        """The last sign of life; none where the file does not read, as after a loss of power."""
        with ignore_damage():
            return read_as(Heartbeat, self.path / layout.HEARTBEAT)
        return Heartbeat()

    def nodes(self, attempt: int) -> list[Node]:
        """What the agents of an attempt's nodes said last."""
        found = []
        refuse_closed(self.path / layout.NODES)
        for path in sorted((self.path / layout.NODES).glob("*.json")):
            with ignore_damage():  # as after a loss of power
                found.append(read_as(Node, path))
        return [node for node in found if node.attempt == attempt]

    def environment(self) -> dict[str, Any] | None:
        """Versions, devices, prompts, initial weights of the last attempt; None before they are recorded."""
        path = self.path / layout.ENVIRONMENT
        return read_json(path, MOST_RECORD) if path.is_file() else None

    def events(self) -> list[dict[str, Any]]:
        return read_lines(self.path / layout.EVENTS)

    def wandb(self) -> dict[str, str]:
        """What `note_wandb` has kept; nothing where the file does not read."""
        content = read_json_or_empty(self.path / layout.WANDB)
        return {key: text for key, text in content.items() if isinstance(text, str)}

    def rows(self) -> LineReader:
        """The rows of metrics as they were written, to be followed."""
        return LineReader(self.path / layout.METRICS)

    def metrics(self) -> "dict[str, Series]":
        """Every metric by step; see abrun.store.metrics."""
        from abrun.store.metrics import read_metrics  # numpy, which status does without

        paths = self.path / layout.METRICS, self.path / layout.METRICS_CACHE
        return read_metrics(*paths, finished=self.finished)

    def validations(self) -> "dict[int, ValidationRow]":
        """The validations by step, ascending; of several attempts the last one counts."""
        from abrun.store.metrics import read_validation

        return read_validation(self.path / layout.VALIDATION)

    def samples(self) -> dict[int, tuple[Sample, ...]]:
        """Completions that were kept, by step, ascending; of several attempts the last one counts."""
        return read_samples(self.path / layout.SAMPLES)

    def printed(self, start: int = 0, most: int = 1 << 20) -> str:
        """The end of what the job has printed since its log had `start` bytes."""
        try:
            with open_regular(self.log) as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(start, end - most))
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
        refuse_closed(self.path)
        heartbeat, (told, process, attempt) = self.heartbeat(), self._heard()
        while gone := told.status == "running" and process.is_gone:
            before, (told, process, attempt) = told, self._heard()
            if told == before:  # else it has ended with a word since its word was read
                break
        status, message, started_s = told.status, told.message, process.started_s
        if gone:
            status, message = "failed", "its process is gone and left no word, as on a full disk"
        record = read_json_or_empty(self.path / layout.CONFIG)
        refuse_other_schema(record, self.path / layout.CONFIG)
        config = record.get("config")
        num_steps = config.get("steps") if isinstance(config, dict) else None
        if self.finished:
            status = "finished"
        elif status == "finished":
            status = "pending"  # its result was removed: it is to run again
        elif status == "running":
            message = self._why_stalled(attempt, max(started_s or 0.0, heartbeat.time_s), heartbeat)
            status = "stalled" if message else "running"
        return RunState(
            name=name,
            directory=self.path,
            status=status,
            step=heartbeat.step,
            started_s=started_s,
            num_steps=num_steps if type(num_steps) is int else 0,
            message=message if status in ("failed", "interrupted", "stalled") else None,
            ending=ending_of(told),
        )

    def _heard(self) -> tuple[Launch | Attempt, Launch | Attempt, int]:
        """Which of launcher and job is believed, whose process tells if it lives, and the newest attempt."""
        last, attempt = (self.launches() or [None])[-1], self.attempt()
        told = last if last and last.attempts >= attempt.number else attempt
        launched = last and attempt.number <= last.attempts + (last.ended_s is None)
        # Of a launch under way the first process tells, which outlives the others
        return told, last if last and launched else attempt, attempt.number

    def _why_stalled(self, attempt: int, since_s: float, heartbeat: Heartbeat) -> str | None:
        """Why a run that is at work seems to hang, by its nodes' agents, else by its last sign of life."""
        now, nodes = time.time(), self.nodes(attempt)
        if nodes:
            return silence(nodes, now)
        if now - since_s <= (heartbeat.patience_s or STALLED_AFTER_S):
            return None
        step = f"no step after step {heartbeat.step}" if heartbeat.step else "no sign of life"
        return f"{step} for {now - since_s:.0f} s"

    def step_attempts(self) -> dict[int, int]:
        """By step, the newest attempt that recorded it; of a file that is damaged, what can be read."""
        newest: dict[int, int] = {}
        for row in sound_lines(self.path / layout.METRICS):
            if problem_of(row) is None:
                step, attempt = row["step"], row.get("attempt", 1)
                newest[step] = max(attempt, newest.get(step, 0))
        return newest

    @property
    def final_weights_hash(self) -> str | None:
        """Of what was trained; None of a run that has not finished, or did not say."""
        found = read_json_or_empty(self.path / layout.RESULT).get("final_weights_hash")
        return found if isinstance(found, str) else None

    @property
    def text_values(self) -> Mapping[str, TextValues]:
        """By metric, the values that a command's log holds as text; empty until the run has finished."""
        return read_as(Result, self.path / layout.RESULT).text_values

    def final_sketch(self) -> "dict[str, Array]":
        """Sketches of the final weights, float64, by tensor; none where there are none that read."""
        return self._sketch(layout.FINAL_SKETCH)

    def initial_sketch(self) -> "dict[str, Array]":
        """Sketches of the initial weights."""
        return self._sketch(layout.INITIAL_SKETCH)

    def _sketch(self, file: str) -> "dict[str, Array]":
        from safetensors import SafetensorError, numpy  # and numpy itself, which status does without

        try:
            sketch = numpy.load(read_regular(self.path / file, MOST_SKETCH))
        except (OSError, ValueError, KeyError, SafetensorError):
            return {}
        return {name: values for name, values in sketch.items() if values.dtype == "float64"}

    @property
    def first_step(self) -> int:
        """The step that the run began after: 0, or that of the checkpoint it started from."""
        return started_after(self.environment())

    def missing_steps(self, num_steps: int) -> str | None:
        """Which of the steps that a finished run of our own has to have are not recorded, or do not read."""
        recorded, planned = self.step_attempts(), range(self.first_step + 1, num_steps + 1)
        missing = [step for step in planned if step not in recorded]
        if not missing:
            bad = bad_lines(self.path / layout.METRICS, is_row)
            return f"{layout.METRICS}, line {min(bad)}: is no row" if bad else None
        return f"{layout.METRICS} lacks {len(missing)} of {len(planned)} steps, from step {missing[0]} on"

    def final_weights_damage(self) -> str | None:
        """What is wrong with the trained model of a finished run that was to keep it; None: nothing."""
        if not self.final_weights.is_dir():
            return f"{self.final_weights} is missing"
        files = read_json_or_empty(self.path / layout.RESULT).get("final_weights")
        for name, recorded in files.items() if isinstance(files, dict) else ():
            wrong = damage(self.final_weights / name, recorded)
            if wrong:
                return f"{self.final_weights / name} {wrong}"
        return None
