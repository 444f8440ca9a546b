"""What a job writes into its run directory: its attempt, rows, events and result; a node's agent its status.

A job begins its own attempt, whether a launcher or a cluster's scheduler started it. From then on, processes
of older attempts must not write; every write checks that first.
"""

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from abrun.errors import StoreError
from abrun.messages.codes import Code, Reason
from abrun.runs import files, layout, lines, records
from abrun.runs.owner import this_process_fields
from abrun.runs.redaction import redacted
from abrun.runs.rundir import RunDir

if TYPE_CHECKING:  # numpy
    from abrun.runs.rollouts import RecordedStep

ROWS_LOST = "was removed, replaced or truncated while the run wrote it"


def begin_attempt(run: RunDir) -> "RunWriter":
    """Begin a new attempt, which fences all older ones.

    Its number is above that of every attempt with a file or rows here, even if their files are gone.
    """
    folder, number = run.path / layout.ATTEMPTS, run.last_attempt
    for name in (layout.METRICS, layout.EVENTS, layout.VALIDATION, layout.SAMPLES):
        for row in lines.read_valid_rows(run.path / name):
            attempt_of_row = row.get("attempt")
            if type(attempt_of_row) is int and number < attempt_of_row < records.MAX_ATTEMPT:
                number = attempt_of_row
    with files.wrap_write_errors(folder):
        files.make_folder(folder)
        while True:
            number += 1
            if number > records.MAX_ATTEMPT:
                raise OSError(
                    f"attempt {records.MAX_ATTEMPT} is the highest number possible: remove its file"
                )
            attempt = records.Attempt(number=number, started_s=time.time(), **this_process_fields())
            with contextlib.suppress(FileExistsError):  # another attempt began at the same time
                files.create_file(records.attempt_file(folder, number), files.json_text(asdict(attempt)))
                break
    files.remove_partial_files(run.path)
    writer, metrics = RunWriter(run.path, attempt), run.path / layout.METRICS
    bad_lines = lines.find_bad_lines(metrics)
    if bad_lines:
        lines.overwrite_lines(metrics, bad_lines)
        text = f"blanked {len(bad_lines)} that are not rows, the first is line {bad_lines[0].number}"
        writer.event("repair", message=f"lines of {layout.METRICS}: {text}")
    return writer


def resume_abandoned_attempt(
    run: RunDir, previous_attempt: int, *, interrupted: bool = False
) -> "RunWriter | None":
    """Return a writer for an attempt after `previous_attempt` that died without recording its end.

    `interrupted`: also for one that only recorded an interruption. None if there is no such attempt.
    """
    attempt = run.attempt()
    unfinished = ("running", "interrupted") if interrupted else ("running",)
    is_abandoned = attempt.number > previous_attempt and attempt.status in unfinished
    return RunWriter(run.path, attempt) if is_abandoned else None


def write_node(run: RunDir, node: records.NodeStatus) -> None:
    """Write a node agent's status, unless the run is gone or a later attempt owns it."""
    if run.exists and run.last_attempt == node.attempt:
        files.write_json(run.path / layout.NODES / f"{node.node:04d}.json", asdict(node), durable=False)


class FencedError(StoreError):
    """A newer attempt owns the run directory: this process must not write any more."""


class LostRowsError(StoreError):
    """metrics.jsonl was removed, replaced or truncated while an attempt wrote it."""


class RunWriter:
    """Writer for one attempt. Every write first checks that no newer attempt owns the directory.

    Raises FencedError if one does. `attempt` is the attempt's number, from 1.
    """

    def __init__(self, path: Path, attempt: records.Attempt) -> None:
        self.path = path
        self.attempt = attempt.number
        self._record = attempt
        self._metrics = lines.LineWriter(path / layout.METRICS)
        self._events = lines.LineWriter(path / layout.EVENTS)
        self._validations: lines.LineWriter | None = None
        self._samples: lines.LineWriter | None = None

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Append the metrics of one step. Raises LostRowsError if earlier rows were lost."""
        self.check_fence()
        self._refuse_lost_rows()
        self._metrics.write(self._row(step, values))

    @property
    def has_lost_rows(self) -> bool:
        """True if metrics.jsonl was removed, replaced or truncated while this attempt wrote it."""
        return not self._metrics.is_in_place

    def rewrite_metrics(self, rows: Mapping[int, Mapping[str, float]]) -> None:
        """Replace a metrics.jsonl that lost rows with all rows of the run, given by step."""
        self.check_fence()
        content = b"".join(lines.json_line(self._row(step, rows[step])) for step in sorted(rows))
        files.write_file(self._metrics.path, content)
        self._metrics.close()
        self._metrics = lines.LineWriter(self._metrics.path)
        self.event("repair", message=f"{layout.METRICS} {ROWS_LOST}; its {len(rows)} rows were written again")

    def _row(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        return {"step": step, "attempt": self.attempt, "time_s": time.time(), **values}

    def _refuse_lost_rows(self) -> None:
        if self.has_lost_rows:
            raise LostRowsError(
                f"{self._metrics.path}: {ROWS_LOST}; continue with --resume, which records the lost steps "
                "again"
            )

    def validation(
        self, step: int, *, prompts_sha256: str, rewards: Sequence[float], lengths: Sequence[int]
    ) -> None:
        """Append the rewards and lengths [P] of a validation, one per prompt."""
        self.check_fence()
        if self._validations is None:
            self._validations = lines.LineWriter(self.path / layout.VALIDATION)
        content = {"prompts_sha256": prompts_sha256, "rewards": rewards, "lengths": lengths}
        self._validations.write({"step": step, "attempt": self.attempt, **content})

    def samples(self, step: int, samples: list[lines.Sample]) -> None:
        """Append some of a step's completions, unless the file has reached its size limit."""
        self.check_fence()
        if self._samples is None:
            self._samples = lines.LineWriter(self.path / layout.SAMPLES)
        if self._samples.path.stat().st_size < lines.MAX_SAMPLES_BYTES:
            self._samples.write(lines.sample_row(step, self.attempt, samples))

    def rollouts(self, recording: "RecordedStep") -> None:
        """Write the rollouts of a step, replacing those of an earlier attempt."""
        from abrun.runs.rollouts import step_path  # numpy

        self.check_fence()
        files.write_file(step_path(self.path / layout.ROLLOUTS, recording.step), recording.encode())

    def hash_rollouts(self, num_steps: int) -> str:
        """Return the hash of the recorded rollouts; see abrun.runs.rollouts.hash_steps."""
        from abrun.runs.rollouts import hash_steps  # numpy

        return hash_steps(self.path / layout.ROLLOUTS, num_steps)

    def heartbeat(self, step: int, **fields: float | str) -> None:
        """Write a heartbeat. `fields`: further ones of Heartbeat, of a command's run."""
        self.check_fence()
        content = {"time_s": time.time(), "step": step, "pid": os.getpid(), "attempt": self.attempt, **fields}
        files.write_json(self.path / layout.HEARTBEAT, content, durable=False)

    def event(self, event: str, **details: Any) -> None:
        """Append an event to events.jsonl and print it into stdout.log, with secrets redacted."""
        self.check_fence()
        details = {key: redacted(text) if isinstance(text, str) else text for key, text in details.items()}
        self._events.write({"time_s": time.time(), "attempt": self.attempt, "event": event, **details})
        print(f"{event}: {', '.join(f'{key} {value}' for key, value in details.items())}", flush=True)

    def environment(self, content: Mapping[str, Any]) -> None:
        """Write environment.json: versions, devices and hashes that the run depends on."""
        self.check_fence()
        files.write_json(self.path / layout.ENVIRONMENT, {"attempt": self.attempt, **content})

    def sync(self) -> None:
        """Flush all lines to the disk, before anything that depends on them is written."""
        for writer in (self._metrics, self._events, self._validations, self._samples):
            if writer:
                writer.sync()

    def initial_sketch(self, content: bytes) -> None:
        """Write the sketches of the initial weights; see `final_sketch`."""
        self.check_fence()
        files.write_file(self.path / layout.INITIAL_SKETCH, content)

    def final_sketch(self, content: bytes) -> None:
        """Write the sketches of the final weights, by tensor, as safetensors."""
        self.check_fence()
        files.write_file(self.path / layout.FINAL_SKETCH, content)

    def finish(self, step: int, content: Mapping[str, Any] | None = None, /, **details: Any) -> None:
        """Write result.json, which marks the run as finished. Raises LostRowsError if rows were lost.

        `content`: the `final_weights_hash` and, for each file of `final_weights`, a `fingerprint`; for a
        command's run, the `text_values` of its log.
        """
        self._refuse_lost_rows()
        self.event("finished", step=step, **details)
        self.sync()
        result = {"step": step, "attempt": self.attempt, **(content or {})}
        files.write_json(self.path / layout.RESULT, result)
        self._end_attempt("finished", None, 0)

    def fail(self, reason: Reason, *, exit_code: int, **details: Any) -> None:
        """Record why the run failed, unless the attempt is fenced or the disk full."""
        with contextlib.suppress(StoreError):
            self.event("failed", **details, message=records.message_fields(reason)["message"])
        with contextlib.suppress(StoreError):
            self._end_attempt("failed", reason, exit_code)

    def interrupt(self, *, exit_code: int, **details: Any) -> None:
        """Record that the run was stopped and can be resumed."""
        with contextlib.suppress(StoreError):
            self.event("interrupted", **details)
        with contextlib.suppress(StoreError):
            self._end_attempt("interrupted", Code.STOPPED_BY_SIGNAL(), exit_code)

    def check_fence(self) -> None:
        """Raise FencedError if a newer attempt has begun, or if this one's record was removed."""
        newest = records.last_attempt(self.path / layout.ATTEMPTS)
        if not newest:
            raise FencedError(f"{self.path}: was removed, so attempt {self.attempt} stops")
        if newest != self.attempt:
            raise FencedError(
                f"{self.path}: attempt {newest} now owns this run, so attempt {self.attempt} stops"
            )

    def _end_attempt(self, status: records.Status, reason: Reason | None, exit_code: int) -> None:
        self.check_fence()
        end = {
            "status": status,
            **records.message_fields(reason),
            "ended_s": time.time(),
            "exit_code": exit_code,
        }
        path = records.attempt_file(self.path / layout.ATTEMPTS, self.attempt)
        files.write_json(path, {**asdict(self._record), **end})
