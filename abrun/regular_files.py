"""Files of somebody else's: whether they are there, and reading without waiting.

A pipe may never be written to, and a device never ends.
"""

import errno
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_BYTES = 1 << 26  # of one that is read whole
MAX_LINE_BYTES = 1 << 26


def exists(path: str | os.PathLike[str]) -> bool:
    """Tell whether something has this name. Raises OSError where that cannot be seen.

    A folder that may not be searched is no absent file; Path.exists and the like say so from Python 3.14 on.
    """
    return _file_mode(path) is not None


def is_file(path: str | os.PathLike[str]) -> bool:
    """Tell whether this is a regular file. Raises OSError like exists."""
    return stat.S_ISREG(_file_mode(path) or 0)


def is_directory(path: str | os.PathLike[str]) -> bool:
    """Tell whether this is a directory. Raises OSError like exists."""
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


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file to be read. Raises OSError where there is none, or where it is anything but a file."""
    # Looked at once it is open: a name may stand for something else a moment later.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(file, "rb")


def read_regular(path: Path, max_bytes: int | None = None) -> bytes:
    """Return what a file holds. Raises OSError like open_regular, and for more than `max_bytes`."""
    with open_regular(path) as file:
        if max_bytes is None:
            return file.read()
        size = os.fstat(file.fileno()).st_size  # a file that claims to be huge is not begun
        content = b"" if size > max_bytes else file.read(size + 1)
        if size < len(content):  # it grows, or its system tells no size
            content += file.read(max(0, max_bytes + 1 - len(content)))
    if max(size, len(content)) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes", str(path))
    return content


def read_tail(path: Path, num_bytes: int = 1 << 20) -> bytes:
    """Return the end of a file. Raises OSError like open_regular."""
    with open_regular(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - num_bytes))
        return file.read(num_bytes)


def iter_lines(file: io.BufferedReader) -> Iterator[bytes]:
    """Yield the lines from here on, with their ends. Raises OSError for one of MAX_LINE_BYTES."""
    while line := file.readline(MAX_LINE_BYTES):
        if len(line) == MAX_LINE_BYTES:
            raise OSError(errno.EFBIG, f"a line is longer than {MAX_LINE_BYTES} bytes", file.name)
        yield line
