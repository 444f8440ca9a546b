"""`python -m abrun.launch.slurm.allocation EXPERIMENT_DIR RUN...`: runs on the first node of a job.

It supervises the runs of this job as steps of its allocation; a failed run restarts within the job. If the
job is out of time or preempted, it saves checkpoints and requeues itself. After the loss of a node, Slurm
requeues it.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from abrun.errors import AbrunError, LaunchError
from abrun.experiment.command import NODE_LIST, find_free_port
from abrun.experiment.plan import make_plan
from abrun.launch.cluster import agent_grace_s, network_variables
from abrun.launch.engine import Devices
from abrun.launch.local import LocalEngine, LocalRun, Slots
from abrun.launch.node import GPU_POSITIONS
from abrun.launch.queue import LaunchJob, LaunchQueue
from abrun.launch.slurm import launcher
from abrun.launch.supervisor import Supervisor, print_line
from abrun.processes import MODULE_OPTIONS
from abrun.processes.output import ignore_output_errors
from abrun.recipe.experiment import parse_stored_recipe
from abrun.recipe.launcher import Slurm
from abrun.recipe.refusals import validated
from abrun.recipe.run import RunConfig
from abrun.runs.experiment import WARM_START, open_experiment
from abrun.runs.launches import begin_launch, end_launch
from abrun.runs.lock import Lease
from abrun.runs.rundir import RunDir
from abrun.runs.state import read_state

RELEASE_TIMEOUT_S = 30.0
NODE_ANSWER_S = 30.0
REQUEUE_TIMEOUT_S = 60.0


class StepEngine(LocalEngine):
    """Starts runs as steps of this job's allocation, each with its share of every node.

    Runs that share GPUs get places on them, by position, and all cores and memory of their one node.
    """

    def __init__(self, settings: Slurm, num_runs: int, configs: Sequence[RunConfig]) -> None:
        """Take the number of unfinished runs, and the configurations for which the job was submitted."""
        super().__init__()
        self._settings, self._num_runs = settings, num_runs
        request = launcher.combine_requests(configs, settings)
        self._shared = request if request and request.runs_per_gpu > 1 else None
        if self._shared:
            positions = tuple(map(str, range(self._shared.gpus)))
            self._slots = Slots(replace(self._machine, gpus=positions))

    def prepare_for(
        self, runs: Sequence[tuple[RunDir, RunConfig]], say: Callable[[str], object]
    ) -> AbstractContextManager[None]:
        if self._settings.container:  # does not see the daemon's folder
            return contextlib.nullcontext()
        return self._serve_mps(runs, say)  # no engine hosts: steps start on their own nodes

    def find_devices(self, run: RunDir, config: RunConfig) -> Devices | None:
        # The allocation has room for all runs, and assigns their devices unless they share them
        return self._slots.find_devices(config) if self._shared else ()

    def start(self, run: RunDir, config: RunConfig, devices: Devices) -> "Step":
        started = super().start(run, config, devices)
        return Step(started.run, started.process, started.devices, started.slots)

    def command(self, run: RunDir, config: RunConfig, devices: Devices) -> list[str]:
        settings = self._settings
        cpus, gpus = config.devices_per_node * settings.cpus_per_rank, launcher.gpus_per_node(config)
        if self._shared:
            cpus, gpus = self._shared.cpus * self._shared.runs, self._shared.gpus
        options = ["--overlap" if self._shared else "--exact"]
        nodes = config.started_nodes
        options += [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
        options += [f"--nodelist={_node_name()}"] if nodes < config.cluster.nodes else []
        options += [f"--cpus-per-task={cpus}", "--kill-on-bad-exit=1", "--quiet"]
        options.append(f"--job-name={_step_name(run)}")
        options += [f"--gres=gpu:{gpus}"] if gpus else []
        memory = os.environ.get("SLURM_MEM_PER_NODE", "")
        # Otherwise the first step would take all memory.
        if memory.isdigit() and int(memory) and not self._shared:
            options.append(f"--mem={int(memory) // self._num_runs}")
        container = settings.container
        if container:
            options.append(f"--container-image={container.image}")
            options += [f"--container-mounts={','.join(container.mounts)}"] if container.mounts else []
        python = settings.python or ("python" if container else sys.executable)
        grace_s = agent_grace_s(save_grace_s(settings))
        node_arguments = [str(run.path), f"{_node_name()}:{find_free_port()}", str(grace_s), _node_name()]
        return ["srun", *options, python, *MODULE_OPTIONS, "abrun.launch.node", *node_arguments]

    def environment(self, run: RunDir, config: RunConfig, devices: Devices) -> dict[str, str]:
        # Without the run's variable: srun must outlive the run to end the step.
        variables = network_variables(self._settings.interface)
        variables |= self._sharing_variables(config, self._settings.cpus_per_rank)
        if config.cluster.nodes > 1:
            hosts = launcher.run_slurm("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"])
            variables[NODE_LIST] = ",".join(hosts.split())
        return {**os.environ, **variables, **({GPU_POSITIONS: ",".join(devices)} if devices else {})}


class Step(LocalRun):
    """A step of the allocation. Its first process on this node is srun."""

    def stop(self, *, kill: bool) -> None:
        job, step_ids = os.environ["SLURM_JOB_ID"], []
        if not kill:  # signals the step, since srun itself would kill it at once
            with contextlib.suppress(LaunchError):
                steps = launcher.run_slurm("squeue", "-h", "-s", f"--jobs={job}", "-o", "%i|%j").splitlines()
                names = (step.partition("|") for step in steps)
                step_ids = [step for step, _, name in names if name == _step_name(self.run)]
                for step in step_ids:
                    launcher.run_slurm("scancel", "--signal=TERM", f"{job}.{step.rpartition('.')[2]}")
        if not step_ids:  # the step still waits for its nodes
            super().stop(kill=kill)


def _step_name(run: RunDir) -> str:
    """Return the job name of a run's step."""
    return "-".join(run.path.parts[-2:])


def save_grace_s(settings: Slurm) -> float:
    """Return the seconds that runs have to save a checkpoint when they are asked to stop."""
    return max(2.0, settings.save_s - 5.0)


def main() -> int:
    experiment_dir, names = Path(sys.argv[1]), sys.argv[2:]
    # Slurm sends SIGUSR1 shortly before the time limit.
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    try:
        record = launcher.read_record(experiment_dir)
        settings = validated(Slurm, record.get("settings", {}), str(experiment_dir / launcher.FOLDER))
        queue = _make_queue(experiment_dir, names)
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        if restarts > settings.requeues:
            raise LaunchError(
                f"launcher.requeues: the job was restarted {restarts} times; continue with --resume"
            )
        index, job = os.environ.get("SLURM_ARRAY_TASK_ID"), os.environ["SLURM_JOB_ID"]
        task = f"{os.environ['SLURM_ARRAY_JOB_ID']}-{index}" if index else job
        lease = Lease(experiment_dir / launcher.FOLDER / "leases" / task)
        # Slurm starts a job only once, so an earlier owner is cut off and will stop.
        lease.acquire(take_over=True)
        try:
            warm_starts_only = all(job.is_warm_start for job in queue.jobs)
            configs = [job.config for job in queue.jobs if job.is_warm_start == warm_starts_only]
            engine = StepEngine(settings, sum(not job.is_done for job in queue.jobs), configs)
            grace_s, git = save_grace_s(settings), record.get("git")
            Supervisor(queue, engine, lease, grace_s, git, say=print_line).run()
        finally:
            lease.close()
    except AbrunError as error:
        for run in (RunDir(experiment_dir / name) for name in names):
            if run.exists and not run.finished:
                with contextlib.suppress(AbrunError):
                    begin_launch(run, (), None)
                    end_launch(run, "failed", error.reason)
        print(f"error: {error}", file=sys.stderr)
        return 2
    is_interrupted = any(job.status == "interrupted" for job in queue.jobs)
    failed = [job for job in queue.jobs if job.status == "failed"]
    has_lost_nodes = bool(failed) and (any(map(_failed_to_restart, failed)) or not _all_nodes_answer())
    if is_interrupted or has_lost_nodes:
        _requeue_if_needed(experiment_dir)
    return 0 if all(job.status == "finished" for job in queue.jobs) else 1


def _make_queue(experiment_dir: Path, names: list[str]) -> LaunchQueue:
    """Return the queue of these runs. Warm starts ran in an earlier Slurm job, which has ended."""
    plan = make_plan(parse_stored_recipe(open_experiment(experiment_dir)["recipe"]))
    keys = [name.rpartition("/")[2] for name in names if name.startswith(f"{launcher.WARM_START_TASK}/")]
    runs = [run for run in plan.runs if str(run.name) in names or run.warm_start in keys]
    queue = LaunchQueue(replace(plan, runs=tuple(runs)), experiment_dir)
    if keys:
        queue.jobs = [job for job in queue.jobs if job.is_warm_start]
        return queue
    for job in queue.jobs:
        if job.is_warm_start:
            status = "finished" if job.run.finished else read_state(job.run, WARM_START).status
            job.status = status if status in ("finished", "interrupted") else "failed"
    return queue


def _failed_to_restart(job: LaunchJob) -> bool:
    """Return True if a run that had worked here could not start again, as while a network is down."""
    with contextlib.suppress(AbrunError):
        attempts = [launch.attempts for launch in job.run.launches()[-2:]]
        return len(attempts) == 2 and 0 < attempts[0] == attempts[1]
    return False


def _requeue_if_needed(experiment_dir: Path) -> None:
    """Requeue this job unless it was cancelled or requeued; retry while Slurm's controller is silent."""
    deadline = time.monotonic() + REQUEUE_TIMEOUT_S
    while True:
        try:
            if _should_requeue(experiment_dir):
                _requeue()
            return
        except LaunchError as error:  # perhaps Slurm requeued the job first and is ending this process
            if time.monotonic() > deadline:
                print(f"error: not requeued: {error}; continue with --resume", file=sys.stderr)
                return
        time.sleep(2)


def _all_nodes_answer() -> bool:
    """Return True if every node still starts a process. Slurm notices a lost node after minutes."""
    nodes = os.environ["SLURM_JOB_NUM_NODES"]
    step_options = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--cpus-per-task=1"]
    try:
        process = subprocess.run(
            ["srun", "--overlap", *step_options, "true"], timeout=NODE_ANSWER_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return process.returncode == 0


def _should_requeue(experiment_dir: Path) -> bool:
    """Return True if nobody has cancelled this job or requeued it."""
    if launcher.read_record(experiment_dir).get("cancelled"):
        return False
    return "JobState=RUNNING" in launcher.run_slurm(
        "scontrol", "show", "job", "-o", os.environ["SLURM_JOB_ID"]
    )


def _requeue() -> None:
    """Requeue this job, which ends this process, without Slurm's two-minute delay."""
    job = os.environ["SLURM_JOB_ID"]
    launcher.run_slurm("scontrol", "requeue", job)
    deadline = time.monotonic() + RELEASE_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(LaunchError):
            launcher.release_job(job, int(launcher.RELEASE_AFTER_S))
        time.sleep(0.5)


def _node_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


if __name__ == "__main__":
    ignore_output_errors()
    sys.exit(main())
