"""Launch by a cluster: prepare the experiment's directory and submit jobs, which then need no launcher."""

import shutil
import time
from pathlib import Path

from abrun.errors import LaunchError
from abrun.experiment.options import LaunchOptions
from abrun.experiment.plan import ExperimentPlan, RunName
from abrun.launch.cluster import ClusterJobs, LeftInQueueError
from abrun.launch.prepare import prepare_experiment
from abrun.launch.supervisor import LaunchOutcome, Observer
from abrun.processes import poll_interval
from abrun.runs.experiment import read_run_state
from abrun.runs.records import Status

POLL_S = poll_interval(0.5)
# A file server may take this long to show the last records of jobs that have ended.
SETTLE_TIMEOUT_S = 20.0


def submit_plan(
    plan: ExperimentPlan, options: LaunchOptions, *, cluster: ClusterJobs, observer: Observer
) -> list[str]:
    """Submit every unfinished run of a plan; return the job ids. Raises the same errors as `run_plan`."""
    with prepare_experiment(plan, options, cluster.find_problems(plan), observer.say) as prepared:
        try:
            submitted = cluster.submit(plan, prepared.git, compare=options.compare)
        except LeftInQueueError:  # queued jobs and `cancel` need the directory
            raise
        except BaseException:
            if not options.resume:  # no job is queued
                shutil.rmtree(prepared.experiment_dir, ignore_errors=True)
            raise
    cluster.load()
    return submitted


def wait_for_jobs(
    plan: ExperimentPlan, experiment_dir: Path, cluster: ClusterJobs, observer: Observer
) -> LaunchOutcome:
    """Watch submitted jobs until none is queued or active. If this is interrupted, the jobs continue."""
    observer.follow(experiment_dir)
    while _has_active_jobs(cluster, observer):
        observer.tick()
        time.sleep(POLL_S)
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        states = [read_run_state(experiment_dir, run.name) for run in plan.runs]
        if time.monotonic() > deadline or not any(state.status == "running" for state in states):
            break
        time.sleep(POLL_S)
    statuses: dict[RunName, Status] = {state.name: cluster.state_of(state).status for state in states}
    return LaunchOutcome(statuses=statuses, stopped_by=None)


def _has_active_jobs(cluster: ClusterJobs, observer: Observer) -> bool:
    try:
        return bool(cluster.active_job_ids)
    except LaunchError as error:  # perhaps the controller is restarting
        observer.say(str(error))
        time.sleep(10 * POLL_S)
        return True
