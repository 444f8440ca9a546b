"""Upload of a run to wandb, by a process that follows the run directory; its failures never stop training."""

import atexit
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
STOPPED_S = 10.0  # of a run that stopped or failed, which its agent soon kills


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
        atexit.register(self._end_without_result)

    def poll(self) -> None:
        """Forward the messages that have arrived since the last call."""
        while self._lines:
            self._say(self._lines.pop(0))

    def _end_without_result(self) -> None:
        """Let wandb record that the run stopped or failed; its ending is recorded already."""
        self._say = lambda line: None
        self.finish(is_success=False, limit_s=STOPPED_S)

    def finish(self, *, is_success: bool = True, limit_s: float | None = None) -> None:
        """Give the process some time to upload the rest, then end it and its descendants.

        `limit_s` replaces `finish_s`. Without success, the wandb run gets the run's exit code.
        """
        atexit.unregister(self._end_without_result)
        limit_s = self._finish_s if limit_s is None else limit_s
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            if process.stdin:
                process.stdin.write("finished\n" * is_success)
                process.stdin.close()
        try:
            code = process.wait(limit_s)
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
            self._say(f"the upload did not finish within {limit_s:g} s; {sync_hint}")
            return
        self.poll()
        if code < 0:
            ending = ending_reason(code, "", self._oom_kills)
            self._say(f"the wandb process was {sentence(ending)}; {sync_hint}")

    def _read(self, output: IO[str]) -> None:
        for line in output:
            if reason := printed_reason(line):
                self._lines.append(sentence(reason))
