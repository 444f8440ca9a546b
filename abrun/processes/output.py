"""Standard output and standard error of work that goes on when nobody can read what it prints."""

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

PATIENCE_S = 1.0  # of a write, for a reader that pauses: Ctrl-S, a pipe to `less`
LAST_PATIENCE_S = 10.0  # at the end of the process
MOST_BYTES = 2**20  # that wait for such a reader
AT_ONCE = select.PIPE_BUF  # a pipe that can be written to takes as many without blocking


class UnfailingOutput:
    """A text stream that raises no error, and blocks for a second at most.

    Text is lost while the stream cannot be written to (a pipe without a reader, a full disk, a closed
    terminal), and whatever exceeds MOST_BYTES while a reader pauses. The rest is written line by line.
    """

    def __init__(self, stream: TextIO, name: str | None = None) -> None:
        """With a `name`, standard error tells once that the stream of that name has failed."""
        self._stream = stream
        self._name = name
        self._raw = _is_file(stream)
        self._unwritten = bytearray()
        self._paused = False
        self._terminal: int | None = None
        self._renew_lock()
        _streams.add(self)

    def _renew_lock(self) -> None:
        """Make the lock anew: a thread that held it at a fork is not there to release it in the child."""
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._lock:
            if not self._raw:
                with self._noting_errors():
                    self._stream.write(text)
            elif len(self._unwritten) < MOST_BYTES:
                self._unwritten += text.encode(self._stream.encoding, "backslashreplace")
            if "\n" in text:
                self.flush()
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self, patience_s: float = PATIENCE_S) -> None:
        with self._lock, self._noting_errors():
            if not self._raw:
                self._stream.flush()
            elif self._unwritten:
                self._paused = not self._written_within(0.0 if self._paused else patience_s)

    def drain(self) -> None:
        """Write what has waited for a reader that pauses, as far as it goes on reading."""
        self._paused = False
        with contextlib.suppress(KeyboardInterrupt):
            self.flush(LAST_PATIENCE_S)

    def _written_within(self, patience_s: float) -> bool:
        """Write until nothing is left (True) or `patience_s` are over."""
        number, deadline = self._descriptor(), time.monotonic() + patience_s
        while self._unwritten:
            if not _is_writable(number, deadline - time.monotonic()):
                return False
            try:
                written = os.write(number, self._unwritten[:AT_ONCE])
            except BlockingIOError:  # less room than a poll tells
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.01)
                continue
            del self._unwritten[:written]
        return True

    def _descriptor(self) -> int:
        """Return the stream's file descriptor; of a terminal another one, which does not block.

        A poll tells whether a terminal has any room, not how much. O_NONBLOCK on the stream's descriptor
        would be the shell's too.
        """
        number = self._stream.fileno()
        if not os.isatty(number):
            return number
        if self._terminal is None:
            with contextlib.suppress(OSError):  # such as another user's terminal, under sudo
                flags = os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK
                self._terminal = os.open(f"/dev/fd/{number}", flags)
        return number if self._terminal is None else self._terminal

    @contextlib.contextmanager
    def _noting_errors(self) -> Iterator[None]:
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
    """True for a stream of the interpreter's, whose bytes go to a file descriptor and nowhere else."""
    if type(stream) is not io.TextIOWrapper:
        return False
    buffer: Any = stream.buffer
    return isinstance(getattr(buffer, "raw", buffer), io.FileIO)


def _is_writable(number: int, timeout_s: float) -> bool:
    """Wait until a write would not block; True also where it would fail."""
    poll = select.poll()
    poll.register(number, select.POLLOUT)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


def outlive_output() -> None:
    """Let no failure of standard output or standard error raise from here on."""
    if sys.stderr is not None and not isinstance(sys.stderr, UnfailingOutput):
        sys.stderr = cast(TextIO, UnfailingOutput(sys.stderr))
    if sys.stdout is not None and not isinstance(sys.stdout, UnfailingOutput):
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        sys.stdout = cast(TextIO, UnfailingOutput(sys.stdout, "standard output"))


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """The streams of a command: open, able to encode any text, and no cause of another exit code at the end.

    Standard output fails as usual, unless the command calls `outlive_output`. Standard error never fails.
    """
    _open_closed()
    before = sys.stdout, sys.stderr
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.stderr = cast(TextIO, UnfailingOutput(sys.stderr))
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, UnfailingOutput):
                stream.drain()
        sys.stdout, sys.stderr = before
        for stream in before:
            _discard_unwritten(stream)


def _open_closed() -> None:
    """Open what the shell has closed (`>&-`): a file opened later would get its number, and be printed to."""
    closed = set()
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            closed.add(number)
            opened = os.open(os.devnull, os.O_RDWR)
            if opened == number:
                os.set_inheritable(number, True)
            else:
                os.dup2(opened, number)
                os.close(opened)
    # None of a number that is open: a library, such as Debian's libffi, has opened a file since.
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            file = number if number in closed else os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, open(file, "w", encoding="utf-8", closefd=False))  # noqa: SIM115


def _discard_unwritten(stream: TextIO) -> None:
    """Send what a stream cannot write to /dev/null: else the interpreter's exit code would be 120."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            number = os.open(os.devnull, os.O_WRONLY)
            os.dup2(number, stream.fileno())
            os.close(number)
