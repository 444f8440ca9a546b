"""What a run prints, line by line, as it comes, or why it has printed nothing."""

import time
from collections.abc import Iterator
from pathlib import Path

from abrun.redaction import shown
from abrun.regular_files import open_regular
from abrun.store import RunDir, RunState, launcher_of
from abrun.watch.reading import FindJobs

POLL_S = 0.5
AT_WORK = ("waiting", "running", "stalled")


def log_of(directory: Path, find_jobs: FindJobs, *, follow: bool) -> Iterator[str]:
    """The lines of a run's log, with `follow` also those to come until it has ended; where there are none,
    what is recorded of the run.

    Raises StoreError where the folder holds no run.
    """
    run = RunDir(directory)
    name = run.record().name
    experiment_dir = directory.parent.parent
    jobs = find_jobs(experiment_dir)

    def state() -> RunState:
        return jobs.state_of(run.state(name)) if jobs else run.state(name)

    def at_work() -> bool:
        status = state().status
        return status in AT_WORK or (status == "pending" and launcher_of(experiment_dir) is not None)

    position, rest = 0, b""
    while True:
        ended = not follow or not at_work()  # asked first: its last lines are there by now
        position, content = _read(run, position)
        *lines, rest = (rest + content).split(b"\n")
        yield from (_text(line) for line in lines)
        if ended:
            yield from [_text(rest)] if rest else []
            if not position:
                yield _recorded(state(), run.log)
            return
        time.sleep(POLL_S)


def _read(run: RunDir, position: int) -> tuple[int, bytes]:
    try:
        with open_regular(run.log) as file:
            file.seek(min(position, run.log_size()))  # shorter: its middle was cut out
            content = file.read()
            return file.tell(), content
    except OSError:
        return position, b""


def _recorded(state: RunState, log: Path) -> str:
    why = f": {state.message}" if state.message else ""
    return shown(f"{state.name}: {state.status}{why}; nothing is printed in {log}") + "\n"


def _text(line: bytes) -> str:
    return shown(line.decode(errors="replace").rstrip("\r").expandtabs()) + "\n"
