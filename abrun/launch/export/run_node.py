"""`python -m abrun.launch.export.run_node EXPERIMENT_DIR RUN NODE HOST:PORT GRACE_S`: one node of a run.

There is no launcher: the first node that starts creates the experiment's directory from the recipe in its
environment. Every node then becomes the agent of its ranks, as on any cluster. A run that has finished exits
at once, so an engine may restart a whole pair.
"""

import contextlib
import os
import sys
import time
from pathlib import Path

from abrun.errors import AbrunError, LaunchError
from abrun.experiment.command import Rendezvous
from abrun.experiment.plan import ExperimentPlan, make_plan
from abrun.launch.export.manifest import RECIPE_VARIABLE, parse_recipe
from abrun.launch.node import FAILED, make_agent_command
from abrun.launch.prepare import own_experiment, warm_start_dir, write_run_record
from abrun.processes.output import ignore_output_errors
from abrun.reasons import Code
from abrun.runs import experiment
from abrun.runs.experiment import WARM_START, WARM_STARTS, is_experiment
from abrun.runs.lock import LockedError
from abrun.runs.rundir import RunDir

# Time for another run to create the directory, and for the file system to show it.
WAIT_TIMEOUT_S = 300.0
POLL_S = 1.0


def main() -> int:
    experiment_dir, name, node = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    meeting = Rendezvous(address=sys.argv[4], node=node, grace_s=float(sys.argv[5]))
    run = None
    try:
        plan = make_plan(parse_recipe(os.environ.get(RECIPE_VARIABLE, "")))
        run = find_run_dir(plan, experiment_dir, name)
        if node == 0:
            prepare_run(plan, experiment_dir, name, run)
        else:
            wait_for_record(run)
        if run.finished:
            print(f"{name}: finished before", flush=True)
            return 0
        command, env = make_agent_command(run, meeting, seen_on=meeting.address.rpartition(":")[0])
    except AbrunError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        if run and run.exists and not run.finished:
            with contextlib.suppress(AbrunError):
                run.begin_launch((), None)
                run.end_launch("failed", error.reason)
        return FAILED
    env.pop(RECIPE_VARIABLE, None)
    os.execve(command[0], command, env)


def find_run_dir(plan: ExperimentPlan, experiment_dir: Path, name: str) -> RunDir:
    """Return the directory of a run of the plan. Raises LaunchError if the plan has no such run."""
    run_dirs = {str(run.name): experiment.run_dir(experiment_dir, run.name) for run in plan.runs}
    run_dirs |= {f"{WARM_START.arm}/{key}": warm_start_dir(experiment_dir, key) for key in plan.warm_starts}
    if name not in run_dirs:
        raise LaunchError(Code.EXPORT_WITHOUT_RUN(run=name, recipe=plan.recipe.name))
    return RunDir(run_dirs[name])


def prepare_run(plan: ExperimentPlan, experiment_dir: Path, name: str, run: RunDir) -> None:
    """Write the experiment's directory, or, if `name` is a warm start, only the warm start's run record.

    Raises LaunchError if the run needs a warm start that has not finished.
    """
    kind, _, key = name.partition("/")
    if kind == WARM_START.arm and key in plan.warm_starts:
        if not run.exists:
            write_run_record(run.path, WARM_STARTS, WARM_START, plan.warm_starts[key])
        return
    _make_experiment(plan, experiment_dir)
    planned = next(run_plan for run_plan in plan.runs if str(run_plan.name) == name)
    warm_start = RunDir(warm_start_dir(experiment_dir, planned.warm_start or ""))
    if planned.warm_start and not run.finished and not warm_start.finished:
        raise LaunchError(Code.WARM_START_NOT_MADE(run=name, path=warm_start.path))


def _make_experiment(plan: ExperimentPlan, experiment_dir: Path) -> None:
    """Write the experiment's directory, or check that it holds the same plan. Concurrent runs take turns."""
    deadline = time.monotonic() + WAIT_TIMEOUT_S
    while True:
        exists = is_experiment(experiment_dir)
        try:
            with own_experiment(plan, experiment_dir, resume=exists, say=print):
                return
        except (LaunchError, LockedError) as error:
            was_just_made = not exists and is_experiment(experiment_dir)
            if not (was_just_made or isinstance(error, LockedError)) or time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)


def wait_for_record(run: RunDir) -> None:
    """Wait until the first node has written the run's record and this node sees it."""
    deadline = time.monotonic() + WAIT_TIMEOUT_S
    while not run.exists and time.monotonic() < deadline:
        time.sleep(POLL_S)


if __name__ == "__main__":
    ignore_output_errors()
    sys.exit(main())
