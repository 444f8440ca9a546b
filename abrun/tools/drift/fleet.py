"""`abrun compare --fleet`: judge every recipe, decide over all of them, and show it as text and page."""

import html
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from abrun.errors import ComparisonError, StoreError
from abrun.messages.numbers import counted
from abrun.report.page import render_static_page
from abrun.report.present.tables import Table, columns
from abrun.runs.files import PUBLIC_MODE, is_file, read_json, share_new_folder, write_file, write_json
from abrun.runs.redaction import display_safe, hide_secrets_of
from abrun.stats.equivalence import ALPHA
from abrun.tools.drift.evidence import (
    FLEET_FILE,
    FleetOptions,
    RecipeEvidence,
    find_recipes,
    gather_evidence,
)
from abrun.tools.drift.statuses import (
    EXIT_CODES,
    STATUSES,
    Fleet,
    FleetRow,
    RedRecipes,
    Status,
    classify,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["EXIT_CODES", "FleetOptions", "compare_fleet", "fleet_as_json", "render_terminal"]

FLEET_PAGE = "fleet.html"
_SCHEMA_VERSION = 1
_MIN_RECIPES_FOR_PROCESSES = 8  # a further process takes a second to start
_MAX_NAMES = 5  # recipes named in the summary
# Color on a terminal, class of page.css, and what one recipe and several are said to be
_LOOKS: dict[Status, tuple[str, str, str, str]] = {
    "red before": ("blue", "plain", "was red before", "were red before"),
    "flaked": ("cyan", "plain", "flaked", "flaked"),
    "open": ("yellow", "open", "is open", "are open"),
    "not judged": ("magenta", "open", "could not be judged", "could not be judged"),
    "green": ("green", "good", "is green", "are green"),
    "regressed here": ("red", "bad", "regressed here", "regressed here"),
}
_TONES = {0: "MATCH", 3: "MISMATCH", 4: "INCONCLUSIVE", 5: "INVALID"}  # classes of page.css by exit code


def compare_fleet(options: FleetOptions) -> tuple[Fleet, Path | None]:
    """Judge every recipe of a folder; write the report into the folder `output`, if given, and name its page.

    Raises ComparisonError if no recipe can be judged.
    """
    red_before = frozenset() if options.earlier is None else read_earlier(options.earlier)
    recipes = find_recipes(options)
    if options.output is not None and os.path.realpath(options.output) == os.path.realpath(options.folder):
        raise ComparisonError(
            f"--output: {options.output} holds the runs of the fleet; choose another folder"
        )
    evidence = _gather_all(recipes, options)
    if all(recipe.judgement is None for recipe in evidence):
        raise ComparisonError(
            f"--fleet: none of the {counted(evidence, 'recipe')} in {options.folder} can be judged; the "
            f"first is {evidence[0].name}: {evidence[0].problem}"
        )
    fleet = classify(evidence, red_before)
    return fleet, options.output and _write_report(options.output, fleet, options.command)


def _gather_all(recipes: Sequence[str], options: FleetOptions) -> list[RecipeEvidence]:
    """Judge the recipes, in a process for each processor if there are many."""
    gather = partial(gather_evidence, options=options)
    num_processes = min(os.cpu_count() or 1, len(recipes) // _MIN_RECIPES_FOR_PROCESSES)
    if num_processes < 2:
        return list(map(gather, recipes))
    try:
        with ProcessPoolExecutor(num_processes, get_context("spawn"), _start_worker) as pool:
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


def _write_report(output: Path, fleet: Fleet, command: str) -> Path:
    """Write page and JSON, and return the page."""
    page = output / FLEET_PAGE
    try:
        output.mkdir(parents=True, exist_ok=True)
        share_new_folder(output)
        write_file(page, _render_page(fleet, command).encode(), mode=PUBLIC_MODE)
        write_json(output / FLEET_FILE, fleet_as_json(fleet, command), mode=PUBLIC_MODE)
    except (OSError, StoreError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        problem = getattr(cause, "strerror", None) or str(cause)
        raise ComparisonError(
            f"--output: {output} cannot be written: {problem}; choose another folder"
        ) from None
    return page


def fleet_as_json(fleet: Fleet, command: str) -> dict[str, Any]:
    """Return the content of `fleet.json`."""
    rows = [{**asdict(row), "report": row.report and row.report.as_posix()} for row in fleet.rows]
    return {
        "schema_version": _SCHEMA_VERSION,
        "command": command,
        "summary": summarize(fleet),
        "exit_code": fleet.exit_code,
        "false_discovery_rate": ALPHA,
        "num_tested": fleet.num_tested,
        "failure_rate": fleet.failure_rate,
        "counts": {status: fleet.counts[status] for status in STATUSES},
        "recipes": rows,
    }


def read_earlier(path: Path) -> RedRecipes:
    """Return the recipes that an earlier fleet showed to be red. Raises ComparisonError for another file."""
    path = path if is_file(path) else path / FLEET_FILE
    problem = f"not a fleet.json of schema_version {_SCHEMA_VERSION}"
    try:
        content = read_json(path) if is_file(path) else None
        if content is None:
            problem = "no such file"
        elif content.get("schema_version") == _SCHEMA_VERSION and "recipes" in content:
            return red_recipes(content["recipes"])
    except StoreError as error:
        problem = str(error)
    except (KeyError, TypeError, ValueError, AttributeError):
        problem = "a row is damaged"
    raise ComparisonError(
        f"--before: {path}: {problem}; give the --output folder of an earlier abrun compare --fleet"
    )


def red_recipes(rows: Iterable[Mapping[str, Any]]) -> RedRecipes:
    """Return the recipes that the rows of a `fleet.json` show to be red at its false discovery rate."""
    red = set()
    for row in rows:
        if row["status"] not in STATUSES or type(row["is_red"]) is not bool:
            raise ValueError(row["status"])
        is_discovery = row["is_red"] and row["adjusted_p"] is not None and row["adjusted_p"] <= ALPHA
        if is_discovery or row["status"] == "red before":
            red.add((str(row["name"]), row["reference_sha256"]))
    return red


# --- a fleet on the terminal and as a page ---


def summarize(fleet: Fleet) -> str:
    """Return the fleet in one sentence: how many recipes regressed here, and where all others stand."""
    names = [row.name for row in fleet.rows if row.status == "regressed here"]
    head = f"{len(names)} of {len(fleet.rows)} recipes" if names else "no recipe"
    others = [
        f"{num} {one if num == 1 else several}"
        for status, (*_, one, several) in _LOOKS.items()
        if status != "regressed here" and ((num := fleet.counts[status]) or status == "green")
    ]
    text = f"{head} regressed here; {', '.join(others)}"
    num_more = len(names) - _MAX_NAMES
    named = ", ".join(names[:_MAX_NAMES] + [f"{num_more} more"] * (num_more > 0))
    return f"{text}. Look at {named}" if names else text


def _rule_text(fleet: Fleet) -> str:
    return (
        f"p: of the recipe alone. FDR: smallest false discovery rate at which it is red, over "
        f"{fleet.num_tested} recipes that were not red before (Benjamini-Hochberg); red at {ALPHA:g}. "
        f"Runs that fail by accident, estimated from this fleet: {100 * fleet.failure_rate:.2g} %."
    )


def _numbers(row: FleetRow) -> list[str]:
    """Return the cells of runs, p and FDR."""
    runs = f"{row.num_runs}+{row.num_rerun}" if row.num_rerun else str(row.num_runs)
    p_values = ["-" if value is None else f"{value:.2g}" for value in (row.p_value, row.adjusted_p)]
    return [runs if row.verdict else "-", *p_values]


def render_terminal(fleet: Fleet, page: str | None) -> "RenderableType":
    """Return the summary, a table of the recipes that are not green, and where the page is."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    color = _LOOKS[fleet.rows[0].status][0]
    title = Text(f"Fleet of {len(fleet.rows)} recipes", style=f"bold {color}")
    summary = Text(display_safe(summarize(fleet)))
    parts: list[RenderableType] = [Panel(summary, title=title, title_align="left", border_style=color)]
    cells = [
        [row.name, Text(row.status, style=_LOOKS[row.status][0]), *_numbers(row), row.reason]
        for row in fleet.rows
        if row.status != "green"
    ]
    titles = ("recipe", "status", "runs", "p", "FDR", "why")
    table = Table(columns(*titles, no_wrap=("status", "runs", "p", "FDR"), fold=True), cells)
    parts += [table.to_rich(padding=(0, 1))] if cells else []
    parts.append(Text(display_safe(_rule_text(fleet)), style="dim"))
    parts += [Text.assemble(("report  ", "bold"), page)] if page else []
    return Group(*parts)


def _render_page(fleet: Fleet, command: str) -> str:
    """Return the HTML page: summary, counts and a row for each recipe, with a link to its report."""
    title, summary = f"Fleet of {len(fleet.rows)} recipes", summarize(fleet)
    counts = [(status, fleet.counts[status]) for status in STATUSES if fleet.counts[status]]
    facts = "".join(f"<div><dt>{status}</dt><dd>{count}</dd></div>" for status, count in counts)
    head = "".join(f"<th>{name}</th>" for name in ("recipe", "status", "why", "runs", "p", "FDR"))
    rows = "\n".join(map(_page_row, fleet.rows))
    body = (
        f'<div class="banner {_TONES[fleet.exit_code]}"><h1>{title}</h1>\n'
        f'<p class="finding">{_escape(summary)}</p>\n<dl class="facts">{facts}</dl></div>\n'
        f'<section><h2>Recipes</h2><p class="intro">{_escape(_rule_text(fleet))}</p>\n'
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>\n'
        f'<p class="caption">made by <code>{_escape(command)}</code></p></section>'
    )
    return render_static_page(f"{title}: {summary}", body)


def _page_row(row: FleetRow) -> str:
    name = _escape(row.name)
    if row.report:
        name = f'<a href="{html.escape(quote(row.report.as_posix()))}">{name}</a>'
    chip = f'<span class="chip {_LOOKS[row.status][1]}">{row.status}</span>'
    cells = [name, chip, *map(_escape, (row.reason, *_numbers(row)))]
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _escape(text: str) -> str:
    return html.escape(display_safe(text))
