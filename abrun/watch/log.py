"""The log of a run, line by line."""

import time
from collections.abc import Iterator
from pathlib import Path

from abrun.errors import StoreError
from abrun.messages.numbers import listed, more_text
from abrun.processes import poll_interval
from abrun.runs.experiment import is_experiment, planned_runs
from abrun.runs.files import open_regular, read_error
from abrun.runs.lock import describe_launcher
from abrun.runs.redaction import display_safe
from abrun.runs.rundir import RunDir
from abrun.runs.state import RunState, read_state
from abrun.watch.reading import FindJobStates

POLL_S = poll_interval(0.5)
READ_BYTES = 1 << 20  # a longer line is printed as several
MAX_NAMED_RUNS = 8
ACTIVE_STATUSES = ("waiting", "running", "stalled")


def read_log(directory: Path, find_jobs: FindJobStates, *, follow: bool) -> Iterator[str]:
    """Yield the lines of a run's log; with `follow`, also new lines until the run has ended.

    If the log is empty, yield the run's recorded status instead. Raise StoreError if it is not a run.
    """
    refuse_experiment(directory)
    run = RunDir(directory)
    if not run.exists:
        raise StoreError(
            f"{directory}: no such run or experiment, here or in --runs-dir; give a folder, or a name such "
            "as EXPERIMENT/ARM/seed-0 (abrun status lists experiments, abrun status EXPERIMENT its runs)"
        )
    name = run.record().name
    experiment_dir = directory.parent.parent
    jobs = find_jobs(experiment_dir)

    def current_state() -> RunState:
        return jobs.state_of(read_state(run, name)) if jobs else read_state(run, name)

    def is_active() -> bool:
        status = current_state().status
        return status in ACTIVE_STATUSES or (status == "pending" and bool(describe_launcher(experiment_dir)))

    position, partial_line = 0, b""
    while True:
        # Ask before reading, so that the last lines of an ended run are in this read.
        is_last_read = not follow or not is_active()
        position, content = _read_chunk(run, position)
        while content:
            *lines, partial_line = (partial_line + content).split(b"\n")
            if len(partial_line) >= READ_BYTES:
                lines, partial_line = [*lines, partial_line], b""
            yield from map(_decode_line, lines)
            position, content = _read_chunk(run, position)
        if is_last_read:
            yield from [_decode_line(partial_line)] if partial_line else []
            if not position:
                state = current_state()
                why = f": {state.message}" if state.message else ""
                yield display_safe(f"{state.name}: {state.status}{why}; {run.log} is empty") + "\n"
            return
        time.sleep(POLL_S)


def refuse_experiment(directory: Path) -> None:
    """Raise StoreError, with the names of the runs, if `directory` is an experiment and not a run."""
    if is_experiment(directory):
        names = [str(directory / str(name)) for name in planned_runs(directory)]
        omitted = more_text(len(names) - MAX_NAMED_RUNS)
        raise StoreError(
            f"{directory}: is an experiment; name one of its runs: {listed(names[:MAX_NAMED_RUNS])}{omitted}"
        )


def _read_chunk(run: RunDir, position: int) -> tuple[int, bytes]:
    try:
        with open_regular(run.log) as file:
            # The log shrinks when its middle is cut out.
            file.seek(min(position, run.log_size()))
            content = file.read(READ_BYTES)
            return file.tell(), content
    except PermissionError as error:
        raise read_error(run.log, error) from None
    except OSError:
        return position, b""


def _decode_line(line: bytes) -> str:
    return display_safe(line.decode(errors="replace").rstrip("\r").expandtabs()) + "\n"
