"""`abrun compare --fleet`: judge every recipe, decide over all of them, and write the page."""

import os
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from abrun.errors import ComparisonError, StoreError
from abrun.messages import sentence
from abrun.messages.numbers import counted
from abrun.runs.files import PUBLIC_MODE, is_file, read_json, share_new_folder, write_file, write_json
from abrun.runs.redaction import hide_secrets_of
from abrun.stats.equivalence import ALPHA
from abrun.tools.drift.fleet.classify import STATUSES, EarlierRow, Fleet, classify
from abrun.tools.drift.fleet.evidence import RecipeEvidence, gather_evidence
from abrun.tools.drift.fleet.recipes import FLEET_FILE, FleetOptions, FleetRecipe, find_recipes
from abrun.tools.drift.fleet.report import render_page, summarize

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
        raise ComparisonError(
            f"--output: {options.output} holds the runs of the fleet; choose another folder"
        )
    evidence = _gather_all(recipes, options)
    if all(recipe.judgement is None for recipe in evidence):
        problem = evidence[0].problem
        raise ComparisonError(
            f"--fleet: none of the {counted(len(evidence), 'recipe')} in {options.folder} can be judged; the "
            f"first is {evidence[0].name}: {problem}"
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
        raise ComparisonError(
            f"--fleet: one of {num_processes} processes was killed, perhaps for lack of memory; judge fewer "
            "recipes at a time"
        ) from None


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
        raise ComparisonError(
            f"--output: {output} cannot be written: {problem}; choose another folder"
        ) from None
    return page


_SCHEMA_VERSION = 1


def fleet_json(fleet: Fleet, summary: str, command: str) -> dict[str, Any]:
    return {
        "schema_version": _SCHEMA_VERSION,
        "command": command,
        "summary": summary,
        "exit_code": fleet.exit_code,
        "false_discovery_rate": ALPHA,
        "num_tested": fleet.num_tested,
        "failure_rate": fleet.failure_rate,
        "counts": {status: fleet.counts[status] for status in STATUSES},
        "recipes": [
            {
                **asdict(row),
                "reason": sentence(row.reason),
                "reason_code": row.reason.code,
                "report": row.report and row.report.as_posix(),
            }
            for row in fleet.rows
        ],
    }


def read_earlier(path: Path) -> dict[str, EarlierRow]:
    """Return the rows of an earlier fleet by recipe. Raises ComparisonError for any other file."""
    path = path if is_file(path) else path / FLEET_FILE
    if not is_file(path):
        raise ComparisonError(
            f"--before: {path}: no such file; give the --output folder of an earlier abrun compare --fleet"
        )
    try:
        content = read_json(path)
        version = content.get("schema_version")
        if version != _SCHEMA_VERSION or "recipes" not in content:
            problem = f"not a fleet.json of schema_version {_SCHEMA_VERSION}"
            raise ComparisonError(
                f"--before: {path}: {problem}; give the --output folder of an earlier abrun compare --fleet"
            )
        return parse_rows(content["recipes"])
    except (StoreError, KeyError, TypeError, ValueError, AttributeError) as error:
        problem = str(error) if isinstance(error, StoreError) else "a row is damaged"
        raise ComparisonError(
            f"--before: {path}: {problem}; give the --output folder of an earlier abrun compare --fleet"
        ) from None


def parse_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, EarlierRow]:
    """Return the rows of `fleet.json` by recipe. Raises an error for a damaged row."""
    return {str(row["name"]): _parse_row(row) for row in rows}


def _parse_row(row: Mapping[str, Any]) -> EarlierRow:
    status, is_red, sha256 = row["status"], row["is_red"], row["reference_sha256"]
    if status not in STATUSES or type(is_red) is not bool:
        raise ValueError(status)
    is_discovery = is_red and row["adjusted_p"] is not None and row["adjusted_p"] <= ALPHA
    return EarlierRow(status=status, is_red=is_discovery or status == "red before", reference_sha256=sha256)
