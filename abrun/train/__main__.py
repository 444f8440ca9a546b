"""`python -m abrun.train RUN_DIR`: one rank of one run, started by torchrun or by hand."""

import ctypes
import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist

from abrun import store
from abrun.backends.ranks import join_ranks
from abrun.errors import AbrunError, LaunchError
from abrun.train.loop import Interrupted, train
from abrun.train.recorder import failed_to_start


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m abrun.train RUN_DIR", file=sys.stderr)
        return 2
    directory = Path(sys.argv[1])
    try:
        _die_with_parent()
        device = join_ranks(store.read_json(directory / "config.json")["config"]["cluster"])
        train(directory, device)
    except Interrupted as error:
        print(error, file=sys.stderr)
        return 3
    except AbrunError as error:
        if isinstance(error, LaunchError):
            failed_to_start(directory, str(error))
        print(f"error: {error}", file=sys.stderr)
        return 2
    dist.destroy_process_group()
    return 0


def _die_with_parent() -> None:
    """Under torchrun, end with the agent: a worker that outlives a killed agent would go on writing."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
