"""Probes: measurements by a module that runs as the ranks of a run on this machine and writes rows.

<directory>/job.json     the job: the resolved configuration and the measurement's own settings
<directory>/rows.jsonl   measurements, appended by rank 0 (rank N: rows-N.jsonl)
<directory>/output.log   output of the ranks
"""

import math
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from abrun.errors import AbrunError, LaunchError
from abrun.experiment.command import ranks_command, run_environment
from abrun.experiment.preflight.hub import hub_refusal
from abrun.experiment.preflight.machine import Machine, this_machine
from abrun.experiment.preflight.model_files import hub_model_refusal
from abrun.messages.codes import Code
from abrun.messages.records import print_reason, printed_reason
from abrun.processes import (
    MODULE_OPTIONS,
    find_run_processes,
    kill_all,
    start_process,
    wait_for_exit,
)
from abrun.recipe.extras import missing_package
from abrun.recipe.run import OwnRunConfig
from abrun.runs.files import open_log, read_json, wrap_write_errors, write_json
from abrun.runs.lines import LineWriter, read_json_lines

GRACE_S = 5.0
JOB, ROWS, LOG = "job.json", "rows", "output.log"


class ProbeRefused(LaunchError):
    """Error reported by the probe's module itself: it cannot do the job here."""


def is_never_cancelled() -> bool:
    return False


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
    gpus = machine.gpus[:num_gpus]
    return _run_and_read_rows(
        module,
        ranks_command(directory, config, cluster.ranks, module),
        directory,
        gpus,
        config,
        job,
        is_cancelled,
    )


def run_probe_on_cpu(
    module: str,
    directory: Path,
    config: OwnRunConfig,
    job: Mapping[str, Any],
    is_cancelled: Callable[[], bool] = is_never_cancelled,
) -> list[dict[str, Any]]:
    """Run the probe as one process on a CPU whatever `config` says, for jobs that need no computation.

    Also raises ProbeRefused for an unavailable hub model, for which the process would retry for half a
    minute.
    """
    if why := hub_model_refusal(config, hub_refusal):
        raise ProbeRefused(why)
    return _run_and_read_rows(
        module,
        [sys.executable, *MODULE_OPTIONS, module, str(directory)],
        directory,
        (),
        config,
        job,
        is_cancelled,
    )


def _run_and_read_rows(
    module: str,
    command: list[str],
    directory: Path,
    gpus: Sequence[str],
    config: OwnRunConfig,
    job: Mapping[str, Any],
    is_cancelled: Callable[[], bool],
) -> list[dict[str, Any]]:
    if missing := missing_package("train"):
        raise LaunchError(f"{module.split('.')[-2]}: {missing}")
    log = directory / LOG
    with wrap_write_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for rows in _find_row_files(directory):
            rows.unlink(missing_ok=True)
    write_json(directory / JOB, {"config": config.model_dump(mode="json"), **job})
    if _run_command(command, directory, run_environment(directory, gpus, config), is_cancelled):
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
