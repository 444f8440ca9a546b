"""`python -m abrun.wandb_sync RUN_DIR`: mirrors a run to wandb until standard input closes.

It then sends the rest, and ends the wandb run: as successful if standard input has a text or the run has a
result, otherwise with the run's exit code. Prints reasons for its parent process, one JSON line each. With
--all it also sends steps that only older attempts have recorded, and prints how many steps it sent.
"""

import argparse
import os
import select
import sys
from pathlib import Path

from abrun.errors import AbrunError
from abrun.messages.codes import Code
from abrun.messages.records import print_reason
from abrun.recipe.experiment import parse_stored_run
from abrun.recipe.run import OwnRunConfig
from abrun.runs.files import make_private_folder
from abrun.runs.rundir import RunDir
from abrun.runs.state import read_state
from abrun.wandb_sync.wandb_run import AttemptRows, WandbRun

POLL_S = 1.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m abrun.wandb_sync")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    run = RunDir(options.directory)
    try:
        config = parse_stored_run(run.record().config)
        assert isinstance(config, OwnRunConfig) and config.wandb
        os.umask(make_private_folder(run.path / "wandb"))
        rows = AttemptRows(run)
        mode = "online" if options.all else None
        mirror = WandbRun(run, run.record(), config.wandb, print_reason, mode=mode)
        num_sent, ended = 0, False
        while mirror.is_alive and not ended:
            # A text is written just before standard input closes.
            ended = bool(select.select([sys.stdin], [], [], POLL_S)[0])
            num_sent += sum(mirror.log(*row) for row in rows.read_new())
        if options.all:
            num_sent += sum(mirror.log(*row) for row in rows.take_older())
        is_alive = mirror.is_alive
        url = mirror.url
        mirror.finish(0 if sys.stdin.read() else exit_code_of(run, is_still_running=options.all))
    except AbrunError as error:
        print_reason(error.reason)
        return 1
    if options.all and is_alive:
        print_reason(Code.STEPS_SENT(steps=num_sent, url=url))
    return 0 if is_alive else 1


def exit_code_of(run: RunDir, *, is_still_running: bool) -> int:
    """Return 0 for a run with a result, otherwise the exit code of its newest attempt, or 1.

    With `is_still_running`, 0 for a run that has not ended either.
    """
    state = read_state(run, run.record().name)
    if state.status == "finished" or (is_still_running and state.status not in ("failed", "interrupted")):
        return 0
    return state.exit_code or 1


if __name__ == "__main__":
    sys.exit(main())
