"""Launch of a recipe through to its verdict, for both the command line and `abrun.launch`.

It combines `launch` and `report`, which do not import each other: it resolves `auto` values, runs the plan
(in stages with `--until-decided`), and compares the arms.
"""

import os
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from abrun.errors import AbrunError, LaunchError, RecipeError
from abrun.experiment.noise import declare_noise
from abrun.experiment.options import LaunchOptions
from abrun.experiment.plan import ExperimentPlan, RunName, make_draft
from abrun.launch import derived_recipes
from abrun.launch.cluster import ClusterJobs, find_cluster_jobs, make_cluster
from abrun.launch.engine import Engine, make_engine
from abrun.launch.prepare import resolve_experiment_dir
from abrun.launch.supervisor import LaunchOutcome, run_plan, submit_plan, wait_for_jobs
from abrun.messages.numbers import counted
from abrun.recipe.experiment import CommandRecipe, Recipe
from abrun.recipe.implementations import load_tool, scheduler_names
from abrun.recipe.launcher import resolve_launcher_settings
from abrun.runs.experiment import is_experiment, read_reported_verdict
from abrun.runs.layout import REPORT
from abrun.watch import View

if TYPE_CHECKING:
    from abrun.report.comparing import Comparison
    from abrun.report.present.terminal import Terminal

NO_VERDICT = "the comparison job wrote no verdict; run: abrun compare {0} -o {0}/report"

InterimState = Literal["open", "step one", "decided", "not taken"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLaunch:
    """Plan without `auto` values, and the engine or cluster that would start its runs."""

    plan: ExperimentPlan
    experiment_dir: Path
    engine: Engine | None
    cluster: ClusterJobs | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """Result of a launch: the outcome of its runs, and their comparison if requested."""

    experiment_dir: Path
    outcome: LaunchOutcome | None  # None: detached, with its jobs queued on a cluster
    exit_code: int = 0  # 1 if a run did not finish or the comparison failed, 128 + signal
    comparison: "Comparison | None" = None  # made by this process
    compared: str | None = None  # printed by the job that compares, on a cluster
    verdict_exit_code: int = 0  # of the verdict; 0 if nothing was compared
    problem: str | None = None  # why the comparison could not be made


def plan_launch(
    recipe: Recipe | CommandRecipe,
    options: LaunchOptions,
    *,
    dry_run: bool = False,
    say: Callable[[str], object] = lambda line: None,
) -> PlannedLaunch:
    """Resolve a recipe's `auto` values and make its plan.

    Raises RecipeError or LaunchError if the options do not fit the recipe or `auto` cannot be resolved.
    """
    experiment_dir = resolve_experiment_dir(recipe.name, options)
    recipe = declare_noise(recipe, experiment_dir)
    if options.until_decided or options.max_seeds is not None:
        recipe = _declare_stages(recipe, options)
    draft = make_draft(recipe)
    settings = resolve_launcher_settings(recipe.launcher, options.launcher)
    engine, cluster = None, make_cluster(settings, experiment_dir, options.jobs)
    if cluster:
        find_problems = cluster.find_problems
    else:
        engine = make_engine("local" if options.launcher is None else options.launcher, options.jobs)
        find_problems = engine.find_problems
    plan = draft
    if recipe.auto_keys or options.device_memory is not None:
        predict = load_tool("predict", ", ".join(recipe.auto_keys) or "--device-memory")
        where = {"is_local": cluster is None, "dry_run": dry_run}
        plan = predict.resolve_auto(recipe, draft, options, find_problems, **where, say=say)
    for prior in () if options.resume else recipe.compare.noise_priors:
        earlier = counted(prior.experiments, "earlier experiment")
        say(f"{prior.metric} over {prior.window}: noise of {earlier}, sd {prior.sd:.3g}, d0 {prior.dof:.1f}")
    return PlannedLaunch(plan=plan, experiment_dir=experiment_dir, engine=engine, cluster=cluster)


def launch_recipe(
    recipe: Recipe | CommandRecipe, options: LaunchOptions, console: "Terminal", command: str | None = None
) -> LaunchResult:
    """Run a recipe with progress on `console` and compare its arms; the report names the `command`.

    Raises RecipeError, LaunchError or StoreError before anything has started.
    """
    planned = plan_launch(recipe, options, say=console.say)
    run = _run_in_stages if options.until_decided else _run
    outcome = run(planned, options, console)
    exit_code = outcome.exit_code if outcome else 0
    launched = LaunchResult(experiment_dir=planned.experiment_dir, outcome=outcome, exit_code=exit_code)
    if outcome is None or outcome.stopped_by or not options.compare:
        return launched
    if printed := planned.cluster.read_compare_log() if planned.cluster else None:
        return _add_job_verdict(launched, printed)
    return _add_comparison(launched, command)


def choose_runs_dir(recipe: Path, runs_dir: Path, *, resume: bool) -> Path:
    """Return the folder of the experiment to launch: with `resume`, that of an experiment given as recipe."""
    return Path(os.path.realpath(recipe)).parent if resume and is_experiment(recipe) else runs_dir


def interim_state(experiment_dir: Path, num_pairs: int) -> InterimState:
    """Judge an experiment after a stage; the interim analysis is not taken while a run has not ended.

    "step one": the step-one check is inconclusive in every undecided treatment.
    """
    from abrun.logs.recorded.stored import load_experiment
    from abrun.verdict.decide import judge

    experiment = load_experiment(experiment_dir)
    arms = judge(experiment, experiment.compare.claims)
    undecided = [arm for arm in arms if arm.verdict == "INCONCLUSIVE"]
    if not undecided:
        return "decided"
    completed = (i.num_pairs for arm in arms for i in arm.interim_analyses if i.verdict)
    if num_pairs not in completed:
        return "not taken"
    by_step_one = all(any(check.result == "open" for check in arm.select("step one")) for arm in undecided)
    return "step one" if by_step_one else "open"


def _declare_stages(recipe: Recipe | CommandRecipe, options: LaunchOptions) -> Recipe | CommandRecipe:
    """Declare the interim analyses of a launch in stages."""
    if not options.until_decided:
        raise RecipeError(
            f"--max-seeds: got {options.max_seeds}, which requires --until-decided; add it, or use --seeds"
        )
    settings = resolve_launcher_settings(recipe.launcher, options.launcher)
    if settings is not None and settings.type in scheduler_names():
        raise RecipeError(
            f"--until-decided: got launcher {settings.type}, whose jobs run without a launcher to judge "
            "between stages; use --launcher local, or declare compare.interim, launch all runs, and stop "
            "them with abrun stop once abrun compare decides"
        )
    return derived_recipes.add_interim_analyses(recipe, options.max_seeds)


def _run(
    planned: PlannedLaunch,
    options: LaunchOptions,
    console: "Terminal",
    only: Collection[RunName] | None = None,
) -> LaunchOutcome | None:
    """Run the plan with live progress; return None if detached. `only`: the runs of a stage."""
    plan, experiment_dir = planned.plan, planned.experiment_dir
    if planned.engine and options.detach:
        raise LaunchError(
            "--detach: the local launcher has no queue; use nohup or tmux, or --launcher slurm or ray"
        )
    with View(console, find_cluster_jobs) as view:
        if planned.engine:
            outcome = run_plan(plan, options, engine=planned.engine, observer=view, only=only)
        else:
            assert planned.cluster
            submitted = submit_plan(plan, options, cluster=planned.cluster, observer=view)
            view.say(f"queued: {', '.join(submitted)}; follow them with: abrun watch {experiment_dir}")
            if options.detach:
                return None
            outcome = wait_for_jobs(plan, experiment_dir, planned.cluster, view)
    return outcome


def _run_in_stages(
    planned: PlannedLaunch, options: LaunchOptions, console: "Terminal"
) -> LaunchOutcome | None:
    """Run the pairs up to each interim analysis and judge, until decided or no further analysis can help."""
    recipe, outcome = planned.plan.recipe, None
    if options.resume:
        derived_recipes.refuse_other_interim(recipe, planned.experiment_dir)
    for num_pairs in recipe.compare.interim:
        outcome = _run(planned, options, console, planned.plan.runs_of_first_seeds(num_pairs))
        options = replace(options, resume=True)
        if outcome is None or outcome.stopped_by:
            break
        try:
            state = interim_state(planned.experiment_dir, num_pairs)
        except AbrunError:  # the comparison that follows reports it
            break
        except KeyboardInterrupt:
            return replace(outcome, stopped_by=signal.SIGINT)
        if state in ("decided", "not taken") or num_pairs == len(recipe.seeds):
            break
        if state == "step one":
            cause = "the step-one check is inconclusive, and more seeds do not help: see below for the fix"
            console.say(f"After {num_pairs} pairs: {cause}.")
            break
        console.say(f"After {num_pairs} pairs: not decided yet.")
    return outcome


def _add_comparison(launched: LaunchResult, command: str | None) -> LaunchResult:
    """Compare the arms; Ctrl-C during this stops the launch, as between stages."""
    try:
        from abrun.logs.recorded.sources import ReadingOptions
        from abrun.report.comparing import compare_sources

        directory, reading = launched.experiment_dir, ReadingOptions()
        comparison = compare_sources([str(directory)], reading, output=directory / REPORT, command=command)
    except AbrunError as error:
        return _add_problem(launched, str(error))
    except KeyboardInterrupt:
        outcome = launched.outcome and replace(launched.outcome, stopped_by=signal.SIGINT)
        return replace(launched, outcome=outcome, exit_code=128 + signal.SIGINT)
    return replace(launched, comparison=comparison, verdict_exit_code=comparison.exit_code)


def _add_job_verdict(launched: LaunchResult, compared: str) -> LaunchResult:
    """Add the output and the verdict of the cluster's comparison job."""
    launched = replace(launched, compared=compared)
    try:
        reported = read_reported_verdict(launched.experiment_dir)
    except AbrunError as error:
        return _add_problem(launched, str(error))
    if reported is None:
        return _add_problem(launched, NO_VERDICT.format(launched.experiment_dir))
    return replace(launched, verdict_exit_code=reported.exit_code)


def _add_problem(launched: LaunchResult, problem: str) -> LaunchResult:
    return replace(launched, problem=problem, exit_code=launched.exit_code or 1)
