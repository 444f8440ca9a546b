"""Locks that let one launcher at a time own an experiment's directory.

On the same machine, the kernel's lock on the file shows at once whether the owner is alive. An owner on
another machine cannot be checked: it touches the file every few seconds and loses the lock when its last
touch is too old. Until then only `take_over` replaces it.
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
from abrun.runs import files
from abrun.runs.owner import Owner, this_process_fields

LOCK = "launcher.lock"
REFRESH_EVERY_S = 15.0
# Early: if launchers on two machines begin at once, the first to write has to notice the second.
FIRST_REFRESH_S = 1.0
EXPIRES_AFTER_S = 180.0  # since the last touch; allows for clocks that differ by two minutes
POLL_S = 0.1
OWNER_BYTES = 512  # small enough that a reader sees all of it or nothing


class LockedError(StoreError):
    """Another launcher owns the directory."""


class TakenOverError(StoreError):
    """Another launcher has taken over the directory, so this one must stop its runs."""


class Lease:
    """A launcher's lock on a directory: `acquire` it, `refresh` it repeatedly, then `close` it."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK
        self._token = uuid.uuid4().hex
        self._file: int | None = None
        self._next_refresh_s = 0.0

    def acquire(self, *, take_over: bool = False) -> str | None:
        """Lock the directory or raise LockedError; return a note if a previous owner lost the lock.

        `take_over` also replaces an owner on another machine that may be alive; it stops at its next
        `refresh`.
        """
        with files.wrap_write_errors(self._path):
            files.make_folder(self._path.parent)
            file = files.open_without_links(self._path, os.O_RDWR | os.O_CREAT)
        try:
            with files.wrap_write_errors(self._path):
                previous_owner = self._find_previous_owner(file, _try_kernel_lock(file), take_over)
                self._write_owner(file)
        except BaseException:
            os.close(file)
            raise
        self._file, self._next_refresh_s = file, time.monotonic() + FIRST_REFRESH_S
        if previous_owner is None:
            return None
        why = " (--take-over)" if take_over else ", which no longer renews it"
        why = ", which has ended" if previous_owner.shares_kernel else why
        return f"took over the lock of {previous_owner}{why}"

    def refresh(self) -> None:
        """Renew the lease; cheap enough to call often. Raises TakenOverError if it is lost."""
        if self._file is None or time.monotonic() < self._next_refresh_s:
            return
        self._next_refresh_s = time.monotonic() + REFRESH_EVERY_S
        self._check_ownership()
        with contextlib.suppress(OSError):  # the next refresh tries again
            os.utime(self._file)
        # A lease that was taken over lacks the kernel's lock until its old owner has ended.
        _try_kernel_lock(self._file)

    def close(self) -> None:
        """Release the lease if it is held."""
        if self._file is None:
            return
        with contextlib.suppress(OSError, TakenOverError):
            self._check_ownership()
            os.ftruncate(self._file, 0)  # not unlinked: a waiting launcher may have it open
        os.close(self._file)
        self._file = None

    def _find_previous_owner(self, file: int, locked: bool | None, take_over: bool) -> Owner | None:
        """Return the owner that has lost the lock, or None. Raises LockedError if an owner holds it."""
        owner = _parse_owner(os.pread(file, 4096, 0))
        if not _is_at(file, self._path) or (owner is None and locked is False):
            raise LockedError(f"{self._path}: another launcher is starting in this directory")
        if owner is None or (owner.shares_kernel and _has_ended(owner, locked)):
            return owner
        if not owner.shares_kernel:
            # The last touch, compared with a new file's time on the same file system
            with tempfile.TemporaryFile(dir=self._path.parent) as probe:
                untouched_s = os.fstat(probe.fileno()).st_mtime - os.fstat(file).st_mtime
            if take_over or untouched_s > EXPIRES_AFTER_S:
                return owner
        remedy = f"stop it with: kill {owner.pid}" if owner.is_visible else "stop it there"
        remedy += "" if owner.shares_kernel else ", or take over with --take-over"
        raise LockedError(f"{self._path}: {owner} is already launching this; wait for it, {remedy}")

    def _write_owner(self, file: int) -> None:
        owner_fields = {**this_process_fields(), "token": self._token, "started_s": time.time()}
        line = json.dumps(owner_fields).ljust(OWNER_BYTES - 1).encode() + b"\n"
        try:
            written = os.pwrite(file, line, 0)
            while written < len(line):  # after a short write, the next one raises the disk's error
                written += os.pwrite(file, line[written:], written)
        except OSError:
            with contextlib.suppress(OSError):
                self._path.unlink()  # on a full disk, do not leave an empty file
            raise

    def _check_ownership(self) -> None:
        try:
            # Opening the file again makes a network file system ask its server.
            content = files.read_regular(self._path, 4096)
        except OSError:
            return  # possibly removed by hand: nobody has taken over
        if self._token.encode() not in content:
            owner = _parse_owner(content)
            raise TakenOverError(
                f"{self._path}: {owner or 'another launcher'} has taken over, so this launcher stops its runs"
            )


@contextlib.contextmanager
def launcher_lock(
    directory: Path, *, take_over: bool = False, say: Callable[[str], object] = lambda line: None
) -> Iterator[Lease]:
    """Lock a directory while its runs are launched. Raises LockedError, naming the owner."""
    lease = Lease(directory)
    note = lease.acquire(take_over=take_over)
    try:
        if note:
            say(note)
        yield lease
    finally:
        lease.close()


@contextlib.contextmanager
def file_lock(path: Path, wait_s: float = 20.0) -> Iterator[None]:
    """Lock a file for a read-modify-write. Raises LockedError after waiting `wait_s` seconds."""
    deadline_s = time.monotonic() + wait_s
    while True:
        with files.wrap_write_errors(path):
            file = files.open_without_links(path, os.O_RDWR)
        # If the path no longer names this file, it was replaced meanwhile: try again.
        if _try_kernel_lock(file) is not False and _is_at(file, path):
            break
        os.close(file)
        if time.monotonic() > deadline_s:
            raise LockedError(f"{path}: another process is changing it; wait for it and try again")
        time.sleep(POLL_S)
    try:
        yield
    finally:
        os.close(file)


@contextlib.contextmanager
def folder_lock(folder: Path, command: str) -> Iterator[None]:
    """Create a folder of results and lock it for one `command`. Raises LockedError if it is locked.

    Only the kernel's lock is used, which ends with its process: such commands run on one machine.
    """
    with files.wrap_write_errors(folder):
        files.make_folder(folder)
        lock = os.open(folder, os.O_RDONLY)
    try:
        if _try_kernel_lock(lock) is False:
            raise LockedError(
                f"{folder}: another {command} is working there; wait for it, or give another --output"
            )
        yield
    finally:
        os.close(lock)


def describe_launcher(directory: Path) -> str | None:
    """Return a description of the process that launches an experiment; None if there is none."""
    try:
        owner = find_owner(directory)
    except files.UnreadableError:
        return f"unknown, {LOCK} cannot be read"
    return None if owner is None else str(owner)


def find_owner(directory: Path) -> Owner | None:
    """Return the process that launches an experiment; None if there is none or its lease has expired."""
    path = directory / LOCK
    try:
        owner, untouched_s = _parse_owner(files.read_regular(path, 4096)), time.time() - path.stat().st_mtime
    except PermissionError:
        raise files.unreadable_error(path) from None
    except OSError:
        return None
    if owner is None or owner.is_gone:
        return None
    return None if untouched_s > EXPIRES_AFTER_S and not owner.is_visible else owner


def _parse_owner(content: bytes) -> Owner | None:
    """Return the owner in a lock file; None if it is empty or incomplete."""
    try:
        owner = TypeAdapter(Owner).validate_json(content)
    except ValidationError:
        return None
    return owner if owner.is_known else None


def _try_kernel_lock(file: int) -> bool | None:
    """Try to take the kernel's lock; return None if the file system does not support locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(file: int, path: Path) -> bool:
    """Return True if the path still names the open file."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _has_ended(owner: Owner, locked: bool | None) -> bool:
    """Return True if an owner on this machine no longer holds its lock."""
    if locked is not False and owner.is_visible and owner.process_started is not None:
        return owner.is_gone
    return bool(locked)
