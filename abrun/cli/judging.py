"""Commands that judge runs and plan sample sizes. Slow imports happen inside the commands."""

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from abrun.cli.app import VERDICTS, app, console, print_error, print_json, survive_output_errors
from abrun.cli.arguments import (
    MAX_SEEDS,
    Aliases,
    AllowInconclusive,
    Baseline,
    Claims,
    Exclude,
    Group,
    Interim,
    Json,
    NoStepOne,
    Overrides,
    Pattern,
    Reference,
    ReportFolder,
    RunsDir,
    Seeds,
    Sources,
    StepColumn,
    ToWandb,
    Unpaired,
    VersionsDiffer,
    complete_recipe,
    parse_interim,
    parse_seeds,
    resolve_recipe_file,
    typed_command,
)
from abrun.errors import ComparisonError, RecipeError
from abrun.messages import sentence
from abrun.reasons import Code
from abrun.redaction import display_safe

if TYPE_CHECKING:
    from abrun.recipe.claims import Claim
    from abrun.recorded.experiment import RecordedExperiment
    from abrun.recorded.sources import ReadingOptions
    from abrun.report.comparing import Comparison


@app.command(rich_help_panel=VERDICTS)
@survive_output_errors
def compare(
    sources: Sources,
    claim: Claims = None,
    reference: Reference = None,
    arm: Annotated[
        str | None, typer.Option(help="With --reference: the arm to compare; required if there are several.")
    ] = None,
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
    output: ReportFolder = None,
    allow_inconclusive: AllowInconclusive = False,
    wandb: ToWandb = False,
    as_json: Json = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Judge whether arms converge the same way, in an experiment or in runs logged by any framework.

    Prints the verdict; writes nothing without --output. Exit code: 0 MATCH, or a description without a
    claim, 3 MISMATCH, 4 INCONCLUSIVE, 5 INVALID, 2 for bad input.

    Examples:
        abrun compare quickstart
        abrun compare runs/old runs/new --claim 'train/reward:last 20%:0.02' --output report
        abrun compare old=a.csv new=b.csv --unpaired
        abrun compare nightly --reference reference.json --json
    """
    from abrun.report.comparing import compare_sources

    if wandb and output is None:
        raise RecipeError(Code.UPLOAD_NEEDS_FILE())
    reading = _make_reading(runs_dir, baseline, pattern, group, alias, step_column, seeds, exclude)
    interim_counts = () if interim is None else parse_interim(interim)
    comparison = compare_sources(
        sources,
        replace(reading, versions_differ=versions_differ, unpaired=unpaired, interim=interim_counts),
        claims=_parse_claims(claim),
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
    from abrun.recorded.sources import find_stored_experiment
    from abrun.wandb_sync.report import upload_report

    print(
        display_safe(
            upload_report(comparison.content, comparison.files, find_stored_experiment(sources, runs_dir))
        )
    )


Budget = Annotated[
    str | None,
    typer.Option(
        help="Start a ledger with this budget for the total drift of accepted changes, such as 0.05 or "
        "METRIC=0.05."
    ),
]
ChainOnly = Annotated[
    bool,
    typer.Option(
        "--chain-alone",
        help="With --budget: bound the total drift only by the sum of the accepted changes' bounds. "
        "Default: the smaller of that sum and the bound of comparing the last accepted change directly "
        "with the frozen runs, each at half of the error level.",
    ),
]


@app.command(rich_help_panel=VERDICTS)
@survive_output_errors
def freeze(
    sources: Sources,
    output: Annotated[Path, typer.Option("--output", "-o", help="Reference file to write.")],
    arm: Annotated[str | None, typer.Option(help="Arm to freeze; default: the baseline.")] = None,
    claim: Claims = None,
    baseline: Baseline = None,
    pattern: Pattern = None,
    group: Group = None,
    alias: Aliases = None,
    step_column: StepColumn = None,
    seeds: Seeds = None,
    exclude: Exclude = None,
    runs_dir: RunsDir = Path("runs"),
    budget: Budget = None,
    chain_alone: ChainOnly = False,
) -> None:
    """Freeze an arm's runs as a reference: a small file with which later runs are compared.

    It stores the experiment's declared claims, by which later runs are judged; for runs without declared
    claims, pass --claim.

    Examples:
        abrun freeze quickstart --output quickstart.json
        abrun freeze runs/old --claim 'train/reward:last 20%:0.02' -o old.json
        abrun freeze nightly --arm treatment --budget 0.05 -o reference.json
    """
    from abrun.diagnose.ledger.command import ledger_maker
    from abrun.recorded.sources import find_stored_experiment, open_sources
    from abrun.report.comparing import freeze_arm

    reading = _make_reading(runs_dir, baseline, pattern, group, alias, step_column, seeds, exclude)
    experiment = open_sources(sources, replace(reading, allows_one_arm=True), _parse_claims(claim))
    directory = find_stored_experiment(sources, runs_dir)
    frozen = arm or experiment.baseline
    new_ledger = ledger_maker(experiment, frozen, budget, chain_alone=chain_alone, experiment_dir=directory)
    replaced = freeze_arm(experiment, frozen, output, begin_ledger=new_ledger)
    text = _reference_text(experiment, frozen, output, budget, replaced.name if replaced else None)
    reading_options = _option_text(
        {"--pattern": [pattern], "--alias": alias or [], "--step-column": [step_column]}
    )
    console().say(
        f"{text}; compare later runs with: abrun compare NEW --reference {shlex.quote(str(output))}"
        f"{reading_options}"
    )


def _make_reading(
    runs_dir: Path,
    baseline: str | None,
    pattern: str | None,
    group: str | None,
    alias: list[str] | None,
    step_column: str | None,
    seeds: str | None,
    exclude: list[str] | None,
) -> "ReadingOptions":
    """Return the reading settings from the options shared by `compare` and `freeze`."""
    from abrun.recorded.sources import ReadingOptions

    return ReadingOptions(
        runs_dir=runs_dir,
        baseline=baseline,
        pattern=pattern,
        group=group,
        aliases=tuple(alias or ()),
        step_column=step_column,
        seeds=None if seeds is None else tuple(parse_seeds(seeds)),
        exclude=tuple(exclude or ()),
    )


def _parse_claims(claim: list[str] | None) -> "list[Claim] | None":
    from abrun.recipe.claims import parse_claim

    return [parse_claim(text) for text in claim] if claim else None


def _reference_text(
    experiment: "RecordedExperiment", arm: str, output: Path, budget: str | None, replaced: str | None
) -> str:
    """Return a description of the reference file."""
    text = f"{output}: {len(experiment.arm(arm))} seeds of {arm}"
    if not experiment.compare.claims:
        text += ", without a claim (--claim METRIC:WINDOW:MARGIN keeps one)"
    if budget is not None:
        text += f", with a ledger of changes (abrun ledger {output})"
    if replaced is not None:
        text += f", in place of the reference {replaced}"
    return text + "".join(f"; {sentence(reason)}" for reason in experiment.left_out)


def _option_text(values_by_option: Mapping[str, Sequence[str | None]]) -> str:
    """Return options as shell text for a suggested command."""
    pairs = ((option, value) for option, values in values_by_option.items() for value in values if value)
    return "".join(f" {option} {shlex.quote(value)}" for option, value in pairs)


@app.command(rich_help_panel=VERDICTS)
@survive_output_errors
def ledger(
    reference: Annotated[Path, typer.Argument(help="Reference written by abrun freeze --budget.")],
    add: Annotated[
        str | None, typer.Option(help="Add the treatment of this experiment, whose verdict must be MATCH.")
    ] = None,
    arm: Annotated[
        str | None, typer.Option(help="With --add: the treatment to add, if there are several.")
    ] = None,
    tried: Annotated[
        int,
        typer.Option(
            min=1,
            max=1_000_000,
            help="With --add: number of changes evaluated since the last entry, including this one (for "
            "multiplicity correction).",
        ),
    ] = 1,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Track the cumulative drift of accepted changes against a budget; with --add, record a change.

    Exit code: 0 within the budget, 3 above it, 2 for bad input or a change that cannot be added.

    Examples:
        abrun ledger reference.json
        abrun ledger reference.json --add nightly
    """
    from abrun.diagnose.ledger.command import add_to_ledger
    from abrun.diagnose.ledger.drift import EXCEEDED, is_over_budget
    from abrun.diagnose.ledger.table import render_ledger
    from abrun.recorded.reference import load_reference
    from abrun.runs.experiment import find_experiment

    if add is None and (arm is not None or tried != 1):
        raise RecipeError(f"{'--arm' if arm is not None else '--tried'} requires --add")
    frozen = add_to_ledger(reference, find_experiment(add, runs_dir), arm, tried) if add else None
    frozen = frozen or load_reference(reference)
    if frozen.ledger is None:
        raise RecipeError(Code.REFERENCE_WITHOUT_LEDGER(reference=reference))
    console().print(render_ledger(frozen))
    raise typer.Exit(EXCEEDED if is_over_budget(frozen) else 0)


PlannedRecipe = Annotated[
    Path | None,
    typer.Argument(
        help="Recipe: a YAML file, a built-in recipe, or an experiment's folder; default: the recipe of the "
        "--from experiment.",
        callback=resolve_recipe_file,
        autocompletion=complete_recipe,
    ),
]


@app.command(rich_help_panel=VERDICTS)
def plan(
    recipe: PlannedRecipe = None,
    overrides: Overrides = None,
    earlier: Annotated[
        str | None,
        typer.Option("--from", help="Earlier experiment in which to measure spread and correlation."),
    ] = None,
    sigma: Annotated[
        float | None, typer.Option(min=0, help="Standard deviation of one arm over seeds, for every claim.")
    ] = None,
    correlation: Annotated[
        float | None, typer.Option(min=-0.99, max=0.99, help="Correlation of arms that share a seed.")
    ] = None,
    max_seeds: Annotated[
        int | None,
        typer.Option(
            min=3,
            max=MAX_SEEDS,
            help="Plan for `abrun launch --until-decided` with this maximum number of seeds.",
        ),
    ] = None,
    as_json: Json = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Estimate power and the number of seeds that the declared margins need, before using any GPU.

    Examples:
        abrun plan quickstart
        abrun plan quickstart --from pilot
        abrun plan --from pilot --set compare.claims.0.margin=0.1
        abrun plan quickstart --sigma 0.02 --correlation 0.8 --max-seeds 12
    """
    from abrun.experiment.plan import make_draft
    from abrun.launch.stages import add_interim_analyses
    from abrun.recipe.experiment import load_recipe
    from abrun.recorded.stored import load_experiment
    from abrun.report.planning import pilot_differences_text, plan_json, render_plan
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
        f"abrun plan {shlex.quote(str(planned))}{_option_text({'--set': overrides or []})} --sigma X"
    )
    loaded = load_recipe(planned, overrides or [])
    if max_seeds is not None:
        loaded = add_interim_analyses(loaded, max_seeds)
    make_draft(loaded)  # raises the errors that a launch would raise
    declaration = loaded.name, loaded.compare, len(loaded.seeds)
    if measured:
        _refuse_without_pairs(measured, assumed_command)
    if differences := measured and pilot_differences_text(loaded, measured):
        print_error(differences)
    if as_json:
        print_json(plan_json(*declaration, earlier=measured, sigma=sigma, correlation=correlation))
        return
    report = render_plan(
        *declaration, earlier=measured, assuming=assumed_command, sigma=sigma, correlation=correlation
    )
    console().print(report)


def _refuse_without_pairs(earlier: "RecordedExperiment", assumed_command: str) -> None:
    """Raise ComparisonError if no pair of runs has finished to measure a spread.

    `assuming`: the command that plans with an assumed spread instead.
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
