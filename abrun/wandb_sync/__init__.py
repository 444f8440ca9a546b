"""Mirrors runs and reports to wandb, during training or afterwards. The run store stays authoritative.

All calls to wandb happen in separate processes: wandb may raise anything, die, or wait for a network forever
without affecting the run.

__main__.py     `python -m abrun.wandb_sync RUN_DIR`: follows a run's metrics and sends them
wandb_run.py    one wandb run for one run directory; never sends a step twice
sync.py         `abrun wandb-sync`: sends what was recorded offline or was lost
report.py       `abrun compare --wandb`: the report as an artifact, the verdict in its run's summary
"""

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

    After `limit_s` seconds it is killed with all its descendants; the exit code is None then.
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
