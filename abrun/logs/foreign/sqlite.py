"""SQLite files of strangers: stored tables alone, with bounds on work, lengths and texts."""

import contextlib
import os
import shutil
import sqlite3
import stat
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from abrun.errors import StoreError
from abrun.logs.foreign.files import open_file, wrap_read_errors
from abrun.logs.foreign.values import MAX_RECORD_BYTES
from abrun.runs.files import is_file
from abrun.runs.redaction import printable

SUFFIXES = (".db", ".sqlite", ".sqlite3")
SQLITE_MAGIC = b"SQLite format 3\x00"
JOURNAL_MAGIC = b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7"
STEPS_BETWEEN_CHECKS = 10_000  # of SQLite's virtual machine, well below a millisecond
BASE_STEPS = 1 << 21
STEPS_PER_BYTE = 4  # real tables take less than one
COPY_TRIALS, COPY_PAUSE_S = 5, 0.2


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


def holds_tables(path: Path, tables: Mapping[str, Collection[str]]) -> bool:
    """Return True for a SQLite file that has tables with these columns."""
    if path.suffix.lower() not in SUFFIXES:
        return False
    for in_place in (True, False):  # a new file may have its tables in its write-ahead log only
        try:
            with open_file(path) as file:
                if file.read(len(SQLITE_MAGIC)) != SQLITE_MAGIC:
                    return False
            with open_sqlite(path, in_place=in_place) as database:
                if all(database.columns(table) >= {*columns} for table, columns in tables.items()):
                    return True
        except StoreError:
            continue
    return False


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
        for source, target in ((path, copy), (wal, Path(f"{copy}-wal"))):
            with open_file(source) as file, target.open("wb") as copied:
                shutil.copyfileobj(file, copied, 1 << 20)
        if state == (_state(path), _state(wal)):
            return copy
        time.sleep(COPY_PAUSE_S * (trial + 1))
    raise StoreError(f"{place}: it is written all the time; compare again later, or copy it")


def _state(path: Path) -> tuple[int, int]:
    with wrap_read_errors(path):
        status = path.stat()
        return status.st_size, status.st_mtime_ns
