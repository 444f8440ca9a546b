"""Commands about injected faults. Slow imports happen inside the commands."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from abrun.cli.app import add_group, console, survive_output_errors
from abrun.cli.arguments import (
    DeviceMemory,
    Jobs,
    Launcher,
    NewSeeds,
    Overrides,
    RecipeFile,
    Resume,
    RunsDir,
    add_seeds,
)
from abrun.cli.experiments import print_resume_command
from abrun.errors import RecipeError
from abrun.messages.codes import Code

if TYPE_CHECKING:
    from abrun.recipe.experiment import ExperimentDeclaration
    from abrun.report.present.terminal import Terminal

FaultsJson = Annotated[bool, typer.Option("--json", help="Print JSON, including sizes and sources.")]

faults = add_group("faults", invoke_without_command=True)


@faults.callback()
def list_faults(context: typer.Context, as_json: FaultsJson = False) -> None:
    """List injectable bugs, or find which a recipe catches.

    Without a subcommand it lists what each fault does, what it needs, and where it should be detected.

    Examples:
        abrun faults
        abrun faults show flipped_advantages
        abrun faults run quickstart-faults
    """
    from abrun.recipe.faults import FAULTS
    from abrun.report.injected import fault_algorithms_text, fault_library_json, fault_library_table

    if context.invoked_subcommand:
        if as_json:
            raise RecipeError("--json lists all faults; for one: abrun faults show NAME --json")
        return
    if as_json:
        print(json.dumps(fault_library_json(FAULTS), indent=1))
        return
    console().print(fault_library_table())
    console().say(f"{fault_algorithms_text()} For settings, sizes and sources: abrun faults show NAME")


@faults.command()
def show(
    name: Annotated[str, typer.Argument(help="Name of the fault.")], as_json: FaultsJson = False
) -> None:
    """Show one fault: its settings, sizes, needs and sources.

    Examples:
        abrun faults show flipped_advantages
    """
    from abrun.recipe.faults import LIBRARY, InjectedFault
    from abrun.recipe.refusals import validated
    from abrun.report.injected import fault_library_json, fault_lines

    fault = LIBRARY[validated(InjectedFault, {"name": name}, "faults show").name]
    if as_json:
        print(json.dumps(fault_library_json((fault,)), indent=1))
        return
    for line in fault_lines(fault):
        console().say(line)


@faults.command()
@survive_output_errors
def run(
    recipe: RecipeFile,
    overrides: Overrides = None,
    names: Annotated[
        str | None,
        typer.Option(
            "--faults", help="Comma-separated NAME or NAME:SIZE; default: all that the recipe can inject."
        ),
    ] = None,
    seeds: NewSeeds = None,
    launcher: Launcher = None,
    jobs: Jobs = None,
    runs_dir: RunsDir = Path("runs"),
    name: Annotated[
        str | None, typer.Option(help="Folder of the experiment; default: <recipe name>-sensitivity.")
    ] = None,
    resume: Resume = False,
    device_memory: DeviceMemory = None,
) -> None:
    """Find which faults a recipe's comparison would catch.

    Injects each fault into the baseline, and judges these runs against the baseline.

    Exit code: 0 if every run finished, 1 if one failed, 2 for bad input.

    Examples:
        abrun faults run quickstart-faults
        abrun faults run quickstart --faults flipped_advantages,stale_rollout_weights
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
    from abrun.logs.recorded.stored import load_experiment
    from abrun.report.injected import advice_lines, caught_sentence, sensitivity_table, write_sensitivity
    from abrun.verdict.injected import measure_sensitivity as judge_faults

    result = judge_faults(load_experiment(experiment_dir))
    if not result:
        raise RecipeError(Code.NO_FAULT_CAN_BE_INJECTED(recipe=recipe.name))
    table = sensitivity_table(result, paired=recipe.compare.paired)
    screen.print(table.to_rich(padding=(0, 1)))
    for fault, need in not_injected.items():
        screen.say(f"not injected: {fault}, which {need}")
    for line in (*advice_lines(result), caught_sentence(result, paired=recipe.compare.paired)):
        screen.say(line)
    report = experiment_dir / "report"
    path = write_sensitivity(result, not_injected, report, experiment_dir.name, recipe.compare)
    screen.say(f"Details: {path}, and as JSON next to it")
