"""Sampled completions of a run, kept for inspection: rows of samples.jsonl."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from abrun.errors import StoreError
from abrun.messages.codes import Code
from abrun.runs.lines import read_json_lines
from abrun.runs.records import MAX_ATTEMPT

MAX_SAMPLES_BYTES = 32 * 2**20  # per run; later samples are dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One completion. Texts are decoded without special tokens.

    A field is None if another trainer wrote the completion and did not record the field.
    """

    prompt: str
    text: str
    reward: float | None
    logprob_error: float | None  # mean over tokens of |trainer log-prob - engine log-prob|, in nats
    num_tokens: int | None
    truncated: bool | None  # stopped by max_new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class _SampleRow:
    step: int
    attempt: int
    samples: tuple[Sample, ...]


_SAMPLE_ROW = TypeAdapter(_SampleRow)


def sample_row(step: int, attempt: int, samples: list[Sample]) -> dict[str, Any]:
    return {"step": step, "attempt": attempt, "samples": [asdict(sample) for sample in samples]}


def read_samples(path: Path) -> dict[int, tuple[Sample, ...]]:
    """Return the samples of one run by step, ascending; the last attempt wins.

    Raises StoreError, naming file and line, for a malformed row.
    """
    rows: dict[int, _SampleRow] = {}
    for number, content in enumerate(read_json_lines(path), 1):
        try:
            row = _SAMPLE_ROW.validate_python(content)
        except ValidationError as error:
            first_error = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(map(str, first_error["loc"]))
            raise StoreError(
                Code.SAMPLES_LINE_INVALID(path=path, line=number, field=field, problem=first_error["msg"])
            ) from None
        is_newest = row.step not in rows or row.attempt >= rows[row.step].attempt
        if is_newest and row.attempt < MAX_ATTEMPT:
            rows[row.step] = row
    return {step: rows[step].samples for step in sorted(rows)}
