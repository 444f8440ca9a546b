"""All experiments of a folder in a line each, and the state of runs for machines."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from abrun.errors import StoreError
from abrun.messages.records import coded
from abrun.present.tables import Table, columns
from abrun.reasons import Code
from abrun.redaction import shown
from abrun.regular_files import is_directory
from abrun.runs.experiment import inaccessible_folders, list_experiments, planned_runs, read_run_state
from abrun.runs.lock import describe_launcher
from abrun.watch.reading import ExperimentReader, FindJobs, WatchedRun, time_left_s

ASK_S = 5.0  # for what schedulers say of all experiments


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """One experiment: how many of its runs are in which state."""

    experiment: str
    runs: dict[str, int]  # by status
    step: int  # of all runs together
    num_steps: int
    launched_by: str | None  # who launches it now


def overview(runs_dir: Path, find_jobs: FindJobs) -> tuple[list[Overview], list[str]]:
    """Every experiment, and what could not be read or asked. Raises StoreError where the folder is missing.

    Of those that have not ended the schedulers are asked, for a few seconds in all.
    """
    if not is_directory(runs_dir):
        raise StoreError(Code.RUNS_DIR_MISSING(runs_dir=runs_dir))
    found, troubles = list[Overview](), list[str]()
    asked_s, unasked, silent = 0.0, 0, set[str | None]()
    for experiment_dir in list_experiments(runs_dir):
        try:
            states = [read_run_state(experiment_dir, name) for name in planned_runs(experiment_dir)]
            ended = all(state.status == "finished" for state in states)
            jobs = None if ended else find_jobs(experiment_dir)
            if jobs and asked_s < ASK_S:
                began_s = time.monotonic()
                states = list(map(jobs.state_of, states))
                asked_s += time.monotonic() - began_s
                silent |= {jobs.silent} - {None}
            elif jobs:
                unasked += 1
        except StoreError as error:  # the others can be shown
            troubles.append(str(error))
            continue
        done = sum(state.num_steps if state.status == "finished" else state.step for state in states)
        found.append(
            Overview(
                experiment=experiment_dir.name,
                runs=dict(Counter(state.status for state in states)),
                step=done,
                num_steps=sum(state.num_steps for state in states),
                launched_by=describe_launcher(experiment_dir),
            )
        )
    troubles += map(str, inaccessible_folders(runs_dir))
    if unasked:
        silent.add(
            f"{unasked} more with jobs of a scheduler, which was not asked, after {asked_s:.0f} s for those "
            "before: abrun status EXPERIMENT"
        )
    return found, [*troubles, *map(str, silent)]


def status_of_experiments(
    runs_dir: Path, find_jobs: FindJobs = lambda experiment_dir: None
) -> RenderableType:
    """One row an experiment. Raises StoreError where the folder is missing."""
    found, troubles = overview(runs_dir, find_jobs)
    rows = [
        (
            one.experiment,
            ", ".join(f"{count} {status}" for status, count in one.runs.items()),
            f"{one.step}/{one.num_steps}",
            one.launched_by or "",
        )
        for one in found
    ]
    table = Table(columns("experiment", "runs", "steps", "launched by"), rows)
    said = [Text(shown(line), style="red") for line in troubles]
    return Group(table, *said) if found or said else Text(f"{runs_dir}: no experiments yet")


def status_json(
    runs_dir: Path, experiment_dir: Path | None, find_jobs: FindJobs = lambda experiment_dir: None
) -> dict[str, Any]:
    """For machines: all experiments of a folder, or one with its runs."""
    if experiment_dir is None:
        found, troubles = overview(runs_dir, find_jobs)
        return {"runs_dir": str(runs_dir), "experiments": [asdict(one) for one in found], "notes": troubles}
    runs = ExperimentReader(experiment_dir, find_jobs).read()
    return {
        "experiment": experiment_dir.name,
        "directory": str(experiment_dir),
        "launched_by": describe_launcher(experiment_dir),
        "time_left_s": time_left_s(runs),
        "runs": _runs_json(runs),
    }


def _runs_json(runs: Sequence[WatchedRun]) -> list[dict[str, Any]]:
    return [
        {
            "run": run.label,
            "directory": str(run.state.directory),
            "status": run.status,
            "step": run.step,
            "num_steps": run.state.num_steps,
            "started_s": run.state.started_s,
            "message": run.state.message,
            "message_code": coded(run.state.reason),
            "step_time_s": run.step_time_s,
            "eta_s": run.eta_s,
            "peak_memory_bytes": run.peak_bytes,
            "latest": dict(run.latest),
        }
        for run in runs
    ]
