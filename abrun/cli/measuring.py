"""Commands that measure a machine, a step or a run. Everything slow to import waits inside its command."""

from pathlib import Path
from typing import Annotated

import typer

from abrun.cli.app import LOOK_CLOSER, app, console
from abrun.cli.arguments import (
    Overrides,
    RecipeFile,
    RunsDir,
    parse_lengths,
)


@app.command("memory-profile", rich_help_panel=LOOK_CLOSER)
def memory_profile(
    recipe: RecipeFile,
    overrides: Overrides = None,
    lengths: Annotated[
        str, typer.Option(help="Sequence lengths to measure, in tokens, prompt and completion together.")
    ] = "128,256,512,1024",
    sequences: Annotated[
        int | None,
        typer.Option(min=1, help="A rank's microbatch of sequences; default: the recipe's, or 1 (dpo: 2)."),
    ] = None,
    runs_dir: RunsDir = Path("runs"),
    output: Annotated[
        Path | None, typer.Option(help="Where table and plot go; default: <runs-dir>/<recipe>-memory.")
    ] = None,
) -> None:
    """Measure the peak memory of a training step by phase and arm, on this machine's device.

    Examples:
        abrun memory-profile fused-logprobs-memory --lengths 128,256
    """
    from abrun.memory.profile import measure_recipe
    from abrun.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    output = output or runs_dir / f"{loaded.name.removesuffix('-memory')}-memory"
    profile = measure_recipe(loaded, output, lengths=parse_lengths(lengths), num_sequences=sequences)
    screen = console()
    screen.print(profile.table())
    screen.print(f"peaks.json, memory.png and memory.svg are in {output}", soft_wrap=True, markup=False)


@app.command(rich_help_panel=LOOK_CLOSER)
def mismatch(
    run: Annotated[
        str,
        typer.Argument(help="A run's folder, or an experiment, of which a run is chosen and named."),
    ],
    step: Annotated[
        int | None,
        typer.Option(min=0, help="Which weights: those after this step (default: the newest checkpoint)."),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="One more change to score by; repeatable.",
        ),
    ] = None,
    sequences: Annotated[
        int | None, typer.Option(min=1, help="Score only so many of the step's sequences.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where the report goes; default: RUN/mismatch.")
    ] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Say what makes the log-probs of a run's trainer and rollout engine differ, and by how much.

    Examples:
        abrun mismatch quickstart/baseline/seed-0
        abrun mismatch quickstart --set policy.logprobs.head_dtype=float32
    """
    from abrun.mismatch.command import measure_run
    from abrun.mismatch.report import summary

    screen = console()
    budget, folder = measure_run(
        run,
        runs_dir,
        step=step,
        sets=sets or (),
        num_sequences=sequences,
        output=output,
        say=lambda line: screen.print(line, soft_wrap=True, markup=False),
    )
    screen.print(summary(budget))
    screen.print(f"The report is in {folder}", soft_wrap=True, markup=False)


@app.command(rich_help_panel=LOOK_CLOSER)
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="For machines: all of it as JSON.")] = False,
) -> None:
    """Show what this machine can run, and what each thing that it cannot run lacks. Exit code 0.

    Examples:
        abrun doctor
        abrun doctor --json
    """
    from abrun.launch.doctor import diagnose

    diagnosis = diagnose()
    if as_json:
        print(diagnosis.as_json())
    else:
        console().print(diagnosis.render())
