"""The bisect command. Slow imports happen inside it."""

import json
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from abrun.cli.app import console, make_group, survive_output_errors
from abrun.cli.arguments import DryRun, Jobs, NewSeeds, Overrides, RecipeFile, RunsDir, add_seeds
from abrun.errors import RecipeError

if TYPE_CHECKING:
    from abrun.experiment.plan import ExperimentPlan
    from abrun.report.present.terminal import Terminal
    from abrun.runs.layout import RunName
    from abrun.tools.bisect.candidates import Candidate
    from abrun.tools.bisect.command import Bisection

Refs = Annotated[
    str | None,
    typer.Option(help="Instead of --good and --bad: comma-separated git refs to test, from good to bad."),
]
Setup = Annotated[
    str | None,
    typer.Option(
        help="Shell command that installs a candidate into its own virtual environment, run in its checkout: "
        "'pip install -e .'. Default: checkouts share the recipe's interpreter."
    ),
]
Versions = Annotated[
    str | None, typer.Option(help="Comma-separated versions of --package, from good to bad.")
]
MaxSeeds = Annotated[
    int | None, typer.Option(min=2, help="Maximum pairs per candidate; default: twice the recipe's seeds.")
]
Alpha = Annotated[
    float, typer.Option(min=0.0001, max=0.2, help="Maximum probability of naming a wrong candidate.")
]
Spare = Annotated[int, typer.Option(min=0, max=20, help="Extra tests allowed for inconclusive candidates.")]


commands = make_group()


@commands.command(rich_help_panel="Diagnostics")
@survive_output_errors
def bisect(
    recipe: RecipeFile,
    good: Annotated[str | None, typer.Option(help="Git ref at which the claims hold.")] = None,
    bad: Annotated[str | None, typer.Option(help="Later git ref at which they do not hold.")] = None,
    refs: Refs = None,
    repo: Annotated[Path, typer.Option(help="Git repository of the refs.")] = Path("."),
    package: Annotated[
        str | None, typer.Option(help="Package to bisect instead of git refs, such as torch.")
    ] = None,
    versions: Versions = None,
    setup: Setup = None,
    seeds: NewSeeds = None,
    max_seeds: MaxSeeds = None,
    alpha: Alpha = 0.05,
    spare: Spare = 1,
    overrides: Overrides = None,
    jobs: Jobs = None,
    runs_dir: RunsDir = Path("runs"),
    name: Annotated[
        str | None, typer.Option(help="Folder of the experiment; default: the recipe's name with -bisect.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep checkouts and environments.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Find the commit or package version that broke a claim.

    Re-run the same command to resume. Exit code: 0 if one candidate is found, 4 if several remain or the
    result is inconclusive, 5 if there is nothing to bisect, 2 for bad input or if the good or the bad
    candidate cannot run, 130 after Ctrl-C.

    Examples:
        abrun bisect recipe.yaml --good v1.2 --bad main --setup 'pip install -e .'
        abrun bisect recipe.yaml --package torch --versions 2.11.0,2.12.0,2.13.0
    """
    from abrun.tools.bisect import report
    from abrun.tools.bisect.command import Bisection, bisect_recipe
    from abrun.tools.bisect.environments import environments_for
    from abrun.tools.bisect.search import Design, pair_counts

    name_overrides = [] if name is None else [f"name={json.dumps(name)}"]
    loaded = bisect_recipe(recipe, [*add_seeds(overrides, seeds), *name_overrides])
    candidates = _find_candidates(repo, good, bad, refs, package, versions)
    num_seeds = len(loaded.seeds)
    if max_seeds is not None and max_seeds < num_seeds:
        raise RecipeError(
            f"--max-seeds: got {max_seeds} with {num_seeds} seeds; allowed: {num_seeds} or more"
        )
    design = Design(
        num_candidates=len(candidates) - 1,
        alpha=alpha,
        spare=spare,
        counts=pair_counts(num_seeds, max_seeds or 2 * num_seeds),
    )
    environments = environments_for(loaded, runs_dir, None if package else repo.resolve(), setup)
    directory = Path(os.path.realpath(runs_dir)) / (name or f"{loaded.name[:90]}-bisect")
    bisection = Bisection(loaded, candidates, environments, design, directory)
    if dry_run:
        console().print(report.render_plan(bisection))
        return
    raise typer.Exit(_search(bisection, directory, jobs, keep))


def _search(bisection: "Bisection", directory: Path, jobs: int | None, keep: bool) -> int:
    """Search with live progress, print the result, clean up unless `keep`, and return the exit code."""
    from abrun.tools.bisect import report
    from abrun.tools.bisect.command import FILE, EndpointError, StoppedError

    screen = console()
    try:
        outcome = bisection.run(_make_launch_function(screen, directory, jobs), screen.say)
    except StoppedError as stopped:
        screen.say("Stopped. Re-run the same command to resume.")
        return stopped.exit_code
    except EndpointError:
        if not keep:
            bisection.clean_up()
        raise
    screen.print(report.render_outcome(bisection, outcome))
    if not keep:
        bisection.clean_up()
    screen.say(f"Details: {directory / FILE}")
    return outcome.exit_code


def _make_launch_function(
    screen: "Terminal", directory: Path, jobs: int | None
) -> "Callable[[ExperimentPlan, Collection[RunName]], int]":
    """Return a function that runs a plan on this machine; it returns 0, or a signal's exit code."""
    from abrun.experiment.options import LaunchOptions
    from abrun.launch.cluster import find_cluster_jobs
    from abrun.launch.engine import make_engine
    from abrun.launch.supervisor import run_plan
    from abrun.runs.experiment import is_experiment
    from abrun.watch import View

    def make(plan: "ExperimentPlan", only: "Collection[RunName]") -> int:
        options = LaunchOptions(
            runs_dir=directory.parent, name=directory.name, jobs=jobs, resume=is_experiment(directory)
        )
        with View(screen, find_cluster_jobs) as view:
            outcome = run_plan(plan, options, engine=make_engine("local", jobs), observer=view, only=only)
        return outcome.exit_code if outcome.stopped_by else 0

    return make


def _find_candidates(
    repo: Path, good: str | None, bad: str | None, refs: str | None, package: str | None, versions: str | None
) -> "list[Candidate]":
    from abrun.tools.bisect import candidates

    values = {"--good": good, "--bad": bad, "--refs": refs, "--package": package, "--versions": versions}
    options = [option for option, value in values.items() if value is not None]
    if options == ["--good", "--bad"] and good is not None and bad is not None:
        return candidates.commits(repo, good, bad)
    if options == ["--refs"] and refs is not None:
        return candidates.refs(repo, [ref.strip() for ref in refs.split(",")])
    if options == ["--package", "--versions"] and package is not None and versions is not None:
        return candidates.versions(package, [version.strip() for version in versions.split(",")])
    raise RecipeError(
        f"abrun bisect: got {', '.join(options) or 'no candidates'}; allowed: --good REF --bad REF, "
        "--refs REF,REF,..., or --package NAME --versions A,B,..."
    )
