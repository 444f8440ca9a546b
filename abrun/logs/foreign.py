"""The door for foreign data: the only module of this package that opens files or parses SQLite, YAML, JSON.

What a file holds comes from a stranger. Links do not lead out of the given folder, work and memory are
bounded by the size of the file, and a value of another type than expected is None.
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
import sqlite3
import stat
import tempfile
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import orjson
import yaml

from abrun.errors import AbrunError, StoreError
from abrun.logs.log import list_names, printable, wrap_read_errors
from abrun.recipe.reading import Loader, dotted, parse_yaml
from abrun.regular_files import exists, is_directory, is_file, iter_lines, open_regular, read_regular

MAX_FOLDER_DEPTH = 50
MAX_ENTRIES = 1_000_000  # files and folders of a source
MAX_WALK_S = 120.0
MAX_COMPANION_BYTES = 1 << 22
MAX_YAML_BYTES = 1 << 17  # parsed in 3 s at most
MAX_FLOW_LEVELS = 20  # of YAML in brackets: the parser's time grows with it
MAX_JSON_VALUES = 1 << 24  # of one document
MAX_RECORD_BYTES = 1 << 24  # of one record of a binary log, or value of a database
MAX_CHARACTERS = 10_000  # of a text from a file
MAX_NAME_CHARACTERS = 2000
MAX_LIST_LEVELS = 20  # of a setting
STEP_LIMIT = 2**53  # whole numbers above it are not exact as floats

SQLITE_MAGIC = b"SQLite format 3\x00"
JOURNAL_MAGIC = b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7"
WAL_MAGIC = b"\x37\x7f\x06"
STEPS_BETWEEN_CHECKS = 10_000  # of SQLite's virtual machine, well below a millisecond
BASE_STEPS = 1 << 21
STEPS_PER_BYTE = 4  # real tables take less than one
COPY_TRIALS, COPY_PAUSE_S = 5, 0.2


# --- folders ---


@dataclass(slots=True)
class Folder:
    """The entries of a folder, sorted by name, links last. Remove one of `folders` to not enter it."""

    path: Path
    files: list[Path]  # regular files, and links to them that do not lead out of the walked folder
    folders: list[Path]
    outside: list[Path]  # links that lead out of it to a file or folder; they are not followed


def walk(top: Path) -> Iterator[Folder]:
    """Yield a folder and those below it. Raises StoreError for a tree that is too large or too deep."""
    root, end_s, num_entries = os.path.realpath(top), time.monotonic() + MAX_WALK_S, 0
    pending = [(top, 0)]
    while pending:
        path, depth = pending.pop()
        folder = Folder(path, [], [], [])
        links: list[Path] = []
        with wrap_read_errors(path), os.scandir(path) as entries:
            for entry in entries:
                num_entries += 1
                if entry.is_symlink():
                    links.append(Path(entry.path))
                elif entry.is_dir(follow_symlinks=False):
                    folder.folders.append(Path(entry.path))
                elif entry.is_file(follow_symlinks=False):
                    folder.files.append(Path(entry.path))
                if num_entries > MAX_ENTRIES or time.monotonic() > end_s:
                    problem = f"too many files ({num_entries} so far); name the folder of the runs"
                    raise StoreError(f"{printable(str(top))}: {problem}")
        folder.files.sort()
        folder.folders.sort()
        for link in sorted(links):
            kind, target = path_kind(link), os.path.realpath(link)
            if kind in ("file", "folder") and not f"{target}/".startswith(f"{root.rstrip('/')}/"):
                folder.outside.append(link)
            elif kind == "file":
                folder.files.append(link)
        yield folder
        if depth == MAX_FOLDER_DEPTH and folder.folders:
            raise StoreError(
                f"{printable(str(top))}: folders are nested more than {MAX_FOLDER_DEPTH} levels deep; "
                "name the folder of the runs"
            )
        pending += [(subfolder, depth + 1) for subfolder in reversed(folder.folders)]


def path_kind(path: Path) -> Literal["file", "folder", "other"] | None:
    """Return what a path, or the target of a link, is; None if it does not exist. Raises StoreError."""
    with wrap_read_errors(path):
        return (
            "file" if is_file(path) else "folder" if is_directory(path) else "other" if exists(path) else None
        )


def link_notes(place: str, names: Sequence[str]) -> list[str]:
    """Return a note on links that were not followed, if any."""
    note = f"{place}: links that lead out of it were not followed: {list_names([*names], 3)}"
    return [f"{note}; name their targets as sources, or copy them"] * bool(names)


# --- files ---


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[io.BufferedReader]:
    """Open a regular file. Raises StoreError, also for errors while it is read."""
    with wrap_read_errors(path), open_regular(path) as file:
        yield file


def read_file(path: Path, max_bytes: int | None = None) -> bytes:
    """Return the content of a regular file. Raises StoreError."""
    with wrap_read_errors(path):
        return read_regular(path, max_bytes)


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a regular file with their line ends. Raises StoreError."""
    with open_file(path) as file:
        yield from iter_lines(file)


def find_companion(folder: Path, *parts: str) -> Path | None:
    """Return a regular file below a run's folder; None if it is missing, or if a link leads to it."""
    path, file_type = folder, stat.S_IFDIR
    for part in parts:
        path = path / part
        try:
            mode = os.lstat(path).st_mode if stat.S_ISDIR(file_type) else 0
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        except OSError:
            mode = 0
        file_type = stat.S_IFMT(mode)
    return path if stat.S_ISREG(file_type) else None


def read_companion(
    folder: Path, *parts: str, notes: list[str], max_bytes: int = MAX_COMPANION_BYTES
) -> bytes | None:
    """Return a file that describes the run in a folder; None if it is missing, or with a note unreadable."""
    path = find_companion(folder, *parts)
    try:
        if path is not None:
            return read_file(path, max_bytes)
        if os.path.lexists(folder.joinpath(*parts)):
            notes.append(f"{'/'.join(parts)} was not read: it is a link, or not a regular file")
    except StoreError as error:
        notes.append(f"{'/'.join(parts)} was not read: {error}")
    return None


# --- texts ---


def parse_json(text: bytes | str) -> Any:
    """Return the value of a JSON text; None if it is not JSON. Raises StoreError for millions of values."""
    if len(text) > MAX_JSON_VALUES:
        content: Any = text  # its marks are of its own type
        marks = (b",", b"[", b"{") if isinstance(text, bytes) else (",", "[", "{")
        if sum(content.count(mark) for mark in marks) > MAX_JSON_VALUES:
            raise StoreError(f"got a JSON text of more than {MAX_JSON_VALUES} values; log less often")
    try:
        return orjson.loads(text)
    except ValueError:
        try:
            return json.loads(str(text, "utf-8") if isinstance(text, bytes) else text)  # knows NaN, Infinity
        except (ValueError, RecursionError):
            return None


class ForeignLoader(Loader):
    """The recipes' loader for what programs wrote: keys may be numbers, and of equal ones the last counts."""

    construct_mapping = yaml.SafeLoader.construct_mapping

    def fetch_flow_collection_start(self, token_class: Any) -> None:
        if self.flow_level == MAX_FLOW_LEVELS:
            raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=self.get_mark())
        super().fetch_flow_collection_start(token_class)


def parse_foreign_yaml(content: bytes, place: str) -> dict[str, Any]:
    """Return a mapping in YAML, without aliases, tags or dates. Raises StoreError."""
    try:
        value = parse_yaml(content.decode(errors="replace"), place, ForeignLoader)
    except AbrunError as error:
        raise StoreError(str(error)) from None
    if not isinstance(value, dict):
        raise StoreError(f"{place}: got a {type(value).__name__}; expected a mapping")
    return value


# --- values ---


def as_text(value: Any, max_characters: int = MAX_CHARACTERS) -> str | None:
    """Return a text, bytes or a number as text of bounded length; None for anything else."""
    if isinstance(value, bytes):
        value = value[: 4 * max_characters].decode(errors="replace")
    elif isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 1 << 4096):
        value = str(value)
    return value[:max_characters] if isinstance(value, str) else None


def as_name(value: Any) -> str | None:
    """Return the name of a metric, run or setting; None if it has none."""
    return as_text(value, MAX_NAME_CHARACTERS) or None


def as_number(value: Any) -> float | None:
    """Return a number, or the number in a text; None for anything else."""
    try:
        if isinstance(value, int):
            return float(value)
        return float(value) if isinstance(value, float | str | bytes) else None
    except OverflowError:  # a whole number of more than 308 digits
        return float("inf") if isinstance(value, int) and value > 0 else float("-inf")
    except ValueError:
        return None


def as_step(value: Any) -> int | None:
    """Return a whole number below 2^53; None for anything else."""
    if type(value) is int:
        return value if abs(value) < STEP_LIMIT else None
    number = None if isinstance(value, bool) else as_number(value)
    return int(number) if number is not None and abs(number) < STEP_LIMIT and number % 1 == 0 else None


def as_mapping(value: Any) -> dict[str, Any]:
    """Return a mapping; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def as_config(value: Any) -> dict[str, Any]:
    """Return a configuration by dotted keys, without overlong keys; see `_bounded` for its values."""
    settings = dotted(as_mapping(value), MAX_NAME_CHARACTERS)
    return {key: _bounded(setting, MAX_LIST_LEVELS) for key, setting in settings.items()}


def _bounded(value: Any, max_levels: int) -> Any:
    """Return a setting, whose long texts end in a hash, without lists that are nested too deeply."""
    if isinstance(value, str) and len(value) > MAX_CHARACTERS:
        digest = hashlib.sha256(value.encode(errors="replace")).hexdigest()[:16]
        return value[: MAX_CHARACTERS - len(digest)] + digest
    if isinstance(value, list):
        return [_bounded(item, max_levels - 1) for item in value] if max_levels else None
    if isinstance(value, Mapping):
        return {key: _bounded(item, max_levels - 1) for key, item in value.items()} if max_levels else None
    return value


class Points:
    """The points of a metric in the order in which they were written, in 16 bytes each."""

    def __init__(self) -> None:
        self.steps, self.values = array("q"), array("d")

    def add(self, step: int, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)


def left_out_notes(number: int) -> list[str]:
    """Return a note on points that `as_name`, `as_step` or `as_number` refused, if any."""
    problem = "its name or value is missing, or its step is no whole number below 2^53"
    return [f"{number} point{'s' * (number > 1)} left out: {problem}"] * bool(number)


# --- SQLite ---


class Database:
    """A SQLite file that is read without trust: real tables only, with bounds on work and lengths."""

    def __init__(self, connection: sqlite3.Connection, place: str, num_bytes: int) -> None:
        self.place = place
        self._connection = connection
        self._steps_left = BASE_STEPS + STEPS_PER_BYTE * num_bytes
        self._bytes_left = MAX_RECORD_BYTES + STEPS_PER_BYTE * num_bytes
        connection.text_factory = self._decode
        connection.set_progress_handler(self._count_steps, STEPS_BETWEEN_CHECKS)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_RECORD_BYTES)
        for setting in ("trusted_schema = OFF", "query_only = ON", "cell_size_check = ON"):
            connection.execute(f"PRAGMA {setting}")

    def rows(self, query: str) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query. Raises StoreError."""
        with self._wrap_errors():
            yield from self._connection.execute(query)

    def columns(self, table: str) -> set[str]:
        """Return the stored columns of a table; none for a view, a virtual or a computed one."""
        schema = self.rows(
            "SELECT sql FROM sqlite_master "
            f"WHERE name = '{table}' AND type = 'table' AND rootpage > 0 AND sql LIKE 'CREATE TABLE%'"
        )
        if len([*schema]) != 1:
            return set()
        columns = [(row[1], row[6]) for row in self.rows(f"PRAGMA table_xinfo({table})")]
        return set() if any(hidden for _, hidden in columns) else {name for name, _ in columns}

    def _count_steps(self) -> bool:
        self._steps_left -= STEPS_BETWEEN_CHECKS
        return self._steps_left < 0

    def _decode(self, text: bytes) -> str:
        self._bytes_left -= len(text)
        if self._bytes_left < 0:
            raise StoreError(f"{self.place}: its texts are longer than the file; copy it again")
        return text.decode(errors="replace")

    @contextlib.contextmanager
    def _wrap_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, UnicodeError) as error:  # UnicodeError: SQLite's message is not UTF-8
            problem = printable(str(error))
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
                if self._steps_left >= 0:  # Python drops an exception of the progress handler
                    raise KeyboardInterrupt from None
                problem = "its tables are larger than the file"
            raise StoreError(f"{self.place}: SQLite cannot read it ({problem}); copy it again") from None


@contextlib.contextmanager
def open_sqlite(path: Path, *, in_place: bool = False) -> Iterator[Database]:
    """Open a SQLite file, whose tracker may still write it. Nothing is written next to it. Raises StoreError.

    A file with a write-ahead log is copied first. `in_place`: only what the file itself holds.
    """
    place = printable(str(path))
    with contextlib.ExitStack() as stack:
        wal = None if in_place else _check_companions(path, place)
        options, num_bytes, real_path = "mode=ro&immutable=1", _state(path)[0], path.resolve()
        if wal:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="abrun-"))
            options, num_bytes = "mode=rw", num_bytes + _state(wal)[0]
            real_path = _copy_unchanged(real_path, wal, Path(folder), place)
        try:
            connection = sqlite3.connect(f"file:{quote(str(real_path))}?{options}", uri=True)
            stack.callback(connection.close)
            database = Database(connection, place, num_bytes)
        except (sqlite3.Error, UnicodeError) as error:
            raise StoreError(f"{place}: SQLite cannot open it ({printable(str(error))})") from None
        yield database


def _check_companions(path: Path, place: str) -> Path | None:
    """Return the write-ahead log, if there is one.

    SQLite must not see a rollback journal, which can name any file to be deleted.
    """
    real_path = os.path.realpath(path)
    for suffix in ("-wal", "-shm", "-journal"):
        companion = Path(real_path + suffix)
        if os.path.lexists(companion) and not stat.S_ISREG(os.lstat(companion).st_mode):
            raise StoreError(f"{place}: '{printable(companion.name)}' is not a regular file; remove it")
    for trial in range(COPY_TRIALS):
        if not _is_hot(Path(f"{real_path}-journal")):
            break
        if trial + 1 == COPY_TRIALS:
            raise StoreError(
                f"{place}: a write was interrupted or is under way (its -journal is not empty); "
                "open it once with its tracker, or try again"
            )
        time.sleep(COPY_PAUSE_S)
    wal = Path(f"{real_path}-wal")
    return wal if is_file(wal) else None


def _is_hot(journal: Path) -> bool:
    if not is_file(journal):
        return False
    with open_file(journal) as file:
        return file.read(len(JOURNAL_MAGIC)) == JOURNAL_MAGIC


def _copy_unchanged(path: Path, wal: Path, folder: Path, place: str) -> Path:
    """Copy a database and its write-ahead log, which nobody may have written meanwhile."""
    copy = folder / "copy.db"
    for trial in range(COPY_TRIALS):
        state = _state(path), _state(wal)
        with open_file(path) as file, copy.open("wb") as copied:
            shutil.copyfileobj(file, copied, 1 << 20)
        with open_file(wal) as file, Path(f"{copy}-wal").open("wb") as copied:
            copied.writelines(_valid_frames(file))
        if state == (_state(path), _state(wal)):
            return copy
        time.sleep(COPY_PAUSE_S * (trial + 1))
    raise StoreError(f"{place}: it is written all the time; compare again later, or copy it")


def _valid_frames(file: io.BufferedReader) -> Iterator[bytes]:
    """Yield the header of a write-ahead log and its frames, up to the first of an older log."""
    header = file.read(32)
    page_size, salt = int.from_bytes(header[8:12]), header[16:24]
    if header[:3] == WAL_MAGIC and page_size in (1 << power for power in range(9, 17)):
        yield header
        while (frame := file.read(24 + page_size))[8:16] == salt:
            yield frame


def _state(path: Path) -> tuple[int, int]:
    with wrap_read_errors(path):
        status = path.stat()
        return status.st_size, status.st_mtime_ns
