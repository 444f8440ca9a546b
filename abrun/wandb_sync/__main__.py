"""`python -m abrun.wandb_sync RUN_DIR`: mirrors a run in wandb until its standard input ends, and the rest.

It prints reasons, as lines of JSON, for its parent. With --all it also sends what only older attempts have
recorded, and says how many steps it sent.
"""

import argparse
import os
import select
import sys
from pathlib import Path

from abrun.errors import AbrunError
from abrun.messages.records import print_reason
from abrun.reasons import Code
from abrun.recipe.experiment import stored_run
from abrun.recipe.run import OwnRunConfig
from abrun.runs.files import make_private_folder
from abrun.runs.rundir import RunDir
from abrun.wandb_sync.wandb_run import Rows, WandbRun

POLL_S = 1.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m abrun.wandb_sync")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--all", action="store_true")
    asked = parser.parse_args()
    run = RunDir(asked.directory)
    try:
        config = stored_run(run.record().config)
        assert isinstance(config, OwnRunConfig) and config.wandb
        os.umask(make_private_folder(run.path / "wandb"))
        rows = Rows(run)
        mirror = WandbRun(run, run.record(), config.wandb, print_reason, mode="online" if asked.all else None)
        sent, ended = 0, False
        while mirror.alive and not ended:
            ended = bool(select.select([sys.stdin], [], [], POLL_S)[0])  # nobody writes there: it has ended
            sent += sum(mirror.log(*row) for row in rows.new())
        if asked.all:
            sent += sum(mirror.log(*row) for row in rows.rest())
        alive = mirror.alive
        url = mirror.url
        mirror.finish()
    except AbrunError as error:
        print_reason(error.reason)
        return 1
    if asked.all and alive:
        print_reason(Code.STEPS_SENT(steps=sent, url=url))
    return 0 if alive else 1


if __name__ == "__main__":
    sys.exit(main())
