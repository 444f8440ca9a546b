"""A launch by a cluster: the experiment's directory, then jobs in a queue that need no launcher."""

import shutil
import time
from pathlib import Path

from abrun.errors import LaunchError
from abrun.experiment.options import LaunchOptions
from abrun.experiment.plan import ExperimentPlan, RunName
from abrun.launch.cluster import Cluster, LeftInQueueError
from abrun.launch.prepare import prepared
from abrun.launch.supervisor import Observer, Outcome
from abrun.runs.experiment import read_run_state
from abrun.runs.records import Status

POLL_S = 0.5
SETTLE_S = 20.0  # that a file server may take to show the last words of jobs that have ended


def hand_over(
    plan: ExperimentPlan, options: LaunchOptions, *, cluster: Cluster, observer: Observer
) -> list[str]:
    """Submit every unfinished run of a plan; returns the jobs. Raises what `run_plan` raises."""
    with prepared(plan, options, cluster.refusals(plan), observer.say) as place:
        try:
            submitted = cluster.submit(plan, place.git, compare=options.compare)
        except LeftInQueueError:  # its jobs need the directory, and so does `cancel`
            raise
        except BaseException:
            if not options.resume:  # nothing of it is in the queue
                shutil.rmtree(place.experiment_dir, ignore_errors=True)
            raise
    cluster.load()
    return submitted


def wait_for(plan: ExperimentPlan, experiment_dir: Path, cluster: Cluster, observer: Observer) -> Outcome:
    """Watch what was handed over until nothing of it is in the queue; however this ends, the jobs go on."""
    observer.follow(experiment_dir)
    while _is_busy(cluster, observer):
        observer.tick()
        time.sleep(POLL_S)
    until = time.monotonic() + SETTLE_S
    while True:
        states = [read_run_state(experiment_dir, run.name) for run in plan.runs]
        if time.monotonic() > until or not any(state.status == "running" for state in states):
            break
        time.sleep(POLL_S)
    statuses: dict[RunName, Status] = {state.name: cluster.state_of(state).status for state in states}
    return Outcome(statuses=statuses, stopped_by=None)


def _is_busy(cluster: Cluster, observer: Observer) -> bool:
    try:
        return bool(cluster.busy)
    except LaunchError as error:  # a controller that restarts
        observer.say(str(error))
        time.sleep(10 * POLL_S)
        return True
