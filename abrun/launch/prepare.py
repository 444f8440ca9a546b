"""An experiment's directory before its first process: new, or taken up again, never half-written.

Independent of what runs it afterwards. What `--resume` does is the same for every fault: see `_write`.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from abrun.errors import LaunchError, RecipeError, StoreError
from abrun.experiment.options import LaunchOptions
from abrun.experiment.plan import ExperimentPlan, RunName, compare_hash, describe_decisions, diff_configs
from abrun.experiment.preflight.checks import refuse_unset_variables
from abrun.launch.cluster import queued_jobs
from abrun.launch.git import record_checkout
from abrun.launch.notes import notes
from abrun.messages import sentences
from abrun.reasons import Code, Reason
from abrun.recipe.command import CommandRunConfig
from abrun.recipe.experiment import parse_stored_run
from abrun.recipe.run import RunConfig
from abrun.redaction import in_yaml
from abrun.regular_files import is_directory, is_file
from abrun.runs.experiment import (
    REFERENCE,
    WARM_STARTS,
    is_experiment,
    open_experiment,
    planned_runs,
    read_run_state,
    run_dir,
    write_experiment,
)
from abrun.runs.files import (
    partial_files,
    remove_partial_files,
    wrap_read_errors,
    wrap_write_errors,
    write_file,
)
from abrun.runs.layout import NAME_PATTERN
from abrun.runs.lock import LOCK, Lease, launcher_lock
from abrun.runs.records import RunRecord
from abrun.runs.rundir import RunDir

Say = Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """An experiment that this process owns, with every run's `config.json` in it."""

    experiment_dir: Path
    lease: Lease
    git: dict[str, Any] | None  # the checkout that its runs are made from


@contextlib.contextmanager
def prepared(
    plan: ExperimentPlan, options: LaunchOptions, refusals: list[Reason], say: Say
) -> Iterator[Prepared]:
    """Own the directory of a plan that nothing refuses. Raises what `owned_experiment` raises."""
    experiment_dir = experiment_dir_of(plan.recipe.name, options)
    refuse_impossible(plan, refusals)
    with owned_experiment(
        plan, experiment_dir, resume=options.resume, take_over=options.take_over, say=say
    ) as lease:
        git = record_checkout(experiment_dir, diff=plan.recipe.record_diff)
        yield Prepared(experiment_dir=experiment_dir, lease=lease, git=git)


def experiment_dir_of(recipe_name: str, options: LaunchOptions) -> Path:
    """Where an experiment lives. Raises LaunchError for a name that cannot be a folder there."""
    name = recipe_name if options.name is None else options.name
    if not re.fullmatch(NAME_PATTERN, name) or name == WARM_STARTS:
        raise LaunchError(Code.EXPERIMENT_NAME_INVALID(got=name, reserved=WARM_STARTS))
    return Path(os.path.realpath(options.runs_dir)) / name


def refuse_impossible(plan: ExperimentPlan, refusals: list[Reason], *, shown_by_dry_run: bool = True) -> None:
    """Raises LaunchError, one line, where there are reasons why a plan cannot run."""
    if refusals:
        name = plan.recipe.name
        raise LaunchError(
            Code.PLAN_CANNOT_RUN(recipe=name, problems=refusals, shown_by_dry_run=shown_by_dry_run)
        )


def refuse_existing(experiment_dir: Path) -> None:
    """Raises LaunchError where a new experiment cannot be made, as something is there."""
    if is_experiment(experiment_dir):
        names = planned_runs(experiment_dir)
        finished = sum(read_run_state(experiment_dir, name).status == "finished" for name in names)
        raise LaunchError(
            Code.EXPERIMENT_EXISTS(directory=experiment_dir, finished=finished, runs=len(names))
        )
    if is_directory(experiment_dir) and not _was_just_begun(experiment_dir):
        raise LaunchError(Code.DIRECTORY_IN_USE(directory=experiment_dir))


@contextlib.contextmanager
def owned_experiment(
    plan: ExperimentPlan,
    experiment_dir: Path,
    *,
    resume: bool,
    take_over: bool = False,
    say: Say = lambda line: None,
) -> Iterator[Lease]:
    """Own a plan's directory, with every run's `config.json` in it; `say` hears of another launcher's lock.

    A new experiment that cannot be written whole leaves nothing behind. Raises LaunchError or StoreError
    where it exists already (or, to resume, does not), holds other configurations, or is somebody's at work.
    """
    check = _refuse_queued if resume else refuse_existing
    if resume:
        open_experiment(experiment_dir)
    check(experiment_dir)
    states = {run.name: read_run_state(experiment_dir, run.name) for run in plan.runs} if resume else {}
    done = [name for name, state in states.items() if state.status == "finished"]
    refuse_unset_variables(run for run in plan.runs if run.name not in done)
    made = [path for path in (experiment_dir, *experiment_dir.parents) if not os.path.lexists(path)]
    try:
        with launcher_lock(experiment_dir, take_over=take_over, say=say) as lease:
            remove_partial_files(experiment_dir)
            check(experiment_dir)  # again: a faster launcher may have handed it over, or made it, meanwhile
            if resume:
                _check_same(plan, experiment_dir)
                if queued := queued_jobs(experiment_dir):  # they have ended
                    queued.forget()
                _write(plan, experiment_dir, resume=True)
            else:
                try:
                    _write(plan, experiment_dir, resume=False)
                except StoreError:
                    shutil.rmtree(experiment_dir, ignore_errors=True)
                    raise
                for line in (*describe_decisions(plan.decided), *sentences(notes(plan))):
                    say(line)
            if experiment_dir.parent in made:  # what runs write is no code: no `git add` is to take it along
                write_file(experiment_dir.parent / ".gitignore", b"*\n", mode=0o644)
            yield lease
    finally:
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()  # removes a folder that nothing came to lie in


def write_run(
    directory: Path, experiment: str, name: RunName, config: RunConfig, warm_start: Path | None = None
) -> None:
    """Tell a job what to do, in its run directory."""
    weights = warm_start and os.path.relpath(RunDir(warm_start).final_weights, directory)
    RunDir(directory).write_record(
        RunRecord(
            experiment=experiment,
            name=name,
            initial_weights=weights,
            config=config.model_dump(mode="json"),
        )
    )


def warm_start_dir(experiment_dir: Path, key: str) -> Path:
    return experiment_dir.parent / WARM_STARTS / key


def _write(plan: ExperimentPlan, experiment_dir: Path, *, resume: bool) -> None:
    """Write what is not there: to resume, a run that was removed, and the limits that a recipe has now.

    A finished run keeps its result, and its damaged records are mended. A run that cannot be read fails
    alone, once it is its turn. `Job.claim` goes on with all others from their newest checkpoints.
    """
    reference = plan.recipe.compare.reference
    here = experiment_dir / REFERENCE
    if reference and not (is_experiment(experiment_dir) and is_file(here)):
        with wrap_write_errors(here):  # once: a later change of the file is none here
            write_file(here, Path(reference).expanduser().read_bytes())
    declared: dict[str, Any] = {
        "compare_sha256": compare_hash(plan.recipe.compare),
        "launched_pairs": len(plan.recipe.seeds),
        "decided": plan.decided,
    }
    if is_experiment(experiment_dir):  # the first launch's stay
        first = open_experiment(experiment_dir)
        declared |= {key: value for key, value in first.items() if key in declared}
    names = [{"arm": run.name.arm, "seed": run.name.seed, "rerun": run.name.rerun} for run in plan.runs]
    write_experiment(
        experiment_dir,
        {
            "experiment": experiment_dir.name,
            "recipe": plan.recipe.model_dump(mode="json"),
            "runs": names,
            "treatment_diff": plan.treatment_diff,
            **declared,
        },
    )
    for run in plan.runs:
        directory = run_dir(experiment_dir, run.name)
        try:
            with wrap_read_errors(directory):
                here = RunDir(directory)
                if not here.exists:
                    warm_start = warm_start_dir(experiment_dir, run.warm_start) if run.warm_start else None
                    write_run(directory, experiment_dir.name, run.name, run.config, warm_start)
                elif not here.finished:
                    _update_record(here, run.config)
        except StoreError:
            if not resume:
                raise


def _update_record(run: RunDir, config: RunConfig) -> None:
    """Give an unfinished run the limits and aliases of the recipe: those that it has may have ended it."""
    record, content = run.record(), config.model_dump(mode="json")
    changed = {"limits": content["limits"]}
    if isinstance(config, CommandRunConfig):
        aliases = content["trainer"]["aliases"]
        changed["trainer"] = {**record.config["trainer"], "aliases": aliases}
    if any(record.config.get(key) != value for key, value in changed.items()):
        run.write_record(replace(record, config={**record.config, **changed}))


def _refuse_queued(experiment_dir: Path) -> None:
    queued = queued_jobs(experiment_dir)
    busy = queued.busy if queued else []
    if busy:
        raise LaunchError(Code.JOBS_QUEUED(directory=experiment_dir, jobs=busy))


def _was_just_begun(experiment_dir: Path) -> bool:
    """Whether nothing is in a folder but what a launcher leaves that is killed before experiment.json."""
    names = {path.name for path in experiment_dir.iterdir()}
    before = {LOCK, REFERENCE} if LOCK in names else set()
    return names <= {*before, *partial_files(names)}


def _check_same(plan: ExperimentPlan, experiment_dir: Path) -> None:
    """Refuse to mix experiments: every run that is here must be planned, with the configuration it has.

    One that is to be added has to start from the weights that its arm has started from. One that cannot be
    read is let be: `Job.claim` refuses that run alone.
    """
    planned = {run.name: run for run in plan.runs}
    recorded: dict[RunName, RunDir] = {}
    may_rename = True
    for name in planned_runs(experiment_dir):
        if name not in planned:
            raise LaunchError(Code.RESUME_LACKS_RUN(directory=experiment_dir, run=str(name)))
        run = RunDir(run_dir(experiment_dir, name))
        is_readable = False
        with contextlib.suppress(StoreError), wrap_read_errors(run.path):
            recorded |= {name: run} if run.exists else {}
            may_rename = may_rename and not run.finished
            is_readable = True
        may_rename = may_rename and is_readable
    weights: dict[str, Path] = {}
    for name, run in recorded.items():
        with contextlib.suppress(StoreError), wrap_read_errors(run.path):
            if difference := _difference(run, planned[name].config, may_rename=may_rename):
                raise LaunchError(Code.RESUME_OTHER_RECIPE(directory=run.path, difference=difference))
            weights |= {name.arm: run.initial_weights} if run.initial_weights else {}
    for run in plan.runs:
        before = weights.get(run.name.arm) if run.name not in recorded and run.warm_start else None
        wanted = RunDir(warm_start_dir(experiment_dir, run.warm_start or "")).final_weights
        if before and os.path.normpath(before) != os.path.normpath(wanted):
            raise LaunchError(
                Code.RESUME_OTHER_WARM_START(
                    directory=experiment_dir,
                    run=str(run.name),
                    warm_start=run.warm_start,
                    recorded=before.parent.parent.name,
                )
            )


def _difference(run: RunDir, config: RunConfig, *, may_rename: bool) -> str | None:
    """The first value in which a run directory's configuration is not the planned one.

    Limits may change; `may_rename`: aliases too, as long as no run has finished with the old ones.
    """
    try:
        there = parse_stored_run(run.record().config)
    except RecipeError:
        return "its record does not hold a configuration of this abrun"
    there = there.model_copy(update={"limits": config.limits})
    if may_rename and isinstance(there, CommandRunConfig) and isinstance(config, CommandRunConfig):
        trainer = there.trainer.model_copy(update={"aliases": config.trainer.aliases})
        there = there.model_copy(update={"trainer": trainer})
    differences = diff_configs(there, config)
    for key, (has, wants) in differences.items():
        more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
        return f"{key} is {in_yaml(has)} there and {in_yaml(wants)} in the recipe{more}"
    return None
