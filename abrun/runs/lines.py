"""JSON-lines files with a checksum per line: appended one `write()` per line, readable while they grow."""

import contextlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from pydantic import TypeAdapter, ValidationError

from abrun.errors import StoreError
from abrun.runs import files
from abrun.runs.records import MAX_ATTEMPT
from abrun.runs.redaction import shortened

MAX_STEP = 2**53
CHECKSUM = "crc32"  # the last key of a line; its value is text, unlike any metric's
NON_METRIC_KEYS = ("step", "attempt", "time_s", CHECKSUM)  # in a row of metrics.jsonl
CHECKSUM_MISMATCH = "the line does not match its checksum"
_CHECKSUM_PREFIX = f', "{CHECKSUM}": "'.encode()
_NUM_CHECKSUM_BYTES = len(_CHECKSUM_PREFIX) + len(b'00000000"}')


class LineWriter:
    """Writer that appends JSON lines, one `write()` each. Opening drops a killed writer's torn last line."""

    def __init__(self, path: Path, mode: int = files.PRIVATE_MODE) -> None:
        self.path = path
        self._torn = True
        with files.wrap_write_errors(path):
            files.make_folder(path.parent)
            # O_APPEND: a late write of an older attempt must not overwrite a row of a newer one.
            self._file = files.open_without_links(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, mode)
            try:
                self._drop_torn_line()
                self._end = os.fstat(self._file).st_size
                files.sync_folder(path.parent)
            except BaseException:
                os.close(self._file)
                raise

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row. If the disk cannot take the whole line, remove it and raise StoreError."""
        line = json_line(row)
        with files.wrap_write_errors(self.path):
            self._drop_torn_line()
            self._torn = True
            if os.write(self._file, line) < len(line):
                self._drop_torn_line()
                raise OSError("no space for the whole line")
            self._torn = False
            self._end = os.lseek(self._file, 0, os.SEEK_CUR)

    @property
    def is_in_place(self) -> bool:
        """True while the path still names this file and nobody has truncated it."""
        try:
            path_status, file_status = self.path.lstat(), os.fstat(self._file)
        except FileNotFoundError:
            return False
        return os.path.samestat(path_status, file_status) and file_status.st_size >= self._end

    def sync(self) -> None:
        """Flush all rows to the disk, so that they survive a power loss."""
        with files.wrap_write_errors(self.path):
            os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)

    def _drop_torn_line(self) -> None:
        """Remove the partial line of a failed write: what follows the last newline."""
        if not self._torn:
            return
        end, newline = os.lseek(self._file, 0, os.SEEK_END), -1
        while end > 0 and newline < 0:
            start = max(0, end - 65536)
            newline = os.pread(self._file, end - start, start).rfind(b"\n")
            end = start + newline + 1 if newline >= 0 else start
        os.ftruncate(self._file, end)
        self._torn = False


def json_line(row: Mapping[str, Any]) -> bytes:
    """Return a row as a line that ends with its checksum."""
    text = json.dumps(files.encode_non_finite(row), allow_nan=False, ensure_ascii=False)
    # A string such as a path may hold a lone surrogate, which UTF-8 cannot encode.
    content = text.encode(errors="replace")[:-1]
    return content + _line_ending(content) + b"\n"


class LineParser:
    """Parser of one file's lines, in order, that verifies the checksum that LineWriter appends to each.

    Lines without a checksum come from older versions or other writers and are accepted. After a line with a
    checksum, or if the file `has_checksums`, a line without one counts as damaged.
    """

    def __init__(self, *, has_checksums: bool = False) -> None:
        self._has_checksums = has_checksums

    def parse(self, line: bytes) -> dict[str, Any]:
        """Return the row without its checksum, NaN and Inf restored. Raises ValueError for a damaged line."""
        if not self.is_intact(line):
            raise ValueError(CHECKSUM_MISMATCH)
        row = orjson.loads(line)
        if not isinstance(row, dict) or files.is_too_deep(line, row):
            raise ValueError("expected a JSON object")
        row.pop(CHECKSUM, None)
        if b'"NaN"' in line or b'Infinity"' in line:
            return {key: files.decode_non_finite(value) for key, value in row.items()}
        return row

    def is_intact(self, line: bytes) -> bool:
        """Return False if a line's checksum is wrong, or missing after lines that have one."""
        content, end = line[:-_NUM_CHECKSUM_BYTES], line[-_NUM_CHECKSUM_BYTES:]
        if not end.startswith(_CHECKSUM_PREFIX):
            return not self._has_checksums
        is_intact = end == _line_ending(content)
        self._has_checksums = self._has_checksums or is_intact
        return is_intact


def _line_ending(content: bytes) -> bytes:
    """Return the checksum key and closing brace that follow `content` in a line."""
    return b'%s%08x"}' % (_CHECKSUM_PREFIX, zlib.crc32(content))


class JsonLine(NamedTuple):
    """A non-blank line of a JSON-lines file: its position, its text without the newline, its row or error."""

    number: int  # from 1
    start: int  # byte offset
    text: bytes
    row: dict[str, Any] | ValueError

    def checked(self, path: Path) -> dict[str, Any]:
        """Return the row. Raises StoreError, naming file and line, if the line is damaged."""
        if isinstance(self.row, ValueError):
            raise damaged_line_error(path, f"line {self.number}", self.text, self.row)
        return self.row


class LineReader:
    """Reader that follows a JSON-lines file: each call returns the new lines, with NaN and Inf restored."""

    def __init__(self, path: Path, *, has_checksums: bool = False) -> None:
        self.path = path
        self._offset = 0
        self._num_lines = 0
        self._parser = LineParser(has_checksums=has_checksums)

    def lines(self, *, ended: bool = False) -> Iterator[JsonLine]:
        """Yield the new lines, including damaged ones. Raises OSError.

        A torn last line is left for the next call, since its writer may still be working. Once the writer
        has `ended`, it is damaged.
        """
        with files.open_regular(self.path, os.O_NOFOLLOW) as file:
            file.seek(self._offset)
            for text in files.iter_lines(file):
                if not (text.endswith(b"\n") or ended):
                    return
                start = self._offset
                self._offset += len(text)
                self._num_lines += 1
                if text.isspace():
                    continue
                row: dict[str, Any] | ValueError = ValueError("its end is missing (torn line)")
                if text.endswith(b"\n"):
                    try:
                        row = self._parser.parse(text[:-1])
                    except ValueError as error:
                        row = error
                yield JsonLine(self._num_lines, start, text.removesuffix(b"\n"), row)

    def read(self) -> list[dict[str, Any]]:
        """Return the new rows; none if there is no file yet. Raises StoreError for a damaged line."""
        with files.wrap_read_errors(self.path), contextlib.suppress(FileNotFoundError):
            return [line.checked(self.path) for line in self.lines()]
        return []


def read_json_lines(path: Path, *, has_checksums: bool = False) -> list[dict[str, Any]]:
    """Return all rows of a JSON-lines file; see LineReader and LineParser."""
    return LineReader(path, has_checksums=has_checksums).read()


def read_valid_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSON-lines file, skipping damaged lines; none if the file cannot be read."""
    with contextlib.suppress(OSError):
        for line in LineReader(path).lines():
            if not isinstance(line.row, ValueError):
                yield line.row


def row_problem(row: Mapping[str, Any]) -> str | None:
    """Return why an object is not a valid row of metrics; None if it is."""
    for key, value in row.items():
        if not isinstance(files.decode_non_finite(value), int | float | None) and key not in NON_METRIC_KEYS:
            got = f"{shortened(key)}: got {shortened(value)}"
            return f"{got}; expected a number: fix the trainer that wrote it and run again"
    return step_problem(row.get("step"), row.get("attempt", 1))


def step_problem(step: Any, attempt: Any) -> str | None:
    """Return why a step or an attempt is invalid; None if both are valid."""
    is_valid_step = type(step) is int and abs(step) <= MAX_STEP
    if is_valid_step and type(attempt) is int and attempt < MAX_ATTEMPT:
        return None
    return f"got step {shortened(step)}, attempt {shortened(attempt)}; expected whole numbers"


def find_bad_lines(path: Path) -> list[JsonLine]:
    """Return the lines of metrics.jsonl that are damaged or not rows; none if the file cannot be read."""
    with contextlib.suppress(OSError):
        lines = LineReader(path).lines()
        return [line for line in lines if isinstance(line.row, ValueError) or row_problem(line.row)]
    return []


def overwrite_lines(path: Path, lines: Iterable[JsonLine]) -> None:
    """Overwrite lines with spaces, so that offsets stay valid for readers and writers of the file."""
    with (
        files.wrap_write_errors(path),
        open(files.open_without_links(path, os.O_WRONLY), "wb", buffering=0) as file,
    ):
        for line in lines:
            os.pwrite(file.fileno(), b" " * len(line.text), line.start)
        os.fsync(file.fileno())


def damaged_line_error(
    path: Path | str, place: str, line: bytes, problem: object = CHECKSUM_MISMATCH
) -> StoreError:
    """Return the error that names a line that LineParser rejected."""
    excerpt = line[:40].decode(errors="replace")
    cause = "expected a JSON object" if isinstance(problem, orjson.JSONDecodeError) else problem
    return StoreError(f"{path}, {place}: got {excerpt!r}: {cause}; remove the line, or run again")


# --- sampled completions: rows of samples.jsonl ---

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
                f"{path}, line {number}: not a row of samples ({field}: {first_error['msg']}); remove the "
                "line, or run again"
            ) from None
        is_newest = row.step not in rows or row.attempt >= rows[row.step].attempt
        if is_newest and row.attempt < MAX_ATTEMPT:
            rows[row.step] = row
    return {step: rows[step].samples for step in sorted(rows)}
