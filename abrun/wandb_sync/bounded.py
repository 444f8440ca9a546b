"""A process that may hang: waited for so long, and then ended with all that it has started."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from abrun.messages.records import printed_reason
from abrun.processes import MODULE_OPTIONS, find_descendants, kill_all
from abrun.reasons import Reason


def run(module: Sequence[str], limit_s: float, *, said: str = "") -> tuple[int | None, list[Reason]]:
    """Exit code (None: it took too long) and printed reasons of `python -m MODULE...`, given `said`."""
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
            process.communicate(said, timeout=limit_s)
            code = process.returncode
        except (subprocess.TimeoutExpired, BrokenPipeError):
            pass
        finally:
            kill_all(lambda: find_descendants(process.pid))
            process.kill()
            process.wait()
        output.seek(0)
        return code, [reason for line in output if (reason := printed_reason(line))]
