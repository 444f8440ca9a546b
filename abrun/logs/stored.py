"""Reader for abrun's own run directories, wherever they were copied to."""

from pathlib import Path
from typing import Any

from abrun.errors import StoreError
from abrun.logs.log import Log, LogStatus, unreadable_log
from abrun.recipe.reading import dotted
from abrun.runs.experiment import run_dir
from abrun.runs.files import wrap_read_errors
from abrun.runs.layout import RunName, parse_run_folder
from abrun.runs.redaction import printable
from abrun.runs.rundir import RunDir
from abrun.runs.state import read_state


def is_run_dir(folder: Path) -> bool:
    """Return True if a folder is a run directory of abrun."""
    return RunDir(folder).is_run


def read_run_dir(folder: Path, name: str) -> Log:
    """Return a run; one whose files cannot be read gets the status `unreadable` and the cause.

    Raises StoreError if neither the files nor the names of the folders say which run it is.
    """
    run = RunDir(folder)
    try:
        with wrap_read_errors(folder):
            return _read_run(run, name)
    except StoreError as error:
        identity = _find_identity(run)
        if identity is None:
            raise
        return unreadable_log(name, folder, error, identity)


def _read_run(run: RunDir, name: str) -> Log:
    record = run.record()
    status, failure = _read_status(run, record.name)
    return Log(
        **read_recording(run),
        name=name,
        place=printable(str(run.path)),
        status=status,
        failure=failure,
        config=dotted({**record.config, "initial_weights": record.initial_weights}),
        identity=_printable_name(record.name),
    )


def read_recording(run: RunDir) -> dict[str, Any]:
    """Return the fields of a RunRecording that a run directory holds as they are."""
    texts = run.result.text_values
    return {
        "metrics": run.metrics(),
        "environment": run.environment(),
        "code": run.code_versions(),
        "unread": {metric: text.at for metric, text in texts.items()},
        "dropped": {metric: text.steps for metric, text in texts.items()},
    }


def _find_identity(run: RunDir) -> RunName | None:
    try:
        return _printable_name(run.record().name)
    except StoreError:
        return parse_run_folder(run.path.resolve())


def _printable_name(name: RunName) -> RunName:
    return RunName(arm=printable(name.arm), seed=name.seed, rerun=name.rerun)


def _read_status(run: RunDir, identity: RunName) -> tuple[LogStatus, str]:
    if run.finished:
        return "finished", ""
    folder = run.path.resolve()
    if run_dir(folder.parent.parent, identity) != folder:
        return "unknown", ""  # a copy under another name
    state = read_state(run, identity)
    if state.status in ("failed", "interrupted"):
        return "failed", state.message or state.status
    return "running", ""
