"""`abrun sync`: every run of an experiment as wandb has it, made what the store says."""

from collections.abc import Callable
from pathlib import Path

from abrun.errors import StoreError
from abrun.extras import lacking
from abrun.mirror import bounded
from abrun.reasons import Code
from abrun.recipe import OwnRunConfig, stored_run
from abrun.store import RunDir, planned_runs, readable, run_dir

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
        code, lines = bounded.run(["abrun.mirror", str(run.path), "--all"], SYNC_S)
        sent = [line.removeprefix("sent: ") for line in lines if line.startswith("sent: ")]
        said = [line.removeprefix("wandb: ") for line in lines if line.startswith("wandb: ")]
        if code == 0 and sent:
            steps, _, url = sent[-1].partition(" ")
            say(f"{name}: {steps} step{'' if steps == '1' else 's'} sent{f', {url}' if url else ''}")
            continue
        why = said[0] if said else f"no answer within {SYNC_S:g} s" if code is None else f"exit code {code}"
        failed.append(f"{name}: {why.removesuffix(' This run goes on without a mirror.')}")
    if failed:
        raise StoreError(Code.RUNS_NOT_SENT(failed=len(failed), runs=len(mirrored), first=failed[0]))


def _is_mirrored(run: RunDir) -> bool:
    with readable(run.path):
        config = stored_run(run.record().config)
    return isinstance(config, OwnRunConfig) and config.wandb is not None
