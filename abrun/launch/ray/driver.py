"""`python -m abrun.launch.ray.driver EXPERIMENT_DIR JOB`: runs as an experiment's job in the cluster.

It supervises gangs of the cluster: warm starts first, then pairs as resources come free. A failed run
restarts within its limits; one that lost a node restarts in a new gang. It ends with the comparison.
"""

import contextlib
import importlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from abrun.errors import AbrunError, LaunchError, StoreError
from abrun.experiment.plan import make_plan
from abrun.launch.cluster import COMPARE_LOG
from abrun.launch.queue import LaunchQueue
from abrun.launch.ray.launcher import FOLDER, LOG, read_job, write_driver
from abrun.launch.supervisor import Supervisor, print_line
from abrun.messages.records import print_reason
from abrun.processes import MODULE_OPTIONS
from abrun.processes.output import ignore_output_errors
from abrun.recipe.experiment import parse_stored_recipe
from abrun.recipe.launcher import Ray
from abrun.recipe.refusals import validated
from abrun.runs.experiment import open_experiment
from abrun.runs.files import is_directory, open_log
from abrun.runs.layout import REPORT
from abrun.runs.lock import Lease, LockedError

LEASE_TIMEOUT_S = 60.0  # time for an earlier job to end


def main() -> int:
    experiment_dir, job = Path(sys.argv[1]), sys.argv[2]
    try:
        if not is_directory(experiment_dir):
            raise LaunchError(
                f"{experiment_dir}: does not exist on {socket.gethostname()}, which runs the driver; launch "
                "with --runs-dir on a file system that all machines of the cluster share"
            )
        try:
            code = _run_experiment(experiment_dir, job, read_job(experiment_dir))
        except AbrunError as error:
            _write_status(experiment_dir, job, {}, ended=str(error))
            raise
        _write_status(experiment_dir, job, {}, ended="")
        return code
    except AbrunError as error:
        print(f"error: {error}", file=sys.stderr)
        # Ray reports a failed job with the last lines of its log.
        print_reason(error.reason)
        return 2


def _run_experiment(experiment_dir: Path, job: str, submitted: dict[str, Any]) -> int:
    settings = validated(Ray, submitted.get("settings", {}), str(experiment_dir / FOLDER))

    def say(line: str) -> None:
        """Print a note into Ray's log of the job and into the experiment's."""
        print_line(line)
        with contextlib.suppress(OSError, StoreError), open_log(experiment_dir / FOLDER / LOG) as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n".encode(errors="replace"))

    _write_status(experiment_dir, job, {})
    try:
        os.chdir(folder := submitted["cwd"])
    except OSError as error:
        raise LaunchError(
            f"{folder}: cannot be the working directory on {socket.gethostname()}: {error.strerror}; start "
            "abrun from a folder that all machines of the cluster share"
        ) from None
    say(f"{job} starts on {socket.gethostname()}")
    lease = _acquire_lease(experiment_dir)
    try:
        engine_of = _connect()
        plan = make_plan(parse_stored_recipe(open_experiment(experiment_dir)["recipe"]))
        queue, report = LaunchQueue(plan, experiment_dir), partial(_write_status, experiment_dir, job)
        engine = engine_of(settings, plan, experiment_dir, queue.jobs, submitted.get("num_jobs"), report)
        save_s, git = float(settings.save_s), submitted.get("git")
        stopped_by = Supervisor(queue, engine, lease, save_s, git, say=say).run()
    finally:
        lease.close()
    if stopped_by is None and submitted.get("compare"):
        with open_log(experiment_dir / FOLDER / COMPARE_LOG) as output:
            output.truncate(0)
            sources = [str(experiment_dir), "--output", str(experiment_dir / REPORT)]
            argv = [sys.executable, *MODULE_OPTIONS, "abrun", "compare", *sources]
            subprocess.run(argv, stdout=output, stderr=subprocess.STDOUT, check=False)
    say(f"{job} ends{f' after signal {stopped_by}' if stopped_by else ''}")
    return 0 if all(queued_job.status == "finished" for queued_job in queue.jobs) else 1


def _write_status(
    experiment_dir: Path, job: str, waiting: Mapping[str, str], ended: str | None = None
) -> None:
    """Record what runs wait for, unless another job has replaced this one."""
    if read_job(experiment_dir).get("job") == job:
        write_driver(experiment_dir, job, waiting, ended)


def _acquire_lease(experiment_dir: Path) -> Lease:
    """Acquire the experiment's lease. A job on a lost machine is cut off from it, and its runs are fenced."""
    lease, deadline = Lease(experiment_dir / FOLDER), time.monotonic() + LEASE_TIMEOUT_S
    while True:
        try:
            lease.acquire(take_over=True)
            return lease
        except LockedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1.0)


def _connect() -> Any:
    """Connect to the cluster as a driver, and return the class of its engine."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise LaunchError(
            f"{sys.executable} on {socket.gethostname()} cannot import ray ({error}); pip install "
            "'abrun[ray]' there, or set launcher.python"
        ) from None
    ray.init(address="auto", log_to_driver=False, logging_level="warning")
    from abrun.launch.ray.gangs import GangEngine

    return GangEngine


if __name__ == "__main__":
    ignore_output_errors()
    sys.exit(main())
