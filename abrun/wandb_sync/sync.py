"""`abrun sync`: every run of an experiment as wandb has it, made what the store says."""

from collections.abc import Callable
from pathlib import Path

from abrun.errors import StoreError
from abrun.extras import lacking
from abrun.messages import sentence
from abrun.reasons import Code, Reason
from abrun.recipe.experiment import stored_run
from abrun.recipe.run import OwnRunConfig
from abrun.runs.experiment import planned_runs, run_dir
from abrun.runs.files import wrap_read_errors
from abrun.runs.rundir import RunDir
from abrun.wandb_sync import bounded

SYNC_S = 600.0  # for a run


def sync(experiment_dir: Path, say: Callable[[str], object]) -> None:
    """Send wandb the steps that it lacks, run by run. Raises StoreError where a run did not get there."""
    runs = {name: RunDir(run_dir(experiment_dir, name)) for name in planned_runs(experiment_dir)}
    mirrored = {name: run for name, run in runs.items() if run.exists and _is_mirrored(run)}
    if not mirrored:
        raise StoreError(Code.SYNC_NEEDS_SECTION(directory=experiment_dir))
    if missing := lacking("wandb"):
        raise StoreError(Code.SYNC_NEEDS_PACKAGE(directory=experiment_dir, problem=missing))
    failed = []
    for name, run in mirrored.items():
        code, reasons = bounded.run(["abrun.wandb_sync", str(run.path), "--all"], SYNC_S)
        if code == 0 and reasons and reasons[-1].code == Code.STEPS_SENT:
            say(f"{name}: {sentence(reasons[-1])}")
            continue
        why = f"no answer within {SYNC_S:g} s" if code is None else f"exit code {code}"
        failed.append(f"{name}: {_problem(reasons[0]) if reasons else why}")
    if failed:
        raise StoreError(Code.RUNS_NOT_SENT(failed=len(failed), runs=len(mirrored), first=failed[0]))


def _problem(reason: Reason) -> str:
    """Say why steps were not sent; what becomes of a run that trains is of no interest here."""
    return reason["error"] if reason.code == Code.MIRROR_NOT_BEGUN else sentence(reason)


def _is_mirrored(run: RunDir) -> bool:
    with wrap_read_errors(run.path):
        config = stored_run(run.record().config)
    return isinstance(config, OwnRunConfig) and config.wandb is not None
