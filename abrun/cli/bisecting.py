"""The command that bisects. Everything slow to import waits inside it."""

import json
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from abrun.cli.app import LOOK_CLOSER, app, console, outlives_output
from abrun.cli.arguments import DryRun, Name, Overrides, RecipeFile, RunsDir, with_seeds
from abrun.errors import RecipeError
from abrun.reasons import Code

if TYPE_CHECKING:
    from abrun.diagnose.bisect.candidates import Candidate
    from abrun.diagnose.bisect.command import Bisection
    from abrun.experiment.plan import Plan
    from abrun.present.terminal import Terminal
    from abrun.runs.layout import RunName

Refs = Annotated[
    str | None, typer.Option(help="Any git refs instead, by commas: the good one first, the bad one last.")
]
Setup = Annotated[
    str | None,
    typer.Option(
        help="A shell command that installs a candidate into its own virtual environment, run in its "
        "checkout: 'pip install -e .'. Without one, checkouts share the recipe's interpreter."
    ),
]
Versions = Annotated[
    str | None, typer.Option(help="Its versions, by commas: the good one first, the bad one last.")
]
MaxSeeds = Annotated[
    int | None, typer.Option(min=2, help="Pairs of a candidate before it stays undecided; default: twice.")
]
Alpha = Annotated[float, typer.Option(min=0.0001, max=0.2, help="How often a wrong candidate may be named.")]
Spare = Annotated[
    int, typer.Option(min=0, max=20, help="Tests beyond those that a search without undecided ones needs.")
]
Jobs = Annotated[int | None, typer.Option(min=1, help="Runs at once; default: what the devices allow.")]


@app.command(rich_help_panel=LOOK_CLOSER)
@outlives_output
def bisect(
    recipe: RecipeFile,
    good: Annotated[str | None, typer.Option(help="A git ref that keeps the claims.")] = None,
    bad: Annotated[str | None, typer.Option(help="A later one that does not.")] = None,
    refs: Refs = None,
    repo: Annotated[Path, typer.Option(help="The repository that the refs are of.")] = Path("."),
    package: Annotated[str | None, typer.Option(help="A package instead of git refs, such as torch.")] = None,
    versions: Versions = None,
    setup: Setup = None,
    seeds: Annotated[str | None, typer.Option(help="Instead of the recipe's: 0,1,2 or 0-4.")] = None,
    max_seeds: MaxSeeds = None,
    alpha: Alpha = 0.05,
    spare: Spare = 1,
    overrides: Overrides = None,
    jobs: Jobs = None,
    runs_dir: RunsDir = Path("runs"),
    name: Name = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep checkouts and environments at the end.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Find the commit, or the version of a package, that broke the claims of a recipe.

    The same command goes on after a stop. Exit code: 0 one candidate is named, 4 several are left or it is
    open, 5 nothing to bisect, 2 bad input, or good or bad cannot run; 130 after Ctrl-C.

    Examples:
        abrun bisect recipe.yaml --good v1.2 --bad main --setup 'pip install -e .'
        abrun bisect recipe.yaml --package torch --versions 2.11.0,2.12.0,2.13.0
    """
    from abrun.diagnose.bisect import report
    from abrun.diagnose.bisect.command import Bisection, bisect_recipe
    from abrun.diagnose.bisect.environments import environments_for
    from abrun.diagnose.bisect.search import Design, pair_counts

    named = [] if name is None else [f"name={json.dumps(name)}"]
    loaded = bisect_recipe(recipe, [*with_seeds(overrides, seeds), *named])
    candidates = _candidates(repo, good, bad, refs, package, versions)
    first = len(loaded.seeds)
    if max_seeds is not None and max_seeds < first:
        raise RecipeError(Code.MAX_SEEDS_BELOW_FIRST(got=max_seeds, first=first))
    design = Design(
        num_candidates=len(candidates) - 1,
        alpha=alpha,
        spare=spare,
        counts=pair_counts(first, max_seeds or 2 * first),
    )
    environments = environments_for(loaded, runs_dir, None if package else repo.resolve(), setup)
    directory = Path(os.path.realpath(runs_dir)) / (name or f"{loaded.name[:90]}-bisect")
    bisection = Bisection(loaded, candidates, environments, design, directory)
    if dry_run:
        console().print(report.planned(bisection))
        return
    raise typer.Exit(_searched(bisection, directory, jobs, keep))


def _searched(bisection: "Bisection", directory: Path, jobs: int | None, keep: bool) -> int:
    """Search in view, show what was found, and take away what is not kept; returns the exit code."""
    from abrun.diagnose.bisect import report
    from abrun.diagnose.bisect.command import FILE, EndpointError, StoppedError

    screen = console()
    try:
        outcome = bisection.run(_launcher(screen, directory, jobs), screen.say)
    except StoppedError as stopped:
        screen.say("Stopped. The same command goes on.")
        return stopped.exit_code
    except EndpointError:
        if not keep:
            bisection.clean_up()
        raise
    screen.print(report.shown(bisection, outcome))
    if not keep:
        bisection.clean_up()
    screen.say(f"All of it is in {directory / FILE}")
    return outcome.exit_code


def _launcher(
    screen: "Terminal", directory: Path, jobs: int | None
) -> "Callable[[Plan, Collection[RunName]], int]":
    """Makes runs of a plan on this machine, in view; its exit code is that of a signal, or 0."""
    from abrun.experiment.options import LaunchOptions
    from abrun.launch.cluster import find_cluster_jobs
    from abrun.launch.engine import make_engine
    from abrun.launch.supervisor import run_plan
    from abrun.runs.experiment import is_experiment
    from abrun.watch import View

    def make(plan: "Plan", only: "Collection[RunName]") -> int:
        options = LaunchOptions(
            runs_dir=directory.parent, name=directory.name, jobs=jobs, resume=is_experiment(directory)
        )
        with View(screen, find_cluster_jobs) as view:
            outcome = run_plan(plan, options, engine=make_engine("local", jobs), observer=view, only=only)
        return outcome.exit_code if outcome.stopped_by else 0

    return make


def _candidates(
    repo: Path, good: str | None, bad: str | None, refs: str | None, package: str | None, versions: str | None
) -> "list[Candidate]":
    from abrun.diagnose.bisect import candidates

    given = {"--good": good, "--bad": bad, "--refs": refs, "--package": package, "--versions": versions}
    said = [option for option, value in given.items() if value is not None]
    if said == ["--good", "--bad"] and good is not None and bad is not None:
        return candidates.commits(repo, good, bad)
    if said == ["--refs"] and refs is not None:
        return candidates.refs(repo, [ref.strip() for ref in refs.split(",")])
    if said == ["--package", "--versions"] and package is not None and versions is not None:
        return candidates.versions(package, [each.strip() for each in versions.split(",")])
    raise RecipeError(
        f"abrun bisect: got {', '.join(said) or 'no candidates'}; allowed: --good REF --bad REF, "
        "--refs REF,REF,..., or --package NAME --versions A,B,..."
    )
