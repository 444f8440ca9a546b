"""Reader for abrun's own run directories, wherever they were copied to."""

from pathlib import Path

from abrun.logs.log import Log, LogStatus, printable
from abrun.recipe.reading import dotted
from abrun.runs.experiment import run_dir
from abrun.runs.layout import RunName
from abrun.runs.rundir import RunDir


def is_run_dir(folder: Path) -> bool:
    """Return True if a folder is a run directory of abrun, by its config.json."""
    run = RunDir(folder)
    return run.has_metrics and run.find_record() is not None


def read_run_dir(folder: Path, name: str) -> Log:
    run = RunDir(folder)
    record = run.record()
    status, failure = _read_status(run, record.name)
    return Log(
        name=name,
        place=printable(str(folder)),
        metrics=run.metrics(),
        status=status,
        failure=failure,
        config=dotted({**record.config, "initial_weights": record.initial_weights}),
        environment=run.environment(),
        code=run.code_versions(),
        unread={metric: text.at for metric, text in run.result.text_values.items()},
        dropped={metric: text.steps for metric, text in run.result.text_values.items()},
        identity=RunName(arm=printable(record.name.arm), seed=record.name.seed, rerun=record.name.rerun),
    )


def _read_status(run: RunDir, identity: RunName) -> tuple[LogStatus, str]:
    if run.finished:
        return "finished", ""
    folder = run.path.resolve()
    if run_dir(folder.parent.parent, identity) != folder:
        return "unknown", ""  # a copy under another name
    state = run.state(identity)
    if state.status in ("failed", "interrupted"):
        return "failed", state.message or state.status
    return "running", ""
