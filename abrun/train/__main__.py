"""`python -m abrun.train RUN_DIR`: one rank of one run, started by torchrun or by hand."""

import os
import sys
from datetime import timedelta
from pathlib import Path

from abrun import progress

FAILED, INTERRUPTED = 2, 3  # exit codes


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m abrun.train RUN_DIR", file=sys.stderr)
        return 2
    progress.join()  # before seconds of imports
    from torch.distributed.elastic.multiprocessing.errors import record

    return record(_train)(Path(sys.argv[1])) or 0


def _train(directory: Path) -> int:
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    from abrun.backends.ranks import COLLECTIVE_TIMEOUT, join_ranks, lost_ranks
    from abrun.errors import AbrunError, LaunchError
    from abrun.store import RunDir, RunWriter
    from abrun.train.loop import Interrupted, train

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
        except RuntimeError as error:
            lost = lost_ranks(error, timeout)
            if lost is None:
                raise
            raise LaunchError(lost) from error
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


if __name__ == "__main__":
    sys.exit(main())
