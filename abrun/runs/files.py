"""Files that are written whole or not at all, and what an operating system says about them in one line.

Whole means that it outlives a loss of power: content first, then the name, then the folder that holds it. No
link is followed to what is written: one that lies where a file of ours has to be is refused.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import socket
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from abrun.errors import StoreError
from abrun.reasons import Code
from abrun.redaction import shortened
from abrun.regular_files import MAX_FILE_BYTES, exists, is_file, open_regular, read_regular
from abrun.runs.access import (
    PRIVATE_MODE,
    Access,
    existing_access,
    grant,
    read_error,
    share_new_file,
    share_new_folder,
)
from abrun.runs.owner import Owner
from abrun.runs.schemas import T, checked

FOLDER_MODE = 0o755  # at most, whatever the umask: who may write into it may say what a resume starts
PARTIAL_SUFFIX = ".partial"
ABANDONED_AFTER_S = 3600.0
MAX_FOLDER_LEVELS = 3  # of folders in an experiment's: arm, run, attempts
NEW_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
MAX_DEPTH = 64  # of mappings and lists in each other: whoever walks through them may recurse


def write_json(
    path: Path, content: Mapping[str, Any], *, mode: int = PRIVATE_MODE, durable: bool = True
) -> None:
    """Write a JSON file whole or not at all. Raises StoreError where disk or permissions do not allow it.

    One that is not `durable` is whole for every reader, but may be lost, or empty, after a loss of power.
    """
    write_file(path, json_text(content), mode=mode, durable=durable)


def json_text(content: Mapping[str, Any]) -> bytes:
    """Return the text of a JSON file, NaN and Inf as text."""
    return (json.dumps(encode_non_finite(content), indent=1, allow_nan=False) + "\n").encode()


def write_file(path: Path, content: bytes, *, mode: int = PRIVATE_MODE, durable: bool = True) -> None:
    """Write any file whole or not at all; see write_json. Its readers are those of the file before."""
    with wrap_write_errors(path):
        make_folder(path.parent)
        refuse_link(path)
        with _write_partial(path, content, mode, durable, existing_access(path, mode)) as partial:
            os.replace(partial, path)
        if durable:
            sync_folder(path.parent)


def create_file(path: Path, content: bytes) -> None:
    """Write a new file whole or not at all. Raises FileExistsError where the name is taken.

    On a file system without hard links it is empty for a moment, and stays so after a kill in that moment.
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
    path: Path,
    content: bytes,
    mode: int,
    durable: bool,
    access: Access | None = None,
) -> Iterator[Path]:
    """Write a file beside `path`, under a name that says by whom; removed after an error.

    `access`: of the file that it will replace; without, its readers are those of the folder.
    """
    partial = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}{PARTIAL_SUFFIX}")
    partial.unlink(missing_ok=True)  # of a killed process that had this one's id
    try:
        file = os.open(partial, NEW_FILE_FLAGS, mode)
        try:
            grant(file, access) if access else share_new_file(file, path)
            write_all(file, content)
            if durable:
                os.fsync(file)
        finally:
            os.close(file)
        yield partial
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def remove_partial_files(folder: Path) -> None:
    """Remove the partial files of killed writers from the folder of an experiment, or of a run.

    Whether a writer on another host lives cannot be told: its file has to be an hour old.
    """
    for parent, folders, names in os.walk(folder):
        if (
            len(Path(parent).relative_to(folder).parts) >= MAX_FOLDER_LEVELS
        ):  # what a trainer keeps there may be large
            folders.clear()
        for path in (Path(parent, name) for name in partial_files(names)):
            with contextlib.suppress(OSError):
                if _is_abandoned(path):
                    path.unlink()


def _is_abandoned(partial: Path) -> bool:
    host, _, number = partial.name.removesuffix(PARTIAL_SUFFIX).rpartition(".")
    if not number.isdecimal():  # a trainer's file, perhaps
        return False
    if host.endswith(f".{socket.gethostname()}"):
        return Owner(host=socket.gethostname(), pid=int(number)).is_gone
    return time.time() - partial.stat().st_mtime > ABANDONED_AFTER_S


def write_all(file: int, content: bytes) -> None:
    """Call `os.write`, which may take less than it is given, until all is written."""
    remaining = memoryview(content)
    while remaining:
        written = os.write(file, remaining)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        remaining = remaining[written:]


def make_folder(path: Path) -> None:
    """A folder and those above it, where they are not there, to outlive a loss of power."""
    missing = [folder for folder in (path, *path.parents) if not exists(folder)]
    for folder in reversed(missing):
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
        share_new_folder(folder)
        sync_folder(folder.parent)
    path.mkdir(exist_ok=True)  # says what is there, where it is no folder


def make_private_folder(path: Path) -> int:
    """Make a folder for what a library writes, closed to all but the readers of the experiment.

    Returns the umask under which the library's files are private, too.
    """
    with wrap_write_errors(path):
        make_folder(path.parent)
        refuse_link(path)
        path.mkdir(mode=stat.S_IRWXU, exist_ok=True)
        return 0o077 & ~share_new_folder(path, private=True)


def share_written_file(path: Path) -> None:
    """Let the readers of the experiment read a file that a library wrote."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        share_new_file(file, path)
    finally:
        os.close(file)


def sync_file(path: Path) -> None:
    """Bring a file's content to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk, where the file system has a way to."""
    try:
        sync_file(path)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):
            raise


def refuse_link(path: Path) -> None:
    """Raises StoreError where a link lies where a file of ours has to be: it could lead anywhere."""
    if path.is_symlink():
        raise StoreError(Code.LINK_IN_PLACE_OF_FILE(path=path))


def open_log(path: Path) -> BinaryIO:
    """Open a file to be appended to; see open_in_place."""
    return open(open_without_links(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "ab")


def open_without_links(path: Path, flags: int) -> int:
    """Open a file of ours; O_CREAT makes it for its owner and the readers of its experiment.

    No link is followed. Raises OSError for anything but a file.
    """
    is_new = bool(flags & os.O_CREAT) and not os.path.lexists(path)
    # Not waited for, should it be a pipe that nobody reads
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, PRIVATE_MODE)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        os.set_blocking(file, True)
        if is_new:
            share_new_file(file, path)
    except BaseException:
        os.close(file)
        raise
    return file


def fingerprint(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file; OSError where it does not read."""
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def find_damage(path: Path, recorded: Any) -> str | None:
    """What is wrong with a file of which `fingerprint` was once recorded; None where nothing is."""
    if not isinstance(recorded, Mapping):
        return "no checksum is recorded of it"
    try:
        if path.stat().st_size != recorded.get("bytes"):
            return f"has {path.stat().st_size} bytes, {recorded.get('bytes')} were written"
        is_same = fingerprint(path) == dict(recorded)
        return None if is_same else "does not have the checksum of what was written"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"


def read_json(path: Path, max_bytes: int = MAX_FILE_BYTES) -> dict[str, Any]:
    """Read a JSON file of the store. Raises StoreError if it is missing, too large or not a JSON object."""
    try:
        text = read_regular(path, max_bytes)
        content = json.loads(text.decode("utf-8"))
    except FileNotFoundError:
        raise StoreError(
            Code.PATH_MISSING(path=path, problem="no such file", remedy="is this a run directory of abrun?")
        ) from None
    except OSError as error:
        raise read_error(path, error) from None
    except (ValueError, RecursionError) as error:
        raise StoreError(Code.NOT_READABLE_AS(path=path, format="JSON", problem=str(error))) from None
    if not isinstance(content, dict):
        raise StoreError(Code.JSON_NOT_AN_OBJECT(path=path, type=type(content).__name__))
    if is_too_deep(text, content):
        raise StoreError(Code.JSON_TOO_DEEP(path=path, got=shortened(content), max_depth=MAX_DEPTH))
    return content


def read_json_or_empty(path: Path, max_bytes: int = MAX_FILE_BYTES) -> dict[str, Any]:
    """Empty where there is no file. Raises StoreError for what is none, such as a folder of that name."""
    with wrap_read_errors(path):
        if is_file(path):
            return read_json(path, max_bytes)
        if exists(path):
            raise StoreError(Code.NOT_A_FILE(path=path))
        return {}


def read_as(kind: type[T], path: Path, max_bytes: int = MAX_FILE_BYTES) -> T:
    """Return a dataclass of the fields of a file, which may be missing. Raises StoreError."""
    return checked(kind, read_json_or_empty(path, max_bytes), path)


def is_too_deep(text: bytes, content: Any) -> bool:
    """Whether mappings and lists are nested more than MAX_DEPTH deep in what a text was read as."""
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
    """Turns an operating-system error about reading `path` into one StoreError line."""
    try:
        yield
    except OSError as error:
        raise read_error(path, error) from None


@contextlib.contextmanager
def wrap_write_errors(path: Path) -> Iterator[None]:
    """Turns an operating-system error about `path` into one StoreError line."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ELOOP:
            refuse_link(path)
        is_file_in_place_of_folder = isinstance(error, FileExistsError | NotADirectoryError)
        reason = (
            "a file is where a folder has to be"
            if is_file_in_place_of_folder
            else error.strerror or str(error)
        )
        raise StoreError(Code.UNWRITABLE(path=path, error=reason)) from error


def partial_files(names: Iterable[str]) -> list[str]:
    """Of the names in a folder those of files whose writer was killed."""
    return [name for name in names if name.startswith(".") and name.endswith(PARTIAL_SUFFIX)]


def encode_non_finite(value: Any) -> Any:
    """JSON has no NaN and Inf: they are kept as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: encode_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode_non_finite(item) for item in value]
    return value


def decode_non_finite(value: Any) -> Any:
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value
