"""The Slurm commands that abrun uses. Errors are raised as LaunchError, with Slurm's message in one line."""

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from abrun.errors import LaunchError
from abrun.messages.codes import Code

TIMEOUT_S = 60.0
NOT_CONFIGURED = r"fatal: (Could not establish a configuration source|Unable to process configuration file)"
ENDED_STATES = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "TIMEOUT",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmTask:
    """Slurm's state of a job, or of one task of a job array."""

    job: str
    index: int | None
    state: str  # PENDING, RUNNING, ...
    reason: str
    nodes: str
    script: str = ""  # path of the submitted script

    @property
    def is_over(self) -> bool:
        return self.state in ENDED_STATES

    @property
    def name(self) -> str:
        return self.job if self.index is None else f"{self.job}_{self.index}"


def submit_script(script: str, *options: str) -> str:
    return run_slurm("sbatch", "--parsable", *options, script).strip().partition(";")[0]


def find_refusal(options: Sequence[str]) -> str | None:
    """Return Slurm's message if no job with these options could ever run, or None."""
    process = _run("sbatch", "--test-only", *options, "--wrap=true")
    return None if process.returncode == 0 else _error_text(process.stderr)


def list_tasks(user: str) -> list[SlurmTask]:
    """Return all tasks of a user that Slurm still knows. It forgets ended ones after minutes."""
    # A query by id would fail for all tasks if one is forgotten.
    output = run_slurm("squeue", f"--user={user}", "-h", "-r", "-t", "all", "-o", "%F|%K|%T|%r|%N|%o")
    tasks = []
    for line in output.splitlines():
        job, index, state, reason, nodes, script = line.split("|", 5)
        task_index = int(index) if index.isdigit() else None
        tasks.append(
            SlurmTask(job=job, index=task_index, state=state, reason=reason, nodes=nodes, script=script)
        )
    return tasks


def release_job(job: str, in_s: int = 0) -> None:
    """Start a requeued job after `in_s` seconds, without Slurm's two-minute delay."""
    run_slurm("scontrol", "update", f"JobId={job}", f"StartTime=now{f'+{in_s}' if in_s else ''}")


def cancel_jobs(jobs: Sequence[str]) -> None:
    """Remove queued jobs, and ask running ones to save a checkpoint and end."""
    _scancel("--state=PENDING", *jobs)
    _scancel("--batch", "--signal=TERM", "--state=RUNNING", *jobs)


def kill_jobs(jobs: Sequence[str]) -> None:
    _scancel(*jobs)


def _scancel(*argv: str) -> None:
    process = _run("scancel", "--quiet", *argv)
    if process.stderr:  # it fails silently for jobs that have ended or are in another state
        raise LaunchError(Code.SLURM_COMMAND_FAILED(command="scancel", answer=_error_text(process.stderr)))


def run_slurm(*argv: str) -> str:
    process = _run(*argv)
    if process.returncode:
        raise LaunchError(Code.SLURM_COMMAND_FAILED(command=argv[0], answer=_error_text(process.stderr)))
    return process.stdout


def _run(*argv: str) -> subprocess.CompletedProcess[str]:
    try:
        process = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise LaunchError(
            f"slurm: no command {argv[0]!r} on PATH; launch on a login node, or use --launcher local"
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"slurm: {argv[0]}: no answer for {TIMEOUT_S:.0f} s; is the controller up?"
        ) from None
    except OSError as error:
        raise LaunchError(Code.SLURM_COMMAND_FAILED(command=argv[0], answer=str(error))) from None
    if process.returncode and re.search(NOT_CONFIGURED, process.stderr):
        answer = _error_text(process.stderr)[-200:]
        raise LaunchError(
            f"slurm: this host has Slurm's commands, but no cluster configuration (slurm.conf; {argv[0]}: "
            f"{answer}); launch on a login node, set SLURM_CONF, or use --launcher local"
        )
    return process


def _error_text(stderr: str) -> str:
    """Return the lines of an error message, without the command's name at their start."""
    lines = [re.sub(r"^(\w+: )?(error: |fatal: )?", "", line).strip() for line in stderr.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line)) or "refused without a word"
