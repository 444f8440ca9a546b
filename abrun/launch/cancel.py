"""The end of an experiment, asked for from anywhere."""

import os
import signal
from pathlib import Path

from abrun.errors import LaunchError
from abrun.launch.engine import queued_jobs
from abrun.reasons import Code
from abrun.runs.experiment import open_experiment
from abrun.runs.lock import owner_of


def cancel(experiment_dir: Path) -> str:
    """Ask whatever runs an experiment to save checkpoints and end; returns what was done, for people.

    Raises LaunchError where only another machine can, StoreError where there is no experiment.
    """
    open_experiment(experiment_dir)
    queued = queued_jobs(experiment_dir)
    busy = queued.busy if queued else []
    if queued and busy:
        queued.cancel()
        count = "1 job" if len(busy) == 1 else f"{len(busy)} jobs"
        return f"cancelled: {count} ({', '.join(busy)}); what runs saves a checkpoint first"
    owner = owner_of(experiment_dir)
    if owner is None:
        return f"{experiment_dir.name}: nothing of it runs or waits"
    if not owner.is_seen_from_here or owner.pid is None:
        raise LaunchError(Code.LAUNCHED_ELSEWHERE(directory=experiment_dir, owner=str(owner)))
    try:
        os.kill(owner.pid, signal.SIGTERM)
    except OSError as error:
        raise LaunchError(
            Code.LAUNCHER_UNREACHABLE(directory=experiment_dir, owner=str(owner), error=str(error))
        ) from None
    return f"asked {owner} to stop: its runs save checkpoints first"
