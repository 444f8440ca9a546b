"""The command `abrun logprob-diff`. Slow imports happen inside it."""

from pathlib import Path
from typing import Annotated

import typer

from abrun.cli.app import console, make_group, survive_output_errors
from abrun.cli.arguments import RunsDir

commands = make_group()


@commands.command("logprob-diff", rich_help_panel="Diagnostics")
@survive_output_errors
def logprob_diff(
    run: Annotated[
        str,
        typer.Argument(
            help="A run's folder or name, or an experiment: then its first run with a checkpoint, baseline "
            "runs first."
        ),
    ],
    step: Annotated[
        int | None,
        typer.Option(min=0, help="Use the weights after this step; default: the newest checkpoint."),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Also score with this recipe value changed; repeatable."
        ),
    ] = None,
    sequences: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of the step's sequences to score.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the report; default: RUN/mismatch.")
    ] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Break down a run's train-inference mismatch by cause.

    Scores the sampled tokens again, changing one cause at a time between rollout engine and trainer.

    Examples:
        abrun logprob-diff quickstart/baseline/seed-0
        abrun logprob-diff quickstart --set policy.logprobs.head_dtype=float32
    """
    from abrun.tools.logprob_diff.command import measure_run
    from abrun.tools.logprob_diff.report import summary

    screen = console()
    budget, folder = measure_run(
        run, runs_dir, step=step, sets=sets or (), num_sequences=sequences, output=output, say=screen.say
    )
    screen.print(summary(budget))
    screen.say(f"The report is in {folder}")
