"""`python -m abrun.launch.slurm.allocation EXPERIMENT_DIR RUN...`: what a job does on the first of its nodes.

The supervisor of any launch, over the runs of this job as steps of its allocation: a run that fails begins
again here. A job that is out of time or preempted saves checkpoints and asks Slurm to queue it again; what a
lost node took along, Slurm queues again by itself.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from abrun.errors import AbrunError, LaunchError
from abrun.experiment.plan import make_plan
from abrun.launch.cluster import agents_grace_s, network
from abrun.launch.engine import Place
from abrun.launch.local import LocalEngine, LocalRun
from abrun.launch.node import free_port
from abrun.launch.queue import WARM_START, Job, Queue
from abrun.launch.slurm import jobs
from abrun.launch.slurm.commands import release, slurm
from abrun.launch.slurm.launcher import RELEASE_AFTER_S
from abrun.launch.supervisor import Supervisor, print_line
from abrun.processes import MODULE_OPTIONS
from abrun.processes.output import ignore_output_errors
from abrun.reasons import Code, Reason
from abrun.recipe.experiment import parse_stored_recipe
from abrun.recipe.launcher import Slurm
from abrun.recipe.refusals import validated
from abrun.recipe.run import RunConfig
from abrun.runs.experiment import open_experiment
from abrun.runs.lock import Lease
from abrun.runs.records import Status
from abrun.runs.rundir import RunDir

RELEASE_S = 30.0
ANSWER_S = 30.0
INSIST_S = 60.0


class StepEngine(LocalEngine):
    """Runs as steps of this job's allocation, each with its share of every node."""

    def __init__(self, settings: Slurm, num_runs: int) -> None:
        super().__init__()
        self._settings, self._num_runs = settings, num_runs

    def expecting(self, runs: Sequence[tuple[RunDir, RunConfig]]) -> AbstractContextManager[None]:
        return contextlib.nullcontext()  # a step's processes are its node's

    def place(self, run: RunDir, config: RunConfig) -> Place | None:
        return ()  # of this machine's devices none: the allocation has room for all of its runs

    def start(self, run: RunDir, config: RunConfig, place: Place) -> "Step":
        started = super().start(run, config, place)
        return Step(started.run, started.process, started.place, started.slots)

    def command(self, run: RunDir, config: RunConfig, place: Place) -> list[str]:
        cluster, settings = config.cluster, self._settings
        cpus, gpus = config.devices_per_node * settings.cpus_per_rank, jobs.gpus_of(config)
        options = ["--exact", f"--nodes={cluster.nodes}", f"--ntasks={cluster.nodes}", "--ntasks-per-node=1"]
        options += [f"--cpus-per-task={cpus}", "--kill-on-bad-exit=1", "--quiet", f"--job-name={_step(run)}"]
        options += [f"--gres=gpu:{gpus}"] if gpus else []
        memory = os.environ.get("SLURM_MEM_PER_NODE", "")
        if memory.isdigit() and int(memory):  # else the first step would take all of it
            options.append(f"--mem={int(memory) // self._num_runs}")
        container = settings.container
        if container:
            options.append(f"--container-image={container.image}")
            options += [f"--container-mounts={','.join(container.mounts)}"] if container.mounts else []
        python = settings.python or ("python" if container else sys.executable)
        grace_s = agents_grace_s(grace_of(settings))
        where = [str(run.path), f"{_this_node()}:{free_port()}", str(grace_s), _this_node()]
        return ["srun", *options, python, *MODULE_OPTIONS, "abrun.launch.node", *where]

    def environment(self, run: RunDir, config: RunConfig, place: Place) -> dict[str, str]:
        # Not marked as of the run: srun has to outlive it, to end the step
        return {**os.environ, **network(self._settings.interface)}


class Step(LocalRun):
    """A step, whose first process on this node is srun."""

    def stop(self, *, kill: bool) -> None:
        job, found = os.environ["SLURM_JOB_ID"], []
        if not kill:  # srun would kill the step at once
            with contextlib.suppress(LaunchError):
                steps = slurm("squeue", "-h", "-s", f"--jobs={job}", "-o", "%i|%j").splitlines()
                found = [step.partition("|")[0] for step in steps if step.endswith(f"|{_step(self.run)}")]
                for step in found:
                    slurm("scancel", "--signal=TERM", f"{job}.{step.rpartition('.')[2]}")
        if not found:  # it waits for its nodes
            super().stop(kill=kill)


def _step(run: RunDir) -> str:
    """What the step of a run is called."""
    return "-".join(run.path.parts[-2:])


def grace_of(settings: Slurm) -> float:
    """Seconds that runs have to save a checkpoint once they are asked to stop."""
    return max(2.0, settings.save_s - 5.0)


def main() -> int:
    experiment_dir, names = Path(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), signal.SIGTERM))  # soon out of time
    try:
        record = jobs.read_record(experiment_dir)
        settings = validated(Slurm, record.get("settings", {}), str(experiment_dir / jobs.FOLDER))
        queue = _queue(experiment_dir, names)
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        if restarts > settings.requeues:
            raise LaunchError(Code.REQUEUED_TOO_OFTEN(restarts=restarts))
        lease = Lease(experiment_dir / jobs.FOLDER / "leases" / _task_name())
        lease.acquire(take_over=True)  # Slurm starts a job once: whoever had it is cut off, and will stop
        try:
            engine = StepEngine(settings, len([job for job in queue.jobs if not job.done]))
            arguments = queue, engine, lease, grace_of(settings), record.get("git")
            Supervisor(*arguments, say=print_line).run()
        finally:
            lease.close()
    except AbrunError as error:
        _give_up(experiment_dir, names, error.reason)
        print(f"error: {error}", file=sys.stderr)
        return 2
    left = any(job.status == "interrupted" for job in queue.jobs)
    failed = [job for job in queue.jobs if job.status == "failed"]
    lost = bool(failed) and (any(map(_began_no_more, failed)) or not _nodes_answer())
    if left or lost:
        _go_on(experiment_dir)
    return 0 if all(job.status == "finished" for job in queue.jobs) else 1


def _queue(experiment_dir: Path, names: list[str]) -> Queue:
    """The jobs of these runs; a warm start has a job of Slurm's of its own, which has ended by now."""
    plan = make_plan(parse_stored_recipe(open_experiment(experiment_dir)["recipe"]))
    keys = [name.rpartition("/")[2] for name in names if name.startswith(f"{jobs.WARM_START}/")]
    runs = [run for run in plan.runs if str(run.name) in names or run.warm_start in keys]
    queue = Queue(replace(plan, runs=tuple(runs)), experiment_dir)
    if keys:
        queue.jobs = [job for job in queue.jobs if job.shared]
        return queue
    for job in queue.jobs:
        if job.shared:
            job.status = "finished" if job.run.finished else _ended(job)
    return queue


def _ended(job: Job) -> Status:
    status = job.run.state(WARM_START).status
    return status if status == "interrupted" else "failed"


def _give_up(experiment_dir: Path, names: list[str], why: Reason) -> None:
    for name in names:
        run = RunDir(experiment_dir / name)
        if run.exists and not run.finished:
            with contextlib.suppress(AbrunError):
                run.begin_launch((), None)
                run.end_launch("failed", why)


def _began_no_more(job: Job) -> bool:
    """Whether a run that had worked here could not be started again, as while a network is down."""
    with contextlib.suppress(AbrunError):
        begun = [launch.attempts for launch in job.run.launches()[-2:]]
        return len(begun) == 2 and 0 < begun[0] == begun[1]
    return False


def _go_on(experiment_dir: Path) -> None:
    """Queue this job again, where that is its part; Slurm's controller may just be restarting."""
    until = time.monotonic() + INSIST_S
    while True:
        try:
            if _goes_on(experiment_dir):
                _requeue()
            return
        except LaunchError as error:  # or Slurm has been faster, and ends this process
            if time.monotonic() > until:
                print(f"error: not queued again: {error}; --resume goes on", file=sys.stderr)
                return
        time.sleep(2)


def _goes_on(experiment_dir: Path) -> bool:
    """Whether this job has to see to it that its runs go on: nobody has cancelled it, nor queued it again."""
    if jobs.read_record(experiment_dir).get("cancelled"):
        return False
    return "JobState=RUNNING" in slurm("scontrol", "show", "job", "-o", os.environ["SLURM_JOB_ID"])


def _nodes_answer() -> bool:
    """Whether every node of the allocation still starts a process: Slurm takes minutes to miss one."""
    nodes = os.environ["SLURM_JOB_NUM_NODES"]
    spread = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--cpus-per-task=1"]
    try:
        done = subprocess.run(["srun", "--overlap", *spread, "true"], timeout=ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _requeue() -> None:
    """Back into the queue, which ends this process, and without the two minutes that Slurm makes it wait."""
    job = os.environ["SLURM_JOB_ID"]
    slurm("scontrol", "requeue", job)
    until = time.monotonic() + RELEASE_S
    while time.monotonic() < until:
        with contextlib.suppress(LaunchError):
            release(job, int(RELEASE_AFTER_S))
        time.sleep(0.5)


def _task_name() -> str:
    index = os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{os.environ['SLURM_ARRAY_JOB_ID']}-{index}" if index else os.environ["SLURM_JOB_ID"]


def _this_node() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


if __name__ == "__main__":
    ignore_output_errors()
    sys.exit(main())
