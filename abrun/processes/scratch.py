"""Temporary folders of agents and launchers, which are removed even after a SIGKILL."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SCRATCH = "abrun-scratch-"
MIN_SCRATCH_AGE_S = 60.0


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a temporary folder. Raises OSError if none can be made.

    It is locked while in use, which systemd-tmpfiles respects. Unlocked folders of killed processes are
    removed.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=SCRATCH)))
        file = os.open(folder, os.O_RDONLY)
        stack.callback(os.close, file)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        for unused in folder.parent.glob(f"{SCRATCH}*"):
            with contextlib.suppress(OSError), contextlib.ExitStack() as unlock:
                file = os.open(unused, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
                unlock.callback(os.close, file)
                # A newer folder may not be locked yet
                if time.time() - unused.stat().st_mtime > MIN_SCRATCH_AGE_S:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(unused, ignore_errors=True)
        yield folder
