"""`abrun compare --fleet`: judge every recipe, decide over all of them, and write the page."""

import os
import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from abrun.diagnose.fleet.classify import Fleet, classify
from abrun.diagnose.fleet.evidence import RecipeEvidence, gather_evidence
from abrun.diagnose.fleet.recipes import FLEET_FILE, FleetOptions, FleetRecipe, find_recipes
from abrun.diagnose.fleet.report import render_page, summarize
from abrun.diagnose.fleet.results_file import fleet_json, read_earlier
from abrun.errors import ComparisonError, StoreError
from abrun.reasons import Code
from abrun.redaction import hide_secrets_of
from abrun.runs.access import PUBLIC_MODE, share_new_folder
from abrun.runs.files import write_file, write_json

FLEET_PAGE = "fleet.html"
_MIN_RECIPES_FOR_PROCESSES = 8  # a further process takes a second to start


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetComparison:
    """A judged fleet and the page of its report, if one was written."""

    fleet: Fleet
    content: dict[str, Any]  # of fleet.json
    page: Path | None


def compare_fleet(options: FleetOptions) -> FleetComparison:
    """Judge every recipe of a folder, and write the report into the folder `output`, if given.

    Raises ComparisonError if no recipe can be judged.
    """
    earlier = None if options.earlier is None else read_earlier(options.earlier)
    recipes = find_recipes(options)
    if options.output is not None and os.path.realpath(options.output) == os.path.realpath(options.folder):
        raise ComparisonError(Code.FLEET_OUTPUT_HOLDS_RUNS(folder=options.output))
    evidence = _gather_all(recipes, options)
    if all(recipe.judgement is None for recipe in evidence):
        problem = evidence[0].problem
        raise ComparisonError(
            Code.FLEET_NOT_JUDGED(
                num=len(evidence), folder=options.folder, recipe=evidence[0].name, problem=problem
            )
        )
    fleet = classify(evidence, earlier)
    content = fleet_json(fleet, summarize(fleet), options.command)
    page = None if options.output is None else _write_report(options.output, fleet, content, options.command)
    return FleetComparison(fleet=fleet, content=content, page=page)


def _gather_all(recipes: Sequence[FleetRecipe], options: FleetOptions) -> list[RecipeEvidence]:
    """Judge the recipes, in a process for each processor if there are many."""
    gather = partial(gather_evidence, options=options)
    num_processes = min(os.cpu_count() or 1, len(recipes) // _MIN_RECIPES_FOR_PROCESSES)
    if num_processes < 2:
        return list(map(gather, recipes))
    context = get_context("spawn")
    try:
        with ProcessPoolExecutor(num_processes, context, _start_worker) as pool:
            return list(pool.map(gather, recipes, chunksize=4))
    except BrokenProcessPool:
        raise ComparisonError(Code.FLEET_PROCESS_DIED(num=num_processes)) from None


def _start_worker() -> None:
    """Hide secrets in a process of the pool, as the command line does, and leave Ctrl-C to the parent."""
    hide_secrets_of(os.environ)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _write_report(output: Path, fleet: Fleet, content: dict[str, Any], command: str) -> Path:
    """Write page and JSON, and return the page."""
    page = output / FLEET_PAGE
    try:
        output.mkdir(parents=True, exist_ok=True)
        share_new_folder(output)
        write_file(page, render_page(fleet, command).encode(), mode=PUBLIC_MODE)
        write_json(output / FLEET_FILE, content, mode=PUBLIC_MODE)
    except (OSError, StoreError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        problem = getattr(cause, "strerror", None) or str(cause)
        raise ComparisonError(Code.OUTPUT_UNWRITABLE(folder=output, problem=problem)) from None
    return page
