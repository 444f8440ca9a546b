"""Probes: measurements by a module that runs as the ranks of a run on this machine and writes rows.

<directory>/job.json     the job: the resolved configuration and the measurement's own settings
<directory>/rows.jsonl   measurements, appended by rank 0 (rank N: rows-N.jsonl)
<directory>/output.log   output of the ranks
"""

import contextlib
import math
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from abrun.errors import AbrunError, LaunchError
from abrun.experiment.command import ranks_command, run_environment
from abrun.experiment.preflight.machine import Machine, this_machine
from abrun.messages.codes import Code
from abrun.messages.records import print_reason, printed_reason
from abrun.processes import find_run_processes, kill_all, start_process, wait_for_exit
from abrun.recipe.extras import missing_package
from abrun.recipe.run import OwnRunConfig
from abrun.runs.files import open_log, read_json, wrap_write_errors, write_json
from abrun.runs.lines import LineWriter, read_json_lines
from abrun.runs.lock import folder_lock

GRACE_S = 5.0
JOB, ROWS, LOG = "job.json", "rows", "output.log"
SCRATCH = ".scratch"


class ProbeRefused(LaunchError):
    """Error reported by the probe's module itself: it cannot do the job here."""


def is_never_cancelled() -> bool:
    return False


@contextlib.contextmanager
def scratch_folder(
    output: Path, command: str, is_stale: Callable[[Path], bool] = lambda _: False
) -> Iterator[Path]:
    """Yield a temporary folder in `output`. Removes those of killed commands, and stale folders.

    Raises StoreError while another process uses `output`.
    """
    with folder_lock(output, command):
        with wrap_write_errors(output):
            for path in output.iterdir():
                if path.name.startswith(SCRATCH) or is_stale(path):
                    shutil.rmtree(path, ignore_errors=True)
            scratch = tempfile.TemporaryDirectory(prefix=f"{SCRATCH}-", dir=output)
        with scratch as folder:
            yield Path(folder)


def run_probe(
    module: str,
    directory: Path,
    config: OwnRunConfig,
    job: Mapping[str, Any],
    is_cancelled: Callable[[], bool] = is_never_cancelled,
) -> list[dict[str, Any]]:
    """Run `python -P -m MODULE DIRECTORY` as the ranks of `config` on the first GPUs; return its rows.

    Raises LaunchError if this machine lacks the trainer or the devices, ProbeRefused if the module called
    `report_refusal`, or else LaunchError with the path of its output.
    """
    machine, cluster = require_devices(config), config.cluster
    num_gpus = config.devices_per_node if cluster.gpus_per_node else 0
    command = ranks_command(directory, config, cluster.ranks, module)
    env = run_environment(directory, machine.gpus[:num_gpus], config)
    return collect_rows(
        module, directory, config, job, lambda: _run_command(command, directory, env, is_cancelled)
    )


def collect_rows(
    module: str,
    directory: Path,
    config: OwnRunConfig,
    job: Mapping[str, Any],
    execute: Callable[[], int],
) -> list[dict[str, Any]]:
    """Write a job, let `execute` do it, which returns an exit status, and return the rows.

    Raises ProbeRefused if the module called `report_refusal`, or else LaunchError with the path of its
    output.
    """
    if missing := missing_package("train"):
        raise LaunchError(f"{module.split('.')[-2]}: {missing}")
    log = directory / LOG
    with wrap_write_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for rows in _find_row_files(directory):
            rows.unlink(missing_ok=True)
    write_json(directory / JOB, {"config": config.model_dump(mode="json"), **job})
    if execute():
        reasons = map(printed_reason, log.read_text(errors="replace").splitlines())
        if reason := next(filter(None, reasons), None):
            raise ProbeRefused(reason)
        raise LaunchError(Code.PROBE_FAILED(probe=directory.name, log=log))
    return read_rows(directory)


def require_devices(config: OwnRunConfig) -> Machine:
    """Return this machine. Raises LaunchError if it lacks the devices of a run."""
    machine, cluster = this_machine(), config.cluster
    if cluster.nodes > 1 or (cluster.gpus_per_node and config.devices_per_node > len(machine.gpus)):
        config_text = f" and rollout.devices {config.engine_devices}" if config.engine_devices else ""
        raise LaunchError(
            f"cluster: got {cluster.nodes} node(s) x {cluster.gpus_per_node} GPU(s){config_text}, but this "
            f"machine, which measures it, has {machine}; use --set cluster.gpus_per_node=..."
        )
    return machine


def read_rows(directory: Path) -> list[dict[str, Any]]:
    """Return the rows written so far, also after a failure."""
    return [row for rows in _find_row_files(directory) for row in read_json_lines(rows)]


def _find_row_files(directory: Path) -> list[Path]:
    return sorted(directory.glob(f"{ROWS}*.jsonl"))


def _run_command(
    argv: list[str], directory: Path, env: dict[str, str], is_cancelled: Callable[[], bool]
) -> int:
    """Run the command and return its exit status; leaves no process behind."""
    log = directory / LOG
    with wrap_write_errors(log), open_log(log) as output:
        output.truncate(0)
        if is_cancelled():
            return -signal.SIGTERM
        process = start_process(
            argv,
            env,
            death_signal=signal.SIGTERM,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = wait_for_exit(process, math.inf, is_cancelled)
            return -signal.SIGTERM if status is None else status
        finally:
            process.terminate()  # first: the agent removes its temporary files
            wait_for_exit(process, GRACE_S, lambda: False)
            kill_all(lambda: find_run_processes(directory))
            process.kill()
            wait_for_exit(process, math.inf, lambda: False)


def read_job(directory: Path) -> dict[str, Any]:
    """Return the job of a module that runs as a probe."""
    return read_json(directory / JOB)


def report_refusal(error: AbrunError) -> int:
    """Report to `run_probe` and to people why a module cannot do its job; return the exit code."""
    print_reason(error.reason)
    print(f"error: {error}", file=sys.stderr)
    return 2


def open_row_writer(directory: Path, rank: str = "0") -> LineWriter:
    """Return the writer with which a rank appends its rows."""
    return LineWriter(directory / (f"{ROWS}.jsonl" if rank == "0" else f"{ROWS}-{rank}.jsonl"))
