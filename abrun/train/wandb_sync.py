"""Upload of a run to wandb, by a process that follows the run directory; its failures never stop training."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO

from abrun.messages import sentence
from abrun.messages.records import printed_reason
from abrun.processes import MODULE_OPTIONS, count_oom_kills, ending_reason, find_descendants, kill_all
from abrun.runs.rundir import RunDir

FINISH_S = 60.0  # to upload the rest of a run


class WandbSync:
    """Runs `python -m abrun.wandb_sync` for a run directory; `poll` forwards its messages."""

    def __init__(self, run: RunDir, say: Callable[[str], None], *, finish_s: float = FINISH_S) -> None:
        self._say, self._finish_s, self._path = say, finish_s, run.path
        self._lines: list[str] = []
        self._process: subprocess.Popen[str] | None = None
        self._oom_kills = count_oom_kills()
        try:
            self._process = subprocess.Popen(
                [sys.executable, *MODULE_OPTIONS, "abrun.wandb_sync", str(run.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                errors="replace",
                env={**os.environ, "WANDB_SILENT": "true"},
            )
        except OSError as error:
            say(f"{error}. This run continues without wandb.")
            return
        self._reader = threading.Thread(target=self._read, args=[self._process.stdout], daemon=True)
        self._reader.start()

    def poll(self) -> None:
        """Forward the messages that have arrived since the last call."""
        while self._lines:
            self._say(self._lines.pop(0))

    def finish(self) -> None:
        """Give the process `finish_s` to upload the rest, then end it and its descendants."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            if process.stdin:
                process.stdin.close()
        try:
            code = process.wait(self._finish_s)
        except subprocess.TimeoutExpired:
            code = None
        self.poll()
        kill_all(lambda: find_descendants(process.pid))
        with contextlib.suppress(OSError):
            process.kill()
        process.wait()
        self._reader.join(1.0)
        sync_hint = f"upload the rest with: abrun wandb-sync {self._path.parent.parent}"
        if code is None:  # messages from the killed process are not forwarded
            self._say(f"the upload did not finish within {self._finish_s:g} s; {sync_hint}")
            return
        self.poll()
        if code < 0:
            ending = ending_reason(code, "", self._oom_kills)
            self._say(f"the wandb process was {sentence(ending)}; {sync_hint}")

    def _read(self, output: IO[str]) -> None:
        for line in output:
            if reason := printed_reason(line):
                self._lines.append(sentence(reason))
