"""Files of somebody else's, read without waiting: a pipe may never be written to, and a device never ends."""

import errno
import io
import os
import stat
from pathlib import Path


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file to be read. Raises OSError where there is none, or where it is anything but a file."""
    # Looked at once it is open: a name may stand for something else a moment later.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(file, "rb")


def read_regular(path: Path, most_bytes: int | None = None) -> bytes:
    """What is in a file. Raises OSError like open_regular, and for one that is larger than it may be."""
    with open_regular(path) as file:
        if most_bytes is None:
            return file.read()
        size = os.fstat(file.fileno()).st_size  # a file that claims to be huge is not begun
        content = b"" if size > most_bytes else file.read(most_bytes + 1)
    if max(size, len(content)) > most_bytes:
        raise OSError(errno.EFBIG, f"larger than {most_bytes} bytes", str(path))
    return content
