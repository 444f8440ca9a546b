"""Commands that judge runs, and plan what that takes. Everything slow to import waits inside its command."""

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from abrun.cli.app import JUDGE, app, complain, console, outlives_output, print_json
from abrun.cli.arguments import (
    MOST_SEEDS,
    Aliases,
    AllowInconclusive,
    Baseline,
    Claims,
    Exclude,
    Formats,
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
    names_of_recipes,
    parse_formats,
    parse_interim,
    parse_seeds,
    recipe_file,
    typed_command,
)
from abrun.errors import ComparisonError, RecipeError
from abrun.messages import sentence
from abrun.reasons import Code
from abrun.redaction import shown

if TYPE_CHECKING:
    from abrun.recipe.claims import Claim
    from abrun.recorded.experiment import RecordedExperiment
    from abrun.recorded.sources import ReadingOptions
    from abrun.report.comparing import Comparison


@app.command(rich_help_panel=JUDGE)
@outlives_output
def compare(
    sources: Sources,
    claim: Claims = None,
    reference: Reference = None,
    arm: Annotated[str | None, typer.Option(help="With --reference: which arm (the baseline).")] = None,
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
    formats: Formats = None,
    allow_inconclusive: AllowInconclusive = False,
    wandb: ToWandb = False,
    as_json: Json = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Judge whether arms converge the same way: an experiment, or runs that any framework logged.

    Exit code: 0 MATCH, 3 MISMATCH, 4 INCONCLUSIVE, 5 INVALID, 2 for bad input.

    Examples:
        abrun compare quickstart
        abrun compare runs/old runs/new --claim 'train/reward:last 20%:0.02'
        abrun compare old=a.csv new=b.csv --unpaired
        abrun compare nightly --reference reference.json --format json --json
    """
    from abrun.report.comparing import compare_sources

    wanted = parse_formats(formats)
    if wandb and wanted == ["terminal"]:
        raise RecipeError(Code.UPLOAD_NEEDS_FILE(formats=formats))
    reading = _reading(runs_dir, baseline, pattern, group, alias, step_column, seeds, exclude)
    interim_counts = () if interim is None else parse_interim(interim)
    comparison = compare_sources(
        sources,
        replace(reading, versions_differ=versions_differ, unpaired=unpaired, interim=interim_counts),
        claims=_claims(claim),
        reference=reference,
        arm=arm,
        step_one=not no_step_one,
        output=output,
        formats=None if formats is None else [form for form in wanted if form != "terminal"],
        command=typed_command(),
    )
    if as_json:
        print_json(comparison.as_json())
    elif "terminal" in wanted:
        console().print(comparison.summary())
    if wandb:
        _upload(comparison, sources, runs_dir)
    tolerated = allow_inconclusive and comparison.verdict == "INCONCLUSIVE"
    raise typer.Exit(0 if tolerated else comparison.exit_code)


def _upload(comparison: "Comparison", sources: Sequence[str], runs_dir: Path) -> None:
    from abrun.recorded.sources import find_stored_experiment
    from abrun.wandb_sync.report import upload_report

    print(
        shown(upload_report(comparison.content, comparison.files, find_stored_experiment(sources, runs_dir)))
    )


Budget = Annotated[
    str | None,
    typer.Option(
        help="Begin a ledger: how far accepted changes may drift from these runs in all, as 0.05 or "
        "METRIC=0.05."
    ),
]
ChainAlone = Annotated[
    bool,
    typer.Option(
        "--chain-alone",
        help="With --budget: the sum of the changes' bounds counts; else the smaller of it and of a "
        "direct comparison with these runs, at half the level each.",
    ),
]


@app.command(rich_help_panel=JUDGE)
@outlives_output
def freeze(
    sources: Sources,
    output: Annotated[Path, typer.Option("--output", "-o", help="The reference file to write.")],
    arm: Annotated[str | None, typer.Option(help="Which arm; default: the baseline.")] = None,
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
    chain_alone: ChainAlone = False,
) -> None:
    """Freeze the runs of an arm as a reference ensemble: a small file, to compare later runs with.

    It keeps the claims that the experiment declares, or those of --claim, which other runs need: by them
    later runs are judged.

    Examples:
        abrun freeze quickstart --output quickstart.json
        abrun freeze runs/old --claim 'train/reward:last 20%:0.02' -o old.json
        abrun freeze nightly --arm treatment --budget 0.05 -o reference.json
    """
    from abrun.diagnose.ledger.command import ledger_maker
    from abrun.recorded.sources import find_stored_experiment, open_sources
    from abrun.report.comparing import freeze_arm

    reading = _reading(runs_dir, baseline, pattern, group, alias, step_column, seeds, exclude)
    experiment = open_sources(sources, replace(reading, allows_one_arm=True), _claims(claim))
    directory = find_stored_experiment(sources, runs_dir)
    frozen = arm or experiment.baseline
    begin = ledger_maker(experiment, frozen, budget, chain_alone=chain_alone, experiment_dir=directory)
    replaced = freeze_arm(experiment, frozen, output, begin_ledger=begin)
    text = _frozen(experiment, frozen, output, budget, replaced.name if replaced else None)
    typed = _as_options({"--pattern": [pattern], "--alias": alias or [], "--step-column": [step_column]})
    console().say(
        f"{text}; compare later runs with: abrun compare NEW --reference {shlex.quote(str(output))}{typed}"
    )


def _reading(
    runs_dir: Path,
    baseline: str | None,
    pattern: str | None,
    group: str | None,
    alias: list[str] | None,
    step_column: str | None,
    seeds: str | None,
    exclude: list[str] | None,
) -> "ReadingOptions":
    """Return how sources are read, by the options that `compare` and `freeze` share."""
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


def _claims(claim: list[str] | None) -> "list[Claim] | None":
    from abrun.recipe.claims import parse_claim

    return [parse_claim(text) for text in claim] if claim else None


def _frozen(
    experiment: "RecordedExperiment", arm: str, output: Path, budget: str | None, replaced: str | None
) -> str:
    """Say what a reference file now holds."""
    text = f"{output}: {len(experiment.arm(arm))} seeds of {arm}"
    if not experiment.compare.claims:
        text += ", without a claim (--claim METRIC:WINDOW:MARGIN keeps one)"
    if budget is not None:
        text += f", with a ledger of changes (abrun ledger {output})"
    if replaced is not None:
        text += f", in place of the reference {replaced}"
    return text + "".join(f"; {sentence(reason)}" for reason in experiment.left_out)


def _as_options(given: Mapping[str, Sequence[str | None]]) -> str:
    """What was typed, to be pasted."""
    typed = ((option, value) for option, values in given.items() for value in values if value)
    return "".join(f" {option} {shlex.quote(value)}" for option, value in typed)


@app.command(rich_help_panel=JUDGE)
@outlives_output
def ledger(
    reference: Annotated[Path, typer.Argument(help="A reference that abrun freeze --budget wrote.")],
    add: Annotated[
        str | None, typer.Option(help="Add this experiment's treatment, which has to be a match.")
    ] = None,
    arm: Annotated[str | None, typer.Option(help="With --add: which treatment, of several.")] = None,
    tried: Annotated[
        int,
        typer.Option(
            min=1,
            max=1_000_000,
            help="With --add: changes judged since the last entry, this one among them.",
        ),
    ] = 1,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Show what accepted changes may have drifted from a reference in all, or add one.

    Exit code: 0 within the budget, 3 beyond it, 2 for bad input, or a change that cannot be added.

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
        raise RecipeError(
            f"{'--arm' if arm is not None else '--tried'}: got it without --add, which it is of"
        )
    found = add_to_ledger(reference, find_experiment(add, runs_dir), arm, tried) if add else None
    found = found or load_reference(reference)
    if found.ledger is None:
        raise RecipeError(Code.REFERENCE_WITHOUT_LEDGER(reference=reference))
    console().print(render_ledger(found))
    raise typer.Exit(EXCEEDED if is_over_budget(found) else 0)


PlannedRecipe = Annotated[
    Path | None,
    typer.Argument(
        help="A recipe: a YAML file, the name of one that ships, or an experiment's folder; default: what "
        "the experiment of --from was launched with.",
        callback=recipe_file,
        autocompletion=names_of_recipes,
    ),
]


@app.command(rich_help_panel=JUDGE)
def plan(
    recipe: PlannedRecipe = None,
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
    as_json: Json = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Say how many seeds the declared margins take, before any GPU is spent.

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
    assuming = f"abrun plan {shlex.quote(str(planned))}{_as_options({'--set': overrides or []})} --sigma X"
    loaded = load_recipe(planned, overrides or [])
    if max_seeds is not None:
        loaded = add_interim_analyses(loaded, max_seeds)
    make_draft(loaded)  # refuses what a launch would refuse
    asked = loaded.name, loaded.compare, len(loaded.seeds)
    if measured:
        _refuse_without_pairs(measured, assuming)
    if otherwise := measured and pilot_differences_text(loaded, measured):
        complain(otherwise)
    if as_json:
        print_json(plan_json(*asked, earlier=measured, sigma=sigma, correlation=correlation))
        return
    report = render_plan(*asked, earlier=measured, assuming=assuming, sigma=sigma, correlation=correlation)
    console().print(report)


def _refuse_without_pairs(earlier: "RecordedExperiment", assuming: str) -> None:
    """Raises ComparisonError where no pair of runs has finished, in which a spread could be measured.

    `assuming`: the command that plans without.
    """
    if any(all(earlier.sides(arm).finished.sizes) for arm in earlier.treatments):
        return
    runs = earlier.runs.values()
    counts = Counter("finished" if run.finished else run.status for run in runs)
    first = next((f"; {run}: {run.failure}" for run in runs if run.failure), "")
    raise ComparisonError(
        f"--from: {earlier.name}: no pair of its runs has finished, so there is no spread to measure "
        f"({', '.join(f'{count} {status}' for status, count in counts.items())}{first}); finish it with "
        f"--resume, or assume a spread: {assuming}"
    )
