"""Folders and files of a source: a walk that follows no link out of it, and files that are regular."""

import contextlib
import io
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from abrun.errors import StoreError
from abrun.runs.files import (
    exists,
    is_directory,
    is_file,
    iter_lines,
    open_regular,
    read_regular,
    unreadable_error,
)
from abrun.runs.redaction import list_names, printable

MAX_FOLDER_DEPTH = 50
MAX_ENTRIES = 1_000_000  # files and folders of a source
MAX_WALK_S = 120.0
MAX_COMPANION_BYTES = 1 << 22


# --- folders ---


@dataclass(slots=True)
class Folder:
    """The entries of a folder, sorted by name, links last. Remove one of `folders` to not enter it."""

    path: Path
    files: list[Path]  # regular files, and links to them that do not lead out of the walked folder
    folders: list[Path]
    outside: list[Path]  # links that lead out of it to a file or folder; they are not followed
    depth: int = 0  # below the walked folder


def walk(top: Path) -> Iterator[Folder]:
    """Yield a folder and those below it. Raises StoreError for a tree that is too large or too deep."""
    root, end_s, num_entries = os.path.realpath(top), time.monotonic() + MAX_WALK_S, 0
    pending = [(top, 0)]
    while pending:
        path, depth = pending.pop()
        folder = Folder(path, [], [], [], depth)
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


def link_notes(folder: str, names: Sequence[str]) -> list[str]:
    """Return a note on links that were not followed, if any."""
    links = f"links that lead out of the folder were not followed: {list_names([*names], 3)}"
    return [f"{folder}: {links}; compare a copy: cp -rL {folder} COPY"] * bool(names)


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


# --- errors ---


@contextmanager
def wrap_read_errors(path: Path) -> Iterator[None]:
    """Raise an operating-system error about reading `path` as a StoreError of one line."""
    try:
        yield
    except PermissionError:
        raise unreadable_error(path) from None
    except OSError as error:
        raise StoreError(f"{printable(str(path))}: cannot be read: {error.strerror or error}") from None


@contextmanager
def wrap_exhaustion(path: Path) -> Iterator[None]:
    """Raise the errors of content that is too large or nested too deeply as a StoreError of one line."""
    try:
        yield
    except RecursionError:
        raise StoreError(f"{printable(str(path))}: nested too deeply to be read; log it flat") from None
    except MemoryError:
        problem = "out of memory while it was read; log less often, or read fewer runs at once"
        raise StoreError(f"{printable(str(path))}: {problem}") from None
