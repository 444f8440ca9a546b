"""Standard output and standard error for work that must continue when nobody can read what it prints."""

import contextlib
import io
import os
import select
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, cast

# Time that a write waits for a paused reader (Ctrl-S, a pipe to `less`), and that of the last write.
WRITE_TIMEOUT_S = 1.0
FINAL_TIMEOUT_S = 10.0
MAX_PENDING_BYTES = 2**20
# A writable pipe accepts this many bytes without blocking.
CHUNK_BYTES = select.PIPE_BUF


class UnfailingOutput:
    """A text stream that raises no error and blocks for a second at most.

    Text is lost while the stream cannot be written to (pipe without a reader, full disk, closed terminal),
    and beyond MAX_PENDING_BYTES while a reader pauses. Everything else is written line by line.
    """

    def __init__(self, stream: TextIO, name: str | None = None) -> None:
        """Wrap `stream`. With a `name`, its first failure is reported once on standard error."""
        self._stream = stream
        self._name = name
        self._is_raw = _is_file(stream)
        self._unwritten = bytearray()
        self._is_reader_paused = False
        self._terminal_fd: int | None = None
        self._renew_lock()
        _streams.add(self)

    def _renew_lock(self) -> None:
        """Replace the lock: in a forked child, the thread that held it does not exist to release it."""
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._lock:
            if not self._is_raw:
                with self._report_error_once():
                    self._stream.write(text)
            elif len(self._unwritten) < MAX_PENDING_BYTES:
                self._unwritten += text.encode(self._stream.encoding, "backslashreplace")
            if "\n" in text:
                self.flush()
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self, timeout_s: float = WRITE_TIMEOUT_S) -> None:
        with self._lock, self._report_error_once():
            if not self._is_raw:
                self._stream.flush()
            elif self._unwritten:
                self._is_reader_paused = not self._write_pending(0.0 if self._is_reader_paused else timeout_s)

    def drain(self) -> None:
        """Write pending text for as long as a paused reader keeps reading."""
        self._is_reader_paused = False
        with contextlib.suppress(KeyboardInterrupt):
            self.flush(FINAL_TIMEOUT_S)

    def _write_pending(self, timeout_s: float) -> bool:
        """Write pending text until nothing is left (return True) or `timeout_s` have passed."""
        fd, deadline = self._writable_fd(), time.monotonic() + timeout_s
        while self._unwritten:
            if not _is_writable(fd, deadline - time.monotonic()):
                return False
            try:
                num_written = os.write(fd, self._unwritten[:CHUNK_BYTES])
            except BlockingIOError:  # poll reported more room than there is
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.01)
                continue
            del self._unwritten[:num_written]
        return True

    def _writable_fd(self) -> int:
        """Return the stream's file descriptor, or for a terminal a second one that does not block.

        Poll reports whether a terminal has room, not how much. O_NONBLOCK on the stream's own descriptor
        would also affect the shell.
        """
        fd = self._stream.fileno()
        if not os.isatty(fd):
            return fd
        if self._terminal_fd is None:
            with contextlib.suppress(OSError):  # for example another user's terminal, under sudo
                flags = os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK
                self._terminal_fd = os.open(f"/dev/fd/{fd}", flags)
        return fd if self._terminal_fd is None else self._terminal_fd

    @contextlib.contextmanager
    def _report_error_once(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: the stream is closed, or cannot encode the text
            self._unwritten.clear()
            name, self._name = self._name, None
            if name:
                reason = getattr(error, "strerror", None) or error
                print(f"abrun: {name}: {reason}; going on without it", file=sys.stderr)


_streams = weakref.WeakSet[UnfailingOutput]()


def _renew_locks() -> None:
    for stream in list(_streams):
        stream._renew_lock()


os.register_at_fork(after_in_child=_renew_locks)


def _is_file(stream: TextIO) -> bool:
    """Return True if the interpreter writes this stream's bytes directly to a file descriptor."""
    if type(stream) is not io.TextIOWrapper:
        return False
    buffer: Any = stream.buffer
    return isinstance(getattr(buffer, "raw", buffer), io.FileIO)


def _is_writable(fd: int, timeout_s: float) -> bool:
    """Wait until a write would not block, and return True then, or if the write would fail."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


def ignore_output_errors() -> None:
    """Suppress all errors of standard output and standard error from now on."""
    if sys.stderr is not None and not isinstance(sys.stderr, UnfailingOutput):
        sys.stderr = cast(TextIO, UnfailingOutput(sys.stderr))
    if sys.stdout is not None and not isinstance(sys.stdout, UnfailingOutput):
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        sys.stdout = cast(TextIO, UnfailingOutput(sys.stdout, "standard output"))


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Prepare a command's streams: open, able to encode any text, and without effect on its exit code.

    Errors of standard output still raise unless the command calls `ignore_output_errors`. Errors of standard
    error never raise.
    """
    _reopen_closed_streams()
    original_streams = sys.stdout, sys.stderr
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.stderr = cast(TextIO, UnfailingOutput(sys.stderr))
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, UnfailingOutput):
                stream.drain()
        sys.stdout, sys.stderr = original_streams
        for stream in original_streams:
            _discard_unwritten(stream)


def _reopen_closed_streams() -> None:
    """Open streams that the shell has closed (`>&-`), or the next opened file would take their number."""
    closed_fds = set()
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            closed_fds.add(fd)
            new_fd = os.open(os.devnull, os.O_RDWR)
            if new_fd == fd:
                os.set_inheritable(fd, True)
            else:
                os.dup2(new_fd, fd)
                os.close(new_fd)
    # None of a number that is open: a library, such as Debian's libffi, has opened a file since.
    for fd, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            file = fd if fd in closed_fds else os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, open(file, "w", encoding="utf-8", closefd=False))  # noqa: SIM115


def _discard_unwritten(stream: TextIO) -> None:
    """Redirect unwritable text to /dev/null. Otherwise the interpreter would exit with code 120."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            null_fd = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null_fd, stream.fileno())
            os.close(null_fd)
