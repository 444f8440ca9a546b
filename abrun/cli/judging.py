"""Commands that judge runs, and plan what that takes. Everything slow to import waits inside its command."""

import math
from pathlib import Path
from typing import Annotated

import typer

from abrun.cli.app import app, console
from abrun.cli.arguments import (
    MOST_SEEDS,
    Aliases,
    AllowInconclusive,
    Baseline,
    Claims,
    Formats,
    Group,
    NoStepOne,
    Overrides,
    Pattern,
    RecipeFile,
    Reference,
    ReportFolder,
    RunsDir,
    Sources,
    StepColumn,
    ToWandb,
    parse_formats,
    typed_command,
)
from abrun.errors import RecipeError
from abrun.redaction import shown


@app.command()
def compare(
    sources: Sources,
    primary: Claims = None,
    reference: Reference = None,
    arm: Annotated[str | None, typer.Option(help="With --reference: which arm (the baseline).")] = None,
    baseline: Baseline = None,
    pattern: Pattern = None,
    group: Group = None,
    alias: Aliases = None,
    step_column: StepColumn = None,
    no_step_one: NoStepOne = False,
    output: ReportFolder = None,
    formats: Formats = "terminal,html,markdown,json,png,svg",
    allow_inconclusive: AllowInconclusive = False,
    wandb: ToWandb = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Judge whether arms converge the same way: an experiment, or runs that any framework logged.

    Exit code: 0 MATCH, 3 MISMATCH, 4 INCONCLUSIVE, 5 INVALID, 2 for bad input.
    """
    from abrun.compare import compare_sources
    from abrun.compare.read.sources import Reading
    from abrun.recipe import parse_primary

    wanted = parse_formats(formats)
    if wandb and wanted == ["terminal"]:
        raise RecipeError(
            f"--wandb: got --format {formats}, which leaves no file to upload; add html, or json"
        )
    comparison = compare_sources(
        sources,
        Reading(
            runs_dir=runs_dir,
            baseline=baseline,
            pattern=pattern,
            group=group,
            aliases=tuple(alias or ()),
            step_column=step_column,
        ),
        primaries=[parse_primary(text) for text in primary] if primary else None,
        reference=reference,
        arm=arm,
        step_one=not no_step_one,
        output=output,
        formats=[form for form in wanted if form != "terminal"],
        command=typed_command(),
    )
    if "terminal" in wanted:
        console().print(comparison.summary())
    if wandb:
        from abrun.compare.read.sources import stored_in
        from abrun.mirror.report import upload

        print(shown(upload(comparison.as_json(), comparison.files, stored_in(sources, runs_dir))))
    tolerated = allow_inconclusive and comparison.verdict == "INCONCLUSIVE"
    raise typer.Exit(0 if tolerated else comparison.exit_code)


@app.command()
def freeze(
    sources: Sources,
    output: Annotated[Path, typer.Option("--output", "-o", help="The reference file to write.")],
    arm: Annotated[str | None, typer.Option(help="Which arm; default: the baseline.")] = None,
    primary: Claims = None,
    baseline: Baseline = None,
    pattern: Pattern = None,
    group: Group = None,
    alias: Aliases = None,
    step_column: StepColumn = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Freeze the runs of an arm as a reference ensemble: a small file, to compare later runs with."""
    from abrun.compare import freeze_arm
    from abrun.compare.read.sources import Reading, open_sources
    from abrun.recipe import parse_primary

    reading = Reading(
        runs_dir=runs_dir,
        baseline=baseline,
        pattern=pattern,
        group=group,
        aliases=tuple(alias or ()),
        step_column=step_column,
        alone=True,
    )
    primaries = [parse_primary(text) for text in primary] if primary else None
    experiment = open_sources(sources, reading, primaries)
    freeze_arm(experiment, arm or experiment.baseline, output)
    seeds = len(experiment.arm(arm or experiment.baseline))
    console().print(
        f"{output}: {seeds} seeds; compare later runs with: abrun compare NEW --reference {output}",
        soft_wrap=True,
        markup=False,
    )


@app.command()
def plan(
    recipe: RecipeFile,
    overrides: Overrides = None,
    earlier: Annotated[
        str | None, typer.Option("--from", help="Measure spread and correlation in this earlier experiment.")
    ] = None,
    sigma: Annotated[
        float | None, typer.Option(min=0, help="Spread over seeds of one arm, for every claim.")
    ] = None,
    correlation: Annotated[
        float | None, typer.Option(min=-0.99, max=0.99, help="Correlation of arms that share a seed.")
    ] = None,
    max_seeds: Annotated[
        int | None, typer.Option(min=3, max=MOST_SEEDS, help="As of launch --until-decided --max-seeds.")
    ] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Say how many seeds the declared margins take, before any GPU is spent."""
    from abrun.compare.read.stored import load_experiment
    from abrun.compare.show.planning import plan_report
    from abrun.plan import make_plan
    from abrun.recipe import load_recipe
    from abrun.store import find_experiment

    if earlier and (sigma is not None or correlation is not None):
        raise RecipeError(
            f"--from: got {earlier!r} and --sigma or --correlation, which it measures; give one"
        )
    if sigma is not None and not math.isfinite(sigma):
        raise RecipeError(f"--sigma: got {sigma}; allowed: a finite number of 0 or more")
    loaded = load_recipe(recipe, overrides or [])
    if max_seeds is not None:
        from abrun.launch.stages import until_decided

        loaded = until_decided(loaded, max_seeds)
    make_plan(loaded)  # refuses what a launch would refuse
    report = plan_report(
        loaded.name,
        loaded.compare,
        len(loaded.seeds),
        earlier=load_experiment(find_experiment(earlier, runs_dir)) if earlier else None,
        sigma=sigma,
        correlation=correlation,
    )
    console().print(report)
