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
    """Judge small bundled runs: a change that is safe (MATCH), then one with a bug (MISMATCH).

    Takes seconds, offline and without torch. Writes a report page for each verdict.

    Examples:
        abrun demo
        abrun demo -o /tmp/abrun-demo
    """
    from abrun.api.demo import render_demo, run_demo

    console().print(render_demo(run_demo(output)))
