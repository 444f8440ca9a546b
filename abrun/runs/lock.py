"""One launcher at a time: who owns a directory while it launches what is there.

On one machine the kernel's lock on the file tells at once whether the owner lives. An owner on another
machine cannot be asked: it touches the file every few seconds, and has lost the lock once the file system
says that it no longer does. Before that only `take_over` claims its place.
"""

import contextlib
import fcntl
import json
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from abrun.errors import StoreError
from abrun.messages import sentence
from abrun.reasons import Code, Reason
from abrun.regular_files import read_regular
from abrun.runs.access import UnreadableError, unreadable_error
from abrun.runs.files import make_folder, open_without_links, wrap_write_errors
from abrun.runs.owner import Owner, this_process_fields

LOCK = "launcher.lock"
REFRESH_EVERY_S = 15.0  # from one touch of an owner to the next
FIRST_REFRESH_S = 1.0  # of two on two machines that begin at once the first to write finds the second
EXPIRES_AFTER_S = 180.0  # without a touch, and the lock is anybody's: clocks may differ by two minutes
POLL_S = 0.1
OWNER_BYTES = 512  # bytes: a reader sees all of it or nothing


class LockedError(StoreError):
    """Another launcher owns the directory."""


class TakenOverError(StoreError):
    """Another launcher has taken over the directory: this one must stop what it runs there."""


class Lease:
    """A launcher's claim to a directory: `acquire`, then `refresh` again and again, then `close`."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK
        self._token = uuid.uuid4().hex
        self._file: int | None = None
        self._next_refresh_s = 0.0

    def acquire(self, *, take_over: bool = False) -> Reason | None:
        """Own the directory, or raise Locked; returns a note on the owner that this one follows.

        `take_over`: also from an owner on another machine that may live; it stops at its next `refresh`.
        """
        with wrap_write_errors(self._path):
            make_folder(self._path.parent)
            file = open_without_links(self._path, os.O_RDWR | os.O_CREAT)
        try:
            with wrap_write_errors(self._path):
                previous_owner = self._find_previous_owner(file, _try_kernel_lock(file), take_over)
                self._write_owner(file)
        except BaseException:
            os.close(file)
            raise
        self._file, self._next_refresh_s = file, time.monotonic() + FIRST_REFRESH_S
        if previous_owner is None:
            return None
        return Code.LOCK_TAKEN_OVER(
            owner=str(previous_owner), is_gone=previous_owner.shares_kernel, as_asked=take_over
        )

    def refresh(self) -> None:
        """Keep the lease; cheap, however often it is called. Raises TakenOverError where it is lost."""
        if self._file is None or time.monotonic() < self._next_refresh_s:
            return
        self._next_refresh_s = time.monotonic() + REFRESH_EVERY_S
        self._check_ownership()
        with contextlib.suppress(OSError):  # the next touch makes good what this one misses
            os.utime(self._file)
        _try_kernel_lock(self._file)  # until its old owner ended, a lease that was taken over was without it

    def close(self) -> None:
        """Give the lease back, where it is held."""
        if self._file is None:
            return
        with contextlib.suppress(OSError, TakenOverError):
            self._check_ownership()
            os.ftruncate(self._file, 0)  # not unlinked: a waiting launcher may have it open
        os.close(self._file)
        self._file = None

    def _find_previous_owner(self, file: int, locked: bool | None, take_over: bool) -> Owner | None:
        """The owner that has lost the lock, None where there is none. Raises Locked where it has not."""
        owner = _parse_owner(os.pread(file, 4096, 0))
        if not _is_at(file, self._path) or (owner is None and locked is False):
            raise LockedError(Code.LOCKED(path=self._path, problem="launcher begins here just now"))
        if owner is None or _is_free(owner, locked, take_over or _is_expired(file, self._path.parent)):
            return owner
        raise LockedError(
            Code.LAUNCHED_BY_ANOTHER(
                path=self._path,
                owner=str(owner),
                pid=owner.pid if owner.is_visible else None,
                may_take_over=not owner.shares_kernel,
            )
        )

    def _write_owner(self, file: int) -> None:
        owner_fields = {**this_process_fields(), "token": self._token, "started_s": time.time()}
        line = json.dumps(owner_fields).ljust(OWNER_BYTES - 1).encode() + b"\n"
        try:
            written = os.pwrite(file, line, 0)
            while written < len(line):  # a disk that takes less says why the next time
                written += os.pwrite(file, line[written:], written)
        except OSError:
            with contextlib.suppress(OSError):
                self._path.unlink()  # a full disk: leave no empty file behind
            raise

    def _check_ownership(self) -> None:
        try:
            content = read_regular(self._path, 4096)  # opened again: that is what asks a file server
        except OSError:
            return  # removed by hand, perhaps: nobody has taken it
        if self._token.encode() not in content:
            owner = _parse_owner(content)
            raise TakenOverError(Code.TAKEN_OVER(path=self._path, owner=str(owner or "another launcher")))


@contextlib.contextmanager
def launcher_lock(
    directory: Path, *, take_over: bool = False, say: Callable[[str], object] = lambda line: None
) -> Iterator[Lease]:
    """Own a directory while launching what is there. Raises Locked naming the owner."""
    lease = Lease(directory)
    note = lease.acquire(take_over=take_over)
    try:
        if note:
            say(sentence(note))
        yield lease
    finally:
        lease.close()


@contextlib.contextmanager
def file_lock(path: Path, wait_s: float = 20.0) -> Iterator[None]:
    """Be the only one who changes a file: read, change and write it inside. Raises Locked after `wait_s`."""
    deadline_s = time.monotonic() + wait_s
    while True:
        with wrap_write_errors(path):
            file = open_without_links(path, os.O_RDWR)
        if _try_kernel_lock(file) is not False and _is_at(file, path):  # else it has been replaced meanwhile
            break
        os.close(file)
        if time.monotonic() > deadline_s:
            raise LockedError(Code.FILE_LOCKED(path=path))
        time.sleep(POLL_S)
    try:
        yield
    finally:
        os.close(file)


@contextlib.contextmanager
def folder_lock(folder: Path, command: str) -> Iterator[None]:
    """Be the only `command` that works in a folder of results, which is made. Raises Locked where one does.

    By the kernel's lock alone, which nothing outlives: such work is done on one machine.
    """
    with wrap_write_errors(folder):
        make_folder(folder)
        lock = os.open(folder, os.O_RDONLY)
    try:
        if _try_kernel_lock(lock) is False:
            raise LockedError(Code.FOLDER_LOCKED(folder=folder, command=command))
        yield
    finally:
        os.close(lock)


def describe_launcher(directory: Path) -> str | None:
    """Who launches an experiment now, for people; None where nobody does, or its lease has run out."""
    try:
        owner = find_owner(directory)
    except UnreadableError:
        return f"unknown, {LOCK} cannot be read"
    return None if owner is None else str(owner)


def find_owner(directory: Path) -> Owner | None:
    """The process that launches an experiment now; None where none does, or its lease has run out."""
    path = directory / LOCK
    try:
        owner, untouched_s = _parse_owner(read_regular(path, 4096)), time.time() - path.stat().st_mtime
    except PermissionError:
        raise unreadable_error(path) from None
    except OSError:
        return None
    if owner is None or owner.is_gone:
        return None
    return None if untouched_s > EXPIRES_AFTER_S and not owner.is_visible else owner


def _parse_owner(content: bytes) -> Owner | None:
    """Whom a lock file names; None: nobody, or a writer that died before its first byte."""
    try:
        owner = TypeAdapter(Owner).validate_json(content)
    except ValidationError:
        return None
    return owner if owner.is_known else None


def _try_kernel_lock(file: int) -> bool | None:
    """Whether this process now holds the kernel's lock; None where the file system has none."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(file: int, path: Path) -> bool:
    """Return True unless another file has taken the place of this one."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _is_expired(file: int, folder: Path) -> bool:
    """Return True where the last touch is long ago, by the clock that touches a new file beside it."""
    with tempfile.TemporaryFile(dir=folder) as probe:
        return os.fstat(probe.fileno()).st_mtime - os.fstat(file).st_mtime > EXPIRES_AFTER_S


def _is_free(owner: Owner, locked: bool | None, is_expired: bool) -> bool:
    """Return True where an owner holds its lock no longer; of one on another machine, where that is given."""
    if not owner.shares_kernel:
        return is_expired
    if locked is False:
        return False
    if owner.is_visible and owner.process_started is not None:
        return owner.is_gone
    return bool(locked)
