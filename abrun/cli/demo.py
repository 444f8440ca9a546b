"""The command for a first look: two verdicts in seconds, without training."""

from pathlib import Path
from typing import Annotated

import typer

from abrun.cli.app import app, console, survive_output_errors


@app.command()
@survive_output_errors
def demo(
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="Folder for the runs and their reports; one that has them is reused."
        ),
    ] = Path("abrun-demo"),
) -> None:
    """Judge bundled runs in seconds: a MATCH, then a MISMATCH.

    Each is about a change to the training code; the second change has a bug. Runs offline and without torch,
    and writes a report page for each verdict.

    Examples:
        abrun demo
        abrun demo -o first-look
    """
    from abrun.api.demo import render_demo, run_demo

    verdicts, screen = run_demo(output), console()
    screen.print(render_demo(verdicts, screen.width), crop=False)  # a command is copied whole
