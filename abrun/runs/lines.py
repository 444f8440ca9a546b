"""Files of JSON lines, each with a checksum: appended one `write()` a line, followed while they grow."""

import contextlib
import json
import os
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from abrun.errors import StoreError
from abrun.reasons import Code
from abrun.redaction import shortened
from abrun.regular_files import MAX_LINE_BYTES, lines_of, open_regular
from abrun.runs.access import read_error
from abrun.runs.files import decode, encode, explained, is_too_deep, make_folder, open_to_change, sync_folder
from abrun.runs.records import LARGEST_ATTEMPT

NUM_LAST = 10  # rows at the end of a file that skimming it leaves none out of

LARGEST_STEP = 2**53
CHECKSUM = "crc32"  # the last key of a line; its value is text, which no metric is
NOT_METRICS = ("step", "attempt", "time_s", CHECKSUM)  # of a row of metrics
MISMATCH = "the line does not match its checksum"
_BEFORE_CHECKSUM = f', "{CHECKSUM}": "'.encode()
_NUM_CHECKSUM_BYTES = len(_BEFORE_CHECKSUM) + len(b'00000000"}')


class LineWriter:
    """Appends JSON lines, one `write()` each. Opening drops the torn last line of a killed writer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._torn = True
        with explained(path):
            make_folder(path.parent)
            # Appending: the last row of an older attempt, on its way now, must not overwrite one of a newer
            self._file = open_to_change(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            try:
                self._drop_torn_line()
                self._end = os.fstat(self._file).st_size
                sync_folder(path.parent)
            except BaseException:
                os.close(self._file)
                raise

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row. A line that the disk cannot take whole is removed before StoreError is raised."""
        line = json_line(row)
        with explained(self.path):
            self._drop_torn_line()
            self._torn = True
            if os.write(self._file, line) < len(line):
                self._drop_torn_line()
                raise OSError("no space for the whole line")
            self._torn = False
            self._end = os.lseek(self._file, 0, os.SEEK_CUR)

    @property
    def in_place(self) -> bool:
        """True while the path leads to this file, and nobody has cut it short."""
        try:
            there, here = self.path.lstat(), os.fstat(self._file)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, here) and here.st_size >= self._end

    def sync(self) -> None:
        """Bring what was written to the disk: from now on it outlives a loss of power."""
        with explained(self.path):
            os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)

    def _drop_torn_line(self) -> None:
        """Take back what the last write left of a line, where it failed."""
        if self._torn:
            os.ftruncate(self._file, _end_of_last_line(self._file))
            self._torn = False


def json_line(row: Mapping[str, Any]) -> bytes:
    """Return a row as a line that ends with its checksum."""
    text = json.dumps(encode(row), allow_nan=False, ensure_ascii=False)
    content = text.encode(errors="replace")[:-1]  # of a path, say: half a surrogate is no text
    return content + _checksum(content) + b"\n"


class LineParser:
    """Parses the lines of one file in order, checking the checksum that LineWriter appends to each.

    Lines without a checksum are read: those of older versions, or of other writers. After a line with one, a
    line without it is damaged.
    """

    def __init__(self) -> None:
        self._has_checksums = False

    def parse(self, line: bytes) -> dict[str, Any]:
        """Return the row without its checksum, NaN and Inf restored. Raises ValueError for a damaged line."""
        if not self.is_intact(line):
            raise ValueError(MISMATCH)
        row = orjson.loads(line)
        if not isinstance(row, dict) or is_too_deep(line, row):
            raise ValueError("a JSON object is expected")
        row.pop(CHECKSUM, None)
        if b'"NaN"' in line or b'Infinity"' in line:
            return {key: decode(value) for key, value in row.items()}
        return row

    def is_intact(self, line: bytes) -> bool:
        """Return False where the checksum of a line is another one, or missing after lines with one."""
        content, end = line[:-_NUM_CHECKSUM_BYTES], line[-_NUM_CHECKSUM_BYTES:]
        if end == _checksum(content):
            self._has_checksums = True
            return True
        return not (self._has_checksums or end.startswith(_BEFORE_CHECKSUM))


def _checksum(content: bytes) -> bytes:
    """Return the end of a line that begins with `content`."""
    return b'%s%08x"}' % (_BEFORE_CHECKSUM, zlib.crc32(content))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All rows of a JSON-lines file; see LineReader."""
    return LineReader(path).read()


def sound_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSON-lines file without its damaged lines; none of a file that cannot be read."""
    parser = LineParser()
    with contextlib.suppress(OSError):
        for line in whole_lines(path):
            with contextlib.suppress(ValueError):
                yield parser.parse(line)


def whole_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file without their ends, but not a torn last line. Raises OSError."""
    with open_regular(path) as file:
        for line in lines_of(file):
            if line.endswith(b"\n"):
                yield line[:-1]


def problem_of(row: Mapping[str, Any]) -> str | None:
    """Why an object is no row of metrics; None where it is one."""
    for key, value in row.items():
        if not isinstance(decode(value), int | float | None) and key not in NOT_METRICS:
            return (
                f"{shortened(key)}: got {shortened(value)}; a number is expected: "
                "mend the trainer that wrote it and run again"
            )
    return problem_of_step(row.get("step"), row.get("attempt", 1))


def problem_of_step(step: Any, attempt: Any) -> str | None:
    """Return why these are no step and attempt of a row; None where they are."""
    whole = type(step) is int and abs(step) <= LARGEST_STEP
    if whole and type(attempt) is int and attempt < LARGEST_ATTEMPT:
        return None
    return f"got step {shortened(step)}, attempt {shortened(attempt)}; both are whole numbers"


def bad_rows(path: Path) -> dict[int, tuple[int, int]]:
    """Return start and length, by number, of the lines of metrics.jsonl that are damaged or hold no row.

    Return none of a file that cannot be read.
    """
    parser, start = LineParser(), 0
    bad: dict[int, tuple[int, int]] = {}
    with contextlib.suppress(OSError):
        for number, line in enumerate(whole_lines(path), 1):
            if line.strip() and not _is_row(parser, line):
                bad[number] = start, len(line)
            start += len(line) + 1
    return bad


def _is_row(parser: LineParser, line: bytes) -> bool:
    try:
        return problem_of(parser.parse(line)) is None
    except ValueError:
        return False


def blank_lines(path: Path, places: Iterable[tuple[int, int]]) -> None:
    """Overwrite lines by spaces: no place in the file moves, for those who follow it or write it still."""
    with explained(path):
        file = open_to_change(path, os.O_WRONLY)
        try:
            for start, length in places:
                os.pwrite(file, b" " * length, start)
            os.fsync(file)
        finally:
            os.close(file)


def damaged_line(path: Path | str, place: str, line: bytes, problem: object = MISMATCH) -> StoreError:
    """Return the error that names a line which LineParser refused."""
    shown = line[:40].decode(errors="replace")
    what = "a JSON object is expected" if isinstance(problem, orjson.JSONDecodeError) else problem
    return StoreError(Code.LINE_INVALID(path=path, place=place, got=shown, problem=str(what)))


class LineReader:
    """Follows a JSON-lines file: each `read()` returns the rows appended since, NaN and Inf restored.

    A torn last line (of a writer at work, or killed) is left for later, blank ones are passed over. Raises
    StoreError naming file and line where any other line is corrupt.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._num_lines = 0
        self._parser = LineParser()

    def read(self) -> list[dict[str, Any]]:
        try:
            with open_regular(self.path) as file:
                file.seek(self._offset)
                lines = [line for line in lines_of(file) if line.endswith(b"\n")]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise read_error(self.path, error) from None
        numbered = enumerate(lines, self._num_lines + 1)
        rows = [self._parse(line[:-1], f"line {number}") for number, line in numbered if line.strip()]
        self._offset += sum(map(len, lines))
        self._num_lines += len(lines)
        return rows

    def skim(self, num_rows: int) -> list[dict[str, Any]]:
        """About that many rows spread over the file, and the last NUM_LAST, in their order.

        `read()` then goes on after them. Of a large file it reads little.
        """
        found: dict[int, bytes] = {}
        last: deque[tuple[int, bytes]] = deque(maxlen=NUM_LAST)
        try:
            with open_regular(self.path) as file:
                size = os.fstat(file.fileno()).st_size
                for index in range(num_rows):
                    file.seek(size * index // num_rows)
                    lines = lines_of(file)
                    if index:
                        next(lines, b"")
                    start = file.tell()
                    found[start] = next(lines, b"")
                file.seek(max(0, size - max(1 << 14, 4 * len(found[0]))))
                lines = lines_of(file)
                next(lines, b"")
                start = file.tell()
                for line in file.read(min(MAX_LINE_BYTES, size - start)).splitlines(keepends=True):
                    last.append((start, line))
                    start += len(line)
                found |= dict(last)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise read_error(self.path, error) from None
        whole = {start: line for start, line in sorted(found.items()) if line.endswith(b"\n")}
        self._offset = max((start + len(line) for start, line in whole.items()), default=0)
        return [self._parse(line[:-1], f"byte {start}") for start, line in whole.items() if line.strip()]

    def _parse(self, line: bytes, place: str) -> dict[str, Any]:
        try:
            return self._parser.parse(line)
        except ValueError as error:
            raise damaged_line(self.path, place, line, error) from None


def _end_of_last_line(file: int) -> int:
    """Where the last whole line of a file ends."""
    end = os.lseek(file, 0, os.SEEK_END)
    while end > 0:
        start = max(0, end - 65536)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
