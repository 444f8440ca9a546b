"""A one-line overview of each experiment in a folder, and the state of runs as JSON."""

import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from abrun.errors import StoreError
from abrun.messages.records import encode_reasons
from abrun.present.tables import Table, columns
from abrun.reasons import Code
from abrun.redaction import display_safe
from abrun.regular_files import is_directory
from abrun.runs.experiment import inaccessible_folders, list_experiments, planned_runs, read_run_state
from abrun.runs.lock import describe_launcher
from abrun.runs.reported import ReportedVerdict, read_reported_verdict
from abrun.watch.activity import describe_activity
from abrun.watch.reading import ExperimentReader, FindJobStates, WatchedRun, estimate_time_left_s

MAX_QUERY_S = 5.0  # for schedulers, over all experiments


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """One experiment: the number of its runs by status, and its progress."""

    experiment: str
    runs: dict[str, int]  # status -> number of runs
    step: int  # summed over all runs
    num_steps: int  # summed over all runs
    verdict: str | None  # of its report; DESCRIPTION without a claim; None: no report
    is_verdict_old: bool  # a run started or finished after the report was written
    launched_by: str | None  # the launcher at work


def read_overviews(runs_dir: Path, find_jobs: FindJobStates) -> tuple[list[Overview], list[str]]:
    """Return all experiments, and notes on what could not be read or asked.

    Schedulers are asked about unfinished experiments, for about MAX_QUERY_S in all. Raise StoreError if the
    folder is missing.
    """
    if not is_directory(runs_dir):
        raise StoreError(Code.RUNS_DIR_MISSING(runs_dir=runs_dir))
    overviews, problems = list[Overview](), list[str]()
    query_s, num_not_asked, unreachable = 0.0, 0, set[str | None]()
    for experiment_dir in list_experiments(runs_dir):
        try:
            states = [read_run_state(experiment_dir, name) for name in planned_runs(experiment_dir)]
            all_finished = all(state.status == "finished" for state in states)
            jobs = None if all_finished else find_jobs(experiment_dir)
            if jobs and query_s < MAX_QUERY_S:
                began_s = time.monotonic()
                states = list(map(jobs.state_of, states))
                query_s += time.monotonic() - began_s
                unreachable |= {jobs.silent} - {None}
            elif jobs:
                num_not_asked += 1
        except StoreError as error:
            problems.append(str(error))
            continue
        reported, problem = _read_verdict(experiment_dir)
        problems += problem
        steps = (state.num_steps if state.status == "finished" else state.step for state in states)
        overviews.append(
            Overview(
                experiment=experiment_dir.name,
                runs=dict(Counter(state.status for state in states)),
                step=sum(steps),
                num_steps=sum(state.num_steps for state in states),
                verdict=reported and reported.verdict,
                is_verdict_old=reported is not None and reported.is_older_than(states),
                launched_by=describe_launcher(experiment_dir),
            )
        )
    problems += map(str, inaccessible_folders(runs_dir))
    if num_not_asked:
        unreachable.add(
            f"the scheduler was not asked about {num_not_asked} more experiments, after {query_s:.0f} s for "
            "others: abrun status EXPERIMENT asks about one"
        )
    return overviews, [*problems, *map(str, unreachable)]


def _read_verdict(experiment_dir: Path) -> tuple[ReportedVerdict | None, list[str]]:
    """Return the verdict in an experiment's report, if it can be read, and why it cannot."""
    try:
        return read_reported_verdict(experiment_dir), []
    except StoreError as error:
        return None, [str(error)]


def render_experiments(
    runs_dir: Path, find_jobs: FindJobStates = lambda experiment_dir: None
) -> RenderableType:
    """Return a table with a row for each experiment. Raise StoreError if the folder is missing."""
    overviews, problems = read_overviews(runs_dir, find_jobs)
    rows = [
        (
            overview.experiment,
            ", ".join(f"{count} {status}" for status, count in overview.runs.items()),
            f"{overview.step}/{overview.num_steps}",
            (overview.verdict or "-") + " (old)" * overview.is_verdict_old,
            overview.launched_by or "",
        )
        for overview in overviews
    ]
    table = Table(columns("experiment", "runs", "steps", "verdict", "launched by"), rows)
    if not (overviews or problems):
        return Text(f"{runs_dir}: no experiments yet")
    return Group(table, *(Text(display_safe(line), style="red") for line in problems))


def status_json(
    runs_dir: Path, experiment_dir: Path | None, find_jobs: FindJobStates = lambda experiment_dir: None
) -> dict[str, Any]:
    """Return all experiments of a folder, or one with its runs, as JSON."""
    if experiment_dir is None:
        overviews, problems = read_overviews(runs_dir, find_jobs)
        return {
            "runs_dir": str(runs_dir),
            "experiments": [asdict(overview) for overview in overviews],
            "notes": problems,
        }
    runs = ExperimentReader(experiment_dir, find_jobs).read()
    reported, _ = _read_verdict(experiment_dir)
    return {
        "experiment": experiment_dir.name,
        "directory": str(experiment_dir),
        "verdict": reported and reported.verdict,
        "is_verdict_old": reported is not None and reported.is_older_than([run.state for run in runs]),
        "launched_by": describe_launcher(experiment_dir),
        "time_left_s": estimate_time_left_s(runs),
        "runs": [_run_json(run) for run in runs],
    }


def _run_json(run: WatchedRun) -> dict[str, Any]:
    return {
        "run": run.label,
        "directory": str(run.state.directory),
        "status": run.status,
        "step": run.step,
        "num_steps": run.state.num_steps,
        "started_s": run.state.started_s,
        "message": run.state.message,
        "message_code": encode_reasons(run.state.reason),
        "activity": describe_activity(run),
        "since_step_s": run.since_step_s,
        "stall_limit_s": run.state.progress and run.state.progress.limit_s,
        "step_time_s": run.step_time_s,
        "eta_s": run.eta_s,
        "peak_memory_bytes": run.peak_bytes,
        "latest": dict(run.latest),
    }
