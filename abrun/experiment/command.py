"""How a run is started anywhere: its command line, its environment variables, and what its end means."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from abrun.processes import MODULE_OPTIONS, RUN_DIR_VARIABLE
from abrun.recipe.command import CommandRunConfig
from abrun.recipe.implementations import BACKENDS
from abrun.recipe.run import OwnRunConfig, RunConfig

AGENT = "abrun.train.agent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the agents of a run's nodes find each other, and which of them this one is."""

    address: str  # HOST:PORT of the first node
    node: int
    grace_s: float  # from being asked to stop: time for a checkpoint


def run_command(directory: Path, config: RunConfig, meeting: Rendezvous | None = None) -> list[str]:
    """The command of one run on a node: our own trainer's agent of its ranks, a foreign one's follower."""
    if isinstance(config, CommandRunConfig):
        return [sys.executable, *MODULE_OPTIONS, "abrun.external", str(directory)]
    return ranks_command(directory, config, config.cluster.ranks_per_node, meeting=meeting)


def ranks_command(
    directory: Path,
    config: RunConfig,
    num_ranks: int,
    module: str = "abrun.train",
    *,
    meeting: Rendezvous | None = None,
) -> list[str]:
    """A module as ranks on one node, with the limits of a run. A failed rank ends them all."""
    limits = config.limits
    bounds = ["--stalled-s", str(config.stalled_s), "--log-mib", str(limits.log_mib)]
    bounds += ["--run-s", str(limits.run_s)] if limits.run_s else []
    agent = [sys.executable, *MODULE_OPTIONS, AGENT, "--ranks", str(num_ranks)]
    if meeting:
        bounds += ["--nodes", str(config.cluster.nodes), "--node", str(meeting.node)]
        bounds += ["--meet", meeting.address, "--grace-s", str(meeting.grace_s)]
    return [*agent, *bounds, module, str(directory)]


def modules_to_preload(config: OwnRunConfig) -> tuple[str, ...]:
    """Modules that every rank of such runs imports: what takes long, and abrun's own, which may be edited."""
    backend = BACKENDS[config.policy.backend.type].partition(":")[0]
    own_modules = "abrun.train.__main__", "abrun.train.loop", f"abrun.train.{config.algorithm.type}", backend
    return *own_modules, *(("torch._inductor.compile_fx",) if config.policy.compile else ())


def run_environment(directory: Path, devices: Sequence[str], config: RunConfig) -> dict[str, str]:
    """The environment variables of a run on these GPUs, or on CPU cores where there are none among them.

    `directory` marks the run's processes, so that all of them can be found.
    Our own trainer has a process a core, and what its recipe sets. A foreign one gets as many threads as
    cores, unless the user's environment says otherwise; its variables are its follower's to fill in.
    """
    is_own_trainer = isinstance(config, OwnRunConfig)
    process_marks = {
        RUN_DIR_VARIABLE: os.path.realpath(directory),
        "SPT_NOENV": "1",
    }  # setproctitle would overwrite them
    inherited = {
        **os.environ,
        **(config.trainer.env if is_own_trainer else {}),
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
    # nvidia-smi numbers the GPUs by bus, CUDA by speed unless told otherwise
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | inherited | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
