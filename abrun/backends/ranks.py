"""The process group of a run's ranks."""

import os
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from abrun.errors import LaunchError

COLLECTIVE_TIMEOUT = timedelta(minutes=30)


def join_ranks(cluster: Mapping[str, int]) -> torch.device:
    """Join the process group of the run's ranks and return this rank's device."""
    on_gpu = cluster["gpus_per_node"] > 0
    if on_gpu and not torch.cuda.is_available():
        raise LaunchError(
            "cluster.gpus_per_node: no CUDA device is visible here; use 0 to train on CPU cores"
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # the order of float sums, and so every metric's last bits, depend on it
    backend = "nccl" if on_gpu else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, device_id=device if on_gpu else None)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    expected = cluster["nodes"] * (cluster["gpus_per_node"] or cluster["cpu_ranks"])
    if dist.get_world_size() != expected:
        raise LaunchError(f"cluster: asks for {expected} ranks and {dist.get_world_size()} were started")
    return device
