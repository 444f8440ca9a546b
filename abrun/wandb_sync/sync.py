"""`abrun wandb-sync`: completes every wandb run of an experiment from the run store."""

from collections.abc import Callable
from pathlib import Path

from abrun.errors import StoreError
from abrun.messages import sentence
from abrun.messages.codes import Code
from abrun.recipe.experiment import parse_stored_run
from abrun.recipe.extras import missing_package
from abrun.recipe.run import OwnRunConfig
from abrun.runs.experiment import planned_runs, run_dir
from abrun.runs.files import wrap_read_errors
from abrun.runs.rundir import RunDir
from abrun.wandb_sync import run_module

SYNC_TIMEOUT_S = 600.0  # per run


def sync_experiment(experiment_dir: Path, say: Callable[[str], object]) -> None:
    """Send wandb the steps that it lacks, run by run. Raises StoreError if any run could not be sent."""
    runs = {name: RunDir(run_dir(experiment_dir, name)) for name in planned_runs(experiment_dir)}
    mirrored_runs = {name: run for name, run in runs.items() if run.exists and _is_mirrored(run)}
    if not mirrored_runs:
        raise StoreError(f"{experiment_dir}: none of its runs uses wandb; set wandb in the recipe")
    if missing := missing_package("wandb"):
        raise StoreError(f"{experiment_dir}: wandb-sync {missing}")
    failures = []
    for name, run in mirrored_runs.items():
        code, reasons = run_module(["abrun.wandb_sync", str(run.path), "--all"], SYNC_TIMEOUT_S)
        if code == 0 and reasons and reasons[-1].code == Code.STEPS_SENT:
            say(f"{name}: {sentence(reasons[-1])}")
            continue
        cause = f"no answer within {SYNC_TIMEOUT_S:g} s" if code is None else f"exit code {code}"
        if reasons:  # without what a training run would do next
            is_beginning = reasons[0].code == Code.MIRROR_NOT_BEGUN
            cause = reasons[0]["error"] if is_beginning else sentence(reasons[0])
        failures.append(f"{name}: {cause}")
    if failures:
        raise StoreError(
            f"wandb: {len(failures)} of {len(mirrored_runs)} runs were not uploaded: {failures[0]}"
        )


def _is_mirrored(run: RunDir) -> bool:
    with wrap_read_errors(run.path):
        config = parse_stored_run(run.record().config)
    return isinstance(config, OwnRunConfig) and config.wandb is not None
