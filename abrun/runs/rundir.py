"""A run directory as readers see it: its paths, records, rows and log.

Its files have one writer each: the launcher's are in launches.py, the job's in writer.py.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from abrun.errors import StoreError
from abrun.runs import files, layout, lines, records
from abrun.runs.schemas import checked

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

    def node_log(self, node: int) -> Path:
        """Return the file of a command's output on a node; on the first it is `log`."""
        return self.path / layout.node_log_name(node) if node else self.log

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
        weights = records.read_run_record(self.path / layout.CONFIG).initial_weights
        return self.path / weights if weights else None

    def is_run_file(self, path: Path) -> bool:
        """Return True if a path resolves to this folder or to one of abrun's files in it."""
        real_path, real_folder = os.path.realpath(path), os.path.realpath(self.path)
        run_files = {os.path.join(real_folder, name) for name in layout.RUN_FILES}
        return real_path == real_folder or any(
            real_path == file or real_path.startswith(f"{file}/") for file in run_files
        )

    def record(self) -> records.RunRecord:
        """Return the run's config.json. Raises StoreError if it is missing or malformed."""
        path = self.path / layout.CONFIG
        if not files.is_file(path):
            files.read_json(path)
        record = records.read_run_record(path, MAX_RECORD_BYTES)
        if not (record.arm and record.seed >= 0 and record.rerun >= 0 and record.config):
            raise StoreError(f"{path}: lacks arm, seed, rerun or config; launch the run again")
        return record

    @property
    def is_run(self) -> bool:
        """True for a run of abrun, also if its config.json is missing, damaged or not readable."""
        try:
            content = files.read_json(self.path / layout.CONFIG, MAX_RECORD_BYTES)
            return content.keys() >= {"arm", "seed", "rerun", "config"}
        except StoreError:
            return self.last_attempt > 0

    def identity(self) -> str:
        """Return the run's name and a hash of its config, which identify its files."""
        return self.identities()[0]

    def identities(self) -> tuple[str, str]:
        """Return the identity, and that of versions before runs could share a GPU."""
        return records.read_run_record(self.path / layout.CONFIG).identities()

    def attempts(self) -> list[records.Attempt]:
        """Return every attempt, oldest first."""
        return [self._attempt(number) for number in records.attempt_numbers(self.path / layout.ATTEMPTS)]

    def attempt(self) -> records.Attempt:
        """Return the newest attempt; before the first, a pending one with number 0."""
        number = self.last_attempt
        return self._attempt(number) if number else records.Attempt(status="pending")

    def _attempt(self, number: int) -> records.Attempt:
        path = records.attempt_file(self.path / layout.ATTEMPTS, number)
        return records.read_attempt(path, number, is_over=self.finished or number < self.last_attempt)

    @property
    def last_attempt(self) -> int:
        """The number of the newest attempt, 0 before the first."""
        return records.last_attempt(self.path / layout.ATTEMPTS)

    def launches(self) -> list[records.Launch]:
        return list(files.read_as(records.Launches, self.path / layout.LAUNCH).launches)

    def git(self) -> dict[str, Any] | None:
        """Return commit and uncommitted changes of the folder that the run was launched from."""
        return (git := files.read_as(records.Launches, self.path / layout.LAUNCH).git) and asdict(git)

    def code_versions(self) -> tuple[str, ...]:
        """Return the code version of each attempt in order, without repetitions; empty if unknown.

        An attempt belongs to the last launch that started before it.
        """
        recorded = files.read_as(records.Launches, self.path / layout.LAUNCH)
        commits = []
        for attempt in self.attempts():
            started_s = time.time() if attempt.started_s is None else attempt.started_s
            earlier_commits = [launch.git for launch in recorded.launches if launch.started_s <= started_s]
            commits += [git for git in earlier_commits[-1:] if git]
        commits = commits or ([recorded.git] if recorded.git else [])
        return tuple(dict.fromkeys(records.describe_commit(asdict(git)) for git in commits))

    def heartbeat(self) -> records.Heartbeat:
        """Return the last heartbeat; a default one if the file is missing or damaged by a power loss."""
        with files.ignore_damage():
            return files.read_as(records.Heartbeat, self.path / layout.HEARTBEAT)
        return records.Heartbeat()

    def nodes(self, attempt: int) -> list[records.NodeStatus]:
        """Return the last status of each node of an attempt."""
        files.require_access(self.path / layout.NODES)
        nodes = list[records.NodeStatus]()
        for path in sorted((self.path / layout.NODES).glob("[0-9]*.json")):
            with files.ignore_damage():  # for example after a power loss
                nodes.append(files.read_as(records.NodeStatus, path))
        return [node for node in nodes if node.attempt == attempt]

    def environment(self) -> dict[str, Any] | None:
        """Return environment.json of the last attempt; None before it is written. Raises StoreError."""
        path = self.path / layout.ENVIRONMENT
        if not files.is_file(path):
            return None
        content = files.read_json(path, MAX_RECORD_BYTES)
        checked(records.Environment, content, path)
        return content

    def events(self) -> list[dict[str, Any]]:
        return lines.read_json_lines(self.path / layout.EVENTS)

    def wandb_location(self) -> dict[str, str]:
        """Return the recorded wandb mirror of the run; empty if the file is missing or damaged."""
        try:
            return dict(files.read_as(Mapping[str, str], self.path / layout.WANDB))
        except StoreError:
            return {}

    def metrics_reader(self) -> lines.LineReader:
        """Return a reader that follows the rows of metrics.jsonl as written."""
        return lines.LineReader(self.path / layout.METRICS)

    def metrics(self) -> "dict[str, Series]":
        """Return every metric by step; see abrun.runs.metrics."""
        from abrun.runs.metrics import read_metrics  # imports numpy, which `status` does not need

        return read_metrics(self.path / layout.METRICS, finished=self.finished)

    def validations(self) -> "dict[int, ValidationRow]":
        """Return the validations by step, ascending; the last attempt wins."""
        from abrun.runs.metrics import read_validation

        return read_validation(self.path / layout.VALIDATION, finished=self.finished)

    def samples(self) -> dict[int, tuple[lines.Sample, ...]]:
        """Return the sampled completions by step, ascending; the last attempt wins."""
        return lines.read_samples(self.path / layout.SAMPLES)

    def read_log(self, start: int = 0, max_bytes: int = 1 << 20, *, node: int = 0) -> str:
        """Return at most `max_bytes` from the end of the job's log, skipping the first `start` bytes."""
        try:
            with files.open_regular(self.node_log(node), os.O_NOFOLLOW) as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(start, end - max_bytes))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def log_size(self, node: int = 0) -> int:
        try:
            return self.node_log(node).stat().st_size
        except OSError:
            return 0

    def step_attempts(self) -> dict[int, int]:
        """Return the newest attempt that recorded each step, from all undamaged rows."""
        newest: dict[int, int] = {}
        for row in lines.read_valid_rows(self.path / layout.METRICS):
            if lines.row_problem(row) is None:
                step, attempt = row["step"], row.get("attempt", 1)
                newest[step] = max(attempt, newest.get(step, 0))
        return newest

    @property
    def result(self) -> records.RunResult:
        """Return the result that the run recorded at its end; empty until then."""
        return files.read_as(records.RunResult, self.path / layout.RESULT)

    def final_sketch(self) -> "dict[str, Array]":
        """Return the float64 sketches of the final weights by tensor; empty if missing or unreadable."""
        from abrun.runs.metrics import read_sketch

        return read_sketch(self.path / layout.FINAL_SKETCH)

    def initial_sketch(self) -> "dict[str, Array]":
        """Return the sketches of the initial weights; see `final_sketch`."""
        from abrun.runs.metrics import read_sketch

        return read_sketch(self.path / layout.INITIAL_SKETCH)

    @property
    def start_step(self) -> int:
        """The step that the run starts after: 0, or that of the checkpoint that it starts from."""
        return records.start_step(self.environment())

    def describe_missing_steps(self, num_steps: int) -> str | None:
        """Return a sentence on missing or damaged steps of a finished run of abrun's trainer, or None."""
        recorded, planned = self.step_attempts(), range(self.start_step + 1, num_steps + 1)
        missing = [step for step in planned if step not in recorded]
        if missing:
            return f"{layout.METRICS} lacks {len(missing)} of {len(planned)} steps, the first is {missing[0]}"
        bad_lines = lines.find_bad_lines(self.path / layout.METRICS)
        return f"{layout.METRICS}, line {bad_lines[0].number} is not a row of metrics" if bad_lines else None

    def describe_missing_last_step(self) -> str | None:
        """Return a sentence if the last step of a finished command's run is missing; None if it is there."""
        last_step = self.result.step
        is_recorded = last_step in self.step_attempts()
        return None if is_recorded else f"{layout.METRICS} lacks the last step, {last_step}"

    def describe_weights_damage(self) -> str | None:
        """Return what is wrong with the saved model of a finished run; None if nothing is."""
        if not files.is_directory(self.final_weights):
            return f"{self.final_weights} is missing"
        for name, recorded in (self.result.final_weights or {}).items():
            problem = files.find_damage(self.final_weights / name, recorded)
            if problem:
                return f"{self.final_weights / name} {problem}"
        return None
