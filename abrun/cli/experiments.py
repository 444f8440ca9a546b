"""Commands that start, follow and stop runs. Slow imports happen inside the commands."""

import shlex
import sys
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from abrun.cli import arguments
from abrun.cli.app import app, console, print_error, print_json, survive_output_errors
from abrun.cli.arguments import add_seeds, complete_experiment, typed_command
from abrun.errors import RecipeError, StoreError
from abrun.runs.redaction import display_safe

if TYPE_CHECKING:
    from abrun.api.launching import LaunchResult
    from abrun.experiment.options import LaunchOptions
    from abrun.experiment.plan import ExperimentPlan
    from abrun.launch.preview import Feasibility
    from abrun.recipe.experiment import CommandRecipe, Recipe
    from abrun.report.present.terminal import Terminal


@app.command()
@survive_output_errors
def launch(
    recipe: arguments.RecipeFile,
    overrides: arguments.Overrides = None,
    seeds: arguments.NewSeeds = None,
    jobs: arguments.Jobs = None,
    launcher: arguments.Launcher = None,
    runs_dir: arguments.RunsDir = Path("runs"),
    name: arguments.Name = None,
    dry_run: arguments.DryRun = False,
    plan_only: arguments.PlanOnly = False,
    resume: arguments.Resume = False,
    detach: arguments.Detach = False,
    take_over: arguments.TakeOver = False,
    no_compare: arguments.NoCompare = False,
    until_decided: arguments.UntilDecided = False,
    max_seeds: arguments.MaxSeeds = None,
    device_memory: arguments.DeviceMemory = None,
    exit_zero: arguments.ExitZero = False,
    as_json: arguments.DryRunJson = False,
) -> None:
    """Train all arms and seeds of a recipe, then judge them.

    Shows live progress. The report is in the experiment's folder.

    Exit code: 0 MATCH or PASS, or no claim to judge; 3 MISMATCH or FAIL; 4 INCONCLUSIVE; 5 INVALID;
    --exit-zero and --no-compare turn these into 0. 1 if a run did not finish or the comparison failed, 2
    for bad input, 130 after Ctrl-C. A dry run exits with 2 if this machine cannot run the plan.

    Examples:
        abrun launch quickstart
        abrun launch quickstart --dry-run --set steps=100 --seeds 0-7
        abrun launch recipe.yaml --until-decided --max-seeds 12
        abrun launch recipe.yaml --launcher slurm --detach
    """
    from abrun.api.launching import choose_runs_dir, launch_recipe
    from abrun.experiment.options import LaunchOptions
    from abrun.recipe.experiment import load_recipe

    if as_json and not (dry_run or plan_only):
        raise RecipeError("--json requires --dry-run")
    if until_decided and no_compare:
        raise RecipeError("--until-decided: got --no-compare, which prevents a decision; drop one of them")
    loaded, screen = load_recipe(recipe, add_seeds(overrides, seeds), is_launched=resume), console()
    options = LaunchOptions(
        runs_dir=choose_runs_dir(recipe, runs_dir, resume=resume and name is None),
        name=name,
        launcher=launcher,
        jobs=jobs,
        resume=resume,
        take_over=take_over,
        detach=detach,
        compare=not no_compare,
        until_decided=until_decided,
        max_seeds=max_seeds,
        device_memory=device_memory,
    )
    if dry_run or plan_only:
        feasible = _dry_run(screen, loaded, options, as_json)
        is_refused = feasible.is_refused if plan_only else bool(feasible.problems)
        raise typer.Exit(2 if is_refused else 0)
    launched = launch_recipe(loaded, options, screen, typed_command())
    print_resume_command(screen, launched)
    if launched.compared:
        screen.say(launched.compared)
    if launched.comparison:
        screen.print(launched.comparison.summary())
    if launched.problem:
        print_error(f"the comparison could not be made: {launched.problem}")
    raise typer.Exit(launched.exit_code or (0 if exit_zero else launched.verdict_exit_code))


@app.command()
def watch(experiment: arguments.Experiment, runs_dir: arguments.RunsDir = Path("runs")) -> None:
    """Follow an experiment from another shell, host or cluster.

    Examples:
        abrun watch quickstart
    """
    from abrun import watch as live
    from abrun.launch.cluster import find_cluster_jobs
    from abrun.runs.experiment import find_experiment

    live.watch(find_experiment(experiment, runs_dir), console(), find_cluster_jobs)


@app.command()
def status(
    experiment: Annotated[
        str | None,
        typer.Argument(
            help="Experiment: a path or a name; default: all.", autocompletion=complete_experiment
        ),
    ] = None,
    as_json: arguments.Json = False,
    runs_dir: arguments.RunsDir = Path("runs"),
) -> None:
    """Show the state of all experiments, or of one and its runs.

    Examples:
        abrun status
        abrun status quickstart --json
    """
    from abrun import watch as live
    from abrun.launch.cluster import find_cluster_jobs
    from abrun.runs.experiment import find_experiment

    screen = console()
    if as_json:
        experiment_dir = None if experiment is None else find_experiment(experiment, runs_dir)
        print_json(live.status_json(runs_dir, experiment_dir, find_cluster_jobs))
        return
    if experiment is None:
        screen.print(live.render_experiments(runs_dir, find_cluster_jobs))
        return
    experiment_dir = find_experiment(experiment, runs_dir)
    views = live.ExperimentReader(experiment_dir, find_cluster_jobs).read()
    screen.print(live.render(experiment_dir.name, views, screen.width))


@app.command()
@survive_output_errors
def stop(experiment: arguments.Experiment, runs_dir: arguments.RunsDir = Path("runs")) -> None:
    """Stop an experiment: its runs save a checkpoint and exit.

    Jobs that wait in a cluster's queue are cancelled.

    Examples:
        abrun stop quickstart
    """
    from abrun.launch.cluster import cancel_experiment
    from abrun.runs.experiment import find_experiment

    print(display_safe(cancel_experiment(find_experiment(experiment, runs_dir))))


@app.command()
def logs(
    run: arguments.RunFolder,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the run ends.")] = False,
    runs_dir: arguments.RunsDir = Path("runs"),
) -> None:
    """Print a run's log, or its error if the log is empty.

    Examples:
        abrun logs quickstart/baseline/seed-0 --follow
    """
    from abrun import watch as live
    from abrun.launch.cluster import find_cluster_jobs
    from abrun.runs.experiment import find_run

    for text in live.read_log(find_run(run, runs_dir), find_cluster_jobs, follow=follow):
        sys.stdout.write(text)
        sys.stdout.flush()


@app.command()
def completions(
    run: arguments.RunFolder,
    step: Annotated[int | None, typer.Option(min=1, help="Only this step.")] = None,
    against: Annotated[
        str | None, typer.Option(help="Another run to show side by side for the same prompts.")
    ] = None,
    runs_dir: arguments.RunsDir = Path("runs"),
) -> None:
    """Show a run's completions, alone or beside another run's.

    Shows the completions that the recipe's keep_samples saved, with their rewards.

    Examples:
        abrun completions quickstart/baseline/seed-0 --step 60
        abrun completions quickstart/baseline/seed-0 --against quickstart/treatment/seed-0
    """
    from abrun.logs.completions import pair_samples, read_run_samples
    from abrun.report.completions import render_samples

    names = [run] if against is None else [run, against]
    samples, right = (read_run_samples(_find_run_folder(name, runs_dir)) for name in (run, against or run))
    pairs = pair_samples(samples, right, step)
    if not pairs:
        steps = ", ".join(map(str, samples)) or "none (keep_samples: null keeps none)"
        raise StoreError(f"{run}: got no completions{f' of step {step}' if step else ''}; kept: {steps}")
    console().print(render_samples(names, pairs))
    if against is not None and not any(pair.left and pair.right for pair in pairs):
        note = "The runs have no saved prompt in common: only runs with the same seed draw the same prompts."
        console().print(note, style="dim")


@app.command()
@survive_output_errors
def wandb_sync(experiment: arguments.Experiment, runs_dir: arguments.RunsDir = Path("runs")) -> None:
    """Upload data that wandb lacks, such as offline runs.

    Examples:
        abrun wandb-sync quickstart
    """
    from abrun.runs.experiment import find_experiment
    from abrun.wandb_sync.sync import sync_experiment

    sync_experiment(find_experiment(experiment, runs_dir), print)


def _find_run_folder(run: str, runs_dir: Path) -> Path:
    """Return the folder of an abrun run or another trainer's completions. Raises StoreError if neither."""
    from abrun.logs.completions import read_completions
    from abrun.runs.experiment import find_run
    from abrun.runs.files import is_directory
    from abrun.runs.rundir import RunDir
    from abrun.watch.log import refuse_experiment

    path = find_run(run, runs_dir)
    refuse_experiment(path)
    if not (is_directory(path) and read_completions(path)):
        RunDir(path).record()
    return path


def _show_memory(screen: "Terminal", plan: "ExperimentPlan", device: str | None) -> None:
    """Print each arm's predicted memory peak against the memory of a `device`.

    Arms whose prediction decided a value of `auto` are skipped: the decision already shows them.
    """
    from rich.text import Text

    from abrun.recipe.implementations import load_tool

    if device is None:
        return
    predict = load_tool("predict", "--device-memory")
    device_bytes = predict.resolve_device_memory(device)
    if device_bytes is not None:
        candidates = chain.from_iterable(decision["candidates"] for decision in plan.decided.values())
        predicted = {arm for candidate in candidates for arm in candidate["peaks"]}
        for line in predict.describe_predicted_memory(plan.recipe, device_bytes, excluded_arms=predicted):
            screen.print(Text.assemble(("Memory: ", "bold"), display_safe(line)), soft_wrap=True)


def _dry_run(
    screen: "Terminal", recipe: "Recipe | CommandRecipe", options: "LaunchOptions", as_json: bool
) -> "Feasibility":
    """Show what a launch would do, and return its problems. Raises StoreError if nothing can be resumed."""
    from abrun.api.launching import plan_launch
    from abrun.launch.prepare import refuse_nothing_to_resume
    from abrun.launch.preview import check_feasibility, preview_as_json, render_jobs_preview, render_preview

    planned = plan_launch(recipe, options, dry_run=True, say=(lambda _: None) if as_json else screen.say)
    plan, cluster = planned.plan, planned.cluster
    if options.resume:
        refuse_nothing_to_resume(planned.experiment_dir)
    feasible = check_feasibility(plan, options.jobs, cluster)
    if as_json:
        print_json(preview_as_json(plan, feasible, options.jobs))
        return feasible
    if cluster:
        screen.print(render_jobs_preview(plan, feasible, cluster))
    else:
        screen.print(render_preview(plan, feasible, options.jobs, is_staged=options.until_decided))
    _show_memory(screen, plan, options.device_memory)
    return feasible


def print_resume_command(screen: "Terminal", launched: "LaunchResult") -> None:
    """Print the command that resumes unfinished runs, if there are any."""
    if launched.outcome is None or not launched.outcome.exit_code:
        return
    command = shlex.join(["abrun", *sys.argv[1:], *([] if "--resume" in sys.argv else ["--resume"])])
    state = "Not every run finished" if launched.outcome.stopped_by is None else "Stopped"
    screen.say(f"{state}. Resume with: {command}")
