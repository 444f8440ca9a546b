"""Read permissions of the files that abrun writes, and the error for a file that this user may not read.

A file keeps the readers of the file that it replaces. A new file gets the readers of the record above it
(`config.json` of a run, `experiment.json` of an experiment), so one `chmod -R g+rX` also applies to files
written later. Without a record, a folder with the set-group-ID bit shares new files with its group. Only
the owner ever has write permission.
"""

import contextlib
import errno
import os
import pwd
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from abrun.errors import StoreError
from abrun.messages.codes import Code
from abrun.runs import layout
from abrun.runs.regular_files import is_directory

PUBLIC_MODE = 0o666  # reports and other files to share; the umask applies
PRIVATE_MODE = 0o600  # configurations, command lines and logs can hold secrets
READ_BITS = stat.S_IRGRP | stat.S_IROTH
MAX_PARENTS = 4  # from a run's deepest file, checkpoints/step-000001/state.json, to its experiment


class UnreadableError(StoreError):
    """A file or folder that this user has no permission to read, so its content is unknown."""


class Access(NamedTuple):
    """Permission bits and the group that they apply to. Only the bits for group and others matter."""

    bits: int
    group: int


def existing_access(path: Path, mode: int) -> Access | None:
    """Return the access that a file of `mode` keeps from the file it replaces; None if there is no file."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    readers = status.st_mode & (mode | READ_BITS) & (stat.S_IRWXG | stat.S_IRWXO)
    return Access(mode & stat.S_IRWXU | readers, status.st_gid)


def inherited_access(path: Path) -> Access:
    """Return the access of a new file at `path`: that of the run or experiment that it belongs to."""
    for folder in path.parents[:MAX_PARENTS] if path.name != layout.EXPERIMENT else ():
        # A config.json alone proves nothing: any project may have one.
        is_run = os.path.isdir(folder / layout.ATTEMPTS)
        for name in (layout.CONFIG, layout.EXPERIMENT) if is_run else (layout.EXPERIMENT,):
            with contextlib.suppress(OSError):
                record = os.lstat(folder / name)
                if stat.S_ISREG(record.st_mode):
                    return Access(record.st_mode & READ_BITS, record.st_gid)
    with contextlib.suppress(OSError):
        folder = os.stat(path.parent)
        if folder.st_mode & stat.S_ISGID and folder.st_mode & stat.S_IRGRP:
            return Access(stat.S_IRGRP, folder.st_gid)
    return Access(0, -1)


def grant(file: int, access: Access) -> None:
    """Set group and permissions of an open file or folder that this process has just created.

    If the group cannot be set, the process's own group gets no extra permissions.
    """
    status = os.fstat(file)
    current_bits = stat.S_IMODE(status.st_mode)
    bits = access.bits | current_bits & stat.S_ISGID
    if access.group not in (-1, status.st_gid):
        try:
            os.fchown(file, -1, access.group)
        except OSError:
            bits = bits & ~stat.S_IRWXG | current_bits & stat.S_IRWXG
    if bits != current_bits:
        with contextlib.suppress(OSError):  # file systems without permissions
            os.fchmod(file, bits)


def share_new_file(file: int, path: Path) -> None:
    """Give a file just created at `path` the readers of the record above it."""
    bits, group = inherited_access(path)
    grant(file, Access(stat.S_IMODE(os.fstat(file).st_mode) | bits, group))


def share_new_folder(path: Path, *, private: bool = False) -> int:
    """Let the readers of the record above enter a folder that was just created; `private`: nobody else.

    Returns the bits granted to group and others.
    """
    bits, group = inherited_access(path)
    enter_bits = bits | bits >> 2  # the execute bit for every read bit
    with contextlib.suppress(OSError):
        folder = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
        try:
            current_bits = stat.S_IRWXU if private else stat.S_IMODE(os.fstat(folder).st_mode)
            grant(folder, Access(current_bits | enter_bits, group))
        finally:
            os.close(folder)
    return enter_bits


def unreadable_error(path: Path) -> UnreadableError:
    """Return the error for a path that this user may not read: the file, its owner and how to share it."""
    denied_path = next((parent for parent in reversed(path.parents) if _is_inaccessible(parent)), path)
    shared_folder = _shared_folder(denied_path)
    try:
        status = os.lstat(denied_path)
    except OSError:
        return UnreadableError(Code.PERMISSION_DENIED(path=denied_path, owner=None, fix=None))
    if status.st_uid == os.geteuid():
        return UnreadableError(
            Code.PERMISSION_DENIED(path=denied_path, owner=None, fix=f"chmod -R u+rX {shared_folder}")
        )
    is_own_group = status.st_gid in (os.getegid(), *os.getgroups())
    change_group = "" if is_own_group else f"chgrp -R GROUP {shared_folder} && "
    fix = f"{change_group}chmod -R g+rX {shared_folder}"
    return UnreadableError(Code.PERMISSION_DENIED(path=denied_path, owner=_user_name(status.st_uid), fix=fix))


def read_error(path: Path, error: OSError) -> StoreError:
    """Return the StoreError for an operating-system error raised while reading `path`."""
    if isinstance(error, PermissionError):
        return unreadable_error(path)
    if error.errno == errno.ELOOP and os.path.islink(path):
        return StoreError(Code.LINK_IN_PLACE_OF_FILE(path=path))
    return StoreError(Code.UNREADABLE(path=path, error=error.strerror or str(error)))


@contextlib.contextmanager
def ignore_damage() -> Iterator[None]:
    """Suppress StoreError for a missing or damaged file, but not UnreadableError."""
    try:
        yield
    except UnreadableError:
        raise
    except StoreError:
        pass


def require_access(folder: Path) -> None:
    """Raise UnreadableError for a folder that this user may not list or enter."""
    try:
        os.listdir(folder)
    except PermissionError:
        raise unreadable_error(folder) from None
    except OSError:
        return
    if _is_inaccessible(folder):
        raise unreadable_error(folder)


def has_permission(path: Path | str, mode: int) -> bool:
    """Return True if this process may read (os.R_OK) the path or enter (os.X_OK) the folder."""
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def _is_inaccessible(folder: Path) -> bool:
    return os.path.isdir(folder) and not has_permission(folder, os.X_OK)


def _shared_folder(path: Path) -> str:
    """Return the folder to share, quoted for a shell: the experiment's, else the path or its parent."""
    for folder in (path, *path.parents[:MAX_PARENTS]):
        with contextlib.suppress(OSError):
            if stat.S_ISREG(os.lstat(folder / layout.EXPERIMENT).st_mode):
                return shlex.quote(str(folder))
    return shlex.quote(str(path if is_directory(path) else path.parent))


def _user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"
