"""Which code a launch was started from: the commit of the working directory, and what was not committed."""

import contextlib
import hashlib
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

from abrun import store
from abrun.redaction import redacted

MOST_DIFF = 1 << 18  # bytes that are kept
MOST_HASHED = 1 << 26  # bytes
MOST_FILES = 20  # names that are kept
MOST_NAMES = 1 << 16  # bytes
LIMIT_S = 20.0
DIFF = ("diff", "--no-color", "--no-ext-diff", "--no-textconv", "HEAD")


def record_checkout(experiment_dir: Path, *, diff: bool) -> dict[str, Any] | None:
    """Commit of the working directory and whether it was changed since; None where it is no git checkout.

    Whether it was changed is None, too, where git takes too long to find out.
    `changes` is the start of a hash of the uncommitted changes of tracked files, `files` the names of these
    and of untracked files. With `diff` the changes themselves go into a file of the experiment, which is
    named after that hash. Raises StoreError where it cannot be written.
    """
    sha, _ = _first_bytes(100, "rev-parse", "HEAD")
    status, cut = _first_bytes(MOST_NAMES, "status", "--porcelain", "-z", "--no-renames")
    if not sha or status is None:
        return None
    dirty = None if cut and not status else bool(status)
    # Of `-z`: two letters, a blank and a name each; the last may be cut
    names = [redacted(entry[3:]) for entry in status.decode(errors="replace").split("\0")[:-1]]
    content, late = _first_bytes(MOST_HASHED, *DIFF) if status else (None, None)
    # What git had no time to print has no hash; of a larger diff all launches hash the same start
    known = content if late is None or len(content or b"") == MOST_HASHED else None
    changes = hashlib.sha256(known).hexdigest()[:8] if known else None
    files = names[:MOST_FILES] + [f"and {len(names) - MOST_FILES} more"] * (len(names) > MOST_FILES)
    file = _write_diff(experiment_dir, changes, content, late) if diff and changes and content else None
    return {"sha": sha.decode().strip(), "dirty": dirty, "changes": changes, "files": files, "diff": file}


def _write_diff(experiment_dir: Path, changes: str, content: bytes, cut: str | None) -> str:
    """Write the start of a diff in whole lines, without tokens of a known shape; return the file's name."""
    text = redacted(content[:MOST_DIFF].decode(errors="replace"))
    if len(content) > MOST_DIFF or cut:
        text = f"{text.rpartition(chr(10))[0]}\n[cut here: the first {MOST_DIFF} bytes of it]\n"
    return store.write_diff(experiment_dir, changes, text)


def _first_bytes(most: int, *arguments: str) -> tuple[bytes | None, str | None]:
    """The start of what git prints, and why it is not all; None where git fails, or is not here.

    Git is ended where it goes on after that, or takes long: a diff can have any size.
    """
    command = ["git", "--no-pager", *arguments]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return None, None
    late = threading.Event()

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # filters of git among them

    def give_up() -> None:
        late.set()
        end()

    timer = threading.Timer(LIMIT_S, give_up)
    timer.start()
    with process:
        assert process.stdout is not None
        content = process.stdout.read(most + 1)
        if len(content) > most:
            end()
    timer.cancel()
    timer.join()  # who forks later must be alone
    if len(content) > most:
        return content[:most], f"the first {most} bytes of it"
    if late.is_set():
        return content, f"git took over {LIMIT_S:.0f} s"
    return (content, None) if process.returncode == 0 else (None, None)
