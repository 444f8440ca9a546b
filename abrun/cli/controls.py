"""Commands about a comparison's sensitivity. Slow imports happen inside the commands."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from abrun.cli.app import DIAGNOSTICS, app, console, survive_output_errors
from abrun.cli.arguments import DeviceMemory, Launcher, Overrides, RecipeFile, Resume, RunsDir, add_seeds
from abrun.cli.experiments import print_resume_command
from abrun.errors import RecipeError, StoreError
from abrun.reasons import Code
from abrun.regular_files import is_directory

if TYPE_CHECKING:
    from abrun.present.terminal import Terminal
    from abrun.recipe.experiment import ExperimentDeclaration


@app.command(rich_help_panel=DIAGNOSTICS)
def faults(
    name: Annotated[str | None, typer.Argument(help="Show one fault in detail.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, including sizes and sources.")] = False,
) -> None:
    """List the injectable faults: what each does, what it needs, and where it should be detected.

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
        footer = f"{fault_algorithms_text()} For settings, sizes and sources: abrun faults NAME"
        console().say(footer)


@app.command(rich_help_panel=DIAGNOSTICS)
def samples(
    run: Annotated[
        str, typer.Argument(help="A run's folder, or its name such as quickstart/baseline/seed-0.")
    ],
    step: Annotated[int | None, typer.Option(min=1, help="Only this step.")] = None,
    against: Annotated[
        str | None, typer.Option(help="Another run to show side by side for the same prompts.")
    ] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Show a run's saved completions with their rewards, optionally side by side with another run's.

    Examples:
        abrun samples quickstart/baseline/seed-0 --step 60
        abrun samples quickstart/baseline/seed-0 --against quickstart/treatment/seed-0
    """
    from abrun.recorded.samples import pair_samples, read_run_samples
    from abrun.report.samples import render_samples

    names = [run] if against is None else [run, against]
    samples, right = (read_run_samples(_find_run_folder(name, runs_dir)) for name in (run, against or run))
    pairs = pair_samples(samples, right, step)
    if not pairs:
        steps = ", ".join(map(str, samples)) or "none (keep_samples: null keeps none)"
        raise StoreError(f"{run}: got no completions{f' of step {step}' if step else ''}; kept: {steps}")
    console().print(render_samples(names, pairs))
    if against is not None and not any(pair.left and pair.right for pair in pairs):
        console().print(
            "The runs have no saved prompt in common: only runs with the same seed draw the same prompts.",
            style="dim",
        )


@app.command(rich_help_panel=DIAGNOSTICS)
@survive_output_errors
def sensitivity(
    recipe: RecipeFile,
    overrides: Overrides = None,
    names: Annotated[
        str | None,
        typer.Option(
            "--faults", help="Comma-separated NAME or NAME:SIZE; default: all that the recipe can inject."
        ),
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds instead of the recipe's: 0,1,2 or 0-4.")] = None,
    launcher: Launcher = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum concurrent runs; default: as many as the devices allow."),
    ] = None,
    runs_dir: RunsDir = Path("runs"),
    name: Annotated[
        str | None,
        typer.Option(help="Folder of the experiment; default: <recipe name>-sensitivity."),
    ] = None,
    resume: Resume = False,
    device_memory: DeviceMemory = None,
) -> None:
    """Inject faults into the baseline and report which of them the recipe's comparison would catch.

    Exit code: 0 if every run finished, 1 if one failed, 2 for bad input.

    Examples:
        abrun sensitivity quickstart-faults
        abrun sensitivity quickstart --faults flipped_advantages,stale_rollout_weights
    """
    from abrun.api.launching import launch_recipe
    from abrun.experiment.options import LaunchOptions
    from abrun.launch.sensitivity_recipe import make_sensitivity_recipe
    from abrun.recipe.experiment import load_recipe

    faulty, not_injected = make_sensitivity_recipe(load_recipe(recipe, add_seeds(overrides, seeds)), names)
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
    print_resume_command(screen, launched)
    if not (launched.outcome and launched.outcome.stopped_by):
        _report_detected_faults(screen, faulty, launched.experiment_dir, not_injected)
    raise typer.Exit(launched.exit_code)


def _report_detected_faults(
    screen: "Terminal", recipe: "ExperimentDeclaration", experiment_dir: Path, not_injected: Mapping[str, str]
) -> None:
    """Judge the injected faults, print the table and write it into the experiment's report."""
    from abrun.recorded.stored import load_experiment
    from abrun.report.injected import advice_lines, caught_sentence, sensitivity_table, write_sensitivity
    from abrun.verdict.injected import measure_sensitivity as judge_faults

    result = judge_faults(load_experiment(experiment_dir))
    if result is None:
        raise RecipeError(Code.NO_FAULT_CAN_BE_INJECTED(recipe=recipe.name))
    screen.print(sensitivity_table(result, paired=recipe.compare.paired))
    for fault, need in not_injected.items():
        screen.say(f"not injected: {fault}, which {need}")
    for line in (*advice_lines(result), caught_sentence(result, paired=recipe.compare.paired)):
        screen.say(line)
    report = experiment_dir / "report"
    path = write_sensitivity(result, not_injected, report, experiment_dir.name, recipe.compare)
    screen.say(f"Details: {path}, and as JSON next to it")


def _find_run_folder(run: str, runs_dir: Path) -> Path:
    """Return the folder of an abrun run or another trainer's completions. Raises StoreError if neither."""
    from abrun.logs.completions import read_completions
    from abrun.runs.experiment import find_run
    from abrun.runs.rundir import RunDir
    from abrun.watch.log import refuse_experiment

    path = find_run(run, runs_dir)
    refuse_experiment(path)
    if not (is_directory(path) and read_completions(path)):
        RunDir(path).record()
    return path
