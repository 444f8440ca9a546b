"""`python -m abrun.train RUN_DIR`: one rank of one run, started by its agent, torchrun or hand."""

import os
import re
import sys
import threading
from datetime import timedelta
from pathlib import Path

from abrun import progress
from abrun.processes.output import outlive_output
from abrun.train import early

FAILED, INTERRUPTED = 2, 3  # exit codes
# As libraries say it that raise no OutOfMemoryError: CUDA's runtime, NCCL, cuBLAS
GPU_MEMORY = r"(CUDA|Cuda) (error|failure).{0,20}out of memory|CUBLAS_STATUS_ALLOC_FAILED"
MOST_QUOTED = 250
OTHERS_SHARE = 0.25  # of a GPU, which is more than the contexts and buffers that the allocator does not count


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m abrun.train RUN_DIR", file=sys.stderr)
        return 2
    progress.join()  # before seconds of imports
    driver = early.begin()
    from torch.distributed.elastic.multiprocessing.errors import record

    return record(_train)(Path(sys.argv[1]), driver) or 0


def _train(directory: Path, driver: threading.Thread) -> int:
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    from abrun.backends.ranks import COLLECTIVE_TIMEOUT, join_ranks, lost_ranks
    from abrun.errors import AbrunError, LaunchError
    from abrun.store import RunDir, RunWriter
    from abrun.train.loop import Interrupted, train

    early.finish(driver)
    run = RunDir(directory)
    writer: RunWriter | None = None
    try:
        record = run.record()
        if os.environ.get("RANK", "0") == "0":  # before the ranks find together, which may fail
            writer = run.begin_attempt()
        limits = record.config.get("limits") or {}
        timeout = max(COLLECTIVE_TIMEOUT, timedelta(seconds=limits.get("stalled_s") or 0.0))
        try:
            train(run, record, writer, join_ranks(record.config["cluster"], timeout))
        except (RuntimeError, MemoryError) as error:
            told = ran_out(error) or (lost_ranks(error, timeout) if isinstance(error, RuntimeError) else None)
            if told is None:
                raise
            raise LaunchError(told) from error
    except Interrupted as error:
        if writer:
            writer.interrupt(exit_code=INTERRUPTED)
        print(error, file=sys.stderr)
        return INTERRUPTED
    except AbrunError as error:
        if writer:
            writer.fail(str(error), exit_code=FAILED)
        get_error_handler().record_exception(error)  # for the agent, who asks what failed first
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    dist.destroy_process_group()
    return 0


def ran_out(error: Exception) -> str | None:
    """A line on an error that tells of memory that was wanting, the GPU's or the machine's; else None."""
    from torch import OutOfMemoryError

    said = " ".join(str(error).split())
    cure = (
        "use a smaller policy.micro_batch_size (with packing: micro_batch_tokens), or see what takes how "
        "much with: abrun memory-profile RECIPE"
    )
    if isinstance(error, OutOfMemoryError) or re.search(GPU_MEMORY, said):
        whose, cure = "a GPU", _held_by_others() or cure
    elif isinstance(error, MemoryError) or "can't allocate memory" in said:
        whose = "the machine"
    else:
        return None
    doing, quoted = progress.doing() or "the start", said[:MOST_QUOTED] or type(error).__name__
    return f"{whose} ran out of memory during {doing}: {cure} ({quoted})"


def _held_by_others() -> str | None:
    """What to do where others hold much of this rank's GPU; None where they do not, or CUDA does not say."""
    import torch

    if not torch.cuda.is_initialized():  # a budget on CPU cores
        return None
    try:
        free, total = torch.cuda.mem_get_info()
        own = torch.cuda.memory_reserved()
    except RuntimeError:
        return None
    others = total - free - own
    if others < OTHERS_SHARE * total:
        return None
    return (
        f"other processes hold {others / 2**30:.1f} of its {total / 2**30:.1f} GiB, this one "
        f"{own / 2**30:.1f}: run fewer at once (--jobs), or end what else is on that GPU"
    )


if __name__ == "__main__":
    outlive_output()
    sys.exit(main())
