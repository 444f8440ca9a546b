"""Commands that judge runs and plan sample sizes. Slow imports happen inside the commands."""

import math
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from abrun.cli.app import app, console, print_error, print_json, survive_output_errors
from abrun.cli.arguments import (
    MAX_SEEDS,
    Aliases,
    AllowInconclusive,
    Alpha,
    Baseline,
    Claims,
    Exclude,
    Group,
    Interim,
    Json,
    NoStepOne,
    OptionalSources,
    Overrides,
    Pattern,
    Reference,
    ReferenceArm,
    ReportFolder,
    Require,
    RunsDir,
    Seeds,
    StepColumn,
    ToWandb,
    Unpaired,
    VersionsDiffer,
    make_reading,
    option_text,
    parse_claims,
    parse_interim,
    parse_require,
    recipe_argument,
    refuse_options,
    typed_command,
)
from abrun.cli.fleets import Before, FleetArguments, FleetFolder, Rerun, judge_fleet
from abrun.errors import ComparisonError, RecipeError
from abrun.messages.codes import Code
from abrun.runs.redaction import display_safe

if TYPE_CHECKING:
    from abrun.logs.recorded.experiment import RecordedExperiment
    from abrun.report.comparing import Comparison


@app.command()
@survive_output_errors
def compare(
    sources: OptionalSources = None,
    claim: Claims = None,
    alpha: Alpha = None,
    require: Require = None,
    reference: Reference = None,
    arm: ReferenceArm = None,
    baseline: Baseline = None,
    pattern: Pattern = None,
    group: Group = None,
    alias: Aliases = None,
    step_column: StepColumn = None,
    seeds: Seeds = None,
    exclude: Exclude = None,
    versions_differ: VersionsDiffer = False,
    unpaired: Unpaired = False,
    interim: Interim = None,
    no_step_one: NoStepOne = False,
    fleet: FleetFolder = None,
    before: Before = None,
    rerun: Rerun = None,
    output: ReportFolder = None,
    allow_inconclusive: AllowInconclusive = False,
    wandb: ToWandb = False,
    as_json: Json = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Judge whether the arms converge the same way.

    The runs are an experiment's, or logged by any framework.

    Prints the verdict; writes nothing without --output. Exit code: 0 MATCH or PASS, or no
    claim to judge; 3 MISMATCH or FAIL; 4 INCONCLUSIVE; 5 INVALID; 2 for bad input. PASS and FAIL are the
    verdicts if every claim is one-sided (not_worse, better, a limit).

    One arm alone: its level, its spread over seeds, and the differences that 3 to 10 pairs would show;
    exit code 0, or 4 with --claim. One run of an arm and several of the other: how unusual that run is.

    --fleet judges a folder of recipes, each by its reference NAME.json, at a false discovery rate of 5 %.
    Exit code: 3 a recipe regressed here; else 5 one cannot be judged; else 4 one is open; else 0 (all are
    green, flaked or red before).

    Examples:
        abrun compare quickstart
        abrun compare runs/old runs/new --claim 'train/reward:last 20%:0.02' --output report
        abrun compare old=a.csv new=b.csv --unpaired
        abrun compare runs/base
        abrun compare nightly --reference reference.json --json
        abrun compare --fleet branch --reference references --before nightly-report --output report
    """
    from abrun.report.comparing import compare_sources

    fields = {"versions_differ": versions_differ, "unpaired": unpaired, "interim": parse_interim(interim)}
    reading = make_reading(runs_dir, baseline, pattern, group, alias, step_column, seeds, exclude, **fields)
    if fleet is not None:
        options = FleetArguments(fleet, reference, before, rerun, arm, output, step_one=not no_step_one)
        refused = {"SOURCE": sources, "--claim": claim, "--wandb": wandb}
        judge_fleet(options, reading, refused, allow_open=allow_inconclusive, as_json=as_json)
    refuse_options({"--before": before, "--rerun": rerun}, Code.OPTION_NEEDS, needed="--fleet")
    if not sources:
        raise RecipeError(Code.FLEET_NEEDS_SOURCE())
    if wandb and output is None:
        raise RecipeError(Code.UPLOAD_NEEDS_FILE())
    comparison = compare_sources(
        sources,
        reading,
        claims=parse_claims(claim),
        alpha=alpha,
        require=parse_require(require),
        reference=reference,
        arm=arm,
        step_one=not no_step_one,
        output=output,
        command=typed_command(),
    )
    if as_json:
        print_json(comparison.as_json())
    else:
        console().print(comparison.summary())
    if wandb:
        _upload(comparison, sources, runs_dir)
    is_tolerated = allow_inconclusive and comparison.verdict == "INCONCLUSIVE"
    raise typer.Exit(0 if is_tolerated else comparison.exit_code)


def _upload(comparison: "Comparison", sources: Sequence[str], runs_dir: Path) -> None:
    from abrun.logs.recorded.sources import find_stored_experiment
    from abrun.wandb_sync.report import upload_report

    experiment_dir = find_stored_experiment(sources, runs_dir)
    print(display_safe(upload_report(comparison.content, comparison.files, experiment_dir)))


PlannedRecipe = Annotated[
    Path | None,
    recipe_argument(
        "Recipe: a YAML file, a built-in recipe, or an experiment's folder; default: the recipe of the "
        "--from experiment."
    ),
]
Earlier = Annotated[
    str | None, typer.Option("--from", help="Earlier experiment in which to measure spread and correlation.")
]
PlannedSeeds = Annotated[
    int | None,
    typer.Option(
        min=3,
        max=MAX_SEEDS,
        help="Plan for `abrun launch --until-decided` with this maximum number of seeds.",
    ),
]


@app.command()
def power(
    recipe: PlannedRecipe = None,
    overrides: Overrides = None,
    earlier: Earlier = None,
    sigma: Annotated[
        float | None, typer.Option(min=0, help="Standard deviation of one arm over seeds, for every claim.")
    ] = None,
    correlation: Annotated[
        float | None, typer.Option(min=-0.99, max=0.99, help="Correlation of arms that share a seed.")
    ] = None,
    max_seeds: PlannedSeeds = None,
    as_json: Json = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Estimate the power, and the seeds that the margins need.

    Trains nothing: the spread over seeds is given, or measured in an earlier experiment.

    Examples:
        abrun power quickstart
        abrun power quickstart --from pilot
        abrun power --from pilot --set compare.claims.0.margin=0.1
        abrun power quickstart --sigma 0.02 --correlation 0.8 --max-seeds 12
    """
    from abrun.experiment.plan import make_draft
    from abrun.launch.stages import add_interim_analyses
    from abrun.logs.recorded.stored import load_experiment
    from abrun.recipe.experiment import load_recipe
    from abrun.report.planning import PowerPlan, pilot_differences_text
    from abrun.runs.experiment import find_experiment

    if earlier and (sigma is not None or correlation is not None):
        raise RecipeError(Code.PLAN_FROM_AND_ASSUMED(got=earlier))
    if sigma is not None and not math.isfinite(sigma):
        raise RecipeError(Code.SETTING_REFUSED(field="--sigma", got=sigma))
    experiment_dir = find_experiment(earlier, runs_dir) if earlier else None
    measured = load_experiment(experiment_dir) if experiment_dir else None
    planned = recipe or experiment_dir
    if planned is None:
        raise RecipeError(Code.PLAN_NEEDS_RECIPE())
    assumed_command = (
        f"abrun power {shlex.quote(str(planned))}{option_text({'--set': overrides or []})} --sigma X"
    )
    loaded = load_recipe(planned, overrides or [])
    if max_seeds is not None:
        loaded = add_interim_analyses(loaded, max_seeds)
    make_draft(loaded)  # raises the errors that a launch would raise
    if measured:
        _refuse_without_pairs(measured, assumed_command)
    if differences := measured and pilot_differences_text(loaded, measured):
        print_error(differences)
    plan = PowerPlan(
        loaded.name,
        loaded.compare,
        len(loaded.seeds),
        earlier=measured,
        assuming=assumed_command,
        sigma=sigma,
        correlation=correlation,
        seeds=loaded.seeds,
        num_treatments=len(loaded.arms) - 1,
    )
    if as_json:
        print_json(plan.as_json())
    else:
        console().print(plan.render())


def _refuse_without_pairs(earlier: "RecordedExperiment", assumed_command: str) -> None:
    """Raise ComparisonError if no pair of runs has finished to measure a spread.

    `assumed_command`: the command that plans with an assumed spread instead.
    """
    if any(all(earlier.sides(arm).finished.sizes) for arm in earlier.treatments):
        return
    runs = earlier.runs.values()
    counts = Counter("finished" if run.finished else run.status for run in runs)
    first_failure = next((f"; {run}: {run.failure}" for run in runs if run.failure), "")
    raise ComparisonError(
        f"--from: {earlier.name}: no pair of its runs has finished, so there is no spread to measure "
        f"({', '.join(f'{count} {status}' for status, count in counts.items())}{first_failure}); "
        f"finish it with --resume, or assume a spread: {assumed_command}"
    )
