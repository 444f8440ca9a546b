"""Commands about frozen references. Slow imports happen inside the commands."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from abrun.cli.app import add_group, console, survive_output_errors
from abrun.cli.arguments import (
    Aliases,
    Baseline,
    Claims,
    Exclude,
    Experiment,
    Group,
    Pattern,
    RunsDir,
    Seeds,
    Sources,
    StepColumn,
    make_reading,
    option_text,
    parse_claims,
    refuse_options,
)
from abrun.messages import sentence
from abrun.messages.codes import Code

if TYPE_CHECKING:
    from abrun.logs.recorded.experiment import RecordedExperiment, Reference

references = add_group("reference")


@references.callback()
def describe_group() -> None:
    """Save runs as a reference, and track drift from it.

    Later runs are compared with the reference instead of with a new baseline. With a budget it also has a
    ledger of accepted changes.

    Examples:
        abrun reference save quickstart --output quickstart.json
        abrun compare nightly --reference quickstart.json
    """


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
        "Default: also by comparing the last accepted change directly with the reference's runs; the "
        "smaller bound counts, each at half of the error level.",
    ),
]


@references.command()
@survive_output_errors
def save(
    sources: Sources,
    output: Annotated[Path, typer.Option("--output", "-o", help="Reference file to write.")],
    arm: Annotated[str | None, typer.Option(help="Arm to save; default: the baseline.")] = None,
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
    """Save an arm's runs as a reference: a small file to commit.

    The file has the experiment's declared claims, by which later runs are judged; for runs without
    declared claims, pass --claim.

    Examples:
        abrun reference save quickstart --output quickstart.json
        abrun reference save runs/old --claim 'train/reward:last 20%:0.02' -o old.json
        abrun reference save nightly --arm treatment --budget 0.05 -o reference.json
    """
    from abrun.logs.recorded.sources import find_stored_experiment, open_sources
    from abrun.report.comparing import freeze_arm

    if budget is None:
        refuse_options({"--chain-alone": chain_alone}, Code.OPTION_NEEDS, needed="--budget")
    selection = (pattern, group, alias, step_column, seeds, exclude)
    reading = make_reading(runs_dir, baseline, *selection, allows_one_arm=True)
    experiment = open_sources(sources, reading, parse_claims(claim))
    directory = find_stored_experiment(sources, runs_dir)
    frozen = arm or experiment.baseline
    ledger = _ledger("--budget") if budget is not None else None
    new_ledger = ledger and ledger.ledger_maker(
        experiment, frozen, budget, chain_alone=chain_alone, experiment_dir=directory
    )
    replaced = freeze_arm(experiment, frozen, output, begin_ledger=new_ledger)
    text = _reference_text(experiment, frozen, output, budget, replaced.name if replaced else None)
    reading_options = option_text(
        {"--pattern": [pattern], "--alias": alias or [], "--step-column": [step_column]}
    )
    console().say(
        f"{text}; compare later runs with: abrun compare NEW --reference {shlex.quote(str(output))}"
        f"{reading_options}"
    )


def _reference_text(
    experiment: "RecordedExperiment", arm: str, output: Path, budget: str | None, replaced: str | None
) -> str:
    """Return a description of the reference file."""
    text = f"{output}: {len(experiment.arm(arm))} seeds of {arm}"
    if not experiment.compare.claims:
        text += ", without a claim (--claim METRIC:WINDOW:MARGIN keeps one)"
    if budget is not None:
        text += f", with a ledger of changes (abrun reference show {output})"
    if replaced is not None:
        text += f", in place of the reference {replaced}"
    return text + "".join(f"; {sentence(reason)}" for reason in experiment.left_out)


ReferenceFile = Annotated[Path, typer.Argument(help="Reference, written by abrun reference save.")]


@references.command()
def show(reference: ReferenceFile) -> None:
    """Show what a reference holds, and the drift of accepted changes.

    Exit code: 0, or 3 if the drift is above the budget; 2 for bad input.

    Examples:
        abrun reference show reference.json
    """
    from abrun.logs.recorded.reference import load_reference

    _print_reference(load_reference(reference))


@references.command()
@survive_output_errors
def add(
    reference: ReferenceFile,
    experiment: Experiment,
    arm: Annotated[str | None, typer.Option(help="Treatment to add; required if there are several.")] = None,
    tried: Annotated[
        int,
        typer.Option(
            min=1,
            max=1_000_000,
            help="Number of changes evaluated since the last entry, including this one (for multiplicity "
            "correction).",
        ),
    ] = 1,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Record an accepted change in the ledger of a reference.

    The treatment of the experiment is added; its verdict must be MATCH. The reference needs a ledger, which
    abrun reference save --budget starts.

    Exit code: 0 within the budget, 3 above it, 2 for bad input or a change that cannot be added.

    Examples:
        abrun reference add reference.json nightly
        abrun reference add reference.json nightly --arm treatment --tried 3
    """
    from abrun.runs.experiment import find_experiment

    add_to_ledger = _ledger("reference add").add_to_ledger
    _print_reference(add_to_ledger(reference, find_experiment(experiment, runs_dir), arm, tried))


def _print_reference(reference: "Reference") -> None:
    """Print a reference. Raises Exit with 3 if the drift is above its budget."""
    ledger = _ledger("reference show")
    console().print(ledger.render_reference(reference))
    raise typer.Exit(ledger.EXCEEDED if ledger.is_over_budget(reference) else 0)


def _ledger(needed_by: str) -> Any:
    """Return the tool of a reference's ledger."""
    from abrun.recipe.implementations import load_tool

    return load_tool("ledger", needed_by)
