"""`python -m abrun.launch.node RUN_DIR HOST:PORT GRACE_S SEEN_ON [NODE]`: one node of a run in a cluster job.

Checks that this node sees the run directory, has what the run needs and does not differ from the run's first
node, and then becomes the agent of the node's ranks. Prints one line about a problem. SEEN_ON is the host
that has the run directory. NODE is this node's index in the run, by default srun's task number.
"""

import hashlib
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from abrun.errors import AbrunError, LaunchError
from abrun.experiment.command import Rendezvous, run_command, run_environment
from abrun.experiment.preflight.checks import node_refusals
from abrun.experiment.preflight.machine import Machine, this_machine
from abrun.external.run import query_interpreter
from abrun.recipe.command import CommandRunConfig
from abrun.recipe.experiment import parse_stored_run
from abrun.recipe.run import RunConfig
from abrun.runs.files import open_log
from abrun.runs.launches import measure_clock, read_first_node, write_ending, write_first_node
from abrun.runs.records import FirstNode
from abrun.runs.rundir import RunDir

FAILED = 2
PACKAGE = Path(__file__).parents[1]
# Positions of a run's GPUs among those of its node, if it shares them with other runs of the job
GPU_POSITIONS = "ABRUN_GPU_POSITIONS"
FIRST_NODE_TIMEOUT_S = 120.0  # some file systems show a new file after a minute
MAX_CLOCK_DIFFERENCE_S = 5.0
SHARE_RUNS = "launch with --runs-dir on a file system that all nodes share"


def main() -> int:
    directory, address, grace_s, seen_on, *number = sys.argv[1:]
    node = int(number[0] if number else os.environ["SLURM_PROCID"])
    meeting = Rendezvous(address=address, node=node, grace_s=float(grace_s))
    run = RunDir(Path(directory))
    try:
        command, env = make_agent_command(run, meeting, seen_on)
    except AbrunError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        write_ending(run, f"node-{node:04d}", run.last_attempt, error.reason)
        return FAILED
    os.execve(command[0], command, env)


def make_agent_command(run: RunDir, meeting: Rendezvous, seen_on: str) -> tuple[list[str], dict[str, str]]:
    """Return command and environment of this node's agent. Raises LaunchError for what the node lacks."""
    host = socket.gethostname()
    if not run.exists:
        raise LaunchError(f"{run.path}: exists on {seen_on}, but not on {host}; {SHARE_RUNS}")
    config = parse_stored_run(run.record().config, str(run.path))
    machine = this_machine()
    if positions := os.environ.get(GPU_POSITIONS):
        chosen = [gpu for index, gpu in enumerate(machine.gpus) if str(index) in positions.split(",")]
        machine = replace(machine, gpus=tuple(chosen))
    problems = node_refusals(config, machine)
    if problems:
        raise LaunchError(f"{host}: {problems[0]}")
    if config.started_nodes > 1:
        _compare_with_first_node(run, config, machine, meeting)
    # The agent limits the size of the log, as on a single machine.
    is_command = isinstance(config, CommandRunConfig)
    if meeting.node == 0 or is_command:
        with open_log(run.node_log(meeting.node)) as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
    count = config.devices_per_node
    devices = machine.gpus[:count] if config.cluster.gpus_per_node else ("cpu",) * count
    env = run_environment(run.path, devices, config, meeting)
    if is_command and "SLURM_JOB_ID" in env:
        env = _allow_steps(env, config.cluster.nodes)
    return run_command(run.path, config, meeting), env


def _compare_with_first_node(run: RunDir, config: RunConfig, machine: Machine, meeting: Rendezvous) -> None:
    """Write this node's software and clock if it is the first, else compare. Raises LaunchError."""
    host, (head, _, port) = socket.gethostname(), meeting.address.rpartition(":")
    code = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(PACKAGE.rglob("*.py"))))
    versions = {"abrun's code": code.hexdigest()[:8], "Python": platform.python_version(), **machine.packages}
    if isinstance(config, CommandRunConfig) and (names := config.trainer.versions_of):
        python = config.trainer.python or sys.executable
        trainer_versions = query_interpreter(python, names, os.environ).get("versions", {})
        versions |= {f"{name} in {python}": version for name, version in trainer_versions.items()}
    clock_s = measure_clock(run, meeting.node)
    if meeting.node == 0:
        try:
            socket.create_server(("", int(port))).close()
        except OSError as error:
            raise LaunchError(f"{host}: port {port}, where the nodes meet: {error.strerror}") from None
        write_first_node(run, FirstNode(start=meeting.address, host=host, clock_s=clock_s, versions=versions))
        return
    deadline = time.monotonic() + FIRST_NODE_TIMEOUT_S
    while (first := read_first_node(run)).start != meeting.address:
        if time.monotonic() > deadline:
            unseen = f"what {head} wrote to {run.path} {FIRST_NODE_TIMEOUT_S:.0f} s ago"
            raise LaunchError(f"{host}: does not see {unseen}; {SHARE_RUNS}")
        time.sleep(0.2)
    if (apart_s := abs(clock_s - first.clock_s)) > MAX_CLOCK_DIFFERENCE_S:
        clocks = f"its clock and that of {first.host} are {apart_s:.0f} s apart"
        raise LaunchError(f"{host}: {clocks}; synchronise them")
    for name in sorted(versions.keys() | first.versions.keys()):
        version, first_version = versions.get(name) or "(none)", first.versions.get(name) or "(none)"
        if version != first_version:
            problem = f"has {name} {version}, but {first.host} {first_version}"
            raise LaunchError(f"{host}: {problem}; install the same on all nodes")


def _allow_steps(env: Mapping[str, str], nodes: int) -> dict[str, str]:
    """Return variables with which a command's `srun` starts a task on each node, as in a batch script.

    Without them it would wait for the CPUs and the memory of the step that it is called in.
    """
    counts = {f"SLURM_{name}": str(nodes) for name in ("NNODES", "NTASKS", "NPROCS")}
    counts["SLURM_TASKS_PER_NODE"] = f"1(x{nodes})"
    others = {name: env[name] for name in env if name not in ("SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU")}
    return others | counts | {"SLURM_OVERLAP": "1", "SLURM_MEM_PER_NODE": "0"}


if __name__ == "__main__":
    sys.exit(main())
