"""Commands that start, follow and stop runs. Slow imports happen inside the commands."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from abrun.cli.app import RUNS, app, console, print_error, print_json, survive_output_errors
from abrun.cli.arguments import (
    Detach,
    DeviceMemory,
    DryRun,
    DryRunJson,
    ExitZero,
    Experiment,
    Json,
    Launcher,
    MaxSeeds,
    Name,
    NoCompare,
    Overrides,
    RecipeFile,
    Resume,
    RunsDir,
    TakeOver,
    UntilDecided,
    add_seeds,
    complete_experiment,
    typed_command,
)
from abrun.errors import RecipeError
from abrun.reasons import Code
from abrun.redaction import display_safe

if TYPE_CHECKING:
    from abrun.api.launching import LaunchResult
    from abrun.experiment.options import LaunchOptions
    from abrun.experiment.plan import ExperimentPlan
    from abrun.present.terminal import Terminal
    from abrun.recipe.experiment import CommandRecipe, Recipe


@app.command(rich_help_panel=RUNS)
@survive_output_errors
def launch(
    recipe: RecipeFile,
    overrides: Overrides = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds instead of the recipe's: 0,1,2 or 0-4.")] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum concurrent runs; default: as many as the devices allow."),
    ] = None,
    launcher: Launcher = None,
    runs_dir: RunsDir = Path("runs"),
    name: Name = None,
    dry_run: DryRun = False,
    resume: Resume = False,
    detach: Detach = False,
    take_over: TakeOver = False,
    no_compare: NoCompare = False,
    until_decided: UntilDecided = False,
    max_seeds: MaxSeeds = None,
    device_memory: DeviceMemory = None,
    exit_zero: ExitZero = False,
    as_json: DryRunJson = False,
) -> None:
    """Run an experiment: train all arms and seeds with live progress, then compare the arms.

    Exit code: 0 MATCH, or a description without a claim, 3 MISMATCH, 4 INCONCLUSIVE, 5 INVALID; --exit-zero
    and --no-compare turn these into 0. 1 if a run did not finish or the comparison failed, 2 for bad input,
    130 after Ctrl-C. A dry run exits with 2 if no machine could run the plan.

    Examples:
        abrun launch quickstart
        abrun launch quickstart --dry-run --set steps=100 --seeds 0-7
        abrun launch recipe.yaml --until-decided --max-seeds 12
        abrun launch recipe.yaml --launcher slurm --detach
    """
    from abrun.api.launching import choose_runs_dir, launch_recipe
    from abrun.experiment.options import LaunchOptions
    from abrun.recipe.experiment import load_recipe

    if as_json and not dry_run:
        raise RecipeError(Code.JSON_WITHOUT_DRY_RUN())
    if until_decided and no_compare:
        raise RecipeError(Code.STAGES_NEED_COMPARISON())
    loaded, screen = load_recipe(recipe, add_seeds(overrides, seeds)), console()
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
    if dry_run:
        raise typer.Exit(_dry_run(screen, loaded, options, as_json))
    launched = launch_recipe(loaded, options, screen, typed_command())
    _show_end(screen, launched)
    raise typer.Exit(launched.exit_code or (0 if exit_zero else launched.verdict_exit_code))


@app.command(rich_help_panel=RUNS)
@survive_output_errors
def export(
    recipe: RecipeFile,
    to: Annotated[str, typer.Option(help="Target: jobset (Kubernetes) or skypilot.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="New folder for the manifests; default: <name>-<target>."),
    ] = None,
    overrides: Overrides = None,
    name: Name = None,
    no_compare: NoCompare = False,
) -> None:
    """Write an experiment's manifests for Kubernetes or SkyPilot; abrun itself does not start them.

    Examples:
        abrun export recipe.yaml --to jobset --output manifests
        abrun export recipe.yaml --to skypilot
    """
    from abrun.experiment.options import LaunchOptions
    from abrun.experiment.plan import make_plan
    from abrun.launch.export.command import export_plan as write_manifests
    from abrun.launch.prepare import resolve_experiment_dir
    from abrun.recipe.experiment import load_recipe

    plan = make_plan(load_recipe(recipe, overrides or []))
    name = resolve_experiment_dir(plan.recipe.name, LaunchOptions(name=name)).name
    print(
        display_safe(write_manifests(plan, to, output or Path(f"{name}-{to}"), name, compare=not no_compare))
    )


@app.command(rich_help_panel=RUNS)
def watch(experiment: Experiment, runs_dir: RunsDir = Path("runs")) -> None:
    """Follow an experiment launched from another shell or host, or on a cluster.

    Examples:
        abrun watch quickstart
    """
    from abrun import watch as live
    from abrun.launch.cluster import find_cluster_jobs
    from abrun.runs.experiment import find_experiment

    live.watch(find_experiment(experiment, runs_dir), console(), find_cluster_jobs)


@app.command(rich_help_panel=RUNS)
def status(
    experiment: Annotated[
        str | None,
        typer.Argument(
            help="Experiment: a path or a name; default: all.", autocompletion=complete_experiment
        ),
    ] = None,
    as_json: Json = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Show the state of an experiment's runs, or a one-line summary of every experiment.

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


@app.command(rich_help_panel=RUNS)
@survive_output_errors
def cancel(experiment: Experiment, runs_dir: RunsDir = Path("runs")) -> None:
    """Stop an experiment: running runs save a checkpoint and exit, queued jobs are cancelled.

    Examples:
        abrun cancel quickstart
    """
    from abrun.launch.cluster import cancel_experiment
    from abrun.runs.experiment import find_experiment

    print(display_safe(cancel_experiment(find_experiment(experiment, runs_dir))))


@app.command(rich_help_panel=RUNS)
def logs(
    run: Annotated[
        str, typer.Argument(help="A run's folder, or its name such as quickstart/baseline/seed-0.")
    ],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the run ends.")] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Print a run's log, or its recorded error if the log is empty.

    Examples:
        abrun logs quickstart/baseline/seed-0 --follow
    """
    from abrun import watch as live
    from abrun.launch.cluster import find_cluster_jobs
    from abrun.runs.experiment import find_run

    for text in live.read_log(find_run(run, runs_dir), find_cluster_jobs, follow=follow):
        sys.stdout.write(text)
        sys.stdout.flush()


@app.command(rich_help_panel=RUNS)
@survive_output_errors
def sync(experiment: Experiment, runs_dir: RunsDir = Path("runs")) -> None:
    """Upload data missing on wandb, such as runs recorded offline.

    Examples:
        abrun sync quickstart
    """
    from abrun.runs.experiment import find_experiment
    from abrun.wandb_sync.sync import sync_experiment

    sync_experiment(find_experiment(experiment, runs_dir), print)


def _show_memory(screen: "Terminal", plan: "ExperimentPlan", device: str | None) -> None:
    """Print each arm's predicted memory peak against the device memory `asked`.

    Arms whose prediction decided a value of `auto` are skipped: the decision already shows them.
    """
    from rich.text import Text

    from abrun.memory.predict import describe_predicted_memory, resolve_device_memory

    device_bytes = resolve_device_memory(device) if device is not None else None
    if device_bytes is not None:
        predicted_arms = {
            arm
            for decision in plan.decided.values()
            for candidate in decision["candidates"]
            for arm in candidate["peaks"]
        }
        for line in describe_predicted_memory(plan.recipe, device_bytes, excluded_arms=predicted_arms):
            screen.print(Text.assemble(("Memory: ", "bold"), display_safe(line)), soft_wrap=True)


def _dry_run(
    screen: "Terminal", recipe: "Recipe | CommandRecipe", options: "LaunchOptions", as_json: bool
) -> int:
    """Show what a launch would do, and return the exit code.

    The code is 2 if no machine could run the plan or the scheduler would refuse it. Raises StoreError if
    there is nothing to resume.
    """
    from abrun.api.launching import plan_launch
    from abrun.launch.preview import check_feasibility, preview_as_json, render_jobs_preview, render_preview
    from abrun.runs.experiment import open_experiment

    planned = plan_launch(recipe, options, dry_run=True, say=(lambda _: None) if as_json else screen.say)
    plan, cluster = planned.plan, planned.cluster
    if options.resume:
        open_experiment(planned.experiment_dir)
    feasible = check_feasibility(plan, options.jobs, cluster)
    if as_json:
        print_json(preview_as_json(plan, feasible, options.jobs))
    else:
        screen.print(
            render_jobs_preview(plan, feasible, cluster)
            if cluster
            else render_preview(plan, feasible, options.jobs)
        )
        _show_memory(screen, plan, options.device_memory)
    return 2 if feasible.is_refused else 0


def _show_end(screen: "Terminal", launched: "LaunchResult") -> None:
    print_resume_command(screen, launched)
    if launched.compared:
        screen.say(launched.compared)
    if launched.comparison:
        screen.print(launched.comparison.summary())
    if launched.problem:
        print_error(f"the comparison could not be made: {launched.problem}")


def print_resume_command(screen: "Terminal", launched: "LaunchResult") -> None:
    """Print the command that resumes unfinished runs, if there are any."""
    if launched.outcome is None or not launched.outcome.exit_code:
        return
    command = shlex.join(["abrun", *sys.argv[1:], *([] if "--resume" in sys.argv else ["--resume"])])
    state = "Not every run finished" if launched.outcome.stopped_by is None else "Stopped"
    screen.say(f"{state}. Resume with: {command}")
