"""Files of JSON lines: appended one `write()` a line, followed while they grow."""

import contextlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import orjson

from abrun.errors import StoreError
from abrun.redaction import shortened
from abrun.regular_files import open_regular, read_regular
from abrun.store.files import PRIVATE, decode, encode, explained, make_folder, sync_folder
from abrun.store.records import LARGEST_ATTEMPT

NUM_LAST = 10  # rows at the end of a file that skimming it leaves none out of

LARGEST_STEP = 2**53
NOT_METRICS = ("step", "attempt", "time_s")  # of a row of metrics


class LineWriter:
    """Appends JSON lines, one `write()` each. Opening drops the torn last line of a killed writer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._torn = True
        with explained(path):
            make_folder(path.parent)
            # Appending: the last row of an older attempt, on its way now, must not overwrite one of a newer
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            self._file = os.open(path, flags, PRIVATE)
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
    text = json.dumps(encode(row), allow_nan=False, ensure_ascii=False)
    return text.encode(errors="replace") + b"\n"  # of a path, say: half a surrogate is no text


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All rows of a JSON-lines file; see LineReader."""
    return LineReader(path).read()


def sound_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file, without the lines that are none; no row of one that cannot be read."""
    try:
        lines = read_regular(path).split(b"\n")[:-1]
    except OSError:
        return []
    rows = []
    for line in lines:
        with contextlib.suppress(ValueError):
            row = orjson.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows


def problem_of(row: Mapping[str, Any]) -> str | None:
    """Why an object is no row of metrics; None where it is one."""
    step, attempt = row.get("step"), row.get("attempt", 1)
    whole = type(step) is int and abs(step) <= LARGEST_STEP
    if not (whole and type(attempt) is int and attempt < LARGEST_ATTEMPT):
        return f"got step {shortened(step)}, attempt {shortened(attempt)}; both are whole numbers"
    for key, value in row.items():
        if not isinstance(decode(value), int | float | None) and key not in NOT_METRICS:
            return (
                f"{shortened(key)}: got {shortened(value)}; a number is expected: "
                "mend the trainer that wrote it and run again"
            )
    return None


def is_row(line: bytes) -> bool:
    """Whether a line of metrics.jsonl is one that can be read."""
    try:
        row = orjson.loads(line)
    except ValueError:
        return False
    return isinstance(row, dict) and problem_of(row) is None


def bad_lines(path: Path, is_sound: Callable[[bytes], bool]) -> dict[int, tuple[int, int]]:
    """Start and length of the lines that are not sound, by number; none of a file that cannot be read."""
    try:
        lines = read_regular(path).split(b"\n")[:-1]
    except OSError:
        return {}
    starts = accumulate((len(line) + 1 for line in lines), initial=0)
    return {
        number: (start, len(line))
        for number, (start, line) in enumerate(zip(starts, lines, strict=False), 1)
        if line.strip() and not is_sound(line)
    }


def blank_lines(path: Path, places: Iterable[tuple[int, int]]) -> None:
    """Overwrite lines by spaces: no place in the file moves, for those who follow it or write it still."""
    with explained(path):
        file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            for start, length in places:
                os.pwrite(file, b" " * length, start)
            os.fsync(file)
        finally:
            os.close(file)


class LineReader:
    """Follows a JSON-lines file: each `read()` returns the rows appended since, NaN and Inf restored.

    A torn last line (of a writer at work, or killed) is left for later, blank ones are passed over. Raises
    StoreError naming file and line where any other line is corrupt.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._num_lines = 0

    def read(self) -> list[dict[str, Any]]:
        try:
            with open_regular(self.path) as file:
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be read: {error.strerror}") from None
        *lines, torn = content.split(b"\n")
        numbered = enumerate(lines, self._num_lines + 1)
        rows = [self._parse(line, f"line {number}") for number, line in numbered if line.strip()]
        self._offset += len(content) - len(torn)
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
                    if index:
                        file.readline()
                    start = file.tell()
                    found[start] = file.readline()
                file.seek(max(0, size - max(1 << 14, 4 * len(found[0]))))
                file.readline()
                start = file.tell()
                for line in file.read(size - start).splitlines(keepends=True):
                    last.append((start, line))
                    start += len(line)
                found |= dict(last)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be read: {error.strerror}") from None
        whole = {start: line for start, line in sorted(found.items()) if line.endswith(b"\n")}
        self._offset = max((start + len(line) for start, line in whole.items()), default=0)
        return [self._parse(line, f"byte {start}") for start, line in whole.items() if line.strip()]

    def _parse(self, line: bytes, place: str) -> dict[str, Any]:
        try:
            row = orjson.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            shown = line[:40].decode(errors="replace")
            raise StoreError(
                f"{self.path}, {place}: got {shown!r}; a JSON object is expected: "
                "remove the line or run again"
            )
        if b'"NaN"' not in line and b'Infinity"' not in line:
            return row
        return {key: decode(value) for key, value in row.items()}


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
