"""A launch by a cluster: the experiment's directory, then jobs in a queue that need no launcher."""

import shutil
import time
from pathlib import Path

from abrun.errors import LaunchError
from abrun.experiment.options import LaunchOptions
from abrun.experiment.plan import Plan, RunName
from abrun.launch.cluster import ClusterJobs, LeftInQueueError, Scheduler, queued_jobs
from abrun.launch.prepare import prepared
from abrun.launch.supervisor import Observer, Outcome
from abrun.runs.experiment import run_state
from abrun.runs.records import Status

POLL_S = 0.5
SETTLE_S = 20.0  # that a file server may take to show the last words of jobs that have ended


def hand_over(plan: Plan, options: LaunchOptions, *, scheduler: Scheduler, observer: Observer) -> list[str]:
    """Submit every unfinished run of a plan; returns the jobs. Raises what `run_plan` raises."""
    with prepared(plan, options, scheduler.refusals(plan), observer.say) as place:
        try:
            return scheduler.submit(plan, place.experiment_dir, place.git, compare=options.compare)
        except LeftInQueueError:  # its jobs need the directory, and so does `cancel`
            raise
        except BaseException:
            if not options.resume:  # nothing of it is in the queue
                shutil.rmtree(place.experiment_dir, ignore_errors=True)
            raise


def wait_for(plan: Plan, experiment_dir: Path, observer: Observer) -> Outcome:
    """Watch what was handed over until nothing of it is in the queue; however this ends, the jobs go on."""
    queued = queued_jobs(experiment_dir)
    if queued is None:
        raise LaunchError(f"{experiment_dir}: no job of it was handed over")
    observer.follow(experiment_dir)
    while _is_busy(queued, observer):
        observer.tick()
        time.sleep(POLL_S)
    until = time.monotonic() + SETTLE_S
    while True:
        states = [run_state(experiment_dir, run.name) for run in plan.runs]
        if time.monotonic() > until or not any(state.status == "running" for state in states):
            break
        time.sleep(POLL_S)
    statuses: dict[RunName, Status] = {state.name: queued.state_of(state).status for state in states}
    return Outcome(statuses=statuses, stopped_by=None)


def _is_busy(queued: ClusterJobs, observer: Observer) -> bool:
    try:
        if queued.busy:
            return True
        revived = queued.revive()
        if revived:
            observer.say(f"what had been handed over is gone: handed over again, as {revived}")
        return revived is not None
    except LaunchError as error:  # a controller that restarts
        observer.say(str(error))
        time.sleep(10 * POLL_S)
        return True
