"""`python -m abrun.launch.slurm.node RUN_DIR HOST:PORT GRACE_S`: one node of a run, started by srun on each.

Checks that this node sees the run directory and has what the run needs, says in one line what is wrong, or
becomes the agent of the node's ranks.
"""

import os
import socket
import sys
from pathlib import Path

from abrun.errors import AbrunError, LaunchError
from abrun.launch.command import Meeting, command_of, environment
from abrun.launch.requirements import node_refusals, this_machine
from abrun.recipe import stored_run
from abrun.store import RunDir

FAILED = 2


def main() -> int:
    directory, address, grace_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    meeting = Meeting(address=address, node=int(os.environ["SLURM_PROCID"]), grace_s=grace_s)
    try:
        command, env = agent_of(RunDir(directory), meeting)
    except AbrunError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return FAILED
    os.execve(command[0], command, env)


def agent_of(run: RunDir, meeting: Meeting) -> tuple[list[str], dict[str, str]]:
    """Command and environment of the agent of this node's ranks. Raises LaunchError for what it lacks."""
    host, first = socket.gethostname(), meeting.address.rpartition(":")[0]
    if not run.exists:
        raise LaunchError(
            f"{run.path}: not on {host}, and on {first} it is: the nodes have to share it; launch with "
            "--runs-dir on a file system that all of them see"
        )
    config = stored_run(run.record().config, str(run.path))
    machine = this_machine()
    wrong = node_refusals(config, machine)
    if wrong:
        raise LaunchError(f"{host}: {wrong[0]}")
    if meeting.node == 0:  # as it would without srun, so that the agent keeps the log's size
        with run.open_log() as log:
            os.dup2(log, 1)
            os.dup2(log, 2)
    count = config.devices_per_node
    devices = machine.gpus[:count] if config.cluster.gpus_per_node else ("cpu",) * count
    return command_of(run.path, config, meeting), environment(run.path, devices, config)


if __name__ == "__main__":
    sys.exit(main())
