"""Commands for verdicts: compare, reference, power and faults. Slow imports happen inside the commands."""

import json
import math
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from abrun.cli import arguments
from abrun.cli.app import add_group, app, console, print_error, print_json, survive_output_errors
from abrun.cli.arguments import (
    MAX_SEEDS,
    add_seeds,
    option_text,
    parse_claims,
    parse_interim,
    parse_require,
    reads_runs,
    recipe_argument,
    refuse_options,
    typed_command,
)
from abrun.cli.experiments import print_resume_command
from abrun.errors import ComparisonError, RecipeError
from abrun.messages import sentence
from abrun.runs.redaction import display_safe

if TYPE_CHECKING:
    from abrun.logs.recorded.experiment import RecordedExperiment
    from abrun.logs.recorded.experiment import Reference as FrozenReference
    from abrun.logs.recorded.sources import ReadingOptions
    from abrun.recipe.experiment import ExperimentDeclaration
    from abrun.report.comparing import Comparison
    from abrun.report.present.terminal import Terminal

FleetFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Judge many recipes side by side: a folder with a subfolder NAME of runs for each recipe, "
        "and its reference NAME.json next to it (or in --reference FOLDER).",
    ),
]
Before = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="With --fleet: --output folder of an earlier fleet, such as the main branch's; a recipe that "
        "is red in both is `red before`, not `regressed here`.",
    ),
]
NoiseFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="History of the noise over seeds of runs not launched by abrun: used, and added to with "
        "--output.",
    ),
]
RunHours = Annotated[
    float | None,
    typer.Option(min=0, help="GPU hours of one run; default: those that the --from runs took."),
]
Rerun = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="With --fleet: second runs of some recipes, in subfolders of the same names; a recipe that is "
        "red only the first time has `flaked`.",
    ),
]


@app.command()
@survive_output_errors
@reads_runs
def compare(
    sources: arguments.OptionalSources = None,
    claim: arguments.Claims = None,
    alpha: arguments.Alpha = None,
    require: arguments.Require = None,
    reference: arguments.Reference = None,
    arm: arguments.ReferenceArm = None,
    baseline: arguments.Baseline = None,
    arms_by: arguments.ArmsBy = None,
    seeds_by: arguments.SeedsBy = None,
    list_runs: Annotated[bool, typer.Option("--list", help="Only list the runs: who is who.")] = False,
    versions_differ: arguments.VersionsDiffer = False,
    unpaired: arguments.Unpaired = False,
    interim: arguments.Interim = None,
    no_step_one: arguments.NoStepOne = False,
    noise: NoiseFile = None,
    fleet: FleetFolder = None,
    before: Before = None,
    rerun: Rerun = None,
    output: arguments.ReportFolder = None,
    allow_inconclusive: arguments.AllowInconclusive = False,
    wandb: arguments.ToWandb = False,
    verbose: arguments.Verbose = False,
    as_json: arguments.Json = False,
    *,
    reading: "ReadingOptions",
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
        abrun compare runs --list
        abrun compare nightly --reference reference.json --json
        abrun compare --fleet branch --reference references --before nightly-report --output report
    """
    from abrun.report.comparing import compare_sources

    fields = {"versions_differ": versions_differ, "unpaired": unpaired, "interim": parse_interim(interim)}
    reading = replace(reading, baseline=baseline, arms_by=arms_by, seeds_by=seeds_by, **fields)
    if fleet is not None:
        refused = {"SOURCE": sources, "--claim": claim, "--wandb": wandb, "--noise": noise}
        options = {"references": reference, "earlier": before, "rerun": rerun, "arm": arm, "output": output}
        options |= {"folder": fleet, "step_one": not no_step_one}
        _judge_fleet(reading, refused, options, allow_open=allow_inconclusive, as_json=as_json)
    refuse_options({"--before": before, "--rerun": rerun}, needed="--fleet")
    if not sources:
        raise RecipeError("compare: got no runs; give an experiment or folders of runs, or --fleet FOLDER")
    if list_runs:
        refuse_options({"--output": output, "--noise": noise}, "--list: got {option} as well; drop it")
        return _list_runs(sources, reading)
    if wandb and output is None:
        raise RecipeError("--wandb requires --output FOLDER, whose report it uploads; add it")
    judging = {"claims": parse_claims(claim), "alpha": alpha, "require": parse_require(require)}
    judging |= {"reference": reference, "arm": arm, "step_one": not no_step_one, "noise": noise}
    comparison = compare_sources(sources, reading, **judging, output=output, command=typed_command())
    if as_json:
        steps = [{**asdict(step), "argv": shlex.split(step.command)} for step in comparison.next_steps]
        print_json({**comparison.as_json(), "next": steps})
    else:
        console().print(comparison.summary(verbose=verbose))
    if wandb:
        _upload(comparison, sources, reading.runs_dir)
    code = comparison.exit_code
    raise typer.Exit(0 if allow_inconclusive and comparison.verdict == "INCONCLUSIVE" else code)


def _list_runs(sources: list[str], reading: "ReadingOptions") -> None:
    """Print which run is whose. Raises RecipeError if arms or seeds cannot be told."""
    from abrun.report.run_list import list_runs

    table, problem = list_runs(sources, reading)
    console().print(table)
    if problem:
        raise RecipeError(problem)


def _upload(comparison: "Comparison", sources: list[str], runs_dir: Path) -> None:
    from abrun.logs.recorded.sources import find_stored_experiment
    from abrun.wandb_sync.report import upload_report

    experiment_dir = find_stored_experiment(sources, runs_dir)
    print(display_safe(upload_report(comparison.content, comparison.files, experiment_dir)))


def _judge_fleet(
    reading: "ReadingOptions",
    refused: Mapping[str, Any],  # values of options that do not apply to fleets
    options: Mapping[str, Any],  # those of fleets
    *,
    allow_open: bool,  # exit with 0 if a recipe is open, and nothing worse
    as_json: bool,
) -> NoReturn:
    """Judge a fleet, print it, and exit with its code. Raises RecipeError for a refused option."""
    from abrun.recipe.implementations import load_tool

    fleet = load_tool("fleet", "--fleet")
    names = ("--baseline", "--interim", "--versions-differ")
    refused = {**refused, **{name: reading.given_options.get(name) for name in names}}
    refuse_options(refused, "--fleet: got {option} as well; drop it")
    options = {**options, "reading": reading, "command": typed_command()}
    judged, page = fleet.compare_fleet(fleet.FleetOptions(**options))
    code = judged.exit_code
    if as_json:
        argv = ["abrun", *sys.argv[1:], "--rerun", "RERUNS"]
        step = {"text": fleet.RERUN_TEXT, "command": shlex.join(argv), "argv": argv}
        print_json({**asdict(judged), "next": [step] if code and not options["rerun"] else []})
    else:
        console().print(fleet.render_terminal(judged, page and str(page)))
    raise typer.Exit(0 if allow_open and code == fleet.OPEN else code)


# --- references ---

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
@reads_runs
def save(
    sources: arguments.Sources,
    output: Annotated[Path, typer.Option("--output", "-o", help="Reference file to write.")],
    arm: Annotated[str | None, typer.Option(help="Arm to save; default: the baseline.")] = None,
    claim: arguments.Claims = None,
    baseline: arguments.Baseline = None,
    budget: Budget = None,
    chain_alone: ChainOnly = False,
    *,
    reading: "ReadingOptions",
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
        refuse_options({"--chain-alone": chain_alone}, needed="--budget")
    reading = replace(reading, baseline=baseline, allows_one_arm=True)
    experiment = open_sources(sources, reading, parse_claims(claim))
    directory = find_stored_experiment(sources, reading.runs_dir)
    frozen = arm or experiment.baseline
    ledger = _ledger("--budget") if budget is not None else None
    new_ledger = ledger and ledger.ledger_maker(
        experiment, frozen, budget, chain_alone=chain_alone, experiment_dir=directory
    )
    replaced = freeze_arm(experiment, frozen, output, begin_ledger=new_ledger)
    text = f"{output}: {len(experiment.arm(frozen))} seeds of {frozen}"
    if not experiment.compare.claims:
        text += ", without a claim (--claim METRIC:WINDOW:MARGIN keeps one)"
    if budget is not None:
        text += f", with a ledger of changes (abrun reference show {output})"
    if replaced:
        text += f", in place of the reference {replaced.name}"
    text += "".join(f"; {sentence(reason)}" for reason in experiment.left_out)
    command = f"abrun compare NEW --reference {shlex.quote(str(output))}"
    reread = option_text(
        {"--pattern": [reading.pattern], "--alias": reading.aliases, "--step-column": [reading.step_column]}
    )
    console().say(f"{text}; compare later runs with: {command}{reread}")


ReferenceFile = Annotated[Path, typer.Argument(help="Reference, written by abrun reference save.")]


@references.command("show")
def show_reference(reference: ReferenceFile) -> None:
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
    experiment: arguments.Experiment,
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
    runs_dir: arguments.RunsDir = Path("runs"),
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


def _print_reference(reference: "FrozenReference") -> None:
    """Print a reference. Raises Exit with 3 if the drift is above its budget."""
    ledger = _ledger("reference show")
    console().print(ledger.render_reference(reference))
    raise typer.Exit(ledger.EXCEEDED if ledger.is_over_budget(reference) else 0)


def _ledger(needed_by: str) -> Any:
    """Return the tool of a reference's ledger."""
    from abrun.recipe.implementations import load_tool

    return load_tool("ledger", needed_by)


# --- power ---

PlannedRecipe = Annotated[
    Path | None,
    recipe_argument(
        "Recipe: a YAML file, a built-in recipe, or an experiment's folder; default: the recipe of the "
        "--from experiment."
    ),
]
Earlier = Annotated[
    list[str] | None,
    typer.Option(
        "--from",
        help="Earlier experiment that measured spread and GPU hours; others are priced beside the first.",
    ),
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
    overrides: arguments.Overrides = None,
    earlier: Earlier = None,
    sigma: Annotated[
        float | None, typer.Option(min=0, help="Standard deviation of one arm over seeds, for every claim.")
    ] = None,
    correlation: Annotated[
        float | None, typer.Option(min=-0.99, max=0.99, help="Correlation of arms that share a seed.")
    ] = None,
    max_seeds: PlannedSeeds = None,
    hours: RunHours = None,
    as_json: arguments.Json = False,
    runs_dir: arguments.RunsDir = Path("runs"),
) -> None:
    """Estimate the power, and the seeds that the margins need.

    Trains nothing: the spread over seeds is given, measured in an earlier experiment, or that of
    RUNS_DIR/noise.jsonl. With --from it prices windows, settings and interim analyses, and names the
    cheapest: a longer window needs fewer pairs once the curve is flat.

    Examples:
        abrun power quickstart
        abrun power quickstart --from pilot --from pilot-on-recorded-rollouts
        abrun power --from pilot --set compare.claims.0.margin=0.1
        abrun power quickstart --sigma 0.02 --correlation 0.8 --max-seeds 12
    """
    from abrun.experiment.noise import declare_noise
    from abrun.experiment.plan import make_draft
    from abrun.launch.derived_recipes import add_interim_analyses
    from abrun.logs.recorded.stored import load_experiment
    from abrun.recipe.experiment import load_recipe
    from abrun.report.planning import PowerPlan, pilot_differences_text
    from abrun.runs.experiment import find_experiment

    _check_assumptions(earlier, sigma, correlation)
    directories = [find_experiment(name, runs_dir) for name in earlier or ()]
    experiment_dir, *_ = directories or [None]
    measured = [load_experiment(directory) for directory in directories]
    planned = recipe or experiment_dir
    if planned is None:
        raise RecipeError("power: recipe missing; pass one, or --from EXPERIMENT to reuse its recipe")
    typed = f"{shlex.quote(str(planned))}{option_text({'--set': overrides or []})}"
    assumed_command = f"abrun power {typed} --sigma X"
    loaded = load_recipe(planned, overrides or [])
    loaded = declare_noise(loaded, experiment_dir.parent / "-" if experiment_dir else runs_dir / "-")
    if max_seeds is not None:
        loaded = add_interim_analyses(loaded, max_seeds)
    make_draft(loaded)  # raises the errors that a launch would raise
    for experiment in measured:
        _refuse_without_pairs(experiment, assumed_command)
    if measured and (differences := pilot_differences_text(loaded, measured[0])):
        print_error(differences)
    plan = PowerPlan(
        loaded.name,
        loaded.compare,
        len(loaded.seeds),
        earlier=measured[0] if measured else None,
        variants=measured[1:],
        assuming=assumed_command,
        sigma=sigma,
        correlation=correlation,
        seeds=loaded.seeds,
        num_treatments=len(loaded.arms) - 1,
        hours=hours,
    )
    if as_json:
        print_json(plan.as_json())
    else:
        console().print(plan.render())


def _check_assumptions(earlier: Sequence[str] | None, sigma: float | None, correlation: float | None) -> None:
    """Raise RecipeError for an assumed spread that is no number, or beside a measured one."""
    if earlier and (sigma is not None or correlation is not None):
        raise RecipeError(
            f"--from: got {earlier[0]!r} with --sigma or --correlation, which --from measures; drop them, or "
            "plan without --from: abrun power RECIPE --sigma X"
        )
    if sigma is not None and not math.isfinite(sigma):
        raise RecipeError(f"--sigma: got {sigma}; allowed: a finite number of 0 or more")


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


# --- injected faults ---

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
    screen = console()
    screen.print(fault_library_table(screen.width))
    screen.say(f"{fault_algorithms_text()} What shows a fault, settings and sources: abrun faults show NAME")


@faults.command("show")
def show_fault(
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


@faults.command("run")
@survive_output_errors
def run_faults(
    recipe: arguments.RecipeFile,
    overrides: arguments.Overrides = None,
    names: Annotated[
        str | None,
        typer.Option(
            "--faults", help="Comma-separated NAME or NAME:SIZE; default: all that the recipe can inject."
        ),
    ] = None,
    seeds: arguments.NewSeeds = None,
    launcher: arguments.Launcher = None,
    jobs: arguments.Jobs = None,
    runs_dir: arguments.RunsDir = Path("runs"),
    name: Annotated[
        str | None, typer.Option(help="Folder of the experiment; default: <recipe name>-sensitivity.")
    ] = None,
    resume: arguments.Resume = False,
    device_memory: arguments.DeviceMemory = None,
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
    from abrun.launch.derived_recipes import make_sensitivity_recipe
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
        raise RecipeError(f"{recipe.name}: controls.faults: no fault can be injected; see: abrun faults")
    table = sensitivity_table(result, paired=recipe.compare.paired)
    screen.print(table.to_rich(padding=(0, 1)))
    for fault, need in not_injected.items():
        screen.say(f"not injected: {fault}, which {need}")
    for line in (*advice_lines(result), caught_sentence(result, paired=recipe.compare.paired)):
        screen.say(line)
    report = experiment_dir / "report"
    path = write_sensitivity(result, not_injected, report, experiment_dir.name, recipe.compare)
    screen.say(f"Details: {path}, and as JSON next to it")
