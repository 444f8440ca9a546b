"""Commands that start runs, follow them and stop them. Everything slow to import waits inside its command."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from abrun.cli.app import RUN, app, complain, console, outlives_output, print_json
from abrun.cli.arguments import (
    Detach,
    DeviceMemory,
    DryRun,
    Experiment,
    FailOn,
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
    names_of_experiments,
    parse_verdicts,
    typed_command,
    with_seeds,
)
from abrun.errors import AbrunError, RecipeError
from abrun.redaction import shown
from abrun.regular_files import is_directory

if TYPE_CHECKING:
    from abrun.launch.engine import Scheduler
    from abrun.launch.supervisor import Outcome
    from abrun.plan import Plan
    from abrun.present.terminal import Terminal
    from abrun.recipe import CommandRecipe, Recipe


@app.command(rich_help_panel=RUN)
@outlives_output
def launch(
    recipe: RecipeFile,
    overrides: Overrides = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds instead of the recipe's: 0,1,2 or 0-4.")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at once; by default as many as the devices allow.")
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
    fail_on: FailOn = None,
    as_json: Json = False,
) -> None:
    """Run an experiment: all arms and seeds, watched live, then compared.

    Exit code: 0 when every run finished, 1 when one did not, 2 for bad input (of a dry run also where
    model.path is a folder that does not load, or the cluster would refuse the jobs), 130 after Ctrl-C; with
    --fail-on the verdict's, where that is named.

    Examples:
        abrun launch quickstart
        abrun launch quickstart --dry-run --set steps=100 --seeds 0-7
        abrun launch recipe.yaml --until-decided --max-seeds 12 --fail-on mismatch,inconclusive
        abrun launch recipe.yaml --launcher slurm --detach
    """
    from abrun.launch import experiment_dir_of, make_scheduler, queued_jobs
    from abrun.memory.open_values import planned
    from abrun.recipe import launcher_settings, load_recipe

    failing = _failing(fail_on, no_compare=no_compare or detach)
    if as_json and not dry_run:
        raise RecipeError("--json: got it without --dry-run, of which it is; add that, or drop it")
    loaded = load_recipe(recipe, with_seeds(overrides, seeds))
    if until_decided or max_seeds is not None:
        loaded = _in_stages(loaded, until_decided, max_seeds, launcher, no_compare)
    scheduler = make_scheduler(launcher_settings(loaded.launcher, launcher), jobs)
    screen = console()
    options = {"scheduler": scheduler, "launcher": launcher, "name": name, "jobs": jobs}
    plan = planned(
        loaded,
        runs_dir,
        **options,
        resume=resume,
        asked_memory=device_memory,
        dry_run=dry_run,
        say=lambda line: None if as_json else screen.print(line, soft_wrap=True, markup=False),
    )
    experiment_dir = experiment_dir_of(plan, runs_dir, name)
    if dry_run:
        code = _dry_run(screen, plan, experiment_dir, scheduler, jobs, as_json, resume)
        if not as_json:
            _warn_of_memory(screen, plan, device_memory, here=scheduler is None)
        raise typer.Exit(code)
    options |= {"take_over": take_over, "compare": not no_compare, "detach": detach}
    if until_decided:
        code, verdict = _launched_until_decided(screen, plan, runs_dir, experiment_dir, resume, options)
        raise typer.Exit(code or failing.get(verdict, 0))
    outcome = launched_in_view(screen, plan, runs_dir, resume=resume, **options)
    if outcome is None:
        return
    queued, verdict = queued_jobs(experiment_dir) if scheduler else None, None
    if not (outcome.stopped_by or no_compare):
        verdict = _compare_after_launch(experiment_dir, screen, queued.compared() if queued else None)
    raise typer.Exit(outcome.exit_code or failing.get(verdict, 0))


@app.command(rich_help_panel=RUN)
@outlives_output
def export(
    recipe: RecipeFile,
    to: Annotated[str, typer.Option(help="The engine: jobset (Kubernetes), skypilot.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A new folder; default: <name>-<engine>.")
    ] = None,
    overrides: Overrides = None,
    name: Name = None,
    no_compare: NoCompare = False,
) -> None:
    """Write an experiment's manifests for an engine that abrun itself starts nothing on.

    Examples:
        abrun export recipe.yaml --to jobset --output manifests
        abrun export recipe.yaml --to skypilot
    """
    from abrun.launch import experiment_dir_of
    from abrun.launch.export import export as write_manifests
    from abrun.plan import make_plan
    from abrun.recipe import load_recipe

    plan = make_plan(load_recipe(recipe, overrides or []))
    name = experiment_dir_of(plan, Path(), name).name
    print(shown(write_manifests(plan, to, output or Path(f"{name}-{to}"), name, compare=not no_compare)))


@app.command(rich_help_panel=RUN)
def watch(experiment: Experiment, runs_dir: RunsDir = Path("runs")) -> None:
    """Follow an experiment that another shell or another host launches, or the jobs of a cluster.

    Examples:
        abrun watch quickstart
    """
    from abrun import watch as live
    from abrun.launch import queued_jobs
    from abrun.store import find_experiment

    live.watch(find_experiment(experiment, runs_dir), console(), queued_jobs, _so_far)


@app.command(rich_help_panel=RUN)
def status(
    experiment: Annotated[
        str | None,
        typer.Argument(help="A path, or a name; without one: all.", autocompletion=names_of_experiments),
    ] = None,
    as_json: Json = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Show what the runs of an experiment are doing, or all experiments in a line each.

    Examples:
        abrun status
        abrun status quickstart --json
    """
    from abrun import watch as live
    from abrun.launch import queued_jobs
    from abrun.store import find_experiment

    screen = console()
    if as_json:
        asked = None if experiment is None else find_experiment(experiment, runs_dir)
        print_json(live.status_json(runs_dir, asked, queued_jobs))
        return
    if experiment is None:
        screen.print(live.status_of_experiments(runs_dir, queued_jobs))
        return
    experiment_dir = find_experiment(experiment, runs_dir)
    views = live.ExperimentReader(experiment_dir, queued_jobs).read()
    begun = {view.state.status for view in views} - {"finished"}
    so_far = _so_far(experiment_dir) if begun else []
    screen.print(live.render(experiment_dir.name, views, screen.width, so_far=so_far))


@app.command(rich_help_panel=RUN)
@outlives_output
def cancel(experiment: Experiment, runs_dir: RunsDir = Path("runs")) -> None:
    """Stop an experiment: its runs save a checkpoint and end, its waiting jobs leave the queue.

    Examples:
        abrun cancel quickstart
    """
    from abrun.launch import cancel as cancel_experiment
    from abrun.store import find_experiment

    print(shown(cancel_experiment(find_experiment(experiment, runs_dir))))


@app.command(rich_help_panel=RUN)
def logs(
    run: Annotated[
        str, typer.Argument(help="A run's folder, or its name such as quickstart/baseline/seed-0.")
    ],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print on until the run has ended.")] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Print what a run has printed, or what is recorded of it where that is nothing.

    Of an experiment, list the runs with what became of each.

    Examples:
        abrun logs quickstart/baseline/seed-0 --follow
    """
    from abrun import watch as live
    from abrun.launch import queued_jobs

    path = runs_dir / run
    for part in live.log_of(path if is_directory(path) else Path(run), queued_jobs, follow=follow):
        sys.stdout.write(part)
        sys.stdout.flush()


@app.command(rich_help_panel=RUN)
@outlives_output
def sync(experiment: Experiment, runs_dir: RunsDir = Path("runs")) -> None:
    """Send wandb what it lacks of an experiment's runs, such as those recorded offline.

    Examples:
        abrun sync quickstart
    """
    from abrun.mirror.sync import sync as send
    from abrun.store import find_experiment

    send(find_experiment(experiment, runs_dir), print)


def _warn_of_memory(screen: "Terminal", plan: "Plan", asked: str | None, *, here: bool) -> None:
    """Say what arms take of a device `asked`, as predicted; of this machine's, which cannot fit.

    Of arms that were predicted to decide what the recipe leaves open, the decision tells.
    """
    from rich.text import Text

    from abrun.memory.predict import device_memory, fit_of

    if asked is None and not here:
        return
    device_bytes = device_memory(asked)
    if device_bytes is not None:
        told = {arm for one in plan.decided.values() for of in one["candidates"] for arm in of["peaks"]}
        for line in fit_of(plan.recipe, device_bytes, traced=asked is not None, besides=told):
            screen.print(Text.assemble(("Memory: ", "bold"), shown(line)), soft_wrap=True)


def _failing(fail_on: str | None, *, no_compare: bool) -> dict[str | None, int]:
    """The exit codes of verdicts that a launch is to fail on, of None too: no verdict is not a good one."""
    if fail_on is None:
        return {}
    if no_compare:
        raise RecipeError(f"--fail-on: got {fail_on!r} with --no-compare or --detach: no verdict; drop one")
    return {None: 2, **parse_verdicts(fail_on)}


def _dry_run(
    screen: "Terminal",
    plan: "Plan",
    experiment_dir: Path,
    scheduler: "Scheduler | None",
    jobs: int | None,
    as_json: bool,
    resume: bool,
) -> int:
    """Show what a launch would do, and return the exit code.

    2 where the model's folder does not load or cannot be trained so, or the scheduler would refuse it.
    Raises StoreError where there is nothing to resume.
    """
    from abrun import store
    from abrun.launch.preview import preview, preview_json, preview_of_jobs
    from abrun.launch.requirements import is_refused_for_its_model

    if resume:
        store.open_experiment(experiment_dir)
    if as_json:
        content = preview_json(plan, jobs, scheduler)
        print_json(content)
        return 2 if (content["refusals"] if scheduler else is_refused_for_its_model(plan)) else 0
    if scheduler is None:
        screen.print(preview(plan, jobs))
        return 2 if is_refused_for_its_model(plan) else 0  # what else this machine lacks, another may have
    show, possible = preview_of_jobs(plan, scheduler, experiment_dir)
    screen.print(show)
    return 0 if possible else 2


def _in_stages(
    recipe: "Recipe | CommandRecipe",
    until_decided: bool,
    max_seeds: int | None,
    launcher: str | None,
    no_compare: bool,
) -> "Recipe | CommandRecipe":
    """The recipe with the looks of a launch in stages."""
    from abrun.implementations import SCHEDULERS
    from abrun.launch import stages
    from abrun.recipe import launcher_settings

    if not until_decided:
        raise RecipeError(f"--max-seeds: got {max_seeds} without --until-decided; add it, or use --seeds")
    if no_compare:
        raise RecipeError("--until-decided: got --no-compare, without which nothing is decided; drop one")
    settings = launcher_settings(recipe.launcher, launcher)
    if settings is not None and settings.type in SCHEDULERS:
        raise RecipeError(
            f"--until-decided: got launcher {settings.type}, whose jobs need no launcher: nobody is there "
            "to judge between the stages; use --launcher local, or declare compare.looks, launch all, and "
            "end it with abrun cancel once abrun compare decides"
        )
    return stages.until_decided(recipe, max_seeds)


def _launched_until_decided(
    screen: "Terminal",
    plan: "Plan",
    runs_dir: Path,
    experiment_dir: Path,
    resume: bool,
    options: dict[str, Any],
) -> tuple[int, str | None]:
    """Launch the pairs up to each look, and judge, while more can decide; returns exit code and verdict."""
    from abrun.launch.stages import refuse_other_looks

    if resume:
        refuse_other_looks(plan.recipe, experiment_dir)
    code = 0
    for num_pairs in plan.recipe.compare.looks:
        only = plan.of_first_seeds(num_pairs)
        outcome = launched_in_view(screen, plan, runs_dir, resume=resume, only=only, **options)
        assert outcome is not None
        code, resume = outcome.exit_code, True
        if outcome.stopped_by:
            return code, None
        try:
            state = _state_of_looks(experiment_dir, num_pairs)
        except AbrunError:  # said by the comparison below
            break
        except KeyboardInterrupt:
            _say_how_to_continue(screen, "Stopped")
            return 130, None
        if state in ("decided", "not taken") or num_pairs == len(plan.recipe.seeds):
            break
        if state == "step one":
            said = "step one is open, which more seeds do not settle: see what would, below"
            screen.print(f"After {num_pairs} pairs: {said}.", soft_wrap=True, markup=False)
            break
        screen.print(f"After {num_pairs} pairs: not decided yet.", markup=False)
    return code, _compare_after_launch(experiment_dir, screen, None)


def _state_of_looks(
    experiment_dir: Path, num_pairs: int
) -> Literal["open", "step one", "decided", "not taken"]:
    """Where an experiment stands after a stage; a look is not taken where some run has not ended.

    "step one": it is open in every treatment that is undecided.
    """
    from abrun.compare.judge.verdict import judge
    from abrun.compare.read.stored import load_experiment

    experiment = load_experiment(experiment_dir)
    arms = judge(experiment, experiment.compare.primary)
    undecided = [arm for arm in arms if arm.verdict == "INCONCLUSIVE"]
    if not undecided:
        return "decided"
    if not any(look.num_pairs == num_pairs and look.verdict for arm in arms for look in arm.looks):
        return "not taken"
    by_step_one = all(any(one.result == "open" for one in arm.step_one) for arm in undecided)
    return "step one" if by_step_one else "open"


def launched_in_view(
    screen: "Terminal", plan: "Plan", runs_dir: Path, *, resume: bool, **options: Any
) -> "Outcome | None":
    """What became of a launch that is watched live; None: others go on with it. Says how to continue."""
    from abrun.launch import launch_or_hand_over, queued_jobs
    from abrun.watch import View

    with View(screen, queued_jobs, _so_far) as view:
        outcome = launch_or_hand_over(plan, runs_dir, observer=view, resume=resume, **options)
    if outcome is not None:
        view.summarize()
    if outcome is not None and outcome.exit_code:
        _say_how_to_continue(
            screen, "Stopped" if outcome.stopped_by is not None else "Not every run finished"
        )
    return outcome


def _so_far(experiment_dir: Path) -> list[str]:
    """What the claims look like; imported when the first runs have finished, not before."""
    from abrun.compare.show.so_far import so_far

    try:
        return so_far(experiment_dir)
    except Exception:  # of whatever is in half-written runs: no such line is worth a launch
        return []


def _say_how_to_continue(screen: "Terminal", state: str) -> None:
    again = shlex.join(["abrun", *sys.argv[1:], *([] if "--resume" in sys.argv else ["--resume"])])
    screen.print(f"{state}. Continue with: {again}", soft_wrap=True, markup=False)


def _compare_after_launch(experiment_dir: Path, screen: "Terminal", compared: str | None) -> str | None:
    """Print what a job has `compared`, or else compare here; returns the verdict, if there is one."""
    from abrun.compare import compare_sources, verdict_in
    from abrun.compare.read.sources import Reading

    if compared:
        screen.print(compared, soft_wrap=True, markup=False, highlight=False)
        return verdict_in(experiment_dir)
    try:
        comparison = compare_sources([str(experiment_dir)], Reading(), command=typed_command())
    except AbrunError as error:  # said here: the exit code speaks of the runs
        complain(str(error))
        return None
    screen.print(comparison.summary())
    return comparison.verdict
