"""`python -m abrun.launch.export.member EXPERIMENT_DIR RUN NODE HOST:PORT GRACE_S`: a node of a run.

There is no launcher: the first node of whichever run is first makes the experiment's directory, of the recipe
in the environment. Then each becomes the agent of its ranks, as a node of any cluster does. A run that has
finished ends at once, so that an engine may start all of a pair again.
"""

import contextlib
import os
import sys
import time
from pathlib import Path

from abrun.errors import AbrunError, LaunchError
from abrun.experiment.command import Rendezvous
from abrun.experiment.plan import ExperimentPlan, RunName, make_plan
from abrun.launch.export.parts import RECIPE, recipe_in
from abrun.launch.node import FAILED, agent_of
from abrun.launch.prepare import owned_experiment, warm_start_dir, write_run
from abrun.launch.slurm.jobs import WARM_START
from abrun.processes.output import ignore_output_errors
from abrun.reasons import Code
from abrun.runs import experiment
from abrun.runs.experiment import WARM_STARTS, is_experiment
from abrun.runs.lock import LockedError
from abrun.runs.rundir import RunDir

WAIT_S = 300.0  # for another run that makes the directory, and for the file system to show it
POLL_S = 1.0


def main() -> int:
    experiment_dir, name, node = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    meeting = Rendezvous(address=sys.argv[4], node=node, grace_s=float(sys.argv[5]))
    run = None
    try:
        plan = make_plan(recipe_in(os.environ.get(RECIPE, "")))
        run = run_dir(plan, experiment_dir, name)
        if node == 0:
            prepare(plan, experiment_dir, name, run)
        else:
            wait_for(run)
        if run.finished:
            print(f"{name}: finished before", flush=True)
            return 0
        command, env = agent_of(run, meeting, seen_on=meeting.address.rpartition(":")[0])
    except AbrunError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        if run and run.exists and not run.finished:
            with contextlib.suppress(AbrunError):
                run.begin_launch((), None)
                run.end_launch("failed", error.reason)
        return FAILED
    env.pop(RECIPE, None)
    os.execve(command[0], command, env)


def run_dir(plan: ExperimentPlan, experiment_dir: Path, name: str) -> RunDir:
    """Where a run of the plan lives. Raises LaunchError for a name that it has not."""
    places = {str(run.name): experiment.run_dir(experiment_dir, run.name) for run in plan.runs}
    places |= {f"{WARM_START}/{key}": warm_start_dir(experiment_dir, key) for key in plan.warm_starts}
    if name not in places:
        raise LaunchError(Code.EXPORT_WITHOUT_RUN(run=name, recipe=plan.recipe.name))
    return RunDir(places[name])


def prepare(plan: ExperimentPlan, experiment_dir: Path, name: str, run: RunDir) -> None:
    """Tell the run what to do, and see to it that what it starts from is there."""
    kind, _, key = name.partition("/")
    if kind == WARM_START and key in plan.warm_starts:
        if not run.exists:
            write_run(run.path, WARM_STARTS, RunName(arm=WARM_START, seed=0), plan.warm_starts[key])
        return
    _make_experiment(plan, experiment_dir)
    planned = next(each for each in plan.runs if str(each.name) == name)
    made = RunDir(warm_start_dir(experiment_dir, planned.warm_start or ""))
    if planned.warm_start and not run.finished and not made.finished:
        raise LaunchError(Code.WARM_START_NOT_MADE(run=name, path=made.path))


def _make_experiment(plan: ExperimentPlan, experiment_dir: Path) -> None:
    """Write the experiment's directory, or find that it holds the same; runs take turns."""
    until = time.monotonic() + WAIT_S
    while True:
        here = is_experiment(experiment_dir)
        try:
            with owned_experiment(plan, experiment_dir, resume=here, say=print):
                return
        except (LaunchError, LockedError) as error:
            faster = not here and is_experiment(experiment_dir)
            if not (faster or isinstance(error, LockedError)) or time.monotonic() > until:
                raise
            time.sleep(POLL_S)


def wait_for(run: RunDir) -> None:
    """Until the first node has written what the run is to do, as far as this one sees it."""
    until = time.monotonic() + WAIT_S
    while not run.exists and time.monotonic() < until:
        time.sleep(POLL_S)


if __name__ == "__main__":
    ignore_output_errors()
    sys.exit(main())
