"""Safe access to foreign files: existence checks, and reading that cannot block.

Opening a pipe could wait forever for a writer, and a device has no end, so only regular files are read.
"""

import errno
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_BYTES = 1 << 26  # limit for files read at once
MAX_LINE_BYTES = 1 << 26


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
    # Check after opening: the path could refer to something else a moment later.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | extra_flags)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(file, "rb")


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
