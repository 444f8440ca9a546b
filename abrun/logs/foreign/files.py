"""Folders and files of a source: a walk that follows no link out of it, regular files, texts in blocks."""

import codecs
import contextlib
import io
import os
import stat
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
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


# --- texts: decompressed, as UTF-8, in lines ---

GZIP = b"\x1f\x8b"
BLOCK_BYTES = 1 << 16
MAX_LINE = 1 << 24  # bytes or characters
MAX_LINES = 1 << 25
MAX_RATIO, FREE_BYTES = 100, 1 << 22  # of a compressed file, once it has unpacked FREE_BYTES
MAX_DOCUMENT_BYTES = 2**28  # of a file that is parsed as a whole
MAX_UNPACKED_BYTES = 2**30  # of a compressed file
UTF_16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


class TextFile:
    """Content of a text file, plain or compressed; as UTF-8 without byte order mark. Raises StoreError.

    `torn` and `ended` (with a line end) describe the end of the file once it has been read.
    """

    def __init__(self, path: Path) -> None:
        self.place = printable(str(path))
        self.torn, self.ended = False, True
        self._path, self._num_lines = path, 0

    def blocks(self) -> Iterator[bytes]:
        """Yield the content in blocks of some size."""
        with open_file(self._path) as file:
            blocks = iter(partial(file.read, BLOCK_BYTES), b"")
            start, blocks = _peek(blocks)
            if start.startswith(GZIP):
                # Refuse a file that unpacks out of proportion before its lines are parsed, which costs more
                for _ in self._decompress(blocks):
                    pass
                file.seek(0)
                blocks = iter(partial(file.read, BLOCK_BYTES), b"")
                start, blocks = _peek(self._decompress(blocks))
            if encoding := UTF_16.get(start[:2]):
                blocks = self._transcode(blocks, encoding)
            for index, block in enumerate(blocks):
                self.ended = block.endswith((b"\n", b"\r"))
                yield block if index else block.removeprefix(codecs.BOM_UTF8)

    def content(self) -> bytes:
        """Return the whole content. Raises StoreError for more than MAX_DOCUMENT_BYTES."""
        content, size = [], 0
        for block in self.blocks():
            content.append(block)
            size += len(block)
            if size > MAX_DOCUMENT_BYTES:
                raise StoreError(f"{self.place}: larger than {MAX_DOCUMENT_BYTES} bytes; write JSON lines")
        return b"".join(content)

    def lines(self) -> Iterator[bytes]:
        """Yield the lines without their ends; the last one, after the last line end, may be empty."""
        pending, num_pending = [b""], 0  # of the line that has no end yet
        for block in self.blocks():
            pending.append(block)
            num_pending += len(block)
            if b"\n" in block:
                *lines, rest = b"".join(pending).split(b"\n")
                pending = [rest]
                self._count_lines(len(lines))
                yield from lines
                num_pending = len(rest)
            elif num_pending > MAX_LINE:
                raise self._long_line_error()
        yield b"".join(pending)

    def text_lines(self) -> Iterator[str]:
        r"""Yield the lines with their ends, which may be \n, \r\n or \r."""
        decoder, offset = codecs.getincrementaldecoder("utf-8")(), 0
        pending, num_pending = [""], 0
        for block in self.blocks():
            num_undecoded = len(decoder.getstate()[0])
            try:
                pending.append(decoder.decode(block))
            except UnicodeDecodeError as error:
                raise StoreError(
                    f"{self.place}: byte {offset - num_undecoded + error.start} is not UTF-8; expected a CSV "
                    "file: save it as UTF-8"
                ) from None
            offset += len(block)
            num_pending += len(block)
            if "\n" in pending[-1] or "\r" in pending[-1]:
                text = "".join(pending)
                end = max(text.rfind("\n"), text.rfind("\r", 0, -1)) + 1
                pending, num_pending = [text[end:]], len(text) - end
                self._count_lines(text.count("\n") + text.count("\r") - text.count("\r\n"))
                yield from io.StringIO(text[:end], newline="")
            elif num_pending > MAX_LINE:
                raise self._long_line_error()
        yield "".join(pending)

    def _count_lines(self, number: int) -> None:
        self._num_lines += number
        if self._num_lines > MAX_LINES:
            raise StoreError(f"{self.place}: more than {MAX_LINES:,} lines; log less often, or split it")

    def _long_line_error(self) -> StoreError:
        return StoreError(f"{self.place}: a line is longer than {MAX_LINE} bytes; write the file again")

    def _decompress(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the content of all members of a gzip file; what follows the last one is ignored."""
        member, size, packed_size, rest = zlib.decompressobj(zlib.MAX_WBITS | 16), 0, 0, b""
        for block in blocks:
            rest += block
            packed_size += len(block)
            while True:
                if member.eof:
                    if len(rest) < len(GZIP):
                        break
                    if not rest.startswith(GZIP):
                        return
                    member = zlib.decompressobj(zlib.MAX_WBITS | 16)
                try:
                    content = member.decompress(rest, BLOCK_BYTES)
                except zlib.error as error:
                    raise StoreError(
                        f"{self.place}: damaged gzip file ({error}); write the file again"
                    ) from None
                size += len(content)
                if size > max(FREE_BYTES, MAX_RATIO * packed_size):
                    raise StoreError(
                        f"{self.place}: unpacks to more than {MAX_RATIO} times its size; unpack it"
                    )
                if size > MAX_UNPACKED_BYTES:
                    raise StoreError(
                        f"{self.place}: unpacks to more than {MAX_UNPACKED_BYTES} bytes; log less often"
                    )
                if content:
                    yield content
                rest = member.unused_data if member.eof else member.unconsumed_tail
                if not member.eof and len(content) < BLOCK_BYTES:
                    break
        self.torn = not member.eof

    def _transcode(self, blocks: Iterable[bytes], encoding: str) -> Iterator[bytes]:
        decoder, size = codecs.getincrementaldecoder(encoding)("replace"), 0
        for index, block in enumerate(blocks):
            size += len(block)
            yield decoder.decode(block if index else block[2:]).encode(errors="replace")
        self.torn = self.torn or size % 2 == 1


def _peek(blocks: Iterable[bytes]) -> tuple[bytes, Iterator[bytes]]:
    blocks = iter(blocks)
    first_block = next(blocks, b"")
    return first_block, chain([first_block] if first_block else [], blocks)
