"""What a run prints, line by line, as it comes, or why it has printed nothing."""

import time
from collections.abc import Iterator
from pathlib import Path

from abrun.errors import StoreError
from abrun.reasons import Code
from abrun.redaction import shown
from abrun.regular_files import open_regular
from abrun.runs.access import read_error
from abrun.runs.experiment import is_experiment, planned_runs
from abrun.runs.lock import describe_launcher
from abrun.runs.records import RunState
from abrun.runs.rundir import RunDir
from abrun.watch.reading import FindJobs

POLL_S = 0.5
READ_BYTES = 1 << 20  # at once; a longer line is printed as several
MOST_NAMED = 8  # runs in a message
AT_WORK = ("waiting", "running", "stalled")


def log_of(directory: Path, find_jobs: FindJobs, *, follow: bool) -> Iterator[str]:
    """Yield the lines of a run's log, with `follow` also those to come until it has ended.

    Where there are none, what is recorded of the run. Raises StoreError for what is no run.
    """
    refuse_experiment(directory)
    run = RunDir(directory)
    if not run.exists:
        raise StoreError(Code.NO_RUN_OR_EXPERIMENT(directory=directory))
    name = run.record().name
    experiment_dir = directory.parent.parent
    jobs = find_jobs(experiment_dir)

    def state() -> RunState:
        return jobs.state_of(run.state(name)) if jobs else run.state(name)

    def at_work() -> bool:
        status = state().status
        return status in AT_WORK or (status == "pending" and describe_launcher(experiment_dir) is not None)

    position, rest = 0, b""
    while True:
        ended = not follow or not at_work()  # asked first: its last lines are there by now
        position, content = _read(run, position)
        while content:
            *lines, rest = (rest + content).split(b"\n")
            lines, rest = ([*lines, rest], b"") if len(rest) >= READ_BYTES else (lines, rest)
            yield from map(_text, lines)
            position, content = _read(run, position)
        if ended:
            yield from [_text(rest)] if rest else []
            if not position:
                yield _recorded(state(), run.log)
            return
        time.sleep(POLL_S)


def refuse_experiment(directory: Path) -> None:
    """Raise StoreError, with the names of its runs, for an experiment in the place of a run."""
    if is_experiment(directory):
        names = [str(directory / str(name)) for name in planned_runs(directory)]
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        raise StoreError(Code.RUN_IS_EXPERIMENT(run=directory, names=names[:MOST_NAMED], more=more))


def _read(run: RunDir, position: int) -> tuple[int, bytes]:
    try:
        with open_regular(run.log) as file:
            file.seek(min(position, run.log_size()))  # shorter: its middle was cut out
            content = file.read(READ_BYTES)
            return file.tell(), content
    except PermissionError as error:
        raise read_error(run.log, error) from None
    except OSError:
        return position, b""


def _recorded(state: RunState, log: Path) -> str:
    why = f": {state.message}" if state.message else ""
    return shown(f"{state.name}: {state.status}{why}; nothing is printed in {log}") + "\n"


def _text(line: bytes) -> str:
    return shown(line.decode(errors="replace").rstrip("\r").expandtabs()) + "\n"
