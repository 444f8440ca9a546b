"""Commands about what a comparison can see. Everything slow to import waits inside its command."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from abrun.cli.app import LOOK_CLOSER, app, console, outlives_output
from abrun.cli.arguments import DeviceMemory, Launcher, Overrides, RecipeFile, Resume, RunsDir, with_seeds
from abrun.cli.experiments import say_how_to_continue
from abrun.errors import RecipeError, StoreError
from abrun.reasons import Code
from abrun.regular_files import is_directory

if TYPE_CHECKING:
    from abrun.present.terminal import Terminal


@app.command(rich_help_panel=LOOK_CLOSER)
def faults(
    name: Annotated[str | None, typer.Argument(help="One of them, with all that is known of it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON: sizes and sources too.")] = False,
) -> None:
    """List the faults that a recipe can inject: what each does, what it needs, and what should show it.

    Examples:
        abrun faults
        abrun faults flipped_advantages
    """
    from abrun.recipe.faults import FAULTS, LIBRARY, InjectedFault
    from abrun.recipe.refusals import validated
    from abrun.report.injected import (
        fault_algorithms_text,
        fault_library_json,
        fault_library_table,
        fault_lines,
    )

    chosen = FAULTS
    if name is not None:
        chosen = (LIBRARY[validated(InjectedFault, {"name": name}, "abrun faults").name],)
    if as_json:
        print(json.dumps(fault_library_json(chosen), indent=1))
    elif name is not None:
        for line in fault_lines(chosen[0]):
            console().say(line)
    else:
        console().print(fault_library_table())
        said = f"{fault_algorithms_text()} With settings, sizes and sources: abrun faults NAME"
        console().say(said)


@app.command(rich_help_panel=LOOK_CLOSER)
def samples(
    run: Annotated[
        str, typer.Argument(help="A run's folder, or its name such as quickstart/baseline/seed-0.")
    ],
    step: Annotated[int | None, typer.Option(min=1, help="Of this step alone.")] = None,
    against: Annotated[
        str | None, typer.Option(help="Another run, whose completions of the same prompts stand beside.")
    ] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Show the completions that a run has kept, with their rewards: alone, or beside another run's.

    Examples:
        abrun samples quickstart/baseline/seed-0 --step 60
        abrun samples quickstart/baseline/seed-0 --against quickstart/treatment/seed-0
    """
    from abrun.recorded.samples import samples_in, side_by_side
    from abrun.report.samples import render_samples

    names = [run] if against is None else [run, against]
    left, right = (samples_in(_folder_of(each, runs_dir)) for each in (run, against or run))
    pairs = side_by_side(left, right, step)
    if not pairs:
        kept = ", ".join(map(str, left)) or "none (keep_samples: null keeps none)"
        raise StoreError(f"{run}: got no completions{f' of step {step}' if step else ''}; kept: {kept}")
    console().print(render_samples(names, pairs))
    if against is not None and not any(pair.left and pair.right for pair in pairs):
        console().print(
            "No prompt was kept by both: runs of one seed draw the same prompts, and others do not.",
            style="dim",
        )


@app.command(rich_help_panel=LOOK_CLOSER)
@outlives_output
def sensitivity(
    recipe: RecipeFile,
    overrides: Overrides = None,
    names: Annotated[
        str | None,
        typer.Option(
            "--faults", help="NAME or NAME:SIZE, by commas; default: all that the recipe can inject."
        ),
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Instead of the recipe's: 0,1,2 or 0-4.")] = None,
    launcher: Launcher = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at once; default: what the devices allow.")
    ] = None,
    runs_dir: RunsDir = Path("runs"),
    name: Annotated[
        str | None,
        typer.Option(help="Folder of the experiment; default: the recipe's name, with -sensitivity."),
    ] = None,
    resume: Resume = False,
    device_memory: DeviceMemory = None,
) -> None:
    """Inject faults in the baseline and say which of them the recipe's comparison would have caught.

    Exit code: 0 when every run finished, 1 when one failed, 2 for bad input.

    Examples:
        abrun sensitivity quickstart-faults
        abrun sensitivity quickstart --faults flipped_advantages,stale_rollout_weights
    """
    from abrun.api.launching import launch_recipe
    from abrun.experiment.options import LaunchOptions
    from abrun.launch.controls import with_faults_alone
    from abrun.recipe.experiment import load_recipe

    faulty, not_injected = with_faults_alone(load_recipe(recipe, with_seeds(overrides, seeds)), names)
    options = LaunchOptions(
        runs_dir=runs_dir,
        name=name,
        launcher=launcher,
        jobs=jobs,
        resume=resume,
        compare=False,
        device_memory=device_memory,
    )
    screen = console()
    launched = launch_recipe(faulty, options, screen)
    say_how_to_continue(screen, launched)
    if not (launched.outcome and launched.outcome.stopped_by):
        _say_what_was_caught(screen, faulty, launched.experiment_dir, not_injected)
    raise typer.Exit(launched.exit_code)


def _say_what_was_caught(
    screen: "Terminal", recipe: "Declared", experiment_dir: Path, not_injected: Mapping[str, str]
) -> None:
    """Judge the injected faults, print the table and write it into the experiment's report."""
    from abrun.recorded.stored import load_experiment
    from abrun.report.injected import advice_lines, caught_sentence, sensitivity_table, write_sensitivity
    from abrun.verdict.injected import sensitivity as judge_faults

    found = judge_faults(load_experiment(experiment_dir))
    if found is None:
        raise RecipeError(Code.NO_FAULT_CAN_BE_INJECTED(recipe=recipe.name))
    screen.print(sensitivity_table(found, paired=recipe.compare.paired))
    for fault, lacks in not_injected.items():
        screen.say(f"not injected: {fault}, which {lacks}")
    for line in (*advice_lines(found), caught_sentence(found, paired=recipe.compare.paired)):
        screen.say(line)
    report = experiment_dir / "report"
    path = write_sensitivity(found, not_injected, report, experiment_dir.name, recipe.compare)
    screen.say(f"All of it is in {path}, and as JSON beside it")


def _folder_of(run: str, runs_dir: Path) -> Path:
    """Of abrun's run, or where another trainer has kept completions. Raises StoreError where neither is."""
    from abrun.logs.completions import read_completions
    from abrun.runs.rundir import RunDir
    from abrun.watch.log import refuse_experiment

    path = runs_dir / run
    path = path if is_directory(path) else Path(run)
    refuse_experiment(path)
    if not (is_directory(path) and read_completions(path)):
        RunDir(path).record()
    return path
