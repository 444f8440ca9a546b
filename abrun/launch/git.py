"""Which code a launch was started from: the commit of the working directory, and what was not committed."""

import contextlib
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

from abrun import store
from abrun.redaction import redacted_code

MOST_DIFF = 1 << 18  # bytes
LIMIT_S = 20.0
DIFF = ("diff", "--no-color", "--no-ext-diff", "--no-textconv", "HEAD")


def record_checkout(experiment_dir: Path, *, diff: bool) -> dict[str, Any] | None:
    """Commit of the working directory and whether it was changed since; None where it is no git checkout.

    Whether it was changed is None, too, where git takes too long to find out.
    With `diff` the changes go, without the secrets in them, into a file of the experiment, which is named
    after its content: all runs and launches of the same checkout have one. Raises StoreError where it cannot
    be written.
    """
    sha, _ = _first_bytes(100, "rev-parse", "HEAD")
    status, cut = _first_bytes(1, "status", "--porcelain")
    if not sha or status is None:
        return None
    dirty = None if cut and not status else bool(status)
    content, cut = _first_bytes(MOST_DIFF, *DIFF) if diff and status else (b"", None)
    text = redacted_code((content or b"").decode(errors="replace"))
    if cut:  # by whole lines: the start of a token is not known for one
        text = f"{text.rpartition(chr(10))[0]}\n[cut here: {cut}]\n"
    file = store.write_diff(experiment_dir, text) if text else None
    return {"sha": sha.decode().strip(), "dirty": dirty, "diff": file}


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
