"""`python -m abrun.train RUN_DIR`: one rank of one run, started by its agent, torchrun or hand."""

import os
import re
import sys
import threading
from datetime import timedelta
from pathlib import Path

from abrun.processes import progress
from abrun.processes.output import ignore_output_errors
from abrun.reasons import Code, Reason
from abrun.train import startup
from abrun.train.failures import record_failure

FAILED, INTERRUPTED = 2, 3  # exit codes
# As libraries say it that raise no OutOfMemoryError: CUDA's runtime, NCCL, cuBLAS
GPU_MEMORY = r"(CUDA|Cuda) (error|failure).{0,20}out of memory|CUBLAS_STATUS_ALLOC_FAILED"
MOST_QUOTED = 250
OTHERS_SHARE = 0.25  # of a GPU, which is more than the contexts and buffers that the allocator does not count


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m abrun.train RUN_DIR", file=sys.stderr)
        return 2
    progress.report_to_agent()  # before seconds of imports
    driver = startup.begin()
    from torch.distributed.elastic.multiprocessing.errors import record

    return record(_train)(Path(sys.argv[1]), driver) or 0


def _train(directory: Path, driver: threading.Thread) -> int:
    import torch.distributed as dist

    from abrun.backends.ranks import COLLECTIVE_TIMEOUT, join_ranks, lost_ranks
    from abrun.errors import AbrunError, LaunchError
    from abrun.runs.rundir import RunDir
    from abrun.runs.writer import RunWriter
    from abrun.train.loop import Interrupted, train

    startup.finish(driver)
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
            reason = ran_out(error)
            if reason is None and isinstance(error, RuntimeError):
                reason = lost_ranks(error, timeout)
            if reason is None:
                raise
            raise LaunchError(reason) from error
    except Interrupted as error:
        if writer:
            writer.interrupt(exit_code=INTERRUPTED)
        print(error, file=sys.stderr)
        return INTERRUPTED
    except AbrunError as error:
        if writer:
            writer.fail(error.reason, exit_code=FAILED)
        record_failure(error)  # for the agent, who asks what failed first
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    dist.destroy_process_group()
    return 0


def ran_out(error: Exception) -> Reason | None:
    """Say that an error tells of memory that was wanting, the GPU's or the machine's; None: it does not."""
    from torch import OutOfMemoryError

    said = " ".join(str(error).split())
    on_gpu = isinstance(error, OutOfMemoryError) or bool(re.search(GPU_MEMORY, said))
    if not on_gpu and not isinstance(error, MemoryError) and "can't allocate memory" not in said:
        return None
    return Code.MEMORY_RAN_OUT(
        on_gpu=on_gpu,
        doing=progress.current_activity(),
        others=_held_by_others() if on_gpu else None,
        error=said[:MOST_QUOTED] or type(error).__name__,
    )


def _held_by_others() -> dict[str, int] | None:
    """Who holds how much of this rank's GPU where others hold much; None: they do not, or CUDA is silent."""
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
    return {"other_bytes": others, "total_bytes": total, "own_bytes": own}


if __name__ == "__main__":
    ignore_output_errors()
    sys.exit(main())
