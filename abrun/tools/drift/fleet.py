"""`abrun compare --fleet`: the status of every recipe, decided over all of them, as text and as a page.

The false discovery rate is that of the recipes that were not red before.
"""

import html
import math
import os
import signal
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple
from urllib.parse import quote

from scipy import special

from abrun.errors import ComparisonError, StoreError
from abrun.messages.numbers import counted, listed, plural
from abrun.report.page import render_static_page
from abrun.report.present.tables import Table, columns
from abrun.runs.files import PUBLIC_MODE, is_file, read_json, share_new_folder, write_file, write_json
from abrun.runs.redaction import display_safe, hide_secrets_of
from abrun.runs.schemas import checked
from abrun.stats.equivalence import ALPHA
from abrun.stats.many_tests import VariancePrior, benjamini_hochberg, fit_prior, p_of_failures
from abrun.tools.drift.evidence import (
    FLEET_FILE,
    ClaimEvidence,
    Design,
    FleetOptions,
    Judgement,
    RecipeEvidence,
    find_recipes,
    gather_evidence,
)
from abrun.verdict.decide import FAILING, PASSING

if TYPE_CHECKING:
    from rich.console import RenderableType

Status = Literal["regressed here", "not judged", "open", "flaked", "red before", "green"]


class _Look(NamedTuple):
    """Exit code of a status, its color on a terminal, and what one recipe and several are said to be."""

    exit_code: int
    color: str
    page_class: str  # of page.css
    one: str
    several: str


# Most urgent first: the order of the rows
_LOOKS: dict[Status, _Look] = {
    "regressed here": _Look(3, "red", "bad", "regressed here", "regressed here"),
    "not judged": _Look(5, "magenta", "open", "could not be judged", "could not be judged"),
    "open": _Look(4, "yellow", "open", "is open", "are open"),
    "flaked": _Look(0, "cyan", "plain", "flaked", "flaked"),
    "red before": _Look(0, "blue", "plain", "was red before", "were red before"),
    "green": _Look(0, "green", "good", "is green", "are green"),
}
STATUSES: tuple[Status, ...] = tuple(_LOOKS)
OPEN = _LOOKS["open"].exit_code
RERUN_TEXT = "run the recipes that are not green again, in folders of their names, and judge both runs"
# Shares of a recipe's level: tests of its claims and guards, and the number of its failed runs
_TESTS_SHARE, _FAILURES_SHARE = 0.8, 0.2
# Weight of the prior guess that runs rarely fail by accident: half an accident in as many runs
_PRIOR_RUNS = 20
RedRecipes = Set[tuple[str, str | None]]  # name and hash of the reference
FLEET_PAGE = "fleet.html"
_SCHEMA_VERSION = 1
_MIN_RECIPES_FOR_PROCESSES = 8  # a further process takes a second to start
_MAX_NAMES = 5  # recipes named in the summary
_TONES = {0: "MATCH", 3: "MISMATCH", 4: "INCONCLUSIVE", 5: "INVALID"}  # classes of page.css by exit code
_PAGE_COLUMNS = ("recipe", "status", "why", "runs", "p", "FDR")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRow:
    """One recipe: its status and why."""

    name: str
    status: Status
    reason: str
    verdict: str | None  # of the recipe alone; None: not judged
    is_red: bool  # by itself, and not gone on a rerun
    p_value: float | None  # of the recipe alone; None: nothing was tested
    adjusted_p: float | None  # smallest false discovery rate at which it is red; None: not in the family
    num_runs: int
    num_rerun: int
    rerun_verdict: str | None
    reference_sha256: str | None
    report: str | None  # page of the recipe's own report, relative to the fleet's


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All recipes, most urgent first: the content of `fleet.json`."""

    schema_version: int = _SCHEMA_VERSION
    command: str
    summary: str
    exit_code: int  # of the most urgent status that has one; 0 if nothing regressed here or is undecided
    false_discovery_rate: float = ALPHA
    num_tested: int  # recipes in the family of the false discovery rate
    failure_rate: float  # estimated probability that a run fails by accident
    counts: dict[Status, int]
    recipes: list[FleetRow]


@dataclass(frozen=True, slots=True)
class _Chance:
    """Causes of red recipes that are chance: the noise of claims, and runs that fail by accident."""

    # Distributions of the variances, by metric and design; None for few recipes
    priors: Mapping[tuple[str, Design | None], VariancePrior | None]
    failure_rate: float

    def _error(self, claim: ClaimEvidence) -> tuple[float, float]:
        """Return the standard error of the difference and its degrees of freedom; 0 if it is unknown."""
        if claim.variance is None:
            return 0.0, 0.0
        prior = self.priors.get((claim.metric, claim.design))
        variance, dof = prior.moderate(claim.variance, claim.dof) if prior else (claim.variance, claim.dof)
        return (variance * claim.variance_factor) ** 0.5, dof

    def p_beyond(self, claim: ClaimEvidence) -> float | None:
        """Return the p-value of a difference (`not_worse`: a loss) beyond the margin; None: no test."""
        error, dof = self._error(claim)
        if not error:
            return claim.p_alone
        ends = (1, -1) if claim.kind == "within" else (1,)
        return sum(float(special.stdtr(dof, (end - claim.distance) / error)) for end in ends)

    def p_within(self, claim: ClaimEvidence) -> float:
        """Return the p-value of the claim itself; 1 if the noise is unknown."""
        error, dof = self._error(claim)
        return float(special.stdtr(dof, (claim.distance - 1) / error)) if error else 1.0

    def p_of_tests(self, judgement: Judgement) -> float | None:
        """Return the level at which a test of claims or guards is red (Bonferroni over the claims)."""
        p_values = [(claim.share, self.p_beyond(claim)) for claim in judgement.claims]
        tested = [(share, p_value) for share, p_value in p_values if p_value is not None]
        levels = [p_value * len(tested) / share for share, p_value in tested]
        levels += [] if judgement.p_guards is None else [judgement.p_guards]
        return min([1.0, *filter(math.isfinite, levels)]) if levels else None

    def p_of(self, recipe: RecipeEvidence) -> float | None:
        """Return the p-value of a recipe before the correction for many recipes; None if nothing was tested.

        Bonferroni over two parts: the tests of its claims and guards, and the number of its failed runs,
        which accidents explain at the fleet's rate.
        """
        judgement = recipe.judgement
        if judgement is None:
            return None
        if judgement.breaks_exact_rule:
            return 0.0
        p_of_tests = self.p_of_tests(judgement)
        parts = [] if p_of_tests is None else [p_of_tests / _TESTS_SHARE]
        if judgement.failed_seeds:
            num_failed, num_runs = len(judgement.failed_seeds), judgement.num_runs
            if recipe.rerun:
                num_failed += len(recipe.rerun.failed_seeds)
                num_runs += recipe.num_rerun
            parts.append(p_of_failures(num_failed, num_runs, self.failure_rate) / _FAILURES_SHARE)
        return min(1.0, *parts) if parts else None

    def is_red(self, judgement: Judgement) -> bool:
        p_value = self.p_of_tests(judgement)
        is_beyond = p_value is not None and p_value <= ALPHA
        return judgement.verdict in FAILING or bool(judgement.failed_seeds) or is_beyond

    def passes(self, judgement: Judgement) -> bool:
        """Return True if the recipe matches, or its single run is within the margins by the fleet's noise."""
        if judgement.verdict != "INCONCLUSIVE":
            return judgement.verdict in PASSING
        return (
            judgement.num_runs == 1
            and not judgement.is_open_apart_from_claims
            and all(self.p_within(claim) <= ALPHA for claim in judgement.claims)
        )

    def cause(self, judgement: Judgement) -> str:
        """Return why a recipe is red or open."""
        if judgement.verdict in FAILING or judgement.failed_seeds or not judgement.claims:
            return judgement.reason
        claim = min(judgement.claims, key=lambda claim: self.p_beyond(claim) or 1.0)
        difference, margin = claim.difference, claim.margin
        is_told_by_fleet = self.is_red(judgement) or judgement.num_runs == 1
        if difference is None or margin is None or not is_told_by_fleet:
            return judgement.reason
        return (
            f"{claim.metric}: {counted(judgement.num_runs, 'run')}, {difference * margin:+.3g} from the "
            f"reference, margin {margin:.3g}; p = {self.p_beyond(claim):.2g} if the margin held, by the "
            "noise of this fleet's recipes"
        )


def classify(
    evidence: Sequence[RecipeEvidence], red_before: RedRecipes = frozenset(), command: str = ""
) -> Fleet:
    """Decide the status of every recipe.

    A recipe is red at a false discovery rate of 5 % (Benjamini-Hochberg) over all recipes that were not red
    before. Recipes that an earlier fleet showed to be red against the same reference leave that family first:
    they would otherwise loosen the bound for the others. A red recipe with a rerun needs the rerun to be red
    as well, and a recipe with a single run needs a rerun.
    """
    chance = _Chance(_fit_priors(evidence), estimate_failure_rate(evidence))
    p_values = {
        recipe.name: chance.p_of(recipe)
        for recipe in evidence
        if (recipe.name, recipe.reference_sha256) not in red_before
        and not (recipe.judgement and recipe.judgement.reference_problem)
    }
    tested = {name: p_value for name, p_value in p_values.items() if p_value is not None}
    adjusted = dict(zip(tested, benjamini_hochberg(list(tested.values())), strict=True))
    rows = [_make_row(recipe, red_before, chance, adjusted.get(recipe.name)) for recipe in evidence]
    rows.sort(key=lambda row: (STATUSES.index(row.status), row.name))
    counts: dict[Status, int] = {status: sum(row.status == status for row in rows) for status in STATUSES}
    return Fleet(
        command=command,
        summary=_summarize(rows, counts),
        exit_code=next((look.exit_code for status, look in _LOOKS.items() if counts[status]), 0),
        num_tested=len(tested),
        failure_rate=chance.failure_rate,
        counts=counts,
        recipes=rows,
    )


def _fit_priors(
    evidence: Sequence[RecipeEvidence],
) -> dict[tuple[str, Design | None], VariancePrior | None]:
    """Fit the distribution of the variances of each metric and design."""
    variances, dofs = defaultdict(list), defaultdict(list)
    for recipe in evidence:
        for claim in recipe.judgement.claims if recipe.judgement else ():
            if claim.variance is not None:
                variances[claim.metric, claim.design].append(claim.variance)
                dofs[claim.metric, claim.design].append(claim.dof)
    return {key: fit_prior(variances[key], dofs[key]) for key in variances}


def estimate_failure_rate(evidence: Sequence[RecipeEvidence]) -> float:
    """Estimate the probability that a run fails by accident, mostly from the fleet itself.

    Accidents are failures that went away in another attempt or a rerun, and those of a single run among
    several of its recipe. Recipes with more failures say nothing about accidents and are left out.
    """
    num_accidents, num_runs = 0, 0
    for recipe in evidence:
        if recipe.judgement is None:
            continue
        num_failed = len(recipe.judgement.failed_seeds)
        is_gone = recipe.rerun is not None and not recipe.rerun.failed_seeds
        is_single = num_failed == 1 < recipe.judgement.num_runs and recipe.rerun is None
        if num_failed == 0 or is_gone or is_single:
            num_accidents += num_failed + len(recipe.retried)
            num_runs += recipe.judgement.num_runs + len(recipe.retried) + recipe.num_rerun
    return (num_accidents + 0.5) / (num_runs + _PRIOR_RUNS)


def _make_row(
    recipe: RecipeEvidence, red_before: RedRecipes, chance: _Chance, adjusted_p: float | None
) -> FleetRow:
    judgement = recipe.judgement
    status, reason = "not judged", recipe.problem or ""
    if judgement is not None:
        was_red = (recipe.name, recipe.reference_sha256) in red_before
        status, reason = _decide_status(recipe, judgement, chance, adjusted_p, was_red=was_red)
    return FleetRow(
        name=recipe.name,
        status=status,
        reason=reason,
        verdict=judgement and judgement.verdict,
        is_red=judgement is not None and status != "flaked" and chance.is_red(judgement),
        p_value=chance.p_of(recipe),
        adjusted_p=adjusted_p,
        num_runs=judgement.num_runs if judgement else 0,
        num_rerun=recipe.num_rerun,
        rerun_verdict=recipe.rerun and recipe.rerun.verdict,
        reference_sha256=recipe.reference_sha256,
        report=judgement.report.as_posix() if judgement and judgement.report else None,
    )


def _decide_status(
    recipe: RecipeEvidence, judgement: Judgement, chance: _Chance, adjusted_p: float | None, *, was_red: bool
) -> tuple[Status, str]:
    cause, passes, is_red = chance.cause(judgement), chance.passes(judgement), chance.is_red(judgement)
    rerun, num_again = recipe.rerun, counted(recipe.num_rerun, "run")
    if judgement.reference_problem and not passes:
        problem = judgement.reference_problem
        return "red before", f"the reference itself is red: {problem}; make a new reference"
    if passes and recipe.retried:
        attempt, *earlier_runs = recipe.retried
        and_more = f", and {len(earlier_runs)} more" if earlier_runs else ""
        return "flaked", f"{attempt}{and_more}; every run finished in a later attempt and matches"
    if passes:
        return "green", f"red in the earlier fleet, and matches now: {cause}" if was_red else cause
    if is_red and rerun and chance.passes(rerun):
        return "flaked", f"gone on the rerun, which matches ({num_again}). At first: {cause}"
    if is_red and was_red:
        return "red before", f"red in the earlier fleet as well: {cause}"
    if not is_red:
        return ("not judged" if judgement.verdict == "INVALID" else "open"), cause
    if recipe.rerun_problem:
        return "open", f"{cause}. The rerun cannot be judged: {recipe.rerun_problem}"
    if rerun is None and judgement.num_runs == 1:
        return "open", f"one run shows no more than an accident could: {cause}; rerun it"
    if adjusted_p is None or adjusted_p > ALPHA:  # red by itself, but not called red in the fleet
        seeds = judgement.failed_seeds
        if not seeds:
            rate = 1.0 if adjusted_p is None else adjusted_p
            chance_text = f"chance among so many recipes could explain it (false discovery rate {rate:.2g})"
            return "open", f"red by itself, but {chance_text}: {cause}; rerun it with more seeds"
        repeated = ", some of them again on the rerun" if rerun else ""
        failed = f"{counted(judgement.num_runs, 'run')}, of which seed {listed(seeds)} failed{repeated}"
        remedy = f"rerun {plural(seeds, 'that seed')}"
        return "open", f"{failed}, as accidents in this fleet could: {cause}; {remedy}"
    if rerun and not chance.is_red(rerun):
        return "open", f"{cause}. The rerun decides nothing: {chance.cause(rerun)}; add seeds"
    repeated = f"red again on the rerun of {num_again}: " if rerun else ""
    # The change is for the better if all claims that moved are
    moved = [claim for claim in judgement.claims if abs(claim.difference or 0.0) > 1]
    is_other_evidence = judgement.failed_seeds or judgement.breaks_exact_rule
    if moved and not is_other_evidence and all(claim.better and claim.loss < 0 for claim in moved):
        repeated = (
            f"better than the reference, beyond the margin; make a new reference if that is meant. {repeated}"
        )
    return "regressed here", f"{repeated}{cause}"


# --- all recipes of a folder, and the files of the report ---


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
    fleet = classify(evidence, red_before, options.command)
    return fleet, options.output and _write_report(options.output, fleet)


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


def _write_report(output: Path, fleet: Fleet) -> Path:
    """Write page and JSON, and return the page."""
    page = output / FLEET_PAGE
    try:
        output.mkdir(parents=True, exist_ok=True)
        share_new_folder(output)
        write_file(page, _render_page(fleet).encode(), mode=PUBLIC_MODE)
        write_json(output / FLEET_FILE, asdict(fleet), mode=PUBLIC_MODE)
    except (OSError, StoreError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        problem = getattr(cause, "strerror", None) or str(cause)
        raise ComparisonError(
            f"--output: {output} cannot be written: {problem}; choose another folder"
        ) from None
    return page


def read_earlier(path: Path) -> RedRecipes:
    """Return the recipes that an earlier fleet showed to be red. Raises ComparisonError for another file."""
    path = path if is_file(path) else path / FLEET_FILE
    problem = f"not a fleet.json of schema_version {_SCHEMA_VERSION}" if is_file(path) else "no such file"
    try:
        content = read_json(path) if is_file(path) else {}
        if content.get("schema_version") == _SCHEMA_VERSION:
            return red_recipes(checked(Fleet, content, path).recipes)
    except StoreError as error:
        problem = str(error)
    raise ComparisonError(
        f"--before: {path}: {problem}; give the --output folder of an earlier abrun compare --fleet"
    )


def red_recipes(rows: Iterable[FleetRow]) -> RedRecipes:
    """Return the recipes that are red at the fleet's false discovery rate, or were red before."""
    return {
        (row.name, row.reference_sha256)
        for row in rows
        if row.status == "red before"
        or (row.is_red and row.adjusted_p is not None and row.adjusted_p <= ALPHA)
    }


# --- a fleet on the terminal and as a page ---


def _summarize(rows: Sequence[FleetRow], counts: Mapping[Status, int]) -> str:
    """Return the fleet in one sentence: how many recipes regressed here, and where all others stand."""
    names = [row.name for row in rows if row.status == "regressed here"]
    head = f"{len(names)} of {counted(rows, 'recipe')}" if names else "no recipe"
    other_rows = [
        f"{num} {_LOOKS[status].one if num == 1 else _LOOKS[status].several}"
        for status in (*reversed(STATUSES[1:-1]), "green")
        if (num := counts[status]) or status == "green"
    ]
    text = f"{head} regressed here; {', '.join(other_rows)}"
    num_more = len(names) - _MAX_NAMES
    named = ", ".join(names[:_MAX_NAMES] + [f"{num_more} more"] * (num_more > 0))
    return f"{text}. Look at {named}" if names else text


def _rule_text(fleet: Fleet) -> str:
    return (
        f"p: of the recipe alone. FDR: smallest false discovery rate at which it is red, over "
        f"{counted(fleet.num_tested, 'recipe')} not red before (Benjamini-Hochberg); red at {ALPHA:g}. "
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

    color = _LOOKS[fleet.recipes[0].status].color
    title = Text(f"Fleet of {counted(fleet.recipes, 'recipe')}", style=f"bold {color}")
    summary = Text(display_safe(fleet.summary))
    renderables: list[RenderableType] = [Panel(summary, title=title, title_align="left", border_style=color)]
    cells = [
        [row.name, Text(row.status, style=_LOOKS[row.status].color), *_numbers(row), row.reason]
        for row in fleet.recipes
        if row.status != "green"
    ]
    titles = ("recipe", "status", "runs", "p", "FDR", "why")
    table = Table(columns(*titles, no_wrap=("status", "runs", "p", "FDR"), fold=True), cells)
    renderables += [table.to_rich(padding=(0, 1))] if cells else []
    renderables.append(Text(display_safe(_rule_text(fleet)), style="dim"))
    renderables += [Text.assemble(("report  ", "bold"), page)] if page else []
    return Group(*renderables)


def _render_page(fleet: Fleet) -> str:
    """Return the HTML page: summary and a row for each recipe, with a link to its report."""
    title = f"Fleet of {counted(fleet.recipes, 'recipe')}"
    head = "".join(f"<th>{name}</th>" for name in _PAGE_COLUMNS)
    rows = "\n".join(map(_page_row, fleet.recipes))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table>"
    body = (
        f'<div class="banner {_TONES[fleet.exit_code]}"><h1>{title}</h1>\n'
        f'<p class="finding">{_escape(fleet.summary)}</p></div>\n'
        f'<section><h2>Recipes</h2><p class="intro">{_escape(_rule_text(fleet))}</p>\n'
        f'<div class="scroll stack">{table}</div>\n'
        f'<p class="caption">made by <code>{_escape(fleet.command)}</code></p></section>'
    )
    return render_static_page(f"{title}: {fleet.summary}", body)


def _page_row(row: FleetRow) -> str:
    name = _escape(row.name)
    if row.report:
        name = f'<a href="{html.escape(quote(row.report))}">{name}</a>'
    chip = f'<span class="chip {_LOOKS[row.status].page_class}">{row.status}</span>'
    cells = [name, chip, *map(_escape, (row.reason, *_numbers(row)))]
    labelled = zip(_PAGE_COLUMNS, cells, strict=True)  # a phone shows the labels
    return f"<tr>{''.join(f'<td data-label={name}>{cell}</td>' for name, cell in labelled)}</tr>"


def _escape(text: str) -> str:
    return html.escape(display_safe(text))
