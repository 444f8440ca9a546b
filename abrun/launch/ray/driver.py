"""`python -m abrun.launch.ray.driver EXPERIMENT_DIR JOB`: what the job of an experiment runs in the cluster.

The supervisor of any launch, over gangs of the cluster: warm starts first, then pair after pair as there is
room; a run that fails begins again under its limits, one that a lost node took along in a new gang. At the
end, the comparison.
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
from abrun.launch.cluster import COMPARED
from abrun.launch.queue import Queue
from abrun.launch.ray import record
from abrun.launch.supervisor import Supervisor, print_line
from abrun.messages.records import print_reason
from abrun.processes import MODULE_OPTIONS
from abrun.processes.output import ignore_output_errors
from abrun.reasons import Code
from abrun.recipe.experiment import parse_stored_recipe
from abrun.recipe.launcher import Ray
from abrun.recipe.refusals import validated
from abrun.regular_files import is_directory
from abrun.runs.experiment import open_experiment
from abrun.runs.files import open_log
from abrun.runs.lock import Lease, LockedError

HANDOVER_S = 60.0  # that a job before this one may take to end


def _print(log: Path, line: str) -> None:
    """Say a note in Ray's log of the job, and in the experiment's."""
    print_line(line)
    with contextlib.suppress(OSError, StoreError), open_log(log) as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n".encode(errors="replace"))


def main() -> int:
    experiment_dir, job = Path(sys.argv[1]), sys.argv[2]
    try:
        if not is_directory(experiment_dir):
            raise LaunchError(
                Code.DRIVER_WITHOUT_EXPERIMENT(directory=experiment_dir, host=socket.gethostname())
            )
        try:
            code = _run(experiment_dir, job, record.read_job(experiment_dir))
        except AbrunError as error:
            _tell(experiment_dir, job, {}, ended=str(error))
            raise
        _tell(experiment_dir, job, {}, ended="")
        return code
    except AbrunError as error:
        print(f"error: {error}", file=sys.stderr)
        print_reason(error.reason)  # in the log's last lines, with which Ray says that a job has failed
        return 2


def _run(experiment_dir: Path, job: str, submitted: dict[str, Any]) -> int:
    settings = validated(Ray, submitted.get("settings", {}), str(experiment_dir / record.FOLDER))
    say = partial(_print, experiment_dir / record.FOLDER / record.LOG)
    _tell(experiment_dir, job, {})
    _enter(submitted["cwd"])
    say(f"{job} begins on {socket.gethostname()}")
    lease = _lease(experiment_dir)
    try:
        engine_of = _cluster()
        plan = make_plan(parse_stored_recipe(open_experiment(experiment_dir)["recipe"]))
        queue, tell = Queue(plan, experiment_dir), partial(_tell, experiment_dir, job)
        engine = engine_of(settings, plan, experiment_dir, queue.jobs, submitted.get("num_jobs"), tell)
        arguments = queue, engine, lease, float(settings.save_s), submitted.get("git")
        stopped_by = Supervisor(*arguments, say=say).run()
    finally:
        lease.close()
    if stopped_by is None and submitted.get("compare"):
        with open_log(experiment_dir / record.FOLDER / COMPARED) as output:
            output.truncate(0)
            argv = [sys.executable, *MODULE_OPTIONS, "abrun", "compare", str(experiment_dir)]
            subprocess.run(argv, stdout=output, stderr=subprocess.STDOUT, check=False)
    say(f"{job} ends{f', asked to by signal {stopped_by}' if stopped_by else ''}")
    return 0 if all(each.status == "finished" for each in queue.jobs) else 1


def _tell(experiment_dir: Path, job: str, waiting: Mapping[str, str], ended: str | None = None) -> None:
    """Say what runs wait for, unless another job has taken the place of this one."""
    if record.read_job(experiment_dir).get("job") == job:
        record.write_driver(experiment_dir, job, waiting, ended)


def _enter(folder: str) -> None:
    try:
        os.chdir(folder)
    except OSError as error:
        raise LaunchError(
            Code.DRIVER_WITHOUT_FOLDER(folder=folder, error=error.strerror, host=socket.gethostname())
        ) from None


def _lease(experiment_dir: Path) -> Lease:
    """The experiment's, taken from a job whose machine is gone: it is cut off, and its runs are fenced."""
    lease, until = Lease(experiment_dir / record.FOLDER), time.monotonic() + HANDOVER_S
    while True:
        try:
            lease.acquire(take_over=True)
            return lease
        except LockedError:
            if time.monotonic() > until:
                raise
            time.sleep(1.0)


def _cluster() -> Any:
    """Become a driver of the cluster; returns the class of its engine."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise LaunchError(
            Code.DRIVER_CANNOT_IMPORT_RAY(python=sys.executable, host=socket.gethostname(), error=str(error))
        ) from None
    ray.init(address="auto", log_to_driver=False, logging_level="warning")
    from abrun.launch.ray.gangs import GangEngine

    return GangEngine


if __name__ == "__main__":
    ignore_output_errors()
    sys.exit(main())
