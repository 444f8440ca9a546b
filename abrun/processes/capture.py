"""Capture of what this process and its descendants print, in a log file of bounded size."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

# Called with content and `more=` (more will follow). Returns the masked content, and a tail to hold back
# because a secret may start there.
MaskBytes = Callable[..., tuple[bytes, bytes]]


@contextlib.contextmanager
def capture_output(log: Path, max_bytes: int, mask: MaskBytes) -> Iterator[None]:
    """Pass stdout and stderr through this process, which masks secrets, if stdout goes into `log`.

    The log keeps its head and its tail, `max_bytes` in total. If stdout goes elsewhere, such as to a
    terminal, nothing changes. A full disk loses lines but blocks nothing.
    """
    log_file = _open_if_stdout(log)
    if log_file is None:
        yield
        return
    read_end, write_end = os.pipe()
    original_streams = os.dup(1), os.dup(2)
    pump = threading.Thread(target=_copy_to_log, args=(read_end, log_file, max_bytes, mask), daemon=True)
    _redirect(write_end, write_end)
    os.close(write_end)
    pump.start()
    try:
        yield
    finally:
        _redirect(*original_streams)  # closes this process's write ends; the thread ends with the descendants
        pump.join(timeout=5)
        for fd in original_streams:
            os.close(fd)


def _open_if_stdout(log: Path) -> int | None:
    """Open the log for reading and writing, or return None if stdout does not go into it."""
    try:
        file = os.open(log, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    if os.path.samestat(os.fstat(1), os.fstat(file)):
        return file
    os.close(file)
    return None


def _redirect(stdout: int, stderr: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)


def _copy_to_log(read_end: int, log_file: int, max_bytes: int, mask: MaskBytes) -> None:
    head, num_bytes_cut, held_back, new_bytes = 0, 0, b"", b"_"
    with os.fdopen(read_end, "rb", buffering=0) as pipe, os.fdopen(log_file, "r+b", buffering=0) as file:
        while new_bytes:
            new_bytes = pipe.read(1 << 16) or b""
            content, held_back = mask(held_back + new_bytes, more=bool(new_bytes))
            with contextlib.suppress(OSError):
                size = file.seek(0, os.SEEK_END) + file.write(content)
                if size > max_bytes:
                    head = head or os.pread(file.fileno(), max_bytes // 4, 0).rfind(b"\n") + 1
                    tail = os.pread(file.fileno(), max_bytes // 2, size - max_bytes // 2)
                    num_bytes_cut += size - head - len(tail)
                    file.seek(head)
                    file.write(f"[abrun: {num_bytes_cut} bytes cut here]\n".encode() + tail)
                    file.truncate()
