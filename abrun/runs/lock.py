"""One launcher at a time: who owns a directory while it launches what is there.

A lock is a lease. Its owner touches the file every few seconds, and one that no longer does has lost it: a
machine that is gone, or a container that came back under another name, blocks nothing. On one machine the
kernel's lock on the file tells at once whether the owner lives. For an owner on another machine its touches
are waited for, by this machine's clock alone, so that clocks need not agree.
"""

import contextlib
import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from abrun.errors import StoreError
from abrun.messages import sentence
from abrun.reasons import Code, Reason
from abrun.regular_files import read_regular
from abrun.runs.access import UnreadableError, unreadable
from abrun.runs.files import explained, make_folder, open_in_place
from abrun.runs.owner import Owner, this_process

LOCK = "launcher.lock"
BEAT_S = 15.0  # from one touch of an owner to the next
LEASE_S = 120.0  # without a touch, and the lock is anybody's
SETTLE_S = 1.0  # of two on two machines that begin at once the first to write finds the second
POLL_S = 1.0
CLOCKS_DIFFER_S = 60.0
ONE_WRITE = 512  # bytes: a reader sees all of it or nothing


class Locked(StoreError):
    """Another launcher owns the directory. `alive`: beyond doubt; otherwise it is worth asking again."""

    def __init__(self, reason: Reason, *, alive: bool) -> None:
        super().__init__(reason)
        self.alive = alive


class TakenOverError(StoreError):
    """Another launcher has taken over the directory: this one must stop what it runs there."""


class Lease:
    """A launcher's claim to a directory: `acquire`, then `refresh` again and again, then `close`."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK
        self._token = uuid.uuid4().hex
        self._file: int | None = None
        self._next_beat_s = 0.0
        self._seen: object = None  # the owner elsewhere and its last touch, when they were last looked at
        self._seen_s = 0.0  # since when they are so, by the clock of this process

    def acquire(self, *, take_over: bool = False) -> Reason | None:
        """Own the directory, or raise Locked; returns a note on the owner that this one follows.

        Whether an owner elsewhere still lives, a later call can tell. `take_over` does not wait for that.
        """
        with explained(self._path):
            make_folder(self._path.parent)
            file = open_in_place(self._path, os.O_RDWR | os.O_CREAT)
        try:
            before = self._displaced(file, _kernel_lock(file), take_over)
            with explained(self._path):
                if os.fstat(file).st_nlink > 1:  # what its other name holds is not ours to change
                    file = self._replaced(file)
                self._write_owner(file)
            if before and not before.shares_kernel:
                time.sleep(SETTLE_S)
                try:
                    self._check_mine()
                except TakenOverError:  # nothing runs yet that would have to stop
                    raise Locked(
                        Code.LOCKED(path=self._path, problem="launcher was faster"), alive=True
                    ) from None
        except BaseException:
            os.close(file)
            raise
        self._file, self._next_beat_s = file, time.monotonic() + SETTLE_S
        if before is None:
            return None
        return Code.LOCK_TAKEN_OVER(owner=str(before), is_gone=before.shares_kernel, as_asked=take_over)

    def refresh(self) -> None:
        """Keep the lease; cheap, however often it is called. Raises TakenOverError where it is lost."""
        if self._file is None or time.monotonic() < self._next_beat_s:
            return
        self._next_beat_s = time.monotonic() + BEAT_S
        self._check_mine()
        with contextlib.suppress(OSError):  # the next touch makes good what this one misses
            os.utime(self._file)
        _kernel_lock(self._file)  # until its old owner ended, a lease that was taken over was without it

    def close(self) -> None:
        """Give the lease back, where it is held."""
        if self._file is None:
            return
        with contextlib.suppress(OSError, TakenOverError):
            self._check_mine()
            os.ftruncate(self._file, 0)  # not unlinked: a waiting launcher may have it open
        os.close(self._file)
        self._file = None

    def _displaced(self, file: int, locked: bool | None, take_over: bool) -> Owner | None:
        """The owner that has lost the lock, None where there is none. Raises Locked where it has not."""
        try:
            replaced = not os.path.samestat(os.fstat(file), self._path.stat())
        except FileNotFoundError:
            replaced = True
        content = os.pread(file, 4096, 0)
        owner = _owner_in(content)
        if replaced or (owner is None and locked is False):
            raise Locked(
                Code.LOCKED(path=self._path, problem="launcher begins here just now"), alive=not replaced
            )
        if owner is None:
            return None
        alive = _lives(owner, locked)
        if alive is None:
            alive = False if take_over else self._touched(content, os.fstat(file).st_mtime_ns)
        if alive is False:
            return owner
        reason = Code.LAUNCHED_BY_ANOTHER(
            path=self._path,
            owner=str(owner),
            pid=owner.pid if owner.is_seen_from_here else None,
            may_take_over=not owner.shares_kernel,
        )
        raise Locked(reason, alive=bool(alive))

    def _replaced(self, file: int) -> int:
        """Put an empty file in the place of the lock that this process holds; returns it, locked."""
        try:
            self._path.unlink()
            new = open_in_place(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            raise Locked(Code.LOCKED(path=self._path, problem="launcher was faster"), alive=True) from None
        if _kernel_lock(new) is False:
            os.close(new)
            raise Locked(Code.LOCKED(path=self._path, problem="launcher was faster"), alive=True)
        os.close(file)
        return new

    def _touched(self, content: bytes, touched_ns: int) -> bool | None:
        """Whether an owner elsewhere lives, by what it did while this process looked; None: too early."""
        now, seen = time.monotonic(), (content, touched_ns)
        if self._seen is not None and seen == self._seen:
            return False if now - self._seen_s > LEASE_S else None
        known = self._seen is not None
        self._seen, self._seen_s = seen, now
        return True if known else None

    def _write_owner(self, file: int) -> None:
        mine = {**this_process(), "token": self._token, "started_s": time.time()}
        line = json.dumps(mine).ljust(ONE_WRITE - 1).encode() + b"\n"
        try:
            written = os.pwrite(file, line, 0)
            while written < len(line):  # a disk that takes less says why the next time
                written += os.pwrite(file, line[written:], written)
        except OSError:
            with contextlib.suppress(OSError):
                self._path.unlink()  # a full disk: leave no empty file behind
            raise

    def _check_mine(self) -> None:
        try:
            content = read_regular(self._path, 4096)  # opened again: that is what asks a file server
        except OSError:
            return  # removed by hand, perhaps: nobody has taken it
        if _token_in(content) != self._token:
            owner = _owner_in(content)
            raise TakenOverError(Code.TAKEN_OVER(path=self._path, owner=str(owner or "another launcher")))


@contextlib.contextmanager
def launcher_lock(
    directory: Path, *, take_over: bool = False, say: Callable[[str], object] = lambda line: None
) -> Iterator[Lease]:
    """Own a directory while launching what is there. Raises Locked naming an owner that lives.

    An owner on another machine is given LEASE_S seconds for a sign of life, which is said.
    """
    lease = Lease(directory)
    said = False
    while True:
        try:
            note = lease.acquire(take_over=take_over)
            break
        except Locked as error:
            if error.alive:
                raise
            if not said:
                say(f"{error}; waiting up to {LEASE_S:.0f} s for a sign of life")
            said = True
            time.sleep(POLL_S)
    try:
        if note:
            say(sentence(note))
        yield lease
    finally:
        lease.close()


@contextlib.contextmanager
def file_lock(path: Path, wait_s: float = 20.0) -> Iterator[None]:
    """Be the only one who changes a file: read, change and write it inside. Raises Locked after `wait_s`.

    A folder beside the file holds the lock, and goes with it.
    """
    directory = path.with_name(f".{path.name}.lock")
    lease, until = Lease(directory), time.monotonic() + wait_s
    while True:
        try:
            lease.acquire()
            break
        except Locked as error:
            if time.monotonic() > until:
                reason = Code.FILE_LOCKED(path=path, problem=error.reason)
                raise Locked(reason, alive=error.alive) from None
            time.sleep(POLL_S / 10)
    try:
        yield
    finally:
        shutil.rmtree(directory, ignore_errors=True)  # while it is held: who waits finds that it is gone
        lease.close()


@contextlib.contextmanager
def folder_lock(folder: Path, command: str) -> Iterator[None]:
    """Be the only `command` that works in a folder of results, which is made. Raises Locked where one does.

    By the kernel's lock alone, which nothing outlives: such work is done on one machine.
    """
    with explained(folder):
        make_folder(folder)
        lock = os.open(folder, os.O_RDONLY)
    try:
        if _kernel_lock(lock) is False:
            raise Locked(Code.FOLDER_LOCKED(folder=folder, command=command), alive=True)
        yield
    finally:
        os.close(lock)


def launcher_of(directory: Path) -> str | None:
    """Who launches an experiment now, for people; None where nobody does, or its lease has run out."""
    try:
        owner = owner_of(directory)
    except UnreadableError:
        return f"unknown, {LOCK} cannot be read"
    return None if owner is None else str(owner)


def owner_of(directory: Path) -> Owner | None:
    """The process that launches an experiment now; None where none does, or its lease has run out."""
    path = directory / LOCK
    try:
        owner, untouched_s = _owner_in(read_regular(path, 4096)), time.time() - path.stat().st_mtime
    except PermissionError:
        raise unreadable(path) from None
    except OSError:
        return None
    if owner is None or owner.is_gone:
        return None
    expired = not owner.is_seen_from_here and untouched_s > LEASE_S + CLOCKS_DIFFER_S
    return None if expired else owner


def _owner_in(content: bytes) -> Owner | None:
    """Whom a lock file names; None: nobody, or a writer that died before its first byte."""
    try:
        owner = TypeAdapter(Owner).validate_json(content)
    except ValidationError:
        return None
    return owner if owner.is_known else None


def _token_in(content: bytes) -> object:
    try:
        owner = json.loads(content)
    except ValueError:
        return None
    return owner.get("token") if isinstance(owner, dict) else None


def _kernel_lock(file: int) -> bool | None:
    """Whether this process now holds the kernel's lock; None where the file system has none."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _lives(owner: Owner, locked: bool | None) -> bool | None:
    """Whether an owner holds its lock still; None where only its touches can tell."""
    if not owner.shares_kernel:
        return None
    if locked is False:
        return True
    if owner.is_seen_from_here and owner.process_started is not None:
        return not owner.is_gone
    return False if locked else None
