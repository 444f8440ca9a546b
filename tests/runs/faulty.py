"""A disk that fails: system calls below a folder that raise, and what a loss of power leaves of the folder.

Only what Python itself calls is seen: os.write, os.pwrite, os.fsync, os.rename, os.replace and os.link.
"""

import os
import random
import signal
import stat
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CALLS = ("write", "pwrite", "fsync", "rename", "replace", "link")


class Calls:
    """Counts the calls that concern a folder, and lets `before` have a word before each."""

    names: tuple[str, ...] = CALLS

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = os.path.realpath(root)
        self.count = 0
        self.before: Callable[[str, Any], Any] = lambda name, argument: None
        for name in self.names:
            monkeypatch.setattr(os, name, self._watched(name, getattr(os, name)))

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(first: Any, *rest: Any, **options: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else os.path.abspath(first)
            if path.startswith(self.root):
                self.count += 1
                half = self.before(name, rest)
                if half is not None:
                    return call(first, half, *rest[1:])
            result = call(first, *rest, **options)
            if path.startswith(self.root) and name == "fsync":
                self.synced(first)
            return result

        return watched

    def synced(self, file: int) -> None:
        """After an fsync."""


class Faults(Calls):
    """From the call `first` on every `every`th raises `error`; a failing write may have written half."""

    def __init__(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, *, first: int, every: int, error: int
    ) -> None:
        super().__init__(root, monkeypatch)
        self.active = True

        def fail(name: str, rest: Any) -> Any:
            if not self.active or self.count < first or (self.count - first) % every:
                return None
            if name == "write" and self.count % 2:
                return bytes(rest[0])[: len(rest[0]) // 2]  # a full disk takes what it can, and says so next
            raise OSError(error, os.strerror(error))

        self.before = fail


class Kill(Calls):
    """Kills this process before its call number `last`, which may also make a file or remove a name."""

    names = (*CALLS, "open", "unlink", "mkdir")

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, *, last: int) -> None:
        super().__init__(root, monkeypatch)

        def kill(name: str, rest: Any) -> None:
            if self.count >= last:
                os.kill(os.getpid(), signal.SIGKILL)

        self.before = kill


def killed_at(last: int, root: Path, write: Callable[[], object]) -> bool:
    """Call a function in a copy of this process, killed before call `last`; False where it ended before."""
    copy = os.fork()
    if copy == 0:
        try:
            with pytest.MonkeyPatch.context() as patch:
                Kill(root, patch, last=last)
                write()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(copy, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "failed otherwise, see above"
    return os.WIFSIGNALED(status)


class PowerLoss(BaseException):
    """The machine stops at this call."""


class Disk(Calls):
    """Knows at any moment what of a folder has been synced; stops the machine at the call `last`.

    A file has the content of its last fsync, a folder the names of its own: what the standard promises.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, *, last: int) -> None:
        super().__init__(root, monkeypatch)
        self._files: dict[int, bytes] = {}  # by inode
        self._folders: dict[int, dict[str, int]] = {}
        self._is_folder: dict[int, bool] = {}
        self._pins: dict[int, int] = {}  # an inode that is open gives its number to no other file
        self._root = self._pin(self.root)
        self._folders[self._root] = {}

        def stop(name: str, rest: Any) -> None:
            if self.count >= last:
                raise PowerLoss

        self.before = stop

    def synced(self, file: int) -> None:
        path = f"/proc/self/fd/{file}"
        inode = self._pin(path)
        if self._is_folder[inode]:
            self._folders[inode] = self._names_in(file)
        else:
            with open(path, "rb") as content:
                self._files[inode] = content.read()

    def left(self, target: Path, draw: random.Random | None = None) -> None:
        """Write what the loss of power left; with `draw`, of some files the end, or all, is there besides."""
        self._leave(self._root, target, draw)

    def close(self) -> None:
        for pin in self._pins.values():
            os.close(pin)

    def _leave(self, inode: int, target: Path, draw: random.Random | None) -> None:
        if self._is_folder[inode]:
            target.mkdir()
            names = self._folders.get(inode, {})
            if draw and draw.random() < 0.3:  # names that were on their way
                names = self._names_in(self._pins[inode])
            for name, child in names.items():
                self._leave(child, target / name, draw)
            return
        content = self._files.get(inode, b"")
        if draw and draw.random() < 0.5:
            now = os.pread(self._pins[inode], 1 << 30, 0)
            content = now[: draw.randint(min(len(content), len(now)), len(now))]
        target.write_bytes(content)

    def _names_in(self, folder: int) -> dict[str, int]:
        return {name: self._pin(name, folder) for name in os.listdir(folder)}

    def _pin(self, path: str, folder: int | None = None) -> int:
        file = os.open(path, os.O_RDONLY, dir_fd=folder)
        state = os.fstat(file)
        if state.st_ino in self._pins:
            os.close(file)
        else:
            self._pins[state.st_ino] = file
            self._is_folder[state.st_ino] = stat.S_ISDIR(state.st_mode)
        return state.st_ino
