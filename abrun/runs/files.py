"""Safe files: regular ones alone, readable by the right users, written atomically; errors of one line.

Reading cannot block: opening a pipe could wait forever for a writer, and a device has no end, so only
regular files are read. Symbolic links are never followed in the store: a link in the place of a file is an
error, also when reading, since it could bring any file into a report.

A file keeps the readers of the file that it replaces. A new file gets the readers of the record above it
(`config.json` of a run, `experiment.json` of an experiment), so one `chmod -R g+rX` also applies to files
written later. Without a record, a folder with the set-group-ID bit shares new files with its group. Only
the owner ever has write permission.

A write survives a power loss: the content is synced first, then the name, then the folder.
"""

import contextlib
import errno
import hashlib
import io
import json
import math
import os
import pwd
import shlex
import socket
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from abrun.errors import StoreError
from abrun.runs import layout
from abrun.runs.owner import Owner
from abrun.runs.redaction import shortened
from abrun.runs.schemas import T, checked

MAX_FILE_BYTES = 1 << 26  # limit for files read at once
MAX_LINE_BYTES = 1 << 26
PUBLIC_MODE = 0o666  # reports and other files to share; the umask applies
PRIVATE_MODE = 0o600  # configurations, command lines and logs can hold secrets
READ_BITS = stat.S_IRGRP | stat.S_IROTH
MAX_PARENTS = 4  # from a run's deepest file, checkpoints/step-000001/state.json, to its experiment
# At most, whatever the umask: a user who can write into a run's folder controls what a resume starts.
FOLDER_MODE = 0o755
PARTIAL_SUFFIX = ".partial"
ABANDONED_AFTER_S = 3600.0
MAX_FOLDER_LEVELS = 3  # below an experiment's folder: arm, run, attempts
NEW_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
MAX_DEPTH = 64  # of nested mappings and lists, so that code walking them may recurse


# --- reading regular files ---


def exists(path: str | os.PathLike[str]) -> bool:
    """Return whether the path exists. Raises OSError if that cannot be determined.

    A file in an unsearchable folder is not reported as absent, as Path.exists does from Python 3.14 on.
    """
    return _file_mode(path) is not None


def is_file(path: str | os.PathLike[str]) -> bool:
    """Return whether the path is a regular file. Raises OSError like `exists`."""
    return stat.S_ISREG(_file_mode(path) or 0)


def is_directory(path: str | os.PathLike[str]) -> bool:
    """Return whether the path is a directory. Raises OSError like `exists`."""
    return stat.S_ISDIR(_file_mode(path) or 0)


def _file_mode(path: str | os.PathLike[str]) -> int | None:
    try:
        return os.stat(path).st_mode
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP):
            return None
        raise
    except ValueError:  # a NUL in the name
        return None


def open_regular(path: Path, extra_flags: int = 0) -> io.BufferedReader:
    """Open a regular file for reading. Raises OSError if it is missing or not a regular file."""
    return open(_open_descriptor(path, os.O_RDONLY | extra_flags), "rb")


@contextlib.contextmanager
def _opened(path: Path, flags: int, mode: int = 0) -> Iterator[int]:
    """Yield the descriptor of a file or folder, and close it."""
    file = os.open(path, flags, mode)
    try:
        yield file
    finally:
        os.close(file)


def _open_descriptor(path: Path, flags: int, mode: int = 0) -> int:
    """Open a regular file, without waiting for the other end of a pipe. Raises OSError for anything else."""
    file = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    # Check after opening: the path could refer to something else a moment later.
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def read_regular(path: Path, max_bytes: int | None = None, extra_flags: int = 0) -> bytes:
    """Return a file's content. Raises OSError like `open_regular`, and if it has more than `max_bytes`."""
    with open_regular(path, extra_flags) as file:
        if max_bytes is None:
            return file.read()
        size = os.fstat(file.fileno()).st_size  # do not read a file whose size exceeds the limit
        content = b"" if size > max_bytes else file.read(size + 1)
        if size < len(content):  # the file grows, or its file system reports no size
            content += file.read(max(0, max_bytes + 1 - len(content)))
    if max(size, len(content)) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes", str(path))
    return content


def read_tail(path: Path, num_bytes: int = 1 << 20) -> bytes:
    """Return the last bytes of a file. Raises OSError like `open_regular`."""
    with open_regular(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - num_bytes))
        return file.read(num_bytes)


def iter_lines(file: io.BufferedReader) -> Iterator[bytes]:
    """Yield the remaining lines with their newlines. Raises OSError for a line of MAX_LINE_BYTES."""
    while line := file.readline(MAX_LINE_BYTES):
        if len(line) == MAX_LINE_BYTES:
            raise OSError(errno.EFBIG, f"a line is longer than {MAX_LINE_BYTES} bytes", file.name)
        yield line


# --- who may read ---


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
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY
    with contextlib.suppress(OSError), _opened(path, flags) as folder:
        current_bits = stat.S_IRWXU if private else stat.S_IMODE(os.fstat(folder).st_mode)
        grant(folder, Access(current_bits | enter_bits, group))
    return enter_bits


def unreadable_error(path: Path) -> UnreadableError:
    """Return the error for a path that this user may not read: the file, its owner and how to share it."""
    denied_path = next((parent for parent in reversed(path.parents) if _is_inaccessible(parent)), path)
    problem = f"{denied_path}: cannot be read: Permission denied"
    try:
        status = os.lstat(denied_path)
    except OSError:
        return UnreadableError(f"{problem}; ask its owner to share it")

    # The folder to share: the experiment's, else the path or its parent
    folders = (denied_path, *denied_path.parents[:MAX_PARENTS])
    experiments = (folder for folder in folders if os.path.isfile(folder / layout.EXPERIMENT))
    folder = denied_path if is_directory(denied_path) else denied_path.parent
    shared = shlex.quote(str(next(experiments, folder)))
    if status.st_uid == os.geteuid():
        return UnreadableError(f"{problem}; allow it with: chmod -R u+rX {shared}")
    try:
        owner = pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        owner = f"user {status.st_uid}"
    command = f"chmod -R g+rX {shared}"
    if status.st_gid not in (os.getegid(), *os.getgroups()):
        command = f"chgrp -R GROUP {shared} && {command} (GROUP: one that you are in)"
    return UnreadableError(f"{problem}; ask its owner {owner} for: {command}")


def read_error(path: Path, error: OSError) -> StoreError:
    """Return the StoreError for an operating-system error raised while reading `path`."""
    if isinstance(error, PermissionError):
        return unreadable_error(path)
    if error.errno == errno.ELOOP and os.path.islink(path):
        return _link_error(path)
    return StoreError(f"{path}: cannot be read: {error.strerror or str(error)}")


def _link_error(path: Path) -> StoreError:
    return StoreError(f"{path}: is a symbolic link, but has to be a file; remove the link")


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


# --- writing ---


def write_json(
    path: Path, content: Mapping[str, Any], *, mode: int = PRIVATE_MODE, durable: bool = True
) -> None:
    """Write a JSON file atomically. Raises StoreError if disk or permissions do not allow it.

    Without `durable` the write is atomic for readers, but a power loss may leave the file empty or missing.
    """
    write_file(path, json_text(content), mode=mode, durable=durable)


def json_text(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of a JSON file, with NaN and Inf as strings."""
    return (json.dumps(encode_non_finite(content), indent=1, allow_nan=False) + "\n").encode()


def write_file(path: Path, content: bytes, *, mode: int = PRIVATE_MODE, durable: bool = True) -> None:
    """Write a file atomically; see write_json. It keeps the readers of the file that it replaces."""
    with wrap_write_errors(path):
        make_folder(path.parent)
        refuse_link(path)
        with _write_partial(path, content, mode, durable, existing_access(path, mode)) as partial:
            os.replace(partial, path)
        if durable:
            sync_folder(path.parent)


def create_file(path: Path, content: bytes) -> None:
    """Write a new file atomically. Raises FileExistsError if the name is taken.

    On a file system without hard links the file is empty for a moment, and stays empty if the process is
    killed in that moment.
    """
    with _write_partial(path, content, PRIVATE_MODE, durable=True) as partial:
        try:
            os.link(partial, path)
        except OSError as error:
            if error.errno not in NO_HARD_LINKS:
                raise
            os.close(os.open(path, NEW_FILE_FLAGS, PRIVATE_MODE))
            os.replace(partial, path)
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextlib.contextmanager
def _write_partial(
    path: Path, content: bytes, mode: int, durable: bool, access: Access | None = None
) -> Iterator[Path]:
    """Write a temporary file next to `path`, named after host and process; remove it after an error.

    `access`: the access of the file that it will replace; None: the access of a new file at `path`.
    """
    partial = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}{PARTIAL_SUFFIX}")
    partial.unlink(missing_ok=True)  # left by a killed process with the same id
    try:
        with _opened(partial, NEW_FILE_FLAGS, mode) as file:
            grant(file, access) if access else share_new_file(file, path)
            remaining = memoryview(content)
            while remaining:  # a write may take less than all
                written = os.write(file, remaining)
                if not written:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                remaining = remaining[written:]
            if durable:
                os.fsync(file)
        yield partial
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def remove_partial_files(folder: Path) -> None:
    """Remove the partial files of killed writers from the folder of an experiment or a run.

    A writer on another host cannot be checked, so its file has to be an hour old.
    """
    for parent, folders, names in os.walk(folder):
        # Deeper folders belong to the trainer and may be large.
        if len(Path(parent).relative_to(folder).parts) >= MAX_FOLDER_LEVELS:
            folders.clear()
        for path in (Path(parent, name) for name in partial_files(names)):
            with contextlib.suppress(OSError):
                host, _, number = path.name.removesuffix(PARTIAL_SUFFIX).rpartition(".")
                if not number.isdecimal():  # not named by abrun: possibly a trainer's file
                    continue
                if host.endswith(f".{socket.gethostname()}"):
                    is_abandoned = Owner(host=socket.gethostname(), pid=int(number)).is_gone
                else:
                    is_abandoned = time.time() - path.stat().st_mtime > ABANDONED_AFTER_S
                if is_abandoned:
                    path.unlink()


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, synced so that they survive a power loss."""
    missing = [folder for folder in (path, *path.parents) if not exists(folder)]
    for folder in reversed(missing):
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
        share_new_folder(folder)
        sync_folder(folder.parent)
    path.mkdir(exist_ok=True)  # raises FileExistsError if the path is not a folder


def make_private_folder(path: Path) -> int:
    """Create a folder that a library will write to, accessible only to the experiment's readers.

    Returns the umask that keeps the library's files private, too.
    """
    with wrap_write_errors(path):
        make_folder(path.parent)
        refuse_link(path)
        path.mkdir(mode=stat.S_IRWXU, exist_ok=True)
        return 0o077 & ~share_new_folder(path, private=True)


def share_written_file(path: Path) -> None:
    """Give a file written by a library the readers of the experiment."""
    with _opened(path, os.O_RDONLY | os.O_NOFOLLOW) as file:
        share_new_file(file, path)


def sync_file(path: Path) -> None:
    """Flush a file's content to the disk."""
    with _opened(path, os.O_RDONLY) as file:
        os.fsync(file)


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to the disk, if the file system supports it."""
    try:
        sync_file(path)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):
            raise


def refuse_link(path: Path) -> None:
    """Raise StoreError if a symbolic link takes the place of a store file: it could lead anywhere."""
    if path.is_symlink():
        raise _link_error(path)


def open_log(path: Path) -> BinaryIO:
    """Open a file for appending; see open_without_links. Raises StoreError."""
    with wrap_write_errors(path):
        return open(open_without_links(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "ab")


def open_without_links(path: Path, flags: int, mode: int = PRIVATE_MODE) -> int:
    """Open a file of the store without following links.

    With O_CREAT a new file gets `mode`, and the experiment's readers. Raises OSError unless the
    path is a regular file.
    """
    is_new = bool(flags & os.O_CREAT) and not os.path.lexists(path)
    file = _open_descriptor(path, flags | os.O_NOFOLLOW, mode)
    try:
        os.set_blocking(file, True)
        if is_new:
            share_new_file(file, path)
    except BaseException:
        os.close(file)
        raise
    return file


def fingerprint(path: Path) -> dict[str, Any]:
    """Return size and SHA-256 of a file. Raises OSError if it cannot be read."""
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def find_damage(path: Path, recorded: Any) -> str | None:
    """Return how a file differs from its recorded `fingerprint`; None if it does not."""
    if not isinstance(recorded, Mapping):
        return "has no recorded checksum"
    try:
        if path.stat().st_size != recorded.get("bytes"):
            return f"has {path.stat().st_size} bytes instead of the {recorded.get('bytes')} written"
        is_same = fingerprint(path) == dict(recorded)
        return None if is_same else "does not match its recorded checksum"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"


# --- checked reading ---


def read_json(path: Path, max_bytes: int = MAX_FILE_BYTES) -> dict[str, Any]:
    """Read a JSON file of the store. Raises StoreError if it is missing, too large or not a JSON object."""
    try:
        text = read_regular(path, max_bytes, os.O_NOFOLLOW)
        content = json.loads(text.decode("utf-8"))
    except FileNotFoundError:
        raise StoreError(f"{path}: no such file; is this a run directory of abrun?") from None
    except OSError as error:
        raise read_error(path, error) from None
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(content, dict):
        raise StoreError(f"{path}: got {type(content).__name__}; allowed: a JSON object")
    if is_too_deep(text, content):
        got = f"got {shortened(content)}, nested more than {MAX_DEPTH} levels deep"
        raise StoreError(f"{path}: {got}; restore it")
    return content


def read_json_or_empty(path: Path, max_bytes: int = MAX_FILE_BYTES) -> dict[str, Any]:
    """Return the content of a JSON file; empty if it is missing. Raises StoreError if it is not a file."""
    with wrap_read_errors(path):
        if is_file(path):
            return read_json(path, max_bytes)
        if exists(path):
            raise StoreError(f"{path}: not a file; move it away")
        return {}


def read_as(kind: type[T], path: Path, max_bytes: int = MAX_FILE_BYTES) -> T:
    """Return a JSON file as an instance of a dataclass; defaults if it is missing. Raises StoreError."""
    return checked(kind, read_json_or_empty(path, max_bytes), path)


def is_too_deep(text: bytes, content: Any) -> bool:
    """Return True if mappings and lists in a parsed text are nested more than MAX_DEPTH deep."""
    if text.count(b"{") + text.count(b"[") <= MAX_DEPTH:
        return False
    level = [content]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


@contextlib.contextmanager
def wrap_read_errors(path: Path) -> Iterator[None]:
    """Raise an operating-system error about reading `path` as a StoreError of one line."""
    try:
        yield
    except OSError as error:
        raise read_error(path, error) from None


@contextlib.contextmanager
def wrap_write_errors(path: Path) -> Iterator[None]:
    """Raise an operating-system error about writing `path` as a StoreError of one line."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ELOOP:
            refuse_link(path)
        reason, remedy = error.strerror or str(error), "choose another --runs-dir"
        if isinstance(error, FileExistsError | NotADirectoryError):
            reason = "a file is in the place of a folder"
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = f"free some space, or {remedy}"
        raise StoreError(f"{path}: cannot be written: {reason}; {remedy}") from error


def partial_files(names: Iterable[str]) -> list[str]:
    """Return the file names of unfinished writes among the names in a folder."""
    return [name for name in names if name.startswith(".") and name.endswith(PARTIAL_SUFFIX)]


def encode_non_finite(value: Any) -> Any:
    """Return a copy with NaN and Inf as strings, which JSON cannot represent as numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: encode_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode_non_finite(item) for item in value]
    return value


def decode_non_finite(value: Any) -> Any:
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value
