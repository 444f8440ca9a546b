"""What this process and those below it print, kept in a file of bounded size: its head and its tail."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

# Of content, with `more` to come: it masked, and its end that may be the start of a secret
HideBytes = Callable[..., tuple[bytes, bytes]]


@contextlib.contextmanager
def capped(log: Path, most_bytes: int, hide: HideBytes) -> Iterator[Callable[[], None]]:
    """Pass stdout and stderr through this process, which masks secrets, if stdout goes into `log`.

    The log keeps its head and its tail, `most_bytes` in all. If stdout goes elsewhere, as to a terminal,
    nothing changes. A full disk loses lines, but blocks nobody. A thread passes it on from the call of what
    this yields, or from the end: before it this process may fork.
    """
    log_file = _opened_output(log)
    if log_file is None:
        yield lambda: None
        return
    reading, writing = os.pipe()
    printed = os.dup(1), os.dup(2)
    pump = threading.Thread(target=_pump, args=(reading, log_file, most_bytes, hide), daemon=True)
    _redirect(writing, writing)
    os.close(writing)
    try:
        yield pump.start
    finally:
        if pump.ident is None:
            pump.start()
        _redirect(*printed)  # the last ends of the pipe here: the pump ends when those below have ended
        pump.join(timeout=5)
        for number in printed:
            os.close(number)


def _opened_output(log: Path) -> int | None:
    """Open the log to read and change it, where stdout goes into it."""
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


def _pump(reading: int, log_file: int, most_bytes: int, hide: HideBytes) -> None:
    head, num_cut, rest, read = 0, 0, b"", b"_"
    with os.fdopen(reading, "rb", buffering=0) as pipe, os.fdopen(log_file, "r+b", buffering=0) as file:
        while read:
            read = pipe.read(1 << 16) or b""
            content, rest = hide(rest + read, more=bool(read))
            with contextlib.suppress(OSError):
                size = file.seek(0, os.SEEK_END) + file.write(content)
                if size > most_bytes:
                    head = head or os.pread(file.fileno(), most_bytes // 4, 0).rfind(b"\n") + 1
                    tail = os.pread(file.fileno(), most_bytes // 2, size - most_bytes // 2)
                    num_cut += size - head - len(tail)
                    file.seek(head)
                    file.write(f"[abrun: {num_cut} bytes cut here]\n".encode() + tail)
                    file.truncate()
