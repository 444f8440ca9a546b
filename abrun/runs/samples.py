"""Completions that a run has kept to be looked at: rows of samples.jsonl."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from abrun.errors import StoreError
from abrun.reasons import Code
from abrun.runs.lines import read_lines
from abrun.runs.records import LARGEST_ATTEMPT

MOST_BYTES = 32 * 2**20  # of a run's file: what comes after is not kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One completion. Texts are as the tokenizer decodes them, without special tokens.

    None: another trainer's, which does not say.
    """

    prompt: str
    text: str
    reward: float | None
    logprob_error: float | None  # mean over its tokens of |trainer - engine|, nats
    num_tokens: int | None
    truncated: bool | None  # stopped by max_new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    step: int
    attempt: int
    samples: tuple[Sample, ...]


_ROW = TypeAdapter(_Row)


def row_of(step: int, attempt: int, samples: list[Sample]) -> dict[str, Any]:
    return {"step": step, "attempt": attempt, "samples": [asdict(one) for one in samples]}


def read_samples(path: Path) -> dict[int, tuple[Sample, ...]]:
    """Those of one run by step, ascending; of several attempts the last one counts.

    Raises StoreError naming file and line where a row is corrupt.
    """
    found: dict[int, _Row] = {}
    for number, content in enumerate(read_lines(path), 1):
        try:
            row = _ROW.validate_python(content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise StoreError(
                Code.SAMPLES_LINE_INVALID(path=path, line=number, field=where, problem=first["msg"])
            ) from None
        is_newest = row.step not in found or row.attempt >= found[row.step].attempt
        if is_newest and row.attempt < LARGEST_ATTEMPT:
            found[row.step] = row
    return {step: found[step].samples for step in sorted(found)}
