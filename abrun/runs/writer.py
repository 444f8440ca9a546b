"""The pen of one attempt at a run: what a job writes into its run directory while it is the newest."""

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from abrun.errors import StoreError
from abrun.reasons import Code, Reason
from abrun.redaction import redacted
from abrun.runs import layout
from abrun.runs.files import write_file, write_json
from abrun.runs.lines import LineWriter, json_line
from abrun.runs.records import Attempt, Status, attempt_file, last_attempt, message_fields
from abrun.runs.samples import MAX_SAMPLES_BYTES, Sample, sample_row

ROWS_LOST = "was removed, replaced or cut short while the run wrote it"


class FencedError(StoreError):
    """A newer attempt owns the run directory: this process must not write any more."""


class RunWriter:
    """One attempt's pen. Every write first checks that no newer attempt owns the directory.

    Where one does, FencedError is raised instead. Which attempt this is, `attempt` counts from 1.
    """

    def __init__(self, path: Path, attempt: Attempt) -> None:
        self.path = path
        self.attempt = attempt.number
        self._record = attempt
        self._metrics = LineWriter(path / layout.METRICS)
        self._events = LineWriter(path / layout.EVENTS)
        self._validations: LineWriter | None = None
        self._samples: LineWriter | None = None

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Append one step. Raises StoreError where rows before it were lost."""
        self.check_fence()
        self._refuse_lost_rows()
        self._metrics.write(self._row(step, values))

    @property
    def has_lost_rows(self) -> bool:
        """True where metrics.jsonl was removed, replaced or cut short while this attempt wrote it."""
        return not self._metrics.is_in_place

    def rewrite_metrics(self, rows: Mapping[int, Mapping[str, float]]) -> None:
        """Replace metrics.jsonl, of which rows were lost, by all rows of the run, by step."""
        self.check_fence()
        lines = [json_line(self._row(step, rows[step])) for step in sorted(rows)]
        write_file(self._metrics.path, b"".join(lines))
        self._metrics.close()
        self._metrics = LineWriter(self._metrics.path)
        self.event("repair", message=f"{layout.METRICS} {ROWS_LOST}: its {len(rows)} rows are written again")

    def _row(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        return {"step": step, "attempt": self.attempt, "time_s": time.time(), **values}

    def _refuse_lost_rows(self) -> None:
        if self.has_lost_rows:
            raise StoreError(Code.RECORDS_LOST(path=self._metrics.path, problem=ROWS_LOST))

    def validation(
        self, step: int, *, prompts_sha256: str, rewards: Sequence[float], lengths: Sequence[int]
    ) -> None:
        """Append what a validation found, prompt by prompt."""
        self.check_fence()
        if self._validations is None:
            self._validations = LineWriter(self.path / layout.VALIDATION)
        content = {"prompts_sha256": prompts_sha256, "rewards": rewards, "lengths": lengths}
        self._validations.write({"step": step, "attempt": self.attempt, **content})

    def samples(self, step: int, samples: list[Sample]) -> None:
        """Append some of a step's completions, as long as the file is not too large."""
        self.check_fence()
        if self._samples is None:
            self._samples = LineWriter(self.path / layout.SAMPLES)
        if self._samples.path.stat().st_size < MAX_SAMPLES_BYTES:
            self._samples.write(sample_row(step, self.attempt, samples))

    def heartbeat(self, step: int, patience_s: float | None = None) -> None:
        """A sign of life; the run seems to hang where no other follows for `patience_s`."""
        self.check_fence()
        content = {"time_s": time.time(), "step": step, "pid": os.getpid(), "attempt": self.attempt}
        content |= {} if patience_s is None else {"patience_s": patience_s}
        write_json(self.path / layout.HEARTBEAT, content, durable=False)

    def event(self, event: str, **details: Any) -> None:
        """Append to events.jsonl, and to stdout.log for whoever reads along; without secrets."""
        self.check_fence()
        details = {key: redacted(text) if isinstance(text, str) else text for key, text in details.items()}
        self._events.write({"time_s": time.time(), "attempt": self.attempt, "event": event, **details})
        print(f"{event}: {', '.join(f'{key} {value}' for key, value in details.items())}", flush=True)

    def environment(self, content: Mapping[str, Any]) -> None:
        """What the run depends on besides its configuration."""
        self.check_fence()
        write_json(self.path / layout.ENVIRONMENT, {"attempt": self.attempt, **content})

    def sync(self) -> None:
        """Bring all lines to the disk: what is written after this may claim them."""
        for lines in (self._metrics, self._events, self._validations, self._samples):
            if lines:
                lines.sync()

    def initial_sketch(self, content: bytes) -> None:
        """Write the sketches of the initial weights, as `final_sketch`."""
        self.check_fence()
        write_file(self.path / layout.INITIAL_SKETCH, content)

    def final_sketch(self, content: bytes) -> None:
        """Write the sketches of the final weights, by tensor, as safetensors."""
        self.check_fence()
        write_file(self.path / layout.FINAL_SKETCH, content)

    def finish(self, step: int, content: Mapping[str, Any] | None = None, /, **details: Any) -> None:
        """Write result.json: from now on the run is finished.

        `content`: the `final_weights_hash` of what was trained, a `fingerprint` by file of `final_weights`;
        of a command's run the `text_values` of its log.
        """
        self._refuse_lost_rows()
        self.event("finished", step=step, **details)
        self.sync()
        result = {"step": step, "attempt": self.attempt, **(content or {})}
        write_json(self.path / layout.RESULT, result)
        self._end_attempt("finished", None, 0)

    def fail(self, reason: Reason, *, exit_code: int, **details: Any) -> None:
        """Say why the run failed; a fenced attempt and a full disk can only say it on stderr."""
        with contextlib.suppress(StoreError):
            self.event("failed", **details, message=message_fields(reason)["message"])
        with contextlib.suppress(StoreError):
            self._end_attempt("failed", reason, exit_code)

    def interrupt(self, *, exit_code: int, **details: Any) -> None:
        """Say that the run was stopped and can go on."""
        with contextlib.suppress(StoreError):
            self.event("interrupted", **details)
        with contextlib.suppress(StoreError):
            self._end_attempt("interrupted", Code.STOPPED_BY_SIGNAL(), exit_code)

    def check_fence(self) -> None:
        """Raises FencedError where a newer attempt has begun, or the record of this one is gone."""
        newest = last_attempt(self.path / layout.ATTEMPTS)
        if not newest:
            raise FencedError(Code.ATTEMPT_REMOVED(path=self.path, attempt=self.attempt))
        if newest != self.attempt:
            raise FencedError(Code.ATTEMPT_FENCED(path=self.path, newest=newest, attempt=self.attempt))

    def _end_attempt(self, status: Status, reason: Reason | None, exit_code: int) -> None:
        self.check_fence()
        end = {"status": status, **message_fields(reason), "ended_s": time.time(), "exit_code": exit_code}
        path = attempt_file(self.path / layout.ATTEMPTS, self.attempt)
        write_json(path, {**asdict(self._record), **end})
