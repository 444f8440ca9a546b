"""Command line and environment variables of a run, on any launcher."""

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from abrun.processes import MODULE_OPTIONS, RUN_DIR_VARIABLE
from abrun.recipe.command import CommandRunConfig
from abrun.recipe.run import OwnRunConfig, RunConfig

AGENT = "abrun.launch.agent"
NODE_LIST = "ABRUN_NODE_LIST"  # names of a run's nodes, joined by commas


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Rendezvous of the agents of a run's nodes, and the number of this node."""

    address: str  # HOST:PORT of the first node
    node: int
    grace_s: float  # seconds for a checkpoint after a stop request


def find_free_port() -> int:
    """Return a port of this host on which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def node_variables(config: CommandRunConfig, meeting: Rendezvous | None = None) -> dict[str, str]:
    """Return the variables that tell a command its nodes; without a `meeting`, this machine is the only one.

    The launcher has set NODE_LIST, which only it knows, if there are several nodes.
    """
    meeting = meeting or Rendezvous(address=f"127.0.0.1:{find_free_port()}", node=0, grace_s=0.0)
    host, _, port = meeting.address.rpartition(":")
    is_alone = config.cluster.nodes == 1
    values = {
        "NUM_NODES": config.cluster.nodes,
        "NODE_RANK": meeting.node,
        "NODE_LIST": socket.gethostname() if is_alone else os.environ.get(NODE_LIST, host),
        "HEAD_ADDRESS": host,
        "PORT": port,
        "GPUS_PER_NODE": config.cluster.gpus_per_node,
    }
    return {f"ABRUN_{name}": str(value) for name, value in values.items()}


def run_command(directory: Path, config: RunConfig, meeting: Rendezvous | None = None) -> list[str]:
    """Return the command of a run on one node: the agent of its ranks, or an external trainer's follower."""
    if isinstance(config, CommandRunConfig):
        return [sys.executable, *MODULE_OPTIONS, "abrun.external", str(directory)]
    return ranks_command(directory, config, config.cluster.ranks_per_node, meeting=meeting)


def ranks_command(
    directory: Path,
    config: RunConfig,
    num_ranks: int,
    module: str = "abrun.trainer",
    *,
    meeting: Rendezvous | None = None,
) -> list[str]:
    """Return the command that runs a module as ranks on one node, all of which end if one fails."""
    limits = config.limits
    bounds = ["--stalled-s", str(config.stalled_s), "--log-mib", str(limits.log_mib)]
    bounds += ["--run-s", str(limits.run_s)] if limits.run_s else []
    agent = [sys.executable, *MODULE_OPTIONS, AGENT, "--ranks", str(num_ranks)]
    if meeting:
        bounds += ["--nodes", str(config.cluster.nodes), "--node", str(meeting.node)]
        bounds += ["--meet", meeting.address, "--grace-s", str(meeting.grace_s)]
    return [*agent, *bounds, module, str(directory)]


def run_environment(
    directory: Path, devices: Sequence[str], config: RunConfig, meeting: Rendezvous | None = None
) -> dict[str, str]:
    """Return the environment variables of a run on these GPUs, or on CPU cores if `devices` has no GPU.

    `directory` marks the run's processes, so that all of them can be found. abrun's trainer has one process
    per core and the variables of its recipe. An external trainer gets as many threads as cores unless the
    user's environment sets another number; its follower fills in its variables.
    """
    is_own_trainer = isinstance(config, OwnRunConfig)
    # SPT_NOENV keeps setproctitle from overwriting the environment, and with it the mark
    process_marks = {RUN_DIR_VARIABLE: os.path.realpath(directory), "SPT_NOENV": "1"}
    inherited = {
        **os.environ,
        **(config.trainer.env if is_own_trainer else {}),
        **(node_variables(config, meeting) if isinstance(config, CommandRunConfig) else {}),
        "PYTHONUNBUFFERED": "1",
        **process_marks,
    }
    if (
        is_own_trainer and sys.platform == "linux" and config.cluster.nodes == 1
    ):  # the ranks of one machine need not listen on its network
        inherited = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} | inherited
    gpus = [device for device in devices if device != "cpu"]
    if not gpus:
        threads = "1" if is_own_trainer else inherited.get("OMP_NUM_THREADS", str(len(devices)))
        return inherited | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": threads}
    # nvidia-smi numbers GPUs by bus; CUDA numbers them by speed by default
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | inherited | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
