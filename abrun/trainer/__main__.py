"""`python -m abrun.trainer RUN_DIR`: one rank of a run, started by its agent, by torchrun or by hand."""

import os
import re
import sys
import threading
from datetime import timedelta
from pathlib import Path

from abrun.messages.codes import Code, Reason
from abrun.processes import progress
from abrun.processes.output import ignore_output_errors
from abrun.runs.failures import record_exception, record_failure
from abrun.runs.writer import begin_attempt
from abrun.trainer.loop import startup

FAILED, INTERRUPTED = 2, 3  # exit codes
# Errors of CUDA's runtime and driver, Triton, NCCL (alloc.h) and CUDA's libraries, which do not raise
# OutOfMemoryError
GPU_MEMORY = (
    r"(CUDA|Cuda) (driver )?(error|failure).{0,20}out of memory|Failed to CUDA (c|m)alloc"
    r"|Triton Error \[CUDA\]: out of memory"
    r"|CU(BLAS|DNN|SOLVER|SPARSE)_STATUS_(INTERNAL_ERROR_DEVICE_)?ALLOC(ATION)?_FAILED"
)
MAX_QUOTED = 250
MIN_OTHERS_SHARE = 0.25  # of a GPU; CUDA contexts and uncounted buffers take less


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m abrun.trainer RUN_DIR", file=sys.stderr)
        return 2
    progress.report_to_agent()  # before seconds of imports
    driver = startup.begin()
    from torch.distributed.elastic.multiprocessing.errors import record

    try:
        return record(_train)(Path(sys.argv[1]), driver) or 0
    except Exception as error:
        record_exception(error)
        raise


def _train(directory: Path, driver: threading.Thread) -> int:
    import torch.distributed as dist

    from abrun.errors import AbrunError, LaunchError
    from abrun.runs.rundir import RunDir
    from abrun.runs.writer import RunWriter
    from abrun.trainer.backends.ranks import COLLECTIVE_TIMEOUT, explain_lost_ranks, join_ranks
    from abrun.trainer.training import Interrupted, train

    startup.finish(driver)
    run = RunDir(directory)
    writer: RunWriter | None = None
    try:
        record = run.record()
        if os.environ.get("RANK", "0") == "0":  # before the rendezvous, which may fail
            writer = begin_attempt(run)
        limits = record.config.get("limits") or {}
        timeout = max(COLLECTIVE_TIMEOUT, timedelta(seconds=limits.get("stalled_s") or 0.0))
        try:
            train(run, record, writer, join_ranks(record.config["cluster"], timeout))
        except (RuntimeError, MemoryError) as error:
            runs_per_gpu = record.config["cluster"].get("runs_per_gpu", 1)
            reason = out_of_memory_reason(error, runs_per_gpu)
            if reason is None and isinstance(error, RuntimeError):
                reason = explain_lost_ranks(error, timeout)
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
        record_failure(error)  # the agent reads it
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    dist.destroy_process_group()
    return 0


def out_of_memory_reason(error: Exception, runs_per_gpu: int = 1) -> Reason | None:
    """Return a reason if an error means that GPU or host memory ran out; otherwise None."""
    from torch import OutOfMemoryError

    message = " ".join(str(error).split())
    on_gpu = isinstance(error, OutOfMemoryError) or bool(re.search(GPU_MEMORY, message))
    if not on_gpu and not isinstance(error, MemoryError) and "can't allocate memory" not in message:
        return None
    return Code.MEMORY_RAN_OUT(
        on_gpu=on_gpu,
        doing=progress.current_activity(),
        # Runs that share a GPU are limited to their own shares
        others=_memory_of_other_processes() if on_gpu and runs_per_gpu == 1 else None,
        runs_per_gpu=runs_per_gpu if on_gpu else 1,
        error=message[:MAX_QUOTED] or type(error).__name__,
    )


def _memory_of_other_processes() -> dict[str, int] | None:
    """Return the memory of this rank's GPU by owner if other processes hold much of it.

    None if they do not, or if CUDA cannot tell.
    """
    import torch

    if not torch.cuda.is_initialized():  # a memory limit on CPU
        return None
    try:
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        reserved_bytes = torch.cuda.memory_reserved()
    except RuntimeError:
        return None
    other_bytes = total_bytes - free_bytes - reserved_bytes
    if other_bytes < MIN_OTHERS_SHARE * total_bytes:
        return None
    return {"other_bytes": other_bytes, "total_bytes": total_bytes, "own_bytes": reserved_bytes}


if __name__ == "__main__":
    ignore_output_errors()
    sys.exit(main())
