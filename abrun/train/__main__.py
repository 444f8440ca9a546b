"""`python -m abrun.train RUN_DIR`: one rank of one run, started by torchrun or by hand."""

import ctypes
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from abrun import store
from abrun.errors import AbrunError, LaunchError
from abrun.train.loop import Interrupted, train

COLLECTIVE_TIMEOUT = timedelta(minutes=30)


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m abrun.train RUN_DIR", file=sys.stderr)
        return 2
    directory = Path(sys.argv[1])
    try:
        _die_with_parent()
        device = _join_ranks(store.read_json(directory / "config.json")["config"]["cluster"])
        train(directory, device)
    except Interrupted as error:
        print(error, file=sys.stderr)
        return 3
    except AbrunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    dist.destroy_process_group()
    return 0


def _die_with_parent() -> None:
    """Under torchrun, end with the agent: a worker that outlives a killed agent would go on writing."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _join_ranks(cluster: dict[str, int]) -> torch.device:
    """Join the process group of the run's ranks and return this rank's device."""
    on_gpu = cluster["gpus_per_node"] > 0
    if on_gpu and not torch.cuda.is_available():
        raise LaunchError("cluster.gpus_per_node: no CUDA device is visible here; use 0 to train on CPU cores")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # the order of float sums, and so every metric's last bits, depend on it
    backend = "nccl" if on_gpu else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, device_id=device if on_gpu else None)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    expected = cluster["nodes"] * (cluster["gpus_per_node"] or cluster["cpu_ranks"])
    if dist.get_world_size() != expected:
        raise LaunchError(f"cluster: asks for {expected} ranks and {dist.get_world_size()} were started")
    return device


if __name__ == "__main__":
    sys.exit(main())
