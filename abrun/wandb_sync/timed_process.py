"""Runs a module in a process that may hang: after a time limit it is killed with all its descendants."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from abrun.messages.codes import Reason
from abrun.messages.records import printed_reason
from abrun.processes import MODULE_OPTIONS, find_descendants, kill_all


def run_module(
    module: Sequence[str], limit_s: float, *, stdin_text: str = ""
) -> tuple[int | None, list[Reason]]:
    """Run `python -m MODULE...` with `stdin_text`; return its exit code and the reasons that it printed.

    The exit code is None if the process exceeded `limit_s` seconds.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            [sys.executable, *MODULE_OPTIONS, *module],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "WANDB_SILENT": "true"},
        )
        code: int | None = None
        try:
            process.communicate(stdin_text, timeout=limit_s)
            code = process.returncode
        except (subprocess.TimeoutExpired, BrokenPipeError):
            pass
        finally:
            kill_all(lambda: find_descendants(process.pid))
            process.kill()
            process.wait()
        output.seek(0)
        return code, [reason for line in output if (reason := printed_reason(line))]
